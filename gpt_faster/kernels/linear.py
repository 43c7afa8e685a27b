"""Quantized linears and embeddings in a kernel's weight layout; a linear that compiles to a matvec.

They replace quantize.py's modules if quantize.py is unmodified; before loading, if the kernel is
known by then, which avoids a second copy in memory. The loader fills the tensors in the layout on
disk, then pack() converts them to the kernel's layout.

    use_packed_linears(model, dtype, device)       # between put_quantized_linears() and loading
    pack_linears(model)                            # or later, on a CPU
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu.products import INT4_CPU, INT8_CPU
from gpt_faster.kernels.cuda.matvec import MAX_ROWS, matvec
from gpt_faster.kernels.cuda.products import INT4_CUDA, INT8_CUDA, has_kernels
from gpt_faster.kernels.modifications import find_modified, user_hook, user_override
from gpt_faster.kernels.moe import packed_rows
from gpt_faster.kernels.plain import PLAIN, Kernel
from gpt_faster.kernels.torch_internals import is_compiling
from gpt_faster.layers.fp4 import Fp4
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

QUANTIZED_MODULES = (QuantizedLinear, QuantizedExperts, QuantizedEmbedding)
# the methods that packed modules implement
IMPLEMENTED = {QuantizedLinear: ("forward", "leaves"), QuantizedExperts: ("forward", "leaves"),
              QuantizedEmbedding: ("forward",), Int8: ("product", "dequantize"),
              Int4: ("product", "dequantize"), Fp4: ("product", "dequantize"),
              nn.Linear: ("forward",), nn.Embedding: ("forward",),
              ExpertLinear: ("forward", "each_row")}


class MatvecLinear(nn.Linear):
    """Up to MAX_ROWS compiled rows are a fused matvec; everything else is F.linear."""

    def forward(self, x):
        if not is_compiling():
            return F.linear(x, self.weight, self.bias)
        n_row = x.shape[:-1].numel()
        if n_row <= MAX_ROWS and has_kernels(x.device):
            y = matvec(x.reshape(n_row, -1), self.weight, bias=self.bias)
            return y.view(*x.shape[:-1], -1)
        if n_row == 1:
            y = (self.weight.float() * x.view(-1).float()).sum(-1)
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A Linear whose weight, scales and zeros (some may be None) have a kernel's layout.

    tensor_names: their attributes. The CPU operations' weight is not called `weight`, so that an
    edit of it raises. implements: (class, method) pairs whose code this module replaces.
    """

    tensor_names = "weight", "scales", "zeros"

    def __init__(self, shape: torch.Size, bias: Tensor | None, kernel: Kernel):
        super().__init__()
        self.shape = shape
        self.bias = bias
        self.kernel = kernel
        self.implements = ()
        self.embeddings = ()                       # share its weight
        for name in self.tensor_names:
            setattr(self, name, None)

    @classmethod
    def of(cls, linear: QuantizedLinear, kernel: Kernel) -> "PackedLinear":
        """The same linear, in the layout on disk; call pack() next."""
        new = cls(linear.shape, linear.bias, kernel)
        new.set_tensors(linear.leaves())
        new.implements = methods_implemented_by(linear)
        return new

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return tuple(getattr(self, name) for name in self.tensor_names)

    def set_tensors(self, tensors) -> None:
        for name, t in zip(self.tensor_names, tensors):
            if t is not getattr(self, name):       # else it may be shared with the embedding
                setattr(self, name, t if t is None else nn.Parameter(t, requires_grad=False))

    def pack(self) -> None:
        """Convert the tensors from the layout on disk to the kernel's."""
        self.set_tensors(self.packed_tensors())
        for embedding in self.embeddings:
            embedding.share(self)

    def packed_tensors(self) -> tuple:
        return self.kernel.pack(*self.tensors())

    def forward(self, x):
        y = self.kernel.product(x.reshape(-1, x.shape[-1]), *self.tensors())
        y = y[:, :self.shape[0]].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class PackedExpertLinear(PackedLinear):
    """An ExpertLinear [E, out, in]; each expert is packed separately."""

    def packed_tensors(self):
        tensors = self.tensors()
        if self.kernel is PLAIN:
            return tensors
        experts = range(self.shape[0])
        each = [self.kernel.pack(*(t if t is None else t[e] for t in tensors)) for e in experts]
        return [None if t[0] is None else torch.stack(t) for t in zip(*each)]

    def forward(self, x, ids, ends):               # as ExpertLinear
        if x.device.type == "cpu" or ends is None:
            y = packed_rows(x, ids, self.tensors(), self.kernel, self.shape[1])
        else:
            y = grouped_mm(x, self.kernel.dequantize(*self.tensors(), x.dtype), ends)
        return y if self.bias is None else y + self.bias[ids]


