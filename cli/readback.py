"""Tokens from the device to the host, where reading each at once would make a GPU wait.

    for ids, _ in read_late((token, None) for token in generate(batch, prompts, 100)): ...
"""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def read_late(tokens: Iterable[tuple[Tensor, object]]) -> Iterator[tuple[list[int], object]]:
    """(token [B, 1], tag) -> (ids, tag). A GPU computes the next token while we read the last."""
    waiting = deque()
    for token, tag in tokens:
        copied = None
        if token.is_cuda:
            host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
            token = host.copy_(token, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        waiting.append((token, copied, tag))
        if len(waiting) > (copied is not None):
            yield _read(*waiting.popleft())
    for item in waiting:
        yield _read(*item)


def _read(token: Tensor, copied, tag) -> tuple[list[int], object]:
    if copied is not None:
        copied.synchronize()
    return token[:, 0].tolist(), tag
