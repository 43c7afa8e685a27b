"""Linears and the embedding in a kernel's layout, and the linear whose single row is a matvec.

A model's quantized linears are exchanged for these, as long as quantize.py is as the kernels know
it: where it is known that this kernel is to run, while the model is loaded, so that no second copy
is in memory. The loader fills the tensors as they lie on disk; pack() then gives them the kernel's
layout.

    use_packed_linears(model, dtype, device)       # between put_quantized_linears() and loading
    pack_linears(model)                            # or later, on a CPU
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_faster.kernels import private
from gpt_faster.kernels.as_read import unknown_functions, unknown_hook, unknown_override
from gpt_faster.kernels.cpu.products import INT4_CPU, INT8_CPU
from gpt_faster.kernels.cuda.matvec import MOST_ROWS, matvec
from gpt_faster.kernels.cuda.products import INT4_CUDA, INT8_CUDA, has_kernels
from gpt_faster.kernels.moe import packed_rows
from gpt_faster.kernels.plain import PLAIN, Kernel
from gpt_faster.kernels.private import is_compiling
from model import ExpertLinear, grouped_mm
from quantize import (
    Int4,
    Int8,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    Scheme,
    dequantize,
)
from tp import share, shared_by

EXCHANGED = (QuantizedLinear, QuantizedExperts, QuantizedEmbedding)
# the methods that the kernels stand for
STANDS_FOR = {QuantizedLinear: ("forward", "leaves"), QuantizedExperts: ("forward", "leaves"),
              QuantizedEmbedding: ("forward",), Int8: ("product", "dequantize"),
              Int4: ("product", "dequantize"), nn.Linear: ("forward",), nn.Embedding: ("forward",),
              ExpertLinear: ("forward", "each_row")}


class MatvecLinear(nn.Linear):
    """A single row compiles to a fused matvec; everything else is F.linear."""

    def forward(self, x):
        if not is_compiling():
            return F.linear(x, self.weight, self.bias)
        n_row = x.shape[:-1].numel()
        if n_row <= MOST_ROWS and has_kernels(x.device):
            y = matvec(x.reshape(n_row, -1), self.weight, bias=self.bias)
            return y.view(*x.shape[:-1], -1)
        if n_row == 1:
            y = (self.weight.float() * x.view(-1).float()).sum(-1)
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A Linear whose tensors have the layout of a kernel's: those that are not None.

    names: what they are called. On a CPU's operations the weight is not: nobody edits it by chance.
    stands_for: the classes and methods whose code it does the same as.
    """

    names = "weight", "scales", "zeros"

    def __init__(self, shape: torch.Size, bias: Tensor | None, kernel: Kernel):
        super().__init__()
        self.shape = shape
        self.bias = bias
        self.kernel = kernel
        self.stands_for = ()
        self.embeddings = ()                       # that share its weight
        for name in self.names:
            setattr(self, name, None)

    @classmethod
    def of(cls, linear: QuantizedLinear, kernel: Kernel) -> "PackedLinear":
        """The same linear, not packed yet."""
        new = cls(linear.shape, linear.bias, kernel)
        new.set_leaves(linear.leaves())
        new.stands_for = methods_of(linear)
        return new

    def leaves(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return tuple(getattr(self, name) for name in self.names)

    def set_leaves(self, leaves) -> None:
        for name, t in zip(self.names, leaves):
            if t is not getattr(self, name):       # else it may be shared with the embedding
                setattr(self, name, t if t is None else nn.Parameter(t, requires_grad=False))

    def pack(self) -> None:
        """Give the tensors, which lie as on disk, the kernel's layout."""
        self.set_leaves(self.packed_leaves())
        for embedding in self.embeddings:
            embedding.share(self)

    def packed_leaves(self) -> tuple:
        return self.kernel.pack(*self.leaves())

    def forward(self, x):
        y = self.kernel.product(x.reshape(-1, x.shape[-1]), *self.leaves())
        y = y[:, :self.shape[0]].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class PackedExpertLinear(PackedLinear):
    """An ExpertLinear [E, out, in]: a layout for each expert."""

    def packed_leaves(self):
        leaves = self.leaves()
        if self.kernel is PLAIN:
            return leaves
        experts = range(self.shape[0])
        each = [self.kernel.pack(*(t if t is None else t[e] for t in leaves)) for e in experts]
        return [None if t[0] is None else torch.stack(t) for t in zip(*each)]

    def forward(self, x, ids, ends):               # as ExpertLinear
        if x.device.type == "cpu" or ends is None:
            y = packed_rows(x, ids, self.leaves(), self.kernel, self.shape[1])
        else:
            y = grouped_mm(x, dequantize(*self.leaves(), x.dtype), ends)
        return y if self.bias is None else y + self.bias[ids]


class PackedEmbedding(nn.Module):
    """Shares the head's weight, and has its scales [V], if any: then it is int8."""

    names = "weight", "scales"

    def __init__(self, head: PackedLinear, scales: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.stands_for = ()
        setattr(self, self.names[0], head.leaves()[0])
        self.scales = scales
        self.dtype = dtype
        self.kernel = head.kernel
        self.dim = head.shape[1]

    def share(self, head: PackedLinear) -> None:
        """One matrix again: packing gave the head new tensors."""
        self.weight, self.scales = head.weight, head.scales

    def forward(self, ids):
        rows = self.kernel.rows(getattr(self, self.names[0]), ids)[..., :self.dim]
        if self.scales is None:
            return rows
        return dequantize(rows, self.scales[ids], None, self.dtype)


# ---- In place of quantize.py's ------------------------------------------------------------------

def is_quantized(module: nn.Module) -> bool:
    """Is it one of quantize.py's linears, as they lie on disk?"""
    return type(module) in (QuantizedLinear, QuantizedExperts)


def use_packed_linears(model: nn.Module, dtype: torch.dtype, device, filled: bool = False) -> None:
    """Exchange the quantized linears of a model for packed ones. In place.

    dtype: of the activations; filled: the weights are loaded already. Where quantize.py or a scheme
    is not as the kernels know it, its linears stay as they are, and a note says why; so does a
    linear that has a hook or a method of its own.
    """
    quantized = [(name, m) for name, m in model.named_modules() if is_quantized(m)
                 and not (unknown_hook(m, name) or unknown_override(m, name))]
    if not quantized:
        return
    if what := unknown_functions(stands_for({type(linear) for _, linear in quantized})):
        private.note(f"{what}: quantized linears run as they are read")
        return
    for name, linear in quantized:
        kernel = kernel_for(linear.scheme, device, dtype, linear.shape)
        if kernel is None:
            continue
        kind = PackedLinear if type(linear) is QuantizedLinear else PackedExpertLinear
        packed = kind.of(linear, kernel)
        if forward := shared_by(linear):
            share(packed, forward)
        model.set_submodule(name, packed)
        for where, embed in list(model.named_modules()):
            if type(embed) is QuantizedEmbedding and embed.weight is linear.weight:
                new = PackedEmbedding(packed, packed.scales, dtype)
                new.stands_for = methods_of(embed)
                packed.embeddings = (new,)
                model.set_submodule(where, new)
        if filled:
            packed.pack()


def pack_linears(model: nn.Module) -> None:
    """The same of a loaded model on a CPU: what runs uncompiled. In place, linear by linear."""
    use_packed_linears(model, model.dtype, "cpu", filled=True)


def methods_of(module: nn.Module) -> tuple[tuple[type, str], ...]:
    """The code that what is packed of a linear, experts or an embedding stands for."""
    if isinstance(module, PackedLinear | PackedEmbedding):
        return module.stands_for
    kinds = [type(module), *([type(module.scheme)] if hasattr(module, "scheme") else [])]
    return tuple((kind, method) for kind in kinds for method in STANDS_FOR.get(kind, ()))


def stands_for(modules: Iterable[type] = EXCHANGED) -> list[Callable]:
    """The methods, as they are now, of these modules, of the embedding and of the schemes."""
    kinds = [*modules, QuantizedEmbedding, Int8, Int4]
    return [getattr(kind, name) for kind in kinds for name in STANDS_FOR[kind]]


def kernel_for(scheme: Scheme, device, dtype: torch.dtype, shape) -> Kernel | None:
    """The fastest that this device has for this dtype and shape [..., out, in].

    None: the scheme is not one of ours.
    """
    on_cpu = torch.device(device).type == "cpu"
    if type(scheme) is Int8:
        if on_cpu and shape[-1] % 32 == 0:
            return INT8_CPU
        return INT8_CUDA if has_kernels(device) and shape[-1] % 16 == 0 else PLAIN
    if type(scheme) is not Int4:
        return None
    if scheme.groupsize % 32:
        return PLAIN
    if on_cpu:
        return INT4_CPU if dtype == torch.bfloat16 else PLAIN
    return INT4_CUDA if has_kernels(device) else PLAIN
