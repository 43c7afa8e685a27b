"""Transforms applied after the embedding lookup: a scale, learned positions, a norm.

Each is an entry of ModelConfig.after_embed; `name` is the module's name in the model.

    cfg = replace(cfg, after_embed=(EmbedScale(cfg.dim**0.5),))
"""

from dataclasses import dataclass

import torch
from torch import nn

from gpt_faster.layers.norms import LayerNorm
from model import RMSNorm


@dataclass(frozen=True)
class EmbedScale:
    factor: float                                  # Gemma: sqrt(dim)
    kind: str = "embed_scale"                      # name in a .pth
    name = "embed_scale"

    def make(self, cfg) -> nn.Module:
        return ScaledEmbedding(self.factor)


@dataclass(frozen=True)
class LearnedPositions:
    """Adds a learned embedding of the position (GPT-2)."""

    kind: str = "learned_pos"
    name = "pos_embed"

    def make(self, cfg) -> nn.Module:
        return PositionEmbedding.from_pretrained(torch.empty(cfg.context, cfg.dim))


@dataclass(frozen=True)
class EmbedNorm:
    """Normalizes embeddings (BLOOM)."""

    kind: str = "embed_norm"
    name = "embed_norm"

    def make(self, cfg) -> nn.Module:
        kind = NormalizedEmbedding if cfg.norm is None else LayerNormalizedEmbedding
        return kind(cfg.dim, cfg.norm_eps)


class ScaledEmbedding(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x, pos):
        return x * x.new_full((), self.factor)     # rounded to x's dtype


class PositionEmbedding(nn.Embedding):
    def forward(self, x, pos):
        return x + super().forward(pos)


class NormalizedEmbedding(RMSNorm):
    def forward(self, x, pos):
        return super().forward(x)


class LayerNormalizedEmbedding(LayerNorm):
    def forward(self, x, pos):
        return super().forward(x)


def embed_scale(cfg) -> float:
    """The factor of a model's embeddings."""
    return next((part.factor for part in cfg.after_embed if isinstance(part, EmbedScale)), 1.0)


def has_learned_positions(cfg) -> bool:
    """Whether the model has learned position embeddings, and so none beyond its context."""
    return any(isinstance(part, LearnedPositions) for part in cfg.after_embed)
