"""Operations on lazy tensors: reorder, scale, transpose, concatenate, without reading them.

Extends checkpoint.LazyTensor, which has slicing. Knows no file format, no model, no tensor names:

    for start, end, rows in scaled(tensor, 2.0).chunks(): ...
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint import LazyTensor, across_matrices, as_rows
from quantize import Scheme


class Packed(NamedTuple):
    """How a file stores a quantized matrix, whose rows are read dequantized.

    kind: the format's name for it, "Q4_1". scheme: the scheme that has the same values, if there is
    one; leaves: its leaves, with one row for each of the matrix's (a leaf of one value per row has
    a last axis of 1).
    """

    kind: str
    scheme: Scheme | None = None
    leaves: tuple["LazyTensor", ...] = ()

    def rows(self, select: Callable) -> "Packed":
        """Of the rows that select(tensor) selects, of the matrix and of its leaves."""
        return self._replace(leaves=tuple(map(select, self.leaves)))

    def stacked(self, stack: Callable, others: list["Packed | None"]) -> "Packed":
        """Of the matrices stacked as stack(tensors) does, the first one's scheme being self's."""
        if any(other is None or other.scheme != self.scheme for other in others):
            return Packed(self.kind)
        return self._replace(leaves=tuple(stack(list(parts))
                                          for parts in zip(*(other.leaves for other in others))))


class CachedTensor(LazyTensor):
    """A tensor computed whole at the first read, and cached until release()."""

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
    """For tensors whose rows cannot be read one by one: make() computes all, once per pass."""
    return CachedTensor(name, shape, dtype, make, made_of)


def constant(name: str, shape: tuple[int, ...], value: float) -> LazyTensor:
    """A constant tensor, not stored in any file."""
    return cached(name, shape, torch.float32, lambda: torch.full(shape, value))


def offset(t: LazyTensor, by: float) -> LazyTensor:
    return t.derived(lambda a, b: t.read_rows(a, b).float() + by, dtype=torch.float32)


def scaled(t: LazyTensor, by: float) -> LazyTensor:
    return t.derived(lambda a, b: t.read_rows(a, b).float() * by, dtype=torch.float32)


def index_select(t: LazyTensor, index: Tensor) -> LazyTensor:
    """Select output channels: rows of a matrix, of each expert's matrix, or entries of a bias.

    index: rows of one matrix. Experts' biases are [E, out]; their names end in "bias".
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
        low = int(row.min())                       # rows are mostly adjacent: one read, then gather
        return t.read_rows(low, int(row.max()) + 1)[row - low]
    packed = t.packed and t.packed.rows(lambda part: index_select(part, index))
    return t.derived(read_rows, shape=shape, packed=packed)


def pad_rows(t: LazyTensor, n: int, width: int) -> LazyTensor:
    """Append zero rows to every n rows, so that they become `width` rows."""
    def read_rows(a, b):
        row = torch.arange(a, b)
        is_stored = row % width < n
        source = (row // width * n + row % width)[is_stored]
        if not len(source):
            return t.read_rows(0, 1).new_zeros(b - a, *t.shape[1:])
        low = int(source[0])
        stored = t.read_rows(low, int(source[-1]) + 1)
        rows = stored.new_zeros(b - a, *stored.shape[1:])
        rows[is_stored] = stored
        return rows
    return t.derived(read_rows, shape=(t.shape[0] // n * width, *t.shape[1:]))


def pad_columns(t: LazyTensor, n: int, width: int) -> LazyTensor:
    """Append zero columns to every n columns of a matrix, so that they become `width` columns."""
    def read_rows(a, b):
        parts = t.read_rows(a, b).unflatten(-1, (-1, n))
        return torch.nn.functional.pad(parts, (0, width - n)).flatten(-2)
    return t.derived(read_rows, shape=(t.shape[0], t.shape[1] // n * width))


class TransposedTensor(LazyTensor):
    """[…, in, out] on disk, read as […, out, in]. Caches one matrix until release()."""

    def __init__(self, t: LazyTensor):
        *lead, n_in, n_out = t.shape
        super().__init__(t.name, (*lead, n_out, n_in), t.dtype, self._read, (t,))
        self.current = None                        # (index, matrix [out, in])

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
    """[…, in, out] -> […, out, in], one matrix at a time. A vector stays as it is."""
    return t if len(t.shape) == 1 else TransposedTensor(t)


def concatenate(pieces: list[LazyTensor], axis: int) -> LazyTensor:
    """Concatenate matrices of the same shape along axis 0 or 1."""
    first = pieces[0]
    n, width = first.shape

    def columns(a, b):
        return torch.cat([p.read_rows(a, b) for p in pieces], dim=1)

    def rows(a, b):
        return across_matrices(a, b, n, lambda i, low, high: pieces[i].read_rows(low, high))
    shape = (n * len(pieces), width) if axis == 0 else (n, sum(p.shape[1] for p in pieces))
    return LazyTensor(first.name, shape, first.dtype, rows if axis == 0 else columns, tuple(pieces))
