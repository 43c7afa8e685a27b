"""Matmul of up to eight rows on a GPU: one pass over the weights, in Triton.

A program computes a few outputs at a time, several times in turn if there are many. Each thread
loads 128 bits of each weight row, keeps the matching columns of x in registers and accumulates in
fp32; the threads' sums are reduced once, at the end. Tensor cores are not used: so few rows would
not fill them. Weights have the layout on disk (quantize.py). The first load starts before the
previous kernel has ended (PDL), each later one while the current weights are multiplied. The input
can be normalized, the output activated or added to a residual: a Llama layer is four launches plus
attention. Imported on a GPU only.

    y = launch(x, weight, scales, zeros, None, norm.weight, 1e-5, None, "", None, 1)
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WARP = 64 if torch.version.hip else 32
WARPS_PER_SM = 32                                  # resident on a multiprocessor
MAX_X = 3 * 16384                                  # elements of x that registers hold
FLIP = {16: 0, 8: 0x43C00000, 4: 0x41800000}       # makes shifted codes fp32: see _eights


@triton.jit
def _eights(word, bits: tl.constexpr, T: tl.constexpr, R: tl.constexpr, flip):
    """Unpack 128 bits per thread and row to fp32: one, two or four times [T, R, 8].

    Shifted to the top of an fp32 mantissa, a 4-bit code is a number in [16, 32), an 8-bit code one
    in [256, 512). These exceed the code's value by 24 and 384, which the caller subtracts.
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
def _rows(weight, scales, zeros, row, column, is_valid, bits: tl.constexpr, step: tl.constexpr,
          n_in: tl.constexpr, group: tl.constexpr):
    """Load whole rows, 128 bits per thread at a time -> tuples of words, scales and zeros.

    max_contiguous() assigns a warp's lanes to one row: without it Triton 3.7 spreads them over rows
    and moves weights through shared memory. It widens no load: pointers have no known alignment.
    """
    words, s, z = (), (), ()
    row = row.to(tl.int64)[:, None]
    for start in tl.static_range(0, n_in, step):
        c = start + column                         # read once: evict first, keep x cached
        if n_in % step != 0:
            is_valid &= c < n_in
        if bits == 16:                             # or fp32
            place = weight + row * n_in + c + tl.arange(0, 8)
        else:
            place = weight + (row * n_in + c) * bits // 8
            place = place.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
        place = tl.max_contiguous(place, (2, 1, 8 if bits == 16 else 4))
        words = words + (tl.load(place, is_valid, 0, eviction_policy="evict_first"),)
        if bits == 4:
            g = tl.max_contiguous(row * (n_in // group) + c // group, (2, 1, 1))
            s = s + (tl.load(scales + g, is_valid, 0, eviction_policy="evict_first"),)
            z = z + (tl.load(zeros + g, is_valid, 0, eviction_policy="evict_first"),)
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
            pipelined: tl.constexpr, use_pdl: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
    kind: tl.constexpr = x.dtype.element_ty
    J: tl.constexpr = 16 // bits                   # groups of 8 columns in 128 bits
    step: tl.constexpr = 8 * J * T                 # columns per step of all threads
    n_step: tl.constexpr = (n_in + step - 1) // step
    gated: tl.constexpr = activation != ""
    n_block: tl.constexpr = R // 2 if gated else R  # outputs at a time
    r = tl.arange(0, R)                            # gated: rows of gate, then of up
    row_0 = r // n_block * n_out
    if ids is not None:                            # each row of y uses one expert
        if use_pdl:
            gdc_wait()
        x += tl.program_id(1) // share * n_in
        y += tl.program_id(1) * n_out
        row_0 += tl.load(ids + tl.program_id(1)) * (2 * n_out if gated else n_out)
    column = 8 * J * tl.arange(0, T)[:, None, None]                # dimensions: thread, row, column
    first = tl.program_id(0) * n_turn * n_block
    row = row_0 + tl.minimum(first + r % n_block, n_out - 1)
    words, s, z = _rows(weight, scales, zeros, row, column, True, bits, step, n_in, group)
    if use_pdl and ids is None:
        gdc_wait()                                 # below, outputs of earlier kernels are read

    h, h_sums = (), ()                             # by step, group of 8 columns, row of x
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
        cur_words, cur_s, cur_z, cur_row = words, s, z, row
        out_0 = first + turn * n_block
        if pipelined:
            row = row_0 + tl.minimum(out_0 + n_block + r % n_block, n_out - 1)
            is_valid = (turn + 1 < n_turn) & (out_0 + n_block < n_out)
            words, s, z = _rows(weight, scales, zeros, row, column, is_valid, bits, step, n_in,
                                group)
        acc = ()
        for _ in tl.static_range(M):
            acc = acc + (tl.zeros([T, R], tl.float32),)
        for k in tl.static_range(n_step):
            eights = _eights(cur_words[k], bits, T, R, flip)
            sums = ()
            for m in tl.static_range(M):
                dot = tl.zeros([T, R], tl.float32)
                h_sum = tl.zeros([T, 1], tl.float32)
                for j in tl.static_range(J):
                    dot += tl.sum(eights[j] * h[(k * J + j) * M + m].to(tl.float32), 2)
                    h_sum += h_sums[(k * J + j) * M + m]
                if bits == 4:                      # s (code - 8) + z
                    scale = cur_s[k].to(tl.float32).reshape(T, R)
                    zero = cur_z[k].to(tl.float32).reshape(T, R)
                    dot = scale * dot + (zero - 24 * scale) * h_sum
                elif bits == 8:
                    dot -= 384 * h_sum
                sums = sums + (acc[m] + dot,)
            acc = sums

        o = out_0 + tl.arange(0, n_block)
        for m in tl.static_range(M):
            result = tl.sum(acc[m], 0)             # [R]
            if norm is not None:
                result *= tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
            if bits == 8:
                result *= tl.load(scales + cur_row).to(tl.float32)
            if bias is not None:
                result += tl.load(bias + cur_row).to(tl.float32)
            if gated:
                gate, up = tl.split(tl.trans(result.to(kind).to(tl.float32).reshape(2, n_block)))
                gate, up = _activated(gate, up, activation)
                result = gate.to(kind).to(tl.float32) * up
            result = result.to(kind)
            if residual is not None:
                residuals = tl.load(residual + m * n_out + o, o < n_out, 0).to(tl.float32)
                result = (residuals + result.to(tl.float32)).to(kind)
            tl.store(y + m * n_out + o, result, o < n_out)


@functools.cache
def launch_options(device: torch.device) -> tuple[int, dict]:
    """Number of multiprocessors; options for programmatic dependent launch (PDL), if supported."""
    if device.type != "cuda":                      # Triton's interpreter
        return 1, {}
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    n_sm = torch.cuda.get_device_properties(device).multi_processor_count
    return n_sm, {"launch_pdl": True} if hopper else {}


def launch(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
           bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
           activation: str, ids: Tensor | None, share: int) -> Tensor:
    """x [M, in], weight [(E,) out, in] or codes -> y [M share, out]. M up to 8, any with ids."""
    n_in, n_row = x.shape[1], weight.shape[-2]
    n_out = n_row // (2 if activation else 1)
    group = n_in if zeros is None else n_in // scales.shape[-1]
    bits = 16 if scales is None else 8 if zeros is None else 4
    M = 1 if ids is not None else x.shape[0]
    if M > 1 and M * n_in > MAX_X:                 # x would not fit into registers
        parts = x.tensor_split(triton.cdiv(M * n_in, MAX_X))
        residuals = [None] * len(parts) if residual is None else residual.tensor_split(len(parts))
        return torch.cat([launch(part, weight, scales, zeros, bias, norm, eps, r, activation, ids,
                                 share) for part, r in zip(parts, residuals)])

    y = x.new_empty(share * x.shape[0], n_out)
    n_y = len(y) if ids is not None else 1
    n_sm, pdl = launch_options(x.device)           # choices below are measured: docs/gpu.md
    R = 2 if bits == 16 else 8 if bits == 4 and M == 1 else 4
    while R > 2 and n_row * n_y < 2 * R * n_sm:
        R //= 2
    W = min(16, triton.next_power_of_2(triton.cdiv(n_in, 512 if bits == 16 else 1024)))
    n_block = R // 2 if activation else R
    n_tile = triton.cdiv(n_out, n_block)
    n_resident = max(1, WARPS_PER_SM * n_sm // W)  # programs
    n_turn = 1 if bits < 16 or M > 1 else min(n_tile, triton.cdiv(n_tile * n_y, n_resident))
    _matvec[triton.cdiv(n_tile, n_turn), n_y](
        x, norm, weight, scales, zeros, bias, residual, ids, y, eps, FLIP[bits], n_turn, share,
        n_in, n_out, group, bits, activation, M, R, W * WARP, n_turn > 1, bool(pdl),
        num_warps=W, num_stages=1, **pdl)
    return y
