"""A layer's second half as operations, and what follows it: feed-forward, a mixture of experts with
few tokens, an end with an embedding of the layer's own.

As mixers.py's: fits() says whether it has the parts that are known, add_to() adds them.

    half = feed_forward_of(layer)
    if half.fits(layer): half(layer).add_to(operations)
"""

import torch
from torch import nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.experts import fits_experts
from gpt_faster.kernels.cpu.linears import (
    fits_linear,
    fits_norm,
    has_leaves,
    norm_struct,
    shape_of,
)
from gpt_faster.layers.block import post_norm_of
from gpt_faster.layers.feed_forward import GATED, UNGATED
from gpt_faster.layers.moe import MoEWithParallelDense, RoutedMoE, softmax
from gpt_faster.layers.norms import Scale
from model import MoE
from tp import shared_by

MOST_BLOCK_ROWS = 32                               # of any CPU's layout


def is_feed_forward(ffn: nn.Module) -> bool:
    linears = [getattr(ffn, name, None) for name in (name_of_up(ffn), "down")]
    if not all(isinstance(linear, nn.Linear) or has_leaves(linear) for linear in linears):
        return False
    even = name_of_up(ffn) == "up" or shape_of(linears[0])[0] % (2 * MOST_BLOCK_ROWS) == 0
    return even and activation_of(ffn) is not None and all(map(fits_linear, linears))


def name_of_up(ffn: nn.Module) -> str:
    return "gate_up" if hasattr(ffn, "gate_up") else "up"


def activation_of(ffn: nn.Module) -> str | None:
    known = GATED if hasattr(ffn, "gate_up") else UNGATED
    return next((name for name, f in known.items()
                 if f is ffn.activation and name in native.ACTIVATIONS), None)


def up_options(ffn: nn.Module) -> dict:
    """Of the first linear's operation."""
    return dict(activation=native.ACTIVATIONS[activation_of(ffn)], gated=hasattr(ffn, "gate_up"))


class DenseHalf:
    few_rows = False

    def __init__(self, layer: nn.Module):
        self.up = name_of_up(layer.ffn)
        self.linears = [self.up, "down"]

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        norms = layer.ffn_norm, post_norm_of(layer, "ffn")
        return is_feed_forward(layer.ffn) and all(map(fits_norm, norms))

    def widths(self, width_of) -> dict[str, int]:
        return {"hidden": width_of("down")[0]}

    def add_to(self, ops) -> None:
        ffn, x = ops.parts.ffn, None if ops.parallel else "x1"
        ops.linear(f"ffn.{self.up}", x, "hidden", ops.parts.ffn_norm, **up_options(ffn))
        ops.branch("ffn.down", "hidden", "x1", "x2", ffn,
                   post_norm_of(ops.parts, "ffn"))


