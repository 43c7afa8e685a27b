"""What goes into the weights when they are loaded, so that the model need not know of it.

    tensors = fold(tensors, cfg, Folds(norm_offset=1.0))
"""

import math
import re
from dataclasses import dataclass, field

import torch

from formats.lazy import (
    LazyTensor,
    cached,
    constant,
    index_select,
    made_from,
    narrow,
    offset,
    scaled,
)
from formats.parameters import tensor_shapes
from model import ModelConfig, at


@dataclass(frozen=True)
class Folds:
    """How a file's weights differ from what the model multiplies by."""

    norm_offset: float = 0.0                       # norms multiply by offset + weight (Gemma)
    norm_offset_of: str = "norm"                   # whose names have this (a pattern)
    logits_divisor: float = 1.0                    # goes into the last norm (Granite)
    interleaved_rope: bool = False                 # RoPE turns neighbours (Meta, llama.cpp, GLM)
    reversed_rope: bool = False                    # RoPE turns the other way (nanochat)
    norm_after_rope: bool = False                  # of queries and keys (Hunyuan)
    post_norm_scale: float = 1.0                   # what norms behind a branch are multiplied by
    first_pos: int = 0                             # which learned position is the first (OPT)
    log_decay: bool = False                        # DeltaNet's decays are log(-decay) there
    tiled_heads: bool = False                      # its value heads: the first of each key head,
                                                   # then the second of each (llama.cpp)
    one_norm: bool = False                         # of both branches of a parallel block
    slopes_base: float = 8.0                       # ALiBi: the last of 2^n heads has 2^-base
    slopes_scale: float = 1.0
    constants: dict[str, float] = field(default_factory=dict)  # what no file holds: pattern, value


def fold(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> dict[str, LazyTensor]:
    """The tensors, by our names, as the model takes them; nothing is read yet."""
    tensors = dict(tensors)
    for name, t in tensors.items():
        if len(t.shape) > 1 and re.search(r"choice_bias|\.[qk]_norm\.", name):   # [1, E], [N, H]
            n = math.prod(t.shape)
            t = cached(t.name, (n,), t.dtype, lambda t=t: t.whole().flatten(), t)
            tensors[name] = t
        weighted = re.search(rf"{folds.norm_offset_of}.*\.weight$", name)
        if folds.norm_offset and weighted:
            tensors[name] = offset(t, folds.norm_offset)
        if folds.log_decay and name.endswith("decay_rate"):
            tensors[name] = made_from(t, lambda a, b, t=t: -t.read_rows(a, b).float().exp(),
                                      dtype=torch.float32)
    rotated = int(cfg.head_dim * cfg.rope[0].partial)
    if folds.interleaved_rope:                     # row pairs (2i, 2i + 1) -> (i, i + R/2)
        turning, still = torch.arange(rotated), torch.arange(rotated, cfg.head_dim)
        _reorder_heads(tensors, torch.cat((turning[::2], turning[1::2], still)))
    if folds.reversed_rope:                        # (a, b) turned back is (b, a) turned on
        _reorder_heads(tensors, torch.arange(cfg.head_dim).roll(cfg.head_dim // 2))
    if rotated < cfg.head_dim:
        _reorder_heads(tensors, _partial_rope_order(rotated, cfg.head_dim))
    if folds.one_norm:
        for name in [name for name in tensors if ".attn_norm." in name]:
            tensors.setdefault(name.replace("attn_norm", "ffn_norm"), tensors[name])
    if folds.first_pos:
        table = tensors["pos_embed.weight"]
        tensors["pos_embed.weight"] = narrow(table, 0, folds.first_pos, table.shape[0])
    for name in [name for name in tensors if ".post_" in name and folds.post_norm_scale != 1]:
        tensors[name] = scaled(tensors[name], folds.post_norm_scale)
    if folds.tiled_heads:
        _group_value_heads(tensors, cfg)
    _add_constants(tensors, cfg, folds)
    if folds.norm_after_rope:
        _norm_before_rope(tensors)
    if folds.logits_divisor != 1:
        for name in ("norm.weight", "norm.bias"):
            if name in tensors:
                tensors[name] = scaled(tensors[name], 1 / folds.logits_divisor)
    return tensors


def _add_constants(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Norms' weights and biases that a family does not have, slopes that it works out."""
    if not (folds.constants or cfg.scores.alibi):
        return
    slopes = alibi_slopes(cfg.n_head, folds.slopes_base) * folds.slopes_scale
    for name, shape in tensor_shapes(cfg).items():
        for pattern, value in folds.constants.items():
            if re.search(pattern, name):
                tensors.setdefault(name, constant(name, shape, value))
        if name.endswith("attend.slopes"):
            tensors[name] = cached(name, shape, torch.float32, lambda: slopes)


def alibi_slopes(n_head: int, base: float = 8.0) -> torch.Tensor:
    """2^(-base i / n) of a power of two of heads; then every other one of twice as many.

    As in arXiv 2108.12409.
    """
    n = 1 << (n_head.bit_length() - 1)
    slopes = 2.0 ** (-base / n * torch.arange(1, n + 1))
    between = 2.0 ** (-base / (2 * n) * torch.arange(1, 2 * n + 1, 2))
    return torch.cat((slopes, between[:n_head - n]))


def _norm_before_rope(tensors: dict[str, LazyTensor]) -> None:
    """Turning leaves a norm as it is, but not its weights: those of q and k, as one, follow RoPE.

    Scores are sums over q_i k_i, each of which both weights multiply.
    """
    for name in [name for name in tensors if name.endswith(".q_norm.weight")]:
        q, k = tensors[name], tensors[name.replace("q_norm", "k_norm")]
        gain = name.replace("q_norm.weight", "attend.gain")
        tensors[gain] = cached(gain, q.shape, torch.float32, lambda q=q, k=k: product(q, k), q, k)
        for norm in (name, name.replace("q_norm", "k_norm")):
            tensors[norm] = constant(norm, q.shape, 1.0)


def product(q: LazyTensor, k: LazyTensor) -> torch.Tensor:
    return q.whole().float() * k.whole().float()


def _group_value_heads(tensors: dict[str, LazyTensor], cfg: ModelConfig) -> None:
    """DeltaNet's value heads of one key head side by side, where they were tiled. In place."""
    for name, t in tensors.items():
        layer = re.match(r"layers\.(\d+)\.attn\.(v|gate|beta|decay|decay_\w+|conv_v|wo)\b", name)
        shape = layer and at(int(layer[1]), cfg.mixer)
        if not shape:
            continue
        columns = layer[2] == "wo"
        n = t.shape[1 if columns else 0]
        heads = torch.arange(n).view(-1, shape.n_k_head, n // shape.n_v_head)
        order = heads.transpose(0, 1).flatten()
        if columns:
            tensors[name] = made_from(t, lambda a, b, t=t, order=order: t.read_rows(a, b)[:, order])
        else:
            tensors[name] = index_select(t, order)


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
