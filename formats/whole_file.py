"""Write a file whole or not at all, whoever else writes it, and whatever ends this process.

    with whole_file(path) as file:
        file.write(data)                           # `path` is there when this ends without an error
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)   # the disk, or what is allowed of it


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file of its own beside `path`, which takes its place at the end.

    One that a killed process left is written over. OSError where another process writes it now.
    """
    partial = path.with_name(path.name + ".partial")
    with _locked(partial, path) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())                # else a crash may leave the name without content
            os.replace(partial, path)
        except BaseException as e:
            partial.unlink(missing_ok=True)
            if isinstance(e, OSError) and e.errno in FULL:
                raise full(e, path) from None
            raise


def full(e: OSError, path: Path) -> OSError:
    return OSError(e.errno, f"{path} cannot be written: {e.strerror}: free some space, or choose "
                   "another disk")


def _locked(partial: Path, path: Path) -> BinaryIO:
    """The partial file, open, and this process's alone until it is closed or the process ends."""
    while True:
        file = open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            lock(file, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(partial)):
                    return file
            file.close()                           # another one put it in its place meanwhile
        except BaseException:
            file.close()
            raise


def lock(file, path: Path) -> None:
    """OSError where another process has locked it. Some network file systems cannot: no lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path}: another process is writing it: wait for that, or choose another "
                      "name") from None
    except OSError:
        pass
