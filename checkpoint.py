"""Checkpoints: load a model from a path or hub name, and write our .pth.

The steps, in the order of this file:

    resolve    a path or a hub name -> a local path, downloaded if needed
    read       config.json and safetensors, or our .pth -> a config and lazy tensors
    rename     the file's parameter names -> ours; stack the experts
    check      names, shapes and dtypes; whether the output layer is tied to the embedding
    load       into a model on the meta device, a few megabytes of a tensor at a time

Supports Llama, Mistral, Mixtral, Qwen2 and Qwen3. A config key that changes the model is applied or
refused, never silently ignored. gpt_faster/formats/ adds families, file formats and the quantized
weights of other programs. Nothing in a checkpoint is executed.

    source = open_checkpoint("org/name or path")
    model = load_model(source, torch.bfloat16, "cpu")
"""

import errno
import fcntl
import io
import json
import math
import mmap
import os
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import ExpertLinear, ModelConfig, MoEConfig, Rope, Transformer
from quantize import LEAVES, Scheme, put_quantized_linears, scheme_at
from sampling import RANGES

CHUNK = 1 << 22                                    # elements of a tensor to read at a time
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)      # or over a quota or size limit
MAX_TEXT_BYTES = 1 << 28                           # ten times the largest known tokenizer.json
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
              F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2, F8_E8M0=torch.float8_e8m0fnu,
              I64=torch.int64, I32=torch.int32, I16=torch.int16, I8=torch.int8, U64=torch.uint64,
              U32=torch.uint32, U16=torch.uint16, U8=torch.uint8, BOOL=torch.bool,
              C64=torch.complex64)


# ---- Error messages, text and JSON files --------------------------------------------------------

class Unforeseen(Exception):
    """An exception that no reader handles: unknown damage in a file, or a bug."""


def first_line(e: Exception, longest: int = 160) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:longest]


def brief(value) -> str:
    """A value for an error message: one short line."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "an integer of more than 128 bits"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "…"


def some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def beginning(start: bytes) -> str:
    """The first bytes of a file, for an error message."""
    return f"begins with {start[:24]!r}" if start.strip() else "is empty"


def failed_download(start: bytes) -> str:
    """What a failed download left in place of weights, and the next step; "" if it is none."""
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: `git lfs pull` in its directory gets it"
    if re.match(rb"\s*<(!doctype|html|\?xml)", start, re.IGNORECASE):
        return "a web page, not the file: download it again (a hub's link to a file has /resolve/)"
    return ""


def unreadable(path: Path, format: str, e: Exception) -> ValueError:
    """The error for a file that a library cannot read: its kind or its first bytes, and why."""
    with open(path, "rb") as file:
        start = file.read(64)
    what = failed_download(start) or (f"not a readable {format} file (truncated?): it "
                                  f"{beginning(start)}: {first_line(e)}")
    return ValueError(f"{path}: {what}")


def is_out_of_memory(e: Exception) -> bool:
    return (isinstance(e, MemoryError | torch.OutOfMemoryError)
            or isinstance(e, RuntimeError | OSError) and "allocate memory" in str(e))


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Add the path to a ValueError. What a library has not implemented becomes a ValueError too.

    OSError, ImportError and out-of-memory errors pass unchanged; any other exception becomes
    Unforeseen.
    """
    try:
        yield
    except ValueError as e:
        if str(path) in str(e):
            raise
        raise ValueError(f"{path}: {first_line(e)}") from e
    except NotImplementedError as e:
        raise ValueError(f"{path}: not supported by a library: {first_line(e)}") from e
    except Exception as e:
        if isinstance(e, OSError | ImportError | Unforeseen) or is_out_of_memory(e):
            raise
        raise Unforeseen(f"{path}: internal error while reading: {type(e).__name__} "
                         f"({first_line(e)}): corrupt file or a bug; please report it") from e


def read_text(path: Path) -> str:
    """Read a UTF-8 file. FileNotFoundError if it is not a regular file (a device never ends),
    ValueError if it is too large or not UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file" if not path.exists() else
                                f"{path}: not a regular file")
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{path}: {size:,} bytes, expected at most {MAX_TEXT_BYTES:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None


def read_json(path: Path) -> dict:
    text = read_text(path)
    if what := failed_download(text[:64].encode()):
        raise ValueError(f"{path}: {what}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as e:                        # also raised for integers of thousands of digits
        raise ValueError(f"{path}: not valid JSON ({first_line(e)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# ---- Lazy tensors -------------------------------------------------------------------------------

@dataclass
class LazyTensor:
    """A tensor on disk: name, shape, dtype, and a function that reads rows [start, end).

    Rows are indices of the first axis, or of the first two, flattened, if there are more than two
    axes (experts [E, out, in] have E * out rows). Random weights have no read_rows: fill(tensor)
    initializes a tensor in place. made_of: the tensors that read_rows reads. packed: the file's
    quantized codes (gpt_faster/formats/lazy.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: Callable[[int, int], Tensor] | None         # (start, end) -> [end - start, *row]
    made_of: tuple["LazyTensor", ...] = ()
    fill: Callable[[Tensor], None] | None = None
    packed: object = None                          # None if read_rows changes the values
    scheme: Scheme | None = None                   # of a leaf, if it is none of quantize.py's

    @property
    def n_row(self) -> int:
        return math.prod(self.shape[:2]) if len(self.shape) > 2 else math.prod(self.shape[:1])

    def derived(self, read_rows: Callable | None, **changes) -> "LazyTensor":
        """A tensor whose rows are computed from this one's, with `changes` to the other fields."""
        read_rows = self.read_rows and read_rows
        new = LazyTensor(self.name, self.shape, self.dtype, read_rows, (self,), self.fill,
                         scheme=self.scheme)
        return replace(new, **changes)

    def renamed(self, name: str) -> "LazyTensor":
        return self.derived(self.read_rows, name=name, packed=self.packed)

    def whole(self) -> Tensor:
        try:
            return self.read_rows(0, self.n_row).reshape(self.shape)
        finally:
            self.release()

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, end, rows) in order; rows have at most CHUNK elements, or are one row."""
        step = max(1, CHUNK * self.n_row // math.prod(self.shape))
        try:
            for start in range(0, self.n_row, step):
                end = min(start + step, self.n_row)
                yield start, end, self.read_rows(start, end)
        finally:
            self.release()

    def release(self) -> None:
        """Free the caches of read_rows."""
        for part in self.made_of:
            part.release()


def as_rows(t: Tensor) -> Tensor:
    """Reshape so that the first axis is a LazyTensor's rows."""
    if t.dim() > 2:
        return t.flatten(0, 1)
    return t.reshape(1) if t.dim() == 0 else t


def narrow(t: LazyTensor, axis: int, low: int, high: int) -> LazyTensor:
    """Slice an axis to [low, high), without reading the whole tensor."""
    n = t.shape[axis]
    rows_per_index = t.n_row // t.shape[0]         # of the first axis
    shape = (*t.shape[:axis], high - low, *t.shape[axis + 1:])

    def slice_columns(a, b):
        return t.read_rows(a, b)[..., low:high]

    def slice_first_axis(a, b):
        first = low * rows_per_index
        return t.read_rows(first + a, first + b)

    def slice_each_matrix(a, b):
        return across_matrices(
            a, b, high - low, lambda i, a, b: t.read_rows(i * n + low + a, i * n + low + b))
    if axis == max(1, len(shape) - 1):
        return t.derived(slice_columns, shape=shape)
    packed = t.packed and t.packed.rows(lambda part: narrow(part, axis, low, high))
    return t.derived(slice_first_axis if axis == 0 else slice_each_matrix, shape=shape,
                     packed=packed)


def across_matrices(a: int, b: int, n: int, read: Callable[[int, int, int], Tensor]) -> Tensor:
    """Rows [a, b) of stacked matrices of n rows. read(i, low, high): rows of the i-th matrix."""
    pieces = []
    while a < b:
        i, low = divmod(a, n)
        high = min(n, low + b - a)
        pieces.append(read(i, low, high))
        a += high - low
    return torch.cat(pieces)


def stack(pieces: list[LazyTensor]) -> LazyTensor:
    """E tensors of the same shape -> one tensor [E, *shape]."""
    first = pieces[0]
    shape = (len(pieces), *first.shape)

    def vectors(a, b):
        return torch.stack([p.whole() for p in pieces[a:b]])

    def matrices(a, b):
        return across_matrices(
            a, b, first.shape[0], lambda i, low, high: pieces[i].read_rows(low, high))
    read_rows = vectors if len(shape) == 2 else matrices
    packed = first.packed and first.packed.stacked(stack, [p.packed for p in pieces])
    return LazyTensor(first.name, shape, first.dtype, read_rows, tuple(pieces), packed=packed)


