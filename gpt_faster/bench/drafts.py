"""Drafts that are right as often as published ones: what a model's own head would give, timed.

The head works as ever, of whatever weights; then its tokens are exchanged for those of the text
that the model is known to give, and for wrong ones where chance says so.

    batch = with_known_drafts(batch, [prompt], n_new); tokens = generate(batch, [prompt], n_new)
"""

import torch
from torch import Tensor

from generate import Batch, generate
from gpt_faster.decoding.mtp import PUBLISHED_ACCEPTANCE
from speculate import SpeculativeBatch

PASSES = 10                                        # until a text is one that rounds give, too


class KnownDrafter:
    """A drafter's work, and tokens of a known text in place of its own."""

    def __init__(self, drafter, acceptance: float = PUBLISHED_ACCEPTANCE):
        """acceptance: of drafts behind none that was wrong."""
        self.drafter, self.acceptance = drafter, acceptance
        self.text = None
        self.n_vocab = drafter.model.cfg.vocab_size

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def know(self, text: list[int]) -> None:
        """text: prompt and what follows."""
        self.text = torch.tensor([text], device=self.drafter.model.freq.device)

    def begin(self, *args) -> None:
        self.generator = torch.Generator().manual_seed(1)      # each time the same are wrong
        self.drafter.begin(*args)

    def propose(self, history: Tensor, n: int, k: int, sampler) -> tuple:
        own, _, _ = self.drafter.propose(history, n, k, sampler)
        known = self.text[:, n:n + k]
        right = own.clone()                        # beyond the text: as they are
        right[:, :known.shape[1]] = known
        chance = torch.rand(1, k, generator=self.generator).to(right.device)
        drafts = torch.where(chance < self.acceptance, right, (right + 1) % self.n_vocab)
        return drafts, torch.ones(k, 1, device=drafts.device), drafts.T


def with_known_drafts(batch: SpeculativeBatch, prompts: list[list[int]], n_new: int) -> None:
    """Have a greedy batch draft what its model is about to say. In place.

    Several rows in a call round otherwise than one, so where two logits are nearly equal the text
    becomes another, of which nothing would be known: it is asked for until it stays.
    """
    plain = Batch(batch.model, batch.sampler, batch.steps)
    text = [t.item() for t in generate(plain, prompts, n_new)]
    batch.drafter = KnownDrafter(batch.drafter)
    for _ in range(PASSES):
        batch.drafter.know([*prompts[0], *text])
        before, text = text, [t.item() for t in generate(batch, prompts, n_new)]
        if text == before:
            break
