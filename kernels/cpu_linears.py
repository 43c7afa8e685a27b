"""Linears whose weights have cpu_ops' layout, made of those in any other.

    new = packed(linear)                           # a PackedLinear, for use anywhere
"""

import torch
from torch import Tensor, nn

from kernels import cpu_ops
from kernels.cpu import unpack_int4_cpu, unpack_int8_cpu
from kernels.linear import PackedLinear
from kernels.plain import Kernel

DTYPES = (torch.float32, torch.bfloat16)


def format_of(weight: Tensor, scales: Tensor | None) -> int:
    """Of pack_weight()'s."""
    if weight.dtype == torch.int32:
        return cpu_ops.BF16 if scales is None else cpu_ops.INT4
    return {torch.float32: cpu_ops.FP32, torch.int16: cpu_ops.INT8}[weight.dtype]


def product(x: Tensor, weight: Tensor, scales: Tensor | None, _=None) -> Tensor:
    """x [M, in] -> [M, out'], out' being filled up to whole blocks."""
    shape = weight.shape[0] * weight.shape[2], x.shape[1]
    return cpu_ops.product(x, *arguments(weight, scales, x.shape[1]), shape)


def arguments(weight: Tensor, scales: Tensor | None, n_in: int) -> tuple:
    kind = format_of(weight, scales)
    group = n_in // scales.shape[1] if kind == cpu_ops.INT4 else 0
    return kind, weight, scales, group


def rows(weight: Tensor, ids: Tensor) -> Tensor:
    """As an embedding: ids [...] -> [..., in], of fp32, bf16 or int8."""
    n = weight.shape[2]
    as_stored = {torch.int32: torch.bfloat16, torch.int16: torch.int8}
    words = weight[ids // n, :, ids % n]
    return words.view(as_stored.get(weight.dtype, weight.dtype))


OPERATIONS = Kernel("cpu ops", product, rows=rows)


def on_disk(linear: nn.Module) -> tuple | None:
    """A linear's weight, scales and zeros in the layouts of plain.py; None: another layout."""
    if type(linear) is nn.Linear:
        return linear.weight, None, None
    if not isinstance(linear, PackedLinear) or len(linear.shape) > 2:
        return None
    weight, scales, zeros = linear.leaves()
    if linear.kernel.name == "int8 cpu":
        return unpack_int8_cpu(weight), scales, None
    if linear.kernel.name == "int4 cpu" and zeros is None:
        scales, zeros = (t[:linear.shape[0]] for t in scales.permute(2, 1, 0))
        return unpack_int4_cpu(weight)[:linear.shape[0]], scales, zeros
    return linear.leaves() if linear.kernel.name in ("plain", "int4 cpu") else None


def fits_linear(linear: nn.Module) -> bool:
    """Can pack() do it? Reads no weight."""
    if isinstance(linear, PackedLinear):
        scales, n_in = linear.scales, linear.shape[-1]
        grouped = scales is not None and scales.dim() > 1
        group = n_in // scales.shape[0 if scales.dim() == 3 else 1] if grouped else 32
        known = linear.kernel.name in ("int8 cpu", "int4 cpu", "plain")
        return known and len(linear.shape) == 2 and n_in % 32 == 0 and group % 32 == 0
    return type(linear) is nn.Linear and linear.weight.dtype in DTYPES


def packed(linear: nn.Module) -> PackedLinear:
    """The same linear with its weight in cpu_ops' layout."""
    weight, scales, zeros = on_disk(linear)
    _, weight, scales, _ = cpu_ops.pack_weight(weight, scales, zeros)
    bias = linear.bias
    shape = torch.Size(linear.shape if isinstance(linear, PackedLinear) else linear.weight.shape)
    new = PackedLinear(shape, bias, OPERATIONS)
    new.set_leaves((weight, scales, None))
    return new
