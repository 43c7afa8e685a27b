"""Norms and scalings that a Llama does not have: LayerNorm, norms over heads, soft caps, clips.

    cfg = replace(cfg, norm=NormVariant(), logit_cap=LogitCap(30.0))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class WideNorm(nn.Module):
    """RMSNorm over all heads [..., N, H] as one vector (OLMo 2), in fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def mean_square(self, h):
        return h.square().mean(-1, keepdim=True)

    def forward(self, x):
        h = x.flatten(-2).float()
        h = h * torch.rsqrt(self.mean_square(h) + self.eps)
        return (h * self.weight).type_as(x).view_as(x)


class HeadLayerNorm(nn.Module):
    """LayerNorm without bias over each head [..., N, H], with weights per head (Command R+)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))   # [N H]

    def forward(self, x):
        h = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (h.flatten(-2) * self.weight).type_as(x).view_as(x)


HEAD_NORMS = {"wide": WideNorm, "layer": HeadLayerNorm}  # AttentionVariant.qk_norm: N H weights


class VectorNorm(nn.RMSNorm):
    """RMSNorm in fp32 of vectors other than the model's hidden states, as queries or latents."""

    def __init__(self, dim: int, eps: float, weighted: bool = True):
        super().__init__(dim, eps, elementwise_affine=weighted, dtype=torch.float32)

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class LayerNorm(nn.LayerNorm):
    """LayerNorm with bias (GPT-2), always computed in fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps, dtype=torch.float32)

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


@dataclass(frozen=True)
class NormVariant:
    """LayerNorm instead of RMSNorm over the model's width."""

    kind: str = "layer_norm"                       # name in a .pth

    def make(self, dim: int, eps: float) -> nn.Module:
        return LayerNorm(dim, eps)


class Scale(nn.Module):
    """Multiplies a branch's output by a constant (Granite)."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Clip(nn.Module):
    """Clamps to [-limit, limit] (OLMo)."""

    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return x.clamp(-self.limit, self.limit)


class SoftCap(nn.Module):
    """cap * tanh(x / cap), of scores or logits (Gemma 2)."""

    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return self.cap * torch.tanh(x / self.cap)


@dataclass(frozen=True)
class LogitCap:
    """Soft cap of the logits: cap * tanh(logit / cap)."""

    cap: float
    kind: str = "soft_cap"                         # name in a .pth

    def make(self) -> nn.Module:
        return SoftCap(self.cap)


# ---- Modules by config value: the identity if the value is unset ---------------------------------

def rescale(factor: float) -> nn.Module:
    return nn.Identity() if factor == 1 else Scale(factor)


def clip(limit: float | None) -> nn.Module:
    return Clip(limit) if limit else nn.Identity()


def value_norm(head_dim: int, eps: float) -> nn.Module:
    return VectorNorm(head_dim, eps, weighted=False)


def soft_cap(cap: float | None) -> nn.Module:
    return SoftCap(cap) if cap else nn.Identity()
