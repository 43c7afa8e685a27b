"""A checkpoint whose tensors come out quantized, made as their rows are read; and what one is.

So one way of loading and one way of writing serve all. Decides which
tensors are quantized; quantize.py's schemes know how.

The order of reading. A row block of weights is rounded once and gives all its leaves: whoever reads
a block of codes finds its scales and zeros there when it reads them next, in blocks of any size.
Any other order gives the same numbers and rounds again. GPTQ's solver alone needs an order, from
the first layer to the last: the checkpoint's tensors are sorted so, and whoever writes or loads
takes them one after another.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from checkpoint import Checkpoint, LazyTensor, made_from, scheme_at
from quantize import GROUPSIZES, LINEARS, MODES, Scheme, scheme_named


def quantized(source: Checkpoint, mode: str, groupsize: int = 32, head: str = "int8",
              device="cpu", solver: Callable | None = None,
              others: dict[str, Scheme] | None = None) -> Checkpoint:
    """The checkpoint with codes and scales for weights, made as they are read.

    mode: int8, one scale per row; int4, a scale and a zero per `groupsize` weights of a row, or
    int4-g64 and the like. head: none, int8 or int4, of the output; where it is the embedding too,
    int8 serves both and int4 is a copy for the output. solver(name) -> leaves, in place of rounding
    the linears (GPTQ). others: tensors with a scheme of their own. What is in four bits already
    stays as it is: the groups of a GGUF where they are as asked for, a hub's whatever they are.
    ValueError where all is quantized already, or otherwise, or the group size does not divide.
    """
    everything = dict(source.tensors)
    there = {f"{name.removesuffix('.scales')}.weight" for name in everything
             if name.endswith(".scales")}
    scheme, others = scheme_named(mode, groupsize), others or {}
    schemes = {name: others.get(name, scheme) for name in everything
               if LINEARS.search(name) and name not in there}
    if head != "none" and not there & {"head.weight", "embed.weight"}:
        scheme, name = scheme_named(head, groupsize), "head.weight"
        if source.cfg.tied and scheme.serves_embedding:
            name = "embed.weight"
        elif source.cfg.tied:
            everything["head.weight"] = _renamed(everything["embed.weight"], "head.weight")
        schemes[name] = scheme
    goes_on = mode != "int8" and not solver and schemes and "int4" in describe(source)
    if there and not goes_on:
        raise ValueError(f"{source.path} is quantized already ({describe(source)}): start from the "
                         "original")
    _check_groups(everything, schemes)
    tensors = {}
    for name in sorted(everything, key=_layer):
        t = _renamed(everything[name], name)
        if name in schemes:
            solve = solver if LINEARS.search(name) else None
            tensors.update((leaf.name, leaf) for leaf in leaves_of(t, schemes[name], device, solve))
        else:
            tensors[name] = t
    made = dict(mode=mode, head=head, gptq=solver is not None)
    mtp = source.mtp and (lambda: quantized(source.mtp(), mode, groupsize, "none", device))
    return replace(source, tensors=tensors, quantization=made, mtp=mtp)


def _renamed(t: LazyTensor, name: str) -> LazyTensor:
    return made_from(t, t.read_rows, name=name, packed=t.packed)


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _check_groups(tensors: dict[str, LazyTensor], schemes: dict[str, Scheme]) -> None:
    widths = {tensors[name].shape[-1]: name for name, scheme in schemes.items()
              if scheme.groupsize}
    bad = [width for width, name in widths.items() if not schemes[name].fits(width)]
    if bad:
        groupsize = schemes[widths[min(bad)]].groupsize
        fit = [str(g) for g in GROUPSIZES if not any(width % g for width in widths)]
        raise ValueError(f"--groupsize {groupsize} does not divide the {min(bad)} inputs of "
                         f"{widths[min(bad)]}: {' or '.join(fit) or 'only int8'} would do")


def leaves_of(t: LazyTensor, scheme: Scheme, device="cpu",
              solver: Callable | None = None) -> list[LazyTensor]:
    """X.weight, X.scales, … in place of a tensor X.weight. solver(name) -> all leaves at once."""
    x = t.name.removesuffix(".weight")
    layout = scheme.leaves(t.shape)
    if t.read_rows is None:                        # random weights: so are these
        return [LazyTensor(f"{x}.{leaf}", *kind, None, fill=_filler(scheme, leaf))
                for leaf, kind in layout.items()]
    if not solver and has_own_codes(t, scheme):
        return [replace(leaf, name=f"{x}.{n}") for n, leaf in zip(layout, t.packed.int4)]
    rows = _SolvedRows(t, solver) if solver else _RoundedRows(t, scheme, device)

    def lazy(leaf, shape, dtype):
        row = shape[2:] if len(shape) > 2 else shape[1:]
        new = LazyTensor(f"{x}.{leaf}", shape, dtype, None, (t,))
        times = t.n_row // new.n_row               # of the weight's rows in one; experts' scales
        new.read_rows = lambda a, b: rows.read(leaf, times * a, times * b).view(b - a, *row)
        return new
    return [lazy(leaf, *kind) for leaf, kind in layout.items()]


def has_own_codes(t: LazyTensor, scheme: Scheme) -> bool:
    return bool(t.packed and t.packed.int4) and scheme.name == "int4-g32"


def _filler(scheme: Scheme, leaf: str) -> Callable:
    return lambda target: scheme.fill(leaf, target)


class _RoundedRows:
    """Rounds row blocks of a tensor; keeps the leaves that were not asked for until they are.

    rows_kept: for each such leaf a buffer of all rows, and which of them are there.
    """

    def __init__(self, t: LazyTensor, scheme: Scheme, device):
        self.tensor, self.scheme, self.device = t, scheme, device
        self.rows_kept = {}

    def read(self, leaf: str, a: int, b: int) -> torch.Tensor:
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
                raise ValueError(f"{self.tensor.name} has weights that are infinite or no numbers")
            if other != "weight" and leaf == "weight":     # codes are large: made again
                self._keep(other, a, b, rows.cpu())
        return leaves[leaf].cpu()

    def _keep(self, leaf: str, a: int, b: int, rows: torch.Tensor) -> None:
        if leaf not in self.rows_kept:
            n = self.tensor.n_row
            buffer = rows.new_empty(n, *rows.shape[1:])
            self.rows_kept[leaf] = buffer, torch.zeros(n, dtype=torch.bool)
        buffer, there = self.rows_kept[leaf]
        buffer[a:b] = rows
        there[a:b] = True


class _SolvedRows:
    """The leaves that a solver gives for a tensor, kept until each was read to its end."""

    def __init__(self, t: LazyTensor, solver: Callable):
        self.tensor, self.solver = t, solver
        self.leaves = {}

    def read(self, leaf: str, a: int, b: int) -> torch.Tensor:
        if leaf not in self.leaves:
            leaves = self.solver(self.tensor.name)
            n = self.tensor.n_row
            self.leaves = {k: v.reshape(n, -1) for k, v in leaves.items()}
        rows = self.leaves[leaf][a:b]
        if b == self.tensor.n_row:
            del self.leaves[leaf]
        return rows


# ---- What a checkpoint is -----------------------------------------------------------------------

def schemes(source: Checkpoint) -> tuple[str, str]:
    """Of the linears and of the head, as the tensors say: "none", "int8", "int4-g32", …"""
    linears, head = {}, {}
    for name in source.tensors:
        x, _, leaf = name.rpartition(".")
        if leaf == "scales":
            kinds = head if x in ("embed", "head") else linears
            kinds[scheme_at(source.tensors, x).name] = True
    return "/".join(linears) or "none", "/".join(head) or "none"


def describe(source: Checkpoint) -> str:
    """schemes() in words, and how they were found; "" if nothing is quantized."""
    linears, head = schemes(source)
    by = " by GPTQ" if (source.quantization or {}).get("gptq") else ""
    return "" if (linears, head) == ("none", "none") else f"{linears}{by}, head {head}"


def note(source: Checkpoint, mode: str, groupsize: int, solved: bool = False,
         others: dict[str, Scheme] | None = None) -> str:
    """What int4 adds where a file's linears are in few bits already, in a line; else "".

    solved: none keeps its codes. others: as quantized() takes them.
    """
    if mode == "int8":                             # loses next to nothing on any
        return ""
    linears = {name: t for name, t in source.tensors.items() if LINEARS.search(name)}
    scheme, others = scheme_named(mode, groupsize), others or {}
    anew, n_own = {}, 0
    for name, t in linears.items():
        own = not solved and name not in others and has_own_codes(t, scheme)
        if own or name.replace(".weight", ".scales") in source.tensors:
            n_own += 1
        elif t.packed and name not in others:
            anew[t.packed.kind] = True
    if not n_own and not anew:
        return ""
    kept = f"{n_own} of {len(linears)} linears keep the four bits of their file"
    if not anew:
        return f"note: {kept}"
    rounded = f"weights in {', '.join(anew)} are rounded again, to {scheme.name}: a second loss"
    return f"note: {rounded}; {kept}" if n_own else f"note: {rounded}"


# ---- Flags --------------------------------------------------------------------------------------

def add_flags(add: Callable) -> None:
    """For every command that loads a model."""
    add("--quantize", choices=MODES,
        help="round the weights while loading, without a file; GPTQ is quantize.py's")
    add_choices(add)


def add_choices(add: Callable) -> None:
    add("--groupsize", type=int, choices=GROUPSIZES, default=32,
        help="int4: weights of a row that share a scale")
    add("--quantize_head", choices=["none", *MODES], default="int8",
        help="the output layer; int8 also serves the embedding where both are one matrix")


def as_flagged(source: Checkpoint, args, device) -> Checkpoint:
    """What --quantize and its companions ask for."""
    if args.quantize is None:
        return source
    new = quantized(source, args.quantize, args.groupsize, args.quantize_head, device)
    if text := note(source, args.quantize, args.groupsize):
        print(text, file=sys.stderr, flush=True)
    return new
