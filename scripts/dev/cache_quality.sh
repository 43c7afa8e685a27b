#!/usr/bin/env bash
# The table of docs/quantization.md's "The KV cache": perplexity and KL divergence of caches of 8 and 4
# bits. An hour on 2 cores:
#   bash scripts/dev/cache_quality.sh > benchmarks/kv_cache.jsonl && python scripts/dev/map.py --write
# Needs apt-get for the texts.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash scripts/setup.sh requirements.txt gemma
export PATH="$PWD/.venv/bin:$PATH"
smol=checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf
gemma=checkpoints/gemma-3-270m/gemma-3-270m-q4_k_m.gguf
for model in $smol $gemma; do
  python scripts/dev/cache_quality.py --compile -m $model --window 512 \
    bfloat16 int8 int8:plain fp8 fp8:plain int8/int4 int4 int4:plain
  python scripts/dev/cache_quality.py --compile -m $model --window 4096 bfloat16 int8 fp8 int8/int4 int4
done
