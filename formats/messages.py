"""What errors quote, and what becomes of those that no reader foresaw.

    with reading(path): ...                        # names the file, whatever goes wrong inside
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Unforeseen(Exception):
    """What no reader expected a file to do to it: damage of a new kind, or a mistake of ours."""


def first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]


def brief(value) -> str:
    """A value in a message: never long, never several lines."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "an integer of more than 128 bits"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "…"


def one_line(text: str) -> str:
    """What a terminal can show in a line: files have names of any length, and control characters.
    """
    text = " ".join(text.split("\n"))
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 1000 else text[:1000] + "…"


def some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def is_out_of_memory(e: Exception) -> bool:
    return (isinstance(e, MemoryError | torch.OutOfMemoryError)
            or isinstance(e, RuntimeError | OSError) and "allocate memory" in str(e))


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Foreseen errors (ValueError, OSError, ImportError) name the file at least; any other is
    Unforeseen, but for a lack of memory.
    """
    try:
        yield
    except ValueError as e:
        if str(path) in str(e):
            raise
        raise ValueError(f"{path}: {first_line(e)}") from e
    except Exception as e:
        if isinstance(e, OSError | ImportError | Unforeseen) or is_out_of_memory(e):
            raise
        raise Unforeseen(f"{path}: an unforeseen {type(e).__name__} while it was read "
                         f"({first_line(e)}): the file is damaged in a way that we do not know, or "
                         "the mistake is ours; please report it, --debug shows where") from e
