"""Uncompiled products with int8 and int4 weights on a CPU: layouts in memory, and ATen's kernels.

Each does what quantize.py's product does, faster. Knows no modules, no files and not which linear
gets which kernel: that is linear.py's.

    weight, scales, zeros = INT4_CPU.pack(weight, scales, zeros)
    y = INT4_CPU.product(x, weight, scales, zeros)               # [M, in] -> [M, out]
"""

import threading
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.plain import Kernel
from quantize import pack_nibbles, product, unpack_nibbles

# For a few rows ATen's kernels stream the packed weights as fast as they can be turned into floats.
# For many, a CPU with bf16 arithmetic is faster at unpacking them once; one without is not.

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_BF16 = AVX512 and torch_internals.has_bf16()
SCRATCH = 1 << 24                                  # weights unpacked at a time


class Scratch(threading.local):
    """Memory that is always the same: fresh pages cost more than what is done with them.

    Each thread has its own; a second call with the same dtype takes the first one's back.
    """

    def __init__(self):
        self.memory = {}

    def __call__(self, n: int, dtype=torch.bfloat16) -> Tensor:
        if n > self.memory.get(dtype, torch.empty(0)).numel():
            with torch.inference_mode(False):      # whoever calls: it serves everyone
                self.memory[dtype] = torch.empty(n, dtype=dtype)
        return self.memory[dtype][:n]


scratch = Scratch()


def pack_int8_cpu(weight, scales, zeros=None):
    """-> [out, in/4], the bits of four numbers in a float32; those of column j:

    byte    0      1         2         3
    column  j   j + in/4  j + in/2  j + 3in/4
    """
    four = weight.unflatten(-1, (4, -1)).transpose(-1, -2).contiguous()
    return four.view(torch.float32).squeeze(-1), scales, None


def unpack_int8_cpu(weight):
    return weight.view(torch.int8).unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)


def int8_cpu(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Few rows by ATen's kernel, or many: int8 becomes bf16 exactly, the scales can wait."""
    weight, n_out, n_in = weight.view(torch.int8), weight.shape[0], x.shape[1]
    x = x.unflatten(-1, (4, -1)).transpose(-1, -2).reshape(x.shape)        # the columns' order
    if x.dtype == torch.bfloat16 and (x.shape[0] <= 16 or not HAS_BF16):
        y = torch_internals.int8_product(x, weight, scales)
        if y is not None:
            return y
    y, step = x.new_empty(x.shape[0], n_out), max(1, SCRATCH // n_in)
    for a in range(0, n_out, step):
        part, scale = weight[a:a + step], scales[a:a + step]
        w = scratch(part.numel(), x.dtype).view_as(part).copy_(part)
        if x.dtype == torch.float16:                       # whose sums might overflow
            w.mul_(scale[:, None])
            scale = scale.new_ones(())
        torch.mul(F.linear(x, w), scale, out=y[:, a:a + step])
    return y


def scales_and_zeros(scales, zeros, n_in):
    """[out, in/G] each -> [in/G', out, 2], G' the largest group of ATen's that divides G."""
    group = n_in // scales.shape[1]
    times = group // next(g for g in (256, 128, 64, 32) if group % g == 0)
    both = torch.stack((scales, zeros), -1).repeat_interleave(times, 1)
    return both.transpose(0, 1).contiguous()


def pack_int4_cpu(weight, scales, zeros):
    """-> bytes [out', in/2], scales and zeros [in/G, out', 2], out' being out rounded up to 64.

    As they are where torch has no such layout: then zeros go on being there.
    """
    n_out = weight.shape[0]
    padded, step = -(-n_out // 64) * 64, max(64, SCRATCH // (weight.shape[1] * 2) // 64 * 64)
    packed = weight.new_empty(padded, weight.shape[1])
    for a in range(0, padded, step):
        q = unpack_nibbles(weight[a:a + step]).int()
        q = F.pad(q, (0, 0, 0, min(step, padded - a) - q.shape[0]))
        part = torch_internals.int4_packed(q)
        if part is None:
            return weight, scales, zeros
        packed[a:a + step] = part
    both = scales_and_zeros(scales, zeros, weight.shape[1] * 2)
    return packed, F.pad(both, (0, 0, 0, padded - n_out)), None


@cache
def int4_block() -> tuple[int, bool]:
    """How many rows a block of ATen's has, [in, rows/2] bytes; are a byte's two rows neighbours, or
    half a block apart? 64 and apart on AVX-512, 32 and apart on AVX2; else neighbours, 16 or 32.
    """
    def first_column(q):
        q = torch.stack((q, torch.zeros(64, dtype=torch.int32)), 1)
        return torch_internals.int4_packed(q).flatten().tolist()
    ones = torch.ones(64, dtype=torch.int32)
    return 2 * first_column(ones).index(0), first_column(ones.cumsum(0).eq(2).int())[0] != 0


def unpack_int4_cpu(weight):
    """Whole blocks only."""
    rows, neighbours = int4_block()
    blocks = weight.view(-1, weight.shape[1] * 2, rows // 2)
    q = torch.stack((blocks & 15, blocks >> 4), -1 if neighbours else -2)
    return pack_nibbles(q.flatten(-2).transpose(1, 2).flatten(0, 1))


def int4_rows(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Many rows, on AVX-512: unpack blocks of columns of w' [in, out], then multiply."""
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


def int4_cpu(x, weight, scales, zeros=None):
    if zeros is not None:                          # not packed
        return product(x, weight, scales, zeros)
    if x.shape[0] > 96 and HAS_BF16:
        return int4_rows(x, weight, scales)
    group = 2 * weight.shape[1] // scales.shape[0]
    y = torch_internals.int4_product(x, weight, group, scales)
    if y is not None:
        return y
    scales, zeros = scales.permute(2, 1, 0)
    return product(x, unpack_int4_cpu(weight), scales, zeros)


INT8_CPU = Kernel("int8 cpu", int8_cpu, pack_int8_cpu,
                  lambda weight, ids: unpack_int8_cpu(weight[ids]))
INT4_CPU = Kernel("int4 cpu", int4_cpu, pack_int4_cpu)
