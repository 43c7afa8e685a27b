"""The safetensors format: a file -> its lazy tensors.

Reads slices only: nothing is in memory before its rows are asked for.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from formats.lazy import LazyTensor, across_matrices

DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
              F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2, F8_E8M0=torch.float8_e8m0fnu,
              I64=torch.int64, I32=torch.int32, I8=torch.int8, U8=torch.uint8)


def read_safetensors(path: Path) -> list[LazyTensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as e:
        raise ValueError(f"{path}: not a readable safetensors file (truncated?): {e}") from None

    return [_tensor(name, file.get_slice(name)) for name in file.keys()]


def _tensor(name: str, piece) -> LazyTensor:
    shape = tuple(piece.get_shape())

    def scalar(a, b):
        return piece[...].reshape(1)

    def rows(a, b):
        return piece[a:b]

    def rows_of_matrices(a, b):                    # slices do not cross the first axis
        return across_matrices(a, b, shape[1], lambda i, low, high: piece[i:i + 1, low:high][0])
    if len(shape) > 2:
        rows = rows_of_matrices
    read_rows = rows if shape else scalar
    return LazyTensor(name, shape, DTYPES.get(piece.get_dtype(), torch.uint8), read_rows)
