"""Zamba 2: Mamba-2 layers, some of which read a transformer block that several of them share.

The shared block is not a layer of its own: its output is added to a Mamba layer's input only, not
to the residual stream. Its own input is x beside the token's embedding, and it has no residuals:

    t = linear(mlp(norm(attention(norm([x, embedding])))));    x = x + mamba(norm(x + t))

Each use adds adapters of low rank to the block's input projections. The first use holds the block,
the others refer to it. In a ModelConfig, whose head_dim is that of the shared attention:

    mixer=(mamba, SharedTransformer(mamba), mamba, SharedTransformer(mamba, source=1)),
    block=ZambaBlocks(), per_layer=TokenEmbedding()
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt_faster.layers.block import BlockVariant, no_branch
from gpt_faster.layers.mamba import Mamba2
from gpt_faster.layers.part import Part
from model import SDPA, Block, KVCache, RMSNorm, rotate


@dataclass(frozen=True)
class TokenEmbedding:
    """A ModelConfig.per_layer that gives every layer the token's embedding."""

    kind: str = "token_embedding"                  # name in a .pth

    def make(self, cfg) -> nn.Module:
        return RepeatedEmbedding(cfg.n_layer)


class RepeatedEmbedding(nn.Module):
    def __init__(self, n_layer: int):
        super().__init__()
        self.n_layer = n_layer

    def forward(self, tokens, x):
        return x[:, :, None].expand(-1, -1, self.n_layer, -1)              # [B, T, L, D], a view


@dataclass(frozen=True)
class SharedTransformer(Part):
    """A Mamba layer that reads a transformer block. source: the layer that holds it, None: this."""

    mamba: Mamba2
    source: int | None = None
    rank: int = 128                                # of the adapters
    adapts_attention: bool = False                 # adapters of q, k and v, too
    kind: str = "shared_transformer"               # name in a .pth

    def make(self, cfg, earlier=()) -> nn.Module:
        source = None if self.source is None else earlier[self.source].attn
        return MambaWithSharedBlock(cfg, self, source)

    def sharded_widths(self) -> dict[str, int]:
        """No rank has a part of it."""
        return {"shared transformer block, which is not split,": 1}


@dataclass(frozen=True)
class ZambaBlocks(BlockVariant):
    kind: str = "zamba_blocks"                     # name in a .pth

    def make(self, cfg, layer: int, earlier: nn.ModuleList) -> nn.Module:
        return ZambaBlock(cfg, layer, earlier)


class ZambaBlock(Block):
    def __init__(self, cfg, layer: int, earlier: nn.ModuleList):
        super().__init__(cfg, layer, earlier)
        self.ffn, self.ffn_norm, _ = no_branch()

    def forward(self, x, rope, slot, mask, batch_idx=None, embedding=None):
        """embedding [B, T, D]: the tokens', as embedded."""
        h = x
        if isinstance(self.attn, MambaWithSharedBlock):
            h = x + self.attn.transform(x, embedding, rope, slot, mask, batch_idx)
        return x + self.attn(self.attn_norm(h), rope, slot, mask, batch_idx)


class Adapter(nn.Module):
    """up(down(x)): a low-rank product, added to the output of a shared linear."""

    def __init__(self, n_in: int, rank: int, n_out: int):
        super().__init__()
        self.low = nn.Linear(n_in, rank, bias=False)
        self.high = nn.Linear(rank, n_out, bias=False)

    def forward(self, x):
        return self.high(self.low(x))


class TransformerBlock(nn.Module):
    """The weights that all uses share."""

    def __init__(self, cfg):
        super().__init__()
        self.split = (cfg.n_head * cfg.head_dim, *[cfg.n_kv_head * cfg.head_dim] * 2)
        self.norm = RMSNorm(2 * cfg.dim, cfg.norm_eps)
        self.wqkv = nn.Linear(2 * cfg.dim, sum(self.split), bias=False)
        self.wo = nn.Linear(self.split[0], cfg.dim, bias=False)
        self.ffn_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.gate_up = nn.Linear(cfg.dim, 2 * cfg.ffn_dim, bias=cfg.mlp_bias)
        self.down = nn.Linear(cfg.ffn_dim, cfg.dim, bias=cfg.mlp_bias)


class MambaWithSharedBlock(nn.Module):
    def __init__(self, cfg, shape: SharedTransformer, source: "MambaWithSharedBlock | None"):
        super().__init__()
        self.head_dim, rank = cfg.head_dim, shape.rank
        self.mamba = shape.mamba.make(cfg)
        self.source = [source]                     # in a list, so it is no submodule
        self.shared = TransformerBlock(cfg) if source is None else None
        self.linear = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.adapt_ffn = Adapter(cfg.dim, rank, 2 * cfg.ffn_dim)
        self.adapt_q, self.adapt_k, self.adapt_v = (
            Adapter(2 * cfg.dim, rank, n) if shape.adapts_attention else None
            for n in self.block.split)
        self.attend = SDPA((cfg.head_dim / 2)**-0.5)
        self.cache = None                          # None: attend to this call's keys only

    @property
    def block(self) -> TransformerBlock:
        return self.shared if self.shared is not None else self.source[0].shared

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """Allocate n_slot positions, and the Mamba layer's states; batch_size 0 removes both."""
        shape = batch_size, self.block.split[1] // self.head_dim, n_slot, self.head_dim
        self.cache = KVCache(shape, dtype, device) if batch_size else None
        self.mamba.setup_cache(batch_size, n_slot, dtype, device, max_rejected)

    def transform(self, x, embedding, rope, slot, mask, batch_idx=None):
        """The shared block's output for x and embedding [B, T, D] -> [B, T, D]."""
        block, (B, T, _) = self.block, x.shape
        h = block.norm(torch.cat((x, embedding), dim=-1))                  # [B, T, 2 D]
        q, k, v = block.wqkv(h).split(block.split, -1)
        if self.adapt_q is not None:
            q, k, v = q + self.adapt_q(h), k + self.adapt_k(h), v + self.adapt_v(h)
        q, k, v = (t.view(B, T, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.cache is not None:
            k, v = self.cache(slot, k, v, mask.shape[-1], batch_idx)
        y = self.attend(q, k, v, mask).transpose(1, 2).reshape(B, T, -1)
        h = block.ffn_norm(block.wo(y))
        gate, up = (block.gate_up(h) + self.adapt_ffn(h)).chunk(2, dim=-1)
        return self.linear(block.down(F.gelu(gate) * up))

    def forward(self, x, *inputs):
        return self.mamba(x, *inputs)
