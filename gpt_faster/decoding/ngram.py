"""N-gram lookup: drafts what followed the previous occurrence of the last tokens. No draft model.

    batch = SpeculativeBatch(model, sampler, steps, NgramDrafter(), FixedLength(8), 8)
"""

import torch
from torch import Tensor

from sampling import Sampler

NGRAM = 3                                          # tokens that must match


class NgramDrafter:
    """Drafts the continuation of the last earlier occurrence of the last NGRAM tokens."""

    def __init__(self):
        self.start = 0                             # of the continuation in history; 0: no match

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        self.start = 0

    def find(self, history: Tensor, n: Tensor) -> Tensor:
        """history [1, S], of which n [] tokens are known -> start of the continuation []."""
        back = torch.arange(NGRAM, device=history.device)
        last = history[0, (n - NGRAM + back).clamp(min=0)]
        same = (history[0].unfold(0, NGRAM, 1) == last).all(-1)
        after = NGRAM + torch.arange(len(same), device=history.device)
        return torch.where(same & (after < n), after, 0).amax()

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple | None:
        if not self.start:
            return None
        # a fresh tensor, as a draft model returns: verify needs one graph only
        drafts = history[:, self.start:self.start + k].clone()
        return drafts, torch.ones(k, 1, device=drafts.device), drafts.T

    def accepted(self, n: int, match: int | None) -> None:
        self.start = match or 0
