"""Blocks that differ from a Llama's: norms behind a branch, branches side by side, a scaled
residual, heads and feed-forward widths of a layer's own, something behind both branches.

    cfg = replace(cfg, block=BlockVariant(pre_norm=False, post_norm=True))
"""

from dataclasses import dataclass, replace

from torch import nn

from gpt_faster.layers.moe import MoEWithParallelDense
from gpt_faster.layers.norms import rescale
from gpt_faster.layers.part import Part
from gpt_faster.layers.per_layer import End
from model import Block, RMSNorm, made


@dataclass(frozen=True)
class Widths:
    """One layer's, in place of what ModelConfig says under these names (Gemma 4)."""

    head_dim: int
    n_kv_head: int
    ffn_dim: int


@dataclass(frozen=True)
class BlockVariant(Part):
    pre_norm: bool = True                          # normalize what goes into a branch
    post_norm: bool = False                        # normalize what comes out of it (Gemma 2, 3)
    post_norm_eps: float | None = None             # None: norm_eps
    residual_scale: float = 1.0                    # Granite: of what each branch adds
    parallel: bool = False                         # both branches read the same x (GPT-NeoX)
    end: bool = False                              # a learned factor, and per-layer embeddings
    widths: tuple = (None,)                        # tiled over layers: Widths of its own, or None
    kind: str = "block_variant"                    # what a .pth calls it

    def make(self, cfg, layer: int, earlier: nn.ModuleList) -> nn.Module:
        kind = ParallelBlock if self.parallel else VariantBlock
        return kind(self.config_of(cfg, layer), layer, earlier)

    def config_of(self, cfg, layer: int):
        """The model's config with the layer's widths in it."""
        own = self.widths[layer % len(self.widths)]
        return cfg if own is None else replace(cfg, **vars(own))

    def shard(self, n: int) -> "BlockVariant":
        """The block of one of n ranks; a key/value head may be several ranks'."""
        return replace(self, widths=tuple(
            own and Widths(own.head_dim, max(1, own.n_kv_head // n), own.ffn_dim // n)
            for own in self.widths))


class VariantBlock(Block):
    def __init__(self, cfg, layer: int, earlier: nn.ModuleList):
        super().__init__(cfg, layer, earlier)
        variant = cfg.block

        def norm(eps=None):
            return made(cfg.norm, RMSNorm, cfg.dim, eps or cfg.norm_eps)

        def after():
            return norm(variant.post_norm_eps) if variant.post_norm else rescale(
                variant.residual_scale)

        if not variant.pre_norm:
            self.attn_norm, self.ffn_norm = nn.Identity(), nn.Identity()
        if isinstance(self.ffn, MoEWithParallelDense):        # it has norms of its own
            self.ffn_norm = nn.Identity()
        self.post_attn_norm, self.post_ffn_norm = after(), after()
        dim = cfg.per_layer.dim if cfg.per_layer else 0
        self.end = End(cfg, norm() if dim else None, dim) if variant.end else nn.Identity()

    def forward(self, x, rope, slot, mask, batch_idx=None, *own):
        """own: this layer's per-layer embedding, for its end."""
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), rope, slot, mask, batch_idx))
        return self.end(x + self.post_ffn_norm(self.ffn(self.ffn_norm(x))), *own)


class ParallelBlock(VariantBlock):
    """x + attention(x) + feed-forward(x)"""

    def forward(self, x, *inputs):
        y = self.post_attn_norm(self.attn(self.attn_norm(x), *inputs))
        return x + y + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))


def post_norm_of(layer: nn.Module, branch: str) -> nn.Module:
    """What the result of a layer's branch, "attn" or "ffn", goes through; of a Llama's nothing."""
    return getattr(layer, f"post_{branch}_norm", IDENTITY)


IDENTITY = nn.Identity()
