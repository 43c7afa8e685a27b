"""AWQ, GPTQ, fp8, fp4 and compressed-tensors -> our int4, or plain weights, row by row.

Defines the layouts: which tensors on disk form one linear, how integers are packed, which scale
applies to each weight. Uses only `quantization_config` from config.json; independent of file
formats and model families. In every layout, weight = (code - zero point) * scale. Four-bit
weights in contiguous groups stay in four bits (`_int4`); all others are dequantized in fp32
(`_scaled`). NVFP4 and MXFP4 are read by fp4.py:

    tensors = dequantized(tensors, config["quantization_config"])
"""

import math
import re

import torch

from checkpoint import LazyTensor, brief
from gpt_faster.formats.fp4 import (
    fp4_of_compressed_tensors,
    mxfp4_of_gpt_oss,
    nvfp4_of_modelopt,
)
from gpt_faster.formats.lazy import Packed, cached, offset

ALTERNATIVES_HINT = ("use the original model, or a GGUF, AWQ, GPTQ, fp8 or compressed-tensors "
                     "version")
# AWQ's int32 holds eight adjacent outputs, lowest bits first, in this order (GPTQ: 0 1 2 ...)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
              "nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense")
MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")

# scales of activations and the KV cache: not needed, since we compute in floating point
UNUSED = re.compile(r"(\.|_proj_)(activation_scale|"
                    r"(input|output|prob|kv|[qkv])_(global_scale|scale_ub|scale|zero_point))$")
PARTNER = re.compile(r"\.(qweight|qzeros|scales|g_idx)$|_proj_(scale|scale_inv|blocks|scales)$|"
                     r"weight_(scale|scale_2|global_scale|scale_inv|zero_point|g_idx|packed|shape)$")


is_int = lambda v: type(v) is int and -1 <= v < 1 << 22
is_str, is_dict = (lambda v: isinstance(v, str)), (lambda v: isinstance(v, dict))
SCHEME = dict(format=is_str, weights=dict(
    group_size=is_int, block_structure=lambda v: isinstance(v, str | list)))
METHOD = dict(                                     # types of quantization_config's keys
    quant_method=is_str, quant_algo=is_str, version=is_str, format=is_str, backend=is_str,
    checkpoint_format=is_str, bits=is_int, w_bit=is_int, group_size=is_int, q_group_size=is_int,
    weight_block_size=lambda v: isinstance(v, list) and len(v) == 2 and all(map(is_int, v)),
    config_groups=[SCHEME], sparsity_config=dict(format=is_str),
    transform_config=dict(config_groups=is_dict), quantized_layers=[dict(quant_algo=is_str)])


def check_types(found, expected, name: str = "it") -> None:
    """Check types recursively. ValueError names a key with a wrong one.

    expected: a predicate, a dict of expected types by key (null is allowed), or [type] for an
    object whose values all have that type.
    """
    inner = expected[0] if isinstance(expected, list) else None
    fits = is_dict(found) if isinstance(expected, dict | list) else expected(found)
    if not fits:
        raise ValueError(f"'{name}' is {brief(found)}, which has the wrong type or range")
    if isinstance(expected, dict | list):
        for key, value in found.items():
            value_type = inner or expected.get(key)
            if value_type and (value is not None or inner):
                check_types(value, value_type, key)


def dequantized(tensors: list[LazyTensor], quantization: dict) -> list[LazyTensor]:
    """Replace the tensors of each quantized linear with one X.weight [out, in] or [E, out, in], or
    with X.weight, X.scales and X.zeros in quantize.py's int4 format.

    quantization: config.json's quantization_config (or compression_config). Other tensors pass
    unchanged; scales of activations and of the KV cache are dropped. Rows are read as fp32; the
    tensor's `dtype` is that of the scales if 16-bit, else bfloat16. Reads no large tensors.
    ValueError: an unsupported method, format, version or bit width; tensors that are missing or
    whose shapes do not match.
    """
    check_types(quantization, METHOD)
    method = quantization.get("quant_method")
    if method not in READERS:
        _refuse(f"quant_method {brief(method)}", READERS)
    tensors = {t.name: t for t in tensors if not UNUSED.search(t.name)}
    weights = list(READERS[method](tensors, quantization))   # removes what it uses from `tensors`
    for t in weights:
        if t.dtype.is_floating_point and t.name.endswith("weight") and not t.packed:
            t.packed = Packed(method)
    orphan = next((name for name in tensors if PARTNER.search(name)), None)
    if orphan:
        raise ValueError(f"{orphan}: its quantized weight is missing")
    return [*tensors.values(), *weights]


