"""Attention variants: soft-capped scores (Gemma 2), sinks (gpt-oss), ALiBi (BLOOM), other scales,
norms, a gate, a clip.

    cfg = replace(cfg, attention=AttentionVariant(scale=0.125, cap=50.0))

Score functions have model.SDPA's signature. ScoredAttention computes the scores explicitly, for
variants that SDPA cannot express; without any of them it equals SDPA.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.norms import HEAD_NORMS, clip, soft_cap, value_norm
from gpt_faster.layers.part import OUT, Part
from model import SDPA, Attention, rotate


@dataclass(frozen=True)
class AttentionVariant(Part):
    """Options of attention, with scores = q k' * scale."""

    scale: float | None = None                     # None: head_dim ** -0.5
    qk_norm: str | None = None                     # before RoPE, a key of norms.HEAD_NORMS
    v_norm: bool = False                           # normalize values, without weights
    clip: float | None = None                      # clamp q, k and v to [-clip, clip] (OLMo)
    gate: bool = False                             # output * sigmoid(gate(x))
    softplus_gate: bool = False                    # output * softplus(gate(x)) instead (Laguna)
    cap: float | None = None                       # score -> cap * tanh(score / cap)
    sinks: bool = False                            # one extra learned score per head, without value
    alibi: bool = False                            # score - slope of the head * distance of the key
    gains: bool = False                            # learned weight per entry of rotated queries
    growth: float = 0.0                            # rotated queries are scaled by position:
    growth_from: int = 1                           # 1 + growth * log(1 + floor(pos / growth_from))
    kind: str = "attention_variant"                # name in a .pth

    @property
    def split(self) -> dict[str, int]:
        """Tensors that ranks shard, beyond a Llama's wq, wk, wv and wo."""
        norms = {"q_norm": OUT, "k_norm": OUT} if self.qk_norm else {}
        return {"gate": OUT, "attend.sinks": OUT, "attend.slopes": OUT, **norms}

    @property
    def norms_over_heads(self) -> tuple[str, ...]:
        """Norms over all heads as one vector: ranks all-reduce their mean_square."""
        return ("q_norm", "k_norm") if self.qk_norm == "wide" else ()

    def make(self, cfg, earlier=()) -> nn.Module:
        return VariantAttention(cfg, self)

    def attend(self, cfg, plain: nn.Module) -> nn.Module:
        """The score function of this variant; `plain` (with a .scale) if SDPA can compute it."""
        if self.cap or self.sinks or self.alibi:
            plain = ScoredAttention(plain.scale, cfg.n_head, self.cap, self.sinks, self.alibi)
        if self.gains or self.growth:
            plain = ScaledQueries(plain, self, cfg.head_dim)
        return plain


class VariantAttention(Attention):
    def __init__(self, cfg, variant: AttentionVariant):
        super().__init__(cfg)
        n, k, h = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.clip = clip(variant.clip)
        self.gate = nn.Linear(cfg.dim, n * h, bias=False) if variant.gate else None
        self.softplus_gate = variant.softplus_gate
        if variant.qk_norm:
            norm = HEAD_NORMS[variant.qk_norm]
            self.q_norm, self.k_norm = norm(n * h, cfg.norm_eps), norm(k * h, cfg.norm_eps)
        self.v_norm = value_norm(h, cfg.norm_eps) if variant.v_norm else nn.Identity()
        scale = self.attend.scale if variant.scale is None else variant.scale
        self.attend = variant.attend(cfg, SDPA(scale))

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        rope = trim_rope(rope, self.head_dim)
        q, k, v = self.clip(self.wqkv(x)).split(self.split, -1)
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in (q, k, v))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.cache is not None:
            k, v = self.cache(slot, k, v, mask.shape[-1], batch_idx)
        y = self.attend(q, k, v, mask).transpose(1, 2).reshape(B, T, -1)   # [B, T, N H]
        if self.softplus_gate:
            y = y * F.softplus(self.gate(x).float()).to(y.dtype)
        elif self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        return self.wo(y)


def trim_rope(rope, head_dim: int) -> list:
    """cos and sin [..., ≥ H / 2] cut to this layer's head_dim, which may vary between layers."""
    return [t[..., :head_dim // 2] for t in rope]


class ScaledQueries(nn.Module):
    """Scales rotated queries, per entry or by position, before attention.

    The position is the number of visible keys - 1, so layers with a window cannot use `growth`.
    """

    def __init__(self, attend: nn.Module, variant: AttentionVariant, head_dim: int):
        super().__init__()
        self.attend = attend
        self.growth, self.growth_from = variant.growth, variant.growth_from
        self.gain = None
        if variant.gains:
            self.gain = nn.Parameter(torch.ones(head_dim, dtype=torch.float32))

    def forward(self, q, k, v, mask):
        h = q.float()
        if self.gain is not None:
            h = h * self.gain
        if self.growth:
            pos = (mask.sum(-1) - 1).clamp(min=0)                          # [(B, 1,) T]
            log_pos = torch.log1p(torch.floor(pos / self.growth_from))
            h = h * (1 + self.growth * log_pos)[..., None]
        return self.attend(h.type_as(q), k, v, mask)


class ScoredAttention(nn.Module):
    """softmax(cap(q k' * scale)) v, with explicit scores.

    sinks: one extra score per head in the softmax, whose probability is discarded. alibi: subtracts
    slope * distance, with one slope per head.
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
        if self.slopes is not None:                # position = visible keys - 1: no window allowed
            pos = mask.sum(-1, keepdim=True) - 1
            distance = pos - torch.arange(mask.shape[-1], device=mask.device)
            slopes = self.slopes.view(score.shape[1], -1, 1, 1)
            score = score - slopes * distance.unsqueeze(-3)
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
