"""Top-p without a sort: on a GPU a compiled step does this in its own kernels, where a sort waits.

    sampler.filters["top_p"] = keep_top_p          # in place of sampling.py's, the same tokens stay
"""

import torch
from torch import Tensor


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """True where the mass strictly above a token is < top_p, and where top_p is 1. probs [B, V],
    top_p [B, 1] -> [B, V].

    Bisection finds the smallest threshold with less than top_p above it. Positive floats order like
    their bit patterns, so that 31 halvings of the patterns are exact.
    """
    bits = probs.view(torch.int32)
    low = torch.zeros_like(bits[:, :1])
    high = bits.amax(-1, keepdim=True)                                     # nothing is above it
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = (probs * (bits > middle)).sum(-1, keepdim=True) < top_p
        low = torch.where(enough, low, middle + 1)
        high = torch.where(enough, middle, high)
    return (bits >= high) | (top_p >= 1)
