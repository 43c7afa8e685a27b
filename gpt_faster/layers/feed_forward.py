"""Activations other than a Llama's, and the feed-forward layer without a gate (GPT-2).

An activation is a function, or a module class if it has parameters (xIELU).

    cfg = replace(cfg, ffn=FeedForwardVariant("gelu", gated=False))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.part import Part
from model import FeedForward, swiglu


@dataclass(frozen=True)
class FeedForwardVariant(Part):
    """activation: a key of GATED for act(gate) * up, or of UNGATED for act(up)."""

    activation: str = "silu"
    gated: bool = True
    kind: str = "feed_forward"                     # name in a .pth

    def make(self, cfg, ffn_dim: int) -> nn.Module:
        if not self.gated:
            return UngatedFeedForward(cfg, ffn_dim, self.activation)
        ffn = FeedForward(cfg, ffn_dim)
        ffn.activation = GATED[self.activation]
        return ffn


def clamped_swiglu(gate, up):                      # gpt-oss: alpha 1.702, limit 7
    gate = gate.clamp(max=7.0)
    up = up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def gelu_tanh(up):
    return F.gelu(up, approximate="tanh")


def relu2(up):
    return F.relu(up).square()


def geglu_tanh(gate, up):
    return gelu_tanh(gate) * up


GATED = {"silu": swiglu, "clamped_silu": clamped_swiglu, "gelu_tanh": geglu_tanh}


class XIELU(nn.Module):
    """a x² + x / 2 for x > 0, else b (exp(x) - 1 - x) + x / 2 (arXiv 2411.13010)."""

    def __init__(self):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        self.alpha_n = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, up):
        x = up.float()
        above = F.softplus(self.alpha_p) * x * x
        below = (0.5 + F.softplus(self.alpha_n)) * (torch.expm1(x.clamp(max=-1e-6)) - x)
        return (torch.where(x > 0, above, below) + 0.5 * x).type_as(up)


UNGATED = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu, "relu2": relu2, "xielu": XIELU}


class UngatedFeedForward(nn.Module):
    """down(act(up(x)))"""

    def __init__(self, cfg, ffn_dim: int, activation: str):
        super().__init__()
        self.up = nn.Linear(cfg.dim, ffn_dim, bias=cfg.mlp_bias)
        self.down = nn.Linear(ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        activation = UNGATED[activation]
        self.activation = activation() if isinstance(activation, type) else activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def gated_activation(cfg):
    """The activation (gate, up) -> hidden of the model's dense layers."""
    return swiglu if cfg.ffn is None else GATED[cfg.ffn.activation]
