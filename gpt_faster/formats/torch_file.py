"""PyTorch files (.pth, .pt, .bin): a dict, memory-mapped. Never executes pickled code."""

import zipfile
from pathlib import Path

from torch import Tensor

import checkpoint
from checkpoint import unreadable
from gpt_faster.formats.file_kinds import refuse_others

# Where training programs keep the weights, next to an optimizer's state
WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model", "module")


def read_torch(path: Path, kinds: tuple[type, ...] = (dict,)) -> dict | Tensor:
    """checkpoint.read_torch(), also for files older than torch 1.6, which cannot be mapped."""
    refuse_others(path)
    _refuse_bombs(path)
    return checkpoint.read_torch(path, mmap=is_archive(path), kinds=kinds)


def state_dict(content: dict) -> dict:
    """The weights of a training checkpoint, which has them under a key; else the content itself."""
    if any(isinstance(value, Tensor) for value in content.values()):
        return content
    return next((content[key] for key in WEIGHTS_KEYS if isinstance(content.get(key), dict)),
                content)


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
        raise unreadable(path, "PyTorch", e) from None
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{path}: {packed[0]} is compressed; PyTorch files are not")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError(f"{path}: its zip entries claim more bytes than the file has")