def check_finite(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Convert rows of weights to `dtype`. ValueError if a weight is NaN or infinite, or overflows.
    """
    new = rows.to(dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2 or new.isfinite().all():
        return new
    if not rows.isfinite().all():
        raise ValueError(f"{name} has NaN or infinite weights")
    largest = rows.abs().max().item()
    raise ValueError(f"{name} has weights up to {largest:.3g}, above {str(dtype)[6:]}'s range: use "
                     "--dtype bfloat16")


# ---- RawCheckpoint and Checkpoint ---------------------------------------------------------------

@dataclass
class RawCheckpoint:
    """A reader's result: the tensors with the names and shapes in the file."""

    path: Path
    cfg: ModelConfig
    tensors: list[LazyTensor]
    names: dict | None                             # file's names -> ours; None: the names are ours
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)
    tokenizer: Path | dict | None = None
    quantization: dict | None = None
    kind: type = Transformer


@dataclass
class Checkpoint:
    """A model's config, and its tensors by our names, not read yet."""

    path: Path
    cfg: ModelConfig
    tensors: dict[str, LazyTensor]
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)   # sampling values of generation_config.json
    tokenizer: Path | dict | None = None           # argument of tokenizer.load()
    quantization: dict | None = None               # a description; the tensors decide the schemes
    kind: type = Transformer                       # the class of the model
    adapter: Path | None = None                    # merged LoRA adapter (formats/lora.py)
    mtp: "Callable[[], Checkpoint] | None" = None  # opens the MTP head (formats/mtp.py)


# ---- A path or a hub name -> a local path -------------------------------------------------------

WANTED = ["*.safetensors", "*.json", "tokenizer.model"]
# Errors of the hub's HTTP clients (httpx, requests) for a connection that ends too early
BROKEN_OFF = ("RemoteProtocolError", "ReadError", "ReadTimeout", "ChunkedEncodingError")
UNWANTED = ["original/*", "onnx/*", "*/*.safetensors", "consolidated*"]


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Turn hub errors into a ValueError or OSError of one line, with advice."""
    from huggingface_hub import constants, errors
    try:
        yield
    except errors.GatedRepoError:                  # a subclass of RepositoryNotFoundError
        problem = (f"{repo_id} is gated: accept its licence at huggingface.co/{repo_id}, then run "
                   "`hf auth login` or set HF_TOKEN")
    except errors.RepositoryNotFoundError:
        problem = (f"the hub has no {repo_id}, or it is private: check the name, or run "
                   "`hf auth login` or set HF_TOKEN")
    except errors.DisabledRepoError:
        problem = f"the hub has disabled {repo_id}: use another copy of the model"
    except errors.HFValidationError:
        problem = f"'{repo_id}' is not a hub name: expected org/name"
    except errors.HfHubHTTPError as e:
        refused = e.response is not None and e.response.status_code in (401, 403)
        problem = f"the hub failed on {repo_id}, try again later: {first_line(e)}"
        if refused:
            problem = (f"the hub refused the token for {repo_id}: run `hf auth login` again, "
                       "or unset HF_TOKEN")
    except Exception as e:                         # includes errors of the hub's HTTP client
        if getattr(e, "errno", None) in DISK_FULL:
            raise OSError(f"the disk is full while downloading {repo_id}: free some space, or set "
                          "HF_HOME to another disk; running it again resumes") from None
        if isinstance(e, OSError) and e.filename:
            raise OSError(f"the hub's cache cannot be written ({first_line(e)}): set HF_HOME to a "
                          "directory that can be") from None
        problem = (f"{repo_id} is not in the local cache and the hub cannot be reached: check the "
                   f"network, or give a path ({type(e).__name__}: {first_line(e)})")
        if constants.HF_HUB_OFFLINE:
            problem = (f"{repo_id} is not in the local cache and HF_HUB_OFFLINE is set: unset it, "
                       "or give a path")
        elif type(e).__name__ in BROKEN_OFF:
            problem = (f"the download of {repo_id} broke off, running it again resumes it "
                       f"({type(e).__name__}: {first_line(e)})")
    else:
        return
    raise ValueError(problem)


def download(repo_id: str) -> Path:
    """Download a hub repository's weights, config and tokenizer -> the local directory.

    huggingface_hub prints the progress. Raises as hub_errors() does.
    """
    from huggingface_hub import snapshot_download
    with hub_errors(repo_id):
        return Path(snapshot_download(repo_id, allow_patterns=WANTED, ignore_patterns=UNWANTED))


def as_path(path) -> Path:
    """A Path or str -> Path. TypeError says what it is instead."""
    if not isinstance(path, str | Path):
        raise TypeError(f"the path is {brief(path)} ({type(path).__name__}), expected a str or a "
                        "Path")
    return Path(path).expanduser()


def resolve(name: str | Path, fetch: Callable[[str], Path] = download) -> Path:
    """Return an existing path, else download `name` as a hub name with fetch().

    FileNotFoundError explains both attempts.
    """
    name = name if isinstance(name, str) else str(as_path(name))
    if not name.strip():
        raise ValueError("the path or hub name is empty: an unset variable?")
    path = as_path(name)
    if path.exists():
        return path
    if link := re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)",
                        name):
        raise FileNotFoundError(f"{name}: a link; give the hub name {link[1]}, or download the "
                                "file and give its path")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise FileNotFoundError(f"{name}: no such file or directory "
                                "(nor is it a hub name, org/name)")
    try:
        return fetch(name)
    except (ValueError, OSError) as e:
        raise FileNotFoundError(f"{name}: no such file or directory; "
                                f"as a hub name: {e}") from None


def output_path(path: Path, name: str) -> Path:
    """Path for a file converted from `path`: in its directory, or under checkpoints/ if `path` is
    in the hub's cache (…/models--org--name/snapshots/revision)."""
    directory = path if path.is_dir() else path.parent
    if directory.parent.name == "snapshots":
        directory = Path("checkpoints", *directory.parent.parent.name.split("--")[1:])
    return directory / name


# ---- Weight files -------------------------------------------------------------------------------

class MappedFile:
    """A file mapped into memory. Of its pages only the last read's count as the process's.

    access: mmap.ACCESS_COPY for tensor(), because torch wants a writable buffer.
    """

    def __init__(self, path: Path, access: int = mmap.ACCESS_COPY):
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=access)
        self.last = 0, 0

    def will_read(self, start: int, end: int) -> None:
        """Let go of the pages of the read before. They are read again where they are used."""
        a, b = self.last
        first = a // mmap.PAGESIZE * mmap.PAGESIZE
        if b > a and hasattr(self.data, "madvise"):
            self.data.madvise(mmap.MADV_DONTNEED, first, b - first)
        self.last = start, end

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor whose bytes begin at `start`; a view, nothing is read yet."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        data = torch.frombuffer(self.data, dtype=torch.uint8, count=n_bytes, offset=start)
        return data.view(dtype).view(shape)


def read_safetensors(path: Path) -> list[LazyTensor]:
    """The file's tensors. Rows are read when they are needed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:              # checks the whole header
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    except SafetensorError as e:
        raise unreadable(path, "safetensors", e) from None
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    mapped, tensors = MappedFile(path), []
    for name, kind in kinds.items():
        if kind not in DTYPES:
            raise ValueError(f"{name} has dtype {kind}, which is not supported")
        shape, start = tuple(header[name]["shape"]), header[name]["data_offsets"][0] + 8 + length
        tensors.append(_of_mapped(mapped, name, start, shape, DTYPES[kind]))
    return tensors


def _of_mapped(file: MappedFile, name: str, start: int, shape: tuple[int, ...],
               dtype: torch.dtype) -> LazyTensor:
    rows = as_rows(file.tensor(start, shape, dtype))               # [n_row, *row]
    row_bytes = math.prod(rows.shape[1:]) * dtype.itemsize

    def read_rows(a, b):
        file.will_read(start + a * row_bytes, start + b * row_bytes)
        return rows[a:b]
    return LazyTensor(name, shape, dtype, read_rows)


def read_torch(path: Path, mmap: bool = True, kinds: tuple[type, ...] = (dict,)) -> dict | Tensor:
    """Load a PyTorch file, memory-mapped, without executing pickled code. kinds: of its content."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as e:
        more = re.search(r"(?:GLOBAL |WeightsUnpickler error: )([\w. ]+)", str(e))
        with open(path, "rb") as file:
            if not file.read(2).startswith((b"PK", b"\x80")):      # neither a zip nor a pickle
                raise unreadable(path, "PyTorch", e) from None
        raise ValueError(f"{path}: refused, it contains more than weights "
                         f"({more[1] if more else first_line(e)}): save model.state_dict() "
                         "instead") from None
    except Exception as e:                         # a corrupt pickle can raise anything
        is_full = is_out_of_memory(e) and not isinstance(e, MemoryError)       # of a corrupt length
        if isinstance(e, OSError) and e.filename or is_full:
            raise                                  # no permission, say: not the file's fault
        raise unreadable(path, "PyTorch", e) from None
    if not isinstance(value, kinds):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


