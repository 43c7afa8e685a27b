"""Quantized weights on a GPU: words that lie as triton_matvec.py wants them.

Of a block of 128 columns, the last filled up with zeros, column 32 v + 8 q + e is

    int4, of word 4 q + v:                                  nibble e / 2 + 4 (e % 2)
    int8, of word 16 (v / 2) + 4 q + 2 (v % 2) + e / 4:     byte (0, 2, 1, 3)[e % 4]

    weight, scales, zeros = INT8_CUDA.pack(weight, scales, zeros)  # int32 [out, 32 a block or 16]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matvec import MOST_ROWS, matvec
from kernels.plain import Kernel, dequantize, pack_nibbles, unpack_nibbles
from kernels.private import is_compiling

BLOCK = 128                                        # columns
STEP = 1 << 24                                     # weights packed at a time
TWICE = 4                                          # up to 4 passes of MOST_ROWS beat unpacking


def has_kernels(device) -> bool:
    """Is this a GPU that our Triton kernels are for?"""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [..., in] -> int32 [..., ceil(in / 128) * 4 bits]."""
    codes = F.pad(codes, (0, -codes.shape[-1] % BLOCK))
    if bits == 4:                                              # [..., block, v, q, pair, 2]
        fields = codes.unflatten(-1, (-1, 4, 4, 4, 2)).transpose(-4, -3)
        shift = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]])
    else:                                                      # [..., block, v, q, word, pair, 2]
        fields = codes.unflatten(-1, (-1, 2, 2, 4, 2, 2, 2)).movedim(-4, -5)
        shift = torch.tensor([[0, 16], [8, 24]])
    words = (fields.to(torch.int64) << shift.to(codes.device)).sum((-1, -2))
    words = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
    return words.flatten(-3 if bits == 4 else -5)


def from_words(words: Tensor, bits: int) -> Tensor:
    """What to_words() was given, filled up, uint8. By bytes: prompts unpack whole matrices."""
    codes = words.view(torch.uint8)
    if bits == 4:                                              # [..., block, q, v, 2, pair]
        codes = unpack_nibbles(codes).unflatten(-1, (-1, 4, 4, 2, 4))
        return codes.transpose(-1, -2).transpose(-4, -3).flatten(-5)
    codes = codes.unflatten(-1, (-1, 2, 4, 2, 2, 2, 2))      # [.., block, v', q, v, word, 2, pair]
    return codes.transpose(-1, -2).movedim(-5, -4).flatten(-7)


def by_rows(function, weight: Tensor) -> Tensor:
    step = max(1, STEP // weight.shape[-1])
    return torch.cat([function(rows) for rows in weight.split(step)])


def pack_int8_cuda(weight, scales, zeros=None):
    return by_rows(lambda w: to_words(w.to(torch.int32) + 128, 8), weight), scales, None


def unpack_int8_cuda(words, n_in):
    return (from_words(words, 8)[..., :n_in] ^ 128).view(torch.int8)       # 128 more: the sign


def pack_int4_cuda(weight, scales, zeros):
    return by_rows(lambda w: to_words(unpack_nibbles(w), 4), weight), scales, zeros


def unpack_int4_cuda(words, n_in):
    return pack_nibbles(from_words(words, 4)[..., :n_in])


def product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Few rows, compiled: a pass over the codes for each MOST_ROWS. Else by way of the weights."""
    if is_compiling() and x.shape[0] <= TWICE * MOST_ROWS:
        parts = [matvec(part, weight, scales, zeros) for part in x.split(MOST_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    unpack = unpack_int8_cuda if zeros is None else unpack_int4_cuda
    return F.linear(x, dequantize(unpack(weight, x.shape[1]), scales, zeros, x.dtype))


INT8_CUDA = Kernel("int8 cuda", product, pack_int8_cuda, unpack=unpack_int8_cuda,
                   rows=lambda weight, ids: unpack_int8_cuda(weight[ids], None))
INT4_CUDA = Kernel("int4 cuda", product, pack_int4_cuda, unpack=unpack_int4_cuda)
