"""The likeliest experts of each row, in one launch, in Triton. Imported on a GPU only.

    prob, ids = launch(logits, n_active=8, normalized=True)                # [n, E] -> [n A] each
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(logits, probs, ids, n_expert: tl.constexpr, n_active: tl.constexpr,
           normalized: tl.constexpr, E: tl.constexpr, A: tl.constexpr):
    row = tl.program_id(0)
    e, a = tl.arange(0, E), tl.arange(0, A)
    x = tl.load(logits + row * n_expert + e, e < n_expert, float("-inf")).to(tl.float32)
    share = tl.exp(x - tl.max(x, 0))
    prob = share / tl.sum(share, 0)
    left = tl.where(e < n_expert, prob, -1)
    chosen, chosen_ids = tl.zeros([A], tl.float32), tl.zeros([A], tl.int32)
    for i in range(n_active):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, e, n_expert - 1), 0)
        chosen = tl.where(a == i, best, chosen)
        chosen_ids = tl.where(a == i, first, chosen_ids)
        left = tl.where(e == first, -1, left)
    if normalized:
        chosen /= tl.sum(chosen, 0)
    tl.store(probs + row * n_active + a, chosen, a < n_active)
    tl.store(ids + row * n_active + a, chosen_ids.to(tl.int64), a < n_active)


def launch(logits: Tensor, n_active: int, normalized: bool) -> tuple[Tensor, Tensor]:
    n, n_expert = logits.shape
    prob = torch.empty(n * n_active, device=logits.device)
    ids = torch.empty(n * n_active, dtype=torch.int64, device=logits.device)
    _route[(n,)](logits, prob, ids, n_expert, n_active, normalized,
                 triton.next_power_of_2(n_expert), triton.next_power_of_2(n_active), num_warps=1)
    return prob, ids
