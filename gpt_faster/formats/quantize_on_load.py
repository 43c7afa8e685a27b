"""quantize.py's rounding of a checkpoint, and what only some checkpoints and commands add to it.

A file's own four bits, which stay as they are; GPTQ's solver; linears with a scheme of their own;
random weights.

The solver needs the order from the first layer to the last: the checkpoint's tensors are sorted so,
and whoever writes or loads takes them one after another.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

import quantize
from checkpoint import Checkpoint, LazyTensor
from quantize import LINEARS, Scheme, describe, scheme_named


def quantized(source: Checkpoint, mode: str, groupsize: int = 32, head: str = "int8",
              device="cpu", solver: Callable | None = None,
              others: dict[str, Scheme] | None = None) -> Checkpoint:
    """quantize.quantized(), of any checkpoint.

    solver(name) -> leaves, in place of rounding the linears (GPTQ). others: linears with a scheme
    of their own. What is in four bits already stays as it is: the groups of a GGUF where they are
    as asked for, a hub's whatever they are. ValueError where all is quantized already, or
    otherwise, or the group size does not divide.
    """
    schemes = quantize.schemes_for(source, mode, groupsize, head)
    schemes |= {name: scheme for name, scheme in (others or {}).items() if name in schemes}
    goes_on = mode != "int8" and not solver and schemes and "int4" in describe(source)
    if not goes_on:
        quantize.refuse_quantized(source)

    def leaves(t, scheme):
        return quantize_tensor(t, scheme, device, solver if LINEARS.search(t.name) else None)
    tensors = quantize.with_leaves(source, schemes, leaves)
    made = dict(mode=mode, head=head, gptq=solver is not None)
    mtp = source.mtp and (lambda: quantized(source.mtp(), mode, groupsize, "none", device))
    return replace(source, tensors=tensors, quantization=made, mtp=mtp)


def quantize_tensor(t: LazyTensor, scheme: Scheme, device="cpu",
              solver: Callable | None = None) -> list[LazyTensor]:
    """X.weight, X.scales, … in place of a tensor X.weight. solver(name) -> all leaves at once."""
    x = t.name.removesuffix(".weight")
    layout = scheme.leaves(t.shape)
    if t.read_rows is None:                        # random weights: so are these
        return [LazyTensor(f"{x}.{leaf}", *kind, None, fill=_filler(scheme, leaf))
                for leaf, kind in layout.items()]
    if solver:
        return quantize.lazy_leaves(t, scheme, _SolvedRows(t, solver).read)
    if has_int4_codes(t, scheme):
        return [replace(leaf, name=f"{x}.{n}") for n, leaf in zip(layout, t.packed.int4)]
    return quantize.rounded_leaves(t, scheme, device)


def has_int4_codes(t: LazyTensor, scheme: Scheme) -> bool:
    return bool(t.packed and t.packed.int4) and scheme.name == "int4-g32"


def _filler(scheme: Scheme, leaf: str) -> Callable:
    return lambda target: fill(scheme, leaf, target)


def fill(scheme: Scheme, leaf: str, t: torch.Tensor) -> None:
    """Random numbers as large as those of trained weights, whose deviation is 0.02."""
    if leaf != "weight":
        deviation = 73 if scheme.groupsize is None else 4.6        # of the codes
        t.fill_((0.01 if leaf == "zeros" else 0.02) / deviation)   # codes' mean is -0.5
    elif scheme.groupsize is None:
        t.random_(-127, 128)
    else:
        t.random_(0, 256)


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
        own = not solved and name not in others and has_int4_codes(t, scheme)
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


def quantize_as_requested(source: Checkpoint, mode: str | None, groupsize: int, head: str, device) -> Checkpoint:
    """What --quantize and its companions ask for, with a line about it; mode None: nothing."""
    if mode is None:
        return source
    new = quantized(source, mode, groupsize, head, device)
    if text := note(source, mode, groupsize):
        print(text, file=sys.stderr, flush=True)
    return new
