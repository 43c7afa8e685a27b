"""Quantize a checkpoint lazily: quantize.py's rounding, int4 and fp4 that are already in the file,
GPTQ, mixed precision and random weights.

GPTQ solves layers in order: the tensors are sorted by layer, and must be read in that order.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

import quantize
from checkpoint import Checkpoint, LazyTensor
from gpt_faster.formats.fp4 import fp4_leaves, fp4_linears
from gpt_faster.formats.lazy import Packed
from gpt_faster.layers.fp4 import Fp4
from quantize import LINEARS, Int4, Scheme, describe, scheme_named


def quantized(source: Checkpoint, mode: str, groupsize: int = 32, head: str = "int8",
              device="cpu", solver: Callable | None = None,
              others: dict[str, Scheme] | None = None) -> Checkpoint:
    """quantize.quantized(), for any checkpoint.

    solver(name) -> quantized tensors, instead of rounding to nearest (GPTQ). others: linears with
    another scheme. Int4 in the file is kept: a GGUF's if its group size is the requested one, AWQ,
    GPTQ and compressed-tensors with any group size; so is fp4, unless int8 is requested.
    ValueError: already quantized in another way, or the group size does not divide the inputs.
    """
    schemes = quantize.schemes_for(source, mode, groupsize, head)
    schemes |= {name: scheme for name, scheme in (others or {}).items() if name in schemes}
    keeps_int4 = mode != "int8" and not solver and schemes and "int4" in describe(source)
    if not keeps_int4:
        quantize.refuse_quantized(source)

    in_fp4 = {} if solver else fp4_linears(source)

    def leaves(t, scheme):
        if t.name in in_fp4 and keeps_codes(t, scheme):
            return fp4_leaves(t)
        return quantize_tensor(t, scheme, device, solver if LINEARS.search(t.name) else None)
    tensors = quantize.with_leaves(source, schemes, leaves)
    quantization = dict(mode=mode, head=head, gptq=solver is not None)
    mtp = source.mtp and (lambda: quantized(source.mtp(), mode, groupsize, "none", device))
    return replace(source, tensors=tensors, quantization=quantization, mtp=mtp)


def quantize_tensor(t: LazyTensor, scheme: Scheme, device="cpu",
              solver: Callable | None = None) -> list[LazyTensor]:
    """X.weight -> quantized X.weight, X.scales, … solver(name) -> all of them at once."""
    x = t.name.removesuffix(".weight")
    layout = scheme.leaves(t.shape)
    if t.read_rows is None:                        # random weights: random codes and scales
        own = scheme if isinstance(scheme, Fp4) else None
        return [LazyTensor(f"{x}.{part}", *kind, None, fill=_filler(scheme, part), scheme=own)
                for part, kind in layout.items()]
    if solver:
        return quantize.lazy_leaves(t, scheme, _SolvedRows(t, solver).read)
    if has_int4_codes(t, scheme):
        return [replace(part, name=f"{x}.{n}") for n, part in zip(layout, t.packed.leaves)]
    return quantize.rounded_leaves(t, scheme, device)


def has_int4_codes(t: LazyTensor, scheme: Scheme) -> bool:
    return bool(t.packed) and t.packed.scheme == scheme


def keeps_codes(t: LazyTensor, scheme: Scheme) -> bool:
    """Does the file have codes that stand in for the requested scheme's, as they are?"""
    return has_int4_codes(t, scheme) or isinstance(scheme, Int4) and has_fp4_codes(t)


def has_fp4_codes(t: LazyTensor) -> bool:
    return bool(t.packed) and isinstance(t.packed.scheme, Fp4)


def with_fp4(source: Checkpoint) -> Checkpoint:
    """The checkpoint whose fp4 linears keep the codes of the file; all others as they are."""
    schemes = fp4_linears(source)
    mtp = source.mtp and (lambda: with_fp4(source.mtp()))
    if not schemes:
        return replace(source, mtp=mtp) if mtp else source
    tensors = {}
    for name, t in source.tensors.items():
        if name in schemes:
            tensors.update((leaf.name, leaf) for leaf in fp4_leaves(t.renamed(name)))
        else:
            tensors[name] = t
    return replace(source, tensors=tensors, mtp=mtp)


def _filler(scheme: Scheme, part: str) -> Callable:
    return lambda target: fill(scheme, part, target)


