"""Memory for weights in pages of 2 MB, which small matrices share: fewer misses of address
translation. Knows no kernels.

    words = WEIGHTS.empty(n_byte)                  # uint8 [n_byte], starts at a cache line
"""

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20
BLOCK = 64 << 20                                   # bytes mapped at once; used ones take memory
CACHE_LINE = 64


class HugePages:
    """Gives out parts of blocks, one after another. A block is freed with the last tensor that has
    a part of it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.block, self.at = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, n_byte: int) -> Tensor:
        with self.lock:
            if n_byte > BLOCK // 2:
                return map_huge(n_byte)
            if self.at + n_byte > len(self.block):
                self.block, self.at = map_huge(BLOCK), 0
            part = self.block[self.at:self.at + n_byte]
            self.at += -(-n_byte // CACHE_LINE) * CACHE_LINE
            return part


@torch.inference_mode(False)
def map_huge(n_byte: int) -> Tensor:
    """uint8 [n_byte] that begins a huge page; elsewhere than on Linux, ordinary memory."""
    with suppress(AttributeError, OSError):        # torch says it if memory is short
        memory = mmap.mmap(-1, n_byte + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)    # keeps `memory`
        begin = -whole.data_ptr() % HUGE
        return whole[begin:begin + n_byte]
    return torch.empty(n_byte, dtype=torch.uint8)


WEIGHTS = HugePages()
