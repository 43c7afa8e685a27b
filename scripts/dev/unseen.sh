#!/usr/bin/env bash
# All rows of docs/quantization.md's "On texts that nobody calibrated on": create the originals and the
# GPTQ files in checkpoints/quality (existing files are kept), then measure; prints a JSON line for each
# row, and the seconds for each file and table:
#   bash scripts/dev/unseen.sh > benchmarks/unseen.jsonl && python scripts/dev/map.py --write
# Needs apt-get for the texts. Installs llama.cpp's quantizer into .venv-q.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash scripts/setup.sh requirements.txt gemma
if [ ! -f .venv-q/complete ]; then
  python3 -m venv .venv-q
  .venv-q/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
  touch .venv-q/complete
fi
export PATH="$PWD/.venv/bin:$PATH"
smol=checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf
gemma=checkpoints/gemma-3-270m/gemma-3-270m-q4_k_m.gguf
here=checkpoints/quality
mkdir -p $here

# make FILE COMMAND...: create FILE unless it exists
make() {
  local start=$SECONDS
  [ -f "$1" ] && return
  "${@:2}" --output "$1" >&2
  printf '{"file": "%s", "seconds": %d}\n' "$1" $((SECONDS - start))
}

gptq="python quantize.py --mode int4-gptq"
make $here/smol.g64.pth $gptq -m $smol --groupsize 64
make $here/gemma.g32.pth $gptq -m $gemma --groupsize 32
make $here/smol_dithered.pth python scripts/dev/dither.py -m $smol
make $here/gemma_dithered.pth python scripts/dev/dither.py -m $gemma
for name in smol:5.65 gemma:6.2; do
  original=$here/${name%:*}_dithered
  make $original.bits.pth $gptq -m $original.pth --groupsize 32 --bits ${name#*:}
done

python scripts/dev/unseen.py -m $smol int8 min-max-g64 int4-g64 $here/smol.g64.pth int4-g32
python scripts/dev/unseen.py -m $gemma int8 min-max-g32 int4-g32 $here/gemma.g32.pth
for original in $here/smol_dithered $here/gemma_dithered; do
  python scripts/dev/unseen.py -m $original.pth \
    Q4_K_M Q4_K_M+imatrix $original.bits.pth
done
