"""Quantized matmul on a GPU, in the layout on disk: few rows by Triton, many by dequantizing.

    y = INT4_CUDA.product(x, weight, scales, zeros)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.kernels.cuda.matvec import MAX_ROWS, matvec
from gpt_faster.kernels.plain import Kernel
from gpt_faster.kernels.torch_internals import is_compiling
from quantize import dequantize

MAX_PASSES = 4                                     # of MAX_ROWS rows: faster than dequantizing


def has_kernels(device) -> bool:
    """Is this a GPU that our Triton kernels support?"""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Few compiled rows: one pass over the codes per MAX_ROWS. Otherwise dequantizes."""
    if is_compiling() and x.shape[0] <= MAX_PASSES * MAX_ROWS:
        parts = [matvec(part, weight, scales, zeros) for part in x.split(MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return F.linear(x, dequantize(weight, scales, zeros, x.dtype))


INT8_CUDA = Kernel("int8 cuda", product)
INT4_CUDA = Kernel("int4 cuda", product)
