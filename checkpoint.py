"""Checkpoints: a path or hub name -> a model with its weights; and our own file, written.

In the order of the work, which is the order of this file:

    resolve    a path or a hub name -> where it lies, downloaded
    read       config.json and safetensors, or our .pth -> a config and lazy tensors
    rename     their parameter names -> ours, experts together
    check      names, shapes and dtypes; is the output layer the embedding?
    assign     into a model without memory, a few megabytes of a tensor at a time

It knows Llama, Mistral, Mixtral, Qwen2 and Qwen3. What a file states is acted on or refused, never
silently ignored. formats/ adds families, file formats and quantized weights of others. Nothing in a
checkpoint is executed.

    source = open_checkpoint("org/name or path")
    model = load_model(source, torch.bfloat16, "cpu")
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CHUNK = 1 << 22                                    # elements in memory at a time, beside the model
LARGEST_TEXT = 1 << 28                             # bytes: ten times the longest tokenizer.json
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
              F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2, F8_E8M0=torch.float8_e8m0fnu,
              I64=torch.int64, I32=torch.int32, I8=torch.int8, U8=torch.uint8)


# ---- What errors quote, and small files ---------------------------------------------------------

class Unforeseen(Exception):
    """What no reader expected a file to do to it: damage of a new kind, or a mistake of ours."""


def first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]


def brief(value) -> str:
    """A value in a message: never long, never several lines."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "an integer of more than 128 bits"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "…"


def some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def is_out_of_memory(e: Exception) -> bool:
    return (isinstance(e, MemoryError | torch.OutOfMemoryError)
            or isinstance(e, RuntimeError | OSError) and "allocate memory" in str(e))


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Errors name the file: ValueError, OSError and ImportError in a line; any other is Unforeseen,
    but for a lack of memory.
    """
    try:
        yield
    except ValueError as e:
        if str(path) in str(e):
            raise
        raise ValueError(f"{path}: {first_line(e)}") from e
    except Exception as e:
        if isinstance(e, OSError | ImportError | Unforeseen) or is_out_of_memory(e):
            raise
        raise Unforeseen(f"{path}: an unforeseen {type(e).__name__} while it was read "
                         f"({first_line(e)}): the file is damaged in a way that we do not know, or "
                         "the mistake is ours; please report it, --debug shows where") from e


def read_text(path: Path) -> str:
    """UTF-8. ValueError where it is no ordinary file (a device never ends), too long, or no text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file" if not path.exists() else
                                f"{path}: expected a file, found something else")
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"{path}: {size:,} bytes, expected at most {LARGEST_TEXT:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None


def read_json(path: Path) -> dict:
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as e:                        # integers of thousands of digits too
        raise ValueError(f"{path}: not valid JSON ({first_line(e)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# ---- Lazy tensors -------------------------------------------------------------------------------

@dataclass
class LazyTensor:
    """A tensor that is still on disk: its name, shape and dtype, and how to read rows [start, end).

    A row is an index of the first axis; of the first two, flattened, where there are more than two
    (experts [E, out, in] have E * out rows). read_rows is None for random weights, which `fill`
    draws into a tensor that is given. made_of: the tensors that read_rows reads. packed: where a
    file has quantized weights of its own (formats/lazy.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: Callable[[int, int], Tensor] | None         # (start, end) -> [end - start, *row]
    made_of: tuple["LazyTensor", ...] = ()
    fill: Callable[[Tensor], None] | None = None
    packed: object = None                          # None too where other numbers were made of it

    @property
    def n_row(self) -> int:
        return math.prod(self.shape[:2]) if len(self.shape) > 2 else math.prod(self.shape[:1])

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


def as_rows(t: Tensor) -> Tensor:
    """A tensor in the shape in which LazyTensor counts its rows."""
    if t.dim() > 2:
        return t.flatten(0, 1)
    return t.reshape(1) if t.dim() == 0 else t


def made_from(t: LazyTensor, read_rows: Callable | None, **changes) -> LazyTensor:
    """A tensor whose rows are made of those of `t`; what `changes` does not name is as there."""
    new = LazyTensor(t.name, t.shape, t.dtype, t.read_rows and read_rows, (t,), t.fill)
    return replace(new, **changes)


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


# ---- Files of tensors ---------------------------------------------------------------------------

def read_safetensors(path: Path) -> list[LazyTensor]:
    """Its tensors; slices of them are read when their rows are asked for."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as e:
        raise ValueError(f"{path}: not a readable safetensors file (truncated?): {e}") from None

    return [_sliced(name, file.get_slice(name)) for name in file.keys()]


def _sliced(name: str, piece) -> LazyTensor:
    shape = tuple(piece.get_shape())

    def scalar(a, b):
        return piece[...].reshape(1)

    def rows(a, b):
        return piece[a:b]

    def rows_of_matrices(a, b):                    # slices do not cross the first axis
        return across_matrices(a, b, shape[1], lambda i, low, high: piece[i:i + 1, low:high][0])
    if len(shape) > 2:
        rows = rows_of_matrices
    read_rows = rows if shape else scalar
    return LazyTensor(name, shape, DTYPES.get(piece.get_dtype(), torch.uint8), read_rows)
