"""PyTorch files (.pth, .pt, .bin): a dict, memory-mapped. Never executes pickled code."""

import zipfile
from pathlib import Path

import checkpoint
from checkpoint import first_line


def read_torch(path: Path) -> dict:
    """checkpoint.read_torch(), also for files older than torch 1.6, which cannot be mapped."""
    _refuse_bombs(path)
    return checkpoint.read_torch(path, mmap=is_archive(path))


def is_archive(path: Path) -> bool:
    """Does the file start with zip's magic?"""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def _refuse_bombs(path: Path) -> None:
    """Refuse zip bombs: torch.save does not compress, so entries cannot exceed the file."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as e:                         # zipfile raises anything on damaged files
        raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                         f"{first_line(e)}") from None
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{path}: {packed[0]} is compressed; PyTorch files are not")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError(f"{path}: its zip entries claim more bytes than the file has")
