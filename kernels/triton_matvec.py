"""Up to eight rows by a weight matrix on a GPU: one pass over the weights, in Triton.

A program has a few outputs. Each thread takes eight neighbouring columns in turn, of x and of the
weights' rows, multiplies and adds them in fp32, and all threads' sums are added at the end: no
tensor cores, which so few rows would not fill, and nothing moves between threads before. Weights
are read as they lie on disk (plain.py). What goes in may be normalized on the way and what comes
out activated or added to the residual, so that a Llama's layer is four of these and its attention.
Imported on a GPU only.

    y = launch(x, weight, scales, zeros, None, norm.weight, 1e-5, None, "", None, 1)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARP = 64 if torch.version.hip else 32
MANY_OUT = 8192                                    # such that 4 a program still fill a GPU
SIXTEEN = 0x41800000                               # 16.0: a code in bits 19 to 22 is added to it


@triton.jit
def _read(at, place, n: tl.constexpr, even: tl.constexpr):
    """A tile of rows of n, each number read once: they are not to drive x out of the cache."""
    if not even:
        t = tl.load(at, place < n, 0, eviction_policy="evict_first")
    else:
        t = tl.load(at, eviction_policy="evict_first")
    return t


@triton.jit
def _matvec(x, norm, weight, scales, zeros, bias, residual, ids, y, n_row, eps, sixteen,
            share, n_in: tl.constexpr, n_out: tl.constexpr, group: tl.constexpr,
            activation: tl.constexpr, M: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    kind: tl.constexpr = x.dtype.element_ty
    step: tl.constexpr = 8 * T                                 # columns that all threads take
    even: tl.constexpr = n_in % step == 0
    gated: tl.constexpr = activation != ""
    n_own: tl.constexpr = R // 2 if gated else R               # outputs of this program
    own = tl.program_id(0) * n_own + tl.arange(0, n_own)
    r = tl.arange(0, R)                                        # gated: up's rows after gate's
    row = tl.minimum(tl.program_id(0) * n_own + r % n_own, n_out - 1) + r // n_own * n_out
    if ids is not None:                                        # each row of y has its own expert
        x += tl.program_id(1) // share * n_in
        y += tl.program_id(1) * n_out
        row += tl.load(ids + tl.program_id(1)) * (2 * n_out if gated else n_out)
    row_at = row.to(tl.int64)[:, None]
    m = tl.arange(0, M)[:, None, None]
    t = tl.arange(0, T)[:, None, None, None]                   # dimensions: thread, m, row, column

    acc = tl.zeros([T, M, R], tl.float32)
    squares = tl.zeros([T, M, 1], tl.float32)
    for at in tl.static_range(0, n_in, step):
        column = at + 8 * t + tl.arange(0, 8)
        h = tl.load(x + m * n_in + column, (column < n_in) & (m < n_row), 0).to(tl.float32)
        if norm is not None:
            squares += tl.sum(h * h, 3)
            h *= tl.load(norm + column, column < n_in, 0)
        if zeros is None:
            w = _read(weight + row_at * n_in + column, column, n_in, even).to(tl.float32)
            acc += tl.sum(w * h, 3)
        else:                                                  # s (code - 8) + z
            word_at = weight + row_at * (n_in // 4) + at // 4 + 2 * t
            word = _read(word_at.to(tl.pointer_type(tl.int32)), at + 8 * t, n_in, even)
            codes = word >> 4 * tl.arange(0, 8) << 19 & 0x780000 | sixteen
            codes = codes.to(tl.float32, bitcast=True)
            g_at = row_at * (n_in // group) + at // group + 8 * t // group
            s = _read(scales + g_at, at + 8 * t, n_in, even).to(tl.float32).reshape(T, 1, R)
            z = _read(zeros + g_at, at + 8 * t, n_in, even).to(tl.float32).reshape(T, 1, R)
            acc += s * tl.sum(codes * h, 3) + (z - 24 * s) * tl.sum(h, 3)

    result = tl.sum(acc, 0)                                    # [M, R]
    if norm is not None:
        result *= tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
    if scales is not None and zeros is None:
        result *= tl.load(scales + row).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)
    if gated:
        gate, up = tl.split(tl.permute(result.reshape(M, 2, n_own), (0, 2, 1)))
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        if activation == "silu":
            gate = gate * tl.sigmoid(gate)
        elif activation == "clamped_silu":
            gate = tl.minimum(gate, 7.0)
            gate = gate * tl.sigmoid(1.702 * gate)
            up = tl.maximum(tl.minimum(up, 7.0), -7.0) + 1
        else:                                                  # gelu_tanh
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            gate = gate * tl.sigmoid(inner)
        result = gate.to(kind).to(tl.float32) * up
    result = result.to(kind)
    of_row = tl.arange(0, M)[:, None]
    y_at = of_row * n_out + own
    is_y = (of_row < n_row) & (own < n_out)
    if residual is not None:
        result = (tl.load(residual + y_at, is_y, 0).to(tl.float32) + result.to(tl.float32)).to(kind)
    tl.store(y + y_at, result, is_y)


def launch(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
           bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
           activation: str, ids: Tensor | None, share: int) -> Tensor:
    """x [M, in], M up to 8, or with ids any; weight [(E,) out, in] or codes -> y [M share, out]."""
    n_in, n_row = x.shape[1], weight.shape[-2]
    n_out = n_row // (2 if activation else 1)
    group = n_in if zeros is None else n_in // scales.shape[-1]
    M = 1 if ids is not None else x.shape[0]
    R = 1 if scales is None else 2 if zeros is None else 4     # fewer bits: x is read more often
    R = max(R if n_row >= MANY_OUT else R // 2, 2 if activation or M > 1 else 1)
    R = min(R, 2) if M > 1 else R                              # or registers are short
    W = 2 if n_in <= 512 else 4 if n_in <= 4096 else 8
    y = x.new_empty(share * x.shape[0], n_out)
    grid = triton.cdiv(n_out, R // 2 if activation else R), len(y) if ids is not None else 1
    codes = weight if zeros is None else weight.view(torch.int16)      # four in each
    _matvec[grid](x, norm, codes, scales, zeros, bias, residual, ids, y, M, eps, SIXTEEN, share,
                  n_in, n_out, group, activation, triton.next_power_of_2(M), R, W * WARP,
                  num_warps=W, num_stages=1)
    return y
