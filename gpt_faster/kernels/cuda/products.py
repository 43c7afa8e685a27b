"""Quantized weights on a GPU, as they lie on disk: Triton multiplies few rows by them.

    y = INT4_CUDA.product(x, weight, scales, zeros)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.kernels.cuda.matvec import MOST_ROWS, matvec
from gpt_faster.kernels.plain import Kernel
from gpt_faster.kernels.private import is_compiling
from quantize import dequantize

TWICE = 4                                          # up to 4 passes of MOST_ROWS beat unpacking


def has_kernels(device) -> bool:
    """Is this a GPU that our Triton kernels are for?"""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Few rows, compiled: a pass over the codes for each MOST_ROWS. Else by way of the weights."""
    if is_compiling() and x.shape[0] <= TWICE * MOST_ROWS:
        parts = [matvec(part, weight, scales, zeros) for part in x.split(MOST_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return F.linear(x, dequantize(weight, scales, zeros, x.dtype))


INT8_CUDA = Kernel("int8 cuda", product)
INT4_CUDA = Kernel("int4 cuda", product)
