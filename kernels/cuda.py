"""int4 on CUDA in bfloat16, compute capability 8.0 and later: tinygemm, as in gpt-fast."""

import torch

from kernels import inductor
from kernels.cpu import scales_and_zeros
from kernels.plain import Kernel, plain, unpack_nibbles

STEP = 1 << 24                                     # weights unpacked at a time


def pack_int4_cuda(weight, scales, zeros):
    """tinygemm's tiles [out/8, in/(16 i), 32, i/2] int32, i = 8, 4 or 2; scales as on a CPU.

    As they are where torch has no such kernel: then zeros go on being there.
    """
    inner = next(i for i in (8, 4, 2) if weight.shape[1] * 2 % (16 * i) == 0)
    step = max(8, STEP // (weight.shape[1] * 2) // 8 * 8)
    tiles = [inductor.int4_tiles(rows[:, 1::2] | rows[:, ::2] << 4, inner)
             for rows in map(unpack_nibbles, weight.split(step))]
    if tiles[0] is None:
        return weight, scales, zeros
    return torch.cat(tiles), scales_and_zeros(scales, zeros, weight.shape[1] * 2), None


def int4_cuda(x, weight, scales, zeros=None):
    if zeros is not None:                          # not packed
        return plain(x, weight, scales, zeros)
    group = weight.shape[1] * weight.shape[3] * 32 // scales.shape[0]
    return inductor.int4_tiles_product(x, weight, group, scales)


INT4_CUDA = Kernel("int4 cuda", int4_cuda, pack_int4_cuda)
