"""Products of one to eight rows of x by int8 or int4 codes on a GPU, in Triton, on tensor cores.

A warp multiplies 16 weight rows at a time. Lane (g, t) = (lane // 4, lane % 4) loads 128 bits of
rows g and g + 8, block t of four, as they lie on disk. mma adds up the lanes t, but their groups
have different scales. So x stands in columns of B that belong to one lane each, and every lane
gets back the sum of its own block, which it scales in fp32. x is written as signed bytes, its
digits: two for int4 (one power for each 32 columns), three for int8 (one for the row). Without
mma (AMD, Triton's interpreter) a lane multiplies its block itself. Imported on a GPU only.

    y = launch(x, weight, scales, None, norm.weight, 1e-5, None, "silu", None, 1)
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpt_faster.kernels.cuda import mma, triton_matvec
from gpt_faster.kernels.cuda.triton_matvec import activated, expert_distance, launch_options

ROUND = tl.constexpr(12582912.0)                   # 1.5 x 2^23: adding it rounds to an integer
LEAST = tl.constexpr(1e-30)                        # for a block of zeros
FLIP = tl.constexpr(-0x7F7F7F80)                   # 0x80808080: bytes 0 to 255 -> -128 to 127
REGISTERS = 65536                                  # of a multiprocessor
DIGIT_WORDS = {4: 16, 8: 24}                       # of 32 bits, for a block of columns


MMA_INT4, INT4_REGISTERS = map(tl.constexpr, (mma.INT4, mma.INT4_REGISTERS))
MMA_INT8, INT8_REGISTERS = map(tl.constexpr, (mma.INT8, mma.INT8_REGISTERS))


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _four(t, T: tl.constexpr):
    """[T, 4] -> its columns, each [T]: registers of the same thread."""
    even, odd = tl.split(tl.reshape(t, (T, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _eight(t, T: tl.constexpr):
    """[T, 8] -> its columns, each [T]."""
    even, odd = tl.split(tl.reshape(t, (T, 4, 2)))
    c0, c2, c4, c6 = _four(even, T)
    c1, c3, c5, c7 = _four(odd, T)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _two_words(a, b, c, d):
    """Four integers -> their second-lowest bytes as one word, and their lowest, minus 128."""
    even, odd = a & 0xFFFF | c << 16, b & 0xFFFF | d << 16
    return (even >> 8 & 0xFF00FF | odd & -0xFF0100,
            (even & 0xFF00FF | odd << 8 & -0xFF0100) ^ FLIP)


@triton.jit
def _to_four(t, T: tl.constexpr):
    """[T / 4] -> [T], each value four times."""
    return tl.reshape(tl.broadcast_to(t[:, None], (T // 4, 4)), (T,))


@triton.jit
def write_digits(x, norm, digits, powers, m, eps, n_in: tl.constexpr, n_read: tl.constexpr,
                 row_words: tl.constexpr, bits: tl.constexpr, T: tl.constexpr):
    """Row m of x [M, n_in], normalized, as bytes: four columns a word, in the order of mma's B.

    A non-finite x has non-finite powers, and so has the product.
    int4: x = power (256 first + second), powers [M, blocks, 2]: power, sum of the 32 columns as
    written (its error is then that of code - 8, not of codes).
    int8: x = power (65536 first + 256 second + third), powers [M].
    """
    n_step: tl.constexpr = (n_read + 8 * T - 1) // (8 * T)
    i, two = tl.arange(0, T), tl.arange(0, 2)[None]
    column = 8 * i[:, None] + tl.arange(0, 8)[None]
    x += m * n_in
    parts = ()
    squares = tl.zeros([T], tl.float32)
    top = tl.zeros([T], tl.float32) + LEAST
    for k in tl.static_range(n_step):
        c = k * 8 * T + column
        if (k + 1) * 8 * T > n_in:
            part = tl.load(x + c, c < n_in, 0).to(tl.float32)
        else:
            part = tl.load(x + c).to(tl.float32)
        if norm is not None:
            squares += tl.sum(part * part, 1)
            if (k + 1) * 8 * T > n_in:
                part *= tl.load(norm + c, c < n_in, 0)
            else:
                part *= tl.load(norm + c)
        parts = parts + (part,)
        if bits == 8:
            top = _nan_max(top, tl.reduce(tl.abs(part), 1, _nan_max))
    factor = 1.0
    if norm is not None:
        factor = tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
    if bits == 8:
        top = tl.reduce(top, 0, _nan_max)
        tl.store(powers + m, top * (factor / 4128768.0))
    for k in tl.static_range(n_step):
        if bits == 4:
            top = tl.reshape(tl.reduce(tl.abs(parts[k]), 1, _nan_max), (T // 4, 4))
            top = _nan_max(_to_four(tl.reduce(top, 1, _nan_max), T), LEAST)
            power = top * (factor / 32512.0)
            r = parts[k] * (32512.0 / top)[:, None] + (ROUND + 128)
            r = r.to(tl.int32, bitcast=True) - 0x4B400000
            total = tl.sum(tl.reshape(tl.sum(r, 1), (T // 4, 4)), 1) - 32 * 128
            at = powers + (m * (row_words // 8) + k * T // 2 + i // 4 * 2)
            tl.store(at, power, i % 4 == 0)
            tl.store(at + 1, _to_four(total.to(tl.float32), T) * power, i % 4 == 0)
            r0, r1, r2, r3, r4, r5, r6, r7 = _eight(r, T)
            at = digits + (m * row_words + k * T * 4 + i // 4 * 16 + i % 4 * 2)
            at = at[:, None] + two
            first, second = _two_words(r0, r2, r4, r6)
            first_odd, second_odd = _two_words(r1, r3, r5, r7)
            tl.store(at, tl.join(first, first_odd))
            tl.store(at + 8, tl.join(second, second_odd))
        else:
            r = parts[k] * (4128768.0 / top) + (ROUND + 32896)
            r = r.to(tl.int32, bitcast=True) - 0x4B400000
            r0, r1, r2, r3, r4, r5, r6, r7 = _eight(r, T)
            at = digits + (m // 2 * row_words + m % 2 * 12 + k * T * 12 + i // 2 * 24 + i % 2 * 2)
            at = at[:, None] + two
            second, third = _two_words(r0, r1, r2, r3)
            second_4, third_4 = _two_words(r4, r5, r6, r7)
            first, _ = _two_words(r0 >> 8, r1 >> 8, r2 >> 8, r3 >> 8)
            first_4, _ = _two_words(r4 >> 8, r5 >> 8, r6 >> 8, r7 >> 8)
            tl.store(at, tl.join(first, first_4))
            tl.store(at + 4, tl.join(second ^ FLIP, second_4 ^ FLIP))
            tl.store(at + 8, tl.join(third, third_4))


@triton.jit
def _digits(x, norm, digits, powers, eps, n_in: tl.constexpr, n_read: tl.constexpr,
            row_words: tl.constexpr, bits: tl.constexpr, T: tl.constexpr, use_pdl: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
        gdc_wait()
    write_digits(x, norm, digits, powers, tl.program_id(0), eps, n_in, n_read, row_words, bits, T)


@triton.jit
def _pointers(weight, scales, tile, block, n_in: tl.constexpr, n_out: tl.constexpr,
              group: tl.constexpr, bits: tl.constexpr, gated: tl.constexpr):
    """Of this lane's two rows of a tile: codes and, for int4, scales, at `block`."""
    g = tl.arange(0, block.shape[0]) // 4 % 8
    words: tl.constexpr = n_in * bits // 32        # of a row
    row = tile * (8 if gated else 16) + g
    other = row + (n_out if gated else 8)
    if n_out % (8 if gated else 16) != 0:
        row = tl.minimum(row, n_out - 1)
        other = tl.minimum(other, 2 * n_out - 1 if gated else n_out - 1)
    pointers = (weight + row * words + 4 * block, weight + other * words + 4 * block)
    if bits == 4:
        n_group: tl.constexpr = n_in // group
        at = 2 * (block * 32 // group)
        pointers = pointers + (scales + row * (2 * n_group) + at,
                               scales + other * (2 * n_group) + at)
    return pointers


@triton.jit
def _load(pointers, block, first: tl.constexpr, bits: tl.constexpr, group: tl.constexpr,
          n_block: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """A lane's part of a chunk, `first` blocks after `block`: codes and scales of its two rows."""
    four, two = tl.arange(0, 4)[None], tl.arange(0, 2)[None]
    w_at = pointers[0][:, None] + (first * 4 + four)
    v_at = pointers[1][:, None] + (first * 4 + four)
    is_in = None
    if first + 4 * C * (W - 1) + 3 >= n_block:     # not for all lanes
        is_in = (block + first < n_block)[:, None]
    w = tl.load(w_at, is_in, eviction_policy="evict_first")    # read once: keep x cached
    v = tl.load(v_at, is_in, eviction_policy="evict_first")
    s, z = 0, 0
    if bits == 4:                                  # scale and zero; 0 outside of the row
        k: tl.constexpr = group // 32              # blocks of a group
        if 4 % k == 0 or (k % 4 == 0 and 4 * C % k == 0):
            at = first // k * 2 + two              # a constant: the chunk begins a group, or not
        else:
            at = ((block + first) // k - block // k)[:, None] * 2 + two
        other = None if is_in is None else 0.0
        s = tl.load(pointers[2][:, None] + at, is_in, other)
        z = tl.load(pointers[3][:, None] + at, is_in, other)
    return w, v, s, z


@triton.jit
def _plain_int4_dot(w, first, second):
    """A lane's 32 codes [T, 4 words] by two digits of x [T, 8 words], even and odd columns in turn.
    """
    shift = 8 * tl.arange(0, 4)
    first = tl.reshape(first, (first.shape[0], 4, 2))[:, :, :, None] >> shift << 24 >> 24
    second = tl.reshape(second, (second.shape[0], 4, 2))[:, :, :, None] >> shift << 24 >> 24
    q = w[:, :, None, None] >> (4 * tl.arange(0, 2)[:, None] + shift) & 15
    return tl.sum(tl.sum(tl.sum(q * (256 * first + second), 3), 2), 1).to(tl.float32)


@triton.jit
def _plain_int8_dot(w, first, second, third):
    """A lane's 16 codes [T, 4 words] by three digits of x [T, 4 words]."""
    shift = 8 * tl.arange(0, 4)
    x = ((first[:, :, None] >> shift << 24 >> 24) * 65536
         + (second[:, :, None] >> shift << 24 >> 24) * 256
         + (third[:, :, None] >> shift << 24 >> 24))
    q = w[:, :, None] >> shift << 24 >> 24
    return tl.sum(tl.sum((q * x).to(tl.float32), 2), 1)


@triton.jit
def _mma_int4_dots(w, v, low, high, T: tl.constexpr):
    w0, w1, w2, w3 = _four(w, T)
    v0, v1, v2, v3 = _four(v, T)
    a0, a1, a2, a3 = _four(low, T)
    b0, b1, b2, b3 = _four(high, T)
    return tl.inline_asm_elementwise(
        MMA_INT4, INT4_REGISTERS,
        [w0, w1, w2, w3, v0, v1, v2, v3, a0, a1, a2, a3, b0, b1, b2, b3],
        dtype=(tl.float32, tl.float32), is_pure=True, pack=1)


@triton.jit
def _mma_int8_sums(w, v, f, c, T: tl.constexpr):
    w0, w1, w2, w3 = _four(w, T)
    v0, v1, v2, v3 = _four(v, T)
    a0, a1, a2, a3 = _four(f, T)
    return tl.inline_asm_elementwise(
        MMA_INT8, INT8_REGISTERS,
        [w0, w1, w2, w3, v0, v1, v2, v3, a0, a1, a2, a3, c[0], c[1], c[2], c[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def _add_int4(w, v, s, z, acc, place, powers, is_own, first: tl.constexpr,
              row_words: tl.constexpr, M: tl.constexpr, T: tl.constexpr, has_mma: tl.constexpr):
    """acc + a lane's two blocks by each row of x; a weight is s (code - 8) + z."""
    two = tl.arange(0, 2)[None]
    s, s_zero = tl.split(s.to(tl.float32))
    z, z_zero = tl.split(z.to(tl.float32))
    s_zero -= 8 * s
    z_zero -= 8 * z
    new = ()
    for m in tl.static_range(M):
        f = place[:, None] + (m * row_words + first * 16)
        power = tl.load(powers[:, None] + (m * (row_words // 8) + first * 2 + two))
        power, total = tl.split(power)
        if has_mma:
            four = tl.arange(0, 4)[None]
            low = tl.load(f + four, is_own[:, None], 0)
            high = tl.load(f + 4 + four, is_own[:, None], 0)
            a, b = _mma_int4_dots(w, v, low, high, T)
        else:
            eight = tl.arange(0, 8)[None]
            low, high = tl.load(f + eight), tl.load(f + 8 + eight)
            a, b = _plain_int4_dot(w, low, high), _plain_int4_dot(v, low, high)
        new = new + (acc[2 * m] + s * (power * a) + s_zero * total,
                     acc[2 * m + 1] + z * (power * b) + z_zero * total)
    return new


@triton.jit
def _add_int8(w, v, sums, place, is_own, first: tl.constexpr, row_words: tl.constexpr,
              M: tl.constexpr, T: tl.constexpr):
    """Sums of codes by digits, of four columns of B each; two rows of x have six of eight."""
    four = tl.arange(0, 4)[None]
    is_either = (tl.arange(0, T) // 4 % 8 < 6)[:, None]
    new = ()
    for m in tl.static_range((M + 1) // 2):
        f = tl.load(place[:, None] + (m * row_words + first * 24 + four),
                    is_either if 2 * m + 1 < M else is_own[:, None], 0)
        new = new + (_mma_int8_sums(w, v, f, sums[m], T),)
    return new


@triton.jit
def _add_plain_int8(w, v, acc, place, first: tl.constexpr, row_words: tl.constexpr,
                    M: tl.constexpr):
    four = tl.arange(0, 4)[None]
    new = ()
    for m in tl.static_range(M):
        f = place[:, None] + (m // 2 * row_words + m % 2 * 12 + first * 24 + four)
        a, b, c = tl.load(f), tl.load(f + 4), tl.load(f + 8)
        new = new + (acc[2 * m] + _plain_int8_dot(w, a, b, c),
                     acc[2 * m + 1] + _plain_int8_dot(v, a, b, c))
    return new


@triton.jit
def _add(chunk, acc, sums, place, powers, is_own, first: tl.constexpr, row_words: tl.constexpr,
         bits: tl.constexpr, M: tl.constexpr, T: tl.constexpr, has_mma: tl.constexpr):
    """acc and sums + a chunk's codes by all rows of x, `first` blocks after place and powers."""
    w, v, s, z = chunk
    if bits == 4:
        acc = _add_int4(w, v, s, z, acc, place, powers, is_own, first, row_words, M, T, has_mma)
    elif has_mma:
        sums = _add_int8(w, v, sums, place, is_own, first, row_words, M, T)
    else:
        acc = _add_plain_int8(w, v, acc, place, first, row_words, M)
    return acc, sums


@triton.jit
def _advanced(pointers, n, group: tl.constexpr, bits: tl.constexpr):
    """n blocks further in a row; of int4, whole groups."""
    moved = (pointers[0] + 4 * n, pointers[1] + 4 * n)
    if bits == 4:
        at = 2 * (n * 32 // group)
        moved = moved + (pointers[2] + at, pointers[3] + at)
    return moved


@triton.jit
def _weighted(c, m: tl.constexpr, t):
    """Sums by digits of x, in mma's layout -> a lane's share of the sums of its two rows.

    The columns 3 m, 3 m + 1, 3 m + 2 are the digits of this row of x; a lane has 2 t and 2 t + 1.
    """
    digit = 2 * t - 3 * m
    k = tl.where(digit == 0, 65536.0, tl.where(digit == 1, 256.0, tl.where(digit == 2, 1.0, 0.0)))
    j = tl.where(digit == -1, 65536.0, tl.where(digit == 0, 256.0, tl.where(digit == 1, 1.0, 0.0)))
    return (c[0].to(tl.float32) * k + c[1].to(tl.float32) * j,
            c[2].to(tl.float32) * k + c[3].to(tl.float32) * j)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums_of_rows(a, b, W: tl.constexpr):
    """What each lane has of its two rows [32 W] -> the sums of all that have the same rows, [8]."""
    a = tl.reshape(tl.permute(tl.reshape(a, (W, 8, 4)), (1, 0, 2)), (8, 4 * W))
    b = tl.reshape(tl.permute(tl.reshape(b, (W, 8, 4)), (1, 0, 2)), (8, 4 * W))
    return tl.reduce((a, b), 1, _add_pairs)


@triton.jit
def _tile(tile, next_tile, chunks, weight, scales, bias, residual, y, place, powers, is_own,
          has_next: tl.constexpr, n_in: tl.constexpr, n_out: tl.constexpr, group: tl.constexpr,
          bits: tl.constexpr, activation: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
          C: tl.constexpr, n_looped: tl.constexpr, row_words: tl.constexpr, has_mma: tl.constexpr):
    """16 rows by x -> the first chunks of the next tile, asked for as soon as registers are free.
    """
    T: tl.constexpr = 32 * W
    kind: tl.constexpr = y.dtype.element_ty
    gated: tl.constexpr = activation != ""
    n_block: tl.constexpr = n_in * bits // 128
    n_segment: tl.constexpr = (n_block + 4 * W * C - 1) // (4 * W * C)
    digit_words: tl.constexpr = 16 if bits == 4 else 24        # of a block
    i = tl.arange(0, T)
    t = i % 4
    block = 4 * C * (i // 32) + t
    out = tile * (8 if gated else 16) + tl.arange(0, 8)        # of y: the first 8 rows
    other = out + (n_out if gated else 8)
    is_out = out < n_out
    is_other = is_out if gated else other < n_out
    added = ()                                     # asked for early: needed at the end
    for m in tl.static_range(M):
        if residual is not None:
            added = added + (tl.load(residual + m * n_out + out, is_out, 0),
                             tl.load(residual + m * n_out + other, is_other, 0))
    acc, sums = (), ()
    for _ in tl.static_range(2 * M):
        acc = acc + (tl.zeros([T], tl.float32),)
    for _ in tl.static_range((M + 1) // 2):
        zero = tl.zeros([T], tl.int32)
        sums = sums + ((zero, zero, zero, zero),)
    pointers = _pointers(weight, scales, tile, block, n_in, n_out, group, bits, gated)
    next_pointers = pointers
    if has_next:
        next_pointers = _pointers(weight, scales, next_tile, block, n_in, n_out, group, bits, gated)
    for segment in range(n_looped):
        n = segment * (4 * W * C)                  # blocks before the segment's
        ahead = _advanced(pointers, n + 4 * W * C, group, bits)
        current = chunks
        chunks = ()
        for c in tl.static_range(C):
            acc, sums = _add(current[c], acc, sums, place + n * digit_words,
                             powers + 2 * (block + n), is_own, c * 4, row_words, bits, M, T,
                             has_mma)
            chunks = chunks + (_load(ahead, block, c * 4, bits, group, n_block, W, C),)
    for segment in tl.static_range(n_looped, n_segment):
        current = chunks
        chunks = ()
        for c in tl.static_range(C):
            first = segment * W * C * 4 + c * 4    # blocks after `block`
            acc, sums = _add(current[c], acc, sums, place, powers + 2 * block, is_own, first,
                             row_words, bits, M, T, has_mma)
            if segment + 1 < n_segment:
                chunks = chunks + (_load(pointers, block, (segment + 1) * W * C * 4 + c * 4, bits,
                                         group, n_block, W, C),)
            elif has_next:
                chunks = chunks + (_load(next_pointers, block, c * 4, bits, group, n_block, W, C),)
    for m in tl.static_range(M):
        if bits == 8 and has_mma:
            a, b = _weighted(sums[m // 2], m % 2, t)
        else:
            a, b = acc[2 * m], acc[2 * m + 1]
        a, b = _sums_of_rows(a, b, W)
        if bits == 8:
            power = tl.load(powers + m)
            a *= power * tl.load(scales + out, is_out, 0).to(tl.float32)
            b *= power * tl.load(scales + other, is_other, 0).to(tl.float32)
        if bias is not None:
            a += tl.load(bias + out, is_out, 0).to(tl.float32)
            b += tl.load(bias + other, is_other, 0).to(tl.float32)
        a, b = a.to(kind), b.to(kind)
        if gated:
            a, b = activated(a.to(tl.float32), b.to(tl.float32), activation)
            a = (a.to(kind).to(tl.float32) * b).to(kind)
        elif residual is not None:
            a = (added[2 * m].to(tl.float32) + a.to(tl.float32)).to(kind)
            b = (added[2 * m + 1].to(tl.float32) + b.to(tl.float32)).to(kind)
        tl.store(y + m * n_out + out, a, is_out)
        if not gated:
            tl.store(y + m * n_out + other, b, is_other)
    return chunks


@triton.jit
def _product(x, norm, weight, scales, bias, residual, ids, y, digits, powers, eps, share,
             expert_rows,
             n_in: tl.constexpr, n_out: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
             activation: tl.constexpr, M: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
             n_looped: tl.constexpr, row_words: tl.constexpr, own_digits: tl.constexpr,
             one_tile: tl.constexpr, has_mma: tl.constexpr, use_pdl: tl.constexpr):
    """A program has every num_programs(0)th tile of 16 rows; its warps share the columns.

    Gated: 8 rows of gate and 8 of up.
    """
    if use_pdl:
        gdc_launch_dependents()
    T: tl.constexpr = 32 * W
    B: tl.constexpr = 128 // bits                  # columns of a block: 128 bits
    n_block: tl.constexpr = n_in // B
    n_segment: tl.constexpr = (n_block + 4 * W * C - 1) // (4 * W * C)
    gated: tl.constexpr = activation != ""
    n_tile: tl.constexpr = (n_out + (7 if gated else 15)) // (8 if gated else 16)
    i = tl.arange(0, T)
    g, t = i // 4 % 8, i % 4
    block = 4 * C * (i // 32) + t                  # of the warp's first chunk
    program = tl.program_id(0)
    if ids is not None:                            # each row of y uses one expert
        if use_pdl:
            gdc_wait()
        program += tl.program_id(1) * tl.num_programs(0)
        expert = tl.load(ids + tl.program_id(1))
        x += tl.program_id(1) // share * n_in
        y += tl.program_id(1) * n_out
        weight += expert * expert_rows * (n_in * bits // 32)
        scales += expert * expert_rows * (n_in // group * 2 if bits == 4 else 1)
        if bias is not None:
            bias += expert * expert_rows

    tile = tl.program_id(0)
    pointers = _pointers(weight, scales, tile, block, n_in, n_out, group, bits, gated)
    chunks = ()
    for c in tl.static_range(C):
        chunks = chunks + (_load(pointers, block, c * 4, bits, group, n_block, W, C),)
    if use_pdl and ids is None:
        gdc_wait()                                 # below, outputs of earlier kernels are read
    if own_digits:
        digits += program * row_words
        powers += program * (row_words // 8 if bits == 4 else 1)
        n_read: tl.constexpr = n_segment * W * C * 4 * B
        write_digits(x, norm, digits, powers, 0, eps, n_in, n_read, row_words, bits, T)
        tl.debug_barrier()                         # other threads of the program read them

    if not has_mma:                                # all of a lane's block
        is_own = tl.full([T], True, tl.int1)
        place = digits + block * (16 if bits == 4 else 24)
    elif bits == 4:                                # a digit, in a column of B that is the lane's
        is_own = g // 2 == t
        place = digits + block * 16 + g % 2 * 8
    else:
        is_own = g < 3
        place = digits + block * 24 + g * 4
    if not one_tile:
        while tile + tl.num_programs(0) < n_tile:
            next_tile = tile + tl.num_programs(0)
            chunks = _tile(tile, next_tile, chunks, weight, scales, bias, residual, y, place,
                           powers, is_own, True, n_in, n_out, group, bits, activation, M, W, C,
                           n_looped, row_words, has_mma)
            tile = next_tile
    _tile(tile, tile, chunks, weight, scales, bias, residual, y, place, powers, is_own, False,
          n_in, n_out, group, bits, activation, M, W, C, n_looped, row_words,
          has_mma)


def has_mma(device: torch.device) -> bool:
    is_interpreted = os.environ.get("TRITON_INTERPRET")
    return device.type == "cuda" and torch.version.hip is None and not is_interpreted


def plan(n_tile: int, n_y: int, n_in: int, bits: int, n_sm: int,
         M: int) -> tuple[int, int, int, int]:
    """-> warps of a program, chunks of a warp at once, programs of each row of y, registers.

    Most often a program has one tile, most of whose weights are asked for at once, or eight warps
    whose loads run ahead. From machine code: docs/gpu.md.
    """
    n_chunk = triton.cdiv(n_in * bits, 512)        # of four blocks
    n_warp = 16 if M == 1 else 8                   # of a multiprocessor; sums need registers
    W = 4 if n_tile * n_y <= n_warp // 4 * n_sm and n_in <= 8192 else 8 if n_in <= 16384 else 16
    if n_tile * n_y <= n_sm and n_chunk > 8 * W and W < 16:
        W *= 2
    C = min((4, 3, 2, 1), key=lambda c: triton.cdiv(n_chunk, W * c) * c)    # least beyond the row
    n_program = min(n_tile, max(1, triton.cdiv(max(n_warp, W) * n_sm // W, n_y)))
    if n_tile < 1.5 * n_program:                   # most would have one: then all do
        n_program = n_tile
    n_resident = min(max(n_warp, W) // W, triton.cdiv(n_program * n_y, n_sm))
    registers = min(255, REGISTERS // (32 * W * n_resident) // 8 * 8)
    return W, C, n_program, registers


def looped_segments(n_in: int, bits: int, group: int, M: int, W: int, C: int) -> int:
    """Segments of a tile that a loop multiplies: of several rows all but the last two, which may be
    short and load the next tile. Unrolled they take minutes to compile."""
    n_segment = triton.cdiv(n_in * bits, 512 * W * C)
    has_whole_groups = bits == 8 or 128 * W * C % group == 0
    return n_segment - 2 if M > 1 and n_segment > 3 and has_whole_groups else 0


def launch(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, norm: Tensor | None,
           eps: float, residual: Tensor | None, activation: str, ids: Tensor | None,
           share: int) -> Tensor:
    """x [M, in] by codes [(E,) out, in] -> y [M share, out]. M up to 8, any with ids.

    scales: int8 [(E,) out]; int4 [(E,) out, groups, 2], a scale and a zero.
    """
    bits = 8 if weight.dtype == torch.int8 else 4
    n_in, n_row = x.shape[1], weight.shape[-2]
    n_out = n_row // (2 if activation else 1)
    group = n_in // scales.shape[-2] if bits == 4 else n_in
    M = 1 if ids is not None else x.shape[0]
    y = x.new_empty(share * x.shape[0], n_out)
    n_y = len(y) if ids is not None else 1
    n_sm, pdl = launch_options(x.device)
    n_tile = triton.cdiv(n_out, 8 if activation else 16)
    W, C, n_program, registers = plan(n_tile, n_y, n_in, bits, n_sm, M)
    columns = W * C * 512 // bits                  # of a segment
    n_read = triton.cdiv(n_in, columns) * columns
    T = 32 * W if M == 1 else 256                  # threads that write digits
    row_words = triton.cdiv(n_read, 8 * T) * 8 * T * bits // 128 * DIGIT_WORDS[bits]
    n_copy = n_program * n_y if M == 1 else M      # M = 1: a program writes digits for itself
    digits = torch.empty(n_copy, row_words, dtype=torch.int32, device=x.device)
    powers = torch.empty(n_copy, row_words // 8 if bits == 4 else 1, dtype=torch.float32,
                         device=x.device)
    expert_rows = n_row if ids is None else expert_distance(weight, scales, bias)
    options = pdl | ({"maxnreg": registers} if has_mma(x.device) else {})
    if M > 1:
        _digits[(M,)](x, norm, digits, powers, eps, n_in, n_read, row_words, bits, T, bool(pdl),
                      num_warps=T // triton_matvec.WARP, **pdl)
    _product[n_program, n_y](
        x, norm if M == 1 else None, weight.view(torch.int32), scales, bias, residual, ids, y,
        digits, powers, eps, share, expert_rows, n_in, n_out, group, bits, activation, M, W, C,
        looped_segments(n_in, bits, group, M, W, C), row_words, M == 1, n_program == n_tile,
        has_mma(x.device), bool(pdl), num_warps=32 * W // triton_matvec.WARP, num_stages=1,
        **options)
    return y
