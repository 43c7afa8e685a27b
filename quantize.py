"""Quantization: schemes, rounding, quantized linears, quantizing a checkpoint.

A scheme is one object: the tensors it stores (its leaves), quantization, dequantization and the
product. A checkpoint is quantized while it is read. Independent of file formats and families;
gpt_faster/kernels/linear.py swaps in linears with faster kernels. On disk, with group size G:

    int8     weight int8  [out, in]     scales [out]                 w = code * scale
    int4-gG  weight uint8 [out, in/2]   scales, zeros [out, in/G]    w = (code - 8) * scale + zero
             a byte holds two adjacent codes, the first one in the low nibble

    python quantize.py --checkpoint_path org/name --mode int4 --groupsize 32
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and (Path(__file__).parent / "gpt_faster/cli/start.py").exists():
    # The full command: it extends the flags below and calls the functions below.
    from gpt_faster.cli.start import quantize
    sys.exit(quantize())

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import ExpertLinear, grouped_mm

if TYPE_CHECKING:                                  # these files import this one
    from checkpoint import Checkpoint, LazyTensor

LEAVES = ("weight", "scales", "zeros")             # tensors that a scheme may store for a linear
MODES = ("int8", "int4")                           # scheme names without group size
GROUPSIZES = (32, 64, 128, 256)
# no MoE routers: they are tiny, and sensitive to rounding
LINEARS = re.compile(r"\.(w\w+|[qkv]|gate|up|down)\.weight$")


# ---- Schemes ------------------------------------------------------------------------------------

class Scheme:
    """How the weights [..., out, in] of a linear are stored, rounded and multiplied.

    A leaf has the axes of the weight, or all but the last: one value per row. Slicing the weight's
    input axis slices each leaf at the same fraction, so TP can shard leaves like weights.
    """

    name: str                                      # "int8", "int4-g32"
    groupsize: int | None = None                   # weights that share a scale; None: a whole row
    suffix = ""                                    # of the file name, after the mode
    serves_embedding = False                       # True if an embedding can look up its rows

    def leaves(self, shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each leaf, for weights of this shape."""

    def fits(self, n_in: int) -> bool:
        """True if rows of n_in weights can be stored."""

    def quantize(self, w: Tensor) -> dict[str, Tensor]:
        """Rows [n, in] -> leaves, rounded to nearest."""

    def dequantize(self, weight, scales, zeros, dtype) -> Tensor:
        return dequantize(weight, scales, zeros, dtype)

    def product(self, x: Tensor, weight, scales, zeros) -> Tensor:
        """x [M, in] -> [M, out]"""
        return product(x, weight, scales, zeros)


@dataclass(frozen=True)
class Int8(Scheme):
    """One scale per row."""

    name = "int8"
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
        """Stored in bfloat16, so that the values are the same in every dtype."""
        return (w.abs().amax(-1) / 127).clamp(min=1e-20).bfloat16()

    def codes(self, w: Tensor, scales: Tensor) -> Tensor:
        codes = (w / scales[:, None].float()).round()
        return codes.clamp(-127, 127).to(torch.int8)


