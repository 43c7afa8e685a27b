"""Attention where SDPA's own choice is slow: one query of a compiled CPU step, and masks on a GPU.

On a CPU SDPA's fixed cost is half of a small model's token; plain sums become two loops over the
keys. On a GPU none of its fused kernels but cuDNN's takes a mask and shared heads, so that all
scores would be written out; and cuDNN plans anew for each length of a prompt.
"""

import torch
from torch import nn

from kernels.inductor import is_compiling
from layers.attention import ScoredAttention


class OneQueryAttention(nn.Module):
    """In place of model.SDPA or layers.ScoredAttention: the same, but for one compiled query."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        self.plain = plain
        self.written_out = None                    # not `plain` again: its sinks have one name
        if not isinstance(plain, ScoredAttention):
            self.written_out = ScoredAttention(plain.scale, n_head=0)

    def forward(self, q, k, v, mask):
        """q [B, N, T, H], k v [B, K, S, H], mask [(B, 1,) T, S] -> [B, N, T, H]."""
        if not is_compiling() or q.shape[2] > 1 or q.device.type != "cpu":
            return self.plain(q, k, v, mask)
        q = q.unflatten(1, (k.shape[1], -1))                               # [B, K, N/K, 1, H]
        scored = self.written_out or self.plain
        prob = scored.probabilities(sums(q, k.mT), mask)              # [B, K, N/K, 1, S]
        return sums(prob, v).to(v.dtype).flatten(1, 2)


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
            if not isinstance(layer.attn.attend, ScoredAttention):
                layer.attn.attend = RepeatedHeads(layer.attn.attend)
    return model


def sums(a, b):
    """[B, K, N/K, 1, I] @ [B, K, I, J] -> [B, K, N/K, 1, J], fp32, written out."""
    return (a.mT.float() * b[:, :, None].float()).sum(-2, keepdim=True)
