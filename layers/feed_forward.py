"""Activations, and the feed-forward layer without a gate (GPT-2)."""

import torch
import torch.nn.functional as F
from torch import nn


def swiglu(gate, up):
    return F.silu(gate) * up


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
UNGATED = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}


class UngatedFeedForward(nn.Module):
    """down(act(up(x)))"""

    def __init__(self, cfg, ffn_dim: int):
        super().__init__()
        self.up = nn.Linear(cfg.dim, ffn_dim, bias=cfg.mlp_bias)
        self.down = nn.Linear(ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        self.activation = UNGATED[cfg.activation]

    def forward(self, x):
        return self.down(self.activation(self.up(x)))
