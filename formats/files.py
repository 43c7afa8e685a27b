"""Tensors as they lie on disk: safetensors, PyTorch and GGUF files -> named, lazy tensors.

It knows files, and how to take the rows of a tensor apart and put them together again. It knows no
model, no config and none of the names inside:

    for tensor in safetensors(path): print(tensor.name, tensor.shape, tensor.rows(0, 1))
"""

import json
import math
import mmap
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CHUNK = 1 << 22                                    # elements that a read may hold beside the model


@dataclass
class Lazy:
    """A tensor that is still on disk: its name there, its shape, and how to read rows [a, b).

    A row is an index of the first axis; of the first two, flattened, where there are more than two
    (experts [E, out, in] have E * out rows).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor] | None      # (a, b) -> [b - a, *row]; None: random weights

    @property
    def n_row(self) -> int:
        return math.prod(self.shape[:2]) if len(self.shape) > 2 else math.prod(self.shape[:1])

    def whole(self) -> Tensor:
        return self.rows(0, self.n_row).reshape(self.shape)

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        step = max(1, CHUNK * self.n_row // math.prod(self.shape))
        for a in range(0, self.n_row, step):
            b = min(a + step, self.n_row)
            yield a, b, self.rows(a, b)
        _made.clear()


def as_rows(t: Tensor) -> Tensor:
    """A tensor in the shape in which Lazy counts its rows."""
    return t.flatten(0, 1) if t.dim() > 2 else t.reshape(1) if t.dim() == 0 else t


# ---- Tensors made of others ---------------------------------------------------------------------

_made = {}                                         # what its parts need, while a tensor is read


def made_once(name: str, shape: tuple[int, ...], dtype: torch.dtype,
              make: Callable[[], Tensor]) -> Lazy:
    """Where rows cannot be had one by one: make() all at the first one, for the reader's chunks."""
    def rows(a, b):
        if rows not in _made:
            _made[rows] = as_rows(make())
        return _made[rows][a:b]
    return Lazy(name, tuple(shape), dtype, rows)


def offset(t: Lazy, by: float) -> Lazy:
    return replace(t, dtype=torch.float32, rows=lambda a, b: t.rows(a, b).float() + by)


def scaled(t: Lazy, by: float) -> Lazy:
    return replace(t, dtype=torch.float32, rows=lambda a, b: t.rows(a, b).float() * by)


def pick(t: Lazy, index: Tensor) -> Lazy:
    """Some of the outputs, in another order: of a matrix, of each expert's matrix, or of a bias.

    index: which of a matrix' rows. An expert's bias is a row itself: [E, out] by is_bias in `name`.
    """
    if len(t.shape) == 2 and t.name.endswith("bias"):                  # experts' biases [E, out]
        return replace(t, shape=(t.shape[0], len(index)), rows=lambda a, b: t.rows(a, b)[:, index])
    n, size = len(index), t.shape[-2 if len(t.shape) > 2 else 0]
    shape = (t.shape[0], n, *t.shape[2:]) if len(t.shape) > 2 else (n, *t.shape[1:])

    def rows(a, b):
        row = torch.arange(a, b)
        row = row // n * size + index[row % n]
        low = int(row.min())                       # near each other mostly: one read, then sort
        return t.rows(low, int(row.max()) + 1)[row - low]
    return replace(t, shape=shape, rows=rows)


def narrow(t: Lazy, axis: int, low: int, high: int) -> Lazy:
    """Indices [low, high) of the axis of the outputs or of the inputs; reads little else.

    Of experts [E, out, in] not the first axis.
    """
    n, shape = t.shape[axis], (*t.shape[:axis], high - low, *t.shape[axis + 1:])
    if axis == max(1, len(shape) - 1):                     # within a row
        rows = lambda a, b: t.rows(a, b)[..., low:high]
    elif axis == 0:
        rows = lambda a, b: t.rows(low + a, low + b)
    else:
        rows = lambda a, b: _across(
            a, b, high - low, lambda i, a, b: t.rows(i * n + low + a, i * n + low + b))
    return replace(t, shape=shape, rows=t.rows and rows)


def _across(a: int, b: int, n: int, part: Callable[[int, int, int], Tensor]) -> Tensor:
    """Rows [a, b) of matrices with n rows each, from part(i, low, high): those of the i-th."""
    parts = []
    while a < b:
        i, low = divmod(a, n)
        high = min(n, low + b - a)
        parts.append(part(i, low, high))
        a += high - low
    return torch.cat(parts)


