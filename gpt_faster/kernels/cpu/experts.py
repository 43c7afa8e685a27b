"""A mixture's experts on a CPU as two operations: gate and up with the activation, then down; and
matrices for each head of latent attention, which are experts to the operations.

In a call of many tokens; with few the router and the sum are operations too (feed_forward.py).
Experts lie one after the other, each matrix filled up to whole blocks.

    moe.experts = Experts(moe)                     # where fits_experts(moe)
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.linears import (
    OPERATIONS,
    OperationsLinear,
    arguments,
    fits_leaves,
    has_leaves,
    is_packed,
    on_disk,
    shape_of,
)
from gpt_faster.kernels.linear import PackedLinear, methods_of
from gpt_faster.layers.feed_forward import GATED
from gpt_faster.layers.moe import MoEWithParallelDense, RoutedMoE
from model import ExpertLinear, MoE


def fits_experts(moe: nn.Module) -> bool:
    """Are they what the operations know? Reads no weight."""
    if isinstance(experts := vars(moe).get("experts"), Experts):
        return experts.are_those_of(moe)
    linears = moe.gate, moe.up, moe.down
    return (type(moe) in (MoE, RoutedMoE, MoEWithParallelDense) and moe.activation in GATED.values()
            and all(map(fits_leaves, linears)) and not any(map(is_packed, linears)))


def fits_head_matrices(module: nn.Module) -> bool:
    """Is it an ExpertLinear without bias, whatever its scheme, that the operations know?"""
    is_matrices = has_leaves(module) and len(module.shape) == 3
    if not is_matrices and not isinstance(module, ExpertLinear):
        return False
    return module.bias is None and fits_leaves(module)


class PackedExperts(OperationsLinear):
    """An ExpertLinear alone, whose rows are sorted: that of each head of latent attention."""

    def forward(self, x, ids, ends):
        x, ends = x.contiguous(), ends.contiguous()
        y = x.new_empty(len(x), self.shape[1])
        op = product(self, x, y, ends)
        native.run([ctypes.addressof(op)])
        return y


def packed(matrices: list[nn.Module], bias: Tensor | None) -> PackedExperts:
    """Experts' matrices [E, out, in], one or two beside each other, as one of E len(matrices) out
    rows.
    """
    leaves = [None if parts[0] is None else filled(torch.stack(parts, 1))
              for parts in zip(*map(on_disk, matrices))]
    n_expert, n_out, n_in = shape_of(matrices[0])
    _, weight, scales, _ = native.pack_weight(*leaves)
    new = PackedExperts(torch.Size((n_expert, len(matrices) * n_out, n_in)), bias, OPERATIONS)
    new.set_leaves((weight, scales, None))
    new.stands_for = methods_of(matrices[0])
    return new


def filled(leaf: Tensor) -> Tensor:
    """[E, matrices, out, (…)], each out filled up to whole blocks -> [E matrices out', (…)]."""
    short = -leaf.shape[2] % native.block_rows()
    return F.pad(leaf, (0, 0) * (leaf.dim() - 3) + (0, short)).flatten(0, 2)


class Experts:
    """In place of MoE.experts, whose matrices it makes its own."""

    def __init__(self, moe: MoE):
        self.moe = [moe]                           # in a list: no part of what is the mixture's
        up, down = (moe.gate, moe.up), moe.down
        bias = None if down.bias is None else torch.cat([m.bias for m in up], 1)
        self.gate_up = packed(up, bias)
        self.down = packed([down], down.bias)
        self.activation = next(name for name, f in GATED.items() if f is moe.activation)
        moe.gate, moe.up, moe.down = self.gate_up, None, self.down

    def are_those_of(self, moe: MoE) -> bool:
        return moe.gate is self.gate_up and moe.up is None and moe.down is self.down

    def give_back(self) -> None:
        """The mixture runs as it is read: gate, up and down are modules that it calls itself.

        gate stays the module that it is, with its hooks. Of a mixture whose parts were replaced
        nothing can be given back: its next call raises.
        """
        [moe] = self.moe
        if not self.are_those_of(moe):
            return
        n_expert, n_out, n_in = self.gate_up.shape
        shape = torch.Size((n_expert, n_out // 2, n_in))
        halves = [(t, t) if t is None else t.unflatten(0, (n_expert, 2, -1)).unbind(1)
                  for t in self.gate_up.leaves()]
        gate, up = ([t if t is None else t.flatten(0, 1).contiguous() for t in leaves]
                    for leaves in zip(*halves))
        bias, up_bias = 2 * [None]
        if self.gate_up.bias is not None:
            bias, up_bias = (half.contiguous() for half in self.gate_up.bias.chunk(2, 1))
        moe.up = PackedExperts(shape, up_bias, OPERATIONS)
        moe.up.stands_for = moe.gate.stands_for
        moe.up.set_leaves(up)
        moe.gate.shape = shape
        moe.gate.bias = bias
        moe.gate.set_leaves(gate)
        del moe.experts

    def __call__(self, x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """x [M, D], sorted by expert, the rows of e before ends[e] -> [M, D]."""
        if not self.are_those_of(*self.moe):
            raise TypeError("a compiled mixture's gate, up or down was replaced: replace them "
                            "before it is compiled")
        x, ends = x.contiguous(), ends.int().contiguous()
        hidden = torch.empty(len(x), self.down.shape[2])
        y = torch.empty_like(x)
        up = product(self.gate_up, x, hidden, ends)
        up.activation, up.gated = native.ACTIVATIONS[self.activation], True
        down = product(self.down, hidden, y, ends)
        native.run([ctypes.addressof(op) for op in (up, down)])
        return y


def product(linear: PackedLinear, x: Tensor, out: Tensor, ends: Tensor) -> native.Linear:
    n_expert, *shape = linear.shape
    weights = arguments(linear.packed, linear.scales, shape[1])
    return native.linear(*weights, shape, linear.bias, M=len(x), x=x, out=out,
                          x_bits=native.x_bits(out.dtype), n_expert=n_expert, ends=ends)
