"""Quantized matmul on a GPU: few rows and a prompt's by Triton, many by writing the matrix out.

Codes keep the layout on disk. int4's scale and zero of a group lie side by side in `scales`, so
that a thread loads both at once; `zeros` is None. A compiled step's few rows are matvec.py's. Up to
MAX_FUSED_ROWS are multiplied by codes that become weights in registers (triton_prompt.py). More
are cuBLAS's, by weights that one kernel writes for the call.

    tensors = INT4_CUDA.pack(weight, scales, zeros); y = INT4_CUDA.product(x, *tensors)
"""

import os

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

MAX_FUSED_ROWS = 128                               # more are no slower written out: docs/gpu.md
FUSED_DTYPES = (torch.bfloat16, torch.float16)


def has_kernels(device) -> bool:
    """Is this a GPU that our Triton kernels support?"""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@torch.library.custom_op("gpt_faster::prompt_product", mutates_args=(),
                         tags=(torch.Tag.flexible_layout,))    # else each call copies its inputs
def prompt_product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [M, in], up to MAX_FUSED_ROWS, by codes -> [M, out]; scales as interleaved() makes them."""
    if not runs_triton(x):
        return F.linear(x, dequantize_interleaved(weight, scales, x.dtype))
    from gpt_faster.kernels.cuda.triton_prompt import multiply
    return multiply(x, weight, scales)


@prompt_product.register_fake
def _(x, weight, scales):
    return x.new_empty(x.shape[0], weight.shape[0])


def runs_triton(t: Tensor) -> bool:
    return t.is_cuda or bool(os.environ.get("TRITON_INTERPRET"))


def product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """x [M, in] -> [M, out]"""
    M = x.shape[0]
    if is_compiling() and M <= MAX_ROWS:
        return matvec(x, weight, scales, zeros)
    scales = interleaved(weight, scales, zeros)
    is_fused = 0 < M <= MAX_FUSED_ROWS and x.dtype in FUSED_DTYPES
    if is_fused and suit_kernels(weight, scales):
        return prompt_product(x.contiguous(), weight, scales)
    return F.linear(x, dequantize(weight, scales, None, x.dtype))


def suit_kernels(weight: Tensor, scales: Tensor) -> bool:
    return weight.is_contiguous() and scales.is_contiguous() and has_kernels(weight.device)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype) -> Tensor:
    """Compiled, Inductor fuses the formula; else one kernel of ours does."""
    scales = interleaved(weight, scales, zeros)
    if is_compiling() or not suit_kernels(weight, scales):
        return dequantize_interleaved(weight, scales, dtype)
    from gpt_faster.kernels.cuda.triton_prompt import write_out
    return write_out(weight, scales, dtype)


def pack(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple:
    return weight, interleaved(weight, scales, zeros), None


INT8_CUDA = Kernel("int8 cuda", product, pack, dequantize=dequantize)
INT4_CUDA = Kernel("int4 cuda", product, pack, dequantize=dequantize)
