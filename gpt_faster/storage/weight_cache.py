"""Tensors on disk as they lie in memory, mapped at the next start: what is not used is not read.

A directory of the user's for each set, in weights/ of disk.trusted_cache(), safe to delete. Above
GPT_FASTER_WEIGHTS_MB (default 8192, and at most half of what the disk has left) those that were not
used for the longest time go first. A file that is not as it was written is made anew.

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

from gpt_faster.kernels import private
from gpt_faster.storage import disk

ALIGN = 4096                                       # bytes: pages


def _home() -> Path | None:
    """Made if need be; None where it cannot be, or others may write it."""
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
        private.note("GPT_FASTER_WEIGHTS_MB is no whole number: 8192 is taken")
        limit = 8192 << 20
    return min(limit, shutil.disk_usage(_home()).free // 2)


def _stamp(path: Path) -> list[int]:
    """What a change of the file changes."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


@torch.inference_mode(False)
def load(key: str) -> dict[str, Tensor] | None:
    """What save() kept, by name: mapped, and private to this process. None: not there."""
    home = _home()
    if not home or not (home / key).exists():
        return None
    folder = home / key
    try:
        data = folder / "data"
        if not (disk.is_trusted(data) and disk.is_trusted(folder / "index.json")):
            raise ValueError("others may have written it")
        index = json.loads((folder / "index.json").read_text())
        if index["stamp"] != _stamp(data):
            raise ValueError("it was changed")
        storage = torch.UntypedStorage.from_file(str(data), False, index["stamp"][0])
        with suppress(OSError):
            os.utime(folder)                       # used just now
        return {name: _view(storage, *where) for name, where in index["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        private.note(f"{folder} is made anew: {e}")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _view(storage, dtype: str, shape: list[int], at: int) -> Tensor:
    dtype = getattr(torch, dtype)
    flat = torch.empty(0, dtype=dtype).set_(storage, at // dtype.itemsize, shape)
    return flat


def save(key: str, tensors: dict[str, Tensor]) -> None:
    """Keep them all, or nothing, where the disk is full or another process was quicker."""
    where, offsets, end = {}, {}, 0
    for name, t in tensors.items():
        at = offsets.get(t.data_ptr())             # several names, one tensor
        if at is None:
            at = offsets[t.data_ptr()] = end
            end += -(-t.nbytes // ALIGN) * ALIGN
        where[name] = [str(t.dtype)[6:], list(t.shape), at]
    partial, home = None, _home()
    if not home:
        return
    try:
        disk.remove_partials(home)
        if end > max_bytes():
            return
        partial = Path(tempfile.mkdtemp(prefix=".partial", dir=home))
        with disk.write_lock(partial):
            with open(partial / "data", "wb") as file:
                _write(file, tensors, where, end)
            index = dict(stamp=_stamp(partial / "data"), tensors=where)
            (partial / "index.json").write_text(json.dumps(index))
            for path in partial.iterdir():
                path.chmod(0o600)                  # whatever the umask
            os.rename(partial, home / key)
        _clear_away(key)
    except OSError:                                # full, or it is there already
        pass
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _write(file: BinaryIO, tensors: dict[str, Tensor], where: dict, n_bytes: int) -> None:
    file.truncate(n_bytes)
    for name, t in tensors.items():
        file.seek(where[name][2])
        file.write(t.detach().contiguous().flatten().view(torch.uint8).numpy())
    file.flush()
    os.fsync(file.fileno())                        # else a crash may leave zeros of that length


def _clear_away(new: str) -> None:
    """Remove what was not used for the longest time, until the rest fits; `new` stays."""
    age, size = {}, {}
    for folder in _home().iterdir():
        with suppress(OSError):                    # another process removed it
            if not folder.name.startswith(".partial"):
                age[folder] = folder.stat().st_mtime
                size[folder] = (folder / "data").stat().st_size
    total, limit = sum(size.values()), max_bytes()
    for folder in sorted(size, key=age.get):
        if total > limit and folder.name != new:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size[folder]
