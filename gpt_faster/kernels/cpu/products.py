"""int8 and int4 matmuls on a CPU without --compile: packed layouts and ATen's kernels.

Each gives the result of quantize.py's product, faster. Knows no modules and no files; linear.py
chooses the kernel of each linear.

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

# For small batches ATen's kernels are limited by unpacking the weights. For large ones, unpacking
# them once into a bf16 scratch buffer is faster, but only on a CPU with bf16 arithmetic.

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_BF16 = AVX512 and torch_internals.has_bf16()
SCRATCH_SIZE = 1 << 24                             # weights unpacked at a time


class Scratch(threading.local):
    """A reused buffer per thread and dtype: page faults on fresh memory cost more than the kernels.

    A call invalidates the previous one's tensor of the same dtype.
    """

    def __init__(self):
        self.buffers = {}

    def __call__(self, n: int, dtype=torch.bfloat16) -> Tensor:
        if n > self.buffers.get(dtype, torch.empty(0)).numel():
            with torch.inference_mode(False):      # the buffer outlives the caller's mode
                self.buffers[dtype] = torch.empty(n, dtype=dtype)
        return self.buffers[dtype][:n]


scratch = Scratch()


def pack_int8_cpu(weight, scales, zeros=None):
    """[out, in] -> [out, in/4], four int8 in the bits of a float32. Column j holds these columns:

    byte    0      1         2         3
    column  j   j + in/4  j + in/2  j + 3in/4
    """
    quads = weight.unflatten(-1, (4, -1)).transpose(-1, -2).contiguous()
    return quads.view(torch.float32).squeeze(-1), scales, None


def unpack_int8_cpu(weight):
    return weight.view(torch.int8).unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)


def int8_cpu(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Small batches: ATen's kernel. Large ones: weights to x's dtype (exact), scales at the end."""
    weight, n_out, n_in = weight.view(torch.int8), weight.shape[0], x.shape[1]
    x = x.unflatten(-1, (4, -1)).transpose(-1, -2).reshape(x.shape)        # as packed
    if x.dtype == torch.bfloat16 and (x.shape[0] <= 16 or not HAS_BF16):
        y = torch_internals.int8_product(x, weight, scales)
        if y is not None:
            return y
    y = x.new_empty(x.shape[0], n_out)
    step = max(1, SCRATCH_SIZE // n_in)
    for a in range(0, n_out, step):
        part, scale = weight[a:a + step], scales[a:a + step]
        w = scratch(part.numel(), x.dtype).view_as(part).copy_(part)
        if x.dtype == torch.float16:                       # unscaled sums may overflow
            w.mul_(scale[:, None])
            scale = scale.new_ones(())
        torch.mul(F.linear(x, w), scale, out=y[:, a:a + step])
    return y


def scales_and_zeros(scales, zeros, n_in):
    """Two [out, in/G] -> [in/G', out, 2]; G' is ATen's largest group size that divides G."""
    group = n_in // scales.shape[1]
    repeats = group // next(g for g in (256, 128, 64, 32) if group % g == 0)
    both = torch.stack((scales, zeros), -1).repeat_interleave(repeats, 1)
    return both.transpose(0, 1).contiguous()


def pack_int4_cpu(weight, scales, zeros):
    """-> bytes [out', in/2], scales and zeros [in/G, out', 2], None; out' is out rounded up to 64.

    Returns the arguments unchanged if this torch has no packing operator.
    """
    n_out = weight.shape[0]
    padded = -(-n_out // 64) * 64
    step = max(64, SCRATCH_SIZE // (weight.shape[1] * 2) // 64 * 64)
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
    """ATen's int4 layout, found by packing: the rows of a block [in, rows/2] of bytes, and whether
    a byte's two rows are adjacent, not half a block apart.

    AVX-512: 64, apart. AVX2: 32, apart. Else 16 or 32, adjacent.
    """
    def first_column(q):
        q = torch.stack((q, torch.zeros(64, dtype=torch.int32)), 1)
        return torch_internals.int4_packed(q).flatten().tolist()
    ones = torch.ones(64, dtype=torch.int32)
    return 2 * first_column(ones).index(0), first_column(ones.cumsum(0).eq(2).int())[0] != 0


def unpack_int4_cpu(weight):
    """ATen's layout -> quantize.py's; whole blocks of rows only."""
    rows, adjacent = int4_block()
    blocks = weight.view(-1, weight.shape[1] * 2, rows // 2)
    q = torch.stack((blocks & 15, blocks >> 4), -1 if adjacent else -2)
    return pack_nibbles(q.flatten(-2).transpose(1, 2).flatten(0, 1))


def int4_large_batch(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """On AVX-512: dequantize w' [in, out], a block of columns at a time, then matmul."""
    n_group, n_out, _ = scales.shape
    n_in = weight.shape[1] * 2
    y = x.new_empty(x.shape[0], n_out)
    step = max(64, SCRATCH_SIZE // n_in // 64 * 64)
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
        torch.addcmul(zero.contiguous(), w, scale.contiguous(), out=w)     # contiguous: 5x faster
        torch.mm(x, w.view(n_in, n), out=y[:, a:a + n])
    return y


def int4_cpu(x, weight, scales, zeros=None):
    if zeros is not None:                          # not packed: see pack_int4_cpu
        return product(x, weight, scales, zeros)
    if x.shape[0] > 96 and HAS_BF16:
        return int4_large_batch(x, weight, scales)
    group = 2 * weight.shape[1] // scales.shape[0]
    y = torch_internals.int4_product(x, weight, group, scales)
    if y is not None:
        return y
    scales, zeros = scales.permute(2, 1, 0)
    return product(x, unpack_int4_cpu(weight), scales, zeros)


INT8_CPU = Kernel("int8 cpu", int8_cpu, pack_int8_cpu,
                  lambda weight, ids: unpack_int8_cpu(weight[ids]))
INT4_CPU = Kernel("int4 cpu", int4_cpu, pack_int4_cpu)
