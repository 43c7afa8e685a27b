"""Tokens from the device to the host, where reading each at once would make a GPU wait.

    for ids, _ in read_late((token, None) for token in generate(batch, prompts, 100)): ...
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class NotFinite(ValueError):
    """A row's logits are no numbers, so that none of its tokens means anything."""

    def __init__(self, what: str, dtype: torch.dtype):
        why = "a weight is damaged, or the model needs --dtype float32"
        if dtype == torch.float16:
            why = "it exceeds float16's range, use --dtype bfloat16 or float32"
        super().__init__(f"{what}: logits that are infinite or no numbers (NaN): {why}")


def read_late(tokens: Iterable[tuple[Tensor, object]], not_finite: Tensor | None = None
              ) -> Iterator[tuple[list[int | None], object]]:
    """(token [B, 1], tag) -> (ids, tag). A GPU computes the next token while we read the last.

    not_finite: the sampler's, [B, 1]; the id of a row whose logits were none is None.
    """
    waiting = deque()
    for token, tag in tokens:
        copied, flags = None, not_finite
        if token.is_cuda:
            token, flags = _on_host(token), None if flags is None else _on_host(flags)
            copied = torch.cuda.Event()
            copied.record()
        waiting.append((token, flags, copied, tag))
        if len(waiting) > (copied is not None):
            yield _read(*waiting.popleft())
    for item in waiting:
        yield _read(*item)


def _on_host(t: Tensor) -> Tensor:
    """Its values here, once what was asked of the GPU so far is done."""
    host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return host.copy_(t, non_blocking=True)


def _read(token: Tensor, flags: Tensor | None, copied, tag) -> tuple[list[int | None], object]:
    if copied is not None:
        copied.synchronize()
    ids = token[:, 0].tolist()
    if flags is not None and any(flags := flags[:, 0].tolist()):           # NaN counts as true
        ids = [None if math.isnan(flag) else i for i, flag in zip(ids, flags)]
    return ids, tag
