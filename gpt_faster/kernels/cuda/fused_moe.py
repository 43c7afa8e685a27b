"""MoE for few rows in a compiled GPU step: four kernels and a weighted sum.

    [norm, router]  [top-k]  [norm, gate, up, activation of each selected expert]  [down]

stack_gates() concatenates each expert's gate and up, so that one Triton program computes both; the
modules keep views. Top-k runs by triton_route.py on a GPU, by the PyTorch reference on a CPU.

    moe.stacked = stack_gates(moe)
    y = fused_moe(moe, x, norm)                    # [n, D] -> [n, D]
"""

import os

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cuda.matvec import FUSED_ACTIVATIONS, matvec
from gpt_faster.kernels.cuda.products import INT4_CUDA, INT8_CUDA
from gpt_faster.kernels.linear import PackedLinear
from gpt_faster.layers.feed_forward import GATED
from gpt_faster.layers.moe import SCORES, RoutedMoE
from model import ExpertLinear, MoE


def matvec_weights(linear: nn.Module) -> tuple | None:
    """matvec()'s weight, scales and zeros; None: it does not support their layout."""
    if isinstance(linear, nn.Linear | ExpertLinear):
        return linear.weight, None, None
    if isinstance(linear, PackedLinear) and linear.kernel in (INT8_CUDA, INT4_CUDA):
        return linear.tensors()
    return None


class StackedGates:
    """Gate and up of each expert as one matrix. tensors: weight [E, 2F, in], scales, None."""

    def __init__(self, tensors: list, bias: Tensor | None, activation: str):
        self.tensors, self.bias, self.activation = tensors, bias, activation


def stack_gates(moe: MoE) -> StackedGates | None:
    """In place. None: the kernels do not support these weights, activation or router."""
    if isinstance(moe, RoutedMoE) and not (
            moe.scores is SCORES["softmax"] and moe.choice_bias is None
            and moe.routed_scale == 1 and moe.n_group == 1):
        return None
    name = next(name for name, function in GATED.items() if function is moe.activation)
    if name not in FUSED_ACTIVATIONS or not all(map(matvec_weights, (moe.router, moe.down))):
        return None
    pairs = [matvec_weights(moe.gate), matvec_weights(moe.up)]
    if None in pairs:
        return None
    stacked = [stack_pair(moe, attribute, *pair)
               for attribute, *pair in zip(("weight", "scales", "zeros"), *pairs)]
    return StackedGates(stacked, stack_pair(moe, "bias", moe.gate.bias, moe.up.bias), name)


def stack_pair(moe: MoE, name: str, gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    if gate is None:
        return None
    both = torch.cat((gate, up), dim=1)
    for module, part in ((moe.gate, both[:, :gate.shape[1]]), (moe.up, both[:, gate.shape[1]:])):
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    return both


def fused_moe(moe: MoE, x: Tensor, norm: nn.Module | None) -> Tensor:
    """MoE.forward(norm(x)), x [n, D]. norm: an RMSNorm, for n = 1 only; None: x is normalized."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    router, gates = moe.router, moe.stacked
    logits = matvec(x, *matvec_weights(router), router.bias, weight, eps)
    prob, ids = route(logits, moe.n_active, moe.norm_topk_prob)
    hidden = matvec(x, *gates.tensors, gates.bias, weight, eps, None, gates.activation, ids,
                    moe.n_active)
    y = matvec(hidden, *matvec_weights(moe.down), moe.down.bias, ids=ids)
    y = (y.float() * prob[:, None]).unflatten(0, (-1, moe.n_active)).sum(1).type_as(x)
    if getattr(moe, "shared", None) is None:
        return y
    flat = x if norm is None else norm(x)
    return y + moe.shared_output(flat)


@torch.library.custom_op("gpt_faster::route", mutates_args=())
def route(logits: Tensor, n_active: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """logits [n, E] -> each row's top experts: probabilities [n A] in fp32, ids [n A]."""
    if logits.is_cuda or os.environ.get("TRITON_INTERPRET"):
        from gpt_faster.kernels.cuda.triton_route import launch
        return launch(logits, n_active, normalized)
    prob, ids = logits.float().softmax(-1).topk(n_active)
    if normalized:
        prob = prob / prob.sum(-1, keepdim=True)
    return prob.flatten(), ids.flatten()


@route.register_fake
def _(logits, n_active, normalized):
    n = logits.shape[0] * n_active
    return logits.new_empty(n, dtype=torch.float32), logits.new_empty(n, dtype=torch.int64)
