#!/usr/bin/env bash
# CodeLlama-34B in bf16 with CodeLlama-7B in int4 as the draft model. Prepare both first:
#     for M in 7b 34b; do scripts/prepare.sh codellama/CodeLlama-$M-Python-hf; done
#     python quantize.py --checkpoint_path checkpoints/codellama/CodeLlama-7b-Python-hf/model.pth --mode int4
set -euo pipefail
cd "$(dirname "$0")/.."
python generate.py --compile --checkpoint_path checkpoints/codellama/CodeLlama-34b-Python-hf/model.pth \
    --draft_checkpoint_path checkpoints/codellama/CodeLlama-7b-Python-hf/model_int4.g32.pth \
    --prompt "def quicksort(arr):" --max_new_tokens 200 --temperature 0 "$@"
