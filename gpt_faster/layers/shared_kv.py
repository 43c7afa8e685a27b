"""Attention that computes queries only and uses the keys and values of an earlier layer (Gemma 4).

It has no cache: it reads the source layer's, which already contains this call's tokens.

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
    """source: index of the layer that provides keys and values, with the same head_dim.

    None: a layer of another model, set by SharedAttention.use_kv_of().
    """

    source: int | None
    kind: str = "shared_kv"                        # name in a .pth

    split = {"wq": OUT, "wo": IN}

    def make(self, cfg, earlier=()) -> nn.Module:
        """earlier: the blocks before this one."""
        attn = SharedAttention(cfg, self.source)
        if self.source is not None:
            source = earlier[self.source].attn
            attn.use_kv_of(source)
            record_kv_of(source)
        return attn


class SharedAttention(nn.Module):
    def __init__(self, cfg, source: int | None):
        super().__init__()
        self.head_dim, self.source_layer = cfg.head_dim, source
        self.wq = nn.Linear(cfg.dim, cfg.n_head * cfg.head_dim, bias=cfg.qkv_bias)
        self.wo = nn.Linear(cfg.n_head * cfg.head_dim, cfg.dim, bias=cfg.o_bias)
        self.q_norm = VectorNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.source = []                           # set by use_kv_of()

    def use_kv_of(self, source: nn.Module) -> None:
        """source: a model.Attention."""
        self.attend = copy.deepcopy(source.attend) # the same scale; it has no parameters
        self.attend._forward_pre_hooks.clear()     # the record_kv hook belongs to the source
        self.source = [source, source.attend]      # in a list, so they are not submodules

    @property
    def cache(self) -> nn.Module | None:
        return self.source[0].cache

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, _=0) -> None:
        """It has no cache. If the source has none either, the source records each call's keys."""
        for attend in self.source[1:]:
            attend.records_kv = batch_size == 0

    def keys_and_values(self, kv_len: int, batch_idx):
        """The source's keys and values in this call, [B, K, kv_len, H] each."""
        source, attend = self.source
        if source.cache is None:
            return attend.recorded_kv
        return source.cache.read(kv_len, batch_idx)

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        q = self.q_norm(self.wq(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        k, v = self.keys_and_values(mask.shape[-1], batch_idx)
        q = rotate(q, *trim_rope(rope, self.head_dim))
        y = self.attend(q, k, v, mask)                                     # [B, N, T, H]
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


def record_kv_of(source: nn.Module) -> None:
    """Add a hook to a layer, once, that records each call's keys and values while it has no cache.
    """
    if record_kv not in source.attend._forward_pre_hooks.values():
        source.attend.records_kv = True
        source.attend.register_forward_pre_hook(record_kv)


def record_kv(attend: nn.Module, inputs: tuple) -> None:
    """inputs: q, k, v and mask."""
    if attend.records_kv:
        attend.recorded_kv = inputs[1:3]
