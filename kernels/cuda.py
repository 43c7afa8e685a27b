"""Quantized weights on a GPU: words that a thread can load four of at once, for triton_matvec.py.

A block of four 32-bit words has neighbouring columns in this order, so that a thread's four words
want four neighbours of x at a time:

    int8, a word's byte i:      4 i + word                of 16 columns
    int4, a word's nibble i:    4 i + word                of 32 columns

    weight, scales, zeros = INT8_CUDA.pack(weight, scales, zeros)          # int32 [out, in/4]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.inductor import is_compiling
from kernels.matvec import MOST_ROWS, matvec
from kernels.plain import Kernel, dequantize, pack_nibbles, unpack_nibbles

STEP = 1 << 24                                     # weights packed at a time
TWICE = 4                                          # up to 4 passes of MOST_ROWS beat unpacking


def has_kernels(device) -> bool:
    """Is this a GPU that our Triton kernels are for?"""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [..., in] -> int32 [..., in * bits / 32]."""
    per = 32 // bits
    blocks = codes.unflatten(-1, (-1, per, 4)).to(torch.int64)     # [..., in/4/per, i, word]
    shift = torch.arange(0, 32, bits, device=codes.device)[:, None]
    words = (blocks << shift).sum(-2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32).flatten(-2)


def from_words(words: Tensor, bits: int) -> Tensor:
    """What to_words() was given, uint8. By bytes: prompts unpack whole matrices."""
    codes = words.view(torch.uint8)
    if bits == 4:
        codes = unpack_nibbles(codes)              # of each word from its lowest
    return codes.unflatten(-1, (-1, 4, 32 // bits)).transpose(-1, -2).flatten(-3)


def by_rows(function, weight: Tensor) -> Tensor:
    step = max(1, STEP // weight.shape[-1])
    return torch.cat([function(rows) for rows in weight.split(step)])


def pack_int8_cuda(weight, scales, zeros=None):
    return by_rows(lambda w: to_words(w.to(torch.int32) + 128, 8), weight), scales, None


def unpack_int8_cuda(words):
    return (from_words(words, 8) ^ 128).view(torch.int8)       # 128 more is the sign, turned


def pack_int4_cuda(weight, scales, zeros):
    return by_rows(lambda w: to_words(unpack_nibbles(w), 4), weight), scales, zeros


def unpack_int4_cuda(words):
    return pack_nibbles(from_words(words, 4))


def product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Few rows, compiled: a pass over the codes for each MOST_ROWS. Else by way of the weights."""
    if is_compiling() and x.shape[0] <= TWICE * MOST_ROWS:
        parts = [matvec(part, weight, scales, zeros) for part in x.split(MOST_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    unpack = unpack_int8_cuda if zeros is None else unpack_int4_cuda
    return F.linear(x, dequantize(unpack(weight), scales, zeros, x.dtype))


INT8_CUDA = Kernel("int8 cuda", product, pack_int8_cuda,
                   rows=lambda weight, ids: unpack_int8_cuda(weight[ids]),
                   unpack=unpack_int8_cuda)
INT4_CUDA = Kernel("int4 cuda", product, pack_int4_cuda, unpack=unpack_int4_cuda)
