"""Up to eight rows by a weight matrix on a GPU: one pass over the weights, in Triton.

A program has a few outputs at once, in turn if it has many. Each thread takes 128 bits of each of
their rows of weights, and x's columns beside them in registers, multiplies and adds in fp32; all
threads' sums are added at the end. There are no tensor cores, which so few rows would not fill, and
nothing moves between threads before. Weights are read as they lie on disk (quantize.py): the first
before the launch ahead of this one has ended, the next while these are multiplied. What goes in may
be normalized on the way and what comes out activated or added to the residual, so that a Llama's
layer is four of these and its attention. Imported on a GPU only.

    y = launch(x, weight, scales, zeros, None, norm.weight, 1e-5, None, "", None, 1)
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WARP = 64 if torch.version.hip else 32
WARPS = 32                                         # at once on a multiprocessor
ROOM = 3 * 16384                                   # numbers of x that registers hold
FLIP = {16: 0, 8: 0x43C00000, 4: 0x41800000}       # makes codes, moved up, fp32: see _eights


@triton.jit
def _eights(word, bits: tl.constexpr, T: tl.constexpr, R: tl.constexpr, flip):
    """128 bits of each row a thread -> once, twice or four times [T, R, 8], in fp32.

    A code, moved to where a mantissa ends, is a number between 16 and 32 (of four bits) or 256 and
    512 (of eight): too large by what the code stands for below zero, 24 and 384 in all.
    """
    if bits == 16:
        parts = (word.to(tl.float32),)
    elif bits == 8:
        word = word.expand_dims(-1) >> 8 * tl.arange(0, 4) << 15 & 0x7F8000 ^ flip
        word = word.to(tl.float32, bitcast=True).reshape(T, R, 2, 8)
        parts = tl.split(tl.permute(word, (0, 1, 3, 2)))
    else:
        word = word.expand_dims(-1) >> 4 * tl.arange(0, 8) << 19 & 0x780000 ^ flip
        word = word.to(tl.float32, bitcast=True).reshape(T, R, 2, 2, 8)
        even, odd = tl.split(tl.permute(word, (0, 1, 2, 4, 3)))
        first, third = tl.split(tl.permute(even, (0, 1, 3, 2)))
        second, fourth = tl.split(tl.permute(odd, (0, 1, 3, 2)))
        parts = (first, second, third, fourth)
    return parts


@triton.jit
def _rows(weight, scales, zeros, row, column, here, bits: tl.constexpr, step: tl.constexpr,
          n_in: tl.constexpr, group: tl.constexpr):
    """All of some rows, 128 bits a thread at a time: tuples of weights, scales and zeros.

    max_contiguous() has a warp's lanes be threads of a row: else Triton 3.7 spreads them over rows,
    and weights move through shared memory. It widens no load, as pointers are not known to be even.
    """
    words, s, z = (), (), ()
    row = row.to(tl.int64)[:, None]
    for at in tl.static_range(0, n_in, step):
        c = at + column                            # read once: they're not to drive x out of cache
        if n_in % step != 0:
            here &= c < n_in
        if bits == 16:                             # or fp32
            place = weight + row * n_in + c + tl.arange(0, 8)
        else:
            place = weight + (row * n_in + c) * bits // 8
            place = place.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
        place = tl.max_contiguous(place, (2, 1, 8 if bits == 16 else 4))
        words = words + (tl.load(place, here, 0, eviction_policy="evict_first"),)
        if bits == 4:
            g = tl.max_contiguous(row * (n_in // group) + c // group, (2, 1, 1))
            s = s + (tl.load(scales + g, here, 0, eviction_policy="evict_first"),)
            z = z + (tl.load(zeros + g, here, 0, eviction_policy="evict_first"),)
    return words, s, z


@triton.jit
def _activated(gate, up, activation: tl.constexpr):
    if activation == "silu":
        gate = gate * tl.sigmoid(gate)
    elif activation == "clamped_silu":
        gate = tl.minimum(gate, 7.0)
        gate = gate * tl.sigmoid(1.702 * gate)
        up = tl.maximum(tl.minimum(up, 7.0), -7.0) + 1
    else:                                          # gelu_tanh
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(inner)
    return gate, up


@triton.jit
def _matvec(x, norm, weight, scales, zeros, bias, residual, ids, y, eps, flip, n_turn, share,
            n_in: tl.constexpr, n_out: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
            activation: tl.constexpr, M: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
            in_turn: tl.constexpr, early: tl.constexpr):
    if early:
        gdc_launch_dependents()
    kind: tl.constexpr = x.dtype.element_ty
    J: tl.constexpr = 16 // bits                   # eights of columns in 128 bits
    step: tl.constexpr = 8 * J * T                 # columns that all threads take
    n_step: tl.constexpr = (n_in + step - 1) // step
    gated: tl.constexpr = activation != ""
    n_own: tl.constexpr = R // 2 if gated else R   # outputs at once
    r = tl.arange(0, R)                            # gated: up's rows after gate's
    row_0 = r // n_own * n_out
    if ids is not None:                            # each row of y has its own expert
        if early:
            gdc_wait()
        x += tl.program_id(1) // share * n_in
        y += tl.program_id(1) * n_out
        row_0 += tl.load(ids + tl.program_id(1)) * (2 * n_out if gated else n_out)
    column = 8 * J * tl.arange(0, T)[:, None, None]                # dimensions: thread, row, column
    first = tl.program_id(0) * n_turn * n_own
    row = row_0 + tl.minimum(first + r % n_own, n_out - 1)
    words, s, z = _rows(weight, scales, zeros, row, column, True, bits, step, n_in, group)
    if early and ids is None:
        gdc_wait()                                 # from here on what other launches wrote is read

    h, h_sums = (), ()                             # by step, eight of columns, row of x
    squares = tl.zeros([T, 1], tl.float32)
    for i in tl.static_range(n_step * J):
        for m in tl.static_range(M):
            c = i // J * step + column + i % J * 8 + tl.arange(0, 8)
            eight = tl.load(x + m * n_in + c, c < n_in, 0)
            if norm is not None:
                eight = eight.to(tl.float32)
                squares += tl.sum(eight * eight, 2)
                eight *= tl.load(norm + c, c < n_in, 0)
            h = h + (eight,)
            h_sums = h_sums + (tl.sum(eight.to(tl.float32), 2),)

    for turn in tl.range(n_turn):
        own_words, own_s, own_z, own_row = words, s, z, row
        own = first + turn * n_own
        if in_turn:
            row = row_0 + tl.minimum(own + n_own + r % n_own, n_out - 1)
            here = (turn + 1 < n_turn) & (own + n_own < n_out)
            words, s, z = _rows(weight, scales, zeros, row, column, here, bits, step, n_in, group)
        acc = ()
        for _ in tl.static_range(M):
            acc = acc + (tl.zeros([T, R], tl.float32),)
        for k in tl.static_range(n_step):
            eights = _eights(own_words[k], bits, T, R, flip)
            sums = ()
            for m in tl.static_range(M):
                dot = tl.zeros([T, R], tl.float32)
                h_sum = tl.zeros([T, 1], tl.float32)
                for j in tl.static_range(J):
                    dot += tl.sum(eights[j] * h[(k * J + j) * M + m].to(tl.float32), 2)
                    h_sum += h_sums[(k * J + j) * M + m]
                if bits == 4:                      # s (code - 8) + z
                    scale = own_s[k].to(tl.float32).reshape(T, R)
                    zero = own_z[k].to(tl.float32).reshape(T, R)
                    dot = scale * dot + (zero - 24 * scale) * h_sum
                elif bits == 8:
                    dot -= 384 * h_sum
                sums = sums + (acc[m] + dot,)
            acc = sums

        o = own + tl.arange(0, n_own)
        for m in tl.static_range(M):
            result = tl.sum(acc[m], 0)             # [R]
            if norm is not None:
                result *= tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
            if bits == 8:
                result *= tl.load(scales + own_row).to(tl.float32)
            if bias is not None:
                result += tl.load(bias + own_row).to(tl.float32)
            if gated:
                gate, up = tl.split(tl.trans(result.to(kind).to(tl.float32).reshape(2, n_own)))
                gate, up = _activated(gate, up, activation)
                result = gate.to(kind).to(tl.float32) * up
            result = result.to(kind)
            if residual is not None:
                left = tl.load(residual + m * n_out + o, o < n_out, 0).to(tl.float32)
                result = (left + result.to(tl.float32)).to(kind)
            tl.store(y + m * n_out + o, result, o < n_out)


@functools.cache
def facts(device: torch.device) -> tuple[int, dict]:
    """How many multiprocessors; options of a launch that begins while the one before it ends."""
    if device.type != "cuda":                      # Triton's interpreter
        return 1, {}
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    n_multi = torch.cuda.get_device_properties(device).multi_processor_count
    return n_multi, {"launch_pdl": True} if hopper else {}


def launch(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
           bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
           activation: str, ids: Tensor | None, share: int) -> Tensor:
    """x [M, in], M up to 8, or with ids any; weight [(E,) out, in] or codes -> y [M share, out]."""
    n_in, n_row = x.shape[1], weight.shape[-2]
    n_out = n_row // (2 if activation else 1)
    group = n_in if zeros is None else n_in // scales.shape[-1]
    bits = 16 if scales is None else 8 if zeros is None else 4
    M = 1 if ids is not None else x.shape[0]
    if M > 1 and M * n_in > ROOM:                  # or registers are short
        parts = x.tensor_split(triton.cdiv(M * n_in, ROOM))
        left = [None] * len(parts) if residual is None else residual.tensor_split(len(parts))
        return torch.cat([launch(part, weight, scales, zeros, bias, norm, eps, old, activation,
                                 ids, share) for part, old in zip(parts, left)])

    y = x.new_empty(share * x.shape[0], n_out)
    n_y = len(y) if ids is not None else 1
    n_multi, overlap = facts(x.device)             # what follows was measured: docs/gpu.md
    R = 2 if bits == 16 else 8 if bits == 4 and M == 1 else 4
    while R > 2 and n_row * n_y < 2 * R * n_multi:
        R //= 2
    W = min(16, triton.next_power_of_2(triton.cdiv(n_in, 512 if bits == 16 else 1024)))
    n_own = R // 2 if activation else R
    n_tile = triton.cdiv(n_out, n_own)
    resident = max(1, WARPS * n_multi // W)        # programs at work at once
    n_turn = 1 if bits < 16 or M > 1 else min(n_tile, triton.cdiv(n_tile * n_y, resident))
    _matvec[triton.cdiv(n_tile, n_turn), n_y](
        x, norm, weight, scales, zeros, bias, residual, ids, y, eps, FLIP[bits], n_turn, share,
        n_in, n_out, group, bits, activation, M, R, W * WARP, n_turn > 1, bool(overlap),
        num_warps=W, num_stages=1, **overlap)
    return y
