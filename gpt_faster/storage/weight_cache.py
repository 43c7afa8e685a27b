"""Cache of a model's weights in their in-memory layout, memory-mapped at the next start.

One directory per model and layout in weights/ of disk.trusted_cache(), safe to delete. The least
recently used are evicted above GPT_FASTER_WEIGHTS_MB (default 8192, at most half of the free disk
space). An entry that was modified is rebuilt.

    tensors = load(key) or save(key, tensors)
"""

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from gpt_faster.kernels import torch_internals
from gpt_faster.storage import disk

ALIGN = 4096                                       # bytes: pages


def _home() -> Path | None:
    """The cache folder, created if missing; None if it cannot be created or other
    users can write to it.
    """
    cache = disk.trusted_cache()
    if not cache:
        return None
    with suppress(OSError):
        (cache / "weights").mkdir(exist_ok=True, mode=0o700)
    return cache / "weights" if disk.is_trusted(cache / "weights") else None


def max_bytes() -> int:
    try:
        limit = int(os.environ.get("GPT_FASTER_WEIGHTS_MB", 8192)) << 20
    except ValueError:
        torch_internals.note_once("GPT_FASTER_WEIGHTS_MB is not an integer: using 8192")
        limit = 8192 << 20
    return min(limit, shutil.disk_usage(_home()).free // 2)


def _stamp(path: Path) -> list[int]:
    """Size and modification time, to detect changes of the file."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


@torch.inference_mode(False)
def load(key: str) -> dict[str, Tensor] | None:
    """The tensors that save() wrote, by name, mapped copy-on-write. None if there is no entry."""
    home = _home()
    if not home or not (home / key).exists():
        return None
    folder = home / key
    try:
        data = folder / "data"
        if not (disk.is_trusted(data) and disk.is_trusted(folder / "index.json")):
            raise ValueError("other users may have written it")
        index = json.loads((folder / "index.json").read_text())
        if index["stamp"] != _stamp(data):
            raise ValueError("it was modified")
        storage = torch.UntypedStorage.from_file(str(data), False, index["stamp"][0])
        with suppress(OSError):
            os.utime(folder)                       # last use, for eviction
        return {name: _view(storage, *entry) for name, entry in index["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        torch_internals.note_once(f"{folder}: rebuilding this cache entry: {e}")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _view(storage, dtype: str, shape: list[int], offset: int) -> Tensor:
    dtype = getattr(torch, dtype)
    return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape)


def save(key: str, tensors: dict[str, Tensor]) -> None:
    """Write all tensors, or none if the disk is full or another process wrote the entry first."""
    entries, offsets, n_bytes = {}, {}, 0
    for name, t in tensors.items():
        offset = offsets.get(t.data_ptr())         # tied weights: several names, one tensor
        if offset is None:
            offset = offsets[t.data_ptr()] = n_bytes
            n_bytes += -(-t.nbytes // ALIGN) * ALIGN
        entries[name] = [str(t.dtype)[6:], list(t.shape), offset]
    partial, home = None, _home()
    if not home:
        return
    try:
        disk.remove_partials(home)
        if n_bytes > max_bytes():
            return
        partial = Path(tempfile.mkdtemp(prefix=".partial", dir=home))
        with disk.write_lock(partial):
            with open(partial / "data", "wb") as file:
                _write(file, tensors, entries, n_bytes)
            index = dict(stamp=_stamp(partial / "data"), tensors=entries)
            (partial / "index.json").write_text(json.dumps(index))
            for path in partial.iterdir():
                path.chmod(0o600)                  # regardless of the umask
            os.rename(partial, home / key)
        _evict(key)
    except OSError:                                # disk full, or the entry exists already
        pass
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _write(file: BinaryIO, tensors: dict[str, Tensor], entries: dict, n_bytes: int) -> None:
    file.truncate(n_bytes)
    for name, t in tensors.items():
        file.seek(entries[name][2])
        file.write(t.detach().contiguous().flatten().view(torch.uint8).numpy())
    file.flush()
    os.fsync(file.fileno())                        # else a crash may leave a file of zeros


def _evict(new: str) -> None:
    """Remove the least recently used entries, except `new`, until the rest fits."""
    mtime, size = {}, {}
    for folder in _home().iterdir():
        with suppress(OSError):                    # another process removed it
            if not folder.name.startswith(".partial"):
                mtime[folder] = folder.stat().st_mtime
                size[folder] = (folder / "data").stat().st_size
    total, limit = sum(size.values()), max_bytes()
    for folder in sorted(size, key=mtime.get):
        if total > limit and folder.name != new:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size[folder]