def mappings(path: Path) -> list[tuple[int, int, int]]:
    """Where a file is mapped in this process: (first address, last + 1, offset in the file).

    [] where the system does not say (/proc is Linux').
    """
    maps, found = Path("/proc/self/maps"), []
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, _, offset, _, inode = line.split()[:5]
        if int(inode) == path.stat().st_ino:
            low, high = (int(address, 16) for address in addresses.split("-"))
            found.append((low, high, int(offset, 16)))
    return found


def lazy_tensors(tensors: dict, path: Path | None = None) -> list[LazyTensor]:
    """The tensors of a dictionary from read_torch(); other entries are dropped.

    path: the file, if it is mapped: pages that were read are let go of, as read_safetensors() does.

    ValueError if it is not a dictionary, or a tensor is not dense, not on the CPU, or larger than
    its storage.
    """
    if not isinstance(tensors, dict):
        raise ValueError(f"expected a dictionary of tensors, found {type(tensors).__name__}")
    named = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and isinstance(n, str)}
    for name, t in named.items():
        if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized:
            raise ValueError(f"{name} is {t.layout} on {t.device}: expected a dense CPU tensor")
        if t.numel() * t.itemsize > t.untyped_storage().nbytes():
            raise ValueError(f"{name} has shape {list(t.shape)}, but its storage has "
                             f"{t.untyped_storage().nbytes():,} bytes")
    regions = mappings(path) if path else []
    file = MappedFile(path) if regions else None

    def lazy(name, t):
        for low, high, offset in regions:
            if low <= t.data_ptr() < high and t.is_contiguous():
                start = offset + t.data_ptr() - low
                return _of_mapped(file, name, start, tuple(t.shape), t.dtype)
        return LazyTensor(name, tuple(t.shape), t.dtype, lambda a, b: as_rows(t)[a:b])
    return [lazy(name, t) for name, t in named.items()]


SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")


def hub_tensors(directory: Path, name: str,
                read: Callable[[Path], list[LazyTensor]] = read_safetensors) -> list[LazyTensor]:
    """All tensors of a file, of the shards in an index, or of a shard and its siblings.

    read: reads one file. Wrappers' prefixes are removed from the names.
    """
    shard_of = _weight_map(directory / name) if name.endswith(".index.json") else {}
    shards = sorted(set(shard_of.values())) or _siblings(name)
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        others = f" ({len(missing)} shards are missing)" if len(missing) > 1 else ""
        whose = f"listed in {name} but" if shard_of else f"{name}'s sibling is"
        raise FileNotFoundError(f"{directory / missing[0]}: {whose} missing{others}: download it "
                                "again")
    return unwrapped([t for shard in shards for t in read(directory / shard)
                      if shard_of.get(t.name, shard) == shard])    # else its copy is not meant


def _siblings(name: str) -> list[str]:
    """All shards of a set, given one of their names: without an index the names tell the set."""
    match = SHARD.fullmatch(name)
    if not match or not 1 <= int(match[3]) <= 10_000:
        return [name]
    stem, n, ending = match[1], match[3], match[4]
    return [f"{stem}-{i:05d}-of-{n}.{ending}" for i in range(1, int(n) + 1)]


def unwrapped(tensors: list[LazyTensor]) -> list[LazyTensor]:
    """Remove what torch.compile, DDP, FSDP, activation checkpointing and PEFT add to names."""
    inner = r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)"
    outer = r"^(module\.|_forward_module\.|base_model\.model\.)+"
    return [t if name == t.name else replace(t, name=name) for t in tensors
            for name in [re.sub(outer, "", re.sub(inner, "", t.name).lstrip("."))]]


def _weight_map(index: Path) -> dict[str, str]:
    """An index's shard of each tensor; all must be in its directory. Symbolic links are allowed:
    the hub's cache consists of them.
    """
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: 'weight_map' is {brief(listed)}, expected file names by tensor "
                         "name")
    for shard in listed.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise ValueError(f"{index}: {brief(shard)} is not the name of a file in this directory")
    return listed


# ---- generation_config.json ---------------------------------------------------------------------

SAMPLING = {name: allowed for name, allowed in RANGES.items()
            if name not in ("seed", "top_n_sigma")}        # transformers has neither
ALWAYS_READ = ("do_sample", "eos_token_id")
WITHOUT_SAMPLING = ("repetition_penalty",)         # transformers applies it if do_sample is false
# Keys that transformers applies and we do not, with the values that have no effect
NEUTRAL = dict(
    min_length=0, min_new_tokens=0, num_beams=1, typical_p=1, epsilon_cutoff=0, eta_cutoff=0,
    encoder_repetition_penalty=1, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0,
    bad_words_ids=None, force_words_ids=None, forced_bos_token_id=None, forced_eos_token_id=None,
    exponential_decay_length_penalty=None, suppress_tokens=None, begin_suppress_tokens=None,
    sequence_bias=None, guidance_scale=1, penalty_alpha=0, stop_strings=None, dola_layers=None,
    top_h=None, watermarking_config=None, token_healing=None, forced_decoder_ids=None,
    max_length=20, max_new_tokens=None, max_time=None)
# Keys without effect on text: training, Python's interface, provenance, speed, padding, token ids.
# gpt_faster/formats/known_keys.py lists more, with reasons.
WITHOUT_EFFECT = re.compile(
    r"_(name|commit|attn|from)_.*|.*(dropout|initializer|aux_loss|dtype|_class|compile).*|"
    r".*(assistant|implementation).*|use_cache|cache_.*|output_(router|attent|hidden|scores|log).*|"
    r"(return|transformers|unsloth|padding|truncation|pad_to|special_tokens_map)_.*|"
    r"(bos|pad|decoder_start)_token_id|architectures|auto_map|name_or_path|pretraining_tp|"
    r"(num_beam_groups|num_return_sequences|length_penalty|early_stopping|renormalize_logits)|"
    r"model_(type|max_length|input_names)|errors|backend|is_local|use_default_system_prompt")


def unknown_keys(keys: Iterable[str]) -> list[str]:
    """Those keys, of the ones that no reader acts on, that are not known to be without effect."""
    return [key for key in keys if not WITHOUT_EFFECT.fullmatch(key)]


def name_unknown(path: Path | str, keys: list[str]) -> None:
    """Name a file's unknown keys in one line."""
    if keys:
        names = ", ".join((key if key.isprintable() else ascii(key))[:60] for key in keys[:20])
        more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
        print(f"note: {path}: unknown keys {names}{more}: without effect here", file=sys.stderr)


def generation_defaults(directory: Path, *configs: dict,
                        unknown: Callable = unknown_keys) -> tuple[list[int], dict]:
    """End-of-sequence ids of all config files, and the model's default sampling parameters.

    configs: config.json, first its text part. Without a generation_config.json it has the sampling
    parameters, as in transformers; the outer level wins. unknown: as unknown_keys().
    """
    path = directory / "generation_config.json"
    generation = None
    if path.exists():
        try:
            generation = read_json(path)
        except ValueError as e:                    # optional, and invalid in some hub repositories
            print(f"note: ignored: {e}", file=sys.stderr)
    if generation is None:
        path = directory / "config.json"
        merged = {k: v for c in configs for k, v in c.items() if v is not None}
        generation = {k: v for k, v in merged.items() if k in (*SAMPLING, *NEUTRAL, "do_sample")}
    name_unknown(path, unknown(
        key for key, value in generation.items() if value is not None
        and key not in (*SAMPLING, *NEUTRAL, *ALWAYS_READ)))
    ids = []
    for config in (generation, *configs):
        values = config.get("eos_token_id")
        values = values if isinstance(values, list) else [values]
        valid = [i for i in values if type(i) is int and 0 <= i < 1 << 31]
        if invalid := [i for i in values if i not in (*valid, None, -1)]:
            print(f"note: ignored: 'eos_token_id' is {brief(invalid[0])}", file=sys.stderr)
        ids += valid
    supported = SAMPLING if generation.get("do_sample") else WITHOUT_SAMPLING
    parameters = {k: generation[k] for k in supported if generation.get(k) is not None}
    defaults = sampling_values(parameters)
    ignored = {k for k, neutral in NEUTRAL.items() if generation.get(k) not in (None, [], neutral)}
    if ignored := ignored | set(parameters) - set(defaults):
        print(f"note: ignored in {path}: {', '.join(sorted(ignored))}", file=sys.stderr)
    if generation.get("do_sample") is False:
        defaults["temperature"] = RANGES["temperature"].kind(0)
    return list(dict.fromkeys(ids)), defaults


