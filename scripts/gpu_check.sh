#!/usr/bin/env bash
# All that wants an NVIDIA GPU: is it right (scripts/gpu_check.py), and how fast is it, into
# benchmarks/GPU.json:
#   bash scripts/gpu_check.sh ["tables of benchmark.py --suite gpu, with commas"]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" scripts/gpu_check.py
"$python" benchmark.py --suite gpu --only "${1:-Llama-3.2-1B,Llama-3.1-8B}"
