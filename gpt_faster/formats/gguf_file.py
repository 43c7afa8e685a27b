"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md) -> metadata and lazy tensors.

Finds the parts of a split model from any of them. The gguf package dequantizes blocks as they are
read. Knows no architecture.
"""

import math
import mmap
import os
import re
import struct
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from checkpoint import LazyTensor, MappedFile, beginning, brief, some
from gpt_faster.formats.fp4 import gguf_leaves
from gpt_faster.formats.gguf_int4 import as_int4
from gpt_faster.formats.lazy import Packed
from gpt_faster.formats.other_kinds import DFLASH_INSTEAD
from quantize import Int4

MAX_ARRAY_ENTRIES = 1 << 24                             # 100x the largest vocabulary
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")     # llama.cpp's gguf-split names parts so
# Types that ggml.h lists as removed, and what took their place
REMOVED_TYPES = {
    4: ("Q4_2", "Q4_1"), 5: ("Q4_3", "Q4_1"), 31: ("Q4_0_4_4", "Q4_0"), 32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"), 36: ("IQ4_NL_4_4", "IQ4_NL"), 37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
INTEGERS = {"I32": torch.int32, "I64": torch.int64}         # ids: a drafter's d2t
EAGLE3_INSTEAD_OF_MODEL = (
    "an EAGLE-3 drafter, not a model: give it as --draft_checkpoint_path, with the model that it "
    "was trained for as --checkpoint_path")
# general.type of a file that is no model, or general.architecture -> what it is and the next step
NO_MODELS = {
    "adapter": "a GGUF LoRA adapter, not a model: use the model's Hugging Face directory, and "
               "--adapter with PEFT's directory of the adapter",
    "mmproj": "a vision or audio encoder (mmproj), not a language model: give the model's .gguf",
    "clip": "a vision or audio encoder (mmproj), not a language model: give the model's .gguf",
    "imatrix": "an importance matrix of llama.cpp, not a model: give the model's .gguf",
    "eagle3": EAGLE3_INSTEAD_OF_MODEL,
    "dflash": DFLASH_INSTEAD,
    "dflash-draft": DFLASH_INSTEAD,
    "controlvector": "a control vector of llama.cpp, not a model: give the model's .gguf",
}


class BigEndian(ValueError):
    """The file's numbers are big-endian (s390x)."""


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
    if version in (1 << 24, 2 << 24, 3 << 24):
        raise BigEndian
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
    if not hasattr(gguf, "dequantize"):
        raise ImportError(f"gguf {version('gguf')} is too old: pip install -U gguf")
    file = open_mapped(path)
    metadata, infos, start = header_of(path, file)
    tensors = []
    for name, shape, kind, at in infos:
        check_type(path, name, kind)
        kind = gguf.GGMLQuantizationType(kind)
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % n_block or 0 in shape:
            raise ValueError(f"{path}: {name} has shape {list(shape)}, but {kind.name} needs rows "
                             f"of a multiple of {n_block}")
        size = math.prod(shape) * n_bytes // n_block
        end = start + at + size
        if end > len(file.data):
            raise ValueError(f"{path}: truncated: {name} ends at byte {end:,}, but the file has "
                             f"{len(file.data):,}: download it again")
        tensors.append(_tensor(name, shape, kind, file, start + at, size))
    file.will_read(0, 0)
    return metadata, tensors


def open_mapped(path: Path) -> MappedFile:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as f:
        if os.path.getsize(path) < 24:
            raise ValueError(f"{path}: not a readable GGUF file: too short: it "
                             f"{beginning(f.read())}")
    return MappedFile(path, mmap.ACCESS_READ)


def header_of(path: Path, file: MappedFile) -> tuple[dict, list[tuple], int]:
    """read_gguf_header(), with the path in errors."""
    file.will_read(0, len(file.data))
    try:
        return read_gguf_header(memoryview(file.data))
    except BigEndian:
        raise ValueError(f"{path}: a big-endian GGUF: `gguf-convert-endian {path} little` (of the "
                         "gguf package) converts it in place") from None
    except (struct.error, ValueError) as e:
        raise ValueError(f"{path}: not a readable GGUF file (truncated?): {e}") from None


def check_type(path: Path, name: str, kind: int) -> None:
    """ValueError names a quantization type that the gguf package cannot dequantize."""
    import gguf
    if kind in REMOVED_TYPES:
        old, new = REMOVED_TYPES[kind]
        raise ValueError(f"{path}: {name} has quantization type {old} ({kind}), which llama.cpp "
                         f"has removed: use the model in {new}")
    installed = f"gguf {version('gguf')}"
    other_type = "use the model in another type, such as Q4_K_M, or try `pip install -U gguf`"
    try:
        known = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{path}: {name} has quantization type {kind}, which {installed} does "
                         f"not know (newer, or ik_llama.cpp's own): {other_type}") from None
    if known.name not in INTEGERS and not can_dequantize(known):
        raise ValueError(f"{path}: {name} has quantization type {known.name} ({kind}), which "
                         f"{installed} cannot dequantize: {other_type}")


@cache
def can_dequantize(kind) -> bool:
    """kind: a gguf.GGMLQuantizationType."""
    import gguf
    import numpy as np
    try:
        gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


# ---- Files of a directory, parts of a model -----------------------------------------------------

