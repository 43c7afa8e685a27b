"""Attention where SDPA's own choice is slow: masks on a GPU.

None of its fused kernels but cuDNN's takes a mask and shared heads, so that all scores would be
written out; and cuDNN plans anew for each length of a prompt.
"""

import torch
from torch import nn

from gpt_faster.layers.attention import ScaledQueries, ScoredAttention
from gpt_faster.layers.latent import PaddedSDPA


class RepeatedHeads(nn.Module):
    """In place of model.SDPA on a GPU: queries that share keys have a copy each."""

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
    """On an NVIDIA GPU: have SDPA take a kernel that takes masks, and plans nothing. In place."""
    if model.freq.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        for layer in model.layers:
            owner = layer.attn
            if not hasattr(owner, "attend"):       # a layer of another kind
                continue
            if isinstance(owner.attend, ScaledQueries):
                owner = owner.attend
            if not isinstance(owner.attend, ScoredAttention | PaddedSDPA):
                owner.attend = RepeatedHeads(owner.attend)
    return model
