"""The user's cache: compiled operations, weights as they lie in memory; safe to delete."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
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


def writable(n_bytes: int = 1 << 20) -> Path:
    """The cache, or else where temporary files go, if files of this size fit. OSError: neither."""
    for folder in (cache_dir(), Path(tempfile.gettempdir())):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(n_bytes))
            return folder
    raise OSError(f"nothing can be written to {cache_dir()} or {tempfile.gettempdir()}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def remove_partials(home: Path) -> None:
    """Those whose process was killed: nobody has locked their data any more."""
    for folder in home.glob(".partial*"):
        with suppress(OSError):                    # another process has it, or removed it
            if not (folder / "data").exists():
                folder.rmdir()
                continue
            with open(folder / "data", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


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
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_unused(path.parent, f".{path.name}.*", days=1)  # of processes that were killed
        partial.write_text(text)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
