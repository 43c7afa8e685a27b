"""Compiled functions on disk, for the next start.

A directory of the user's for each function: what Inductor saves, the machine code, and their
digests, written last. Its name is a digest of all that the code depends on, so that nothing is ever
stale. Owns names, damage, and what is cleared away: above GPT_FASTER_CACHE_MB (default 1024) those
that were not used for the longest time go first. Knows no tracing.

    function = load(key) or save(key, make)
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kernels import inductor

DAY = 24 * 3600


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


def max_bytes() -> int:
    try:
        return int(os.environ.get("GPT_FASTER_CACHE_MB", 1024)) << 20
    except ValueError:
        inductor.note("GPT_FASTER_CACHE_MB is no whole number: 1024 is taken")
        return 1024 << 20


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _digests(folder: Path, names: list[str] | None = None) -> dict[str, str]:
    names = names or [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def load(key: str) -> Callable | None:
    """What save() kept; None, and nothing is there any more, if anything is amiss."""
    folder = cache_dir() / key
    try:
        digests = json.loads((folder / "digests.json").read_text())
        if digests == _digests(folder, digests.keys()):
            inductor.try_instructions(cache_dir() / "instructions")
            with inductor.inductor_in(folder):
                function = inductor.load_function(folder / "function")
            with suppress(OSError):
                os.utime(folder)                   # used just now
            return function
    except FileNotFoundError:
        pass
    except Exception as e:                         # whatever a damaged file leads to
        print(f"note: {folder} is made anew: {type(e).__name__}", file=sys.stderr)
    if folder.exists():
        _remove(folder)
    return None


def save(key: str, make: Callable[[], Callable | None]) -> Callable | None:
    """make() the function, and keep it, unless another process was quicker or the disk is full."""
    folder = cache_dir() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = Path(tempfile.mkdtemp(prefix=".partial", dir=folder.parent))
    except OSError:                                # nowhere to keep it
        partial = Path(tempfile.mkdtemp())
    try:
        inductor.try_instructions(cache_dir() / "instructions")
        with inductor.inductor_in(partial):
            inductor.forget_machine_code()
            function = make()
            if function and inductor.save_function(function, partial / "function"):
                with suppress(OSError):
                    (partial / "digests.json").write_text(json.dumps(_digests(partial)))
                    os.rename(partial, folder)
                    clear_away(folder)
        return function
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove(folder: Path) -> None:
    """At once for other processes, which find all of it or nothing."""
    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=".partial", dir=folder.parent))
        with suppress(OSError):
            os.rename(folder, gone / "it")
        shutil.rmtree(gone, ignore_errors=True)


def remove_old_partials(home: Path) -> None:
    """Those whose process was killed."""
    for folder in home.glob(".partial*"):
        with suppress(OSError):                    # another process removed it
            if time.time() - folder.stat().st_mtime > DAY:
                shutil.rmtree(folder, ignore_errors=True)


def clear_away(new: Path) -> None:
    """Remove what was not used for the longest time, until all the rest fits; `new` stays."""
    remove_old_partials(cache_dir())
    age, size = {}, {}
    for folder in cache_dir().iterdir():
        with suppress(OSError):                    # another process removed it
            if (folder / "digests.json").exists():
                age[folder] = folder.stat().st_mtime
                size[folder] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    total = sum(size.values())
    for folder in sorted(size, key=age.get):
        if total > max_bytes() and folder != new:
            _remove(folder)
            total -= size[folder]
    for entry in _index().glob("*"):
        with suppress(OSError):
            if not (cache_dir() / entry.read_text()).exists():
                entry.unlink()


# ---- The index: what a program is -> the key of its function ------------------------------------

def _index() -> Path:
    return cache_dir() / "index"


def look_up(program: str) -> str | None:
    with suppress(OSError):
        key = (_index() / program).read_text()
        return key if len(key) == 32 and key.isalnum() else None
    return None


def note_down(program: str, key: str) -> None:
    replace(_index() / program, key)


def replace(path: Path, text: str) -> None:
    """Write a small file, whole or not at all; nothing where the disk is full."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text)
        os.replace(partial, path)
