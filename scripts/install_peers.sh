#!/usr/bin/env bash
# Makes .venv-peers, the environment of benchmark.py's --peers: llama.cpp (the wheel xllamacpp) and
# transformers, with torch and gguf as pinned for ours. What is there already is kept:
#   bash scripts/install_peers.sh
# vLLM is not among them: it brings a torch of its own and needs an NVIDIA GPU. If you want it:
#   .venv-peers/bin/python -m pip install vllm
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

if [ ! -x .venv-peers/bin/python ]; then
  python=$(command -v python3 || command -v python) || die "no python3: install Python 3.10 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || die "$("$python" --version) is too old: Python 3.10 or newer is needed"
  say "Making .venv-peers"
  "$python" -m venv .venv-peers || { rm -rf .venv-peers; die "no venv module: apt-get install python3-venv"; }
fi

mapfile -t packages < <(grep -hE '^(torch|gguf|transformers|accelerate|sentencepiece)==' requirements*.txt)
packages+=(xllamacpp==2026.10.11549)
stamp=.venv-peers/installed
if ! printf '%s\n' "${packages[@]}" | cmp -s - "$stamp"; then
  say "Installing ${packages[*]} into .venv-peers (torch is large: this takes a few minutes)"
  .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check "${packages[@]}" \
    || die "pip failed: xllamacpp has wheels for Linux, macOS and Windows, see pypi.org/project/xllamacpp"
  printf '%s\n' "${packages[@]}" > "$stamp"
fi
say "Ready: .venv-peers, for benchmark.py --peers transformers,transformers-compile,llama.cpp"
