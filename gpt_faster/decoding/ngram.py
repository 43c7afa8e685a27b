"""Drafts without a second model: what followed the last tokens the last time they were there.

    batch = SpeculativeBatch(model, sampler, steps, NgramDrafter(), FixedLength(8), 8)
"""

import torch
from torch import Tensor

from sampling import Sampler

NGRAM = 3                                          # tokens that must match


class NgramDrafter:
    """Drafts what followed the last NGRAM tokens the last time they were there: no second model."""

    def __init__(self):
        self.at = 0                                # where in the history that begins; 0: nowhere

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        self.at = 0

    def find(self, history: Tensor, n: Tensor) -> Tensor:
        """history [1, S], n [] tokens known -> `at` [], for accepted()."""
        back = torch.arange(NGRAM, device=history.device)
        last = history[0, (n - NGRAM + back).clamp(min=0)]
        same = (history[0].unfold(0, NGRAM, 1) == last).all(-1)
        after = NGRAM + torch.arange(len(same), device=history.device)
        return torch.where(same & (after < n), after, 0).amax()

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple | None:
        if not self.at:
            return None
        drafts = history[:, self.at:self.at + k].clone()       # made as a model's: one graph
        return drafts, torch.ones(k, 1, device=drafts.device), drafts.T

    def accepted(self, n: int, at: int | None) -> None:
        self.at = at or 0