def read_gguf_parts(path: Path) -> tuple[Path, dict, list[LazyTensor]]:
    """A model, given its file or any part -> the first part, its metadata, the tensors of all.

    FileNotFoundError names a missing part, ValueError a renamed one or a part of another model.
    """
    metadata, tensors = read_gguf_tensors(path)
    n_part, i = metadata.get("split.count", 1), metadata.get("split.no")
    if type(n_part) is not int or not 0 <= n_part <= 99999:
        raise ValueError(f"{path}: split.count is {brief(n_part)}, expected the number of parts")
    if n_part < 2:
        return path, metadata, tensors
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != n_part or i not in (None, int(match[2]) - 1):
        number = f"{i + 1:05d}" if type(i) is int and 0 <= i < n_part else "NNNNN"
        raise ValueError(f"{path}: a part of a split model, number {number} of {n_part:05d}, but "
                         "renamed: the parts are found by their names, so call it "
                         f"{_stem_of_parts(path, n_part)}-{number}-of-{n_part:05d}.gguf")
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf")
             for i in range(1, n_part + 1)]
    missing = [part for part in parts if not part.exists()]
    if missing:
        more = f", {len(missing)} parts in all" if len(missing) > 1 else ""
        raise FileNotFoundError(f"{missing[0]}: part {parts.index(missing[0]) + 1} of {n_part} is "
                                f"missing{more}: download it into this directory")
    read = [(metadata, tensors) if part == path else read_gguf_tensors(part) for part in parts]
    for i, (part, (stated, _)) in enumerate(zip(parts, read)):
        if stated.get("split.no", i) != i or stated.get("split.count", n_part) != n_part:
            no, count = (brief(stated.get(f"split.{key}")) for key in ("no", "count"))
            raise ValueError(f"{path}: {part.name}: split.no is {no} and split.count {count}, not "
                             f"{i} and {n_part} as its name says: it is a part of another model, "
                             "or renamed")
    tensors = [t for _, part_tensors in read for t in part_tensors]
    expected = read[0][0].get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ValueError(f"{parts[0]}: split.tensors.count is {brief(expected)}, but the "
                         f"{n_part} parts have {len(tensors)}: are they of one model?")
    return parts[0], read[0][0], tensors


def _stem_of_parts(path: Path, n_part: int) -> str:
    """The name that the other parts next to a renamed one have, or NAME."""
    stems = {match[1] for p in path.parent.glob(f"*-of-{n_part:05d}.gguf")
             if p != path and (match := PART.fullmatch(p.name))}
    return stems.pop() if len(stems) == 1 else "NAME"


def gguf_in(directory: Path) -> Path | None:
    """The one model among a directory's .gguf files; of a split one, its first part there.

    ValueError if there are several. Encoders, adapters and the like do not count if there are.
    """
    models = {}
    for path in sorted(directory.glob("*.gguf")):
        match = PART.fullmatch(path.name)
        models.setdefault((match[1], match[3]) if match else path.name, path)
    found = list(models.values())
    if len(found) > 1:
        headers = {path: header_of(path, open_mapped(path))[0] for path in found}
        found = [path for path, metadata in headers.items() if not what_instead(metadata)
                 and "general.architecture" in metadata]           # later parts have none
    if len(found) > 1:
        raise ValueError(f"{directory}: {len(found)} models: {some([p.name for p in found])}: give "
                         "one of these files")
    return found[0] if found else next(iter(models.values()), None)


def what_instead(metadata: dict) -> str:
    """What a GGUF that is no model is, and the next step; "" for a model."""
    for key in ("general.type", "general.architecture"):
        value = metadata.get(key)
        if isinstance(value, str) and value in NO_MODELS:
            return NO_MODELS[value]
    return ""


# ---- Tensors ------------------------------------------------------------------------------------

def _tensor(name: str, shape: tuple[int, ...], kind, file: MappedFile, start: int,
            size: int) -> LazyTensor:
    """kind: a gguf.GGMLQuantizationType; start, size: of the tensor's bytes in the file."""
    import gguf
    import numpy as np
    row = shape[2:] if len(shape) > 2 else shape[1:]
    n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = math.prod(row) * n_bytes // n_block

    def bytes_of(a, b):
        low, high = start + a * row_bytes, start + b * row_bytes
        file.will_read(low, high)
        return np.frombuffer(file.data, np.uint8, high - low, low).reshape(b - a, -1)

    def read_bytes(a, b):
        return torch.from_numpy(bytes_of(a, b).copy())

    def read_rows(a, b):
        if kind == gguf.GGMLQuantizationType.BF16:         # faster than gguf's
            return read_bytes(a, b).view(torch.bfloat16).view(b - a, *row)
        values = gguf.dequantize(bytes_of(a, b), kind)
        return torch.from_numpy(np.array(values, copy=True)).view(b - a, *row)

    def read_ids(a, b):
        return read_bytes(a, b).view(INTEGERS[kind.name]).view(b - a, *row)

    def read_vector(a, b):                         # a vector's rows do not align with its blocks
        file.will_read(start, start + size)
        values = gguf.dequantize(np.frombuffer(file.data, np.uint8, size, start), kind)
        return torch.from_numpy(np.array(values, copy=True))[a:b]
    if kind.name in INTEGERS:
        return LazyTensor(name, shape, INTEGERS[kind.name], read_ids)
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind.name, torch.bfloat16)
    if len(shape) == 1:
        return LazyTensor(name, shape, dtype, read_vector)
    t = LazyTensor(name, shape, dtype, read_rows)
    if n_block > 1:
        int4 = as_int4(t, kind.name, read_bytes)
        own = (Int4(32), int4) if int4 else gguf_leaves(t, kind.name, read_bytes)
        t.packed = Packed(kind.name, *own)
    return t
