"""Converts linears of any layout to native.py's weight layout, and norms to its structs.

    new = pack_linear(linear)                      # an OperationsLinear: works in any module
"""

from functools import cache

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.products import unpack_int4_cpu, unpack_int8_cpu
from gpt_faster.kernels.linear import (
    PackedEmbedding,
    PackedLinear,
    implemented_methods,
    is_quantized,
    methods_implemented_by,
)
from gpt_faster.kernels.modifications import find_modified
from gpt_faster.kernels.plain import Kernel
from gpt_faster.layers.fp4 import Fp4
from gpt_faster.layers.norms import HeadLayerNorm, LayerNorm, Scale, WideNorm
from quantize import Int4, Int8

DTYPES = (torch.float32, torch.bfloat16)


def format_of(weight: Tensor, scales: Tensor | None) -> int:
    """The format constant of a weight from native.pack_weight()."""
    if weight.dtype == torch.int32:
        return native.BF16 if scales is None else native.INT4
    return {torch.float32: native.FP32, torch.int16: native.INT8,
            torch.uint8: native.FP4}[weight.dtype]


def product(x: Tensor, weight: Tensor, scales: Tensor | None, _=None) -> Tensor:
    """x [M, in] -> [M, out'], out': out padded to whole blocks."""
    shape = weight.shape[0] * weight.shape[2], x.shape[1]
    return native.product(x, *weight_args(weight, scales, x.shape[1]), shape)