def sampling_values(parameters: dict) -> dict:
    """The sampling parameters that we support and whose values are in range."""
    values = {}
    for name, value in parameters.items():
        if name in SAMPLING:
            with suppress(ValueError):
                values[name] = SAMPLING[name].of(value)
    return values


# ---- Parameter names ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Fused:
    """One tensor on disk that concatenates parameters of equal size along the output axis."""

    into: tuple[str, ...]

    def pieces(self, t: LazyTensor, cfg: ModelConfig) -> list[LazyTensor]:
        """One tensor for each name in `into`. ValueError if the axis is not divisible."""
        if len(self.into) == 1:
            return [t]
        axis, n = max(0, len(t.shape) - 2), len(self.into)
        if t.shape[axis] % n:
            raise ValueError(f"{t.name} is {list(t.shape)}: axis {axis} cannot be split into {n} "
                             "parameters")
        size = t.shape[axis] // n
        return [narrow(t, axis, i * size, (i + 1) * size) for i in range(n)]


# Name in the file -> ours, without the prefix layers.{i}. and the suffix .weight or .bias. A name
# without such a suffix in the file is written out on our side. * is the index of an expert.
HF_NAMES = {
    "embed_tokens": "embed", "norm": "norm", "lm_head": "head",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk", "self_attn.v_proj": "attn.wv",
    "self_attn.o_proj": "attn.wo",
    "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down",
}
MIXTRAL_NAMES = {
    "block_sparse_moe.gate": "ffn.router", "block_sparse_moe.experts.*.w1": "ffn.gate",
    "block_sparse_moe.experts.*.w3": "ffn.up", "block_sparse_moe.experts.*.w2": "ffn.down",
}
QWEN_MOE_NAMES = {
    "mlp.gate": "ffn.router", "mlp.experts.*.gate_proj": "ffn.gate",
    "mlp.experts.*.up_proj": "ffn.up", "mlp.experts.*.down_proj": "ffn.down",
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "mlp.experts.down_proj": "ffn.down.weight",
}
NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")
# Fused parameter in memory -> parameters on disk. All but the first two are for gpt_faster/layers/.
FUSED = {"wqkv": ("wq", "wk", "wv"), "gate_up": ("gate", "up"), "qkv": ("q", "k", "v"),
         "conv": ("conv_q", "conv_k", "conv_v"), "rates": ("beta", "decay"),
         "conv_bias": ("conv_bias_q", "conv_bias_k", "conv_bias_v"),
         "wbcx": ("wb", "wc", "wx"), "wqkv_a": ("wq_a", "wkv_a"), "wq_kv_a": ("wq", "wkv_a")}


def rename(tensors: list[LazyTensor], table: dict, cfg: ModelConfig) -> dict[str, LazyTensor]:
    """Tensors by our names: fused ones split, experts stacked.

    table: name in the file -> our name, or Fused. ValueError lists unknown and duplicate tensors.
    """
    parts, unknown, duplicates = {}, [], []
    for t in tensors:
        if NOT_WEIGHTS.search(t.name):
            continue
        entry = look_up(t.name, table)
        if entry is None:
            unknown.append(t.name)
            continue
        prefix, expert, fused = entry
        for name, piece in zip(fused.into, fused.pieces(t, cfg)):
            experts = parts.setdefault(prefix + name, {})
            duplicates += [t.name] if expert in experts else []
            experts[expert] = piece
    if unknown:
        raise ValueError(f"{len(unknown)} tensors that this architecture does not have: "
                         f"{some(unknown)}")
    if duplicates:
        raise ValueError(f"{len(duplicates)} duplicate tensors: {some(duplicates)}")
    return {name: _stack_experts(name, experts) for name, experts in parts.items()}


def look_up(name: str, table: dict) -> tuple[str, int, Fused] | None:
    """A parameter name in the file -> layer prefix, expert index (-1: none), our names.

    None if the table does not have it. layers.3.mlp.experts.7.up_proj.weight -> "layers.3.", 7,
    Fused(("ffn.up.weight",)).
    """
    name = bare(name)
    match = re.fullmatch(r"(?:layers|blk|h|blocks)\.(\d+)\.(.+)", name)
    prefix, inner = (f"layers.{match[1]}.", match[2]) if match else ("", name)
    expert = re.search(r"(?<=\.)(\d+)(?=\.)", inner)
    if expert:
        inner = f"{inner[:expert.start()]}*{inner[expert.end():]}"
    stem, _, kind = inner.rpartition(".")          # kind: weight | bias
    if prefix and f"layers.*.{stem}" in table:     # a name that also exists outside the layers
        stem = f"layers.*.{stem}"
    entry, suffix = (table[inner], "") if inner in table else (table.get(stem), f".{kind}")
    if entry is None:
        return None
    entry = entry if isinstance(entry, Fused) else Fused((entry,))
    entry = replace(entry, into=tuple(n + suffix for n in entry.into))
    return prefix, int(expert[1]) if expert else -1, entry


def bare(name: str) -> str:
    """Strip the prefixes of the modules that contain the text model."""
    wrappers = "model|language_model|text_model|transformer|gpt_neox|decoder|_orig_mod"
    return re.sub(rf"^(({wrappers})\.)+", "", name)


def layer_of(name: str) -> int:
    """The layer index in a parameter name; -1: outside the layers."""
    match = re.match(r"(?:layers|blk)\.(\d+)\.", bare(name))
    return int(match[1]) if match else -1


def _stack_experts(name: str, experts: dict[int, LazyTensor]) -> LazyTensor:
    """experts: {-1: tensor} if the tensor is of no single expert, else one for each index."""
    if -1 in experts:
        return experts[-1]
    if max(experts) >= len(experts):
        raise ValueError(f"{name}: {len(experts)} experts, numbered up to {max(experts)}")
    pieces = [experts[i] for i in sorted(experts)]
    for piece in pieces:
        if piece.shape != pieces[0].shape:
            raise ValueError(f"{piece.name} is {list(piece.shape)}, unlike the others' "
                             f"{list(pieces[0].shape)}")
    return stack(pieces)


def disk_names(name: str) -> list[str]:
    """A parameter in memory -> its parts on disk: ….wqkv.weight -> ….wq.weight, …"""
    for fused, pieces in FUSED.items():
        if f".{fused}." in f"{name}.":
            return [name.replace(f".{fused}", f".{piece}") for piece in pieces]
    return [name]


# ---- config.json -> ModelConfig -----------------------------------------------------------------

FULL_TREE = "gpt-faster's full tree (gpt_faster/formats/)"
READS_IT = f"{FULL_TREE} reads it"
READS_MORE = f"{FULL_TREE} reads more"


@dataclass(frozen=True)
class Family:
    """The differences between a model_type and Llama."""

    overrides: dict = field(default_factory=dict)      # ModelConfig fields that are not in the file
    defaults: dict = field(default_factory=dict)   # of optional config.json keys
    names: dict = field(default_factory=dict)      # additions to HF_NAMES
    is_sliding: Callable[[dict, int], bool] = lambda c, i: False   # layer i has a window
    is_sparse: Callable[[dict, int], bool] = lambda c, i: False    # layer i has experts
    reads_layer_types: Callable[[dict], bool] = lambda c: False    # else is_sliding decides
    keys: str = ""                                 # of OPTIONAL: those that this family reads


def always(c: dict, i: int) -> bool:
    return True


def use_sliding_window(c: dict) -> bool:
    return flag(c, "use_sliding_window")


def qwen_is_sliding(c: dict, i: int) -> bool:
    return use_sliding_window(c) and i >= number(c, "max_window_layers", 28)


def qwen_is_sparse(c: dict, i: int) -> bool:
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"'mlp_only_layers' is {brief(dense)}, expected a list of layers")
    return i not in dense and (i + 1) % count(c, "decoder_sparse_step", 1) == 0


# Keys that only some families read; for the others they have no effect, as in transformers
OPTIONAL = ("attention_bias mlp_bias qkv_bias attention_out_bias hidden_activation norm_topk_prob "
            "moe_intermediate_size decoder_sparse_step mlp_only_layers use_sliding_window "
            "max_window_layers").split()
