"""What goes into the weights when they are loaded, so that the model need not know of it.

    tensors = fold(tensors, cfg, Folds(norm_offset=1.0))
"""

import re
from dataclasses import dataclass

import torch

from formats.lazy import LazyTensor, index_select, offset, scaled
from model import ModelConfig


@dataclass(frozen=True)
class Folds:
    """How a file's weights differ from what the model multiplies by."""

    norm_offset: float = 0.0                       # norms multiply by offset + weight (Gemma)
    logits_divisor: float = 1.0                    # goes into the last norm (Granite)
    interleaved_rope: bool = False                 # RoPE turns neighbours (Meta, llama.cpp, GLM)


def fold(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> dict[str, LazyTensor]:
    """The tensors, by our names, as the model takes them; nothing is read yet."""
    tensors = dict(tensors)
    for name, t in tensors.items():
        if folds.norm_offset and "norm" in name:
            tensors[name] = offset(t, folds.norm_offset)
    rotated = int(cfg.head_dim * cfg.rope[0].partial)
    if folds.interleaved_rope:                     # row pairs (2i, 2i + 1) -> (i, i + R/2)
        turning, still = torch.arange(rotated), torch.arange(rotated, cfg.head_dim)
        _reorder_heads(tensors, torch.cat((turning[::2], turning[1::2], still)))
    if rotated < cfg.head_dim:
        _reorder_heads(tensors, _partial_rope_order(rotated, cfg.head_dim))
    if folds.logits_divisor != 1:
        for name in ("norm.weight", "norm.bias"):
            if name in tensors:
                tensors[name] = scaled(tensors[name], 1 / folds.logits_divisor)
    return tensors


def _partial_rope_order(rotated: int, head_dim: int) -> torch.Tensor:
    """Where RoPE turns only part of a head, its pairs (i, i + R/2) move to (i, i + H/2).

    There the model has them; scores do not mind the order.
    """
    turning = torch.arange(rotated).chunk(2)
    still = torch.arange(rotated, head_dim).chunk(2)
    return torch.cat((turning[0], still[0], turning[1], still[1]))


def _reorder_heads(tensors: dict[str, LazyTensor], order: torch.Tensor) -> None:
    """Put each query and key head's rows in another order, in place."""
    for name, t in tensors.items():
        if re.search(r"\.(w[qk]|[qk]_norm)\.", name):
            heads = torch.arange(t.shape[0]).view(-1, len(order))
            tensors[name] = index_select(t, heads[:, order].flatten())
