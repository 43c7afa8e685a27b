"""MoE experts on a CPU as two operations: (gate,) up and activation, then down. Also the per-head
matrices of latent attention, which the operations treat as experts.

Used in calls with many tokens; with few, routing and combining are operations too
(feed_forward.py). The experts' matrices are contiguous, each padded to whole blocks.

    moe.experts = FusedExperts(moe)                # if supports_experts(moe)
"""

import ctypes
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.linears import (
    NATIVE_KERNEL,
    OperationsLinear,
    can_pack,
    disk_layout,
    fp4_group,
    is_packed,
    is_quantized_or_packed,
    shape_of,
    weight_args,
)
from gpt_faster.kernels.linear import PackedLinear, methods_implemented_by
from gpt_faster.layers.feed_forward import GATED, UNGATED
from gpt_faster.layers.moe import MoEWithParallelDense, RoutedMoE, UngatedMoE
from model import ExpertLinear, MoE


def native_activation(activation: Callable, is_gated: bool) -> str | None:
    """The operations' name of an activation; None: they do not have it."""
    known = GATED if is_gated else UNGATED
    return next((name for name, f in known.items()
                 if f is activation and name in native.ACTIVATIONS), None)


def is_gated(moe: nn.Module) -> bool:
    return not isinstance(moe, UngatedMoE)


def supports_experts(moe: nn.Module) -> bool:
    """Do the operations support this MoE's experts? Reads no weights."""
    if isinstance(experts := vars(moe).get("experts"), FusedExperts):
        return experts.is_installed_in(moe)
    if type(moe) not in (MoE, RoutedMoE, MoEWithParallelDense, UngatedMoE):
        return False
    linears = *up_matrices(moe), moe.down
    return (native_activation(moe.activation, is_gated(moe)) is not None
            and all(map(can_pack, linears)) and not any(map(is_packed, linears)))


def up_matrices(moe: nn.Module) -> list[nn.Module]:
    """The experts' matrices before the activation."""
    return [moe.gate, moe.up] if is_gated(moe) else [moe.up]


def supports_head_matrices(module: nn.Module) -> bool:
    """Is it an ExpertLinear without bias, of any supported scheme?"""
    is_matrices = is_quantized_or_packed(module) and len(module.shape) == 3
    if not is_matrices and not isinstance(module, ExpertLinear):
        return False
    return module.bias is None and can_pack(module)


class PackedExperts(OperationsLinear):
    """A packed ExpertLinear whose input rows are sorted by expert; in latent attention, by head."""

    def forward(self, x, ids, ends):
        x, ends = x.contiguous(), ends.contiguous()
        y = x.new_empty(len(x), self.shape[1])
        op = expert_linear(self, x, y, ends)
        native.run([ctypes.addressof(op)])
        return y


def pack_experts(matrices: list[nn.Module], bias: Tensor | None) -> PackedExperts:
    """Pack experts' matrices [E, out, in], one or two interleaved by expert, as one matrix with
    E len(matrices) out rows.
    """
    tensors = [None if parts[0] is None else pad_to_blocks(torch.stack(parts, 1))
              for parts in zip(*map(disk_layout, matrices))]
    n_expert, n_out, n_in = shape_of(matrices[0])
    _, weight, scales, _ = native.pack_weight(*tensors, fp4_group(matrices[0]))
    new = PackedExperts(torch.Size((n_expert, len(matrices) * n_out, n_in)), bias, NATIVE_KERNEL)
    new.set_tensors((weight, scales, None))
    new.implements = methods_implemented_by(matrices[0])
    return new


def pad_to_blocks(t: Tensor) -> Tensor:
    """[E, matrices, out, (…)] -> [E matrices out', (…)], out padded to out', a whole block."""
    n_pad = -t.shape[2] % native.panel_width()
    return F.pad(t, (0, 0) * (t.dim() - 3) + (0, n_pad)).flatten(0, 2)


class FusedExperts:
    """Replaces MoE.experts, and the MoE's matrices by packed ones."""

    def __init__(self, moe: MoE):
        self.moe = [moe]                           # a back reference, not a part of it
        up, down = up_matrices(moe), moe.down
        bias = None if down.bias is None else torch.cat([m.bias for m in up], 1)
        self.gate_up = pack_experts(up, bias)      # of an UngatedMoE: up alone
        self.down = pack_experts([down], down.bias)
        self.up_options = up_options(moe.activation, is_gated(moe))
        moe.down = self.down
        if is_gated(moe):
            moe.gate, moe.up = self.gate_up, None
        else:
            moe.up = self.gate_up

    def is_installed_in(self, moe: MoE) -> bool:
        up = [self.gate_up, None] if is_gated(moe) else [self.gate_up]
        return moe.down is self.down and all(map(operator.is_, up_matrices(moe), up))

    def uninstall(self) -> None:
        """Give the MoE separate gate, up and down modules again, so that it can run eagerly.

        gate stays the same module, with its hooks. Does nothing if one of the three was replaced:
        the next call raises.
        """
        [moe] = self.moe
        if not self.is_installed_in(moe):
            return
        if not is_gated(moe):                      # up and down are separate
            del moe.experts
            return
        n_expert, n_out, n_in = self.gate_up.shape
        shape = torch.Size((n_expert, n_out // 2, n_in))
        halves = [(t, t) if t is None else t.unflatten(0, (n_expert, 2, -1)).unbind(1)
                  for t in self.gate_up.tensors()]
        gate, up = ([t if t is None else t.flatten(0, 1).contiguous() for t in tensors]
                    for tensors in zip(*halves))
        bias, up_bias = 2 * [None]
        if self.gate_up.bias is not None:
            bias, up_bias = (half.contiguous() for half in self.gate_up.bias.chunk(2, 1))
        moe.up = PackedExperts(shape, up_bias, NATIVE_KERNEL)
        moe.up.implements = moe.gate.implements
        moe.up.set_tensors(up)
        moe.gate.shape = shape
        moe.gate.bias = bias
        moe.gate.set_tensors(gate)
        del moe.experts

    def __call__(self, x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """x [M, D] sorted by expert; ends[e]: index after expert e's last row -> [M, D]."""
        if not self.is_installed_in(*self.moe):
            raise TypeError("gate, up or down of a compiled MoE was replaced: replace it before "
                            "the model is compiled")
        x, ends = x.contiguous(), ends.int().contiguous()
        hidden = torch.empty(len(x), self.down.shape[2])
        y = torch.empty_like(x)
        up = expert_linear(self.gate_up, x, hidden, ends, **self.up_options)
        down = expert_linear(self.down, hidden, y, ends)
        native.run([ctypes.addressof(op) for op in (up, down)])
        return y


def up_options(activation: Callable, gated: bool) -> dict:
    """Options of the up (or gate and up) operation."""
    return dict(activation=native.ACTIVATIONS[native_activation(activation, gated)], gated=gated)


def expert_linear(linear: PackedLinear, x: Tensor, out: Tensor, ends: Tensor,
                  **more) -> native.Linear:
    """more: the struct's other fields."""
    n_expert, *shape = linear.shape
    weights = weight_args(linear.packed, linear.scales, shape[1])
    return native.linear(*weights, shape, linear.bias, M=len(x), x=x, out=out,
                         x_bits=native.x_bits(out.dtype), n_expert=n_expert,
                         expert_ends=ends, **more)
