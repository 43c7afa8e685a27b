"""A layer's feed-forward as operations: dense, or MoE with few tokens, or none. Also the layer's
end, which adds a per-layer embedding (Gemma 4).

The interface is that of mixers.py: supports() checks a layer's modules, add_to() adds operations.

    ffn = feed_forward_of(layer)
    if ffn.supports(layer): ffn(layer).add_to(operations)
"""

import torch
from torch import nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.experts import (
    is_gated,
    native_activation,
    supports_experts,
    up_options,
)
from gpt_faster.kernels.cpu.linears import (
    is_quantized_or_packed,
    norm_struct,
    shape_of,
    supports_linear,
    supports_norm,
)
from gpt_faster.layers.block import NoBranch, post_norm_of
from gpt_faster.layers.moe import MoEWithParallelDense, RoutedMoE, UngatedMoE, softmax
from gpt_faster.layers.norms import Scale, SoftCap
from model import MoE
from tp import shared_by

MAX_BLOCK_ROWS = 32                                # largest block of any CPU's layout


def supports_feed_forward(ffn: nn.Module) -> bool:
    linears = [getattr(ffn, name, None) for name in (up_name(ffn), "down")]
    if not all(isinstance(linear, nn.Linear) or is_quantized_or_packed(linear)
               for linear in linears):
        return False
    is_aligned = up_name(ffn) == "up" or shape_of(linears[0])[0] % (2 * MAX_BLOCK_ROWS) == 0
    has_activation = native_activation(ffn.activation, hasattr(ffn, "gate_up")) is not None
    return is_aligned and has_activation and all(map(supports_linear, linears))


def up_name(ffn: nn.Module) -> str:
    return "gate_up" if hasattr(ffn, "gate_up") else "up"


def options_of(ffn: nn.Module) -> dict:
    return up_options(ffn.activation, hasattr(ffn, "gate_up"))


class NoFeedForward:
    """Of a layer with attention or the like only (Nemotron-H): x2 = x1."""

    decode_only = False

    def __init__(self, layer: nn.Module):
        self.linears = []

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        return True

    def buffer_widths(self, dims_of) -> dict[str, int]:
        return {}

    def add_to(self, ops) -> None:
        ops.add_copy("x1", "x2")


class DenseFeedForward:
    decode_only = False

    def __init__(self, layer: nn.Module):
        self.up = up_name(layer.ffn)
        self.linears = [self.up, "down"]

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        norms = layer.ffn_norm, post_norm_of(layer, "ffn")
        return supports_feed_forward(layer.ffn) and all(map(supports_norm, norms))

    def buffer_widths(self, dims_of) -> dict[str, int]:
        return {"hidden": dims_of("down")[0]}

    def add_to(self, ops) -> None:
        ffn, x = ops.module.ffn, None if ops.parallel else "x1"
        ops.linear(f"ffn.{self.up}", x, "hidden", ops.module.ffn_norm, **options_of(ffn))
        ops.branch("ffn.down", "hidden", "x1", "x2", ffn,
                   post_norm_of(ops.module, "ffn"))


