#!/usr/bin/env bash
# Check results on an NVIDIA GPU (scripts/gpu_check.py), then benchmark it into benchmarks/GPU.json:
#   bash scripts/gpu_check.sh ["comma-separated tables of benchmark.py --suite gpu"]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" scripts/gpu_check.py
"$python" benchmark.py --suite gpu --only "${1:-Llama-3.2-1B,Llama-3.1-8B}"
