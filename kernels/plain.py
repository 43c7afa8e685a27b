"""Quantized products in plain PyTorch, for any device and dtype: the reference of all kernels.

Owns what a Kernel is and the layouts on disk. G divides in:

    int8: weight int8 [out, in], scales [out]                    w = weight * scale
    int4: weight uint8 [out, in/2], scales, zeros [out, in/G]    w = (q - 8) * scale + zero

    weight, scales, zeros = kernel.pack(weight, scales, zeros)   # once, when a model is loaded
    y = kernel.product(x, weight, scales, zeros)                 # [M, in] -> [M, out]
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.private import is_compiling


class Kernel(NamedTuple):
    """pack: the tensors on disk -> the same three in the kernel's layout. product: as above.

    rows: pack's weight, ids [...] -> those rows as on disk [..., in], or longer, where a head may
    also be an embedding. compiled: the packed three -> a Kernel that is faster under a compiler,
    its three.
    """

    name: str
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    pack: Callable = lambda weight, scales, zeros: (weight, scales, zeros)
    rows: Callable[[Tensor, Tensor], Tensor] = lambda weight, ids: weight[ids]

    def __deepcopy__(self, memo):                  # a copied module has the same kernel
        return self


def pack_nibbles(q: Tensor) -> Tensor:
    """Codes 0 to 15 [..., in] -> bytes [..., in/2], the first of two neighbours low."""
    return q[..., ::2].to(torch.uint8) | q[..., 1::2].to(torch.uint8) << 4


def unpack_nibbles(weight: Tensor) -> Tensor:
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype) -> Tensor:
    """The weights [..., out, in] that the codes stand for, computed in fp32."""
    if zeros is None:
        return (weight.float() * scales[..., None].float()).to(dtype)
    q = unpack_nibbles(weight).float().unflatten(-1, (scales.shape[-1], -1)) - 8
    return (q * scales[..., None].float() + zeros[..., None].float()).flatten(-2).to(dtype)


def plain(x, weight, scales, zeros):
    """One row, compiled: a pass over the codes, as linear.matvec. Else by way of the weights."""
    if not (is_compiling() and x.shape[0] == 1):
        return F.linear(x, dequantize(weight, scales, zeros, x.dtype))
    if zeros is None:
        y = (weight.float() * x.float()).sum(-1) * scales.float()
    else:
        y = (dequantize(weight, scales, zeros, torch.float32) * x.float()).sum(-1)
    return y.to(x.dtype)[None]


PLAIN = Kernel("plain", plain)