# ---- Layouts: each removes its tensors from the dict and yields weights -------------------------

def _fp8(tensors, quantization, dtypes="fp8", sizes=None):
    """X [out, in] or [E, out, in] with X_scale_inv or X_scale per tensor, row, block or group."""
    sizes = sizes or [quantization.get("weight_block_size") or (0, 0)]
    for name, weight in list(tensors.items()):
        if weight.dtype.itemsize > 1 or weight.dtype == torch.bool or PARTNER.search(name):
            continue
        del tensors[name]
        dtype = "fp8" if weight.dtype.is_floating_point else str(weight.dtype).split(".")[1]
        if dtype not in dtypes:
            _refuse(f"{name} of {dtype}", [dtypes])
        scale = tensors.pop(f"{name}_scale_inv", None) or tensors.pop(f"{name}_scale", None)
        if scale is None:
            raise ValueError(f"{name}: {name}_scale_inv or {name}_scale is missing")
        zero, group = (tensors.pop(name + s, None) for s in ("_zero_point", "_g_idx"))
        yield _scaled(name, weight.shape, weight.read_rows, scale, zero, sizes, group, weight)


def _modelopt(tensors, quantization):
    """The tensors decide between fp8 and NVFP4; MIXED_PRECISION names a method for each layer."""
    layers = quantization.get("quantized_layers") or {}
    of_layers = [layer["quant_algo"] for layer in layers.values() if layer.get("quant_algo")]
    for algorithm in [quantization.get("quant_algo"), *of_layers]:
        if algorithm not in MODELOPT_ALGORITHMS:
            _refuse(f"modelopt's quant_algo {brief(algorithm)}", map(repr, MODELOPT_ALGORITHMS))
    yield from nvfp4_of_modelopt(tensors)
    yield from _fp8(tensors, quantization)


def _awq(tensors, quantization):
    """qweight [in, out/8], qzeros [in/G, out/8] int32; scales [in/G, out] (AutoAWQ's "gemm")."""
    version = quantization.get("version") or quantization.get("format") or "gemm"
    if version.lower() != "gemm" or quantization.get("backend") == "llm-awq":
        _refuse(f"AWQ version {version!r}, backend {quantization.get('backend')!r}", ["'gemm'"])
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if bits != 4:
        _refuse(f"AWQ in {bits} bits", ["4 bits"])
    sizes = [(1, quantization.get("group_size", quantization.get("q_group_size")) or 128)]
    points = lambda t: _unpacked(t, 4, AWQ_ORDER)
    for x, weight, zeros, scales in _linears(tensors, ".qweight", torch.int32,
                                              (".qzeros", ".scales")):
        (n_in, n_word), (n_group, n_out) = _shape_2d(weight), _shape_2d(scales)
        _check(x, [weight, zeros, scales],
               n_word * 8 == n_out and zeros.shape == (n_group, n_word))
        yield from _grouped(x, 4, n_in, weight, zeros, scales, lambda t: points(t).T, points, sizes)


def _gptq(tensors, quantization):
    """qweight [in * bits/32, out], qzeros [groups, out * bits/32] int32; scales [groups, out].

    g_idx [in], optional: the group of each input (desc_act). "gptq" stores zero points minus 1.
    """
    version = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    bits = quantization.get("bits", 4)
    if quantization.get("is_marlin_format"):
        version = "marlin"
    if version not in ("gptq", "gptq_v2"):
        _refuse(f"GPTQ checkpoint_format {version!r}", ["'gptq'", "'gptq_v2'"])
    if bits not in (2, 3, 4, 8):
        _refuse(f"GPTQ in {bits} bits", ["2, 3, 4 and 8 bits"])
    if bits == 3 and version == "gptq" and "gptqmodel" in str(quantization.get("meta")):
        # versions of GPTQModel subtract the 1 from different bits
        _refuse("GPTQ in 3 bits by GPTQModel", ["checkpoint_format 'gptq_v2'"])
    sizes = [(1, quantization.get("group_size") or -1)]
    for x, weight, zeros, scales, group in _linears(tensors, ".qweight", torch.int32,
                                                     (".qzeros", ".scales"), (".g_idx",)):
        (n_word, n_out), (n_group, _) = _shape_2d(weight), _shape_2d(scales)
        # bits of this linear: GPTQModel's `dynamic` may set them by name
        bits = next((b for b in (2, 3, 4, 8)
                     if zeros.shape == (n_group, _ceil(n_out * b, 32))), 0)
        _check(x, [weight, zeros, scales], bits and scales.shape[1] == n_out)
        # the default argument binds this linear's bits
        yield from _grouped(x, bits, n_word * 32 // bits, weight, zeros, scales,
                            lambda t, bits=bits: _unpacked(t.T, bits),
                            lambda t, bits=bits: _zero_points(t, bits, version), sizes, group)


