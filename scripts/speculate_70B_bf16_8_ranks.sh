#!/usr/bin/env bash
# Llama-2-70B in bf16 on eight GPUs with Llama-2-7B in int4 as the draft model. Prepare both first:
#     for M in 7b 70b; do scripts/prepare.sh meta-llama/Llama-2-$M-chat-hf; done
#     python quantize.py --checkpoint_path checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth --mode int4
set -euo pipefail
cd "$(dirname "$0")/.."
ENABLE_INTRA_NODE_COMM=1 torchrun --standalone --nproc_per_node="${RANKS:-8}" generate.py --compile \
    --checkpoint_path checkpoints/meta-llama/Llama-2-70b-chat-hf/model.pth \
    --draft_checkpoint_path checkpoints/meta-llama/Llama-2-7b-chat-hf/model_int4.g32.pth "$@"
