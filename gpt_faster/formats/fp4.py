"""NVFP4 and MXFP4 as files store them -> weights that can keep their four bits (layers/fp4.py).

Owns the layouts of ModelOpt, compressed-tensors, gpt-oss and GGUF. Every tensor is read dequantized
by default, so that it can be folded, merged or rounded again; fp4_linears() says which may keep
their codes, and fp4_leaves() makes these. Knows no config.json.

    for t in nvfp4_of_modelopt(tensors): ...       # removes what it reads from the dict
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from checkpoint import Checkpoint, LazyTensor, blank_model, disk_names
from gpt_faster.formats.lazy import Packed
from gpt_faster.layers.fp4 import MXFP4, NVFP4, Fp4
from model import ExpertLinear
from quantize import LINEARS

# ---- A layout -> a tensor -----------------------------------------------------------------------

def nvfp4_of_modelopt(tensors: dict[str, LazyTensor]) -> list[LazyTensor]:
    """X uint8 [(E,) out, in/2]; X_scale e4m3 [(E,) out, in/16]; X_scale_2 fp32, one per matrix.

    X is a linear's weight, or experts' matrices, whose scales are X_weight_scale, X_weight_scale_2.
    w = code * scale * scale_2.
    """
    found = []
    for name in [n for n, t in tensors.items() if t.dtype == torch.uint8
                 and n.endswith((".weight", "_proj"))]:
        x = name if name.endswith(".weight") else f"{name}_weight"
        codes, scales, factor = take(tensors, name, f"{x}_scale", f"{x}_scale_2")
        found.append(fp4_weight(name, "NVFP4", NVFP4, codes, scales, factor, lambda g: g))
    return found


def fp4_of_compressed_tensors(tensors: dict[str, LazyTensor]) -> list[LazyTensor]:
    """weight_packed uint8 [out, in/2], and weight_scale, of which the dtype names the format:

    nvfp4: e4m3 [out, in/16], and weight_global_scale fp32 [1], a divisor: w = code * scale / global
    mxfp4: uint8 [out, in/32], exponents
    """
    found = []
    for name in [n for n, t in tensors.items() if n.endswith(".weight_packed")
                 and t.dtype == torch.uint8]:
        x = name.removesuffix("_packed")
        if f"{x}_zero_point" in tensors:
            raise ValueError(f"{x}_zero_point: fp4 with zero points is not supported")
        codes, scales = take(tensors, name, f"{x}_scale")
        if scales.dtype == torch.float8_e4m3fn:
            [divisor] = take(tensors, f"{x}_global_scale")
            found.append(fp4_weight(x, "NVFP4", NVFP4, codes, scales, divisor, lambda g: 1 / g))
        else:
            found.append(fp4_weight(x, "MXFP4", MXFP4, codes, scales))
    return found


def mxfp4_of_gpt_oss(tensors: dict[str, LazyTensor]) -> list[LazyTensor]:
    """X_blocks uint8 [E, out, in/32, 16], two codes a byte, low first; X_scales [E, out, in/32]."""
    found = []
    for name in [n for n in tensors if n.endswith("_blocks")]:
        x = name.removesuffix("_blocks")
        codes, scales = take(tensors, name, f"{x}_scales")
        if len(codes.shape) != 4 or codes.shape[-1] != 16:
            raise mismatch(x, codes, scales)
        *lead, n_block, _ = codes.shape
        codes = codes.derived(lambda a, b, t=codes: t.read_rows(a, b).flatten(1),
                              shape=(*lead, 16 * n_block))
        found.append(fp4_weight(x + ".weight", "MXFP4", MXFP4, codes, scales))
    return found


def gguf_leaves(t: LazyTensor, kind: str, read_bytes: Callable[[int, int], Tensor]) -> tuple:
    """The scheme and the leaves of a GGUF tensor (ggml-common.h); () if it is another kind.

    MXFP4: blocks of 32 inputs: the scale, then 16 bytes whose low nibbles are the first 16 codes.
    NVFP4: blocks of 64 inputs: 4 scales, then for each 8 bytes, of 16 codes in the same order.
    """
    if kind not in ("MXFP4", "NVFP4"):
        return ()
    scheme, n_scale = (MXFP4, 1) if kind == "MXFP4" else (NVFP4, 4)
    n_block = n_scale * scheme.block_bytes

    def blocks(a, b):
        data = read_bytes(a, b).unflatten(-1, (-1, n_block))
        scales = data[..., :n_scale]
        if scheme is NVFP4:                        # llama.cpp: no sign, and 127 is no NaN but zero
            scales = (scales & 127).where(scales & 127 != 127, 0)
        halves = data[..., n_scale:].unflatten(-1, (n_scale, -1))
        codes = torch.cat((halves & 15, halves >> 4), -1)
        codes = codes[..., ::2] | codes[..., 1::2] << 4
        return torch.cat((codes, scales[..., None]), -1).flatten(1)
    return scheme, _leaves(t.name, scheme, t.shape, blocks, lambda a, b: torch.ones(b - a, 1), t)


def with_gguf_factors(tensors: list[LazyTensor],
                      is_known: Callable[[str], bool]) -> list[LazyTensor]:
    """The factors X.scale [1] or [E] of NVFP4's X.weight, applied to it; X.input_scale is dropped.

    is_known(name): the architecture has a tensor of this name, which is something else.
    """
    factors = {t.name: t for t in tensors if t.name.endswith((".scale", ".input_scale"))}
    applied, new = set(), []
    for t in tensors:
        x = t.name.removesuffix(".weight")
        if t.packed and t.packed.scheme is NVFP4 and not is_known(f"{x}.scale"):
            applied |= {f"{x}.scale", f"{x}.input_scale"}
            t = _times_factor(t, factors[f"{x}.scale"]) if f"{x}.scale" in factors else t
        new.append(t)
    return [t for t in new if t.name not in applied]


def _times_factor(t: LazyTensor, factor: LazyTensor) -> LazyTensor:
    if factor.n_row not in (1, t.shape[0] if len(t.shape) == 3 else 1):
        raise mismatch(t.name, t, factor)
    factors = _row_factors(factor, t.shape[-2])
    weight, row_scales = t.packed.leaves
    row_scales = row_scales.derived(
        lambda a, b, t=row_scales: t.read_rows(a, b) * factors(a, b))
    return t.derived(lambda a, b: t.read_rows(a, b).float() * factors(a, b),
                     packed=t.packed._replace(leaves=(weight, row_scales)))


def _row_factors(factor: LazyTensor, n_out: int) -> Callable[[int, int], Tensor]:
    """(a, b) -> fp32 [b - a, 1]: the matrix's factor, or of experts their own."""
    def rows(a, b):
        each = factor.whole().float().reshape(-1, 1)
        return each[torch.arange(a, b) // n_out] if len(each) > 1 else each.expand(b - a, 1)
    return rows


def take(tensors: dict[str, LazyTensor], *names: str) -> list[LazyTensor]:
    """Remove them from the dict. ValueError names one that is missing."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{names[0]}: {', '.join(missing)} is missing")
    return [tensors.pop(name) for name in names]


def mismatch(name: str, *tensors: LazyTensor) -> ValueError:
    shapes = " and ".join(str(list(t.shape)) for t in tensors)
    return ValueError(f"{name}: shapes {shapes} do not match")


def fp4_weight(name: str, kind: str, scheme: Fp4, codes: LazyTensor, scales: LazyTensor,
               global_scale: LazyTensor | None = None,
               factor: Callable[[Tensor], Tensor] | None = None) -> LazyTensor:
    """The dequantized tensor [(E,) out, in], with its leaves.

    codes: uint8 [(E,) out, in/2]; scales: bytes [(E,) out, in/G]; global_scale: of the matrix, or
    one of each expert's; factor(global_scale): by which the weights are multiplied.
    ValueError: shapes or dtypes that do not match.
    """
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
    parts = [codes, scales, *([global_scale] if global_scale else [])]
    n_factor = global_scale.n_row if global_scale else 1
    fits = (len(shape) in (2, 3) and scheme.fits(shape[-1])
            and scales.shape == (*shape[:-1], shape[-1] // scheme.groupsize)
            and n_factor in (1, shape[0] if len(shape) == 3 else 1))
    if not fits:
        raise mismatch(name, *parts)
    if scales.dtype not in (torch.uint8, scheme.scale_dtype):
        raise ValueError(f"{scales.name} of {scales.dtype} is not supported, only "
                         f"{scheme.scale_dtype}")

    def blocks(a, b):
        pairs = codes.read_rows(a, b).unflatten(-1, (-1, scheme.groupsize // 2))
        scale_bytes = scales.read_rows(a, b).view(torch.uint8)
        return torch.cat((pairs, scale_bytes[..., None]), -1).flatten(1)

    def row_scales(a, b):
        if global_scale is None:
            return torch.ones(b - a, 1)
        return factor(_row_factors(global_scale, shape[-2])(a, b))

    leaves = _leaves(name, scheme, shape, blocks, row_scales, *parts)

    def values(a, b):
        weight, row_scale = (leaf.read_rows(a, b) for leaf in leaves)
        return scheme.dequantize(weight, row_scale[:, 0], None, torch.float32)
    return LazyTensor(name, shape, torch.bfloat16, values, tuple(parts),
                      packed=Packed(kind, scheme, leaves))


def _leaves(name, scheme, shape, blocks, row_scales, *made_of) -> tuple[LazyTensor, LazyTensor]:
    n_byte = scheme.leaves(shape)["weight"][0][-1]

    def checked_blocks(a, b):
        rows = blocks(a, b)
        _, scale_bytes = scheme.split(rows)
        sign = 128 if scheme is NVFP4 else 0
        if (scale_bytes | sign == 255).any():
            raise ValueError(f"{name} has NaN or infinite weights")
        return rows

    def checked_row_scales(a, b):
        rows = row_scales(a, b)
        if not rows.isfinite().all():
            raise ValueError(f"{name} has NaN or infinite weights")
        return rows
    return (LazyTensor(name, (*shape[:-1], n_byte), torch.uint8, checked_blocks, made_of),
            LazyTensor(name, (*shape[:-1], 1), torch.float32, checked_row_scales, made_of))


# ---- Which linears keep their codes -------------------------------------------------------------

def fp4_linears(source: Checkpoint) -> dict[str, Fp4]:
    """The weights that can stay in fp4: all parts of one matrix in memory have the same scheme."""
    found = {}
    if not any(t.packed and isinstance(t.packed.scheme, Fp4) for t in source.tensors.values()):
        return found
    for name, module in blank_model(source.cfg, torch.float32, source.kind).named_modules():
        if not isinstance(module, nn.Linear | ExpertLinear):
            continue
        weights = [f"{part}.weight" for part in disk_names(name)]
        packed = [source.tensors[w].packed for w in weights if w in source.tensors]
        schemes = {p.scheme if p else None for p in packed}
        is_linear = all(LINEARS.search(w) or w == "head.weight" for w in weights)
        if is_linear and len(packed) == len(weights) and len(schemes) == 1:
            [scheme] = schemes
            found |= dict.fromkeys(weights, scheme) if isinstance(scheme, Fp4) else {}
    return found


def fp4_leaves(t: LazyTensor) -> list[LazyTensor]:
    """X.weight -> X.weight and X.scales in the layout of its scheme."""
    weight, row_scales = t.packed.leaves
    x = t.name.removesuffix(".weight")

    def scales(a, b):                              # of experts [E, out]: a row is a whole matrix
        n = row_scales.shape[1] if len(row_scales.shape) > 2 else 1
        return row_scales.read_rows(a * n, b * n).view(b - a, *row_scales.shape[1:-1])
    return [weight.derived(weight.read_rows, name=f"{x}.weight", scheme=t.packed.scheme),
            row_scales.derived(scales, name=f"{x}.scales", shape=row_scales.shape[:-1])]
