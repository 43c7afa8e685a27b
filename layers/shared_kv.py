"""Attention with queries of its own only, over the keys and values of an earlier layer (Gemma 4).

Has no cache: it reads what the other layer's has, after that layer has written this call's tokens.

    cfg = replace(cfg, mixer=(None, None, SharedKV(source=0), SharedKV(source=1)))
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from layers.norms import VectorNorm
from layers.rope import rotate


@dataclass(frozen=True)
class SharedKV:
    """source: the layer whose keys and values they are; its heads are as wide as this one's."""

    source: int
    kind: str = "shared_kv"                        # what a .pth calls it

    def make(self, cfg) -> nn.Module:
        return SharedAttention(cfg, self.source)

    def shard(self, n: int) -> "SharedKV":
        """The layer of one of n ranks."""
        return self

    def shared_widths(self) -> dict[str, int]:
        """What n ranks can only share evenly."""
        return {}


class SharedAttention(nn.Module):
    def __init__(self, cfg, source: int):
        super().__init__()
        self.head_dim, self.source_layer = cfg.head_dim, source
        self.wq = nn.Linear(cfg.dim, cfg.n_head * cfg.head_dim, bias=cfg.qkv_bias)
        self.wo = nn.Linear(cfg.n_head * cfg.head_dim, cfg.dim, bias=cfg.o_bias)
        self.q_norm = VectorNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def share(self, source: nn.Module) -> None:
        """source: a model.Attention."""
        self.attend = copy.deepcopy(source.attend) # has the same scale, and nothing learned
        self.source = [source]                     # in a list: it is no part of this layer

    @property
    def cache(self) -> nn.Module | None:
        return self.source[0].cache

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, _=0) -> None:
        """Has none."""

    def keys_and_values(self, kv_len: int, batch_idx):
        """Each [B, K, kv_len, H], as the source saw them in this call."""
        source = self.source[0]
        if source.cache is None:
            return source.own_keys
        k, v = source.cache.k[:, :, :kv_len], source.cache.v[:, :, :kv_len]
        return (k, v) if batch_idx is None else (k[batch_idx], v[batch_idx])

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        q = self.q_norm(self.wq(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        k, v = self.keys_and_values(mask.shape[-1], batch_idx)
        y = self.attend(rotate(q, *rope), k, v, mask)                      # [B, N, T, H]
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


def share_keys(layers) -> None:
    """Show each layer without keys the one whose it takes. In place."""
    sources = []
    for layer in layers:
        if isinstance(layer.attn, SharedAttention):
            source = layers[layer.attn.source_layer].attn
            layer.attn.share(source)
            sources.append(source)
    for source in dict.fromkeys(sources):
        source.attend.register_forward_pre_hook(keep_own_keys(source))


def keep_own_keys(source: nn.Module):
    """Without a cache a call sees its own keys only, which then have to last for other layers."""
    def keep(_, inputs):
        if source.cache is None:
            source.own_keys = inputs[1:3]
    return keep
