"""Memory for packed weights: parts that do not overlap, begin a cache line, and are freed with the last of a block."""

import gc
import threading

import pytest
import torch

from gpt_faster.kernels.cpu import huge_pages
from gpt_faster.kernels.cpu.huge_pages import BLOCK, CACHE_LINE, HUGE, HugePages


def resident_mb():
    gc.collect()
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Rss")) / 1024


def test_parts_do_not_overlap():
    """Of several threads, of all sizes, more than one block's."""
    memory, parts = HugePages(), []
    sizes = [1, 63, 64, 65, 1000, 12345, HUGE, HUGE + 1, BLOCK // 2, BLOCK // 2 + 1, BLOCK, 2 * BLOCK + 5]

    def take():
        for n in sizes:
            parts.append(memory.empty(n))
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, parts)) == sorted(4 * sizes)
    assert all(part.dtype == torch.uint8 and part.data_ptr() % CACHE_LINE == 0 for part in parts)
    ends = sorted((part.data_ptr(), part.data_ptr() + len(part)) for part in parts)
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:]))


@pytest.mark.skipif(not hasattr(huge_pages.mmap, "MADV_HUGEPAGE"), reason="Linux's huge pages")
def test_a_block_is_freed_with_its_last_part():
    memory = HugePages()
    parts = [memory.empty(BLOCK // 4).fill_(1) for _ in range(4)]
    memory.empty(1)                                            # another block
    with_all = resident_mb()
    del parts[1:]
    assert resident_mb() > with_all - BLOCK / 2**20 / 2 and parts[0].eq(1).all()
    del parts[:]
    assert resident_mb() < with_all - BLOCK / 2**20 / 2


@pytest.mark.parametrize("error", [AttributeError, OSError])
def test_without_huge_pages(monkeypatch, error):
    def refused(*args):
        raise error("no such thing")
    monkeypatch.setattr(huge_pages.mmap, "mmap", refused)
    parts = [HugePages().empty(n).fill_(7) for n in (5, BLOCK)]
    assert [len(part) for part in parts] == [5, BLOCK] and all(part.eq(7).all() for part in parts)


def test_in_inference_mode_it_is_ordinary_memory():
    """So that a model loaded there compiles as others do."""
    with torch.inference_mode():
        assert not HugePages().empty(100).is_inference()
