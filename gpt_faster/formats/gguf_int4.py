"""GGUF's blocks that are quantize.py's int4 with groups of 32, said otherwise: nothing is rounded.

Knows the bytes of a block (github.com/ggml-org/llama.cpp, ggml-common.h), no file.

    leaves = as_int4(tensor, "Q4_1", read_bytes)   # codes, scales and zeros, read by rows
"""

from collections.abc import Callable

import torch
from torch import Tensor

from checkpoint import LazyTensor


def as_int4(t: LazyTensor, kind: str,
            read_bytes: Callable[[int, int], Tensor]) -> tuple[LazyTensor, ...]:
    """read_bytes(a, b) -> rows of t as they lie there, uint8 [b - a, n]. () of any other kind."""
    if kind not in BLOCKS:
        return ()
    n_byte, parts_of = BLOCKS[kind]
    *lead, n_in = t.shape

    def reader(i):
        return lambda a, b: parts_of(read_bytes(a, b).unflatten(-1, (-1, n_byte)))[i].flatten(1)
    return (LazyTensor(t.name, (*lead, n_in // 2), torch.uint8, reader(0)),
            *(LazyTensor(t.name, (*lead, n_in // 32), torch.float32, reader(i)) for i in (1, 2)))


# Each takes blocks [m, n, bytes] -> codes, two neighbours a byte; scales; zeros.

def _q4_0(blocks):                                 # (code - 8) * d
    d = _halves(blocks[..., :2])
    return _neighbours(blocks[..., 2:]), d, torch.zeros_like(d)


def _q4_1(blocks):                                 # code * d + low
    d, low = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return _neighbours(blocks[..., 4:]), d, low + 8 * d


def _q4_k(blocks):
    """Eight groups: code * d * scale - d_low * low, each scale and low of six bits.

        byte 0 to 3            hhssssss    scale of group i; h: 4 and 5 of group i + 4's scale
             4 to 7            hhllllll    the same of low
             8 to 11           llllssss    low and scale of group i + 4, without these
    """
    d, d_low = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    first, second, third = blocks[..., 4:16].split(4, -1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1) * d
    low = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1) * d_low
    return _neighbours(blocks[..., 16:].unflatten(-1, (4, 32))), scale, 8 * scale - low


BLOCKS = {"Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q4_K": (144, _q4_k)}


def _halves(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _neighbours(halves: Tensor) -> Tensor:
    """[..., n] bytes, low halves the first n codes -> [..., n], a byte with codes 2i and 2i + 1."""
    codes = torch.cat((halves & 15, halves >> 4), -1)
    return codes[..., ::2] | codes[..., 1::2] << 4
