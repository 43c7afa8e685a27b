"""Linears whose weights have native.py's layout, made of those in any other; norms as it has them.

    new = packed(linear)                           # an OperationsLinear, for use anywhere
"""

from functools import cache

import torch
from torch import Tensor, nn

from gpt_faster.kernels.as_read import unknown_functions
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.products import unpack_int4_cpu, unpack_int8_cpu
from gpt_faster.kernels.linear import (
    PackedEmbedding,
    PackedLinear,
    is_quantized,
    methods_of,
    stands_for,
)
from gpt_faster.kernels.plain import Kernel
from gpt_faster.layers.norms import HeadLayerNorm, LayerNorm, Scale, WideNorm
from quantize import Int4, Int8

DTYPES = (torch.float32, torch.bfloat16)


def format_of(weight: Tensor, scales: Tensor | None) -> int:
    """Of pack_weight()'s."""
    if weight.dtype == torch.int32:
        return native.BF16 if scales is None else native.INT4
    return {torch.float32: native.FP32, torch.int16: native.INT8}[weight.dtype]


def product(x: Tensor, weight: Tensor, scales: Tensor | None, _=None) -> Tensor:
    """x [M, in] -> [M, out'], out' being filled up to whole blocks."""
    shape = weight.shape[0] * weight.shape[2], x.shape[1]
    return native.product(x, *arguments(weight, scales, x.shape[1]), shape)


def arguments(weight: Tensor, scales: Tensor | None, n_in: int) -> tuple:
    kind = format_of(weight, scales)
    group = n_in // scales.shape[1] if kind == native.INT4 else 0
    return kind, weight, scales, group


