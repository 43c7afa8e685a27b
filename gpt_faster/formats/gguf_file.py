"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md) -> metadata and lazy tensors.

The gguf package dequantizes blocks as they are read. Knows no architecture.
"""

import math
import mmap
import os
import struct
from pathlib import Path

import torch

from checkpoint import LazyTensor, brief
from gpt_faster.formats.gguf_int4 import as_int4
from gpt_faster.formats.lazy import Packed

MAX_ARRAY_ENTRIES = 1 << 24                             # 100x the largest vocabulary


def read_gguf_header(data) -> tuple[dict, list[tuple], int]:
    """-> metadata, tensor infos (name, shape, type, offset), and the offset of the tensor data.

    The gguf package's own reader takes 8 s for a 262k vocabulary, this one 0.3 s.
    """
    at, codes = 0, "BbHhIif?__Qqd"                 # struct's letter for each GGUF type
    left = min(len(data), MAX_ARRAY_ENTRIES)            # budget for all array entries

    def take_count(code, most, what):
        """Read a count of items. Each item takes at least one byte, which bounds the count."""
        n = take(code)
        if n > most:
            raise ValueError(f"{n:,} {what}, but the file can hold at most {most:,}")
        return n

    def take(code):
        nonlocal at
        value, = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def strings(n):                                # the hot loop: reads the vocabulary
        nonlocal at
        length, texts = struct.Struct("<Q").unpack_from, []
        for _ in range(n):
            end = at + 8 + length(data, at)[0]
            if end > len(data):
                raise struct.error("string runs past the end of the file")
            texts.append(str(data[at + 8:end], "utf-8", "replace"))
            at = end
        return texts

    def value(kind, depth=0):
        nonlocal at, left
        if kind == 8:
            return strings(1)[0]
        if kind == 9 and depth > 3:
            raise ValueError("arrays are nested too deeply")
        if kind == 9:
            kind, n = take("I"), take_count("Q", left, "array entries")
            left -= n
            if kind == 8:
                return strings(n)
            if kind == 9:
                return [value(kind, depth + 1) for _ in range(n)]
            if kind >= len(codes):
                raise ValueError(f"unknown array type {kind}")
            values = struct.unpack_from(f"<{n}{codes[kind]}", data, at)
            at += n * struct.calcsize(codes[kind])
            return list(values)
        if kind >= len(codes):
            raise ValueError(f"unknown value type {kind}")
        return take(codes[kind])

    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"invalid magic {bytes(data[:4])!r}, expected b'GGUF'")
    at = 4
    version = take("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported (supported: 2, 3)")
    n_tensors = take_count("Q", len(data), "tensors")
    n_keys = take_count("Q", len(data), "metadata keys")
    metadata = {}
    for _ in range(n_keys):
        key = strings(1)[0]
        metadata[key] = value(take("I"))
    infos = []
    for _ in range(n_tensors):
        name = strings(1)[0]
        n_axis = take_count("I", 4, f"axes of {name}")
        shape = tuple(take("Q") for _ in range(n_axis))[::-1]          # innermost first on disk
        infos.append((name, shape, take("I"), take("Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"general.alignment is {brief(alignment)}, expected a power of two")
    return metadata, infos, -(-at // alignment) * alignment


def read_gguf_tensors(path: Path) -> tuple[dict, list[LazyTensor]]:
    """-> metadata and lazy tensors of one file, dequantized as they are read."""
    try:
        import gguf
    except ImportError:
        raise ImportError("reading a GGUF needs: pip install gguf") from None
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as f:
        if os.path.getsize(path) < 24:
            raise ValueError(f"{path}: not a readable GGUF file: too short")
        data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        metadata, infos, start = read_gguf_header(data)
    except (struct.error, ValueError) as e:
        raise ValueError(f"{path}: not a readable GGUF file (truncated?): {e}") from None
    tensors = []
    for name, shape, kind, at in infos:
        try:
            kind = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"{path}: {name} has quantization type {kind}, which gguf "
                             f"{getattr(gguf, '__version__', '')} does not know: "
                             "pip install -U gguf") from None
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % n_block or 0 in shape:
            raise ValueError(f"{path}: {name} has shape {list(shape)}, but {kind.name} needs rows "
                             f"of a multiple of {n_block}")
        size = math.prod(shape) * n_bytes // n_block
        end = start + at + size
        if end > len(data):
            raise ValueError(f"{path}: truncated: {name} ends at byte {end:,}, but the file has "
                             f"{len(data):,}")
        tensors.append(_tensor(name, shape, kind, data[start + at:end]))
    return metadata, tensors


def _tensor(name: str, shape: tuple[int, ...], kind, data: memoryview) -> LazyTensor:
    """kind: a gguf.GGMLQuantizationType; data: the tensor's bytes."""
    import gguf
    import numpy as np
    row = shape[2:] if len(shape) > 2 else shape[1:]
    n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = math.prod(row) * n_bytes // n_block

    def bytes_of(a, b):
        blocks = np.frombuffer(data, np.uint8, (b - a) * row_bytes, a * row_bytes)
        return blocks.reshape(b - a, -1)

    def read_bytes(a, b):
        return torch.from_numpy(bytes_of(a, b).copy())

    def read_rows(a, b):
        if kind == gguf.GGMLQuantizationType.BF16:         # faster than gguf's
            return read_bytes(a, b).view(torch.bfloat16).view(b - a, *row)
        values = gguf.dequantize(bytes_of(a, b), kind)
        return torch.from_numpy(np.array(values, copy=True)).view(b - a, *row)

    def read_vector(a, b):                         # a vector's rows do not align with its blocks
        values = gguf.dequantize(np.frombuffer(data, np.uint8), kind)
        return torch.from_numpy(np.array(values, copy=True))[a:b]
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind.name, torch.bfloat16)
    if len(shape) == 1:
        return LazyTensor(name, shape, dtype, read_vector)
    t = LazyTensor(name, shape, dtype, read_rows)
    if n_block > 1:
        t.packed = Packed(kind.name, as_int4(t, kind.name, read_bytes))
    return t
