"""Attention by its scores, for what SDPA hides: a cap on scores (Gemma 2), sinks (gpt-oss).

It is called as model.SDPA is. Without cap and sinks it is plain attention, written out.
"""

from dataclasses import dataclass

import torch
from torch import nn

from layers.norms import SoftCap


@dataclass(frozen=True)
class Scores:
    """What becomes of q k' scale before and in the softmax, where it is not simply taken."""

    cap: float | None = None                       # they end at cap * tanh(score / cap)
    sinks: bool = False                            # a learned score per head that no key has


def attention(cfg, plain: nn.Module) -> nn.Module:
    """`plain`, or what takes its place where a config's scores are not plain ones."""
    scores = cfg.scores
    if scores.cap or scores.sinks:
        return ScoredAttention(plain.scale, cfg.n_head, scores.cap, scores.sinks)
    return plain


class ScoredAttention(nn.Module):
    """softmax(cap(q k' scale)) v; sinks: one more score per head, whose share is thrown away."""

    def __init__(self, scale: float, n_head: int, cap: float | None = None, sinks: bool = False):
        super().__init__()
        self.scale = scale
        self.cap = SoftCap(cap) if cap else nn.Identity()
        self.sinks = None
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(n_head, dtype=torch.float32))

    def probabilities(self, score, mask):
        """score fp32 [B, K, N/K, T, S], mask [(B, 1,) T, S] -> probabilities of that shape."""
        score = self.cap(score * self.scale)
        score = torch.where(mask.unsqueeze(-3), score, -torch.inf)
        if self.sinks is None:
            return score.softmax(-1)
        sink = self.sinks.view(score.shape[1], -1, 1, 1)
        top = torch.maximum(score.amax(-1, keepdim=True), sink)
        share = (score - top).exp()
        return share / (share.sum(-1, keepdim=True) + (sink - top).exp())

    def forward(self, q, k, v, mask):
        """q [B, N, T, H], k v [B, K, S, H], mask [(B, 1,) T, S] -> [B, N, T, H]."""
        q = q.unflatten(1, (k.shape[1], -1))                               # [B, K, N/K, T, H]
        prob = self.probabilities(grouped_product(q, k.mT), mask)          # [B, K, N/K, T, S]
        return grouped_product(prob, v).to(v.dtype).flatten(1, 2)


def grouped_product(a, b):
    """[B, K, N/K, T, I] @ [B, K, I, J] -> [B, K, N/K, T, J], fp32."""
    return (a.flatten(2, 3).to(b.dtype) @ b).unflatten(2, a.shape[2:4]).float()
