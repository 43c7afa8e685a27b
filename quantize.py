"""Quantized weights: what a scheme is, rounding to nearest, and the linears that use it.

A scheme is one object: the tensors it stores, how weights become these and back, and the kernel for
a device. Whatever treats schemes differently asks it. Knows no files and no families; kernels/ has
the products and the layouts in memory. On disk, G being the group size:

    int8     weight int8  [out, in]     scales [out]                 w = code * scale
    int4-gG  weight uint8 [out, in/2]   scales, zeros [out, in/G]    w = (code - 8) * scale + zero
             a byte holds two neighbouring codes, the first one in its low half

    python quantize.py --checkpoint_path org/name --mode int4 --groupsize 32
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

if __name__ == "__main__":
    from kernels.quick_import import need_torch
    need_torch()
import torch
from torch import Tensor, nn

from kernels.cpu import INT4_CPU, INT8_CPU
from kernels.cuda import INT4_CUDA, INT8_CUDA, has_kernels
from kernels.grid import best_grid
from kernels.linear import PackedEmbedding, PackedLinear
from kernels.moe import packed_rows
from kernels.plain import PLAIN, Kernel, dequantize, pack_nibbles
from model import ExpertLinear, grouped_mm

LEAVES = ("weight", "scales", "zeros")             # what a scheme may store of a linear
MODES = ("int8", "int4")                           # schemes without their group size
GROUPSIZES = (32, 64, 128, 256)
LINEARS = re.compile(r"\.(w\w+|[qkv]|gate|up|down)\.weight$")     # not routers: small and touchy


# ---- Schemes ------------------------------------------------------------------------------------

class Scheme:
    """How the weights [..., out, in] of a linear are stored, made and multiplied by.

    A leaf has the axes of the weights, or all but the last: then it serves a whole row. A weight's
    share of a leaf is the same share of its inputs, so that whoever splits one splits the other.
    """

    name: str                                      # "int8", "int4-g32"
    groupsize: int | None = None                   # weights of a row that share a scale; None: all
    gguf: str | None = None                        # llama.cpp's nearest format
    suffix = ""                                    # of a file's name, after the mode
    serves_embedding = False                       # can rows be looked up?

    def leaves(self, shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Weights of this shape -> shape and dtype of each leaf."""

    def fits(self, n_in: int) -> bool:
        """Can rows of n_in weights be stored?"""

    def quantize(self, w: Tensor) -> dict[str, Tensor]:
        """Rows [n, in] -> their leaves, rounded to nearest."""

    def dequantize(self, weight, scales, zeros, dtype) -> Tensor:
        return dequantize(weight, scales, zeros, dtype)

    def kernel(self, device, dtype: torch.dtype, shape) -> Kernel:
        """The fastest that this device has for this dtype and shape [..., out, in]."""

    def fill(self, leaf: str, t: Tensor) -> None:
        """Random numbers as large as those of trained weights."""


@dataclass(frozen=True)
class Int8(Scheme):
    """One scale per row."""

    name = "int8"
    gguf = "Q8_0"
    serves_embedding = True

    def leaves(self, shape):
        return {"weight": (tuple(shape), torch.int8),
                "scales": (tuple(shape[:-1]), torch.bfloat16)}

    def fits(self, n_in):
        return True

    def quantize(self, w):
        w = w.float()
        scales = self.scales(w)
        return {"weight": self.codes(w, scales), "scales": scales}

    def scales(self, w: Tensor) -> Tensor:
        """In bfloat16, so that every dtype a model runs in has the same numbers."""
        return (w.abs().amax(-1) / 127).clamp(min=1e-20).bfloat16()

    def codes(self, w: Tensor, scales: Tensor) -> Tensor:
        codes = (w / scales[:, None].float()).round()
        return codes.clamp(-127, 127).to(torch.int8)

    def kernel(self, device, dtype, shape):
        if torch.device(device).type == "cpu" and shape[-1] % 32 == 0:
            return INT8_CPU
        return INT8_CUDA if has_kernels(device) and shape[-1] % 16 == 0 else PLAIN

    def fill(self, leaf, t):
        if leaf == "weight":
            t.random_(-127, 128)
        else:
            t.fill_(0.02 / 73)                     # codes' deviation is 73


