"""Matmul of up to eight rows by unquantized weights on a GPU: one pass over them, in Triton.

A program computes a few outputs at a time, several times in turn if there are many. Each thread
loads 128 bits of each weight row, keeps the matching columns of x in registers and accumulates in
fp32; the threads' sums are reduced once, at the end. Tensor cores are not used: memory limits it
(codes are another matter: triton_quantized.py). The first load starts before the previous kernel
has ended (PDL), each later one while the current weights are multiplied. The input can be
normalized, the output activated or added to a residual. Imported on a GPU only.

    y = launch(x, weight, None, norm.weight, 1e-5, None, "", None, 1)
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


@triton.jit
def _rows(weight, row, column, is_valid, step: tl.constexpr, n_in: tl.constexpr):
    """Load whole rows, 8 columns per thread at a time -> a tuple of [T, R, 8].

    max_contiguous() assigns a warp's lanes to one row: without it Triton 3.7 spreads them over rows
    and moves weights through shared memory. It widens no load: pointers have no known alignment.
    """
    words = ()
    row = row.to(tl.int64)[:, None]
    for start in tl.static_range(0, n_in, step):
        c = start + column
        if n_in % step != 0:
            is_valid &= c < n_in
        place = tl.max_contiguous(weight + row * n_in + c + tl.arange(0, 8), (2, 1, 8))
        # read once: evict first, keep x cached
        words = words + (tl.load(place, is_valid, 0, eviction_policy="evict_first"),)
    return words


@triton.jit
def activated(gate, up, activation: tl.constexpr):
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
def _matvec(x, norm, weight, bias, residual, ids, y, eps, n_turn, share, expert_rows,
            n_in: tl.constexpr, n_out: tl.constexpr, activation: tl.constexpr, M: tl.constexpr,
            R: tl.constexpr, T: tl.constexpr, pipelined: tl.constexpr, use_pdl: tl.constexpr):
    if use_pdl:
        gdc_launch_dependents()
    kind: tl.constexpr = x.dtype.element_ty
    step: tl.constexpr = 8 * T                     # columns per step of all threads
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
        row_0 += tl.load(ids + tl.program_id(1)) * expert_rows
    column = 8 * tl.arange(0, T)[:, None, None]                # dimensions: thread, row, column
    first = tl.program_id(0) * n_turn * n_block
    row = row_0 + tl.minimum(first + r % n_block, n_out - 1)
    words = _rows(weight, row, column, True, step, n_in)
    if use_pdl and ids is None:
        gdc_wait()                                 # below, outputs of earlier kernels are read

    h, squares = (), ()                            # h: by row of x, step
    for m in tl.static_range(M):
        total = tl.zeros([T, 1], tl.float32)
        for i in tl.static_range(n_step):
            c = i * step + column + tl.arange(0, 8)
            eight = tl.load(x + m * n_in + c, c < n_in, 0)
            if norm is not None:
                eight = eight.to(tl.float32)
                total += tl.sum(eight * eight, 2)
                eight *= tl.load(norm + c, c < n_in, 0)
            h = h + (eight,)
        squares = squares + (total,)

    for turn in tl.range(n_turn):
        cur_words, cur_row = words, row
        out_0 = first + turn * n_block
        if pipelined:
            row = row_0 + tl.minimum(out_0 + n_block + r % n_block, n_out - 1)
            is_valid = (turn + 1 < n_turn) & (out_0 + n_block < n_out)
            words = _rows(weight, row, column, is_valid, step, n_in)
        acc = ()
        for _ in tl.static_range(M):
            acc = acc + (tl.zeros([T, R], tl.float32),)
        for k in tl.static_range(n_step):
            w = cur_words[k].to(tl.float32)
            sums = ()
            for m in tl.static_range(M):
                sums = sums + (acc[m] + tl.sum(w * h[m * n_step + k].to(tl.float32), 2),)
            acc = sums

        o = out_0 + tl.arange(0, n_block)
        for m in tl.static_range(M):
            result = tl.sum(acc[m], 0)             # [R]
            if norm is not None:
                result *= tl.rsqrt(tl.sum(squares[m], 0) / n_in + eps)
            if bias is not None:
                result += tl.load(bias + cur_row).to(tl.float32)
            if gated:
                gate, up = tl.split(tl.trans(result.to(kind).to(tl.float32).reshape(2, n_block)))
                gate, up = activated(gate, up, activation)
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


def expert_distance(*tensors: Tensor | None) -> int:
    """Rows from an expert to the next: more than it has if it is a part of a stacked matrix."""
    distances = {t.stride(0) // t[0, :1].numel() for t in tensors if t is not None}
    inner = all(t[0].is_contiguous() for t in tensors if t is not None)
    if len(distances) > 1 or not inner:
        raise ValueError("experts' weight, scales and bias lie at different distances: "
                         "expected parts of tensors of the same rows")
    return distances.pop()


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float,
           residual: Tensor | None, activation: str, ids: Tensor | None, share: int) -> Tensor:
    """x [M, in], weight [(E,) out, in] -> y [M share, out]. M up to 8, any with ids."""
    n_in, n_row = x.shape[1], weight.shape[-2]
    n_out = n_row // (2 if activation else 1)
    M = 1 if ids is not None else x.shape[0]
    if M > 1 and M * n_in > MAX_X:                 # x would not fit into registers
        parts = x.tensor_split(triton.cdiv(M * n_in, MAX_X))
        residuals = [None] * len(parts) if residual is None else residual.tensor_split(len(parts))
        return torch.cat([launch(part, weight, bias, norm, eps, r, activation, ids, share)
                          for part, r in zip(parts, residuals)])

    y = x.new_empty(share * x.shape[0], n_out)
    n_y = len(y) if ids is not None else 1
    n_sm, pdl = launch_options(x.device)           # choices below are measured: docs/gpu.md
    R = 2                                          # weight rows at a time
    W = min(16, triton.next_power_of_2(triton.cdiv(n_in, 512)))
    n_block = R // 2 if activation else R
    n_tile = triton.cdiv(n_out, n_block)
    n_resident = max(1, WARPS_PER_SM * n_sm // W)  # programs
    n_turn = 1 if M > 1 else min(n_tile, triton.cdiv(n_tile * n_y, n_resident))
    expert_rows = n_row if ids is None else expert_distance(weight, bias)
    _matvec[triton.cdiv(n_tile, n_turn), n_y](
        x, norm, weight, bias, residual, ids, y, eps, n_turn, share, expert_rows, n_in, n_out,
        activation, M, R, W * WARP, n_turn > 1, bool(pdl), num_warps=W, num_stages=1, **pdl)
    return y
