"""What a kernel of quantized products is; and the one that is quantize.py's plain formulas, which
runs on any device, in any dtype: the reference of all others.

    weight, scales, zeros = kernel.pack(weight, scales, zeros)   # once, when a model is loaded
    y = kernel.product(x, weight, scales, zeros)                 # [M, in] -> [M, out]
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quantize import product


class Kernel(NamedTuple):
    """pack: the tensors on disk -> the same three in the kernel's layout. product: as above.

    rows: pack's weight, ids [...] -> those rows as on disk [..., in], or longer, where a head may
    also be an embedding.
    """

    name: str
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    pack: Callable = lambda weight, scales, zeros: (weight, scales, zeros)
    rows: Callable[[Tensor, Tensor], Tensor] = lambda weight, ids: weight[ids]

    def __deepcopy__(self, memo):                  # a copied module has the same kernel
        return self


PLAIN = Kernel("plain", product)
