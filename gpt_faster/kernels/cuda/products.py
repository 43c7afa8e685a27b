"""Quantized matmul on a GPU: few rows by Triton, many by dequantizing.

Codes keep the layout on disk. int4's scale and zero of a group lie side by side in `scales`, so
that a thread loads both at once; `zeros` is None.

    tensors = INT4_CUDA.pack(weight, scales, zeros); y = INT4_CUDA.product(x, *tensors)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.kernels.cuda.matvec import (
    MAX_ROWS,
    dequantize_interleaved,
    interleaved,
    matvec,
)
from gpt_faster.kernels.plain import Kernel
from gpt_faster.kernels.torch_internals import is_compiling

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


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype) -> Tensor:
    return dequantize_interleaved(weight, interleaved(weight, scales, zeros), dtype)


def pack(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple:
    return weight, interleaved(weight, scales, zeros), None


INT8_CUDA = Kernel("int8 cuda", product, pack, dequantize=dequantize)
INT4_CUDA = Kernel("int4 cuda", product, pack, dequantize=dequantize)
