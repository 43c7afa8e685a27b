"""Up to eight rows by a weight matrix on a GPU: one pass over the weights, in Triton.

A program has R outputs and walks along their rows of weights, 128 bits a thread at a time. What
goes in may be normalized on the way and what comes out activated or added to the residual, so that
a Llama's layer is four of these and its attention. A row's sum has the same order whatever M and R
are: decoding and verifying give the same numbers. Imported on a GPU only; see plain.py for the math
and gpu.py for the layouts.

    y = matvec(x, weight, scales, zeros, eps=1e-5, norm=norm.weight)       # [M, in] -> [M, out]
"""

import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
THREADS = 32 * WARPS


@triton.jit
def _one_and_code(word, one, i: tl.constexpr, bits: tl.constexpr):
    """1 + code / 2^bits of the i-th code in each word: its bits are a fraction's highest.

    one: the bits of 1.0, no constant, lest two instructions are made of `and` and `or`.
    """
    shift: tl.constexpr = 23 - bits - i * bits
    if shift >= 0:
        word = word << shift
    else:
        word = word >> -shift
    mask: tl.constexpr = ((1 << bits) - 1) << (23 - bits)
    return (word & mask | one).to(tl.float32, bitcast=True)


@triton.jit
def _thread_sums(t, V: tl.constexpr):
    """[M, R, C] -> [M, R, C / V]: what one thread has loaded at once, without another's help."""
    return tl.sum(t.reshape(t.shape[0], t.shape[1], t.shape[2] // V, V), 3)


@triton.jit
def _matvec(x, norm, weight, scales, zeros, bias, residual, ids, y, n_row, eps, one,
            n_in: tl.constexpr, n_out: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
            activation: tl.constexpr, M: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
            V: tl.constexpr):
    per: tl.constexpr = 1 if bits == 16 else 32 // bits        # weights in a word
    n_word: tl.constexpr = n_in // per
    gated: tl.constexpr = activation != ""
    n_own: tl.constexpr = R // 2 if gated else R               # outputs of this program
    m = tl.arange(0, M)
    r = tl.arange(0, R)
    out = tl.program_id(0) * n_own + r % n_own
    row = out + r // n_own * n_out                             # gated: of up, below those of gate
    is_row = out < n_out
    is_m = m < n_row
    if ids is not None:                                        # each row of x has its own expert
        x += tl.program_id(1) * n_in
        y += tl.program_id(1) * n_out
        row += tl.load(ids + tl.program_id(1)) * (2 * n_out if gated else n_out)
    row = row.to(tl.int64)

    inverse = tl.full([M, 1, 1], 1.0, tl.float32)
    if norm is not None:
        squares = tl.zeros([M, 1, C], tl.float32)
        for at in range(0, n_in, C):
            col = at + tl.arange(0, C)
            is_x = is_m[:, None, None] & (col < n_in)[None, None, :]
            h = tl.load(x + m[:, None, None] * n_in + col[None, None, :], is_x, 0).to(tl.float32)
            squares += h * h
        inverse = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / n_in + eps)

    acc = tl.zeros([M, R, C // V], tl.float32)
    sums = tl.zeros([M, 1, C // V], tl.float32)
    for at in range(0, n_word, C):
        word = at + tl.arange(0, C)
        is_word = word < n_word
        is_x = is_m[:, None, None] & is_word[None, None, :]
        is_w = is_row[None, :, None] & is_word[None, None, :]
        w_at = row[None, :, None] * n_word + word[None, None, :]
        w = tl.load(weight + w_at, is_w, 0, eviction_policy="evict_first")     # [1, R, C]
        product = tl.zeros([M, R, C], tl.float32)
        total_x = tl.zeros([M, 1, C], tl.float32)
        for i in tl.static_range(per):
            col = word
            if bits != 16:                         # a thread's 4 words have 4 * per columns
                col = word // 4 * 4 * per + i * 4 + word % 4
            h = tl.load(x + m[:, None, None] * n_in + col[None, None, :], is_x, 0).to(tl.float32)
            if norm is not None:
                g = tl.load(norm + col, is_word, 0)
                h = (h * inverse * g[None, None, :]).to(x.dtype.element_ty).to(tl.float32)
            if bits == 16:
                product += w.to(tl.float32) * h
            else:
                product += _one_and_code(w, one, i, bits) * h
                total_x += h
        if bits == 4:                              # w = 16 s v + z - 24 s
            four = at // V + tl.arange(0, C // V)
            g_at = row[None, :, None] * (n_in // group) + (four * 4 * per // group)[None, None, :]
            is_g = is_row[None, :, None] & (four * V < n_word)[None, None, :]
            s = tl.load(scales + g_at, is_g, 0).to(tl.float32)
            z = tl.load(zeros + g_at, is_g, 0).to(tl.float32)
            acc += 16 * s * _thread_sums(product, V) + (z - 24 * s) * _thread_sums(total_x, V)
        else:
            acc += _thread_sums(product, V)
            if bits == 8:
                sums += _thread_sums(total_x, V)
    total = tl.sum(acc, 2)                                     # [M, R]
    if bits == 8:
        s = tl.load(scales + row, is_row, 0).to(tl.float32)
        total = s[None, :] * (256 * total - 384 * tl.sum(sums, 2))
    if bias is not None:
        total += tl.load(bias + row, is_row, 0).to(tl.float32)[None, :]
    kind = x.dtype.element_ty
    if gated:
        gate, up = tl.split(tl.permute(total.reshape(M, 2, n_own), (0, 2, 1)))
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        if activation == "silu":
            gate = gate * tl.sigmoid(gate)
        else:                                                  # gelu_tanh
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            gate = gate * tl.sigmoid(inner)
        total = gate.to(kind).to(tl.float32) * up
    own = tl.program_id(0) * n_own + tl.arange(0, n_own)
    y_at = m[:, None] * n_out + own[None, :]
    is_y = is_m[:, None] & (own < n_out)[None, :]
    total = total.to(kind)
    if residual is not None:
        total = (tl.load(residual + y_at, is_y, 0).to(tl.float32) + total.to(tl.float32)).to(kind)
    tl.store(y + y_at, total, is_y)


def launch(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
           bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
           activation: str, ids: Tensor | None) -> Tensor:
    """x [M, in], M up to 8, or with ids any; weight [(E,) out, in] or words -> y [M, out]."""
    n_in = x.shape[1]
    n_out = weight.shape[-2] // (2 if activation else 1)
    bits, group, V = 16, n_in, 16 // weight.element_size()     # V: what 128 bits have
    if scales is not None:
        bits = 32 * weight.shape[-1] // n_in
        group = n_in if zeros is None else n_in // scales.shape[-1]
        V = 4
    n_row = 1 if ids is not None else x.shape[0]
    M = triton.next_power_of_2(n_row)
    R = 16 if M == 1 and bits != 16 else 8 if M * (8 // bits + 1) < 9 else 4
    y = x.new_empty(x.shape[0], n_out)
    grid = (triton.cdiv(n_out, R // 2 if activation else R), len(x) if ids is not None else 1)
    _matvec[grid](x, norm, weight, scales, zeros, bias, residual, ids, y, n_row, eps,
                  0x3F800000, n_in, n_out, group, bits, activation, M, R, V * THREADS, V,
                  num_warps=WARPS)
    return y