def _compressed_tensors(tensors, quantization):
    """weight_packed [out, in * bits/32] int32, weight_shape, or int8 or fp8 weight; weight_scale.

    Packed integers have an offset of 2^(bits-1); weight_zero_point is packed along out, or int8.
    Bits follow from weight_shape, the scaling strategy from the scale's shape, so that
    config_groups need not be matched to modules.
    """
    schemes = list((quantization.get("config_groups") or {}).values())
    formats = {quantization.get("format"), *(scheme.get("format") for scheme in schemes),
               (quantization.get("sparsity_config") or {}).get("format")}
    for name in sorted(formats - {None, "mixed-precision", *CT_FORMATS}):
        _refuse(f"compressed-tensors format {name!r}", CT_FORMATS)
    if (quantization.get("transform_config") or {}).get("config_groups"):
        _refuse("compressed-tensors with transform_config (rotated weights)", CT_FORMATS)
    if formats <= {None, "dense"}:                 # float weights; leftover scales are unused
        for name in [n for n in tensors if PARTNER.search(n)]:
            del tensors[name]
    weights = [scheme.get("weights") or {} for scheme in schemes]
    # two sizes with the same number of groups both cover the whole axis: equivalent
    sizes = [(0, 0), *((1, w.get("group_size") or 0) for w in weights)]
    sizes += [[int(n) for n in re.findall(r"\d+", str(w["block_structure"]))]      # or "128x128"
              for w in weights if w.get("block_structure")]
    yield from fp4_of_compressed_tensors(tensors)
    for x, packed, scale, shape, zero, group in _linears(
            tensors, ".weight_packed", torch.int32, (".weight_scale", ".weight_shape"),
            (".weight_zero_point", ".weight_g_idx")):
        shape = tuple(shape.whole().tolist())
        bits = next((b for b in (4, 8)
                     if packed.shape == (*shape[:1], _ceil(shape[-1] * b, 32))), 0)
        if not bits:
            _refuse(f"{x}: weight_packed {packed.shape} of {shape}", ["4 and 8 bits, 2 axes"])
        n_out, n_in = shape
        if zero and zero.dtype == torch.int32:
            _check(x, [packed, scale, zero],
                   zero.shape == (_ceil(n_out * bits, 32), *scale.shape[1:]))
            zero = cached(x, scale.shape, torch.float32,
                          lambda zero=zero, bits=bits, n=n_out:
                              _signed(zero.whole().T, bits, n).T)
        values = lambda a, b, packed=packed, bits=bits, n=n_in: _signed(
            packed.read_rows(a, b), bits, n)
        if bits == 4 and _plain_groups(shape, scale, zero, sizes, group):
            codes = lambda a, b, values=values: (values(a, b) + 8).to(torch.uint8)
            point = zero and offset(zero, 8)
            yield from _int4(x, shape, codes, scale, point, packed)
        else:
            yield _scaled(x + ".weight", shape, values, scale, zero, sizes, group, packed)
    yield from _fp8(tensors, quantization, "fp8 or int8", sizes)


def _mxfp4(tensors, quantization):
    return mxfp4_of_gpt_oss(tensors)


READERS = {"fp8": _fp8, "fbgemm_fp8": _fp8, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq,
           "compressed-tensors": _compressed_tensors, "mxfp4": _mxfp4}


# ---- Shared by the layouts ----------------------------------------------------------------------

