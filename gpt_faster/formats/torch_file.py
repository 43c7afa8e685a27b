"""PyTorch's own files (.pth, .pt, .bin): a dictionary, memory-mapped; never executes anything."""

import zipfile
from pathlib import Path

import checkpoint
from checkpoint import first_line


def read_torch(path: Path) -> dict:
    """As checkpoint.read_torch(), files older than torch 1.6 too, which cannot be mapped."""
    _refuse_bombs(path)
    return checkpoint.read_torch(path, mmap=is_archive(path))


def is_archive(path: Path) -> bool:
    """Does it begin as a zip file?"""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def _refuse_bombs(path: Path) -> None:
    """torch.save stores the entries of its archive as they are: what unpacks to more than the file
    holds was not written by it."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as e:                         # a damaged directory makes it raise anything
        raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                         f"{first_line(e)}") from None
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{path}: {packed[0]} is compressed, which PyTorch's files are not")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError(f"{path}: its entries claim more bytes than the file has")
