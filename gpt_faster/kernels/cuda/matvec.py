"""Matmul of a few rows as one operator of a compiled GPU step, and its PyTorch reference.

Fuses an RMSNorm of the input and an activation or residual of the output. Rounds as the separate
modules do, except that a GPU does not round the normalized row. int4's kernel reads 16 bits of x,
so an fp32 x takes the reference there. Runs by triton_matvec.py or, for
codes, triton_quantized.py on a GPU, by the reference on a CPU, for tests.

    y = matvec(x, weight, norm=norm.weight, eps=norm.eps)        # [M, in], M <= 8 -> [M, out]
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.layers.feed_forward import GATED
from quantize import dequantize

MAX_ROWS = 8
FUSED_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")


@torch.library.custom_op("gpt_faster::matvec", mutates_args=(),
                         tags=(torch.Tag.flexible_layout,))    # else each call copies its inputs
def _matvec(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None,
            norm: Tensor | None, eps: float, residual: Tensor | None, activation: str,
            ids: Tensor | None, share: int) -> Tensor:
    others = bias, norm, eps, residual, activation, ids, share
    reads_16_bits = x.dtype == torch.float32 and weight.dtype == torch.uint8
    if x.is_cuda and reads_16_bits or not (x.is_cuda or os.environ.get("TRITON_INTERPRET")):
        return plain_matvec(x, weight, scales, *others)
    if scales is None:
        from gpt_faster.kernels.cuda.triton_matvec import launch
        return launch(x, weight, *others)
    from gpt_faster.kernels.cuda import triton_quantized
    return triton_quantized.launch(x, weight, scales, *others)


@_matvec.register_fake
def _(x, weight, scales, bias, norm, eps, residual, activation, ids, share):
    return x.new_empty(share * x.shape[0], weight.shape[-2] // (2 if activation else 1))


def interleaved(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """quantize.py's scales and zeros as the kernels read them: int8 [out], int4 [out, groups, 2].

    ValueError if they do not belong to these codes.
    """
    if zeros is not None:
        scales = torch.stack((scales, zeros), -1)
    n_axis = weight.ndim - 1 if weight.dtype == torch.int8 else weight.ndim + 1
    if scales.ndim != n_axis or not scales.is_floating_point():
        raise ValueError(f"scales {list(scales.shape)} for codes {list(weight.shape)} in "
                         f"{weight.dtype}: expected one a row (int8) or a scale and a zero a "
                         "group in the last axis (int4); assign both together")
    return scales


def dequantize_interleaved(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype == torch.int8:
        return dequantize(weight, scales, None, dtype)
    return dequantize(weight, *scales.unbind(-1), dtype)


def matvec(x, weight, scales=None, zeros=None, bias=None, norm=None, eps=0.0, residual=None,
           activation="", ids=None, share=1) -> Tensor:
    """x [M, in] @ weight [out, in], or quantize.py's codes -> [M, out].

    scales: as interleaved() makes them; with zeros, it is called here, in each call.
    norm [in], fp32: RMSNorm x first. activation: gated; the outputs are gate and up, concatenated.
    residual [M, out]: added to the output. ids [M share]: experts; weight is [E, out, in] and
    output row m is x[m // share] @ weight[ids[m]].
    """
    if scales is not None:
        scales = interleaved(weight, scales, zeros)
    return _matvec(x.contiguous(), weight, scales, bias, norm, eps, residual, activation, ids,
                   share)


def plain_matvec(x, weight, scales, bias, norm, eps, residual, activation, ids,
                 share=1) -> Tensor:
    if norm is not None:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        x = (h * norm).type_as(x)
    if ids is not None:
        x = x.repeat_interleave(share, 0)
        weight, scales, bias = (t if t is None else t[ids] for t in (weight, scales, bias))
    if scales is not None:
        weight = dequantize_interleaved(weight, scales, x.dtype)
    if ids is not None:
        y = (weight @ x[..., None]).squeeze(-1)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, weight, bias)
    if activation:
        y = GATED[activation](*y.chunk(2, dim=-1))
    return y if residual is None else residual + y