def _scaled(name, shape, values, scale, zero, sizes, group, packed):
    """A LazyTensor of (values(a, b) - zero) * scale.

    scale, zero: scalar, [out], or [(E,) out/bo, in/bi], where the last block may be partial;
    bo, bi: 1, the whole axis, or from one of `sizes`. group [in]: the group of each column,
    instead of bi. packed: the tensor that values() reads.
    """
    n_out, n_in = shape[-2:] if len(shape) > 1 else (0, 0)
    single = math.prod(scale.shape) == 1
    grid = (1, 1) if single else (*scale.shape, 1) if len(scale.shape) == 1 else scale.shape
    bo, bi = (next((s for s in (1, n, *size) if s > 0 and _ceil(n, s) == count), 0)
              for n, count, size in zip((n_out, n_in), grid[-2:], zip(*sizes)))
    _check(name, [scale, zero or scale], n_in and bo and (bi or group) and (
        single or grid[:-2] == shape[:-2]) and (zero is None or zero.shape == scale.shape))
    if group:
        _check(name, [scale, group], group.shape == (n_in,))

    def spread(t, a, b, column):
        """The scales or zero points of rows [a, b): [b - a or 1, in or 1]."""
        if single:
            return _number(t.whole()).reshape(1, 1)
        row = torch.arange(a, b)
        row = row // n_out * grid[-2] + row % n_out // bo
        grouped = _number(t.read_rows(int(row[0]), int(row[-1]) + 1)).reshape(-1, grid[-1])
        grouped = grouped[row - row[0]] if bo > 1 else grouped
        if grid[-1] == 1:
            return grouped
        return grouped.repeat_interleave(bi, 1)[:, :n_in] if column is None else grouped[:, column]

    def rows(a, b):
        column = group.whole().long() if group else None
        if group and not -1 <= int(column.min()) <= int(column.max()) < grid[-1]:
            raise ValueError(f"{group.name} has group indices out of range: there are {grid[-1]} "
                             "groups")
        if group and bi and (column <= 0).all():   # all 0 or -1: groups in order
            column = None
        w = values(a, b).float()
        if zero:
            w = w - spread(zero, a, b, column)
        return w * spread(scale, a, b, column)

    half = scale.dtype in (torch.float16, torch.bfloat16)
    made_of = tuple(t for t in (packed, scale, zero, group) if t)
    return LazyTensor(name, tuple(shape), scale.dtype if half else torch.bfloat16, rows, made_of)