QWEN_WINDOW = "use_sliding_window max_window_layers"
# Add a Llama-like family as one row. The defaults are those of transformers' config classes.
FAMILIES = {
    "llama": Family(keys="attention_bias mlp_bias"),
    "mistral": Family(defaults=dict(sliding_window=4096, num_key_value_heads=8,
                                    max_position_embeddings=131072), is_sliding=always,
                      reads_layer_types=lambda c: True),
    "mixtral": Family(
        defaults=dict(rope_theta=1e6, num_key_value_heads=8, num_experts=8,
                      num_experts_per_tok=2, max_position_embeddings=131072, rms_norm_eps=1e-5),
        names=MIXTRAL_NAMES, is_sliding=always, is_sparse=always),
    "qwen2": Family(overrides=dict(qkv_bias=True, o_bias=False),
                    defaults=dict(sliding_window=4096, num_key_value_heads=32,
                                  max_position_embeddings=32768),
                    is_sliding=qwen_is_sliding, reads_layer_types=use_sliding_window,
                    keys=QWEN_WINDOW),
    "qwen3": Family(overrides=dict(qk_norm=True), keys=f"attention_bias {QWEN_WINDOW}",
                    defaults=dict(sliding_window=4096, num_key_value_heads=32, head_dim=128,
                                  max_position_embeddings=32768),
                    is_sliding=qwen_is_sliding, reads_layer_types=use_sliding_window),
    "qwen3_moe": Family(
        overrides=dict(qk_norm=True),
        defaults=dict(sliding_window=4096, num_key_value_heads=4, num_experts=128,
                      num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False,
                      max_position_embeddings=32768),
        names=QWEN_MOE_NAMES, is_sparse=qwen_is_sparse,
        is_sliding=lambda c, i: use_sliding_window(c),
        keys="attention_bias use_sliding_window norm_topk_prob moe_intermediate_size "
             "decoder_sparse_step mlp_only_layers"),
}
KEY_ALIASES = {"num_local_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
               "n_routed_experts": "num_experts", "num_shared_experts": "n_shared_experts"}
KINDS_OF_ATTENTION = ("full_attention", "sliding_attention")   # keys of `rope_parameters`
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
UNSUPPORTED = (                                    # config.json keys that this file cannot apply
    "alibi attention_multiplier attn_logit_softcapping clip_qkv conv_layers embedding_multiplier "
    "final_logit_softcapping kv_lora_rank layer_rope_theta logits_scaling n_shared_experts "
    "no_rope_layers qk_layernorm query_pre_attn_scalar residual_multiplier rope_local_base_freq "
    "per_layer_config routed_scaling_factor scale_depth scale_emb "
    "shared_expert_intermediate_size transformers_weights use_bidirectional_attention "
    "use_expert_bias use_parallel_residual use_post_norm use_qk_norm "
    "quantization_config compression_config").split()


class Stated(dict):
    """A config.json. ValueError for a missing key. `read`: the keys that were read."""

    def __init__(self, values: dict):
        super().__init__(values)
        self.read = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key):
        raise ValueError(f"config.json has no '{key}'")


def config_from_hf(config: dict,
                   path: Path | str = "config.json") -> tuple[ModelConfig, Family]:
    """config.json -> ModelConfig and family. ValueError for an invalid or unsupported key."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {brief(kind)} is none of {', '.join(FAMILIES)}: "
                         f"{READS_MORE}")
    family = FAMILIES[kind]
    foreign = set(OPTIONAL) - set(family.keys.split())
    c = filled({k: v for k, v in config.items() if k not in foreign}, family.defaults)
    if refused := [key for key in UNSUPPORTED if c.get(key)]:
        raise ValueError(f"'{refused[0]}' is not supported here: {READS_IT}")
    check_attention(c, family)
    rope = stated_rope(c)
    for place in (c, rope, *(part for part in rope.values() if isinstance(part, dict))):
        for key in ("partial_rotary_factor", "llama_4_scaling_beta"):
            if place.get(key) not in (None, 0, 1):
                raise ValueError(f"'{key}' is not supported here: {READS_IT}")
    activation(c, {"silu": "silu"})
    facts = {**sizes(c), **biases(c)}
    if facts["head_dim"] % 2:
        raise ValueError(f"head_dim is {facts['head_dim']}, expected an even number")
    facts |= layers(c, family, {kind: Rope(**facts) for kind, facts in ropes(c).items()})
    if any(facts["sparse"]):
        facts["moe"] = MoEConfig(**experts(c))
    unread = [key for key, value in config.items() if value not in (None, False)
              and (key in foreign or KEY_ALIASES.get(key, key) not in c.read)
              and key not in (*family.keys.split(), *SAMPLING, *NEUTRAL, *ALWAYS_READ)]
    name_unknown(path, unknown_keys(unread))
    return ModelConfig(**{**facts, **family.overrides}), family


def check_attention(c: dict, family: Family) -> None:
    """ValueError if attention is not causal, or if transformers would ignore 'layer_types'."""
    if not flag(c, "is_causal", True):
        raise ValueError("'is_causal' is false: a bidirectional model cannot generate text")
    kinds = c.get("layer_types")
    if isinstance(kinds, list) and not family.reads_layer_types(c):
        is_sliding = [bool(family.is_sliding(c, i)) for i in range(len(kinds))]
        if is_sliding != [kind == "sliding_attention" for kind in kinds]:
            raise ValueError("'layer_types' contradicts 'sliding_window' and 'use_sliding_window', "
                             "which decide for this model_type")


def filled(config: dict, defaults: dict, aliases: dict = KEY_ALIASES) -> Stated:
    """config.json with aliases replaced and the family's defaults filled in."""
    c = {aliases.get(key, key): value for key, value in config.items()}
    if c.get("rope_parameters") is None:           # null: as if missing
        c.pop("rope_parameters", None)
    return Stated({"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **defaults, **c})


def count(c: dict, key: str, default: int | None = None) -> int:
    value = default if c.get(key) is None else c[key]
    if value is None:
        raise ValueError(f"config.json has no '{key}'")
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"'{key}' is {brief(value)}, expected a positive integer")
    return value


def number(c: dict, key: str, default: float | None = None, least: float = -1e30) -> float:
    value = default if c.get(key) is None else c[key]
    if type(value) not in (int, float) or not least <= value < 1e30:
        expected = "a number" if least < 0 else f"a number of at least {least:g}"
        raise ValueError(f"'{key}' is {brief(value)}, expected {expected}")
    return float(value)


def flag(c: dict, key: str, default: bool = False) -> bool:
    value = default if c.get(key) is None else c[key]
    if value not in (True, False):
        raise ValueError(f"'{key}' is {brief(value)}, expected true or false")
    return bool(value)


def sizes(c: dict) -> dict:
    dim, n_head = count(c, "hidden_size"), count(c, "num_attention_heads")
    n_kv_head = count(c, "num_key_value_heads", n_head)
    if n_head > dim:
        raise ValueError(f"{n_head} attention heads, more than 'hidden_size', {dim}")
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads cannot share {n_kv_head} key/value heads "
                         "evenly")
    return dict(dim=dim, n_layer=count(c, "num_hidden_layers"), n_head=n_head,
                n_kv_head=n_kv_head, head_dim=count(c, "head_dim", dim // n_head),
                ffn_dim=count(c, "intermediate_size"), vocab_size=count(c, "vocab_size"),
                norm_eps=number(c, "rms_norm_eps", least=0), tied=flag(c, "tie_word_embeddings"))


def biases(c: dict) -> dict:
    bias = flag(c, "attention_bias")
    return dict(qkv_bias=flag(c, "qkv_bias", bias), o_bias=flag(c, "attention_out_bias", bias),
                mlp_bias=flag(c, "mlp_bias"))


def activation(c: dict, known: dict[str, str]) -> str:
    """Our name of the activation. known: transformers' name -> ours."""
    name = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"activation {brief(name)} is not supported (supported: "
                         f"{', '.join(known)})")
    return known[name]


def experts(c: dict) -> dict:
    n_expert, n_active = count(c, "num_experts"), count(c, "num_experts_per_tok")
    if n_active > n_expert:
        raise ValueError(f"{n_active} active of {n_expert} experts")
    return dict(n_expert=n_expert, n_active=n_active,
                expert_dim=count(c, "moe_intermediate_size", count(c, "intermediate_size")),
                norm_topk_prob=flag(c, "norm_topk_prob", True))


def layers(c: dict, family: Family, ropes: dict[str, Rope]) -> dict:
    """The fields that may differ between layers (RoPE, window, experts), and the context length.

    ropes: one for each value that `layer_types` may have.
    """
    n = count(c, "num_hidden_layers")
    kinds = layer_kinds(c, family)
    if not isinstance(kinds, list) or set(kinds) - set(ropes) or len(kinds) != n:
        raise ValueError(f"'layer_types' is not {n} times one of {', '.join(ropes)}")
    window = count(c, "sliding_window") if c.get("sliding_window") else None
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    rope = [ropes[kind] for kind in kinds]
    extended = [int(r.factor * r.original_context) for r in rope if r.kind in ("dynamic", "yarn")]
    return dict(context=max([count(c, "max_position_embeddings"), *extended]), rope=tile(rope),
                window=tile(windows), sparse=tile([family.is_sparse(c, i) for i in range(n)]))


def layer_kinds(c: dict, family: Family) -> list[str]:
    return c.get("layer_types") or [KINDS_OF_ATTENTION[bool(family.is_sliding(c, i))]
                                    for i in range(count(c, "num_hidden_layers"))]


