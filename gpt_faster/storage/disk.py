"""The user's cache: compiled operations, weights as they lie in memory; safe to delete.

What is read from it runs, or is taken for a model's weights. So it is used only where nobody but
this user and root may write.

    if (home := trusted_cache()) and is_trusted(home / name): …
"""

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DAY = 24 * 3600                                    # seconds


def cache_dir() -> Path:
    """$GPT_FASTER_CACHE, or gpt-faster in $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("GPT_FASTER_CACHE"):
        return Path(named)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:                           # a user whom the system does not know
        home = os.devnull                          # where nothing is and nothing can be made
    return Path(home) / "gpt-faster"


def why_untrusted(path: Path) -> str | None:
    """What is wrong with a file or a folder that exists; None: nobody but this user and root may
    write it, or put another one in its place. A link counts as what it leads to."""
    path = path.resolve()
    users = (os.geteuid(), 0)
    for place in (path, *path.parents):
        found = place.stat()
        is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if place != path and found.st_mode & stat.S_ISVTX:     # /tmp: names in it are their owners'
            is_open = False
        if found.st_uid not in users:
            return f"{place} belongs to another user"
        if is_open:
            return f"others may write {place}: chmod go-w {place}"
    return None


def is_trusted(path: Path) -> bool:
    """Is it there, and may it be used? A note says why it may not."""
    try:
        reason = why_untrusted(path)
    except OSError:
        return False
    if reason:
        # Imported late, since kernels/digest.py, which imports this file, runs without torch.
        from gpt_faster.kernels import private
        private.note(f"{path} is not used: {reason}")
    return not reason


def trusted_cache() -> Path | None:
    """cache_dir(), made if need be, without links; None, with a note, where others may write it."""
    folder = cache_dir()
    try:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        for place in reversed(missing):
            place.mkdir(exist_ok=True, mode=0o700)
        folder = folder.resolve()
    except OSError:
        return None
    return folder if is_trusted(folder) else None


def writable(n_bytes: int = 1 << 20) -> Path:
    """The cache, or else a new folder of this process, if files of this size fit. OSError: neither.
    """
    with suppress(OSError):
        if folder := trusted_cache():
            _try_to_write(folder, n_bytes)
            return folder
    with suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="gpt-faster-")).resolve()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _try_to_write(folder, n_bytes)
        if is_trusted(folder):
            return folder
    raise OSError(f"nothing can be kept in {cache_dir()} or {tempfile.gettempdir()}")


def _try_to_write(folder: Path, n_bytes: int) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(n_bytes))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def remove_partials(home: Path) -> None:
    """Those whose process was killed: nobody holds their lock any more."""
    for folder in home.glob(".partial*"):
        with suppress(OSError), write_lock(folder):         # else another process has it
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """While this process writes into the folder, or removes it. OSError: another one does."""
    from filelock import FileLock  # takes 10 ms, and is seldom needed
    path = folder.with_name(f"lock{folder.name}")
    with FileLock(path, blocking=False):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)           # not every version of filelock does it


def remove_unused(home: Path, pattern: str, days: int = 30) -> None:
    """Files that were not read for so long."""
    for path in home.glob(pattern):
        with suppress(OSError):
            stat = path.stat()
            if time.time() - max(stat.st_atime, stat.st_mtime) > days * DAY:
                path.unlink()


def replace(path: Path, text: str) -> None:
    """Write a small file, whole or not at all; nothing where the disk is full."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        remove_unused(path.parent, f".{path.name}.*", days=1)  # of processes that were killed
        partial.write_text(text)
        partial.chmod(0o600)                       # whatever the umask
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
