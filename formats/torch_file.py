"""PyTorch's own files (.pth, .pt, .bin): a dictionary, memory-mapped; never executes anything."""

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import LazyTensor, as_rows, first_line


def read_torch(path: Path) -> dict:
    """A PyTorch file, memory-mapped where its format allows. Never executes what is in it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    _refuse_bombs(path)
    for mapped in (True, False):
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            break
        except pickle.UnpicklingError as e:
            raise ValueError(f"{path}: refused, it holds more than weights "
                             f"({first_line(e)})") from None
        except Exception as e:                     # a damaged pickle makes it raise anything
            if isinstance(e, OSError) and e.filename:      # not found, not allowed
                raise
            older = "mmap can only be used" in str(e)      # than torch 1.6
            if not mapped or not older:
                raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                                 f"{type(e).__name__}: {first_line(e)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


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


def lazy_tensors(tensors: dict) -> list[LazyTensor]:
    """Of a dictionary as read_torch() gives it: what is not a tensor is left out.

    ValueError where there is none, or where one is said to be larger than its bytes.
    """
    if not isinstance(tensors, dict):
        raise ValueError(f"expected a dictionary of tensors, found {type(tensors).__name__}")
    named = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and isinstance(n, str)}
    for name, t in named.items():
        if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized:
            raise ValueError(f"{name} is {t.layout}, on {t.device}: expected plain numbers")
        if t.numel() * t.itemsize > t.untyped_storage().nbytes():
            raise ValueError(f"{name} is said to be {list(t.shape)}, but its storage has "
                             f"{t.untyped_storage().nbytes():,} bytes")
    return [LazyTensor(n, tuple(t.shape), t.dtype, lambda a, b, t=t: as_rows(t)[a:b])
            for n, t in named.items()]