def rows(weight: Tensor, ids: Tensor) -> Tensor:
    """As an embedding: ids [...] -> [..., in], of fp32, bf16 or int8."""
    n = weight.shape[2]
    as_stored = {torch.int32: torch.bfloat16, torch.int16: torch.int8}
    words = weight[ids // n, :, ids % n]
    return words.view(as_stored.get(weight.dtype, weight.dtype))


OPERATIONS = Kernel("cpu ops", product, rows=rows)


class NoWeight(nn.Module):
    """A module whose weight has native.py's layout. It is not called so: whoever edits a weight
    means other numbers."""

    def __getattr__(self, name):
        if name == "weight":
            raise AttributeError(NO_WEIGHT)
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        if name == "weight":
            raise AttributeError(NO_WEIGHT)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Of a model that is not compiled: its weights would be left over without a word."""
        if f"{prefix}weight" in state_dict:
            raise AttributeError(NO_WEIGHT)
        super()._load_from_state_dict(state_dict, prefix, *args)


NO_WEIGHT = ("a compiled model's weights are packed: edit .weight before it is compiled, or put "
             "another linear in the place of this one (.dequantized() gives its numbers)")


class OperationsLinear(NoWeight, PackedLinear):
    names = "packed", "scales", "zeros"

    def dequantized(self) -> Tensor:
        """A copy of the weight [out, in], in fp32."""
        rows = self.kernel.product(torch.eye(self.shape[-1]), *self.leaves())      # [in, out']
        return rows[:, :self.shape[0]].T.contiguous()


class OperationsEmbedding(NoWeight, PackedEmbedding):
    names = "packed", "scales"


def is_packed(linear: nn.Module) -> bool:
    return isinstance(linear, OperationsLinear)


def shape_of(linear: nn.Module) -> torch.Size:
    """[(E,) out, in]"""
    return linear.shape if has_leaves(linear) else linear.weight.shape


def has_leaves(linear: nn.Module) -> bool:
    """Is it quantized, or packed?"""
    return isinstance(linear, PackedLinear) or is_quantized(linear)


def on_disk(linear: nn.Module) -> tuple:
    """A linear's or experts' weight [(E,) out, in], scales and zeros as they lie on disk."""
    if not has_leaves(linear):
        return linear.weight, None, None
    weight, scales, zeros = linear.leaves()
    if is_quantized(linear):
        return weight, scales, zeros
    if linear.kernel.name == "int8 cpu":
        return unpack_int8_cpu(weight), scales, None
    if linear.kernel.name == "int4 cpu" and zeros is None:
        n_out = linear.shape[-2]
        scales, zeros = (t[..., :n_out, :] for t in scales.movedim(-3, -2).unbind(-1))
        weight = unpack_int4_cpu(weight.flatten(0, -2)).view(*weight.shape[:-1], -1)
        return weight[..., :n_out, :], scales, zeros
    return weight, scales, zeros


def fits_leaves(linear: nn.Module) -> bool:
    """Can native.pack_weight() lay out what on_disk() gives, or is it done? Reads no weight."""
    if is_packed(linear):
        return True
    if not has_leaves(linear):
        return linear.weight.dtype in DTYPES
    if is_quantized(linear):
        fits_groups = linear.shape[-1] % 32 == 0 and (linear.scheme.groupsize or 32) % 32 == 0
        return (fits_groups and type(linear.scheme) in (Int8, Int4)
                and not unknown_functions(stands_for({type(linear)})))
    packed_int4 = linear.kernel.name == "int4 cpu" and linear.zeros is None
    n_in, scales, group = linear.shape[-1], linear.scales, 32
    if packed_int4 or linear.zeros is not None:
        group = n_in // scales.shape[-3 if packed_int4 else -1]
    known = linear.kernel.name in ("int8 cpu", "int4 cpu", "plain")
    return known and n_in % 32 == 0 and group % 32 == 0


def fits_linear(linear: nn.Module) -> bool:
    """Can packed() do it, or is it done?"""
    alone = type(linear) is nn.Linear or has_leaves(linear) and len(linear.shape) == 2
    return alone and fits_leaves(linear) and fits_bias(linear)


def packed(linear: nn.Module) -> OperationsLinear:
    """The same linear with its weight in native.py's layout."""
    if is_packed(linear):
        return linear
    weight, scales, zeros = on_disk(linear)
    _, weight, scales, _ = native.pack_weight(weight, scales, zeros)
    new = OperationsLinear(torch.Size(shape_of(linear)), linear.bias, OPERATIONS)
    new.set_leaves((weight, scales, None))
    new.stands_for = methods_of(linear)
    return new


def fits_bias(linear: nn.Module) -> bool:
    bias = linear.bias
    return bias is None or (bias.dtype in DTYPES and bias.is_contiguous()
                            and bias.device.type == "cpu")


def are_floats(*tensors: Tensor | None) -> bool:
    """May operations read them where they are? In fp32, in one piece, on the CPU."""
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous() and not t.is_meta
                             and t.device.type == "cpu") for t in tensors)


def fits_norm(norm: nn.Module) -> bool:
    known = (nn.Identity, LayerNorm, WideNorm, Scale)
    if isinstance(norm, HeadLayerNorm):
        return False
    shared = "mean_square" in vars(norm)           # by ranks
    tensors = [getattr(norm, name, None) for name in ("weight", "bias")]
    if shared or not are_floats(*tensors):
        return False
    if type(norm) in known:
        return True
    return hasattr(norm, "eps") and (norm.weight is None or norm.weight.dim() == 1)


def norm_struct(module: nn.Module, dim: int = 0) -> native.Norm:
    """dim: of a norm that may have no weights."""
    if type(module) in (nn.Identity, Scale):
        return native.Norm()
    if isinstance(module, LayerNorm):
        return native.Norm(kind=2, eps=module.eps, weight=module.weight, bias=module.bias)
    weight = ones(dim) if module.weight is None else module.weight
    return native.Norm(kind=1, eps=module.eps, weight=weight)


@cache
def ones(n: int) -> Tensor:
    """fp32 [n], which stay where they are."""
    return torch.ones(n)