class MoEFeedForward:
    """[norm, router] [top-k] [norm, gate, up, activation] [down] [weighted sum]

    Of experts with a narrower input and output (Nemotron 3): [norm, to_latent] before them, and
    [from_latent, + x] [shared expert, + x] after the sum.
    """

    decode_only = True

    def __init__(self, layer: nn.Module):
        moe = layer.ffn
        self.linears = ["router", "experts.gate_up", "experts.down"]
        self.has_latent = has_latent(moe)
        if self.has_latent:
            self.linears += ["to_latent", "from_latent"]
        if shared_expert_of(moe) is not None:
            self.shared_up = f"shared.{up_name(moe.shared)}"
            self.linears += [self.shared_up, "shared.down"]
        if shared_gate_of(moe) is not None:
            self.linears.append("shared_expert_gate")
        self.n_expert, self.n_active = moe.n_expert, moe.n_active
        self.ends = torch.zeros(moe.n_expert, dtype=torch.int32)

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        moe = layer.ffn
        if not supports_experts(moe) or any(map(shared_by, moe.modules())):
            return False
        is_capped = type(getattr(moe, "router_cap", None)) is SoftCap
        if is_capped or getattr(moe, "choice_of_logits", False):
            return False
        linears = [moe.router, shared_gate_of(moe) or moe.router]
        if has_latent(moe):
            linears += [moe.to_latent, moe.from_latent]
            if shared_gate_of(moe) is not None:
                return False
        norms = [layer.ffn_norm, post_norm_of(layer, "ffn")]
        if isinstance(moe, MoEWithParallelDense):
            norms += [moe.norm, moe.shared_norm, moe.router_norm, moe.post_norm,
                      moe.post_shared_norm]
        shared = shared_expert_of(moe)
        supports_shared = shared is None or supports_feed_forward(shared)
        return (supports_shared and all(map(supports_linear, linears))
                and all(map(supports_norm, norms)))

    def buffer_widths(self, dims_of) -> dict[str, int]:
        D, A = dims_of("experts.down")[1], self.n_active
        widths = dict(logits=self.n_expert, prob=A, place=A, order=A, expert_out=A * D,
                      expert_hidden=A * dims_of("experts.down")[0])
        if "shared.down" in self.linears:
            n_in, n_out = dims_of("shared.down")
            widths |= dict(shared_out=n_out, shared_hidden=n_in, share=1)
        if self.has_latent:
            widths |= dict(latent=D, latent_out=D)
        return widths

    def add_to(self, ops) -> None:
        moe, buffers, A = ops.module.ffn, ops.buffers, self.n_active
        x = None if ops.parallel else "x1"
        has_parallel_dense = isinstance(moe, MoEWithParallelDense)
        norm = shared_norm = router_norm = ops.module.ffn_norm
        if has_parallel_dense:
            norm, shared_norm, router_norm = moe.norm, moe.shared_norm, moe.router_norm
        ops.linear("ffn.router", x, "logits", router_norm)
        self.add_routing(ops, moe)
        self.add_experts(ops, moe, x, norm)
        if self.has_latent:
            self.add_sum_of_latents(ops, moe, x)
            return
        shared = gate = None
        if shared_expert_of(moe) is not None:
            ops.linear(f"ffn.{self.shared_up}", x, "shared_hidden", shared_norm,
                       **options_of(moe.shared))
            ops.linear("ffn.shared.down", "shared_hidden", "shared_out")
            shared = buffers["shared_out"]
        if shared_gate_of(moe) is not None:
            ops.linear("ffn.shared_expert_gate", x, "share", shared_norm)
            gate = buffers["share"]
        post = post_norm_of(ops.module, "ffn")
        post_norms = 2 * (nn.Identity(),)
        if has_parallel_dense:
            post_norms = moe.post_norm, moe.post_shared_norm
        ops.add_per_row(native.Combine(
            kind=native.COMBINE, D=ops.dim, A=A, factor=factor_of(post),
            norm=norm_struct(post_norms[0]), shared_norm=norm_struct(post_norms[1]),
            post_norm=norm_struct(post), y=buffers["expert_out"], prob=buffers["prob"],
            sorted_row=buffers["place"].view(torch.int32), shared=shared, gate=gate,
            residual=buffers["x1"], out=buffers["x2"]))

    def add_experts(self, ops, moe: nn.Module, x: str | None, norm: nn.Module) -> None:
        """expert_out = experts(norm(x)), sorted by expert"""
        if self.has_latent:
            ops.linear("ffn.to_latent", x, "latent", norm)
            x, norm = "latent", None
        ops.linear("ffn.experts.gate_up", x, "expert_hidden", norm, rows=self.n_active,
                   gather_rows=ops.buffers["order"].view(torch.int32), expert_ends=self.ends,
                   **up_options(moe.activation, is_gated(moe)))
        ops.linear("ffn.experts.down", "expert_hidden", "expert_out", rows=self.n_active,
                   expert_ends=self.ends)

    def add_sum_of_latents(self, ops, moe: nn.Module, x: str | None) -> None:
        """x2 = x1 + post(from_latent(weighted sum) + shared expert)"""
        buffers, has_shared = ops.buffers, shared_expert_of(moe) is not None
        ops.add_per_row(native.Combine(
            kind=native.COMBINE, D=ops.layer.linears["ffn.to_latent"].shape[0], A=self.n_active,
            factor=1.0, y=buffers["expert_out"], prob=buffers["prob"],
            sorted_row=buffers["place"].view(torch.int32), out=buffers["latent_out"]))
        branch = "x1", "x2", moe, post_norm_of(ops.module, "ffn")
        ops.branch("ffn.from_latent", "latent_out", *branch, part="first" if has_shared else "only")
        if has_shared:
            ops.linear(f"ffn.{self.shared_up}", x, "shared_hidden", ops.module.ffn_norm,
                       **options_of(moe.shared))
            ops.branch("ffn.shared.down", "shared_hidden", *branch, part="last")

    def add_routing(self, ops, moe: nn.Module) -> None:
        buffers, router = ops.buffers, dict(n_group=1, topk_group=1, group_top=2, routed_scale=1.0)
        if isinstance(moe, RoutedMoE):
            router = dict(n_group=moe.n_group, topk_group=moe.topk_group, group_top=moe.group_top,
                          routed_scale=moe.routed_scale, use_sigmoid=moe.scores is not softmax)
        ops.add_per_row(native.Route(
            kind=native.ROUTE, E=self.n_expert, A=self.n_active, **router,
            norm_topk_prob=moe.norm_topk_prob, logits=buffers["logits"],
            bias=getattr(moe, "choice_bias", None),
            expert_scale=getattr(moe, "expert_scale", None), prob=buffers["prob"],
            sorted_row=buffers["place"].view(torch.int32),
            sorted_token=buffers["order"].view(torch.int32), expert_ends=self.ends))


