"""Mamba-2 (arXiv 2405.21060): a linear recurrence with a matrix-valued state per head.

Replaces Attention in some layers (Granite 4 H, Bamba, Nemotron-H), or adds to it (Falcon-H1). In
the words of linear attention, which the names below use, with state S [dk, dv] in fp32, log decay
g <= 0 and step size d > 0 per token and head:

    d = softplus(decay + bias);  g = decay_rate d;  S = exp(g) S + k (d v)';  y = S' q + skip v

The papers call q, k, v, d: C, B, x, Δt. All heads of a group share q and k. layers/recurrent.py
stores the states. In a ModelConfig:

    mixer=(Mamba2(n_head=48, head_dim=64, n_group=1, state_dim=128),) * 3 + (None,)
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.part import IN, OUT, Part
from gpt_faster.layers.recurrent import StateRing, convolve, scan, start
from model import Attention

CHUNK = 64                                         # tokens per chunk in chunked()
# Tensors with one or more rows per head, and with rows per group.
PER_HEAD_TENSORS = ("v", "gate", "decay", "conv_v", "conv_bias_v", "decay_bias", "decay_rate",
                    "skip", "norm")
PER_GROUP_TENSORS = ("q", "k", "conv_q", "conv_k", "conv_bias_q", "conv_bias_k")


@dataclass(frozen=True)
class Mamba2(Part):
    """The layer's shape. n_head / n_group heads share q and k."""

    n_head: int
    head_dim: int
    n_group: int
    state_dim: int                                 # width of q and k
    n_tap: int = 4                                 # kernel size of the causal convolution
    bias: bool = False                             # of the projections
    conv_bias: bool = True
    norm: bool = True                              # normalize the output over each group's heads
    norm_first: bool = False                       # before the gate, not after it (Falcon-H1)
    min_step: float = 0.0                          # bounds of d
    max_step: float = math.inf
    norm_eps: float | None = None                  # None: the model's
    norm_over_ranks: bool = False                  # the group's heads are on several ranks
    kind: str = "mamba2"                           # name in a .pth

    @property
    def split(self) -> dict[str, int]:
        """Whole heads and groups; every rank has a copy of a single group's q and k."""
        groups = {} if self.n_group == 1 else dict.fromkeys(PER_GROUP_TENSORS, OUT)
        return {**dict.fromkeys(PER_HEAD_TENSORS, OUT), **groups, "wo": IN}

    @property
    def norms_over_heads(self) -> tuple[str, ...]:
        """Norms over heads of several ranks, which all-reduce their mean_square."""
        return ("norm",) if self.norm_over_ranks else ()

    def make(self, cfg, earlier=()) -> nn.Module:
        return Mamba(cfg.dim, self, self.norm_eps or cfg.norm_eps)

    def shard(self, n: int) -> "Mamba2":
        """The layer of one of n ranks."""
        return replace(self, n_head=self.n_head // n, n_group=max(1, self.n_group // n),
                       norm_over_ranks=self.norm and self.n_group == 1)

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide."""
        groups = {"number of Mamba groups": self.n_group} if self.n_group > 1 else {}
        return {"number of Mamba heads": self.n_head, **groups}

    def n_rows(self) -> tuple[int, int, int]:
        """Output widths of q, k and v."""
        keys = self.n_group * self.state_dim
        return keys, keys, self.n_head * self.head_dim


class GroupNorm(nn.Module):
    """RMSNorm of fp32 [..., n_group, W], with a weight for each of all channels."""

    def __init__(self, n_group: int, width: int, eps: float):
        super().__init__()
        self.n_group, self.eps = n_group, eps
        self.weight = nn.Parameter(torch.ones(n_group * width, dtype=torch.float32))

    def mean_square(self, h):
        return h.square().mean(-1, keepdim=True)

    def forward(self, x):
        h = x.unflatten(-1, (self.n_group, -1))
        h = h * torch.rsqrt(self.mean_square(h) + self.eps)
        return h.flatten(-2) * self.weight


class Mamba(nn.Module):
    def __init__(self, dim: int, shape: Mamba2, eps: float):
        super().__init__()
        self.shape = shape
        self.split = shape.n_rows()
        width, n_head, fp32 = self.split[2], shape.n_head, torch.float32
        self.qkv = nn.Linear(dim, sum(self.split), bias=shape.bias)
        self.gate = nn.Linear(dim, width, bias=shape.bias)
        self.decay = nn.Linear(dim, n_head, bias=shape.bias)
        self.wo = nn.Linear(width, dim, bias=shape.bias)
        self.conv = nn.Parameter(torch.zeros(sum(self.split), shape.n_tap, dtype=fp32))
        self.conv_bias = None
        if shape.conv_bias:
            self.conv_bias = nn.Parameter(torch.zeros(sum(self.split), dtype=fp32))
        self.decay_bias = nn.Parameter(torch.zeros(n_head, dtype=fp32))
        self.decay_rate = nn.Parameter(torch.zeros(n_head, dtype=fp32))    # -exp(A_log)
        self.skip = nn.Parameter(torch.ones(n_head, dtype=fp32))
        self.norm = nn.Identity()
        if shape.norm:
            self.norm = GroupNorm(shape.n_group, width // shape.n_group, eps)
        self.cache = None                          # without a cache, each call starts from zeros

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """Allocate states, independent of n_slot; batch_size 0 removes them."""
        self.cache = None
        if batch_size:
            self.cache = StateRing(batch_size, max_rejected, self.state_shape(), sum(self.split),
                                   self.shape.n_tap, dtype, device)

    def state_shape(self) -> tuple[int, int, int]:
        return self.shape.n_head, self.shape.state_dim, self.shape.head_dim

    def forward(self, x, rope, slot, mask, batch_idx=None):
        """slot: the positions. rope and mask are unused. Padding leaves the state unchanged."""
        pos = slot.expand(x.shape[:2])
        mixed, state, in_order = start(self.cache, self.qkv(x), pos, batch_idx, self.shape.n_tap,
                                       self.state_shape())
        q, k, v = self.queries_keys_values(mixed)
        step = F.softplus(self.decay(x).float() + self.decay_bias)         # [B, T, N]
        step = step.clamp(self.shape.min_step, self.shape.max_step)
        step = torch.where(in_order, step, 0)
        inputs = q, k, v * step[..., None], self.decay_rate * step
        if self.cache is None:
            y, _ = chunked(*inputs, state)
        else:
            y, states = scan(step_by_step, chunked, inputs, 2, state, in_order, self.cache.n_slot)
            self.cache.write(pos, in_order[..., 0].sum(-1), mixed, states, batch_idx)
        y = (y + self.skip[:, None] * v).flatten(2)                        # [B, T, N dv]
        gate = F.silu(self.gate(x).float())
        y = self.norm(y) * gate if self.shape.norm_first else self.norm(y * gate)
        return self.wo(y.type_as(x))

    def queries_keys_values(self, mixed):
        """[B, n_tap - 1 + T, C] -> q, k [B, T, G, dk], v [B, T, N, dv], fp32."""
        q, k, v = F.silu(convolve(mixed, self.conv, self.conv_bias)).split(self.split, dim=-1)
        q, k = (t.unflatten(-1, (self.shape.n_group, -1)) for t in (q, k))
        return q, k, v.unflatten(-1, (self.shape.n_head, -1))


def step_by_step(q, k, v, g, state):
    """One token at a time. q k [B, T, G, dk], v [B, T, N, dv] times the step size, g [B, T, N],
    state [B, N, dk, dv] -> y [B, T, N, dv] and T states."""
    n_share = v.shape[2] // q.shape[2]
    ys, states = [], []
    for i in range(q.shape[1]):
        key, query = (t[:, i, ..., None].repeat_interleave(n_share, 1) for t in (k, q))
        state = state * g[:, i].exp()[..., None, None] + key * v[:, i, :, None]
        ys.append((state * query).sum(-2))
        states.append(state)
    return torch.stack(ys, dim=1), states


def chunked(q, k, v, g, state):
    """The chunkwise-parallel form of step_by_step() -> y [B, T, N, dv] and the last state.

    Within a chunk, with D the cumulative sum of g, and S the state before the chunk:

        y_i = exp(D_i) S' q_i  +  sum over j <= i of exp(D_i - D_j) (q_i . k_j) v_j
    """
    n_share = v.shape[2] // q.shape[2]
    ys, chunks = [], zip(*(t.split(CHUNK, dim=1) for t in (q, k, v, g)))
    for q, k, v, g in chunks:
        total = g.cumsum(1).transpose(1, 2)                                # D [B, N, C]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                   # [B, heads, C, …]
        causal = torch.ones(*total.shape[-1:] * 2, dtype=torch.bool, device=q.device).tril()
        decay = total[..., :, None] - total[..., None, :]
        decay = torch.where(causal, decay, -torch.inf).exp()               # [B, N, C, C]
        scores = (q @ k.mT).repeat_interleave(n_share, 1) * decay
        q, k = (t.repeat_interleave(n_share, 1) for t in (q, k))
        y = scores @ v + total.exp()[..., None] * (q @ state)
        to_end = (total[..., -1:] - total).exp()[..., None]
        state = total[..., -1].exp()[..., None, None] * state + k.mT @ (v * to_end)
        ys.append(y.transpose(1, 2))
    return torch.cat(ys, dim=1), state


# ---- Attention and Mamba side by side ------------------------------------------------------------

@dataclass(frozen=True)
class AttentionAndMamba(Part):
    """Attention plus a Mamba layer with the same input (Falcon-H1)."""

    mamba: Mamba2
    kind: str = "attention_and_mamba"              # name in a .pth

    @property
    def split(self) -> dict[str, int]:
        return {f"mamba.{name}": axis for name, axis in self.mamba.split.items()}

    @property
    def norms_over_heads(self) -> tuple[str, ...]:
        return tuple(f"mamba.{name}" for name in self.mamba.norms_over_heads)

    def make(self, cfg, earlier=()) -> nn.Module:
        return AttentionWithMamba(cfg, self.mamba.make(cfg))

    def shard(self, n: int) -> "AttentionAndMamba":
        """The layers of one of n ranks."""
        return replace(self, mamba=self.mamba.shard(n))

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide."""
        return self.mamba.sharded_widths()


class AttentionWithMamba(Attention):
    def __init__(self, cfg, mamba: Mamba):
        super().__init__(cfg)
        self.mamba = mamba

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """Allocate n_slot positions, and the Mamba layer's states; batch_size 0 removes both."""
        super().setup_cache(batch_size, n_slot, dtype, device)
        self.mamba.setup_cache(batch_size, n_slot, dtype, device, max_rejected)

    def forward(self, x, *inputs):
        return super().forward(x, *inputs) + self.mamba(x, *inputs)
