"""Mamba 1 (arXiv 2312.00752): a selective scan, with a state vector and decays for each channel.

Replaces Attention in all layers (Mamba, Falcon Mamba) or in most (Jamba). In the words of linear
attention, as in layers/mamba.py, with state S [I, dk] in fp32 and rates A < 0 of the same shape:

    d = softplus(step(low) + bias);  S = exp(d A) S + (d v) k';  y = S q + skip v

The papers call q, k, v, d: C, B, x, Δt. One projection of v, after the convolution, makes low, k
and q. Each entry of the state has a decay of its own, so a chunk is no matrix product: see Mamba 2.

    mixer=(Mamba1(width=1536, state_dim=16, step_rank=48),)
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.part import Part
from gpt_faster.layers.recurrent import StateRing, convolve, scan, start
from model import RMSNorm

CHUNK = 16                                         # tokens whose decays are in memory at a time


@dataclass(frozen=True)
class Mamba1(Part):
    """The layer's shape."""

    width: int                                     # channels
    state_dim: int                                 # width of q and k
    step_rank: int                                 # of the projection that makes d
    n_tap: int = 4                                 # kernel size of the causal convolution
    bias: bool = False                             # of the projections
    conv_bias: bool = True
    norm: bool = False                             # normalize q, k and low (Falcon Mamba, Jamba)
    norm_eps: float | None = None                  # None: the model's
    kind: str = "mamba1"                           # name in a .pth

    def make(self, cfg, earlier=()) -> nn.Module:
        return SelectiveScan(cfg.dim, self, self.norm_eps or cfg.norm_eps)

    def sharded_widths(self) -> dict[str, int]:
        """No rank has a part of it: all channels make q and k."""
        return {"Mamba 1 layer, which is not split,": 1}

    def n_rows(self) -> tuple[int, int, int]:
        """Output widths of low, k and q."""
        return self.step_rank, self.state_dim, self.state_dim


class SelectiveScan(nn.Module):
    def __init__(self, dim: int, shape: Mamba1, eps: float):
        super().__init__()
        self.shape = shape
        self.split = shape.n_rows()
        width, fp32 = shape.width, torch.float32
        self.v = nn.Linear(dim, width, bias=shape.bias)
        self.gate = nn.Linear(dim, width, bias=shape.bias)
        self.select = nn.Linear(width, sum(self.split), bias=False)
        self.step = nn.Linear(shape.step_rank, width, bias=False)
        self.wo = nn.Linear(width, dim, bias=shape.bias)
        self.taps = nn.Parameter(torch.zeros(width, shape.n_tap, dtype=fp32))
        self.taps_bias = nn.Parameter(torch.zeros(width, dtype=fp32)) if shape.conv_bias else None
        self.decay_bias = nn.Parameter(torch.zeros(width, dtype=fp32))
        self.decay_rate = nn.Parameter(torch.zeros(width, shape.state_dim, dtype=fp32))
        self.skip = nn.Parameter(torch.ones(width, dtype=fp32))
        self.norm_low, self.norm_k, self.norm_q = (
            RMSNorm(n, eps) if shape.norm else nn.Identity() for n in self.split)
        self.cache = None                          # without a cache, each call starts from zeros

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """Allocate states, independent of n_slot; batch_size 0 removes them."""
        self.cache = None
        if batch_size:
            self.cache = StateRing(batch_size, max_rejected, self.state_shape(), self.shape.width,
                                   self.shape.n_tap, dtype, device)

    def state_shape(self) -> tuple[int, int]:
        return self.shape.width, self.shape.state_dim

    def forward(self, x, rope, slot, mask, batch_idx=None):
        """slot: the positions. rope and mask are unused. Padding leaves the state unchanged."""
        pos = slot.expand(x.shape[:2])
        mixed, state, in_order = start(self.cache, self.v(x), pos, batch_idx, self.shape.n_tap,
                                       self.state_shape())
        v = F.silu(convolve(mixed, self.taps, self.taps_bias))             # [B, T, I], fp32
        low, k, q = self.select(v.type_as(x)).split(self.split, -1)
        step = self.step(self.norm_low(low)).float()                       # [B, T, I]
        step = torch.where(in_order, F.softplus(step + self.decay_bias), 0)
        inputs = self.norm_q(q).float(), self.norm_k(k).float(), v, step
        forms = partial(step_by_step, self.decay_rate), partial(chunked, self.decay_rate)
        if self.cache is None:
            y, _ = forms[1](*inputs, state)
        else:
            y, states = scan(*forms, inputs, 1, state, in_order, self.cache.n_slot)
            self.cache.write(pos, in_order[..., 0].sum(-1), mixed, states, batch_idx)
        y = (y + self.skip * v) * F.silu(self.gate(x).float())
        return self.wo(y.type_as(x))


def step_by_step(rate, q, k, v, step, state):
    """rate [I, dk], q k [B, T, dk], v step [B, T, I], state [B, I, dk] -> y [B, T, I] and T
    states."""
    decay = (step[..., None] * rate).exp()                                 # [B, T, I, dk]
    added = (step * v)[..., None] * k[:, :, None]
    states = []
    for i in range(q.shape[1]):
        state = torch.addcmul(added[:, i], decay[:, i], state)
        states.append(state)
    y = torch.stack(states, dim=1) @ q[..., None]
    return y[..., 0], states


def chunked(rate, q, k, v, step, state):
    """step_by_step() in chunks, to bound memory -> y [B, T, I] and the last state."""
    ys = []
    for chunk in zip(*(t.split(CHUNK, dim=1) for t in (q, k, v, step))):
        y, states = step_by_step(rate, *chunk, state)
        state = states[-1]
        ys.append(y)
    return torch.cat(ys, dim=1), state
