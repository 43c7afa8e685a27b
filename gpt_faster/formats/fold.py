"""Fold constants, offsets and permutations into the weights at load, to keep the model simple.

    tensors = fold(tensors, cfg, Folds(norm_offset=1.0))
"""

import itertools
import math
import re
from dataclasses import dataclass, field

import torch

from checkpoint import LazyTensor, layer_of, narrow, tensor_shapes
from gpt_faster.formats.awq_gptq_fp8 import unpacked_int4
from gpt_faster.formats.lazy import (
    cached,
    constant,
    index_select,
    offset,
    pad_columns,
    pad_rows,
    scaled,
    transpose,
)
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.rope import n_rotated
from gpt_faster.layers.shared_kv import SharedKV
from model import ModelConfig, of_layer

VECTORS = re.compile(                              # in some files matrices: [1, E], [N, H], [G, W]
    r"choice_bias|\.[qk]_norm\.|\.(attn|mamba)\.norm\.")


@dataclass(frozen=True)
class Folds:
    """How a checkpoint's weights differ from the ones the model needs."""

    norm_offset: float = 0.0                       # norms multiply by offset + weight (Gemma)
    norm_offset_of: str = "norm"                   # ...those whose names match this pattern
    logits_divisor: float = 1.0                    # folded into the last norm (Granite)
    interleaved_rope: bool = False                 # RoPE on pairs 2i, 2i+1 (Meta, llama.cpp, GLM)
    interleaved_heads: bool = False                # ...on all of a head, though RoPE rotates a part
    reversed_rope: bool = False                    # RoPE with negative angles (nanochat)
    norm_after_rope: bool = False                  # query and key norms follow RoPE (Hunyuan)
    post_norm_scale: float = 1.0                   # factor for post-norm weights
    first_pos: int = 0                             # row of position 0 in the table (OPT)
    log_decay: bool = False                        # DeltaNet's decays are stored as log(-decay)
    tiled_heads: bool = False                      # DeltaNet's value heads are ordered by index
                                                   # within their key head (llama.cpp)
    one_norm: bool = False                         # parallel block: both branches share a norm
    slopes_base: float = 8.0                       # ALiBi: the last of 2^n heads has 2^-base
    slopes_scale: float = 1.0
    k_is_v: bool = False                           # full attention: wv is wk (Gemma 4)
    v_dim: int = 0                                 # values narrower than head_dim: zero-padded
    v_scale: float = 1.0                           # factor of the values (MiMo)
    gate_per_head: bool = False                    # one gate for all channels of a head (Laguna)
    shared_scale: float = 1.0                      # factor of the shared expert's output
    factors: dict[str, float] = field(default_factory=dict)    # name pattern: factor (Falcon-H1)
    constants: dict[str, float] = field(default_factory=dict)  # name pattern: value, not stored


