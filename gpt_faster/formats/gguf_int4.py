"""GGUF's Q4_0, Q4_1 and Q4_K -> quantize.py's int4 in groups of 32, without rounding again.

Knows the byte layout of a block (github.com/ggml-org/llama.cpp, ggml-common.h), no file.

    codes, scales, zeros = as_int4(tensor, "Q4_1", read_bytes)         # lazy tensors
"""

from collections.abc import Callable

import torch
from torch import Tensor

from checkpoint import LazyTensor


def as_int4(t: LazyTensor, kind: str,
            read_bytes: Callable[[int, int], Tensor]) -> tuple[LazyTensor, ...]:
    """read_bytes(a, b): raw bytes of rows [a, b), uint8 [b - a, n]. () for other kinds."""
    if kind not in BLOCKS:
        return ()
    n_byte, parts_of = BLOCKS[kind]
    *lead, n_in = t.shape

    def reader(i):
        return lambda a, b: parts_of(read_bytes(a, b).unflatten(-1, (-1, n_byte)))[i].flatten(1)
    return (LazyTensor(t.name, (*lead, n_in // 2), torch.uint8, reader(0)),
            *(LazyTensor(t.name, (*lead, n_in // 32), torch.float32, reader(i)) for i in (1, 2)))


# Each takes blocks [m, n, bytes] -> codes, two neighbours per byte; scales; zeros.

def _q4_0(blocks):                                 # (code - 8) * d
    d = _to_fp32(blocks[..., :2])
    return _pack_neighbours(blocks[..., 2:]), d, torch.zeros_like(d)


def _q4_1(blocks):                                 # code * d + low
    d, low = _to_fp32(blocks[..., :2]), _to_fp32(blocks[..., 2:4])
    return _pack_neighbours(blocks[..., 4:]), d, low + 8 * d


def _q4_k(blocks):
    """Eight groups: code * d * scale - d_low * low, with scale and low in six bits.

        bytes 0-3              hhssssss    scale of group i; h: bits 4, 5 of group i + 4's scale
              4-7              hhllllll    the same for low
              8-11             llllssss    bits 0-3 of low and scale of group i + 4
    """
    d, d_low = _to_fp32(blocks[..., :2]), _to_fp32(blocks[..., 2:4])
    first, second, third = blocks[..., 4:16].split(4, -1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1) * d
    low = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1) * d_low
    return _pack_neighbours(blocks[..., 16:].unflatten(-1, (4, 32))), scale, 8 * scale - low


BLOCKS = {"Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q4_K": (144, _q4_k)}


def _to_fp32(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _pack_neighbours(halves: Tensor) -> Tensor:
    """[..., n] bytes, code i in the low nibble, n + i in the high -> codes 2i, 2i + 1 in byte i."""
    codes = torch.cat((halves & 15, halves >> 4), -1)
    return codes[..., ::2] | codes[..., 1::2] << 4
