"""Gated DeltaNet (arXiv 2412.06464), which remembers in a matrix per head instead of all keys.

A layer that stands where Attention does (Qwen3-Next, Qwen3.5). Per token and head, with state S
[dk, dv] in fp32, decay g <= 0 and strength b in (0, 1):

    S *= exp(g);  d = (v - S' k) b;  S += k d';  y = S' q

Knows no family. Its state's slots are layers/recurrent.py's. A ModelConfig has it as

    mixer=(GatedDelta(16, 32, 128, 128),) * 3 + (None,)
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.part import IN, OUT, Part
from gpt_faster.layers.recurrent import StateRing, last_tokens

CHUNK = 64                                         # tokens whose updates are solved for at once
# What has a row or several for each head.
BY_HEADS = ("q", "k", "v", "conv_q", "conv_k", "conv_v", "beta", "decay", "decay_bias",
            "decay_rate")


@dataclass(frozen=True)
class GatedDelta(Part):
    """The layer's shape: each of the key heads serves n_v_head / n_k_head heads of values."""

    n_k_head: int
    n_v_head: int
    k_dim: int                                     # of a head
    v_dim: int
    n_tap: int = 4                                 # tokens that the convolution sees, itself too
    kind: str = "gated_delta"                      # what a .pth calls it

    split = {**dict.fromkeys(BY_HEADS, OUT), "gate": OUT, "wo": IN}    # whole heads

    def make(self, cfg, earlier=()) -> nn.Module:
        return DeltaNet(cfg.dim, self, cfg.norm_eps)

    def shard(self, n: int) -> "GatedDelta":
        """The layer of one of n ranks."""
        return replace(self, n_k_head=self.n_k_head // n, n_v_head=self.n_v_head // n)

    def sharded_widths(self) -> dict[str, int]:
        """What n ranks can only share evenly."""
        return {"number of DeltaNet key heads": self.n_k_head}

    def n_rows(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values."""
        keys = self.n_k_head * self.k_dim
        return keys, keys, self.n_v_head * self.v_dim


class DeltaNet(nn.Module):
    def __init__(self, dim: int, shape: GatedDelta, eps: float):
        super().__init__()
        self.shape, self.eps = shape, eps
        self.split = shape.n_rows()
        n_value, n_head, fp32 = self.split[2], shape.n_v_head, torch.float32
        self.qkv = nn.Linear(dim, sum(self.split), bias=False)
        self.gate = nn.Linear(dim, n_value, bias=False)
        self.rates = nn.Linear(dim, 2 * n_head, bias=False)    # strengths, then decays
        self.wo = nn.Linear(n_value, dim, bias=False)
        self.conv = nn.Parameter(torch.zeros(sum(self.split), shape.n_tap, dtype=fp32))
        self.decay_bias = nn.Parameter(torch.zeros(n_head, dtype=fp32))
        self.decay_rate = nn.Parameter(torch.zeros(n_head, dtype=fp32))    # -exp(A_log)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(shape.v_dim, dtype=fp32))
        self.cache = None                          # without one, a call begins from zeros

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """The same for any n_slot; batch_size 0 removes it."""
        heads = self.shape.n_v_head, self.shape.k_dim, self.shape.v_dim
        self.cache = None
        if batch_size:
            self.cache = StateRing(batch_size, max_rejected, heads, sum(self.split),
                                   self.shape.n_tap, dtype, device)

    def forward(self, x, rope, slot, mask, batch_idx=None):
        """slot: the positions; rope and mask are not looked at. Padding changes no state."""
        B, T, _ = x.shape
        pos = slot.expand(B, T)
        mixed = self.qkv(x)
        if self.cache is None:
            earlier = mixed.new_zeros(B, self.shape.n_tap - 1, mixed.shape[-1])
            state = mixed.new_zeros(B, *self.state_shape(), dtype=torch.float32)
        else:
            earlier, state = self.cache.read(pos, batch_idx)
        mixed = torch.cat((earlier, mixed), dim=1)                         # [B, n_tap - 1 + T, C]
        in_order = (pos == pos[:, :1] + torch.arange(T, device=x.device))[..., None]
        q, k, v = self.queries_keys_values(mixed)
        beta, g = self.rates(x).float().chunk(2, dim=-1)                   # [B, T, n_v_head]
        beta = torch.where(in_order, torch.sigmoid(beta), 0)
        g = torch.where(in_order, self.decay_rate * F.softplus(g + self.decay_bias), 0)
        if self.cache is None:
            y, _ = chunked(q, k, v, g, beta, state)
        else:
            y, states = self.scan(q, k, v, g, beta, state, in_order)
            self.cache.write(pos, in_order[..., 0].sum(-1), mixed, states, batch_idx)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.norm.weight
        y = y * F.silu(self.gate(x).float()).view_as(y)
        return self.wo(y.type_as(x).flatten(2))

    def state_shape(self) -> tuple[int, int, int]:
        return self.shape.n_v_head, self.shape.k_dim, self.shape.v_dim

    def queries_keys_values(self, mixed):
        """[B, n_tap - 1 + T, C] -> q, k [B, T, n_v_head, dk], v [B, T, n_v_head, dv], fp32."""
        T = mixed.shape[1] - self.shape.n_tap + 1
        y = 0
        for i, tap in enumerate(self.conv.unbind(-1)):
            y = y + mixed[:, i:i + T].float() * tap
        q, k, v = F.silu(y).split(self.split, dim=-1)
        q, k = (unit(t.unflatten(-1, (-1, self.shape.k_dim))) for t in (q, k))
        n_share = self.shape.n_v_head // self.shape.n_k_head
        if n_share > 1:
            q, k = q.repeat_interleave(n_share, dim=2), k.repeat_interleave(n_share, dim=2)
        return q * self.shape.k_dim**-0.5, k, v.unflatten(-1, (-1, self.shape.v_dim))

    def scan(self, q, k, v, g, beta, state, in_order):
        """-> y [B, T, n_v_head, dv], and the states after each of the row's last tokens.

        As many as the cache has slots: those go step by step, what is before them in chunks.
        """
        n, T = self.cache.n_slot, q.shape[1]
        if T <= n:
            return step_by_step(q, k, v, g, beta, state)
        n_token = in_order.sum(1)                                          # [B, 1]
        first = n_token - n                        # of the last; negative in a row that is shorter
        before = (torch.arange(T, device=q.device) < first)[..., None]     # [B, T, 1]
        y, state = chunked(q, k, v, torch.where(before, g, 0), torch.where(before, beta, 0), state)
        place = last_tokens(n_token, n)                                    # [B, n]
        last = [gather(t, place) for t in (q, k, v, g, beta)]
        exists = (place >= 0)[..., None]
        last[3:] = (torch.where(exists, t, 0) for t in last[3:])
        y_last, states = step_by_step(*last, state)
        place = torch.arange(T, device=q.device) - first                   # [B, T]
        place = torch.where(place < 0, place + first, T + place.clamp(max=n - 1))
        return gather(torch.cat((y, y_last), dim=1), place), states


def gather(t, place):
    """t [B, T, …] at place [B, n], 0 where that is negative -> [B, n, …]"""
    row = torch.arange(len(t), device=t.device)[:, None]
    return t[row, place.clamp(min=0)]


def unit(x):
    """Of length 1, as flash-linear-attention has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def step_by_step(q, k, v, g, beta, state):
    """q k [B, T, N, dk], v [B, T, N, dv], g beta [B, T, N], state [B, N, dk, dv], all of one dtype
    -> y [B, T, N, dv] and T states.
    """
    ys, states = [], []
    for i in range(q.shape[1]):
        key, query = k[:, i, ..., None], q[:, i, ..., None]                # [B, N, dk, 1]
        state = state * g[:, i].exp()[..., None, None]
        error = v[:, i] - (state * key).sum(-2)                            # [B, N, dv]
        state = state + key * (error * beta[:, i, :, None])[..., None, :]
        ys.append((state * query).sum(-2))
        states.append(state)
    return torch.stack(ys, dim=1), states


def chunked(q, k, v, g, beta, state):
    """The same for many tokens, a chunk at a time -> y [B, T, N, dv] and the last state.

    Within a chunk, with G the sum of g so far, the corrections d of all tokens i solve

        d_i + b_i sum over j < i of exp(G_i - G_j) (k_i . k_j) d_j  =  b_i (v_i - exp(G_i) S' k_i)
    """
    T = q.shape[1]
    C = min(CHUNK, T)

    def chunks(t):                                 # [B, T, N, …] -> [B, N, n, C, …]
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, -T % C))
        return t.unflatten(1, (-1, C)).movedim(3, 1)

    q, k, v, g, beta = (chunks(t) for t in (q, k, v, g, beta))
    total = g.cumsum(-1)                                                   # G [B, N, n, C]
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    apart = total[..., :, None] - total[..., None, :]
    apart = torch.where(causal, apart, -torch.inf).exp()                   # [B, N, n, C, C]
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT) * apart               # its diagonal counts as ones
    right = torch.cat((v * beta[..., None], k_beta * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    d_v, d_k = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT) * apart
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    decay = total[..., -1].exp()[..., None, None]                          # [B, N, n, 1, 1]
    ys = []
    for i in range(q.shape[2]):
        d = d_v[:, :, i] - d_k[:, :, i] @ state                            # [B, N, C, dv]
        ys.append(q[:, :, i] @ state + scores[:, :, i] @ d)
        state = state * decay[:, :, i] + k[:, :, i].mT @ d
    y = torch.stack(ys, dim=2).flatten(2, 3)[:, :, :T]
    return y.transpose(1, 2), state
