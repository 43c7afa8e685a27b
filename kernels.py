"""Products with int8 and int4 weights: one Kernel per device, each beside a plain one.

Owns the layouts in memory. Knows no modules, no files and not which linear gets which kernel: that
is quantize.py's. On disk (see checkpoint.py) and in, everywhere, G divides in:

    int8: weight int8 [out, in], scales [out]                    w = weight * scale
    int4: weight uint8 [out, in/2], scales, zeros [out, in/G]    w = (q - 8) * scale + zero

    weight, scales, zeros = INT4_CPU.pack(weight, scales, zeros)
    y = INT4_CPU.product(x, weight, scales, zeros)               # [M, in] -> [M, out]
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernel(NamedTuple):
    """pack: the tensors on disk -> the same three in the kernel's layout. product: as above.

    unpack: any rows of pack's weight -> as on disk.
    """

    name: str
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    pack: Callable = lambda weight, scales, zeros: (weight, scales, zeros)
    unpack: Callable[[Tensor], Tensor] = lambda weight: weight


# ---- Plain: any device, any dtype, and the reference of the others ------------------------------

def pairs(q: Tensor) -> Tensor:
    """Numbers 0 to 15 [..., in] -> bytes [..., in/2], the first of two neighbours low."""
    return q[..., ::2].to(torch.uint8) | q[..., 1::2].to(torch.uint8) << 4


def unpaired(weight: Tensor) -> Tensor:
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype) -> Tensor:
    """The weights [..., out, in] that the numbers stand for, computed in fp32."""
    if zeros is None:
        return (weight.float() * scales[..., None].float()).to(dtype)
    q = unpaired(weight).float().unflatten(-1, (scales.shape[-1], -1)) - 8
    return (q * scales[..., None].float() + zeros[..., None].float()).flatten(-2).to(dtype)


def plain(x, weight, scales, zeros):
    """One row, compiled: a pass over the numbers, as model.Linear does. Else by way of weights."""
    if not (torch.compiler.is_compiling() and x.shape[0] == 1):
        return F.linear(x, dequantize(weight, scales, zeros, x.dtype))
    if zeros is None:
        y = (weight.float() * x.float()).sum(-1) * scales.float()
    else:
        y = (dequantize(weight, scales, zeros, torch.float32) * x.float()).sum(-1)
    return y.to(x.dtype)[None]


PLAIN = Kernel("plain", plain)


# ---- CPU ----------------------------------------------------------------------------------------
# For a few rows ATen's kernels stream the packed weights as fast as they can be turned into floats.
# For many, a CPU with bf16 arithmetic is faster at unpacking them once; one without is not.

AVX512, AVX2 = (torch.backends.cpu.get_cpu_capability() == name for name in ("AVX512", "AVX2"))
HAS_BF16 = AVX512 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
SCRATCH = 1 << 24                                  # weights unpacked at a time
_scratch = {}


def scratch(n: int, dtype=torch.bfloat16) -> Tensor:
    """Memory that is always the same: fresh pages cost more than what is done with them."""
    if n > _scratch.get(dtype, torch.empty(0)).numel():
        with torch.inference_mode(False):          # whoever calls: it serves everyone
            _scratch[dtype] = torch.empty(n, dtype=dtype)
    return _scratch[dtype][:n]


def pack_int8_cpu(weight, scales, zeros=None):
    """-> [out, in/4], the bits of four numbers in a float32; those of column j:

    byte    0      1         2         3         Inductor loads float32 at the memory's speed,
    column  j   j + in/4  j + in/2  j + 3in/4    int8 at a fifth of it; x needs no reordering
    """
    four = weight.unflatten(-1, (4, -1)).transpose(-1, -2).contiguous()
    return four.view(torch.float32).squeeze(-1), scales, None


def unpack_int8_cpu(weight):
    return weight.view(torch.int8).unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)


def int8_rows(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Several rows, by ATen's kernel, or many: int8 becomes bf16 exactly, the scales can wait."""
    weight, n_out, n_in = weight.view(torch.int8), weight.shape[0], x.shape[1]
    x = x.unflatten(-1, (4, -1)).transpose(-1, -2).reshape(x.shape)        # the columns' order
    if x.dtype == torch.bfloat16 and (x.shape[0] <= 16 or not HAS_BF16):
        return torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    y, step = x.new_empty(x.shape[0], n_out), max(1, SCRATCH // n_in)
    for a in range(0, n_out, step):
        part, scale = weight[a:a + step], scales[a:a + step]
        w = scratch(part.numel(), x.dtype).view_as(part).copy_(part)
        if x.dtype == torch.float16:                       # whose sums might overflow
            w.mul_(scale[:, None])
            scale = scale.new_ones(())
        torch.mul(F.linear(x, w), scale, out=y[:, a:a + step])
    return y


int8_rows_op = torch.library.custom_op("gpt_faster::int8_rows", int8_rows, mutates_args=())
int8_rows_op.register_fake(lambda x, weight, scales: x.new_empty(x.shape[0], weight.shape[0]))


def int8_cpu(x, weight, scales, zeros=None):
    if not torch.compiler.is_compiling():
        return int8_rows(x, weight, scales)
    if x.shape[0] > 1:
        return int8_rows_op(x, weight, scales)
    # as_strided has Inductor write x to memory as fp32: beside bf16 it loads two vectors at once,
    # and then its view of float32 as int32 is slow
    quarters = x.float().as_strided((4, x.shape[1] // 4), (x.shape[1] // 4, 1))

    def sums(four):
        byte = (four << 24 >> 24, four << 16 >> 24, four << 8 >> 24, four >> 24)   # signed
        return sum(b.float() * q for b, q in zip(byte, quarters)).sum(-1)
    y = torch.cat([sums(half) for half in weight.view(torch.int32).chunk(2)])      # side by side
    return (y * scales.float()).to(x.dtype)[None]


def scales_and_zeros(scales, zeros, n_in):
    """[out, in/G] each -> [in/G', out, 2], G' the largest group of ATen's that divides G."""
    group = n_in // scales.shape[1]
    times = group // next(g for g in (256, 128, 64, 32) if group % g == 0)
    both = torch.stack((scales, zeros), -1).repeat_interleave(times, 1)
    return both.transpose(0, 1).contiguous()


def pack_int4_cpu(weight, scales, zeros):
    """-> bytes [out', in/2], scales and zeros [in/G, out', 2], out' being out rounded up to 64.

    On AVX-512 a block of 64 rows is [in, 32] bytes, with rows r and r + 32 in byte r.
    """
    n_out = weight.shape[0]
    padded, step = -(-n_out // 64) * 64, max(64, SCRATCH // (weight.shape[1] * 2) // 64 * 64)
    packed = weight.new_empty(padded, weight.shape[1])
    for a in range(0, padded, step):
        q = unpaired(weight[a:a + step]).int()
        q = F.pad(q, (0, 0, 0, min(step, padded - a) - q.shape[0]))
        packed[a:a + step] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    both = scales_and_zeros(scales, zeros, weight.shape[1] * 2)
    return packed, F.pad(both, (0, 0, 0, padded - n_out)), None


def unpack_int4_cpu(weight):
    """On AVX2 a block is 32 rows, with r and r + 16 in a byte. Whole blocks only."""
    half = 32 if AVX512 else 16
    blocks = weight.view(-1, weight.shape[1] * 2, half)                    # [blocks, in, half]
    q = torch.cat((blocks & 15, blocks >> 4), -1).transpose(1, 2)          # [blocks, 2 half, in]
    return pairs(q.flatten(0, 1))


def int4_rows(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Many rows: unpack blocks of columns of w' [in, out], then multiply."""
    n_group, n_out, _ = scales.shape
    n_in = weight.shape[1] * 2
    y, step = x.new_empty(x.shape[0], n_out), max(64, SCRATCH // n_in // 64 * 64)
    for a in range(0, n_out, step):
        n = min(step, n_out - a)
        block = weight[a:a + n].view(n // 64, n_in, 32)
        half = scratch(block.numel(), torch.uint8).view_as(block)
        w = scratch(n_in * n).view(n_in, n // 64, 2, 32)
        for i, unpack in enumerate((torch.bitwise_and, torch.bitwise_right_shift)):
            unpack(block, (15, 4)[i], out=half)
            w[:, :, i].transpose(0, 1).copy_(half.view(torch.int8).sub_(8))
        scale, zero = scales[:, None, a:a + n].unbind(-1)                  # [in/G, 1, n]
        w = w.view(n_group, -1, n)
        torch.addcmul(zero.contiguous(), w, scale.contiguous(), out=w)     # 5 times as fast
        torch.mm(x, w.view(n_in, n), out=y[:, a:a + n])
    return y


int4_rows_op = torch.library.custom_op("gpt_faster::int4_rows", int4_rows, mutates_args=())
int4_rows_op.register_fake(lambda x, weight, scales: x.new_empty(x.shape[0], scales.shape[1]))


def int4_cpu(x, weight, scales, zeros=None):
    if x.shape[0] > 96 and HAS_BF16:
        many = int4_rows_op if torch.compiler.is_compiling() else int4_rows
        return many(x, weight, scales)
    group = 2 * weight.shape[1] // scales.shape[0]
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, group, scales)


# Without AVX-512, ATen's int4 has half the speed of what Inductor makes of the same sum where a
# vector holds eight rows. Two of ATen's blocks, [in, 16] bytes each on such a CPU, are the left and
# the right halves of one of ours: ATen still multiplies several rows of x.

def pack_int4_avx2(weight, scales, zeros):
    """-> blocks of 64 rows, [out'/64, in, 8] float32 words, bits 4b to 4b + 3 of word j being row
    8b + j; scale and zero in a word, [out'/64, in/G, 64]; what the sums of each row then lack [64].
    """
    weight, scales, zeros = (
        F.pad(t, (0, 0, 0, -len(weight) % 64)) for t in (weight, scales, zeros))
    q = unpaired(weight).unflatten(0, (-1, 8, 8))                          # [out'/64, 8, 8, in]
    words = sum(q[:, b].int() << 4 * b for b in range(8)).transpose(1, 2).contiguous()
    both = scales_and_zeros(scales, zeros, q.shape[-1]).view(torch.float32)
    both = both.view(len(both), -1, 64).transpose(0, 1).contiguous()
    lacking = torch.tensor([16.0 ** -b if b < 7 else 1.0 for b in range(8)]).repeat_interleave(8)
    return words.view(torch.float32), both, lacking


def int4_avx2_rows(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Several rows, or uncompiled: by ATen's kernel, whose rows 32 s + 16 h + 4 j + b of 64 are our
    16 b + 8 h + 4 s + j."""
    (n_block, n_in, _), n_group = weight.shape, scales.shape[1]
    blocks = weight.view(torch.uint8).unflatten(2, (2, 16)).transpose(1, 2).flatten(1)
    both = scales.view(-1, n_group, 4, 2, 2, 4).permute(1, 0, 4, 3, 5, 2).reshape(n_group, -1, 1)
    y = int4_cpu(x, blocks.view(-1, n_in // 2), both.view(torch.bfloat16))
    return y.view(-1, n_block, 2, 2, 4, 4).permute(0, 1, 5, 3, 2, 4).reshape(y.shape)


int4_avx2_rows_op = torch.library.custom_op("gpt_faster::int4_avx2_rows", int4_avx2_rows,
                                            mutates_args=())
int4_avx2_rows_op.register_fake(lambda x, weight, scales: x.new_empty(
    x.shape[0], weight.shape[0] * 64))


def int4_avx2(x, weight, scales, lacking):
    if not torch.compiler.is_compiling():
        return int4_avx2_rows(x, weight, scales)
    if x.shape[0] > 1:
        return int4_avx2_rows_op(x, weight, scales)
    n_group, n_in = scales.shape[1], weight.shape[1]
    x_float = x.float().as_strided((n_group, n_in // n_group, 1), (n_in // n_group, 1, 1))
    words = weight.view(torch.int32).unflatten(1, (n_group, -1))           # [out'/64, in/G, G, 8]
    sums = [((words & 15 << 4 * b if b < 7 else words >> 28 & 15).float() * x_float).sum(2)
            for b in range(8)]                     # a mask leaves q times a power of two
    both = scales.view(torch.int32)
    scale, zero = (both << 16).view(torch.float32), (both & -65536).view(torch.float32)
    shift = (zero - 8 * scale) * x_float.sum(1)
    y = (torch.cat(sums, -1) * (lacking * scale) + shift).sum(1)           # [out'/64, 64]
    return y.view(1, -1).to(x.dtype)


INT8_CPU = Kernel("int8 cpu", int8_cpu, pack_int8_cpu, unpack_int8_cpu)
INT4_CPU = Kernel("int4 cpu", int4_cpu, pack_int4_cpu, unpack_int4_cpu)
INT4_AVX2 = Kernel("int4 avx2", int4_avx2, pack_int4_avx2)


@torch.library.custom_op("gpt_faster::expert_rows", mutates_args=())
def expert_rows(x: Tensor, ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None,
                kernel: str, n_out: int) -> Tensor:
    """Each row of x [M, in] by its own expert's packed weights, neighbours of the same together.

    An operator because its loop depends on data, which only a CPU may read at no cost.
    """
    y, a = x.new_empty(x.shape[0], n_out), 0
    for e, same in groupby(ids.tolist()):
        b, zero = a + len(list(same)), None if zeros is None else zeros[e]
        y[a:b] = KERNELS[kernel].product(x[a:b], weight[e], scales[e], zero)[:, :n_out]
        a = b
    return y


@expert_rows.register_fake
def _(x, ids, weight, scales, zeros, kernel, n_out):
    return x.new_empty(x.shape[0], n_out)


# ---- CUDA, bfloat16, compute capability 8.0 and later -------------------------------------------

def pack_int4_cuda(weight, scales, zeros):
    """tinygemm's tiles [out/8, in/(16 i), 32, i/2] int32, i = 8, 4 or 2; scales as on a CPU."""
    inner = next(i for i in (8, 4, 2) if weight.shape[1] * 2 % (16 * i) == 0)
    step = max(8, SCRATCH // (weight.shape[1] * 2) // 8 * 8)
    tiles = [torch.ops.aten._convert_weight_to_int4pack(rows[:, 1::2] | rows[:, ::2] << 4, inner)
             for rows in map(unpaired, weight.split(step))]
    return torch.cat(tiles), scales_and_zeros(scales, zeros, weight.shape[1] * 2), None


def int4_cuda(x, weight, scales, zeros=None):
    group = weight.shape[1] * weight.shape[3] * 32 // scales.shape[0]
    return torch.ops.aten._weight_int4pack_mm(x.contiguous(), weight, group, scales)


INT4_CUDA = Kernel("int4 cuda", int4_cuda, pack_int4_cuda)
KERNELS = {k.name: k for k in (PLAIN, INT8_CPU, INT4_CPU, INT4_AVX2, INT4_CUDA)}
