"""A few rows by a weight matrix, as one operator of a compiled GPU step, and its plain reference.

What it reads is normalized and what it writes is activated or added to on the way, in the modules'
own roundings, but that on a GPU the normalized row is not rounded. triton_matvec.py does it there;
on a CPU the reference runs, so that whatever uses the operator can be tested.

    y = matvec(x, weight, norm=norm.weight, eps=norm.eps)        # [M, in], M <= 8 -> [M, out]
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.layers.feed_forward import GATED
from quantize import dequantize

MOST_ROWS = 8
FUSED_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")


@torch.library.custom_op("gpt_faster::matvec", mutates_args=(),
                         tags=(torch.Tag.flexible_layout,))    # else each call copies what it reads
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
    """x [M, in] by weight [out, in], or codes as quantize.py has them -> [M, out].

    norm [in], fp32: RMSNorm x before; activation: of a gate and what is beside it, both halves
    of the outputs; residual [M, out]: is added; ids [M share]: as many rows of outputs, row m of
    x[m // share] by weight[ids[m]], weight [E, out, in].
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
