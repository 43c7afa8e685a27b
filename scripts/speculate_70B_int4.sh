#!/usr/bin/env bash
# Llama-2-70B in int4 with Llama-2-7B in int4 as the draft model. Prepare both first:
#     for M in 7b 70b; do scripts/prepare.sh meta-llama/Llama-2-$M-chat-hf; done
#     for M in 7b 70b; do python quantize.py --checkpoint_path checkpoints/meta-llama/Llama-2-$M-chat-hf/model.pth --mode int4; done
set -euo pipefail
cd "$(dirname "$0")/.."
python generate.py --compile --checkpoint_path checkpoints/meta-llama/Llama-2-70b-chat-hf/model_int4.g32.pth \
    --draft_checkpoint_path checkpoints/meta-llama/Llama-2-7b-chat-hf/model_int4.g32.pth "$@"
