"""The user's cache folder: compiled operations and prepared weights. Safe to delete.

Libraries from it are loaded and weights are trusted, so it is used only if nobody but this user and
root may write it.

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
from functools import cache
from pathlib import Path

DAY = 24 * 3600                                    # seconds


def cache_dir() -> Path:
    """$GPT_FASTER_CACHE, or gpt-faster in $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("GPT_FASTER_CACHE"):
        return Path(named)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:                           # the user has no home folder
        home = os.devnull                          # nothing can be created there
    return Path(home) / "gpt-faster"


def why_untrusted(path: Path) -> str | None:
    """Why an existing file or folder must not be used; None if only this user and root may write or
    replace it. Links are resolved."""
    path = path.resolve()
    users = (os.geteuid(), 0)
    for part in (path, *path.parents):
        info = part.stat()
        is_open = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if part != path and info.st_mode & stat.S_ISVTX:       # sticky bit (/tmp): only owners may
            is_open = False                                    # rename or delete entries
        if info.st_uid not in users:
            return f"{part} belongs to another user"
        if is_open:
            return f"others may write {part}: chmod go-w {part}"
    return None


def is_trusted(path: Path) -> bool:
    """Whether the file or folder exists and may be used. Logs a note if it may not."""
    try:
        reason = why_untrusted(path)
    except OSError:
        return False
    if reason:
        # imports torch: kernels/digest.py imports this file and must run without it
        with suppress(ImportError):
            from gpt_faster.kernels import torch_internals
            torch_internals.note_once(f"{path} is not used: {reason}")
    return not reason


def trusted_cache() -> Path | None:
    """cache_dir(), resolved and created if missing; None, with a note, if others may write it."""
    folder = cache_dir()
    try:
        missing = [part for part in (folder, *folder.parents) if not part.exists()]
        for part in reversed(missing):
            part.mkdir(exist_ok=True, mode=0o700)
        folder = folder.resolve()
    except OSError:
        return None
    return folder if is_trusted(folder) else None


def writable_folder(n_bytes: int = 1 << 20) -> Path:
    """The cache, or a temporary folder of this process, with room for files of n_bytes.

    OSError if neither can be written.
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
    raise OSError(f"cannot write to {cache_dir()} or {tempfile.gettempdir()}")


@cache
def set_compiler_caches() -> None:
    """Have torch.compile and Triton keep what they build, libraries and pickles that are loaded
    again, in the cache. A folder that the environment names stays if only this user may write it.

    Without this it is /tmp/torchinductor_USER, where another user may have put one first.
    """
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        named = os.environ.get(name)
        if named and (not Path(named).exists() or is_trusted(Path(named))):
            continue
        with suppress(OSError):
            folder = writable_folder() / name.removesuffix("_CACHE_DIR").lower()
            folder.mkdir(exist_ok=True, mode=0o700)
            os.environ[name] = str(folder)


def _try_to_write(folder: Path, n_bytes: int) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(n_bytes))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def remove_partials(home: Path) -> None:
    """Remove unfinished folders whose process was killed, so that nobody holds their lock."""
    for folder in home.glob(".partial*"):
        with suppress(OSError), write_lock(folder):            # OSError: another process writes it
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while writing or removing it. OSError if another process holds it."""
    from filelock import FileLock  # the import takes 10 ms, and is seldom needed
    path = folder.with_name(f"lock{folder.name}")
    with FileLock(path, blocking=False):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)           # not all versions of filelock remove it


def remove_unused(home: Path, pattern: str, days: int = 30) -> None:
    """Remove files that were not read for `days`."""
    for path in home.glob(pattern):
        with suppress(OSError):
            stat = path.stat()
            if time.time() - max(stat.st_atime, stat.st_mtime) > days * DAY:
                path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file completely or not at all. Errors, as a full disk, are ignored."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        remove_unused(path.parent, f".{path.name}.*", days=1)  # left by killed processes
        partial.write_text(text)
        partial.chmod(0o600)                       # regardless of the umask
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
