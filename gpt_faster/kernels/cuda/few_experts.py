"""A mixture of experts in a compiled GPU step, few rows: four kernels, and a sum of their results.

    [norm, router]  [choice]  [norm, gate, up, activation of each chosen expert]  [down]

stack_gates() lays an expert's gate above its up, so that one program has both; the modules keep
views of them. triton_route.py makes the choice on a GPU, on a CPU the plain reference.

    moe.stacked = stack_gates(moe); y = few_experts(moe, x, norm)          # [n, D] -> [n, D]
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


def leaves(linear: nn.Module) -> tuple | None:
    """The weights as matvec() takes them, or None where they are otherwise."""
    if isinstance(linear, nn.Linear | ExpertLinear):
        return linear.weight, None, None
    if isinstance(linear, PackedLinear) and linear.kernel in (INT8_CUDA, INT4_CUDA):
        return linear.leaves()
    return None


class StackedGates:
    """Both matrices of each expert, weight [E, 2 width, in] and what belongs to it."""

    def __init__(self, leaves: list, bias: Tensor | None, activation: str):
        self.leaves, self.bias, self.activation = leaves, bias, activation


def stack_gates(moe: MoE) -> StackedGates | None:
    """None where the kernels know no such weights, activation or router. In place."""
    if isinstance(moe, RoutedMoE) and not (
            moe.scores is SCORES["softmax"] and moe.choice_bias is None
            and moe.routed_scale == 1 and moe.n_group == 1):
        return None
    name = next(name for name, function in GATED.items() if function is moe.activation)
    if name not in FUSED_ACTIVATIONS or not all(map(leaves, (moe.router, moe.down))):
        return None
    pairs = [leaves(moe.gate), leaves(moe.up)]
    if None in pairs:
        return None
    stacked = [stack(moe, leaf, *pair)
               for leaf, *pair in zip(("weight", "scales", "zeros"), *pairs)]
    return StackedGates(stacked, stack(moe, "bias", moe.gate.bias, moe.up.bias), name)


def stack(moe: MoE, leaf: str, gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    if gate is None:
        return None
    both = torch.cat((gate, up), dim=1)
    for module, part in ((moe.gate, both[:, :gate.shape[1]]), (moe.up, both[:, gate.shape[1]:])):
        setattr(module, leaf, nn.Parameter(part, requires_grad=False))
    return both


def few_experts(moe: MoE, x: Tensor, norm: nn.Module | None) -> Tensor:
    """As MoE.forward of norm(x), x [n, D]; norm: an RMSNorm, for one row."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    router, gates = moe.router, moe.stacked
    logits = matvec(x, *leaves(router), router.bias, weight, eps)
    prob, ids = route(logits, moe.n_active, moe.norm_topk_prob)
    hidden = matvec(x, *gates.leaves, gates.bias, weight, eps, None, gates.activation, ids,
                    moe.n_active)
    y = matvec(hidden, *leaves(moe.down), moe.down.bias, ids=ids)
    y = (y.float() * prob[:, None]).unflatten(0, (-1, moe.n_active)).sum(1).type_as(x)
    if getattr(moe, "shared", None) is None:
        return y
    flat = x if norm is None else norm(x)
    return y + moe.shared_output(flat)


@torch.library.custom_op("gpt_faster::route", mutates_args=())
def route(logits: Tensor, n_active: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """logits [n, E] -> each row's likeliest experts: probabilities [n A], fp32, and ids [n A]."""
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