def tile(values: list) -> tuple:
    """One value for all layers if they are equal, else one for each layer."""
    return tuple(values[:1] if len(set(values)) == 1 else values)


def stated_rope(c: dict) -> dict:
    """`rope_scaling` (before transformers 5) or `rope_parameters`, as transformers reads them.

    If both exist (a user added `rope_scaling`), `rope_scaling` replaces `rope_parameters`, or
    updates its "full_attention" if `rope_parameters` has one entry per kind of attention.
    ValueError if transformers would drop a different rope_theta or partial_rotary_factor.
    """
    scaling, parameters = c.get("rope_scaling") or {}, c.get("rope_parameters") or {}
    for key, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(value, dict):
            raise ValueError(f"'{key}' is {brief(value)}, expected an object")
    if not scaling or not parameters:
        return scaling or parameters
    if is_by_kind(parameters) and not is_by_kind(scaling):
        full = parameters.get("full_attention") or {}
        return {**parameters, "full_attention": {**full, **scaling}}
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        inner, outer = parameters.get(key), c.get(key) or default
        if inner is not None and scaling.get(key) is None and inner != outer:
            raise ValueError(f"'rope_scaling' overrides 'rope_parameters' but has no '{key}' "
                             f"({brief(inner)} in 'rope_parameters'): add it to 'rope_scaling'")
    return scaling


def is_by_kind(rope: dict) -> bool:
    return any(kind in rope for kind in KINDS_OF_ATTENTION)


