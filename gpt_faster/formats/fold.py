"""What goes into the weights when they are loaded, so that the model need not know of it.

    tensors = fold(tensors, cfg, Folds(norm_offset=1.0))
"""

import math
import re
from dataclasses import dataclass, field

import torch

from checkpoint import LazyTensor, narrow, tensor_shapes
from gpt_faster.formats.hub_quantized import unpacked_int4
from gpt_faster.formats.lazy import cached, constant, index_select, offset, scaled, transpose
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.rope import n_rotated
from gpt_faster.layers.shared_kv import SharedKV
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
    k_is_v: bool = False                           # layers without a window: wv is wk (Gemma 4)
    constants: dict[str, float] = field(default_factory=dict)  # what no file holds: pattern, value


def fold(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> dict[str, LazyTensor]:
    """The tensors, by our names, as the model takes them; nothing is read yet."""
    tensors = dict(tensors)
    for name, t in tensors.items():
        if len(t.shape) > 1 and re.search(r"choice_bias|\.[qk]_norm\.", name):   # [1, E], [N, H]
            n = math.prod(t.shape)
            t = cached(t.name, (n,), t.dtype, lambda t=t: t.whole().flatten(), t)
            tensors[name] = t
        if name.endswith("attn.taps") and len(t.shape) == 3:           # [width, 1, taps]
            tensors[name] = t.derived(t.read_rows, shape=(t.shape[0], t.shape[2]))
        weighted = re.search(rf"{folds.norm_offset_of}.*\.weight$", name)
        if folds.norm_offset and weighted:
            tensors[name] = offset(t, folds.norm_offset)
        if folds.log_decay and name.endswith("decay_rate"):
            tensors[name] = t.derived(lambda a, b, t=t: -t.read_rows(a, b).float().exp(),
                                      dtype=torch.float32)
    if isinstance(cfg.mixer[0], Latent):
        _order_latents(tensors, cfg, folds)
        _split_up_projections(tensors, cfg)
    else:
        _order_for_rope(tensors, cfg, folds)
    if folds.one_norm:
        for name in [name for name in tensors if ".attn_norm." in name]:
            tensors.setdefault(name.replace("attn_norm", "ffn_norm"), tensors[name])
    if folds.first_pos and tensors.get("pos_embed.weight") and (
            len(tensors["pos_embed.weight"].shape) == 2):
        table = tensors["pos_embed.weight"]
        tensors["pos_embed.weight"] = narrow(table, 0, folds.first_pos, table.shape[0])
    for name in [name for name in tensors if ".post_" in name and folds.post_norm_scale != 1]:
        tensors[name] = scaled(tensors[name], folds.post_norm_scale)
    _share_keys(tensors, cfg, folds)
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


def _order_for_rope(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    rotated = n_rotated(cfg.rope[0], cfg.head_dim)
    if rotated > cfg.head_dim:
        raise ValueError(f"RoPE is to turn {rotated} numbers of heads that have {cfg.head_dim}")
    if rotated < 2 or rotated % 2:
        raise ValueError(f"RoPE is to turn {rotated} numbers of a head, expected an even number")
    if folds.interleaved_rope:                     # row pairs (2i, 2i + 1) -> (i, i + R/2)
        turning, still = torch.arange(rotated), torch.arange(rotated, cfg.head_dim)
        _reorder_heads(tensors, torch.cat((turning[::2], turning[1::2], still)))
    if folds.reversed_rope:                        # (a, b) turned back is (b, a) turned on
        _reorder_heads(tensors, torch.arange(cfg.head_dim).roll(cfg.head_dim // 2))
    if rotated < cfg.head_dim:
        _reorder_heads(tensors, _partial_rope_order(rotated, cfg.head_dim))


def _order_latents(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Of latent attention RoPE turns the last rows: of each query head, and of the latent's."""
    latent, rope = cfg.mixer[0], torch.arange(cfg.head_dim)
    if folds.interleaved_rope:
        rope = torch.cat((rope[::2], rope[1::2]))
    for name, t in tensors.items():
        is_q, is_latent = re.search(r"\.wq(_b)?\.", name), ".wkv_a." in name
        if is_q or is_latent:
            still = latent.nope_dim if is_q else latent.kv_rank
            order = torch.cat((torch.arange(still), still + rope))
            if t.shape[0] % len(order) == 0:       # else check() says what is wrong
                heads = torch.arange(t.shape[0]).view(-1, len(order))
                tensors[name] = index_select(t, heads[:, order].flatten())


def _split_up_projections(tensors: dict[str, LazyTensor], cfg: ModelConfig) -> None:
    """wkv_b [N (nope + v), rank] -> wk_b [N, rank, nope], which goes into q, and wv_b [N, v, rank].

    Where wq_a is missing, wq has no bias and lies above wkv_a, which may have one.
    """
    latent = cfg.mixer[0]
    widths = latent.nope_dim, latent.v_dim
    for name in [name for name in tensors if name.endswith(".wkv_b.weight")]:
        t, x = tensors.pop(name), name.removesuffix(".wkv_b.weight")
        leaves = [tensors.pop(f"{x}.wkv_b.{leaf}", None) for leaf in ("scales", "zeros")]
        if leaves[1] is not None:                  # one is transposed: no groups of its rows
            t = unpacked_int4(t, *leaves)
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


def _share_keys(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Values made as keys are; and what files hold of layers that take another layer's keys."""
    for i in range(cfg.n_layer):
        mixer, window = (tiled[i % len(tiled)] for tiled in (cfg.mixer, cfg.window))
        for name in [name for name in tensors if name.startswith(f"layers.{i}.attn.")]:
            if isinstance(mixer, SharedKV) and re.search(r"\.(wk|wv|k_norm)\.", name):
                del tensors[name]
            elif folds.k_is_v and window is None and ".wk." in name:
                tensors.setdefault(name.replace(".wk.", ".wv."), tensors[name])
    for name in [name for name in tensors if name.endswith(".router_norm.weight")]:
        tensors[name] = scaled(tensors[name], cfg.dim**-0.5)


def _add_constants(tensors: dict[str, LazyTensor], cfg: ModelConfig, folds: Folds) -> None:
    """Norms' weights and biases that a family does not have, slopes that it works out."""
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
        n = t.shape[-1] if columns else t.n_row
        if n % shape.n_v_head or not n:            # check() says what is wrong
            continue
        heads = torch.arange(n).view(-1, shape.n_k_head, n // shape.n_v_head)
        order = heads.transpose(0, 1).flatten()
        if columns:
            tensors[name] = t.derived(lambda a, b, t=t, order=order: t.read_rows(a, b)[:, order])
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
        fits = t.shape and t.shape[0] % len(order) == 0    # else check() says what is wrong
        if fits and re.search(r"\.(w[qk]|[qk]_norm)\.", name):
            heads = torch.arange(t.shape[0]).view(-1, len(order))
            tensors[name] = index_select(t, heads[:, order].flatten())