def shared_expert_of(moe: nn.Module) -> nn.Module | None:
    """The shared expert, which runs for every token."""
    return getattr(moe, "shared", None)


def shared_gate_of(moe: nn.Module) -> nn.Module | None:
    return getattr(moe, "shared_expert_gate", None)


def has_latent(moe: nn.Module) -> bool:
    """Are the experts' input and output narrower than the model?"""
    return isinstance(moe, UngatedMoE) and not isinstance(moe.to_latent, nn.Identity)


def factor_of(post: nn.Module) -> float:
    return post.factor if isinstance(post, Scale) else 1.0


def feed_forward_of(layer: nn.Module) -> type:
    if isinstance(layer.ffn, NoBranch):
        return NoFeedForward
    return MoEFeedForward if isinstance(layer.ffn, MoE) else DenseFeedForward


class LayerEnd:
    """(x + norm(down(act(gate(x)) * own))) * scale, own: the per-layer embedding"""

    decode_only = False

    def __init__(self, layer: nn.Module):
        self.linears = ["gate", "down"]

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        end = layer.end
        return (getattr(end, "gate", None) is not None
                and native_activation(end.activation, True) is not None
                and supports_linear(end.gate) and supports_linear(end.down)
                and supports_norm(end.norm))

    def buffer_widths(self, dims_of) -> dict[str, int]:
        return {"end_hidden": dims_of("down")[0]}

    def add_to(self, ops) -> None:
        end = ops.module.end
        activation = native_activation(end.activation, True)
        ops.op_with_multiplier = ops.linear("end.gate", "x2", "end_hidden",
                                    activation=native.ACTIVATIONS[activation])
        ops.linear("end.down", "end_hidden", "branch_out")
        ops.add_norm("x2", "x2", end.norm, scale=end.scale)
