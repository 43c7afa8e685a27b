"""The project's version: the only place that states it, and the commit of a git clone.

    VERSION; commit()                              # "0.1.0", "69aa6b3…" or None
"""

from functools import lru_cache
from pathlib import Path

VERSION = "0.1.0"
ROOT = Path(__file__).resolve().parents[2]


@lru_cache(1)
def commit(root: Path = ROOT) -> str | None:
    """The commit that is checked out, from .git's files: git need not be installed. None outside
    of a clone, or if the files are not as expected."""
    try:
        head = (root / ".git/HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return checked(head)
        name = head.removeprefix("ref: ")
        if (path := root / ".git" / name).is_file():
            return checked(path.read_text().strip())
        for line in (root / ".git/packed-refs").read_text().splitlines():
            value, _, packed_name = line.partition(" ")
            if packed_name == name:
                return checked(value)
    except (OSError, UnicodeDecodeError):
        pass
    return None


def checked(text: str) -> str | None:
    is_hash = len(text) in (40, 64) and set(text) <= set("0123456789abcdef")
    return text if is_hash else None