def fill(scheme: Scheme, part: str, t: torch.Tensor) -> None:
    """Random codes and scales, as of weights with a standard deviation of 0.02."""
    if isinstance(scheme, Fp4):
        if part == "scales":
            t.fill_(0.02 / 2.93)                   # standard deviation of e2m1's values
            return
        t.random_(0, 256)
        scheme.split(t)[1].fill_(56 if scheme.groupsize == 16 else 127)    # 1.0 in e4m3, e8m0
    elif part != "weight":
        deviation = 73 if scheme.groupsize is None else 4.6        # standard deviation of the codes
        t.fill_((0.01 if part == "zeros" else 0.02) / deviation)   # codes' mean is -0.5
    elif scheme.groupsize is None:
        t.random_(-127, 128)
    else:
        t.random_(0, 256)


class _SolvedRows:
    """Rows of a solver's tensors for one linear. Each is freed after its last row was read."""

    def __init__(self, t: LazyTensor, solver: Callable):
        self.tensor, self.solver = t, solver
        self.parts = {}

    def read(self, part: str, a: int, b: int) -> torch.Tensor:
        if part not in self.parts:
            parts = self.solver(self.tensor.name)
            n = self.tensor.n_row
            self.parts = {k: v.reshape(n, -1) for k, v in parts.items()}
        rows = self.parts[part][a:b]
        if b == self.tensor.n_row:
            del self.parts[part]
        return rows


def note(source: Checkpoint, mode: str, groupsize: int, solved: bool = False,
         others: dict[str, Scheme] | None = None) -> str:
    """A one-line note for users who quantize a quantized file; else "".

    solved: GPTQ was used, no codes are kept. others: as for quantized().
    """
    if mode == "int8":                             # int8 loses next to nothing
        in_fp4 = fp4_linears(source)
        return (f"note: {len(in_fp4)} linears in {next(iter(in_fp4.values())).name} are quantized "
                "again, to int8, which takes more memory; without --quantize they stay as they are"
                if in_fp4 else "")
    linears = {name: t for name, t in source.tensors.items() if LINEARS.search(name)}
    scheme, others = scheme_named(mode, groupsize), others or {}
    requantized, n_kept = {}, 0
    in_fp4 = fp4_linears(source)
    for name, t in linears.items():
        is_kept = not solved and name not in others and (
            name in in_fp4 or has_int4_codes(t, scheme))
        if is_kept or name.replace(".weight", ".scales") in source.tensors:
            n_kept += 1
        elif t.packed and name not in others:
            requantized[t.packed.kind] = True
    if not n_kept and not requantized:
        return ""
    codes = "fp4" if in_fp4 else "int4"
    kept = f"{n_kept} of {len(linears)} linears keep the {codes} weights of the file"
    if not requantized:
        return f"note: {kept}"
    loss = (f"{', '.join(requantized)} weights are quantized again, to {scheme.name}, which loses "
            "more accuracy")
    return f"note: {loss}; {kept}" if n_kept else f"note: {loss}"


def multiplies_fp4(engine: str, device) -> bool:
    """Uncompiled, a CPU would dequantize a matrix for each product: it gets plain weights."""
    return torch.device(device).type != "cpu" or engine not in ("kv_cache", "recompute")


def without_fp4(source: Checkpoint) -> Checkpoint:
    """The checkpoint whose fp4 linears are read dequantized."""
    def plain(t):
        return replace(t, packed=Packed(t.packed.kind)) if has_fp4_codes(t) else t
    mtp = source.mtp and (lambda: without_fp4(source.mtp()))
    return replace(source, tensors={name: plain(t) for name, t in source.tensors.items()}, mtp=mtp)


def quantize_as_requested(source: Checkpoint, mode: str | None, groupsize: int, head: str,
                          device, keep_fp4: bool = True) -> Checkpoint:
    """Apply --quantize, --groupsize and --quantize_head, with a note. mode None: fp4 of the file
    stays fp4 if keep_fp4, the rest is unchanged."""
    if not keep_fp4:
        source = without_fp4(source)
    if mode is None:
        return with_fp4(source)
    new = quantized(source, mode, groupsize, head, device)
    if text := note(source, mode, groupsize):
        print(text, file=sys.stderr, flush=True)
    return new
