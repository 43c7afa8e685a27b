"""Attention by its scores, for what SDPA hides: a cap (Gemma 2), sinks (gpt-oss), ALiBi (BLOOM).

Each is called as model.SDPA is. ScoredAttention without any of these is plain attention, written
out.
"""

from dataclasses import dataclass

import torch
from torch import nn

from layers.norms import soft_cap


@dataclass(frozen=True)
class Scores:
    """What becomes of q k' scale before and in the softmax, where it is not simply taken."""

    cap: float | None = None                       # they end at cap * tanh(score / cap)
    sinks: bool = False                            # a learned score per head that no key has
    alibi: bool = False                            # less by the key's distance times a head's slope
    gains: bool = False                            # each entry of q and k has a learned weight
    growth: float = 0.0                            # a query's are scaled by its position:
    growth_from: int = 1                           # 1 + growth * log(1 + floor(pos / growth_from))


def attention(cfg, plain: nn.Module) -> nn.Module:
    """`plain`, or what takes its place where a config's scores are not plain ones."""
    scores = cfg.scores
    if scores.cap or scores.sinks or scores.alibi:
        plain = ScoredAttention(plain.scale, cfg.n_head, scores.cap, scores.sinks, scores.alibi)
    if scores.gains or scores.growth:
        plain = ScaledQueries(plain, cfg)
    return plain


class ScaledQueries(nn.Module):
    """Attention whose queries, turned by RoPE, are scaled first: by entry, or by position.

    Without a window, which hides some keys, the keys that a query sees are as many as its position
    says.
    """

    def __init__(self, attend: nn.Module, cfg):
        super().__init__()
        self.attend = attend
        self.growth, self.growth_from = cfg.scores.growth, cfg.scores.growth_from
        self.gain = None
        if cfg.scores.gains:
            self.gain = nn.Parameter(torch.ones(cfg.head_dim, dtype=torch.float32))

    def forward(self, q, k, v, mask):
        h = q.float()
        if self.gain is not None:
            h = h * self.gain
        if self.growth:
            pos = (mask.sum(-1) - 1).clamp(min=0)                          # [(B, 1,) T]
            times = torch.log1p(torch.floor(pos / self.growth_from))
            h = h * (1 + self.growth * times)[..., None]
        return self.attend(h.type_as(q), k, v, mask)


class ScoredAttention(nn.Module):
    """softmax(cap(q k' scale)) v; sinks: one more score per head, whose share is thrown away;
    alibi: keys count less the farther away they are, by a slope for each head.
    """

    def __init__(self, scale: float, n_head: int, cap: float | None = None, sinks: bool = False,
                 alibi: bool = False):
        super().__init__()
        self.scale = scale
        self.cap = soft_cap(cap)
        self.sinks = None
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(n_head, dtype=torch.float32))
        self.slopes = None
        if alibi:
            self.slopes = nn.Parameter(torch.zeros(n_head, dtype=torch.float32))

    def probabilities(self, score, mask):
        """score fp32 [B, K, N/K, T, S], mask [(B, 1,) T, S] -> probabilities of that shape."""
        score = self.cap(score * self.scale)
        if self.slopes is not None:                # a query sees all keys to itself: no window
            away = mask.sum(-1, keepdim=True) - 1 - torch.arange(mask.shape[-1], device=mask.device)
            slopes = self.slopes.view(score.shape[1], -1, 1, 1)
            score = score - slopes * away.unsqueeze(-3)
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
