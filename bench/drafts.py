"""Drafts that are right as often as published ones: what a model's own head would give, timed.

The head works as ever, of whatever weights; then its tokens are exchanged for those of the text
that the model is known to give, and for wrong ones where chance says so.

    batch = with_known_drafts(batch, [prompt], n_new); tokens = generate(batch, [prompt], n_new)
"""

import torch
from torch import Tensor

from generate import Batch, generate
from speculate import SpeculativeBatch

ACCEPTANCE = 0.8                                   # of each draft whose predecessors were right:
                                                   # what Qwen3.5's head is published to reach first


class KnownDrafter:
    """A drafter's work, and tokens of a known text in place of its own."""

    def __init__(self, drafter, text: list[int], acceptance: float = ACCEPTANCE):
        """text: prompt and what follows."""
        self.drafter, self.acceptance = drafter, acceptance
        self.text = torch.tensor([text], device=drafter.model.freq.device)
        self.n_vocab = drafter.model.cfg.vocab_size

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def propose(self, history: Tensor, n: int, k: int, sampler) -> tuple:
        own, _, _ = self.drafter.propose(history, n, k, sampler)
        known = self.text[:, n:n + k]
        right = own.clone()                        # beyond the text: as they are
        right[:, :known.shape[1]] = known
        chance = torch.rand(1, k, device=right.device)
        drafts = torch.where(chance < self.acceptance, right, (right + 1) % self.n_vocab)
        return drafts, torch.ones(k, 1, device=drafts.device), drafts.T


def with_known_drafts(batch: SpeculativeBatch, prompts: list[list[int]], n_new: int) -> None:
    """Have a greedy batch draft what its model is about to say. In place."""
    plain = Batch(batch.model, batch.sampler, batch.steps)
    text = [t.item() for t in generate(plain, prompts, n_new)]
    batch.drafter = KnownDrafter(batch.drafter, [*prompts[0], *text])
