"""Matmul of a few rows as one operator of a compiled GPU step, and its PyTorch reference.

Fuses an RMSNorm of the input and an activation or residual of the output. Rounds as the separate
modules do, except that a GPU does not round the normalized row. Runs by triton_matvec.py on a GPU,
by the reference on a CPU, for tests.

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
def _matvec(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None,
            bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
            activation: str, ids: Tensor | None, share: int) -> Tensor:
    if x.is_cuda or os.environ.get("TRITON_INTERPRET"):
        from gpt_faster.kernels.cuda.triton_matvec import launch
        return launch(x, weight, scales, zeros, bias, norm, eps, residual, activation, ids, share)
    return plain_matvec(x, weight, scales, zeros, bias, norm, eps, residual, activation, ids, share)


@_matvec.register_fake
def _(x, weight, scales, zeros, bias, norm, eps, residual, activation, ids, share):
    return x.new_empty(share * x.shape[0], weight.shape[-2] // (2 if activation else 1))


def matvec(x, weight, scales=None, zeros=None, bias=None, norm=None, eps=0.0, residual=None,
           activation="", ids=None, share=1) -> Tensor:
    """x [M, in] @ weight [out, in], or quantize.py's codes -> [M, out].

    norm [in], fp32: RMSNorm x first. activation: gated; the outputs are gate and up, concatenated.
    residual [M, out]: added to the output. ids [M share]: experts; weight is [E, out, in] and
    output row m is x[m // share] @ weight[ids[m]].
    """
    return _matvec(x.contiguous(), weight, scales, zeros, bias, norm, eps, residual, activation,
                   ids, share)


def plain_matvec(x, weight, scales, zeros, bias, norm, eps, residual, activation, ids,
                 share=1) -> Tensor:
    if norm is not None:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        x = (h * norm).type_as(x)
    if ids is not None:
        x = x.repeat_interleave(share, 0)
        weight, scales, zeros, bias = (t if t is None else t[ids]
                                       for t in (weight, scales, zeros, bias))
    if scales is not None:
        weight = dequantize(weight, scales, zeros, x.dtype)
    if ids is not None:
        y = (weight @ x[..., None]).squeeze(-1)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, weight, bias)
    if activation:
        y = GATED[activation](*y.chunk(2, dim=-1))
    return y if residual is None else residual + y
