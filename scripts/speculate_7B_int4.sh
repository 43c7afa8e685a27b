#!/usr/bin/env bash
# Llama-2-7B in int4 with TinyLlama in int8 as the draft model. Prepare both first:
#     scripts/prepare.sh meta-llama/Llama-2-7b-chat-hf; scripts/prepare.sh TinyLlama/TinyLlama-1.1B-Chat-v1.0
#     python quantize.py --checkpoint_path checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth --mode int4
set -euo pipefail
cd "$(dirname "$0")/.."
python generate.py --compile --checkpoint_path checkpoints/meta-llama/Llama-2-7b-chat-hf/model_int4.g32.pth \
    --draft_checkpoint_path checkpoints/TinyLlama/TinyLlama-1.1B-Chat-v1.0/model_int8.pth "$@"