class MixtureHalf:
    """[norm, router] [choice] [norm, gate, up, activation] [down] of the chosen, [sum of all]"""

    few_rows = True

    def __init__(self, layer: nn.Module):
        moe = layer.ffn
        self.linears = ["router", "experts.gate_up", "experts.down"]
        if shared_of(moe) is not None:
            self.linears += ["shared.gate_up", "shared.down"]
        if shared_gate_of(moe) is not None:
            self.linears.append("shared_expert_gate")
        self.n_expert, self.n_active = moe.n_expert, moe.n_active
        self.ends = torch.zeros(moe.n_expert, dtype=torch.int32)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        moe = layer.ffn
        if not fits_experts(moe) or any(map(shared_by, moe.modules())):
            return False
        linears = [moe.router, shared_gate_of(moe) or moe.router]
        norms = [layer.ffn_norm, post_norm_of(layer, "ffn")]
        if isinstance(moe, MoEWithParallelDense):
            norms += [moe.norm, moe.shared_norm, moe.router_norm, moe.post_norm,
                      moe.post_shared_norm]
        shared_fits = shared_of(moe) is None or is_feed_forward(shared_of(moe))
        return shared_fits and all(map(fits_linear, linears)) and all(map(fits_norm, norms))

    def widths(self, width_of) -> dict[str, int]:
        D, A = width_of("router")[0], self.n_active
        widths = dict(logits=self.n_expert, prob=A, place=A, order=A, expert_out=A * D,
                      expert_hidden=A * width_of("experts.down")[0])
        if "shared.down" in self.linears:
            widths |= dict(shared_out=D, shared_hidden=width_of("shared.down")[0], share=1)
        return widths

    def add_to(self, ops) -> None:
        moe, at, A = ops.parts.ffn, ops.at, self.n_active
        x = None if ops.parallel else "x1"
        beside = isinstance(moe, MoEWithParallelDense)
        norm = shared_norm = router_norm = ops.parts.ffn_norm
        if beside:
            norm, shared_norm, router_norm = moe.norm, moe.shared_norm, moe.router_norm
        ops.linear("ffn.router", x, "logits", router_norm)
        self.add_choice(ops, moe)
        up = up_options_of_experts(moe)
        order = at["order"].view(torch.int32)
        ops.linear("ffn.experts.gate_up", x, "expert_hidden", norm, rows=A, order=order,
                   ends=self.ends, **up)
        ops.linear("ffn.experts.down", "expert_hidden", "expert_out", rows=A, ends=self.ends)
        shared = gate = None
        if shared_of(moe) is not None:
            ops.linear("ffn.shared.gate_up", x, "shared_hidden", shared_norm,
                       **up_options(moe.shared))
            ops.linear("ffn.shared.down", "shared_hidden", "shared_out")
            shared = at["shared_out"]
        if shared_gate_of(moe) is not None:
            ops.linear("ffn.shared_expert_gate", x, "share", shared_norm)
            gate = at["share"]
        post = post_norm_of(ops.parts, "ffn")
        own_norms = (moe.post_norm, moe.post_shared_norm) if beside else 2 * (nn.Identity(),)
        ops.add(native.Combine(
            kind=native.COMBINE, D=ops.dim, A=A, factor=factor_of(post),
            norm=norm_struct(own_norms[0]), shared_norm=norm_struct(own_norms[1]),
            post=norm_struct(post), y=at["expert_out"], prob=at["prob"],
            place=at["place"].view(torch.int32), shared=shared, gate=gate, residual=at["x1"],
            out=at["x2"]))

    def add_choice(self, ops, moe: nn.Module) -> None:
        at, router = ops.at, dict(n_group=1, topk_group=1, group_top=2, factor=1.0)
        if isinstance(moe, RoutedMoE):
            router = dict(n_group=moe.n_group, topk_group=moe.topk_group, group_top=moe.group_top,
                          factor=moe.routed_scale, by_sigmoid=moe.scores is not softmax)
        ops.add(native.Route(
            kind=native.ROUTE, E=self.n_expert, A=self.n_active, **router,
            normalized=moe.norm_topk_prob, logits=at["logits"],
            bias=getattr(moe, "choice_bias", None),
            expert_scale=getattr(moe, "expert_scale", None), prob=at["prob"],
            place=at["place"].view(torch.int32), order=at["order"].view(torch.int32),
            ends=self.ends))


def shared_of(moe: nn.Module) -> nn.Module | None:
    """The expert that serves every token."""
    return getattr(moe, "shared", None)


def shared_gate_of(moe: nn.Module) -> nn.Module | None:
    return getattr(moe, "shared_expert_gate", None)


def up_options_of_experts(moe: nn.Module) -> dict:
    name = next(name for name, f in GATED.items() if f is moe.activation)
    return dict(activation=native.ACTIVATIONS[name], gated=True)


def factor_of(post: nn.Module) -> float:
    return post.factor if isinstance(post, Scale) else 1.0


def feed_forward_of(layer: nn.Module) -> type:
    return MixtureHalf if isinstance(layer.ffn, MoE) else DenseHalf


class EndHalf:
    """(x + norm(down(act(gate(x)) * own))) * scale"""

    few_rows = False

    def __init__(self, layer: nn.Module):
        self.linears = ["gate", "down"]

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        end = layer.end
        return (getattr(end, "gate", None) is not None and end.activation in GATED.values()
                and fits_linear(end.gate) and fits_linear(end.down) and fits_norm(end.norm))

    def widths(self, width_of) -> dict[str, int]:
        return {"end_hidden": width_of("down")[0]}

    def add_to(self, ops) -> None:
        end = ops.parts.end
        activation = next(name for name, f in GATED.items() if f is end.activation)
        ops.multiplied = ops.linear("end.gate", "x2", "end_hidden",
                                    activation=native.ACTIVATIONS[activation])
        ops.linear("end.down", "end_hidden", "before")
        ops.add_norm("x2", "x2", end.norm, scale=end.scale)
