"""Vectors of a KV cache on a GPU, in Triton: as they are, or codes of 8 and 4 bits with scales.

layers/quantized_cache.py describes the formats and stores the same codes. Does not know queries or
attention. KIND names the format (a key of quantized_cache.DTYPES, "plain" without codes), H the
head's width, WIDE a power of two from it, where values past H are zeros.

    new = store(codes, scales, slots, x, is_row, H, WIDE, KIND, LOG_TURN)
    codes = load(codes, slots, is_row, H, WIDE, KIND)
    k = decode(codes, load_scales(scales, slots, is_row, H, WIDE), KIND)   # turned
"""

import triton
import triton.language as tl

from gpt_faster.layers.quantized_cache import DTYPES
from gpt_faster.layers.quantized_cache import GROUP as _GROUP

KINDS = {dtype: name for name, dtype in DTYPES.items()}
GROUP = tl.constexpr(_GROUP)                       # values with one scale


@triton.jit
def turn(x, LOG: tl.constexpr):
    """Multiply each 2^LOG values of x fp32 [R, WIDE] by a Hadamard matrix / sqrt(2^LOG).

    The additions have the order of quantized_cache.turn(): pairs (i, i + n), neighbours first.
    Views and sums of two leave each value with its thread: most are shuffles in a warp.
    """
    R: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1]
    for step in tl.static_range(LOG):
        y = x.reshape(R, WIDE // (2 << step), 2, 1 << step)
        is_first = tl.arange(0, 2)[None, None, :, None] == 0
        plus = tl.sum(y, 2, keep_dims=True)
        minus = tl.sum(tl.where(is_first, y, -y), 2, keep_dims=True)
        x = tl.where(is_first, plus, minus).reshape(R, WIDE)
    return x * (1 << LOG)**-0.5


# ---- Codes --------------------------------------------------------------------------------------

@triton.jit
def round_to_int(x):
    """To nearest even, for |x| < 2^22."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def encode_fp8(x):
    """x fp32, clamped -> e4m3 as bits, rounded to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 24 & 0x80
    size = bits & 0x7FFFFFFF
    normal = (size - 0x3C000000 + 0x7FFFF + (size >> 20 & 1)) >> 20
    subnormal = round_to_int(tl.abs(x) * 512)                  # a multiple of 2^-9
    return sign | tl.where(size < 0x3C800000, subnormal, normal)


@triton.jit
def encode(x, KIND: tl.constexpr):
    """x fp32 [R, WIDE] -> codes int32 [R, WIDE], scales fp16 [R, WIDE / GROUP].

    Clamping comes before any addition: fused with the product, that would round otherwise.
    """
    R: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1]
    groups = x.reshape(R, WIDE // GROUP, GROUP)
    if KIND == "int4":                             # the largest becomes -8: with its sign, of equal
        at = tl.argmax(tl.abs(groups), 2)          # ones the first
        is_largest = tl.arange(0, GROUP)[None, None, :] == at[:, :, None]
        scale = tl.sum(tl.where(is_largest, groups, 0), 2) / -8
    else:
        most: tl.constexpr = 127.0 if KIND == "int8" else 448.0
        scale = tl.math.div_rn(tl.max(tl.abs(groups), 2), most)
    scale = scale.to(tl.float16)
    stored = scale.to(tl.float32)
    is_zero = stored == 0
    inverse = tl.where(is_zero, 0, tl.math.div_rn(1.0, tl.where(is_zero, 1, stored)))
    y = groups * inverse[:, :, None]
    if KIND == "int8":
        codes = round_to_int(clamp(y, -127, 127))
    elif KIND == "int4":
        codes = round_to_int(clamp(y, -8, 7)) + 8
    else:
        codes = encode_fp8(clamp(y, -448, 448))
    return codes.reshape(R, WIDE), scale


@triton.jit
def minus(x, zero: tl.constexpr, flip: tl.constexpr):
    """(uint8 ^ flip) - zero -> fp32 without a conversion, of which a GPU does few in a cycle."""
    return (x.to(tl.int32) ^ 0x4B000000 + flip).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@triton.jit
def decode(codes, scale, KIND: tl.constexpr):
    """codes [R, WIDE], int4: [R, WIDE / 2], scale fp16 [R, WIDE / GROUP] -> fp32 [R, WIDE]."""
    if KIND == "int4":
        low, high = codes & 15, codes >> 4
        x = minus(tl.interleave(low, high), 8, 0)
    elif KIND == "fp8":                            # as fp16, whose exponents have one more bit
        bits = codes.to(tl.int8, bitcast=True).to(tl.int16) << 7
        x = (bits & -0x4080).to(tl.float16, bitcast=True).to(tl.float32)
        scale = scale.to(tl.float32) * 256
    else:
        x = minus(codes.to(tl.uint8, bitcast=True), 128, 128)
    R: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1]
    x = x.reshape(R, WIDE // GROUP, GROUP) * scale.to(tl.float32)[:, :, None]
    return x.reshape(R, WIDE)


# ---- Memory -------------------------------------------------------------------------------------

@triton.jit
def places(slots, is_row, H: tl.constexpr, WIDE: tl.constexpr):
    """Offsets and mask [R, WIDE] of vectors of H elements in these slots [R]."""
    h = tl.arange(0, WIDE)[None, :]
    return slots[:, None] * H + h, is_row[:, None] & (h < H)


@triton.jit
def load(cache, slots, is_row, H: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    """The vectors in these slots [R] as they are stored: [R, WIDE], int4: [R, WIDE / 2]."""
    n: tl.constexpr = 2 if KIND == "int4" else 1               # codes of a byte
    at, is_h = places(slots, is_row, H // n, WIDE // n)
    return tl.load(cache + at, is_h, 0)


@triton.jit
def load_scales(scales, slots, is_row, H: tl.constexpr, WIDE: tl.constexpr):
    """[R, WIDE / GROUP]"""
    at, is_group = places(slots, is_row, (H + GROUP - 1) // GROUP, WIDE // GROUP)
    return tl.load(scales + at, is_group, 0)


@triton.jit
def store(cache, scales, slots, x, is_row, H: tl.constexpr, WIDE: tl.constexpr,
          KIND: tl.constexpr, LOG_TURN: tl.constexpr):
    """Store x [R, WIDE] in these slots [R] -> what will be read there, turned, in x's dtype."""
    n: tl.constexpr = 2 if KIND == "int4" else 1
    at, is_h = places(slots, is_row, H // n, WIDE // n)
    if KIND == "plain":
        tl.store(cache + at, x, is_h)
    else:
        codes, scale = encode(turn(x.to(tl.float32), LOG_TURN), KIND)
        if KIND == "int4":
            low, high = codes.reshape(x.shape[0], WIDE // 2, 2).split()
            codes = low | high << 4
        codes = codes.to(cache.dtype.element_ty)
        tl.store(cache + at, codes, is_h)
        at, is_group = places(slots, is_row, (H + GROUP - 1) // GROUP, WIDE // GROUP)
        tl.store(scales + at, scale, is_group)
        x = decode(codes, scale, KIND).to(x.dtype)
    return x
