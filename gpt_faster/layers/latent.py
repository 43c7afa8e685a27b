"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): all heads' keys and values are
projections of one latent vector per token.

The cache holds, for each position, the normalized latent and a rotated key part, both shared by all
heads: 576 values in DeepSeek-V3, instead of 40,960 for the keys and values of its 128 heads.

    cfg = replace(cfg, mixer=(Latent(q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128),))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.norms import VectorNorm
from gpt_faster.layers.part import HEAD, IN, OUT, Part
from model import ExpertLinear, rotate, row_index


@dataclass(frozen=True)
class Latent(Part):
    """Widths. A head's keys are [nope | rope], where rope has width ModelConfig.head_dim."""

    q_rank: int | None                             # width of the query latent; None: no latent
    kv_rank: int                                   # width of the key/value latent
    nope_dim: int                                  # unrotated part of a head's queries and keys
    v_dim: int                                     # per head
    kind: str = "latent"                           # name in a .pth

    split = {"wq": OUT, "wq_b": OUT, "wk_b": HEAD, "wv_b": HEAD, "wo": IN}

    def make(self, cfg, earlier=()) -> nn.Module:
        return LatentAttention(cfg, self)

    def max_absorbed_tokens(self, rope_dim: int) -> int:
        """The most new tokens per call for which absorbing the up-projections is cheaper.

        Costs in multiplications per key and head. Absorbed: kv_rank + rope for a query's score and
        kv_rank for its value sum. Expanded: nope + rope and v_dim, plus kv_rank * (nope + v_dim)
        per call for up-projecting the key and its value. Only latents are cached, so each call
        up-projects all keys, and the limit does not depend on the position in the prompt.
        """
        up_projection = self.kv_rank * (self.nope_dim + self.v_dim)
        absorbed = 2 * self.kv_rank + rope_dim
        expanded = self.nope_dim + rope_dim + self.v_dim
        return up_projection // (absorbed - expanded) if absorbed > expanded else 1 << 62


class HeadLinear(ExpertLinear):
    """One matrix per head [N, out, in]: an ExpertLinear with equally many rows per expert."""

    def __init__(self, n_head: int, n_in: int, n_out: int):
        super().__init__(n_head, n_in, n_out, bias=False)

    def forward(self, x, ids, ends):
        x = x.unflatten(0, (len(self.weight), -1))                         # [N, rows, in]
        return (x @ self.weight.mT).flatten(0, 1)


