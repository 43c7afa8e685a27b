"""Lazy tensors made of others without reading them, as formats of others need them.

On top of checkpoint.LazyTensor, whose rows are cut there; here they are reordered, scaled, turned
and put together. Knows no file format, no model and none of the names inside:

    for start, end, rows in scaled(tensor, 2.0).chunks(): ...
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint import LazyTensor, across_matrices, as_rows


class Packed(NamedTuple):
    """How a file has a matrix whose rows are read as plain numbers.

    kind: as the format calls it, "Q4_1". int4: its own codes, scales and zeros, where quantize.py's
    int4 with groups of 32 says the same.
    """

    kind: str
    int4: tuple["LazyTensor", ...] = ()


class CachedTensor(LazyTensor):
    """Rows of a value that is made whole, at the first read, and kept until release()."""

    def __init__(self, name, shape, dtype, make: Callable[[], Tensor], made_of=()):
        super().__init__(name, tuple(shape), dtype, self._read, tuple(made_of))
        self.make = make
        self.value = None

    def _read(self, start, end):
        if self.value is None:
            self.value = as_rows(self.make())
        return self.value[start:end]

    def release(self) -> None:
        self.value = None
        super().release()


def cached(name: str, shape, dtype: torch.dtype, make: Callable[[], Tensor],
           *made_of: LazyTensor) -> LazyTensor:
    """Where rows cannot be read one by one: make() gives all, once for each pass of a reader."""
    return CachedTensor(name, shape, dtype, make, made_of)


def constant(name: str, shape: tuple[int, ...], value: float) -> LazyTensor:
    """A vector that no file holds."""
    return cached(name, shape, torch.float32, lambda: torch.full(shape, value))


def offset(t: LazyTensor, by: float) -> LazyTensor:
    return t.derived(lambda a, b: t.read_rows(a, b).float() + by, dtype=torch.float32)


def scaled(t: LazyTensor, by: float) -> LazyTensor:
    return t.derived(lambda a, b: t.read_rows(a, b).float() * by, dtype=torch.float32)


def index_select(t: LazyTensor, index: Tensor) -> LazyTensor:
    """Some of the outputs, in another order: of a matrix, of each expert's matrix, or of a bias.

    index: which of a matrix' rows. An expert's bias is a row itself: [E, out] by its name.
    """
    n = len(index)
    if len(t.shape) == 2 and t.name.endswith("bias"):                  # experts' biases [E, out]
        return t.derived(lambda a, b: t.read_rows(a, b)[:, index], shape=(t.shape[0], n))
    experts = len(t.shape) > 2
    size = t.shape[-2 if experts else 0]
    shape = (t.shape[0], n, *t.shape[2:]) if experts else (n, *t.shape[1:])

    def read_rows(a, b):
        row = torch.arange(a, b)
        row = row // n * size + index[row % n]
        low = int(row.min())                       # near each other mostly: one read, then sort
        return t.read_rows(low, int(row.max()) + 1)[row - low]
    packed = t.packed and Packed(t.packed.kind, tuple(index_select(leaf, index)
                                                      for leaf in t.packed.int4))
    return t.derived(read_rows, shape=shape, packed=packed)


class TransposedTensor(LazyTensor):
    """[…, in, out] on disk, read as […, out, in]; keeps one matrix in memory until release()."""

    def __init__(self, t: LazyTensor):
        *lead, n_in, n_out = t.shape
        super().__init__(t.name, (*lead, n_out, n_in), t.dtype, self._read, (t,))
        self.current = None                        # (which, matrix [out, in])

    def _read(self, a, b):
        return across_matrices(a, b, self.shape[-2], self._part)

    def _part(self, i, low, high):
        if self.current is None or self.current[0] != i:
            n_in = self.shape[-1]
            self.current = i, self.made_of[0].read_rows(i * n_in, (i + 1) * n_in).T
        return self.current[1][low:high]

    def release(self) -> None:
        self.current = None
        super().release()


def transpose(t: LazyTensor) -> LazyTensor:
    """[…, in, out] -> […, out, in], a matrix at a time; a vector as it is."""
    return t if len(t.shape) == 1 else TransposedTensor(t)


def concatenate(pieces: list[LazyTensor], axis: int) -> LazyTensor:
    """Matrices of the same shape, below each other (axis 0) or beside each other (axis 1)."""
    first = pieces[0]
    n, width = first.shape

    def beside(a, b):
        return torch.cat([p.read_rows(a, b) for p in pieces], dim=1)

    def below(a, b):
        return across_matrices(a, b, n, lambda i, low, high: pieces[i].read_rows(low, high))
    shape = (n * len(pieces), width) if axis == 0 else (n, sum(p.shape[1] for p in pieces))
    return LazyTensor(first.name, shape, first.dtype, below if axis == 0 else beside, tuple(pieces))