def weight_args(weight: Tensor, scales: Tensor | None, n_in: int) -> tuple:
    kind = format_of(weight, scales)
    group = n_in // scales.shape[1] if kind == native.INT4 else 0
    if kind == native.FP4:
        padded = -(-n_in // 32) * 32
        group = padded // (weight.shape[1] - padded // 2)      # codes are followed by the scales
    return kind, weight, scales, group


def embedding_lookup(weight: Tensor, ids: Tensor) -> Tensor:
    """ids [...] -> [..., in] in fp32, bf16 or int8."""
    n = weight.shape[2]
    as_stored = {torch.int32: torch.bfloat16, torch.int16: torch.int8}
    words = weight[ids // n, :, ids % n]
    return words.view(as_stored.get(weight.dtype, weight.dtype))


NATIVE_KERNEL = Kernel("cpu ops", product, rows=embedding_lookup)


class HiddenWeight(nn.Module):
    """A module whose weight has native.py's layout. Access to .weight raises: user code that edits
    it expects the [out, in] layout.
    """

    def __getattr__(self, name):
        if name == "weight":
            raise AttributeError(NO_WEIGHT)
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        if name == "weight":
            raise AttributeError(NO_WEIGHT)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Raise for the state dict of an uncompiled model, whose weights would be ignored."""
        if f"{prefix}weight" in state_dict:
            raise AttributeError(NO_WEIGHT)
        super()._load_from_state_dict(state_dict, prefix, *args)


NO_WEIGHT = ("a compiled model's weights are packed: edit .weight before it is compiled, or "
             "replace this module with another linear (.dequantized() copies the weight)")


class OperationsLinear(HiddenWeight, PackedLinear):
    tensor_names = "packed", "scales", "zeros"

    def dequantized(self) -> Tensor:
        """A copy of the weight [out, in], in fp32."""
        rows = self.kernel.product(torch.eye(self.shape[-1]), *self.tensors())     # [in, out']
        return rows[:, :self.shape[0]].T.contiguous()


class OperationsEmbedding(HiddenWeight, PackedEmbedding):
    tensor_names = "packed", "scales"


def is_packed(linear: nn.Module) -> bool:
    return isinstance(linear, OperationsLinear)


def shape_of(linear: nn.Module) -> torch.Size:
    """[(E,) out, in]"""
    return linear.shape if is_quantized_or_packed(linear) else linear.weight.shape


def is_quantized_or_packed(linear: nn.Module) -> bool:
    return isinstance(linear, PackedLinear) or is_quantized(linear)


def disk_layout(linear: nn.Module) -> tuple:
    """weight [(E,) out, in], scales and zeros of a linear or of experts, in the layout on disk."""
    if not is_quantized_or_packed(linear):
        return linear.weight, None, None
    if is_quantized(linear):
        return linear.leaves()
    weight, scales, zeros = linear.tensors()
    if linear.kernel.name == "int8 cpu":
        return unpack_int8_cpu(weight), scales, None
    if linear.kernel.name == "int4 cpu" and zeros is None:
        n_out = linear.shape[-2]
        scales, zeros = (t[..., :n_out, :] for t in scales.movedim(-3, -2).unbind(-1))
        weight = unpack_int4_cpu(weight.flatten(0, -2)).view(*weight.shape[:-1], -1)
        return weight[..., :n_out, :], scales, zeros
    return weight, scales, zeros


def fp4_group(linear: nn.Module) -> int:
    """The group size of a linear in fp4, in the layout on disk; 0: it is not in fp4."""
    is_fp4 = is_quantized(linear) and type(linear.scheme) is Fp4
    return linear.scheme.groupsize if is_fp4 else 0


def can_pack(linear: nn.Module) -> bool:
    """True if it is packed already, or native.pack_weight() can pack disk_layout(linear). Does not
    read the weights.
    """
    if is_packed(linear):
        return True
    if not is_quantized_or_packed(linear):
        return linear.weight.dtype in DTYPES
    if is_quantized(linear):
        groupsize = 32 if fp4_group(linear) else linear.scheme.groupsize or 32
        are_groups_aligned = linear.shape[-1] % 32 == 0 and groupsize % 32 == 0
        return (are_groups_aligned and type(linear.scheme) in (Int8, Int4, Fp4)
                and not find_modified(implemented_methods({type(linear)})))
    is_packed_int4 = linear.kernel.name == "int4 cpu" and linear.zeros is None
    n_in, scales, group = linear.shape[-1], linear.scales, 32
    if is_packed_int4 or linear.zeros is not None:
        group = n_in // scales.shape[-3 if is_packed_int4 else -1]
    has_known_kernel = linear.kernel.name in ("int8 cpu", "int4 cpu", "plain")
    return has_known_kernel and n_in % 32 == 0 and group % 32 == 0


def supports_linear(linear: nn.Module) -> bool:
    """True if it is packed already, or pack_linear() can pack it."""
    is_2d = is_quantized_or_packed(linear) and len(linear.shape) == 2
    is_linear = type(linear) is nn.Linear or is_2d
    return is_linear and can_pack(linear) and supports_bias(linear)


def pack_linear(linear: nn.Module) -> OperationsLinear:
    """The linear with its weight in native.py's layout."""
    if is_packed(linear):
        return linear
    weight, scales, zeros = disk_layout(linear)
    _, weight, scales, _ = native.pack_weight(weight, scales, zeros, fp4_group(linear))
    new = OperationsLinear(torch.Size(shape_of(linear)), linear.bias, NATIVE_KERNEL)
    new.set_tensors((weight, scales, None))
    new.implements = methods_implemented_by(linear)
    return new


def supports_bias(linear: nn.Module) -> bool:
    bias = linear.bias
    return bias is None or (bias.dtype in DTYPES and bias.is_contiguous()
                            and bias.device.type == "cpu")


def is_fp32_on_cpu(*tensors: Tensor | None) -> bool:
    """True if operations can read these tensors directly: fp32, contiguous, on the CPU."""
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous() and not t.is_meta
                             and t.device.type == "cpu") for t in tensors)


def supports_norm(norm: nn.Module) -> bool:
    known = (nn.Identity, LayerNorm, WideNorm, Scale)
    if isinstance(norm, HeadLayerNorm):
        return False
    is_sharded = "mean_square" in vars(norm)       # tensor parallel
    tensors = [getattr(norm, name, None) for name in ("weight", "bias")]
    if is_sharded or not is_fp32_on_cpu(*tensors):
        return False
    if type(norm) in known:
        return True
    return hasattr(norm, "eps") and (norm.weight is None or norm.weight.dim() == 1)


def norm_struct(module: nn.Module, dim: int = 0) -> native.Norm:
    """dim: width of a norm that may have no weight."""
    if type(module) in (nn.Identity, Scale):
        return native.Norm()
    if isinstance(module, LayerNorm):
        return native.Norm(kind=2, eps=module.eps, weight=module.weight, bias=module.bias)
    weight = fp32_ones(dim) if module.weight is None else module.weight
    return native.Norm(kind=1, eps=module.eps, weight=weight)


@cache
def fp32_ones(n: int) -> Tensor:
    """fp32 [n], cached: structs keep its address."""
    return torch.ones(n)