@dataclass(frozen=True)
class Int4(Scheme):
    """A scale and a zero for each group of `groupsize` adjacent weights of a row."""

    groupsize: int = 32

    @property
    def name(self):
        return f"int4-g{self.groupsize}"

    @property
    def suffix(self):
        return f".g{self.groupsize}"

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
        """Groups [..., G] -> scale and zero [...]. importance [G]: weights of squared errors."""
        return best_grid(groups, importance)

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """w [..., n], scale and zero [...] -> codes 0 to 15 [..., n], as floats."""
        return ((w - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15)

    def values(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Dequantize codes [..., n]."""
        return (codes - 8) * scale[..., None] + zero[..., None]

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        """codes [..., in], scale and zero [..., in/G] -> leaves."""
        return {"weight": pack_nibbles(codes), "scales": scale.bfloat16(),
                "zeros": zero.bfloat16()}


SCHEMES = {s.name: s for s in (Int8(), *(Int4(size) for size in GROUPSIZES))}


def scheme_named(text: str, groupsize: int = 32) -> Scheme:
    """ "int8", "int4-g64", or "int4" with this group size. ValueError lists the valid names."""
    if text == "int4":
        return Int4(groupsize)
    if text not in SCHEMES:
        raise ValueError(f"no scheme {text}: expected int4, {', '.join(SCHEMES)}")
    return SCHEMES[text]


def scheme_of(shapes: dict[str, tuple[int, ...]], n_in: int | None = None) -> Scheme | None:
    """The scheme whose leaves have these shapes; None: not quantized. n_in: the input width."""
    if "scales" not in shapes:
        return None
    if "zeros" not in shapes:
        return Int8()
    n_in = n_in or 2 * shapes["weight"][-1]
    n_group = shapes["scales"][-1] if shapes["scales"] else 0
    if n_group < 1 or n_in % n_group or n_in % 2:
        raise ValueError(f"scales has {n_group} groups, which do not divide the {n_in} inputs")
    return Int4(n_in // n_group)


def scheme_at(tensors: "dict[str, LazyTensor]", x: str, n_in: int | None = None) -> Scheme | None:
    """The scheme of the linear `x` ("layers.0.attn.wq"); None: not quantized.

    n_in: its input width, if known. ValueError if its tensors do not match each other.
    """
    weight = tensors.get(f"{x}.weight")
    if weight is not None and weight.scheme:
        return weight.scheme
    leaves = {leaf: tensors[f"{x}.{leaf}"] for leaf in LEAVES if f"{x}.{leaf}" in tensors}
    try:
        return scheme_of({leaf: t.shape for leaf, t in leaves.items()}, n_in)
    except ValueError as e:
        raise ValueError(f"{x}.{e}") from None


# ---- Quantize, dequantize -----------------------------------------------------------------------

SHRINK = (1.0, 0.92, 0.84, 0.76, 0.66)             # fractions of the range from min to max
AT_ONCE = 1 << 16                                  # weights: temporaries fit in a core's cache


def best_grid(groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Groups [..., G] -> the scale and zero [...] with the least squared error.

    w = (code - 8) * scale + zero. importance [G]: weights of the squared errors. Tries the range
    from min to max and some shorter ones, each also after a least-squares fit to its codes.
    Computed in fp32; scales and zeros are rounded to bfloat16.
    """
    rows = groups.reshape(-1, groups.shape[-1])
    count = importance if importance is not None else rows.new_ones(rows.shape[-1])
    pieces = rows.split(max(1, AT_ONCE // rows.shape[-1])) if rows.device.type == "cpu" else [rows]
    grids = [_best_grid_of(piece, count) for piece in pieces]
    return tuple(torch.cat(t).view(groups.shape[:-1]) for t in zip(*grids))


def _best_grid_of(w: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    low, high = w.aminmax(dim=-1)
    best = None
    for shrink in SHRINK:
        scale = _as_bfloat16(((high - low) * (shrink / 15)).clamp(min=1e-20))
        zero = _as_bfloat16(low + (high - low) * ((1 - shrink) / 2) + 8 * scale)
        codes, best = _try_grid(w, count, scale, zero, best)
        _, best = _try_grid(w, count, *_least_squares(w, count, codes, scale, zero), best)
    return best[1:]


def _try_grid(w, count, scale, zero, best):
    """Return the codes, and the better of this grid and the best so far: (error, scale, zero)."""
    codes = ((w - zero[:, None]) / scale[:, None]).round_().clamp_(-8, 7)
    error = (codes * scale[:, None]).add_(zero[:, None]).sub_(w).square_() @ count
    if best is None:
        return codes, (error, scale, zero)
    better = error < best[0]                       # False for NaN
    pairs = zip((error, scale, zero), best)
    return codes, tuple(torch.where(better, new, old) for new, old in pairs)


def _least_squares(w, count, codes, scale, zero):
    """The least-squares scale and zero for these codes; unchanged where all codes are equal."""
    total = count.sum()
    code_mean, w_mean = codes @ count / total, w @ count / total
    spread = codes - code_mean[:, None]
    square = spread.square() @ count
    new = _as_bfloat16((spread * w) @ count / square)
    usable = (square > 0) & (new > 0)
    scale = torch.where(usable, new, scale)
    return scale, torch.where(usable, _as_bfloat16(w_mean - scale * code_mean), zero)


def _as_bfloat16(t: Tensor) -> Tensor:
    return t.bfloat16().float()


def pack_nibbles(q: Tensor) -> Tensor:
    """Codes 0 to 15 [..., in] -> bytes [..., in/2], the first code in the low nibble."""
    return q[..., ::2].to(torch.uint8) | q[..., 1::2].to(torch.uint8) << 4


def unpack_nibbles(weight: Tensor) -> Tensor:
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype) -> Tensor:
    """The weights [..., out, in], computed in fp32."""
    if zeros is None:
        return (weight.float() * scales[..., None].float()).to(dtype)
    q = unpack_nibbles(weight).float().unflatten(-1, (scales.shape[-1], -1)) - 8
    return (q * scales[..., None].float() + zeros[..., None].float()).flatten(-2).to(dtype)


def product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """x [M, in] -> [M, out].

    Compiled, with one row, Inductor fuses this into one pass over the codes. Otherwise the weights
    are dequantized first.
    """
    if not (torch.compiler.is_compiling() and x.shape[0] == 1):
        return F.linear(x, dequantize(weight, scales, zeros, x.dtype))
    if zeros is None:
        y = (weight.float() * x.float()).sum(-1) * scales.float()
    else:
        y = (dequantize(weight, scales, zeros, torch.float32) * x.float()).sum(-1)
    return y.to(x.dtype)[None]


# ---- The modules --------------------------------------------------------------------------------

class QuantizedLinear(nn.Module):
    """A Linear [out, in] that stores a scheme's leaves in the layout on disk."""

    def __init__(self, like: nn.Linear | ExpertLinear, scheme: Scheme, dtype: torch.dtype):
        """Created on the meta device. dtype: of the activations."""
        super().__init__()
        self.shape = like.weight.shape
        self.bias = like.bias
        self.scheme = scheme
        self.weight = self.scales = self.zeros = None
        precise = torch.float32 if dtype == torch.float16 else dtype   # tiny scales underflow
        for leaf, (shape, kind) in scheme.leaves(self.shape).items():
            kind = precise if kind == torch.bfloat16 else kind
            blank = torch.empty(shape, dtype=kind, device="meta")
            setattr(self, leaf, nn.Parameter(blank, requires_grad=False))

    def leaves(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.scales, self.zeros

    def forward(self, x):
        y = self.scheme.product(x.reshape(-1, x.shape[-1]), *self.leaves())
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class QuantizedExperts(QuantizedLinear):
    """An ExpertLinear [E, out, in], quantized."""

    def forward(self, x, ids, ends):
        """x [M, in], each row for the expert in ids [M] -> [M, out]; ends as in ExpertLinear."""
        if ends is None:
            leaves = (t if t is None else t[ids] for t in self.leaves())
            w = self.scheme.dequantize(*leaves, torch.float32)             # [M, out, in]
            y = (w * x[:, None].float()).sum(-1).to(x.dtype)
        else:
            y = grouped_mm(x, self.scheme.dequantize(*self.leaves(), x.dtype), ends)
        return y if self.bias is None else y + self.bias[ids]


class QuantizedEmbedding(nn.Module):
    """An embedding that shares the weight of an int8 output layer."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype):
        super().__init__()
        self.scheme = head.scheme
        self.weight, self.scales = head.weight, head.scales
        self.dtype = dtype

    def forward(self, ids):
        return self.scheme.dequantize(self.weight[ids], self.scales[ids], None, self.dtype)


def put_quantized_linears(model: nn.Module, scheme_for: Callable[[str], Scheme | None],
                          dtype: torch.dtype) -> None:
    """Replace each linear of a meta-device model for which scheme_for(name) returns a scheme.

    A scheme for "embed" means a tied matrix: embedding and output layer.
    """
    shared = scheme_for("embed")
    for name, module in list(model.named_modules()):
        scheme = shared if name == "head" and shared else scheme_for(name)
        if scheme and isinstance(module, nn.Linear | ExpertLinear):
            kind = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedExperts
            model.set_submodule(name, kind(module, scheme, dtype))
    if shared:
        model.embed = QuantizedEmbedding(model.head, dtype)


# ---- Quantizing a checkpoint while it is read ---------------------------------------------------

def quantized(source: "Checkpoint", mode: str, groupsize: int = 32, head: str = "int8",
              device="cpu") -> "Checkpoint":
    """The checkpoint with quantized weights, rounded on `device` as they are read.

    mode: int8 (one scale per row), int4 (a scale and a zero per `groupsize` weights of a row), or
    int4-g64 etc. head: none, int8 or int4 for the output layer. If it is tied to the embedding,
    int8 is shared by both; int4 quantizes a separate copy for the output layer.
    ValueError if weights are quantized already, or the group size does not divide the input width.
    """
    refuse_quantized(source)
    schemes = schemes_for(source, mode, groupsize, head)
    tensors = with_leaves(source, schemes, lambda t, scheme: rounded_leaves(t, scheme, device))
    return replace(source, tensors=tensors, quantization=dict(mode=mode, head=head, gptq=False))


def refuse_quantized(source: "Checkpoint") -> None:
    if scheme := describe(source):
        raise ValueError(f"{source.path} is already quantized ({scheme}): use the original model")


def schemes_for(source: "Checkpoint", mode: str, groupsize: int, head: str) -> dict[str, Scheme]:
    """The scheme of each tensor that is to be quantized; arguments as in quantized()."""
    done = {f"{name.removesuffix('.scales')}.weight" for name in source.tensors
            if name.endswith(".scales")}
    schemes = {name: scheme_named(mode, groupsize) for name in source.tensors
               if LINEARS.search(name) and name not in done}
    if head != "none" and not done & {"head.weight", "embed.weight"}:
        scheme = scheme_named(head, groupsize)
        serves_both = source.cfg.tied and scheme.serves_embedding
        schemes["embed.weight" if serves_both else "head.weight"] = scheme
    return schemes


def with_leaves(source: "Checkpoint", schemes: dict[str, Scheme],
                leaves_of: Callable) -> "dict[str, LazyTensor]":
    """The checkpoint's tensors, those in `schemes` replaced by leaves_of(tensor, scheme).

    In the order of the layers, as GPTQ needs them. ValueError if a group size does not divide the
    input width.
    """
    everything = dict(source.tensors)
    if "head.weight" in schemes and "head.weight" not in everything:   # tied
        everything["head.weight"] = everything["embed.weight"]
    _check_groups(everything, schemes)
    tensors = {}
    for name in sorted(everything, key=_layer):
        t = everything[name].renamed(name)
        if name in schemes:
            tensors.update((leaf.name, leaf) for leaf in leaves_of(t, schemes[name]))
        else:
            tensors[name] = t
    return tensors


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _check_groups(tensors: "dict[str, LazyTensor]", schemes: dict[str, Scheme]) -> None:
    widths = {tensors[name].shape[-1]: name for name, scheme in schemes.items()
              if scheme.groupsize}
    bad = [width for width, name in widths.items() if not schemes[name].fits(width)]
    if bad:
        groupsize = schemes[widths[min(bad)]].groupsize
        fit = [str(g) for g in GROUPSIZES if not any(width % g for width in widths)]
        raise ValueError(f"--groupsize {groupsize} does not divide the {min(bad)} inputs of "
                         f"{widths[min(bad)]}: use {' or '.join(fit) or 'int8'}")


def rounded_leaves(t: "LazyTensor", scheme: Scheme, device="cpu") -> "list[LazyTensor]":
    """A tensor X.weight -> X.weight, X.scales, …"""
    return lazy_leaves(t, scheme, RoundedRows(t, scheme, device).read)


def lazy_leaves(t: "LazyTensor", scheme: Scheme, read: Callable) -> "list[LazyTensor]":
    """The leaves of t. read(leaf, a, b) makes a leaf of rows a to b of t."""
    def lazy(leaf, shape, dtype):
        row = shape[2:] if len(shape) > 2 else shape[1:]

        def read_rows(a, b):                       # a row of experts' scales is many rows of t
            times = t.n_row // leaf_tensor.n_row
            return read(leaf, times * a, times * b).view(b - a, *row)
        name = f"{t.name.removesuffix('.weight')}.{leaf}"
        leaf_tensor = t.derived(read_rows, name=name, shape=shape, dtype=dtype)
        return leaf_tensor
    return [lazy(leaf, *kind) for leaf, kind in scheme.leaves(t.shape).items()]


class RoundedRows:
    """Quantizes a tensor in blocks of rows. Each block is rounded once for all of its leaves.

    Reading a block of codes keeps the other leaves of the block until they are read, in blocks of
    any size. Reading in any other order gives the same values but quantizes again.
    """

    def __init__(self, t: "LazyTensor", scheme: Scheme, device):
        self.tensor, self.scheme, self.device = t, scheme, device
        self.rows_kept = {}                        # leaf -> a buffer of all rows, and a mask of
                                                   # those that are filled

    def read(self, leaf: str, a: int, b: int) -> Tensor:
        buffer, there = self.rows_kept.get(leaf, (None, None))
        if buffer is not None and there[a:b].all():
            rows = buffer[a:b].clone()
            there[a:b] = False
            if not there.any():
                del self.rows_kept[leaf]
            return rows
        leaves = self.scheme.quantize(self.tensor.read_rows(a, b).to(self.device))
        for other, rows in leaves.items():
            if other != "weight" and not rows.isfinite().all():
                raise ValueError(f"{self.tensor.name} has NaN or infinite weights")
            if other != "weight" and leaf == "weight":     # codes are too large to keep
                self._keep(other, a, b, rows.cpu())
        return leaves[leaf].cpu()

    def _keep(self, leaf: str, a: int, b: int, rows: Tensor) -> None:
        if leaf not in self.rows_kept:
            n = self.tensor.n_row
            buffer = rows.new_empty(n, *rows.shape[1:])
            self.rows_kept[leaf] = buffer, torch.zeros(n, dtype=torch.bool)
        buffer, there = self.rows_kept[leaf]
        buffer[a:b] = rows
        there[a:b] = True


def schemes(source: "Checkpoint") -> tuple[str, str]:
    """Schemes of the linears and of the output layer: "none", "int8", "int4-g32", …"""
    linears, head = {}, {}
    for name in source.tensors:
        x, _, leaf = name.rpartition(".")
        if leaf == "scales":
            kinds = head if x in ("embed", "head") else linears
            kinds[scheme_at(source.tensors, x).name] = True
    return "/".join(linears) or "none", "/".join(head) or "none"


def describe(source: "Checkpoint") -> str:
    """schemes() as text, and "by GPTQ" where it applies; "" if nothing is quantized."""
    linears, head = schemes(source)
    by = " by GPTQ" if (source.quantization or {}).get("gptq") else ""
    return "" if (linears, head) == ("none", "none") else f"{linears}{by}, head {head}"


# ---- The command --------------------------------------------------------------------------------

def add_flags(p: argparse.ArgumentParser, checkpoints: str, modes: tuple[str, ...] = MODES,
              mode_help: str = "") -> None:
    """Add gpt-fast's flags. checkpoints: the kinds that the command reads, for --help."""
    add = p.add_argument
    add("--checkpoint_path", "--model", "-m", metavar="PATH_OR_NAME", help=checkpoints)
    add("--mode", choices=modes, default="int8",
        help="int8: one scale per row; int4: a scale and a zero per group" + mode_help)
    add_choices(add)
    add("--label", default="", help="part of the default file name: model_LABELint8.pth")


def add_choices(add: Callable) -> None:
    """Flags of every command that quantizes."""
    add("--groupsize", type=int, choices=GROUPSIZES, default=32,
        help="int4: number of weights that share a scale")
    add("--quantize_head", choices=["none", *MODES], default="int8",
        help="scheme of the output layer; int8 also serves a tied embedding")


def write(source: "Checkpoint", output: Path, load_tokenizer: Callable,
          dtype: torch.dtype | None = None, quiet: bool = False) -> None:
    """Write a self-contained .pth: it includes the tokenizer unless its files are in the same
    directory."""
    from checkpoint import save_checkpoint
    files, state = source.tokenizer, None
    if not isinstance(files, Path) or files.resolve() != output.parent.resolve():
        state = load_tokenizer(files).state()
    output.parent.mkdir(parents=True, exist_ok=True)

    def progress(i, n):
        if sys.stderr.isatty() and not quiet:
            bar = "#" * (30 * i // n)
            print(f"\r[{bar:30}] {i}/{n} tensors", end="\n" if i == n else "", file=sys.stderr,
                  flush=True)

    save_checkpoint(source, output, state, dtype, progress)


def run(argv: list[str] | None) -> int:
    import tokenizer
    from checkpoint import output_path, read_checkpoint, resolve
    parser = argparse.ArgumentParser(description="Quantize a checkpoint into one file.")
    add_flags(parser, "a Hugging Face directory, a .pth, or a hub name org/name")
    args = parser.parse_args(argv)
    if args.checkpoint_path is None:
        raise ValueError("--checkpoint_path is required")
    path = resolve(args.checkpoint_path)
    suffix = scheme_named(args.mode, args.groupsize).suffix
    output = output_path(path, f"model_{args.label}{args.mode}{suffix}.pth")
    source = quantized(read_checkpoint(path), args.mode, args.groupsize, args.quantize_head)
    write(source, output, tokenizer.load)
    print(output)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command of the core alone -> exit status. Bad input: one line on stderr, status 2."""
    from checkpoint import Unforeseen, first_line
    try:
        return run(argv)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, ImportError, Unforeseen) as e:
        print(f"quantize.py: error: {first_line(e)}", file=sys.stderr)
        return 2


if __name__ == "__main__":                         # only without gpt_faster/
    sys.modules["quantize"] = sys.modules["__main__"]      # checkpoint.py imports quantize
    sys.exit(main())
