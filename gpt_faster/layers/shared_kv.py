"""Attention with queries of its own only, over the keys and values of an earlier layer (Gemma 4).

Has no cache: it reads what the other layer's has, after that layer has written this call's tokens.

    cfg = replace(cfg, mixer=(None, None, SharedKV(source=0), SharedKV(source=1)))
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from gpt_faster.layers.attention import trim_rope
from gpt_faster.layers.norms import VectorNorm
from gpt_faster.layers.part import IN, OUT, Part
from model import rotate


@dataclass(frozen=True)
class SharedKV(Part):
    """source: the layer whose keys and values they are; its heads are as wide as this one's.

    None: a layer of another model, whose share() says which.
    """

    source: int | None
    kind: str = "shared_kv"                        # what a .pth calls it

    split = {"wq": OUT, "wo": IN}

    def make(self, cfg, earlier=()) -> nn.Module:
        """earlier: the blocks before this one."""
        attn = SharedAttention(cfg, self.source)
        if self.source is not None:
            source = earlier[self.source].attn
            attn.share(source)
            record_keys_of(source)
        return attn


class SharedAttention(nn.Module):
    def __init__(self, cfg, source: int | None):
        super().__init__()
        self.head_dim, self.source_layer = cfg.head_dim, source
        self.wq = nn.Linear(cfg.dim, cfg.n_head * cfg.head_dim, bias=cfg.qkv_bias)
        self.wo = nn.Linear(cfg.n_head * cfg.head_dim, cfg.dim, bias=cfg.o_bias)
        self.q_norm = VectorNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.source = []                           # share() says it

    def share(self, source: nn.Module) -> None:
        """source: a model.Attention."""
        self.attend = copy.deepcopy(source.attend) # has the same scale, and nothing learned
        self.attend._forward_pre_hooks.clear()     # record_keys is the source's
        self.source = [source, source.attend]      # in a list: they are no part of this layer

    @property
    def cache(self) -> nn.Module | None:
        return self.source[0].cache

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, _=0) -> None:
        """Has none. Without the source's, its keys of a call have to last until they are used."""
        for attend in self.source[1:]:
            attend.records_keys = batch_size == 0

    def keys_and_values(self, kv_len: int, batch_idx):
        """Each [B, K, kv_len, H], as the source saw them in this call."""
        source, attend = self.source
        if source.cache is None:
            return attend.recorded_kv
        k, v = source.cache.k[:, :, :kv_len], source.cache.v[:, :, :kv_len]
        return (k, v) if batch_idx is None else (k[batch_idx], v[batch_idx])

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        q = self.q_norm(self.wq(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        k, v = self.keys_and_values(mask.shape[-1], batch_idx)
        q = rotate(q, *trim_rope(rope, self.head_dim))
        y = self.attend(q, k, v, mask)                                     # [B, N, T, H]
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


def record_keys_of(source: nn.Module) -> None:
    """Have a layer keep its keys of a call, for layers that take them, as long as it has no cache.
    In place, once."""
    if record_keys not in source.attend._forward_pre_hooks.values():
        source.attend.records_keys = True
        source.attend.register_forward_pre_hook(record_keys)


def record_keys(attend: nn.Module, inputs: tuple) -> None:
    """inputs: q, k, v and mask."""
    if attend.records_keys:
        attend.recorded_kv = inputs[1:3]
