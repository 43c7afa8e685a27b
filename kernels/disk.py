"""The user's cache: compiled operations, weights as they lie in memory; safe to delete."""

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
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPT_FASTER_CACHE") or Path(home) / "gpt-faster")


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


def remove_old_partials(home: Path) -> None:
    """Those whose process was killed."""
    for folder in home.glob(".partial*"):
        with suppress(OSError):                    # another process removed it
            if time.time() - folder.stat().st_mtime > DAY:
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
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text)
        os.replace(partial, path)