class PackedEmbedding(nn.Module):
    """Shares the head's weight, and its scales [V] if it is int8."""

    tensor_names = "weight", "scales"

    def __init__(self, head: PackedLinear, scales: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.implements = ()
        setattr(self, self.tensor_names[0], head.tensors()[0])
        self.scales = scales
        self.dtype = dtype
        self.kernel = head.kernel
        self.dim = head.shape[1]

    def share(self, head: PackedLinear) -> None:
        """Share the head's tensors again: packing created new ones."""
        self.weight, self.scales = head.weight, head.scales

    def forward(self, ids):
        rows = self.kernel.rows(getattr(self, self.tensor_names[0]), ids)[..., :self.dim]
        if self.scales is None:
            return rows
        return dequantize(rows, self.scales[ids], None, self.dtype)


# ---- Replacing quantize.py's modules ------------------------------------------------------------

def is_quantized(module: nn.Module) -> bool:
    """Is it one of quantize.py's linears, not packed?"""
    return type(module) in (QuantizedLinear, QuantizedExperts)


def use_packed_linears(model: nn.Module, dtype: torch.dtype, device, loaded: bool = False) -> None:
    """Replace the quantized linears of a model by packed ones. In place.

    dtype: of the activations; loaded: the weights are loaded already. Keeps a linear if it, or an
    embedding that shares its weight, has a hook or an overridden method; if quantize.py was
    modified, keeps all and prints a note.
    """
    modules = list(model.named_modules())
    embeddings = [(where, m) for where, m in modules if type(m) is QuantizedEmbedding]
    sharing = {name: [(where, m) for where, m in embeddings if m.weight is linear.weight]
               for name, linear in modules if is_quantized(linear)}
    quantized = [(name, m) for name, m in modules if is_quantized(m)
                 and not any(user_hook(x, at) or user_override(x, at)
                             for at, x in [(name, m), *sharing[name]])]
    if not quantized:
        return
    if reason := find_modified(implemented_methods({type(linear) for _, linear in quantized})):
        torch_internals.note_once(f"{reason}; running quantized linears in eager PyTorch")
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
        for where, embed in sharing[name]:
            new = PackedEmbedding(packed, packed.scales, dtype)
            new.implements = methods_implemented_by(embed)
            packed.embeddings += (new,)
            model.set_submodule(where, new)
        if loaded:
            packed.pack()


def pack_linears(model: nn.Module) -> None:
    """use_packed_linears() for a loaded model on a CPU that runs eagerly. In place, one by one."""
    use_packed_linears(model, model.dtype, "cpu", loaded=True)


def methods_implemented_by(module: nn.Module) -> tuple[tuple[type, str], ...]:
    """(class, method) pairs whose code the packed form of this module implements."""
    if isinstance(module, PackedLinear | PackedEmbedding):
        return module.implements
    kinds = [type(module), *([type(module.scheme)] if hasattr(module, "scheme") else [])]
    return tuple((kind, method) for kind in kinds for method in IMPLEMENTED.get(kind, ()))


def implemented_methods(modules: Iterable[type] = QUANTIZED_MODULES) -> list[Callable]:
    """The current methods of these modules, of the embedding and of the schemes."""
    kinds = [*modules, QuantizedEmbedding, Int8, Int4, Fp4]
    return [getattr(kind, name) for kind in kinds for name in IMPLEMENTED[kind]]


def kernel_for(scheme: Scheme, device, dtype: torch.dtype, shape) -> Kernel | None:
    """The fastest kernel of this device for this dtype and weight shape [..., out, in].

    None: a user's scheme, which has no kernel.
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
