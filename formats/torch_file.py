"""PyTorch's own files (.pth, .pt, .bin): a dictionary, memory-mapped; never executes anything."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from formats.lazy import LazyTensor, as_rows
from formats.messages import first_line


def read_torch(path: Path) -> dict:
    """A PyTorch file, memory-mapped where its format allows. Never executes what is in it."""
    for mapped in (True, False):
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            break
        except pickle.UnpicklingError as e:
            raise ValueError(f"{path}: refused, it holds more than weights "
                             f"({first_line(e)})") from None
        except (RuntimeError, EOFError, ValueError, OSError) as e:
            if isinstance(e, OSError) and e.filename:      # not found, not allowed
                raise
            older = "mmap can only be used" in str(e)      # than torch 1.6
            if not mapped or not older:
                raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                                 f"{first_line(e)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


def lazy_tensors(tensors: dict) -> list[LazyTensor]:
    """Of a dictionary as read_torch() gives it: what is not a tensor is left out."""
    return [LazyTensor(n, tuple(t.shape), t.dtype, lambda a, b, t=t: as_rows(t)[a:b])
            for n, t in tensors.items() if isinstance(t, Tensor)]
