"""Gated DeltaNet (arXiv 2412.06464): linear attention with a matrix-valued state per head.

Replaces Attention in some layers (Qwen3-Next, Qwen3.5). Per token and head, with state S [dk, dv]
in fp32, log decay g <= 0 and update rate b (beta) in (0, 1):

    S *= exp(g);  d = (v - S' k) b;  S += k d';  y = S' q

layers/recurrent.py stores the states. In a ModelConfig:

    mixer=(GatedDelta(16, 32, 128, 128),) * 3 + (None,)
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.part import IN, OUT, Part
from gpt_faster.layers.recurrent import StateRing, convolve, scan, start

CHUNK = 64                                         # tokens per chunk in chunked()
# Tensors with one or more rows per head.
PER_HEAD_TENSORS = ("q", "k", "v", "conv_q", "conv_k", "conv_v", "beta", "decay", "decay_bias",
                    "decay_rate")


@dataclass(frozen=True)
class GatedDelta(Part):
    """The layer's shape. n_v_head / n_k_head value heads share a key head."""

    n_k_head: int
    n_v_head: int
    k_dim: int                                     # per head
    v_dim: int
    n_tap: int = 4                                 # kernel size of the causal convolution
    beta_scale: float = 1.0                        # 2: eigenvalues from -1 to 1 (OLMo Hybrid)
    norm_eps: float | None = None                  # None: the model's
    kind: str = "gated_delta"                      # name in a .pth

    split = {**dict.fromkeys(PER_HEAD_TENSORS, OUT), "gate": OUT, "wo": IN}    # whole heads

    def make(self, cfg, earlier=()) -> nn.Module:
        return DeltaNet(cfg.dim, self, self.norm_eps or cfg.norm_eps)

    def shard(self, n: int) -> "GatedDelta":
        """The layer of one of n ranks."""
        return replace(self, n_k_head=self.n_k_head // n, n_v_head=self.n_v_head // n)

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide."""
        return {"number of DeltaNet key heads": self.n_k_head}

    def n_rows(self) -> tuple[int, int, int]:
        """Output widths of queries, keys and values."""
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
        self.rates = nn.Linear(dim, 2 * n_head, bias=False)    # beta, then decay
        self.wo = nn.Linear(n_value, dim, bias=False)
        self.conv = nn.Parameter(torch.zeros(sum(self.split), shape.n_tap, dtype=fp32))
        self.decay_bias = nn.Parameter(torch.zeros(n_head, dtype=fp32))
        self.decay_rate = nn.Parameter(torch.zeros(n_head, dtype=fp32))    # -exp(A_log)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(shape.v_dim, dtype=fp32))
        self.cache = None                          # without a cache, each call starts from zeros

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """Allocate states, independent of n_slot; batch_size 0 removes them."""
        heads = self.shape.n_v_head, self.shape.k_dim, self.shape.v_dim
        self.cache = None
        if batch_size:
            self.cache = StateRing(batch_size, max_rejected, heads, sum(self.split),
                                   self.shape.n_tap, dtype, device)

    def forward(self, x, rope, slot, mask, batch_idx=None):
        """slot: the positions. rope and mask are unused. Padding leaves the state unchanged."""
        pos = slot.expand(x.shape[:2])
        mixed, state, in_order = start(self.cache, self.qkv(x), pos, batch_idx, self.shape.n_tap,
                                       self.state_shape())
        q, k, v = self.queries_keys_values(mixed)
        beta, g = self.rates(x).float().chunk(2, dim=-1)                   # [B, T, n_v_head]
        beta = torch.where(in_order, torch.sigmoid(beta) * self.shape.beta_scale, 0)
        g = torch.where(in_order, self.decay_rate * F.softplus(g + self.decay_bias), 0)
        if self.cache is None:
            y, _ = chunked(q, k, v, g, beta, state)
        else:
            y, states = scan(step_by_step, chunked, (q, k, v, g, beta), 2, state, in_order,
                             self.cache.n_slot)
            self.cache.write(pos, in_order[..., 0].sum(-1), mixed, states, batch_idx)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.norm.weight
        y = y * F.silu(self.gate(x).float()).view_as(y)
        return self.wo(y.type_as(x).flatten(2))

    def state_shape(self) -> tuple[int, int, int]:
        return self.shape.n_v_head, self.shape.k_dim, self.shape.v_dim

    def queries_keys_values(self, mixed):
        """[B, n_tap - 1 + T, C] -> q, k [B, T, n_v_head, dk], v [B, T, n_v_head, dv], fp32."""
        q, k, v = F.silu(convolve(mixed, self.conv, None)).split(self.split, dim=-1)
        q, k = (l2_normalize(t.unflatten(-1, (-1, self.shape.k_dim))) for t in (q, k))
        n_repeat = self.shape.n_v_head // self.shape.n_k_head
        if n_repeat > 1:
            q, k = q.repeat_interleave(n_repeat, dim=2), k.repeat_interleave(n_repeat, dim=2)
        return q * self.shape.k_dim**-0.5, k, v.unflatten(-1, (-1, self.shape.v_dim))


def l2_normalize(x):
    """With flash-linear-attention's epsilon."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def step_by_step(q, k, v, g, beta, state):
    """One token at a time. q k [B, T, N, dk], v [B, T, N, dv], g beta [B, T, N], state
    [B, N, dk, dv], all of one dtype -> y [B, T, N, dv] and T states.
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
    """The chunkwise-parallel form of step_by_step() -> y [B, T, N, dv] and the last state.

    Within a chunk, with G the cumulative sum of g, the updates d of all tokens i solve

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
    decay = total[..., :, None] - total[..., None, :]
    decay = torch.where(causal, decay, -torch.inf).exp()                   # [B, N, n, C, C]
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT) * decay               # unitriangular: the diagonal is ignored
    rhs = torch.cat((v * beta[..., None], k_beta * total.exp()[..., None]), dim=-1)
    d = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    d_v, d_k = d.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT) * decay
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    chunk_decay = total[..., -1].exp()[..., None, None]                    # [B, N, n, 1, 1]
    ys = []
    for i in range(q.shape[2]):
        d = d_v[:, :, i] - d_k[:, :, i] @ state                            # [B, N, C, dv]
        ys.append(q[:, :, i] @ state + scores[:, :, i] @ d)
        state = state * chunk_decay[:, :, i] + k[:, :, i].mT @ d
    y = torch.stack(ys, dim=2).flatten(2, 3)[:, :, :T]
    return y.transpose(1, 2), state
