"""Up to eight rows by a weight matrix on a GPU: one pass over the weights, in Triton.

A program has 8 J outputs. Its warps take turns at blocks of 128 columns, which tensor cores
multiply by eight rows of x, whether there are as many or one: decoding and verifying drafts give
the same numbers. What goes in may be normalized on the way and what comes out activated or added
to the residual, so that a Llama's layer is four of these and its attention. Imported on a GPU only;
see plain.py for the math and cuda.py for the order of codes.

    y = launch(x, weight, scales, zeros, None, norm.weight, 1e-5, None, "", None, 1)

A lane of a tensor core has a quarter of each row's columns, and nothing moves between threads if
these are where its 128-bit loads have put them. So column 32 v + 8 q + e of a block is of lane q:

    v = 0                                     v = 1      v = 2      v = 3
    | q = 0, 8 columns | q = 1 | q = 2 | q = 3 | 32 columns | …
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY_BLOCKS = 8                                    # of columns, that four warps take turns at
STAGED = 64 << 10                                  # bytes of shared memory for what is on its way
COLUMNS = 16 if torch.version.hip else 8           # of x, that tensor cores multiply at least
FP32 = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
MANY_OUT = 4096                                    # such that 32 a program still use most of a GPU
POWERS = {"torch.bfloat16": (0x43004300, 128), "torch.float16": (0x64006400, 1024),
          "torch.float32": (0, 0)}                 # 2^7 and 2^10, each twice: a fraction's end is 1


@triton.jit
def _codes(word, i: tl.constexpr, power, kind: tl.constexpr):
    """The i-th and the (i + 4)-th nibble of each word, plus a power of two -> [..., 2] of kind.

    power: its bits, twice. An argument, lest two instructions are made of `and` and `or`.
    """
    two = word >> 4 * i & 0x000F000F | power
    low, high = two & 0xFFFF, two >> 16
    if kind == tl.float32:
        low, high = low.to(kind), high.to(kind)
    else:
        low = low.to(tl.uint16).to(kind, bitcast=True)
        high = high.to(tl.uint16).to(kind, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _four_bits(word, G: tl.constexpr, power, kind: tl.constexpr):
    """Words [1, J, W, 8, q, v] -> codes + power [G W, 8 J, 128 / G]."""
    J: tl.constexpr = word.shape[1]
    W: tl.constexpr = word.shape[2]
    even = tl.join(_codes(word, 0, power, kind), _codes(word, 2, power, kind))
    odd = tl.join(_codes(word, 1, power, kind), _codes(word, 3, power, kind))
    t = tl.join(even, odd).reshape(J, W, 8, 4, G, 4 // G, 2, 2, 2)
    return tl.permute(t, (4, 1, 0, 2, 5, 8, 3, 7, 6)).reshape(G * W, 8 * J, 128 // G)


@triton.jit
def _half_bytes(word, i: tl.constexpr, power, kind: tl.constexpr):
    """Words [2, J, W, 8, q, 4] -> low (i = 0) or high (1) halves of codes + power [W, 8 J, 128]."""
    J: tl.constexpr = word.shape[1]
    W: tl.constexpr = word.shape[2]
    t = tl.join(_codes(word, i, power, kind), _codes(word, i + 2, power, kind))
    t = t.reshape(2, J, W, 8, 4, 2, 2, 2, 2)
    return tl.permute(t, (2, 1, 3, 0, 5, 8, 4, 6, 7)).reshape(W, 8 * J, 128)


@triton.jit
def _constant(value: tl.constexpr, n_batch: tl.constexpr, n_row: tl.constexpr, n: tl.constexpr,
              kind: tl.constexpr):
    """Joined, for codes are: else x would be wanted in two orders."""
    half = tl.full([n_batch, n_row, n // 2], value, tl.float32).to(kind)
    return tl.join(half, half).reshape(n_batch, n_row, n)


@triton.jit
def _beside_sums(t, G: tl.constexpr, N: tl.constexpr):
    """A number of each row and group [J, W, 8, q, G] -> [G W, 8 J, N]."""
    J: tl.constexpr = t.shape[0]
    W: tl.constexpr = t.shape[1]
    t = tl.permute(t.to(tl.float32), (4, 1, 0, 2, 3)).reshape(G * W, 8 * J, 4, 1)
    return tl.broadcast_to(t, G * W, 8 * J, 4, N // 4).reshape(G * W, 8 * J, N)


@triton.jit
def _matvec(x, norm, weight, scales, zeros, bias, residual, ids, y, n_row, eps, power_bits,
            share, n_in: tl.constexpr, n_out: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
            power: tl.constexpr, activation: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            J: tl.constexpr, W: tl.constexpr):
    kind: tl.constexpr = x.dtype.element_ty
    R: tl.constexpr = 8 * J
    n_block: tl.constexpr = (n_in + 127) // 128
    gated: tl.constexpr = activation != ""
    n_own: tl.constexpr = R // 2 if gated else R               # outputs of this program
    G: tl.constexpr = 128 // group if bits == 4 and group < 128 else 1     # groups in a block
    L: tl.constexpr = 4 if bits == 16 else bits // 4           # loads of a thread for a row's block
    V: tl.constexpr = 8 if bits == 16 else 4                   # numbers or words in each
    row_len: tl.constexpr = n_in if bits == 16 else n_block * 4 * L * V
    if ids is not None:                                        # each row of y has its own expert
        x += tl.program_id(1) // share * n_in
        y += tl.program_id(1) * n_out

    j = tl.arange(0, J)[:, None, None, None, None]             # dimensions: load, j, warp, r, q, v
    w = tl.arange(0, W)[:, None, None, None]
    r = tl.arange(0, 8)[:, None, None]
    q = tl.arange(0, 4)[:, None]
    row = tl.minimum(tl.program_id(0) * n_own + (8 * j + r) % n_own, n_out - 1)
    row += (8 * j + r) // n_own * n_out                        # gated: of up, below those of gate
    if ids is not None:
        row += tl.load(ids + tl.program_id(1)) * (2 * n_out if gated else n_out)
    row = row.to(tl.int64)
    load = tl.arange(0, L)[:, None, None, None, None, None]
    in_block = load * 4 * V + q * V + tl.arange(0, V)
    column = tl.arange(0, 4)[:, None, None, None, None] * 32 + q * 8 + tl.arange(0, 8)
    m = tl.arange(0, M)[:, None, None]

    inverse = 1.0
    if norm is not None:
        squares = tl.zeros([1024], tl.float32)
        for at in range(0, n_in, 1024):
            col = at + tl.arange(0, 1024)
            h = tl.load(x + col, col < n_in, 0).to(tl.float32)
            squares += h * h
        inverse = tl.rsqrt(tl.sum(squares) / n_in + eps)

    acc = tl.zeros([G * W, R, N], tl.float32)
    ones = _constant(1.0, G * W, R, 128 // G, kind)
    for at in tl.range(0, n_block, W):
        if norm is None:                                       # [v, W, M, q, 8]
            col = column + (at + w) * 128
            h = tl.load(x + m * n_in + col, (col < n_in) & (m < n_row), 0)
        else:
            col = at * 128 + tl.arange(0, W * 128)
            h = tl.load(x + col, col < n_in, 0).to(tl.float32)
            h = (h * inverse * tl.load(norm + col, col < n_in, 0)).to(kind)
            h = tl.permute(h.reshape(W, 4, 1, 4, 8), (1, 0, 2, 3, 4))
        h = h.reshape(G, 4 // G, W, M, 4, 2, 2, 2)             # pairs as the codes' below
        if bits == 16:
            h = tl.permute(h, (0, 2, 1, 5, 6, 4, 7, 3))
        else:
            h = tl.permute(h, (0, 2, 1, 6, 4, 5, 7, 3))
        h = tl.broadcast_to(h.reshape(G * W, 128 // G, M), G * W, 128 // G, N)

        block = tl.minimum(at + w, n_block - 1)                # beyond the last, h is 0
        w_at = weight + row * row_len + block * 4 * L * V + in_block
        if bits == 16 and n_in % 128:
            inside = (block * 128 + in_block < n_in) & (row >= 0)
            word = tl.load(w_at, inside, 0, eviction_policy="evict_first")
        else:
            word = tl.load(w_at, eviction_policy="evict_first")    # [L, J, W, 8, q, V]
        if bits == 16:
            t = tl.permute(word.reshape(4, J, W, 8, 4, 4, 2), (2, 1, 3, 0, 5, 4, 6))
            acc = tl.dot(t.reshape(W, R, 128), h, acc, input_precision=FP32)
        else:
            word = word.to(tl.uint32, bitcast=True)
            sums = tl.dot(ones, h, input_precision=FP32)
        if bits == 8:                                          # 16 high + low - 128
            high = _half_bytes(word, 1, power_bits, kind)
            low = _half_bytes(word, 0, power_bits, kind)
            acc += 16 * tl.dot(high, h, input_precision=FP32)
            acc += tl.dot(low, h, input_precision=FP32) - (17 * power + 128) * sums
        elif bits == 4:                                        # s (code - 8) + z
            g_at = row * (n_in // group) + block * 128 // group + tl.arange(0, G) + 0 * q
            inside = block * 128 // group + tl.arange(0, G) + 0 * row < n_in // group
            s = _beside_sums(tl.load(scales + g_at, inside, 0), G, N)
            z = _beside_sums(tl.load(zeros + g_at, inside, 0), G, N)
            codes = _four_bits(word, G, power_bits, kind)
            acc += s * tl.dot(codes, h, input_precision=FP32)
            acc += (z - (power + 8) * s) * sums

    result = tl.sum(acc, 0)                                    # [R, N]
    own = tl.program_id(0) * n_own + tl.arange(0, n_own)
    own_row = tl.program_id(0) * n_own + tl.arange(0, R) % n_own + tl.arange(0, R) // n_own * n_out
    is_row = tl.program_id(0) * n_own + tl.arange(0, R) % n_own < n_out
    if ids is not None:
        own_row += tl.load(ids + tl.program_id(1)) * (2 * n_out if gated else n_out)
    if bits == 8:
        result *= tl.load(scales + own_row, is_row, 0).to(tl.float32)[:, None]
    if bias is not None:
        result += tl.load(bias + own_row, is_row, 0).to(tl.float32)[:, None]
    if gated:
        gate, up = tl.split(tl.permute(result.reshape(2, n_own, N), (1, 2, 0)))
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
    of_row = tl.arange(0, N)[None, :]
    y_at = of_row * n_out + own[:, None]
    is_y = (of_row < n_row) & (own < n_out)[:, None]
    if residual is not None:
        result = (tl.load(residual + y_at, is_y, 0).to(tl.float32) + result.to(tl.float32)).to(kind)
    tl.store(y + y_at, result, is_y)


def launch(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
           bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
           activation: str, ids: Tensor | None, share: int) -> Tensor:
    """x [M, in], M up to 8, or with ids any; weight [(E,) out, in] or words -> y [M share, out]."""
    n_in = x.shape[1]
    n_out = weight.shape[-2] // (2 if activation else 1)
    bits, group = 16, n_in
    if scales is not None:
        bits = weight.shape[-1] // -(-n_in // 128) // 4
        group = n_in if zeros is None else n_in // scales.shape[-1]
    n_row = 1 if ids is not None else x.shape[0]
    M = 1 if n_row == 1 else COLUMNS
    J = 4 if bits < 16 and x.element_size() == 2 and weight.shape[-2] >= MANY_OUT else 2
    width = bits if scales is not None else 8 * x.element_size()
    W = 4 if n_in > 128 * MANY_BLOCKS else 2
    stage = W * 128 * (J * width + M * x.element_size())   # bytes of weights and x in one trip
    y = x.new_empty(share * x.shape[0], n_out)
    grid = (triton.cdiv(n_out, 4 * J if activation else 8 * J), len(y) if ids is not None else 1)
    power_bits, power = POWERS[str(x.dtype)]
    n_trip = triton.cdiv(n_in, 128 * W)
    _matvec[grid](x, norm, weight, scales, zeros, bias, residual, ids, y, n_row, eps, power_bits,
                  share, n_in, n_out, group, bits, power, activation, M, COLUMNS, J, W,
                  num_warps=W, num_stages=max(2, min(STAGED // stage, n_trip)))
    return y