class LatentCache(nn.Module):
    """[latent | rotated key part] of each position, [B, S, kv_rank + rope]."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device):
        super().__init__()
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        self.register_buffer("k", zeros, persistent=False)

    def forward(self, slot, k, kv_len, batch_idx):
        """As model.KVCache: write k [B, T, width], return the first kv_len."""
        if slot.dim() == 1:
            self.k[:, slot] = k
        else:
            self.k[row_index(slot, batch_idx), slot] = k
        k = self.k[:, :kv_len]
        return k if batch_idx is None else k[batch_idx]


class PaddedSDPA(nn.Module):
    """softmax(q k' * scale) v for values narrower than keys: padded, so SDPA can use its fused
    kernels."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, q, k, v, mask):
        """q [B, N, T, H], k [B, N or 1, S, H], v [B, N or 1, S, at most H] -> [B, N, T, H]."""
        shape = q.shape
        if k.shape[1] < shape[1]:                  # one shared key head: fold heads into queries
            q = q.reshape(shape[0], 1, -1, shape[3])
            mask = mask.repeat(*[1] * (mask.dim() - 2), shape[1], 1)
        if v.shape[-1] < k.shape[-1]:
            v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return y.reshape(*shape[:3], -1)


class LatentAttention(nn.Module):
    """Few tokens attend to the latents directly: W_uk is applied to the queries and W_uv to the
    output ("absorbed").

    q_nope (W_uk c) = (W_uk' q_nope) c, and the weighted sum of W_uv c is W_uv of the weighted sum.
    For many tokens up-projecting all latents first is cheaper: see Latent.max_absorbed_tokens.
    """

    def __init__(self, cfg, latent: Latent):
        super().__init__()
        self.n_head, self.rope_dim = cfg.n_head, cfg.head_dim
        self.kv_rank, self.nope_dim, self.v_dim = latent.kv_rank, latent.nope_dim, latent.v_dim
        self.max_absorbed_tokens = latent.max_absorbed_tokens(cfg.head_dim)
        q_dim = cfg.n_head * (latent.nope_dim + cfg.head_dim)
        kv_dim = latent.kv_rank + cfg.head_dim
        if latent.q_rank is None:
            self.split = q_dim, kv_dim
            self.wq_kv_a = nn.Linear(cfg.dim, sum(self.split), bias=cfg.qkv_bias)
        else:
            self.split = latent.q_rank, kv_dim
            self.wqkv_a = nn.Linear(cfg.dim, sum(self.split), bias=cfg.qkv_bias)
            self.q_a_norm = VectorNorm(latent.q_rank, 1e-6)            # not the model's norm_eps
            self.wq_b = nn.Linear(latent.q_rank, q_dim, bias=False)
        self.has_q_rank = latent.q_rank is not None
        self.kv_a_norm = VectorNorm(latent.kv_rank, 1e-6)
        self.wk_b = HeadLinear(cfg.n_head, latent.nope_dim, latent.kv_rank)
        self.wv_b = HeadLinear(cfg.n_head, latent.kv_rank, latent.v_dim)
        self.wo = nn.Linear(cfg.n_head * latent.v_dim, cfg.dim, bias=cfg.o_bias)
        self.attend = PaddedSDPA((latent.nope_dim + cfg.head_dim)**-0.5)
        if isinstance(cfg.attention, AttentionVariant):
            if cfg.attention.scale is not None:
                self.attend.scale = cfg.attention.scale
            self.attend = cfg.attention.attend(cfg, self.attend)
        self.cache = None                          # without one, a call sees its own keys only

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, *_) -> None:
        """Allocate n_slot positions; batch_size 0 removes the cache."""
        shape = batch_size, n_slot, self.kv_rank + self.rope_dim
        self.cache = LatentCache(shape, dtype, device) if batch_size else None

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        q, k = self.project(x)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)
        q, q_rope = q.split((self.nope_dim, self.rope_dim), -1)            # [B, N, T, …]
        k, k_rope = k[:, None].split((self.kv_rank, self.rope_dim), -1)    # [B, 1, T, …]
        q_rope, k_rope = rotate(q_rope, *rope), rotate(k_rope, *rope)
        k = torch.cat((self.kv_a_norm(k), k_rope), -1)[:, 0]
        if self.cache is not None:
            k = self.cache(slot, k, mask.shape[-1], batch_idx)
        k = k[:, None]                                                     # [B, 1, S, …]
        attend = self.attend_latents if T <= self.max_absorbed_tokens else self.attend_heads
        y = attend(q, q_rope, k, mask)                                     # [B, N, T, v_dim]
        return self.wo(y.transpose(1, 2).flatten(2))

    def project(self, x):
        """x [B, T, D] -> queries [B, T, N (nope + rope)], [latent | key part] [B, T, …]."""
        if not self.has_q_rank:
            return self.wq_kv_a(x).split(self.split, -1)
        q, k = self.wqkv_a(x).split(self.split, -1)
        return self.wq_b(self.q_a_norm(q)), k

    def attend_latents(self, q, q_rope, k, mask):
        """Absorbed: all heads share the cached key, whose latent part is also the value."""
        q = torch.cat((self.per_head(self.wk_b, q), q_rope), -1)           # [B, N, T, rank + rope]
        y = self.attend(q, k, k, mask)[..., :self.kv_rank]
        return self.per_head(self.wv_b, y)

    def attend_heads(self, q, q_rope, k, mask):
        """Expanded: keys and values of each head are up-projected from the latents."""
        latent, k_rope = k.split((self.kv_rank, self.rope_dim), -1)
        k_rope = k_rope.expand(-1, self.n_head, -1, -1)
        k = latent @ self.dense_weight(self.wk_b, q)                       # [B, N, S, nope]
        k = torch.cat((k, k_rope), -1)                                     # [B, N, S, nope + rope]
        v = latent @ self.dense_weight(self.wv_b, q).mT                    # [B, N, S, v_dim]
        return self.attend(torch.cat((q, q_rope), -1), k, v, mask)[..., :self.v_dim]

    def per_head(self, linear: nn.Module, x: Tensor) -> Tensor:
        """Apply each head's matrix: x [B, N, T, in] -> [B, N, T, out]."""
        B, N, T, _ = x.shape
        rows = x.transpose(0, 1).flatten(0, 2)                             # [N B T, in]
        ids = torch.arange(N, device=x.device).repeat_interleave(B * T)
        ends = None                                # as MoE.takes_rows_one_by_one
        if T > 1 or x.device.type == "cpu":
            ends = torch.arange(1, N + 1, device=x.device, dtype=torch.int32) * (B * T)
        return linear(rows, ids, ends).unflatten(0, (N, B, T)).transpose(0, 1)

    def dense_weight(self, linear: nn.Module, like: Tensor) -> Tensor:
        """[N, out, in] of a linear in any quantized layout, by multiplying the identity."""
        if isinstance(linear, HeadLinear):
            return linear.weight
        n_in = self.nope_dim if linear is self.wk_b else self.kv_rank
        identity = torch.eye(n_in, dtype=like.dtype, device=like.device)
        return self.per_head(linear, identity.expand(1, self.n_head, -1, -1))[0].mT
