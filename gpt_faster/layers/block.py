"""Block variants: post-norms, parallel branches, a scaled residual, widths that vary between
layers, layers with one branch only, per-layer embeddings.

    cfg = replace(cfg, block=BlockVariant(pre_norm=False, post_norm=True))
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from gpt_faster.layers.moe import MoEWithParallelDense
from gpt_faster.layers.norms import rescale
from gpt_faster.layers.part import Part
from gpt_faster.layers.per_layer import LayerOutput
from model import Block, RMSNorm, build_part, of_layer


@dataclass(frozen=True)
class Widths:
    """One layer's widths, instead of ModelConfig's fields of the same names (Gemma 4, Laguna)."""

    head_dim: int
    n_kv_head: int
    ffn_dim: int
    n_head: int | None = None                      # None: the model's


@dataclass(frozen=True)
class BlockVariant(Part):
    pre_norm: bool = True                          # normalize the input of each branch
    post_norm: bool = False                        # normalize its output (Gemma 2, 3)
    post_norm_eps: float | None = None             # None: norm_eps
    residual_scale: float = 1.0                    # factor of each branch's output (Granite)
    parallel: bool = False                         # both branches read the same x (GPT-NeoX)
    end: bool = False                              # per-layer embeddings and an output scale
    widths: tuple = (None,)                        # tiled over layers: Widths, None: the model's
    norm_placement: tuple = (None,)                # by layer, tiled: "pre", "post" (OLMo Hybrid)
    branches: tuple = (None,)                      # by layer, tiled: "attn_only", "ffn_only", None:
                                                   # both (Nemotron-H)
    kind: str = "block_variant"                    # name in a .pth

    def make(self, cfg, layer: int, earlier: nn.ModuleList) -> nn.Module:
        kind = ParallelBlock if self.parallel else VariantBlock
        return kind(self.config_of(cfg, layer), layer, earlier)

    def config_of(self, cfg, layer: int):
        """The model's config with this layer's widths."""
        widths = self.widths[layer % len(self.widths)]
        if widths is None:
            return cfg
        return replace(cfg, **{name: n for name, n in vars(widths).items() if n is not None})

    def norms_of(self, layer: int) -> tuple[bool, bool]:
        """Has this layer norms before its branches, and after them?"""
        place = of_layer(layer, self.norm_placement)
        if place is None:
            return self.pre_norm, self.post_norm
        return place == "pre", place == "post"

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide."""
        counts = {w.n_head for w in self.widths if w and w.n_head}
        return {f"layer with {n} query heads": n for n in counts}

    def shard(self, n: int) -> "BlockVariant":
        """The block of one of n ranks. Several ranks may hold copies of one key/value head."""
        return replace(self, widths=tuple(
            w and Widths(w.head_dim, max(1, w.n_kv_head // n), w.ffn_dim // n,
                         w.n_head and w.n_head // n)
            for w in self.widths))


class VariantBlock(Block):
    def __init__(self, cfg, layer: int, earlier: nn.ModuleList):
        super().__init__(cfg, layer, earlier)
        variant = cfg.block
        has_pre_norm, has_post_norm = variant.norms_of(layer)

        def norm(eps=None):
            return build_part(cfg.norm, RMSNorm, cfg.dim, eps or cfg.norm_eps)

        def branch_output():
            return norm(variant.post_norm_eps) if has_post_norm else rescale(
                variant.residual_scale)

        if not has_pre_norm:
            self.attn_norm, self.ffn_norm = nn.Identity(), nn.Identity()
        if isinstance(self.ffn, MoEWithParallelDense):         # it normalizes its input itself
            self.ffn_norm = nn.Identity()
        self.post_attn_norm, self.post_ffn_norm = branch_output(), branch_output()
        only = of_layer(layer, variant.branches)
        if only == "attn_only":
            self.ffn, self.ffn_norm, self.post_ffn_norm = no_branch()
        elif only == "ffn_only":
            self.attn, self.attn_norm, self.post_attn_norm = no_branch()
        dim = cfg.per_layer.dim if cfg.per_layer else 0
        self.end = LayerOutput(cfg, norm() if dim else None, dim) if variant.end else nn.Identity()

    def forward(self, x, rope, slot, mask, batch_idx=None, *per_layer_input):
        """per_layer_input: this layer's per-layer embedding (Gemma 4), passed to self.end."""
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), rope, slot, mask, batch_idx))
        return self.end(x + self.post_ffn_norm(self.ffn(self.ffn_norm(x))), *per_layer_input)


class NoBranch(nn.Module):
    """In place of attention or feed-forward in a layer that has none: adds zeros."""

    cache = None

    def __init__(self):
        super().__init__()
        self.summed = nn.Identity()                # tp.py puts an all-reduce here: it is never run

    def setup_cache(self, *_) -> None:
        """It has no cache."""

    def forward(self, x, *_):
        return torch.zeros_like(x)


def no_branch() -> tuple[nn.Module, ...]:
    """A missing branch, and identities for its norms."""
    return NoBranch(), nn.Identity(), nn.Identity()


class ParallelBlock(VariantBlock):
    """x + attention(x) + feed-forward(x)"""

    def forward(self, x, *inputs):
        y = self.post_attn_norm(self.attn(self.attn_norm(x), *inputs))
        return x + y + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))


def post_norm_of(layer: nn.Module, branch: str) -> nn.Module:
    """The post-norm of a layer's branch, "attn" or "ffn"; the identity in a Llama."""
    return getattr(layer, f"post_{branch}_norm", IDENTITY)


IDENTITY = nn.Identity()