def transpose(t: Lazy) -> Lazy:
    """[…, in, out] -> […, out, in], a matrix at a time; a vector as it is."""
    if len(t.shape) == 1:
        return t
    *lead, n_in, n_out = t.shape

    def part(i, low, high):
        if _made.get(part, (None,))[0] != i:
            _made[part] = i, t.rows(i * n_in, (i + 1) * n_in).T
        return _made[part][1][low:high]
    return replace(t, shape=(*lead, n_out, n_in), rows=lambda a, b: _across(a, b, n_out, part))


def stack(pieces: list[Lazy]) -> Lazy:
    """One tensor [E, *shape] of E of the same shape."""
    n, shape = pieces[0].shape[0], (len(pieces), *pieces[0].shape)

    def rows(a, b):
        if len(shape) == 2:
            return torch.stack([p.whole() for p in pieces[a:b]])
        return _across(a, b, n, lambda i, low, high: pieces[i].rows(low, high))
    return replace(pieces[0], shape=shape, rows=rows)


def merge_shards(shards: list[list[Lazy]]) -> list[Lazy]:
    """Meta's consolidated.NN.pth: tensor-parallel pieces, split along the rows or the columns."""
    def merge(pieces):
        name, shape, n = pieces[0].name, pieces[0].shape, pieces[0].shape[0]
        if len(pieces) == 1 or len(shape) == 1:
            return pieces[0]
        if re.search(r"\.(wo|w2)\.weight$|^tok_embeddings", name):
            shape = n, sum(p.shape[1] for p in pieces)
            rows = lambda a, b: torch.cat([p.rows(a, b) for p in pieces], dim=1)
        else:
            shape = n * len(pieces), shape[1]
            rows = lambda a, b: torch.cat([         # piece i holds the rows from i * n
                p.rows(max(a - i * n, 0), min(b - i * n, n)) for i, p in enumerate(pieces)
                if i * n < b and a < (i + 1) * n])
        return Lazy(name, shape, pieces[0].dtype, rows)
    return [merge(pieces) for pieces in zip(*shards)]


# ---- Files ---------------------------------------------------------------------------------------

def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_torch(path: Path) -> dict:
    """A PyTorch file, memory-mapped where its format allows. Never executes what is in it."""
    for lazy in (True, False):
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=lazy)
            break
        except pickle.UnpicklingError as e:
            raise ValueError(f"{path}: refused, it holds more than weights "
                             f"({first_line(e)})") from None
        except (RuntimeError, EOFError, ValueError, OSError) as e:
            if isinstance(e, OSError) and e.filename:      # not found, not allowed
                raise
            if not lazy or "mmap can only be used" not in str(e):      # a file older than torch 1.6
                raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                                 f"{first_line(e)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


def from_torch(tensors: dict) -> list[Lazy]:
    return [Lazy(n, tuple(t.shape), t.dtype, lambda a, b, t=t: as_rows(t)[a:b])
            for n, t in tensors.items() if isinstance(t, Tensor)]


DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
              F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2, F8_E8M0=torch.float8_e8m0fnu,
              I64=torch.int64, I32=torch.int32, I8=torch.int8, U8=torch.uint8)


def safetensors(path: Path) -> list[Lazy]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as e:
        raise ValueError(f"{path}: not a readable safetensors file (truncated?): {e}") from None

    def lazy(name):
        piece = file.get_slice(name)
        shape, dtype = tuple(piece.get_shape()), DTYPES.get(piece.get_dtype(), torch.uint8)
        rows = lambda a, b: piece[a:b] if shape else piece[...].reshape(1)
        if len(shape) > 2:                         # slices do not cross the first axis
            rows = lambda a, b: _across(
                a, b, shape[1], lambda i, low, high: piece[i:i + 1, low:high][0])
        return Lazy(name, shape, dtype, rows)
    return [lazy(name) for name in file.keys()]


