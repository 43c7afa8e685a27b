"""Top-k experts of each row in one launch, in Triton. Imported on a GPU only.

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
    exp = tl.exp(x - tl.max(x, 0))
    prob = exp / tl.sum(exp, 0)
    remaining = tl.where(e < n_expert, prob, -1)
    top_probs, top_ids = tl.zeros([A], tl.float32), tl.zeros([A], tl.int32)
    for i in range(n_active):
        best = tl.max(remaining, 0)
        first = tl.min(tl.where(remaining == best, e, n_expert - 1), 0)
        top_probs = tl.where(a == i, best, top_probs)
        top_ids = tl.where(a == i, first, top_ids)
        remaining = tl.where(e == first, -1, remaining)
    if normalized:
        top_probs /= tl.sum(top_probs, 0)
    tl.store(probs + row * n_active + a, top_probs, a < n_active)
    tl.store(ids + row * n_active + a, top_ids.to(tl.int64), a < n_active)


def launch(logits: Tensor, n_active: int, normalized: bool) -> tuple[Tensor, Tensor]:
    n, n_expert = logits.shape
    prob = torch.empty(n * n_active, device=logits.device)
    ids = torch.empty(n * n_active, dtype=torch.int64, device=logits.device)
    _route[(n,)](logits, prob, ids, n_expert, n_active, normalized,
                 triton.next_power_of_2(n_expert), triton.next_power_of_2(n_active), num_warps=1)
    return prob, ids
