"""Logits processors: filters that keep state, what a row's tokens so far do to its logits.

A Sampler calls begin() for a new sequence in a row, observe() after each token, and forward() on
the logits. One of your own is appended to sampler.processors before anything is compiled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RepetitionPenalty(nn.Module):
    """Makes the tokens of prompt and answer less likely."""

    def __init__(self, n_row: int, n_vocab: int, device):
        super().__init__()
        penalty = torch.ones(n_row, 1, device=device)
        seen = torch.zeros(n_row, n_vocab, dtype=torch.bool, device=device)
        self.register_buffer("penalty", penalty)
        self.register_buffer("seen", seen)

    def begin(self, row: int, prompt: list[int], params) -> None:
        """A new sequence in this row."""
        self.penalty[row] = params.repetition_penalty
        seen = torch.zeros(self.seen.shape[1], dtype=torch.bool, pin_memory=self.seen.is_cuda)
        seen[prompt] = True
        self.seen[row].copy_(seen, non_blocking=True)          # pinned: a GPU is not waited for

    def observe(self, token: Tensor) -> None:
        """token [B, 1] has been generated."""
        self.seen.scatter_(1, token, True)

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        """logits [b, V] of these rows. Or, when one row's drafts are verified, [T, V]: the last
        place has seen all of draft_tokens [1, k] too, each place before it one less."""
        seen = self.seen[rows]
        if draft_tokens is not None:
            one_hot = F.one_hot(draft_tokens[0], logits.shape[1])
            so_far = F.pad(one_hot.cumsum(0), (0, 0, 1, 0))    # [k + 1, V]
            seen = seen | (so_far[-len(logits):] > 0)
        penalty = self.penalty[rows]
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, penalized, logits)
