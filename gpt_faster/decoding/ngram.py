"""N-gram lookup: drafts what followed the previous occurrence of the last tokens. No draft model.

    batch = SpeculativeBatch(model, sampler, steps, NgramDrafter(), FixedLength(8), 8)
"""

import torch
from torch import Tensor

from generate import to_device
from sampling import Sampler
from speculate import Drafter, Rows

NGRAM = 3                                          # tokens that must match


class NgramDrafter(Drafter):
    """Drafts the continuation of the last earlier occurrence of the last NGRAM tokens."""

    varies = False

    def setup(self, n_row: int, max_length: int, longest_call: int) -> None:
        self.starts = [0] * n_row                  # of each row's continuation; 0: no match

    def begin(self, row: int, n_same: int) -> None:
        self.starts[row] = 0

    def can_draft(self, row: int) -> bool:
        return self.starts[row] > 0

    def find(self, history: Tensor, n: Tensor) -> Tensor:
        """history [b, S], of which n [b] tokens are known -> start of each continuation [b]."""
        back = torch.arange(NGRAM, device=history.device)
        n = n[:, None]
        last = history.gather(1, (n - NGRAM + back).clamp(min=0))          # [b, NGRAM]
        same = (history.unfold(1, NGRAM, 1) == last[:, None]).all(-1)      # [b, S - NGRAM + 1]
        after = NGRAM + torch.arange(same.shape[1], device=history.device)
        return torch.where(same & (after < n), after, 0).amax(-1)

    def propose(self, rows: Rows, k: int, sampler: Sampler) -> tuple:
        starts = to_device([self.starts[row] for row in rows.index], rows.history.device)
        place = torch.arange(k, device=starts.device)
        drafts = rows.history.gather(1, starts[:, None] + place)
        return drafts, torch.ones(*drafts.shape, 1, device=drafts.device), drafts[..., None]

    def accepted(self, row: int, n: int, found: int | None) -> None:
        self.starts[row] = found or 0
