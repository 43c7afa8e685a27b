"""int8 and int4 weights: round to nearest or GPTQ, the linears that use them, and the command.

A quantized Checkpoint is a Checkpoint whose tensors come out as numbers and scales (checkpoint.py
has the layout), whether they are read from a file or made while loading; so one way of loading and
one way of writing serve all. Owns which tensors are quantized, the modules, and which kernel serves
where (py has those). Knows no model families and no packed layouts.

    python quantize.py --checkpoint_path org/name --mode int4 --groupsize 32
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from formats import checkpoint as checkpoints
from formats.checkpoint import Checkpoint, parts
from formats.files import Lazy
from kernels.cpu import INT4_CPU, INT8_CPU
from kernels.cuda import INT4_CUDA
from kernels.linear import PackedEmbedding, PackedLinear
from kernels.moe import expert_rows
from kernels.plain import PLAIN, Kernel, dequantize, pack_nibbles
from layers.moe import ExpertLinear, grouped_mm
from model import Transformer

GROUPSIZES = (32, 64, 128, 256)
LINEARS = re.compile(r"\.(wq|wk|wv|wo|gate|up|down)\.weight$")     # not routers: small and touchy


# ---- Round to nearest ---------------------------------------------------------------------------

def int8_scales(w: Tensor) -> Tensor:
    """w [n, in] -> [n], bfloat16, so that every dtype a model runs in has the same numbers."""
    return (w.abs().amax(-1) / 127).clamp(min=1e-20).bfloat16()


def int8_numbers(w: Tensor, scales: Tensor) -> Tensor:
    return (w / scales[:, None].float()).round().clamp(-127, 127).to(torch.int8)


def int4_grid(w: Tensor) -> tuple[Tensor, Tensor]:
    """Groups w [..., G] -> scale and zero [...]: number q stands for (q - 8) * scale + zero.

    From the smallest to the largest weight, in bfloat16 for the same reason.
    """
    low, high = w.aminmax(dim=-1)
    scale = ((high - low) / 15).clamp(min=1e-20).bfloat16().float()
    return scale, (low + 8 * scale).bfloat16().float()


def int4_numbers(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """w [..., G], scale and zero [...] -> 0 to 15 [..., G], as floating-point numbers."""
    return ((w - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15)


def rounded(w: Tensor, groupsize: int | None) -> dict[str, Tensor]:
    """Rows w [n, in] -> their numbers and scales as on disk; int8 if groupsize is None."""
    w = w.float()
    if groupsize is None:
        scales = int8_scales(w)
        return dict(weight=int8_numbers(w, scales), scales=scales)
    groups = w.unflatten(-1, (-1, groupsize))
    scale, zero = int4_grid(groups)
    weight = pack_nibbles(int4_numbers(groups, scale, zero).flatten(-2))
    return dict(weight=weight, scales=scale.bfloat16(), zeros=zero.bfloat16())


def pieces(t: Lazy, groupsize: int | None, make: Callable[[int, int], dict]) -> list[Lazy]:
    """weight, scales and, in int4, zeros of a tensor in place of it; int8 if groupsize is None.

    make(a, b): those of its rows. Whoever reads the weight reads the others next: they are kept
    until then.
    """
    lead, n_in, x = t.shape[:-1], t.shape[-1], t.name.removesuffix(".weight")
    if groupsize is None:
        layout = dict(weight=((*lead, n_in), torch.int8), scales=(lead, torch.bfloat16))
    else:
        groups = (*lead, n_in // groupsize), torch.bfloat16
        layout = dict(weight=((*lead, n_in // 2), torch.uint8), scales=groups, zeros=groups)
    if t.rows is None:                             # random weights: so are these
        return [Lazy(f"{x}.{leaf}", *kind, None) for leaf, kind in layout.items()]
    kept = {}                                      # nan where a row is not, or not any more

    def rows(leaf, a, b):
        if leaf in kept and not (part := kept[leaf][a:b].clone()).isnan().any():
            kept[leaf][a:b] = torch.nan
            if kept[leaf].isnan().all():
                del kept[leaf]
            return part
        made = {k: v.cpu() for k, v in make(a, b).items()}
        for other in made.keys() - {"weight"}:
            if not made[other].isfinite().all():
                raise ValueError(f"{t.name} has weights that are infinite or no numbers")
            if leaf == "weight":
                blank = made[other].new_full((t.n_row, *made[other].shape[1:]), torch.nan)
                kept.setdefault(other, blank)[a:b] = made[other]
        return made[leaf]

    def piece(leaf, shape, dtype):
        new = Lazy(f"{x}.{leaf}", shape, dtype, None)
        n = t.n_row // new.n_row                   # of the weight's rows in one; experts' scales
        row = shape[2:] if len(shape) > 2 else shape[1:]
        return replace(new, rows=lambda a, b: rows(leaf, n * a, n * b).view(b - a, *row))
    return [piece(leaf, *kind) for leaf, kind in layout.items()]


def quantized(source: Checkpoint, mode: str, groupsize: int = 32, head: str = "int8",
              device="cpu", solver: Callable | None = None) -> Checkpoint:
    """The checkpoint with numbers and scales for weights, made as they are read.

    mode: int8, one scale per row; int4, a scale and a zero per `groupsize` weights of a row. head:
    none, int8 or int4, of the output; where it is the embedding too, int8 serves both and int4 is
    a copy for the output. solver(name) -> q, scales and zeros, in place of rounding (GPTQ).
    ValueError where the source is quantized already or the group size does not divide.
    """
    if stated := describe(source):
        raise ValueError(f"{source.path} is quantized already ({stated}): start from the original")
    everything, tied = dict(source.tensors), source.cfg.tied
    todo = {name: mode for name in everything if LINEARS.search(name)}
    if tied and head == "int4":
        everything["head.weight"] = replace(everything["embed.weight"], name="head.weight")
    if head != "none":
        todo["embed.weight" if tied and head == "int8" else "head.weight"] = head
    widths = {everything[n].shape[-1]: n for n, kind in todo.items() if kind == "int4"}
    bad = [width for width in widths if width % groupsize]
    if bad:
        fit = [str(g) for g in GROUPSIZES if not any(width % g for width in widths)]
        raise ValueError(f"--groupsize {groupsize} does not divide the {min(bad)} inputs of "
                         f"{widths[min(bad)]}: {' or '.join(fit) or 'only int8'} would do")

    solved = {}                                    # the last one

    def make(t, size, a, b):
        if not (solver and LINEARS.search(t.name)):
            return rounded(t.rows(a, b).to(device), size)
        if t.name not in solved:
            solved.clear()
            solved[t.name] = [part.flatten(0, -2) for part in solver(t.name)]
        q, scales, zeros = (part[a:b] for part in solved[t.name])
        return dict(weight=pack_nibbles(q), scales=scales.bfloat16(), zeros=zeros.bfloat16())

    tensors = {}
    for name in sorted(everything, key=_layer):    # GPTQ goes from the first layer to the last
        t = replace(everything[name], name=name)
        new = [t]
        if name in todo:
            size = groupsize if todo[name] == "int4" else None
            new = pieces(t, size, partial(make, t, size))
        tensors.update((piece.name, piece) for piece in new)
    stated = dict(mode=mode, head=head, gptq=solver is not None)
    return replace(source, tensors=tensors, quantization=stated)


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def schemes(source: Checkpoint) -> tuple[str, str]:
    """Of the linears and of the head, as the tensors say: "none", "int8", "int4-g32", …"""
    found = {}, {}
    for name in source.tensors:
        x, _, leaf = name.rpartition(".")
        if leaf == "scales":
            kind = "int8"
            if f"{x}.zeros" in source.tensors:
                scales, weight = (source.tensors[f"{x}.{leaf}"] for leaf in ("scales", "weight"))
                kind = f"int4-g{weight.shape[-1] * 2 // scales.shape[-1]}"
            found[x in ("embed", "head")][kind] = True
    return tuple("/".join(kinds) or "none" for kinds in found)


def describe(source: Checkpoint) -> str:
    """schemes() in words, and how they were found; "" if nothing is quantized."""
    linears, head = schemes(source)
    how = " by GPTQ" if (source.quantization or {}).get("gptq") else ""
    return "" if (linears, head) == ("none", "none") else f"{linears}{how}, head {head}"


def add_flags(add: Callable) -> None:
    """For every command that loads a model."""
    add("--quantize", choices=["int8", "int4"],
        help="round the weights while loading, without a file; GPTQ is quantize.py's")
    _add_choices(add)


def _add_choices(add: Callable) -> None:
    add("--groupsize", type=int, choices=GROUPSIZES, default=32,
        help="int4: weights of a row that share a scale")
    add("--quantize_head", choices=["none", "int8", "int4"], default="int8",
        help="the output layer; int8 also serves the embedding where both are one matrix")


def as_flagged(source: Checkpoint, args, device) -> Checkpoint:
    if args.quantize is None:
        return source
    return quantized(source, args.quantize, args.groupsize, args.quantize_head, device)


# ---- The modules --------------------------------------------------------------------------------

def pick_kernel(int4: bool, dtype: torch.dtype, device, shape, groupsize: int) -> Kernel:
    """The fastest that this device has for this dtype and shape [..., out, in], else the plain."""
    device = torch.device(device)
    if device.type == "cpu" and not int4 and shape[-1] % 32 == 0:
        return INT8_CPU
    fits = dtype == torch.bfloat16 and int4 and groupsize % 32 == 0
    if fits and device.type == "cpu":
        return INT4_CPU
    if fits and device.type == "cuda" and len(shape) == 2 and shape[-2] % 8 == 0 and (
            torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)):
        return INT4_CUDA
    return PLAIN


class QuantizedLinear(PackedLinear):
    """A Linear [out, in] or an ExpertLinear [E, out, in] of numbers and scales.

    Its tensors are loaded as they lie on disk; pack() then gives them the kernel's layout.
    """

    def __init__(self, like: nn.Linear | ExpertLinear, groupsize: int | None, dtype, device):
        *lead, n_in = shape = like.weight.shape
        int4 = groupsize is not None
        super().__init__(shape, like.bias, pick_kernel(int4, dtype, device, shape, groupsize))
        precise = torch.float32 if dtype == torch.float16 else dtype       # tiny scales underflow
        n_group, n_byte = (n_in // groupsize, n_in // 2) if int4 else (0, n_in)

        def blank(*shape, dtype=precise):
            return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

        self.weight = blank(*lead, n_byte, dtype=torch.uint8 if int4 else torch.int8)
        self.scales = blank(*lead, n_group) if int4 else blank(*lead)
        self.zeros = blank(*lead, n_group) if int4 else None

    def pack(self) -> None:
        leaves = self.leaves()
        if len(self.shape) == 2:
            leaves = self.kernel.pack(*leaves)
        elif self.kernel.name != "plain":
            each = [self.kernel.pack(*(t if t is None else t[e] for t in leaves))
                    for e in range(self.shape[0])]
            leaves = [None if t[0] is None else torch.stack(t) for t in zip(*each)]
        self.set_leaves(leaves)


class QuantizedExperts(QuantizedLinear):
    def forward(self, x, ids, ends):               # as ExpertLinear
        if x.device.type == "cpu":
            y = expert_rows(x, ids, self.weight, self.scales, self.zeros, self.kernel.name,
                                    self.shape[1])
        elif ends is not None:
            w = dequantize(self.weight, self.scales, self.zeros, x.dtype)
            y = grouped_mm(x, w, ends)
        else:
            own = (t if t is None else t[ids] for t in (self.weight, self.scales, self.zeros))
            w = dequantize(*own, torch.float32)
            y = (w * x[:, None].float()).sum(-1).to(x.dtype)
        return y if self.bias is None else y + self.bias[ids]


def load(source: Checkpoint, dtype: torch.dtype, device) -> Transformer:
    """checkpoint.load(), with the modules that the source's tensors ask for."""
    def rewrite(model):
        for name, module in list(model.named_modules()):
            shared = name == "head" and "embed.scales" in source.tensors
            x = "embed" if shared else parts(f"{name}.weight")[0].removesuffix(".weight")
            linear = isinstance(module, nn.Linear | ExpertLinear)
            if not linear or f"{x}.scales" not in source.tensors:
                continue
            groupsize = None
            if f"{x}.zeros" in source.tensors:
                groupsize = module.weight.shape[-1] // source.tensors[f"{x}.zeros"].shape[-1]
            new = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedExperts
            new = new(module, groupsize, dtype, device)
            model.set_submodule(name, new)
            if shared:
                model.embed = PackedEmbedding(new, new.scales, dtype)

    def ready(module):
        if isinstance(module, QuantizedLinear):
            module.pack()

    model = checkpoints.load(source, dtype, device, rewrite, ready)
    if "embed.scales" in source.tensors:           # what pack() made is one again
        model.embed.weight, model.embed.scales = model.head.weight, model.head.scales
    return model


if __name__ == "__main__":
    sys.modules["quantize"] = sys.modules["__main__"]      # imported below: one module, not two
    from cli.quantizing import main
    sys.exit(main())
