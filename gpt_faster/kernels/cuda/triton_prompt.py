"""Products of a prompt's rows by int8 or int4 codes on a GPU, in Triton, on tensor cores.

y^T = W x^T: codes, as they lie on disk, become bfloat16 in the registers that a tensor core reads;
x is in shared memory. 16 bits of a row are four columns of int4 or two of int8: the first ones of
all are one operand, the second ones the next, so x is reordered before. Parts of long columns are
added up by another launch. AMD, Triton's interpreter and other dtypes take quantize.py's formula
instead of PTX. Imported on a GPU only.

    y = multiply(x, weight, scales); w = write_out(weight, scales, torch.bfloat16)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt_faster.kernels.cuda import mma, triton_matvec, triton_quantized
from gpt_faster.kernels.cuda.triton_matvec import launch_options

INT4, INT4_REGISTERS = map(tl.constexpr, (mma.INT4_WEIGHTS, mma.INT4_WEIGHTS_REGISTERS))
INT8, INT8_REGISTERS = map(tl.constexpr, (mma.INT8_WEIGHTS, mma.INT8_WEIGHTS_REGISTERS))


@triton.jit
def _ptx_int4(w, s, z):
    return tl.inline_asm_elementwise(
        INT4, INT4_REGISTERS, [w, s, z], is_pure=True, pack=2,
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16))


@triton.jit
def _ptx_int8(w):
    return tl.inline_asm_elementwise(INT8, INT8_REGISTERS, [w], dtype=(tl.bfloat16, tl.bfloat16),
                                     is_pure=True, pack=2)


@triton.jit
def _scales_and_zeros(scales, row, first, n_in: tl.constexpr, group: tl.constexpr,
                      n_group: tl.constexpr, BK: tl.constexpr):
    """Of BK columns from `first`: two tensors [BN, BK / 4]. n_group: loaded, of a row."""
    BN: tl.constexpr = row.shape[0]
    of_group: tl.constexpr = BK // n_group         # columns
    g = first // group + tl.arange(0, n_group)
    if n_group > 1 and group != of_group:          # one that does not divide BK
        g = (first + of_group * tl.arange(0, n_group)) // group
    at = (row * (n_in // group))[:, None] + g[None]
    if scales.dtype.element_ty == tl.int32:        # a pair of bfloat16: one load that is prefetched
        if n_in % BK != 0:
            pair = tl.load(scales + at, (g < n_in // group)[None], 0)
        else:
            pair = tl.load(scales + at)
        s = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        z = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        is_group = (g < n_in // group)[None]
        s = tl.load(scales + 2 * at, is_group, 0)
        z = tl.load(scales + 2 * at + 1, is_group, 0)
    shape: tl.constexpr = (BN, n_group, of_group // 4)
    return (tl.reshape(tl.broadcast_to(s[:, :, None], shape), (BN, BK // 4)),
            tl.reshape(tl.broadcast_to(z[:, :, None], shape), (BN, BK // 4)))


@triton.jit
def _multiply(x, weight, scales, y, M, n_in: tl.constexpr, n_out: tl.constexpr,
              group: tl.constexpr, bits: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              BK: tl.constexpr, n_group: tl.constexpr, n_split: tl.constexpr,
              use_ptx: tl.constexpr):
    """x [M, planes, n_in / planes], up to BM rows, by codes -> y [n_split, M, n_out]: the sums of a
    part of the columns each.
    """
    P: tl.constexpr = 16 // bits                   # planes
    KW: tl.constexpr = BK // P
    n_word: tl.constexpr = n_in // P               # of a row: 16 bits
    n_chunk: tl.constexpr = (n_in + BK - 1) // BK
    kind: tl.constexpr = x.dtype.element_ty
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, n_out - 1).to(tl.int64)
    i = tl.arange(0, KW)
    w_at = weight + row[:, None] * n_word + i[None]
    x_at = x + tl.minimum(m, M - 1)[None] * n_in + i[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    split = tl.program_id(1)
    for chunk in tl.range(split * n_chunk // n_split, (split + 1) * n_chunk // n_split):
        is_in = chunk * KW + i < n_word
        if n_in % BK != 0:
            w = tl.load(w_at + chunk * KW, is_in[None], 0)
        else:
            w = tl.load(w_at + chunk * KW)
        if bits == 4:
            s, z = _scales_and_zeros(scales, row, chunk * BK, n_in, group, n_group, BK)
            planes = _int4_planes(w, s, z, kind, use_ptx)
        else:
            planes = _int8_planes(w, kind, use_ptx)
        for p in tl.static_range(P):
            at = x_at + (p * n_word + chunk * KW)
            if n_in % BK != 0:
                h = tl.load(at, is_in[:, None], 0)
            else:
                h = tl.load(at)
            acc = tl.dot(planes[p], h, acc, input_precision="ieee")
    if bits == 8:
        acc *= tl.load(scales + row).to(tl.float32)[:, None]
    at = y + split.to(tl.int64) * M * n_out + m[None].to(tl.int64) * n_out + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), (m < M)[None] & (n < n_out)[:, None])


@triton.jit
def _int4_planes(w, s, z, kind: tl.constexpr, use_ptx: tl.constexpr):
    """16 bits [BN, n] -> four tensors of weights; a weight is (code - 8) s + z."""
    planes = ()
    if use_ptx:
        planes = _ptx_int4(w, s, z)
    else:
        for p in tl.static_range(4):
            code = (w >> 4 * p & 15).to(tl.float32) - 8
            planes = planes + ((code * s.to(tl.float32) + z.to(tl.float32)).to(kind),)
    return planes


@triton.jit
def _int8_planes(w, kind: tl.constexpr, use_ptx: tl.constexpr):
    """16 bits [BN, n] -> two tensors of codes."""
    if use_ptx:
        planes = _ptx_int8(w)
    else:
        planes = (w << 8 >> 8).to(kind), (w >> 8).to(kind)
    return planes


@triton.jit
def _add_parts(parts, y, n, n_part: tl.constexpr, B: tl.constexpr):
    """parts [n_part, n], fp32 -> y [n], their sum in order."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.load(parts + i, i < n, 0)
    for part in tl.static_range(1, n_part):
        total += tl.load(parts + part * n + i, i < n, 0)
    tl.store(y + i, total.to(y.dtype.element_ty), i < n)