def fold(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> dict[str, LazyTensor]:
    """Tensors by our names -> tensors the model can load. Lazy: nothing is read yet."""
    tensors = dict(tensors)
    for name, t in tensors.items():
        is_column = t.shape[1:] == (1,) and re.search(r"\.(decay_rate|skip)$", name)
        if len(t.shape) > 1 and (is_column or VECTORS.search(name)):
            n = math.prod(t.shape)
            t = cached(t.name, (n,), t.dtype, lambda t=t: t.whole().flatten(), t)
            tensors[name] = t
        is_convolution = re.search(r"attn\.(taps|conv_[qkv])$", name)
        if is_convolution and len(t.shape) == 3:   # [width, 1, taps]
            tensors[name] = t.derived(t.read_rows, shape=(t.shape[0], t.shape[2]))
        weighted = re.search(rf"{folds.norm_offset_of}.*\.weight$", name)
        if folds.norm_offset and weighted:
            tensors[name] = offset(t, folds.norm_offset)
        if folds.log_decay and name.endswith("decay_rate"):
            tensors[name] = t.derived(lambda a, b, t=t: -t.read_rows(a, b).float().exp(),
                                      dtype=torch.float32)
    _split_convolutions_again(tensors, cfg)
    placement = getattr(cfg.block, "norm_placement", (None,))
    renamed = {"pre": ("post_attn_norm", "ffn_norm"), "post": ("ffn_norm", "post_attn_norm")}
    for name in list(tensors):                     # OLMo Hybrid: one name, two places
        old, new = renamed.get(of_layer(layer_of(name), placement), ("", ""))
        if old and f".{old}." in name:
            tensors[name.replace(old, new)] = tensors.pop(name)
    if isinstance(cfg.mixer[0], Latent):
        _permute_latent_rope(tensors, cfg, folds)
        _split_up_projections(tensors, cfg)
    else:
        _permute_for_rope(tensors, cfg, folds)
    if folds.one_norm:
        for name in [name for name in tensors if ".attn_norm." in name]:
            tensors.setdefault(name.replace("attn_norm", "ffn_norm"), tensors[name])
    if folds.first_pos and tensors.get("pos_embed.weight") and (
            len(tensors["pos_embed.weight"].shape) == 2):
        table = tensors["pos_embed.weight"]
        tensors["pos_embed.weight"] = narrow(table, 0, folds.first_pos, table.shape[0])
    for name in [name for name in tensors if ".post_" in name and folds.post_norm_scale != 1]:
        tensors[name] = scaled(tensors[name], folds.post_norm_scale)
    _share_kv(tensors, cfg, folds)
    if folds.gate_per_head:
        for name in [name for name in tensors if name.endswith("attn.gate.weight")]:
            index = torch.arange(tensors[name].n_row).repeat_interleave(cfg.head_dim)
            tensors[name] = index_select(tensors[name], index)
    if folds.v_dim:
        _pad_values(tensors, cfg, folds)
    for name in [name for name in tensors if ".ffn.shared.down." in name]:
        if folds.shared_scale != 1 and not name.endswith("down.weight"):
            raise ValueError("a quantized shared expert with a factor is not supported: use the "
                             "original model")
        tensors[name] = _times(tensors[name], folds.shared_scale)
    if folds.tiled_heads:
        _group_value_heads(tensors, cfg)
    for name, t in tensors.items():
        factor = math.prod(by for of, by in folds.factors.items() if re.search(of, name))
        if t.dtype.is_floating_point:              # not codes, but their scales and zeros
            tensors[name] = _times(t, factor)
    _add_constants(tensors, cfg, folds)
    if folds.norm_after_rope:
        _norm_before_rope(tensors)
    if folds.logits_divisor != 1:
        for name in ("norm.weight", "norm.bias"):
            if name in tensors:
                tensors[name] = scaled(tensors[name], 1 / folds.logits_divisor)
    return tensors


def _permute_for_rope(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    by_layer = [n_rotated(of_layer(i, cfg.rope), cfg.head_dim) for i in range(cfg.n_layer)]
    for rotated in set(by_layer):
        if rotated > cfg.head_dim:
            raise ValueError(f"rotary dimension {rotated} is larger than head_dim {cfg.head_dim}")
        if rotated < 2 or rotated % 2:
            raise ValueError(f"rotary dimension is {rotated}, expected an even number, at least 2")
        layers = {i for i in range(cfg.n_layer) if by_layer[i] == rotated}
        if folds.interleaved_rope:                 # row pairs (2i, 2i + 1) -> (i, i + R/2)
            mixed = cfg.head_dim if folds.interleaved_heads else rotated
            rope, rest = torch.arange(mixed), torch.arange(mixed, cfg.head_dim)
            _reorder_heads(tensors, torch.cat((rope[::2], rope[1::2], rest)), layers)
        if folds.reversed_rope:                    # rotating (a, b) by -t is rotating (b, a) by t
            _reorder_heads(tensors, torch.arange(cfg.head_dim).roll(cfg.head_dim // 2), layers)
        if rotated < cfg.head_dim:
            _reorder_heads(tensors, _partial_rope_order(rotated, cfg.head_dim), layers)


def _permute_latent_rope(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Latent attention: de-interleave the rotated rows, the last of each query head and latent."""
    latent, rope = cfg.mixer[0], torch.arange(cfg.head_dim)
    if folds.interleaved_rope:
        rope = torch.cat((rope[::2], rope[1::2]))
    for name, t in tensors.items():
        is_q, is_latent = re.search(r"\.wq(_b)?\.", name), ".wkv_a." in name
        if is_q or is_latent:
            n_nope = latent.nope_dim if is_q else latent.kv_rank
            order = torch.cat((torch.arange(n_nope), n_nope + rope))
            if t.shape[0] % len(order) == 0:       # else check() reports the shape
                heads = torch.arange(t.shape[0]).view(-1, len(order))
                tensors[name] = index_select(t, heads[:, order].flatten())


def _split_up_projections(tensors: dict[str, LazyTensor], cfg: ModelConfig) -> None:
    """wkv_b [N (nope + v), rank] -> wk_b [N, rank, nope], absorbed into q, and wv_b [N, v, rank].

    Without wq_a, wq and wkv_a are one matrix in memory: wq gets a zero bias if wkv_a has one.
    """
    latent = cfg.mixer[0]
    widths = latent.nope_dim, latent.v_dim
    for name in [name for name in tensors if name.endswith(".wkv_b.weight")]:
        t, x = tensors.pop(name), name.removesuffix(".wkv_b.weight")
        scales, zeros = (tensors.pop(f"{x}.wkv_b.{part}", None) for part in ("scales", "zeros"))
        if zeros is not None:                      # wk_b is transposed: its groups would be columns
            t = unpacked_int4(t, scales, zeros)
        if t.shape != (cfg.n_head * sum(widths), latent.kv_rank):
            raise ValueError(f"{t.name} is {list(t.shape)}, but the config asks for "
                             f"{[cfg.n_head * sum(widths), latent.kv_rank]}")
        heads = torch.arange(t.shape[0]).view(cfg.n_head, -1).split(widths, dim=1)
        k, v = (index_select(t, rows.flatten()) for rows in heads)
        k, v = (part.derived(part.read_rows, shape=(cfg.n_head, width, latent.kv_rank))
                for part, width in zip((k, v), widths))
        tensors[f"{x}.wk_b.weight"], tensors[f"{x}.wv_b.weight"] = transpose(k), v
    if cfg.qkv_bias and latent.q_rank is None:
        for name in [name for name in tensors if name.endswith(".wkv_a.bias")]:
            wq = name.replace("wkv_a", "wq")
            n = cfg.n_head * (latent.nope_dim + cfg.head_dim)
            tensors.setdefault(wq, constant(wq, (n,), 0.0))


def _share_kv(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Drop unused K/V weights of layers with shared KV; copy wk to wv where k_is_v."""
    for i in range(cfg.n_layer):
        mixer, window = (tiled[i % len(tiled)] for tiled in (cfg.mixer, cfg.window))
        for name in [name for name in tensors if name.startswith(f"layers.{i}.attn.")]:
            if isinstance(mixer, SharedKV) and re.search(r"\.(wk|wv|k_norm)\.", name):
                del tensors[name]
            elif folds.k_is_v and window is None and ".wk." in name:
                tensors.setdefault(name.replace(".wk.", ".wv."), tensors[name])
    for name in [name for name in tensors if name.endswith(".router_norm.weight")]:
        tensors[name] = scaled(tensors[name], cfg.dim**-0.5)


def _pad_values(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Pad value heads of v_dim channels to head_dim: wv gets zero rows, wo zero columns."""
    for name, t in tensors.items():
        if not re.search(r"\.attn\.(wv|wo)\.", name):
            continue
        if not name.endswith((".weight", ".bias")):
            raise ValueError("quantized values narrower than keys are not supported: use the "
                             "original model")
        if ".wv." in name and t.shape[0] % folds.v_dim == 0:           # else check() reports it
            tensors[name] = _times(pad_rows(t, folds.v_dim, cfg.head_dim), folds.v_scale)
        elif name.endswith("wo.weight") and t.shape[-1] % folds.v_dim == 0:
            tensors[name] = pad_columns(t, folds.v_dim, cfg.head_dim)


def _times(t: LazyTensor, factor: float) -> LazyTensor:
    return t if factor == 1 else scaled(t, factor)


def _add_constants(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Add constant norm weights and biases that the file omits, and ALiBi's slopes."""
    if not (folds.constants or getattr(cfg.attention, "alibi", False)):
        return
    slopes = alibi_slopes(cfg.n_head, folds.slopes_base) * folds.slopes_scale
    for name, shape in tensor_shapes(cfg).items():
        for pattern, value in folds.constants.items():
            if re.search(pattern, name):
                tensors.setdefault(name, constant(name, shape, value))
        if name.endswith("attend.slopes"):
            tensors[name] = cached(name, shape, torch.float32, lambda: slopes)


def alibi_slopes(n_head: int, base: float = 8.0) -> torch.Tensor:
    """2^(-base i / n) for the first n heads, a power of two; the rest: every second slope of 2n.

    arXiv 2108.12409.
    """
    n = 1 << (n_head.bit_length() - 1)
    slopes = 2.0 ** (-base / n * torch.arange(1, n + 1))
    between = 2.0 ** (-base / (2 * n) * torch.arange(1, 2 * n + 1, 2))
    return torch.cat((slopes, between[:n_head - n]))


def _norm_before_rope(tensors: dict[str, LazyTensor]) -> None:
    """Norms after RoPE -> norms before it with weight 1, and the product of both weights after it.

    Rotation keeps the RMS but mixes channels, so the weights cannot move. A score is a sum over
    q_i k_i, so their product can be applied to q alone.
    """
    for name in [name for name in tensors if name.endswith(".q_norm.weight")]:
        q, k = tensors[name], tensors[name.replace("q_norm", "k_norm")]
        gain = name.replace("q_norm.weight", "attend.gain")
        tensors[gain] = cached(gain, q.shape, torch.float32, lambda q=q, k=k: qk_gain(q, k), q, k)
        for norm in (name, name.replace("q_norm", "k_norm")):
            tensors[norm] = constant(norm, q.shape, 1.0)


def qk_gain(q: LazyTensor, k: LazyTensor) -> torch.Tensor:
    return q.whole().float() * k.whole().float()


def _split_convolutions_again(tensors: dict[str, LazyTensor], cfg: ModelConfig) -> None:
    """transformers 5.23 splits OLMo Hybrid's joint convolution into three equal parts as it saves.
    """
    for i in range(cfg.n_layer):
        shape, names = of_layer(i, cfg.mixer), [f"layers.{i}.attn.conv_{x}" for x in "qkv"]
        if not isinstance(shape, GatedDelta) or not all(name in tensors for name in names):
            continue
        parts, sizes = [tensors[name] for name in names], shape.n_rows()
        n, stored = sum(sizes), tuple(part.shape[0] for part in parts)
        if stored == sizes or sum(stored) != n:    # else check() reports it
            continue
        whole = cached(parts[0].name, (n, *parts[0].shape[1:]), parts[0].dtype,
                       lambda parts=parts: torch.cat([part.whole() for part in parts]), *parts)
        for name, size, end in zip(names, sizes, itertools.accumulate(sizes)):
            tensors[name] = narrow(whole, 0, end - size, end)


def _group_value_heads(tensors: dict[str, LazyTensor], cfg: ModelConfig) -> None:
    """Make DeltaNet's value heads of one key head adjacent; llama.cpp tiles them. In place."""
    for name, t in tensors.items():
        layer = re.match(r"layers\.(\d+)\.attn\.(v|gate|beta|decay|decay_\w+|conv_v|wo)\b", name)
        shape = layer and of_layer(int(layer[1]), cfg.mixer)
        if not shape:
            continue
        columns = layer[2] == "wo"
        n = t.shape[-1] if columns else t.n_row
        if n % shape.n_v_head or not n:            # check() reports the shape
            continue
        heads = torch.arange(n).view(-1, shape.n_k_head, n // shape.n_v_head)
        order = heads.transpose(0, 1).flatten()
        if columns:
            tensors[name] = t.derived(lambda a, b, t=t, order=order: t.read_rows(a, b)[:, order])
        else:
            tensors[name] = index_select(t, order)


def _partial_rope_order(rotated: int, head_dim: int) -> torch.Tensor:
    """Partial RoPE rotates pairs (i, i + R/2): move them to (i, i + H/2), where the model has them.

    Scores do not depend on the order of channels.
    """
    rope = torch.arange(rotated).chunk(2)
    rest = torch.arange(rotated, head_dim).chunk(2)
    return torch.cat((rope[0], rest[0], rope[1], rest[1]))


def _reorder_heads(tensors: dict[str, LazyTensor], order: torch.Tensor, layers: set) -> None:
    """Permute the rows of each query and key head of these layers, in place."""
    for name, t in tensors.items():
        if layer_of(name) not in layers:
            continue
        fits = t.shape and t.shape[0] % len(order) == 0    # else check() reports the shape
        if fits and re.search(r"\.(w[qk]|[qk]_norm)\.", name):
            heads = torch.arange(t.shape[0]).view(-1, len(order))
            tensors[name] = index_select(t, heads[:, order].flatten())