@dataclass(frozen=True)
class Int4(Scheme):
    """A scale and a zero for each `groupsize` neighbouring weights of a row."""

    groupsize: int = 32

    @property
    def name(self):
        return f"int4-g{self.groupsize}"

    @property
    def suffix(self):
        return f".g{self.groupsize}"

    @property
    def gguf(self):
        return "Q4_0" if self.groupsize == 32 else None

    def leaves(self, shape):
        *lead, n_in = shape
        groups = (*lead, n_in // self.groupsize)
        return {"weight": ((*lead, n_in // 2), torch.uint8),
                "scales": (groups, torch.bfloat16), "zeros": (groups, torch.bfloat16)}

    def fits(self, n_in):
        return n_in % self.groupsize == 0

    def quantize(self, w):
        groups = w.float().unflatten(-1, (-1, self.groupsize))
        scale, zero = self.grid(groups)
        return self.pack(self.codes(groups, scale, zero).flatten(-2), scale, zero)

    def grid(self, groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Groups [..., G] -> scale and zero [...]. importance [G]: how much an error counts."""
        return best_grid(groups, importance)

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """w [..., n], scale and zero [...] -> 0 to 15 [..., n], as floating-point numbers."""
        return ((w - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15)

    def values(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """What codes [..., n] stand for."""
        return (codes - 8) * scale[..., None] + zero[..., None]

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        """codes [..., in], scale and zero [..., in/G] -> the leaves."""
        return {"weight": pack_nibbles(codes), "scales": scale.bfloat16(),
                "zeros": zero.bfloat16()}

    def kernel(self, device, dtype, shape):
        if self.groupsize % 32:
            return PLAIN
        if torch.device(device).type == "cpu":
            return INT4_CPU if dtype == torch.bfloat16 else PLAIN
        return INT4_CUDA if has_kernels(device) else PLAIN

    def fill(self, leaf, t):
        if leaf == "weight":
            t.random_(0, 256)
        else:
            t.fill_({"scales": 0.02 / 4.6, "zeros": 0.01 / 4.6}[leaf])     # 4.6: codes' deviation


SCHEMES = {s.name: s for s in (Int8(), *(Int4(size) for size in GROUPSIZES))}


def scheme_named(text: str, groupsize: int = 32) -> Scheme:
    """ "int8", "int4-g64", or "int4" with this group size. ValueError lists the names."""
    if text == "int4":
        return Int4(groupsize)
    if text not in SCHEMES:
        raise ValueError(f"no scheme {text}: expected int4, {', '.join(SCHEMES)}")
    return SCHEMES[text]


def scheme_of(shapes: dict[str, tuple[int, ...]], n_in: int | None = None) -> Scheme | None:
    """The scheme whose leaves have these shapes, None of plain weights; n_in: their inputs."""
    if "scales" not in shapes:
        return None
    if "zeros" not in shapes:
        return Int8()
    n_in = n_in or 2 * shapes["weight"][-1]
    n_group = shapes["scales"][-1] if shapes["scales"] else 0
    if n_group < 1 or n_in % n_group or n_in % 2:
        raise ValueError(f"scales has {n_group} groups, which do not divide the {n_in} inputs")
    return Int4(n_in // n_group)


# ---- The modules --------------------------------------------------------------------------------

class QuantizedLinear(PackedLinear):
    """A Linear [out, in] or an ExpertLinear [E, out, in] whose tensors are a scheme's leaves.

    They are loaded as they lie on disk; pack() then gives them the kernel's layout.
    """

    def __init__(self, like: nn.Linear | ExpertLinear, scheme: Scheme, dtype, device):
        shape = like.weight.shape
        super().__init__(shape, like.bias, scheme.kernel(device, dtype, shape))
        self.scheme = scheme
        precise = torch.float32 if dtype == torch.float16 else dtype   # tiny scales underflow
        for leaf, (leaf_shape, kind) in scheme.leaves(shape).items():
            kind = precise if kind.is_floating_point else kind
            blank = torch.empty(leaf_shape, dtype=kind, device="meta")
            setattr(self, leaf, nn.Parameter(blank, requires_grad=False))

    def pack(self) -> None:
        leaves = self.leaves()
        if len(self.shape) == 2:
            leaves = self.kernel.pack(*leaves)
        elif self.kernel.name != "plain":
            experts = range(self.shape[0])
            each = [self.kernel.pack(*(t if t is None else t[e] for t in leaves)) for e in experts]
            leaves = [None if t[0] is None else torch.stack(t) for t in zip(*each)]
        self.set_leaves(leaves)


class QuantizedExperts(QuantizedLinear):
    def forward(self, x, ids, ends):               # as ExpertLinear
        if x.device.type == "cpu" or ends is None:
            y = packed_rows(x, ids, self.leaves(), self.kernel, self.shape[1])
        else:
            y = grouped_mm(x, self.scheme.dequantize(*self.leaves(), x.dtype), ends)
        return y if self.bias is None else y + self.bias[ids]


def put_quantized_linears(model: nn.Module, scheme_at: Callable[[str], Scheme | None], dtype,
                          device) -> None:
    """Exchange the linears of a blank model for which scheme_at(their name) gives a scheme.

    A scheme at "embed" is that of a matrix that is embedding and head in one.
    """
    shared = scheme_at("embed")
    for name, module in list(model.named_modules()):
        scheme = shared if name == "head" and shared else scheme_at(name)
        if scheme and isinstance(module, nn.Linear | ExpertLinear):
            kind = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedExperts
            model.set_submodule(name, kind(module, scheme, dtype, device))
    if shared:
        model.embed = PackedEmbedding(model.head, model.head.scales, dtype)


def share_embedding(model: nn.Module) -> None:
    """After pack(), which gave the head new tensors: one matrix again."""
    if isinstance(model.embed, PackedEmbedding):
        model.embed.weight = model.head.weight
        model.embed.scales = model.head.scales


if __name__ == "__main__":
    sys.modules["quantize"] = sys.modules["__main__"]      # imported below: one module, not two
    from cli.quantizing import main
    sys.exit(main())