def hub_weights(directory: Path, name: str) -> list[Lazy]:
    """Every tensor of model.safetensors, pytorch_model.bin, or the shards that an index lists."""
    if name.endswith(".index.json"):
        shards = sorted(set(read_json(directory / name).get("weight_map", {}).values()))
    else:
        shards = [name]
    lazies = []
    for shard in shards:
        path = directory / shard
        if not path.exists():
            raise FileNotFoundError(f"{path}: listed in {name} but not there: download it again")
        lazies += (safetensors(path) if shard.endswith(".safetensors")
                   else from_torch(read_torch(path)))
    return lazies


def first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]


def some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


# ---- GGUF (github.com/ggml-org/ggml, docs/gguf.md) ----------------------------------------------

def read_gguf_header(data) -> tuple[dict, list[tuple], int]:
    """Metadata, tensor infos (name, shape, type, offset) and where the tensors begin.

    The gguf package has a reader, but it takes 8 s for a 262k vocabulary where this takes 0.3 s.
    """
    at, codes = 0, "BbHhIif?__Qqd"                 # struct's letters in the order of GGUF's types

    def take(code):
        nonlocal at
        value, = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def string():
        nonlocal at
        n = take("Q")
        if at + n > len(data):
            raise struct.error("text runs past the end of the file")
        at += n
        return bytes(data[at - n:at]).decode("utf-8", "replace")

    def value(kind):
        nonlocal at
        if kind == 8:
            return string()
        if kind == 9:
            kind, n = take("I"), take("Q")
            if kind in (8, 9):
                return [value(kind) for _ in range(n)]
            values = struct.unpack_from(f"<{n}{codes[kind]}", data, at)
            at += n * struct.calcsize(codes[kind])
            return list(values)
        return take(codes[kind])

    if bytes(data[:4]) != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    at = 4
    version = take("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors, n_keys = take("Q"), take("Q")
    metadata = {}
    for _ in range(n_keys):
        key = string()
        metadata[key] = value(take("I"))
    infos = []
    for _ in range(n_tensors):
        name = string()
        shape = tuple(take("Q") for _ in range(take("I")))[::-1]       # stored fastest first
        infos.append((name, shape, take("I"), take("Q")))
    alignment = metadata.get("general.alignment", 32)
    return metadata, infos, -(-at // alignment) * alignment


def gguf_tensors(path: Path) -> tuple[dict, list[Lazy]]:
    """Metadata and tensors of one file, dequantized as they are read."""
    try:
        import gguf
        import numpy as np
    except ImportError:
        raise ImportError("reading a GGUF needs: pip install gguf") from None
    with open(path, "rb") as f:
        if os.path.getsize(path) < 24:
            raise ValueError(f"{path}: not a readable GGUF file: too short")
        data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        metadata, infos, start = read_gguf_header(data)
    except (struct.error, ValueError, IndexError, MemoryError, OverflowError) as e:
        raise ValueError(f"{path}: not a readable GGUF file (truncated?): {e}") from None
    lazies = []
    for name, shape, kind, at in infos:
        try:
            kind = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"{path}: {name} has quantization type {kind}, unknown to gguf "
                             f"{getattr(gguf, '__version__', '')}: pip install -U gguf") from None
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(shape) * n_bytes // n_block
        begin, end = start + at, start + at + size
        if end > len(data):
            raise ValueError(f"{path}: truncated: {name} ends at byte {end:,}, the file "
                             f"at {len(data):,}")
        row = shape[2:] if len(shape) > 2 else shape[1:]
        row_bytes = math.prod(row) * n_bytes // n_block

        def rows(a, b, begin=begin, row_bytes=row_bytes, kind=kind, row=row):
            block = np.frombuffer(data, np.uint8, (b - a) * row_bytes, begin + a * row_bytes)
            if kind == gguf.GGMLQuantizationType.BF16:                 # torch does this one faster
                return torch.from_numpy(block.copy()).view(torch.bfloat16).view(b - a, *row)
            values = gguf.dequantize(block.reshape(b - a, -1), kind)
            return torch.from_numpy(np.array(values, copy=True)).view(b - a, *row)

        if len(shape) == 1:                        # a vector's blocks do not end with its rows
            def rows(a, b, begin=begin, size=size, kind=kind):
                block = np.frombuffer(data, np.uint8, size, begin)
                return torch.from_numpy(np.array(gguf.dequantize(block, kind), copy=True))[a:b]
        dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind.name, torch.bfloat16)
        lazies.append(Lazy(name, shape, dtype, rows))
    return metadata, lazies