@triton.jit
def _write_out(weight, scales, y, n, n_in: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
               B: tl.constexpr):
    """n bytes of codes -> weights, by quantize.dequantize()'s formula."""
    i = tl.arange(0, B)
    begin = tl.program_id(0).to(tl.int64) * B
    is_in = i < n - begin
    w = tl.load(weight + begin + i, is_in, 0)
    if bits == 8:
        row = begin // n_in + (begin % n_in + i) // n_in
        s = tl.load(scales + row, is_in, 0).to(tl.float32)
        tl.store(y + begin + i, (w.to(tl.float32) * s).to(y.dtype.element_ty), is_in)
    else:
        g = 2 * begin // group + (2 * begin % group + 2 * i) // group
        s = tl.load(scales + 2 * g, is_in, 0).to(tl.float32)
        z = tl.load(scales + 2 * g + 1, is_in, 0).to(tl.float32)
        first = ((w & 15).to(tl.float32) - 8) * s + z
        second = ((w >> 4).to(tl.float32) - 8) * s + z
        both = tl.reshape(tl.join(first, second), (2 * B,)).to(y.dtype.element_ty)
        j = tl.arange(0, 2 * B)
        tl.store(y + 2 * begin + j, both, j < 2 * (n - begin))


OUTPUTS = 128                                      # of a tile
COLUMNS = {16: 128, 32: 128, 64: 64, 128: 64}      # of a tile, by its rows of x
STAGES = 2 if torch.version.hip else 4             # of loads; an AMD GPU has 64 KB for a program
MAX_SPLITS = 8
BYTES_OF_A_LAUNCH = 6 << 20                        # that are read in the time of a launch


def plan(M: int, n_out: int, n_in: int, bits: int, n_sm: int) -> tuple[int, int, int, int]:
    """-> a tile's rows, columns and warps, parts of the columns. From machine code: docs/gpu.md."""
    BM = max(16, triton.next_power_of_2(M))
    BK = COLUMNS[BM]
    warps = 8 if BM == 128 and bits == 4 else 4    # with four int4 spills
    n_tile, n_chunk = triton.cdiv(n_out, OUTPUTS), triton.cdiv(n_in, BK)

    def cost(n_split: int) -> float:
        """In bytes: of the multiprocessor with most tiles, times all, and of the parts' sums."""
        turns = triton.cdiv(n_tile * n_split, n_sm) * triton.cdiv(n_chunk, n_split)
        product = turns * n_sm * OUTPUTS * BK * max(bits / 6, BM / 64)
        return product + (8 * n_split * M * n_out + BYTES_OF_A_LAUNCH if n_split > 1 else 0)
    return BM, BK, warps, min(range(1, min(MAX_SPLITS, n_chunk) + 1), key=cost)


def multiply(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [M, in], 16 bits, up to 128 rows, by codes [out, in] -> [M, out]; scales as in
    triton_quantized.launch().
    """
    bits = 8 if weight.dtype == torch.int8 else 4
    M, n_in = x.shape
    n_out = weight.shape[0]
    n_sm, _ = launch_options(x.device)
    BM, BK, warps, n_split = plan(M, n_out, n_in, bits, n_sm)
    group = n_in // scales.shape[1] if bits == 4 else n_in
    use_ptx = uses_ptx(x, scales)                  # before scales become words
    if bits == 4 and scales.dtype == torch.bfloat16:
        scales = scales.view(torch.int32)
    planes = x.view(M, -1, 16 // bits).mT.contiguous()         # [M, planes, in / planes]
    parts = torch.empty(n_split, M, n_out, dtype=x.dtype if n_split == 1 else torch.float32,
                        device=x.device)
    _multiply[triton.cdiv(n_out, OUTPUTS), n_split](
        planes, weight.view(torch.int16), scales, parts, M, n_in, n_out, group, bits, BM, OUTPUTS,
        BK, groups_of_tile(group, BK), n_split, use_ptx,
        num_warps=32 * warps // triton_matvec.WARP, num_stages=STAGES)
    if n_split == 1:
        return parts[0]
    y = x.new_empty(M, n_out)
    _add_parts[(triton.cdiv(y.numel(), 1024),)](parts, y, y.numel(), n_split, 1024)
    return y


def uses_ptx(x: Tensor, scales: Tensor) -> bool:
    return triton_quantized.has_mma(x.device) and x.dtype == scales.dtype == torch.bfloat16


def groups_of_tile(group: int, BK: int) -> int:
    """How many scales of a row are loaded for BK columns: a power of two."""
    if BK % group == 0:
        return BK // group
    return 1 if group % BK == 0 else BK // 32      # else of each 32 columns


def write_out(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., out, in] -> weights, in one pass. Both contiguous."""
    bits = 8 if weight.dtype == torch.int8 else 4
    n_in = weight.shape[-1] * 8 // bits
    group = n_in // scales.shape[-2] if bits == 4 else n_in
    y = torch.empty(*weight.shape[:-1], n_in, dtype=dtype, device=weight.device)
    _write_out[(triton.cdiv(weight.numel(), 1024),)](
        weight, scales, y, weight.numel(), n_in, group, bits, 1024)
    return y