def _plain_groups(shape, scale, zero, sizes, group) -> bool:
    """True if groups are contiguous in a row, n_in / n_group columns each, in order.

    If False, or if shapes do not match, _scaled handles the tensor.
    """
    n_in, n_group = shape[-1], scale.shape[-1]
    if scale.shape != (shape[0], n_group) or n_in % n_group or n_in % 2 or (
            zero and zero.shape != scale.shape) or n_in // n_group not in (n_in, *(
                columns for _, columns in sizes)):
        return False
    order = group and group.whole().long()         # all 0 or all -1: in order
    return order is None or order.shape == (n_in,) and (
        bool((order <= 0).all()) or torch.equal(order, torch.arange(n_in) // (n_in // n_group)))


def _int4(x, shape, codes, scale, zero, packed):
    """quantize.py's int4 from codes(a, b) in 0..15 and zero points (None: 8)."""
    (n_out, n_in), grid = shape, scale.shape

    def rows(a, b):
        q = codes(a, b)
        return q[:, ::2] | q[:, 1::2] << 4

    def zeros(a, b):
        point = zero.read_rows(a, b).float() if zero else torch.full((b - a, grid[1]), 8.0)
        return (8 - point) * scale.read_rows(a, b).float()

    yield LazyTensor(x + ".weight", (n_out, n_in // 2), torch.uint8, rows, (packed,))
    yield scale.derived(scale.read_rows, name=x + ".scales")
    made_of = (scale, zero) if zero else (scale,)
    yield LazyTensor(x + ".zeros", grid, torch.float32, zeros, made_of)


def unpacked_int4(weight: LazyTensor, scales: LazyTensor, zeros: LazyTensor) -> LazyTensor:
    """Dequantize quantize.py's int4 to plain weights."""
    n_group = scales.shape[-1]

    def rows(a, b):
        q = torch.stack((weight.read_rows(a, b) & 15, weight.read_rows(a, b) >> 4), -1).flatten(-2)
        q = q.float().unflatten(-1, (n_group, -1)) - 8
        scale, zero = (t.read_rows(a, b).float()[..., None] for t in (scales, zeros))
        return (q * scale + zero).flatten(-2)
    shape = (*weight.shape[:-1], weight.shape[-1] * 2)
    return LazyTensor(weight.name, shape, torch.bfloat16, rows, (weight, scales, zeros))


def _grouped(x, bits, n_in, weight, zeros, scales, codes, points, sizes, group=None):
    """An AWQ or GPTQ linear: codes() unpacks weight to [out, in], points() unpacks zeros.

    Stored with out last, so rows cannot be read one by one: the codes stay in memory, a byte each.
    """
    n_group, n_out = scales.shape
    q = cached(x, (n_out, n_in), torch.uint8, lambda: codes(weight.whole()))
    z = cached(x, (n_out, n_group), torch.int16,
               lambda: points(zeros.whole())[:, :n_out].short().T)
    s = cached(x, (n_out, n_group), scales.dtype, lambda: scales.whole().T)
    if bits == 4 and _plain_groups(q.shape, s, z, sizes, group):
        return _int4(x, q.shape, q.read_rows, s, z, q)
    return [_scaled(x + ".weight", q.shape, q.read_rows, s, z, sizes, group, q)]


def _unpacked(words, bits, order=range(32)):
    """[n, m] int32 -> [n, m * 32/bits] uint8, from a bit stream, lowest bits first.

    3 bits, 32 numbers in 3 words:   |0 0 0 1 1 1 ... 9 9 9 10 10|10 11 11 11 ... 20 21|21 21 22 ...
    """
    shared = math.gcd(bits, 32)
    n_word, n_value, mask = bits // shared, 32 // shared, (1 << bits) - 1     # period
    values = torch.empty(words.shape[0], words.shape[1] * 32 // bits, dtype=torch.uint8)
    for i in range(n_value):
        word, shift = divmod(i * bits, 32)
        value = words[:, word::n_word] >> shift
        if shift + bits > 32:                      # mask: >> copies the sign bit
            value = value & (1 << 32 - shift) - 1 | words[:, word + 1::n_word] << 32 - shift
        values[:, order[i]::n_value] = value & mask
    return values


def _signed(words, bits, n):
    """compressed-tensors' [m, n * bits/32] int32 -> [m, n] float, with the offset 2^(bits-1)
    subtracted.
    """
    return _unpacked(words, bits)[:, :n].float() - (1 << bits - 1)


def _zero_points(words, bits, version):
    """GPTQ's qzeros [groups, out * bits/32] -> [groups, out]; add the 1 that "gptq" subtracts."""
    if version == "gptq" and bits != 3:
        # GPTQModel subtracts the ones from the whole word, so a zero point of 0 borrows from its
        # neighbour: add them to the whole word, with wraparound, to undo that.
        words = words + sum(1 << i for i in range(0, 32, bits))
    values = _unpacked(words, bits).short()        # 3 bits may span two words: add after unpacking
    return values + 1 & 7 if version == "gptq" and bits == 3 else values


def _number(t):
    """A scale or zero point as fp32; bytes are ue8m0 exponents, 2^(byte - 127)."""
    return (t.view(torch.float8_e8m0fnu) if t.dtype == torch.uint8 else t).float()


def _linears(tensors, key, dtype, needed, optional=()):
    """Yield (X, tensor X + key, other tensors of X...); an optional tensor may be None."""
    for name in [n for n in tensors if n.endswith(key)]:
        x = name.removesuffix(key)
        parts = [tensors.pop(x + suffix, None) for suffix in (key, *needed, *optional)]
        missing = [x + s for s, part in zip((key, *needed), parts) if part is None]
        if missing:
            raise ValueError(f"{name}: {', '.join(missing)} is missing")
        if parts[0].dtype != dtype:
            _refuse(f"{name} of {parts[0].dtype}", [str(dtype)])
        yield x, *parts


def _check(name, tensors, fits):
    if not fits:
        shapes = " and ".join(str(list(t.shape)) for t in tensors)
        raise ValueError(f"{name}: shapes {shapes} do not match")


def _refuse(found, supported):
    raise ValueError(f"{found} is not supported, only {', '.join(supported)}; {ALTERNATIVES_HINT}")


def _shape_2d(t):
    return t.shape if len(t.shape) == 2 else (0, 0)


def _ceil(n, size):
    return -(-n // size)
