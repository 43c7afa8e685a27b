"""The interface of quantized matmul kernels, and PLAIN: quantize.py's formulas.

PLAIN runs on any device in any dtype and is the reference for all other kernels.

    weight, scales, zeros = kernel.pack(weight, scales, zeros)   # once, when a model is loaded
    y = kernel.product(x, weight, scales, zeros)                 # [M, in] -> [M, out]
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quantize import dequantize, product


class Kernel(NamedTuple):
    """pack: tensors in the layout on disk -> the same three in the kernel's layout.

    rows: for a head that is also the embedding. Packed weight, ids [...] -> these rows in the
    layout on disk [..., in], possibly padded at the end.
    dequantize: packed tensors, dtype -> [..., out, in]; not of the CPU's layouts.
    """

    name: str
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    pack: Callable = lambda weight, scales, zeros: (weight, scales, zeros)
    rows: Callable[[Tensor, Tensor], Tensor] = lambda weight, ids: weight[ids]
    dequantize: Callable = dequantize

    def __deepcopy__(self, memo):                  # copies of a module share its kernel
        return self


PLAIN = Kernel("plain", product)