def rope_kind(rope: dict) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_facts(c: dict, rope: dict, theta: float, kinds: tuple[str, ...] = ROPE_KINDS) -> dict:
    """Rope's fields, from `rope_parameters` (transformers 5) or `rope_scaling` (before).

    kinds: the supported kinds that an error message lists.
    """
    kind, theta = rope_kind(rope), number(rope, "rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise ValueError(f"RoPE scaling {brief(kind)} is not supported (supported: "
                         f"{', '.join(kinds)})")
    if not theta > 1:
        raise ValueError(f"'rope_theta' is {theta}, expected a number above 1")
    longest = count(c, "max_position_embeddings")
    original = count(c, "original_max_position_embeddings",
                     count(rope, "original_max_position_embeddings", longest))
    facts = dict(theta=theta, original_context=longest if kind == "dynamic" else original)
    if kind == "default":
        return facts
    if kind != "yarn" and not rope.get("factor"):
        raise ValueError(f"RoPE scaling '{kind}' has no 'factor'")
    factor = number(rope, "factor", longest / original)
    if not factor > 0:
        raise ValueError(f"RoPE's 'factor' is {factor}, expected a number above 0")
    facts |= dict(kind=kind, factor=factor)
    if kind == "llama3":
        low, high = number(rope, "low_freq_factor", 1), number(rope, "high_freq_factor", 4)
        if not high > low:
            raise ValueError(f"RoPE's 'high_freq_factor' is {high}, expected a number above "
                             f"'low_freq_factor', {low}")
        facts |= dict(low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        facts |= dict(amplitude=yarn_amplitude(rope, factor),
                      low_freq_factor=number(rope, "beta_slow", 1),
                      high_freq_factor=number(rope, "beta_fast", 32),
                      truncate=bool(rope.get("truncate", True)))
    return facts


def ropes(c: dict, facts: Callable[[dict, dict, float], dict] = rope_facts) -> dict[str, dict]:
    """Rope's fields for each kind of attention."""
    rope, theta = stated_rope(c), number(c, "rope_theta", 10000.0)
    if is_by_kind(rope):
        return {kind: facts(c, rope.get(kind) or {}, theta) for kind in KINDS_OF_ATTENTION}
    return dict.fromkeys(KINDS_OF_ATTENTION, facts(c, rope, theta))


def yarn_amplitude(rope: dict, factor: float) -> float:
    """The scale of cos and sin in YaRN (arXiv 2309.00071)."""
    def mscale(weight):
        return yarn_mscale(factor, weight)

    amplitude, weight, weight_all_dim = (
        number(rope, key) if rope.get(key) is not None else None
        for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if amplitude is None:
        has_both = weight and weight_all_dim
        amplitude = mscale(weight) / mscale(weight_all_dim) if has_both else mscale(1)
    return float(amplitude)


def yarn_mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


# ---- A path -> a Checkpoint ---------------------------------------------------------------------

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model.pth")
PARTS = ("norm", "attention", "mixer", "ffn", "block", "after_embed", "per_layer", "logit_cap")


def open_checkpoint(name: str) -> Checkpoint:
    """Open a path or a hub name. Weights are read later.

    FileNotFoundError, ValueError or OSError: one line that says what was found and what to do.
    """
    return read_checkpoint(resolve(name))


def read_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint at `path`, with names, shapes and dtypes checked. Weights are read later.

    FileNotFoundError or ValueError: one line that says what was found and what was expected.
    TypeError if `path` is no path.
    """
    path = as_path(path)
    with reading(path):
        raw = read(path)
        tensors = {t.name: t for t in raw.tensors}
        if raw.names is not None:
            tensors = rename(raw.tensors, raw.names, raw.cfg)
        return checked(raw, tensors)


def read(path: Path) -> RawCheckpoint:
    """Call the reader of the file's format."""
    if path.is_dir():
        weights = weights_in(path, WEIGHT_FILES)
        if weights is None:
            raise FileNotFoundError(f"{path}: expected config.json with model.safetensors, or "
                                    f"model.pth; {READS_MORE}")
        path = weights
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or directory" if not path.exists() else
                                f"{path}: not a regular file")
    if path.suffix in (".pth", ".pt"):
        return read_pth(path, read_torch(path))
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return read_hub(path.parent, path.name)
    with open(path, "rb") as file:
        start = file.read(64)
    raise ValueError(f"{path}: {failed_download(start) or 'it ' + beginning(start)}; expected a "
                     f"directory, .safetensors or .pth; {READS_MORE}")


def weights_in(directory: Path, names: tuple[str, ...]) -> Path | None:
    """The first of these files that exists in the directory, or a shard without an index."""
    found = [directory / name for name in names if (directory / name).exists()]
    shards = [p for p in sorted(directory.iterdir()) if SHARD.fullmatch(p.name)
              and not p.name.startswith(("adapter", "consolidated"))]      # PEFT's, Mistral's own
    sets = {(SHARD.fullmatch(p.name)[1], SHARD.fullmatch(p.name)[3]): p for p in shards}
    if not found and len(sets) > 1:
        raise ValueError(f"{directory}: several sets of shards and no index: give a shard of the "
                         f"set to read: {some([p.name for p in sets.values()])}")
    return (found or shards or [None])[0]


def read_hub(directory: Path, weights: str) -> RawCheckpoint:
    """A Hugging Face directory. weights: the safetensors file, or the index of the shards."""
    path = directory / "config.json"
    config = read_json(path)
    with reading(path):
        cfg, family = config_from_hf(config, path)
    tensors = hub_tensors(directory, weights)
    eos_ids, defaults = generation_defaults(directory, config)
    return RawCheckpoint(directory / weights, cfg, tensors, HF_NAMES | family.names, eos_ids,
                         defaults, tokenizer=directory)


def _check_content(content: dict) -> None:
    """ValueError if an entry of a .pth is missing or has the wrong type."""
    def is_id_list(value):
        return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)

    expected = {"config": dict, "model": dict, "eos_ids": is_id_list, "defaults": dict,
                "tokenizer": dict | None, "quantization": dict | None, "mtp": dict | None}
    for name, kind in expected.items():
        value = content.get(name)
        fits = kind(value) if kind is is_id_list else isinstance(value, kind)
        if not fits:
            raise ValueError(f"invalid entry '{name}': {brief(value)}")


def config_from_dict(d: dict) -> ModelConfig:
    """The config in a .pth. ValueError for invalid fields, or for modules that model.py lacks."""
    if "after_embed" not in d:
        raise ValueError(f"the config was written by an older gpt-faster: {FULL_TREE} converts it")
    if others := [name for name in PARTS if any(several(d, name))]:
        raise ValueError(f"the model has parts that model.py does not have ({some(others)}): "
                         f"{READS_IT}")
    rope = tuple(build(Rope, rope) for rope in several(d, "rope"))
    return build(ModelConfig, d, rope=rope, moe=d["moe"] and build(MoEConfig, d["moe"]))


def several(d: dict, name: str) -> list | tuple:
    value = d.get(name)
    return value if isinstance(value, list | tuple) else [value]


def build(cls: type, values: dict, **parts):
    """cls(**values, **parts). ValueError lists missing or unknown fields."""
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} is {brief(values)}, expected a dictionary of fields")
    known = {f.name for f in fields(cls)}
    if unknown := [brief(key) for key in values if key not in known]:
        raise ValueError(f"written by a newer gpt-faster: unknown fields of {cls.__name__}: "
                         f"{', '.join(sorted(unknown))}")
    required = {f.name for f in fields(cls) if f.default is MISSING}
    if missing := sorted(required - set(values) - set(parts)):
        raise ValueError(f"{cls.__name__} has no {', '.join(missing)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return cls(**{**values, **parts})


def read_pth(path: Path, content: dict,
             to_config: Callable[[dict], ModelConfig] = config_from_dict) -> RawCheckpoint:
    """Our .pth, as save_checkpoint() writes it. content: the result of read_torch()."""
    if content.get("format") != "gpt-faster":
        raise ValueError(f"{path}: gpt-faster did not write this file; {FULL_TREE} reads some "
                         "others")
    if content.get("version", 1) not in range(1, VERSION + 1):
        raise ValueError(f"{path}: its format is version {brief(content['version'])}, this program "
                         f"reads up to {VERSION}: update gpt-faster, or convert the original again")
    _check_content(content)
    tensors = [t for t in lazy_tensors(content["model"], path) if not t.name.startswith("mtp.")]
    tokenizer = content.get("tokenizer")
    tokenizer = {**tokenizer, "path": path} if tokenizer else path.parent
    return RawCheckpoint(path, to_config(content["config"]), tensors, None,
                         content["eos_ids"], sampling_values(content["defaults"]), tokenizer,
                         content.get("quantization"))


# ---- Checks: tensors against the config ---------------------------------------------------------

def checked(raw: RawCheckpoint, tensors: dict[str, LazyTensor]) -> Checkpoint:
    """A reader's result and its tensors by our names -> a Checkpoint. ValueError as in check()."""
    cfg = settle_tied(raw.path, raw.cfg, tensors)
    source = Checkpoint(raw.path, cfg, tensors, raw.eos_ids, raw.defaults, raw.tokenizer,
                        raw.quantization, raw.kind)
    check(source)
    return source


def settle_tied(path: Path, cfg: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
    """The config with `tied` set from the tensors. Removes an output layer equal to the embedding.

    The tensors decide, with a note if the config disagrees. tensors: by our names. A quantized
    output layer ("head.scales") may exist next to the embedding that it was quantized from.
    ValueError if an untied model has no output layer.
    """
    embed, head = tensors.get("embed.weight"), tensors.get("head.weight")
    if not cfg.tied:
        if head is None and embed is not None:
            raise ValueError("no output layer (lm_head.weight), and the config does not tie it "
                             "to the embedding ('tie_word_embeddings': true)")
        return cfg
    if head is None or "head.scales" in tensors:
        return cfg
    if embed is None:                              # the tied matrix is stored as the output layer
        tensors["embed.weight"] = head.derived(head.read_rows, packed=head.packed)
    elif "embed.scales" in tensors or not equal(embed, head):
        print(f"note: {path.name}: the config ties the output layer to the embedding, but they "
              "differ: using both", file=sys.stderr)
        return replace(cfg, tied=False)
    del tensors["head.weight"]
    return cfg


def equal(a: LazyTensor, b: LazyTensor) -> bool:
    """True if all values are equal. Reads both tensors up to the first difference."""
    if a.shape != b.shape:
        return False
    if a.read_rows == b.read_rows:
        return True
    step = max(1, CHUNK * a.n_row // math.prod(a.shape))
    try:
        return all(torch.equal(*(t.read_rows(i, min(i + step, a.n_row)).float() for t in (a, b)))
                   for i in range(0, a.n_row, step))
    finally:
        a.release()
        b.release()


def check(source: Checkpoint) -> None:
    """ValueError if tensors are missing, unexpected, or of the wrong shape or dtype.

    Removes unexpected biases that are all zero.
    """
    tensors, shapes = source.tensors, tensor_shapes(source.cfg, source.kind)
    for name in [n for n in tensors if n not in shapes and n.endswith(".bias")]:
        if not tensors[name].whole().any():        # AutoGPTQ stores them for every layer
            del tensors[name]
    with reading(source.path):
        dtypes = _expect_quantized(source, shapes)
        _check_names_and_shapes(tensors, shapes)
        _check_dtypes(tensors, dtypes)


def blank_model(cfg: ModelConfig, dtype: torch.dtype, kind: type = Transformer) -> Transformer:
    """The model on the meta device. Norms are fp32 whatever the dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return kind(cfg)
    finally:
        torch.set_default_dtype(default)


def tensor_shapes(cfg: ModelConfig, kind: type = Transformer) -> dict[str, tuple[int, ...]]:
    """The names of the tensors on disk -> the shapes that the config implies."""
    model, shapes = blank_model(cfg, torch.float32, kind), {}
    for name, p in model.named_parameters():
        names = disk_names(name)
        rows = [p.shape[0] // len(names)] * len(names)
        if len(names) > 1:
            owner = re.sub(r"\.[^.]+(\.weight|\.bias)?$", "", name)
            split = getattr(model.get_submodule(owner), "split", ())
            if len(split) == len(names):           # q, k, v (or MLA latents) differ in size
                rows = split
        shapes.update({part: (n, *p.shape[1:]) for part, n in zip(names, rows)})
    return shapes


def _expect_quantized(source: Checkpoint, shapes: dict) -> dict[str, torch.dtype]:
    """Add the leaves of quantized weights to `shapes`; return the dtypes of these leaves.

    ValueError if parts of one matrix in memory have different schemes.
    """
    model = blank_model(source.cfg, torch.float32, source.kind)
    matrices = [disk_names(name) for name, module in model.named_modules()
                if isinstance(module, nn.Linear | ExpertLinear)]
    if source.cfg.tied:
        matrices.append(["embed"])
    dtypes = {}
    for matrix in matrices:
        schemes = {_expect_leaves(source.tensors, shapes, dtypes, part) for part in matrix}
        if len(schemes) > 1:
            raise ValueError(f"{', '.join(matrix)} are one matrix in memory, but not quantized "
                             "the same way")
    return dtypes


def _expect_leaves(tensors, shapes, dtypes, module: str) -> Scheme | None:
    shape = shapes.get(f"{module}.weight") or shapes["embed.weight"]       # a tied head
    scheme = scheme_at(tensors, module, shape[-1])
    if scheme is None or (module == "embed" and not scheme.serves_embedding):
        return None                                # check() reports its leaves as unexpected
    for leaf, (leaf_shape, dtype) in scheme.leaves(shape).items():
        shapes[f"{module}.{leaf}"] = leaf_shape
        dtypes[f"{module}.{leaf}"] = dtype
    return scheme


def _check_names_and_shapes(tensors, shapes) -> None:
    missing = [n for n in shapes if n not in tensors]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {some(missing)}")
    extra = [tensors[n].name for n in tensors if n not in shapes]
    if extra:
        raise ValueError(f"{len(extra)} unexpected tensors: {some(extra)}")
    for name, shape in shapes.items():
        t = tensors[name]
        if t.shape != shape:
            raise ValueError(f"{t.name} is {list(t.shape)}, but the config asks for "
                             f"{list(shape)}")


def _check_dtypes(tensors, dtypes) -> None:
    """Leaves must have their scheme's dtype, all other tensors a floating-point dtype."""
    for name, t in tensors.items():
        expected = dtypes.get(name, torch.float32)
        both_float = t.dtype.is_floating_point and expected.is_floating_point
        if t.dtype == expected or both_float:
            continue
        module = name.rpartition(".")[0]
        leaves = [n for n in tensors if n in (f"{module}.scales", f"{module}.zeros")]
        kind = "a floating-point dtype" if expected.is_floating_point else expected
        raise ValueError(f"{name} has dtype {t.dtype}, expected {kind} "
                         f"with {some(leaves) or 'no scales'}")


# ---- A Checkpoint -> a model --------------------------------------------------------------------

def load_model(source: Checkpoint, dtype: torch.dtype, device,
               prepare: Callable[[Transformer], None] = lambda model: None) -> Transformer:
    """Create the model on `device` and read its weights; norms stay fp32.

    prepare: may replace modules while the model is on the meta device.
    """
    check_request(source, dtype, device)
    with reading(source.path):
        model = quantized_blank(source, dtype)
        prepare(model)
        load_part(model, "", source, device)
        return model.to(device).eval()             # moves the buffers


def check_source(source, dtype) -> None:
    """TypeError if they are no Checkpoint and no torch.dtype."""
    if not isinstance(source, Checkpoint):
        raise TypeError(f"source is {brief(source)}, expected a Checkpoint: open_checkpoint(name) "
                        "opens one")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {brief(dtype)}, expected a torch.dtype such as torch.bfloat16")


def check_request(source, dtype, device) -> None:
    """Arguments of load_model(), before any error could be taken for the file's.

    TypeError as check_source(). ValueError: no such device here, or not a dtype of weights.
    """
    check_source(source, dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dtype is {dtype}, expected torch.bfloat16, float16 or float32 (the "
                         "argument `scheme`, or --quantize, quantizes)")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as e:
        raise ValueError(f"device {brief(device)} cannot be used: {first_line(e)}") from None


def quantized_blank(source: Checkpoint, dtype: torch.dtype) -> Transformer:
    """The model on the meta device, with quantized linears if their tensors are quantized."""
    model = blank_model(source.cfg, dtype, source.kind)

    def scheme(name):
        return scheme_at(source.tensors, disk_names(name)[0])
    put_quantized_linears(model, scheme, dtype)
    return model


def load_part(model: Transformer, prefix: str, source: Checkpoint, device) -> None:
    """Allocate and read the weights of the modules whose names begin with `prefix`.

    Then call pack() of each module that has it, to change the layout of its weights.
    """
    assigned = WeakValueDictionary()               # a tied head shares the embedding's parameter
    for name, module in list(model.named_modules()):
        if not name.startswith(prefix):
            continue
        for leaf, blank in list(module.named_parameters(recurse=False)):
            if not blank.is_meta:
                continue                           # already loaded
            p = assigned.get(blank)
            if p is None:
                # empty_like of a meta tensor would import sympy, which is slow
                weight = torch.empty(blank.shape, dtype=blank.dtype, device=device)
                read_into(weight, source, disk_names(f"{name}.{leaf}"))
                p = assigned[blank] = nn.Parameter(weight, requires_grad=False)
            setattr(module, leaf, p)
        if hasattr(module, "pack"):
            module.pack()                          # frees the weights in the layout on disk


def read_into(weight: Tensor, source: Checkpoint, names: list[str]) -> None:
    """Read the tensors `names` into `weight`, concatenated along the rows."""
    target = as_rows(weight)
    start = 0
    for t in (source.tensors[name] for name in names):
        rows = target[start:start + t.n_row]
        if t.read_rows is None:
            t.fill(rows)
        else:
            _copy(rows, t, source.path)
        start += t.n_row


def _copy(target: Tensor, t: LazyTensor, path: Path) -> None:
    try:
        for start, end, rows in t.chunks():
            if target.dtype == torch.float16 and rows.dtype != torch.float16:
                rows = check_finite(rows, t.name, torch.float16)
            target[start:end].copy_(rows)
    except (SafetensorError, ValueError) as e:
        prefix = f"{path}: " if t.name in str(e) else f"{path}: {t.name} cannot be read: "
        raise ValueError(prefix + first_line(e)) from e


# ---- Writing our .pth ---------------------------------------------------------------------------

VERSION = 2                                        # of the format; newer files are refused
ALIGNMENT = 64                                     # bytes; of a tensor in the file, as in torch
STORAGES = {torch.float32: torch.FloatStorage, torch.float64: torch.DoubleStorage,
            torch.float16: torch.HalfStorage, torch.bfloat16: torch.BFloat16Storage,
            torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage}


def save_checkpoint(source: Checkpoint, path: Path, tokenizer: dict | None,
                    dtype: torch.dtype | None = None,
                    progress: Callable[[int, int], None] = lambda i, n: None) -> None:
    """Write our .pth atomically, a few megabytes of a tensor at a time.

    The format is torch.save's zip archive: data.pkl describes the tensors, and one uncompressed
    entry holds the bytes of each. dtype: None keeps the dtype of each tensor. tokenizer: None if
    its files are next to the .pth. An MTP head is written as mtp.*.
    """
    path = as_path(path)
    check_source(source, torch.bfloat16 if dtype is None else dtype)
    tensors = dict(source.tensors)
    dtypes = _dtypes(source, dtype)
    head = _mtp_head(source)
    if head:
        tensors |= {f"mtp.{name}": t for name, t in head.tensors.items()}
        dtypes |= {f"mtp.{name}": dtype for name, dtype in _dtypes(head, dtype).items()}
    blanks = {name: Blank(str(i), t.shape, dtypes[name])
              for i, (name, t) in enumerate(tensors.items())}
    content = dict(format="gpt-faster", version=VERSION, config=asdict(source.cfg),
                   quantization=source.quantization, model=blanks, eos_ids=source.eos_ids,
                   defaults=source.defaults, tokenizer=tokenizer, mtp=head and asdict(head.cfg))
    with atomic_write(path) as file:
        if hasattr(os, "posix_fallocate"):         # fail now if the disk is full
            os.posix_fallocate(file.fileno(), 0, sum(b.n_bytes for b in blanks.values()))
        with zipfile.ZipFile(file, "w") as archive:
            _write(archive, path.stem, content, tensors, progress)


def _mtp_head(source: Checkpoint) -> Checkpoint | None:
    """The MTP head, if any. An unsupported one is left out, with a note."""
    try:
        return source.mtp() if source.mtp else None
    except ValueError as e:
        print(f"note: left out: {e}", file=sys.stderr)
        return None


def _dtypes(source: Checkpoint, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype of each tensor in the file: norms fp32, quantized weights unchanged."""
    model = blank_model(source.cfg, torch.bfloat16, source.kind)
    fp32_names = {on_disk for n, p in model.named_parameters()
                  if p.dtype == torch.float32 for on_disk in disk_names(n)}
    dtypes = {}
    for name, t in source.tensors.items():
        leaf = name.rpartition(".")[2]
        quantized = not t.dtype.is_floating_point or leaf in LEAVES[1:]
        plain = torch.bfloat16 if t.dtype.itemsize == 1 else t.dtype       # fp8 without scales
        dtypes[name] = t.dtype if quantized else dtype or plain
        if name in fp32_names:
            dtypes[name] = torch.float32
    return dtypes


@dataclass(frozen=True)
class Blank:
    """Placeholder for a tensor in the pickle; key: the archive entry with its bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Storage:
    """The bytes of a Blank."""

    def __init__(self, blank: Blank):
        self.blank = blank


class Pickler(pickle.Pickler):
    """Pickles a Blank as torch.save pickles a contiguous tensor."""

    def reducer_override(self, obj):
        if not isinstance(obj, Blank):
            return NotImplemented
        shape = tuple(list(obj.shape))             # a copy: shared tuples would change the pickle
        strides = tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
        arguments = Storage(obj), 0, shape, strides, False
        return torch._utils._rebuild_tensor_v2, (*arguments, OrderedDict())

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        blank = obj.blank
        return "storage", STORAGES[blank.dtype], blank.key, "cpu", math.prod(blank.shape)


def _write(archive: zipfile.ZipFile, folder: str, content: dict, tensors: dict[str, LazyTensor],
           progress: Callable[[int, int], None]) -> None:
    pickled = io.BytesIO()
    Pickler(pickled, protocol=2).dump(content)
    for name, data in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"),
                       ("version", b"3\n")):
        archive.writestr(zipfile.ZipInfo(f"{folder}/{name}"), data)
    for i, (name, t) in enumerate(tensors.items(), 1):
        progress(i, len(tensors))
        blank = content["model"][name]
        entry = zipfile.ZipInfo(f"{folder}/data/{blank.key}")
        entry.file_size = blank.n_bytes
        large = blank.n_bytes >= zipfile.ZIP64_LIMIT
        _align(entry, archive.fp.tell(), large)
        with archive.open(entry, "w", force_zip64=large) as f:
            for _, _, rows in t.chunks():
                f.write(raw_bytes(check_finite(rows, t.name, blank.dtype)))


def _align(entry: zipfile.ZipInfo, header_at: int, large: bool) -> None:
    """Pad the entry's header, so that its data begins at a multiple of ALIGNMENT."""
    data_at = header_at + 30 + len(entry.filename.encode()) + 20 * large + 4
    padding = -data_at % ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding


def raw_bytes(t: Tensor) -> memoryview:
    return memoryview(t.contiguous().view(-1).view(torch.uint8).numpy())


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file next to `path`, then rename it to `path`.

    A temporary file from a killed process is overwritten. OSError if another process is writing.
    """
    partial = path.with_name(path.name + ".partial")
    with _open_locked(partial, path) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())                # else a crash could leave an empty file
            os.replace(partial, path)
        except BaseException as e:
            partial.unlink(missing_ok=True)
            if isinstance(e, OSError) and e.errno in DISK_FULL:
                raise OSError(e.errno, f"{path} cannot be written: {e.strerror}: free some space, "
                              "or choose another disk") from None
            raise


def _open_locked(partial: Path, path: Path) -> BinaryIO:
    """Open the partial file and lock it until it is closed or the process ends."""
    while True:
        file = open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            lock(file, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(partial)):
                    return file
            file.close()                           # another process has renamed it meanwhile
        except BaseException:
            file.close()
            raise


def lock(file, path: Path) -> None:
    """OSError if another process holds the lock. No lock if the file system does not support it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path}: another process is writing it: wait until it is done, or choose "
                      "another name") from None
    except OSError:
        pass
