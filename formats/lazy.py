"""LazyTensor: a tensor that is still on disk, and tensors made of others without reading them.

Owns how rows of a tensor are read, cut, reordered and put together. Knows no file format, no model
and none of the names inside. A row is an index of the first axis; of the first two, flattened,
where there are more than two (experts [E, out, in] have E * out rows):

    for start, end, rows in scaled(tensor, 2.0).chunks(): ...
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 22                                    # elements in memory at a time, beside the model


class Packed(NamedTuple):
    """How a file has a matrix whose rows are read as plain numbers.

    kind: as the format calls it, "Q4_1". int4: its own codes, scales and zeros, where quantize.py's
    int4 with groups of 32 says the same.
    """

    kind: str
    int4: tuple["LazyTensor", ...] = ()


@dataclass
class LazyTensor:
    """A tensor's name, shape and dtype, and how to read its rows [start, end).

    read_rows is None for random weights: `fill` then draws them into a tensor that is given.
    made_of: the tensors that read_rows reads; what those cache ends with chunks() and whole().
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: Callable[[int, int], Tensor] | None         # (start, end) -> [end - start, *row]
    made_of: tuple["LazyTensor", ...] = ()
    fill: Callable[[Tensor], None] | None = None
    packed: Packed | None = None                   # None too where other numbers were made of it

    @property
    def n_row(self) -> int:
        return math.prod(self.shape[:2]) if len(self.shape) > 2 else math.prod(self.shape[:1])

    def derived(self, read_rows: Callable | None, **changes) -> "LazyTensor":
        """A tensor whose rows are made of this one's; what `changes` does not name stays."""
        read_rows = self.read_rows and read_rows
        new = LazyTensor(self.name, self.shape, self.dtype, read_rows, (self,), self.fill)
        return replace(new, **changes)

    def renamed(self, name: str) -> "LazyTensor":
        return self.derived(self.read_rows, name=name, packed=self.packed)

    def whole(self) -> Tensor:
        try:
            return self.read_rows(0, self.n_row).reshape(self.shape)
        finally:
            self.release()

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, rows) one after another, of at most CHUNK elements or one row each."""
        step = max(1, CHUNK * self.n_row // math.prod(self.shape))
        try:
            for start in range(0, self.n_row, step):
                end = min(start + step, self.n_row)
                yield start, end, self.read_rows(start, end)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of what was kept in memory to read it."""
        for part in self.made_of:
            part.release()


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


def check_finite(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Rows of weights in another dtype. ValueError where they hold what is infinite or no number.
    """
    new = rows.to(dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2 or new.isfinite().all():
        return new
    if not rows.isfinite().all():
        raise ValueError(f"{name} has weights that are infinite or no numbers (NaN)")
    largest = rows.abs().max().item()
    raise ValueError(f"{name} has weights up to {largest:.3g}, above {str(dtype)[6:]}'s range: use "
                     "--dtype bfloat16")


def as_rows(t: Tensor) -> Tensor:
    """A tensor in the shape in which LazyTensor counts its rows."""
    if t.dim() > 2:
        return t.flatten(0, 1)
    return t.reshape(1) if t.dim() == 0 else t


def made_from(t: LazyTensor, read_rows: Callable | None, **changes) -> LazyTensor:
    return t.derived(read_rows, **changes)


def cached(name: str, shape, dtype: torch.dtype, make: Callable[[], Tensor],
           *made_of: LazyTensor) -> LazyTensor:
    """Where rows cannot be read one by one: make() gives all, once for each pass of a reader."""
    return CachedTensor(name, shape, dtype, make, made_of)


def constant(name: str, shape: tuple[int, ...], value: float) -> LazyTensor:
    """A vector that no file holds."""
    return cached(name, shape, torch.float32, lambda: torch.full(shape, value))


def offset(t: LazyTensor, by: float) -> LazyTensor:
    return made_from(t, lambda a, b: t.read_rows(a, b).float() + by, dtype=torch.float32)


def scaled(t: LazyTensor, by: float) -> LazyTensor:
    return made_from(t, lambda a, b: t.read_rows(a, b).float() * by, dtype=torch.float32)


def index_select(t: LazyTensor, index: Tensor) -> LazyTensor:
    """Some of the outputs, in another order: of a matrix, of each expert's matrix, or of a bias.

    index: which of a matrix' rows. An expert's bias is a row itself: [E, out] by its name.
    """
    n = len(index)
    if len(t.shape) == 2 and t.name.endswith("bias"):                  # experts' biases [E, out]
        return made_from(t, lambda a, b: t.read_rows(a, b)[:, index], shape=(t.shape[0], n))
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
    return made_from(t, read_rows, shape=shape, packed=packed)


def narrow(t: LazyTensor, axis: int, low: int, high: int) -> LazyTensor:
    """Indices [low, high) of an axis; reads little else."""
    n, each = t.shape[axis], t.n_row // t.shape[0]     # rows of one index of the first axis
    shape = (*t.shape[:axis], high - low, *t.shape[axis + 1:])

    def within_rows(a, b):
        return t.read_rows(a, b)[..., low:high]

    def some_rows(a, b):
        return t.read_rows(low * each + a, low * each + b)

    def some_of_each(a, b):
        return across_matrices(
            a, b, high - low, lambda i, a, b: t.read_rows(i * n + low + a, i * n + low + b))
    if axis == max(1, len(shape) - 1):
        return made_from(t, within_rows, shape=shape)
    return made_from(t, some_rows if axis == 0 else some_of_each, shape=shape)


def across_matrices(a: int, b: int, n: int, read: Callable[[int, int, int], Tensor]) -> Tensor:
    """Rows [a, b) of matrices with n rows each, from read(i, low, high): those of the i-th."""
    pieces = []
    while a < b:
        i, low = divmod(a, n)
        high = min(n, low + b - a)
        pieces.append(read(i, low, high))
        a += high - low
    return torch.cat(pieces)


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


def stack(pieces: list[LazyTensor]) -> LazyTensor:
    """One tensor [E, *shape] of E of the same shape."""
    first = pieces[0]
    shape = (len(pieces), *first.shape)

    def vectors(a, b):
        return torch.stack([p.whole() for p in pieces[a:b]])

    def matrices(a, b):
        return across_matrices(
            a, b, first.shape[0], lambda i, low, high: pieces[i].read_rows(low, high))
    read_rows = vectors if len(shape) == 2 else matrices
    return LazyTensor(first.name, shape, first.dtype, read_rows, tuple(pieces))


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
