"""Masked attention on a GPU, where SDPA's default kernel is slow.

Only cuDNN's fused kernel takes both a mask and grouped heads (GQA); without it SDPA materializes
all scores. But cuDNN builds a new plan for each prompt length.
"""

import torch
from torch import nn

from gpt_faster.layers.attention import ScaledQueries, ScoredAttention
from gpt_faster.layers.latent import PaddedSDPA


class RepeatedHeads(nn.Module):
    """Replaces model.SDPA on a GPU: repeats keys and values for the queries that share them."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        self.plain = plain
        self.scale = plain.scale

    def forward(self, q, k, v, mask):
        n = q.shape[1] // k.shape[1]
        if n > 1 and q.shape[2] > 1:
            k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        return self.plain(q, k, v, mask)


def use_fused_attention(model: nn.Module) -> nn.Module:
    """Have SDPA use a fused kernel that takes masks without planning. NVIDIA only, in place."""
    if model.freq.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        for layer in model.layers:
            owner = layer.attn
            if not hasattr(owner, "attend"):       # no attention
                continue
            if isinstance(owner.attend, ScaledQueries):
                owner = owner.attend
            if not isinstance(owner.attend, ScoredAttention | PaddedSDPA):
                owner.attend = RepeatedHeads(owner.attend)
    return model
