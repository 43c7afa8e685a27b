"""Speculation with a drafter of random weights, timed at a published acceptance rate.

The drafter runs as usual, then its drafts are replaced by the tokens that the model will generate,
or by wrong ones with probability 1 - acceptance.

    use_fixed_acceptance(batch, [prompt], n_new, 0.8); tokens = generate(batch, [prompt], n_new)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from generate import Batch, generate
from speculate import Rows, SpeculativeBatch

MAX_PASSES = 10                                    # until the speculative text is stable


class FixedAcceptanceDrafter:
    """Runs a drafter, and replaces its drafts by tokens of a known text."""

    def __init__(self, drafter, acceptance: float):
        """acceptance: probability that a draft is correct, if those before it are."""
        self.drafter, self.acceptance = drafter, acceptance
        self.text = None
        self.n_vocab = drafter.model.cfg.vocab_size

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def set_text(self, text: list[int]) -> None:
        """text: the prompt and the tokens after it."""
        self.text = torch.tensor([text], device=self.drafter.model.freq.device)

    def begin(self, *args) -> None:
        self.generator = torch.Generator().manual_seed(1)      # the same errors in each run
        self.drafter.begin(*args)

    def propose(self, rows: Rows, k: int, sampler) -> tuple:
        drafts, _, _ = self.drafter.propose(rows, k, sampler)
        text = self.text.expand(len(drafts), -1)   # of all rows
        at = rows.pos.view(-1, 1) + 1 + torch.arange(k, device=text.device)
        last = text.shape[1] - 1
        correct = torch.where(at <= last, text.gather(1, at.clamp(max=last)), drafts)
        chance = torch.rand(drafts.shape, generator=self.generator).to(correct.device)
        drafts = torch.where(chance < self.acceptance, correct, (correct + 1) % self.n_vocab)
        return drafts, torch.ones(*drafts.shape, 1, device=drafts.device), drafts[..., None]


def use_fixed_acceptance(batch: SpeculativeBatch, prompts: list[list[int]], n_new: int,
                         acceptance: float) -> None:
    """Replace the drafter of a greedy batch whose rows have the same prompt, in place.

    Verification rounds differently from single-token steps, so near-ties may change the text.
    Generate it repeatedly until it no longer changes.
    """
    plain = Batch(batch.model, batch.sampler, batch.steps)
    text = first_row(generate(plain, prompts, n_new))
    batch.drafter = FixedAcceptanceDrafter(batch.drafter, acceptance)
    for _ in range(MAX_PASSES):
        batch.drafter.set_text([*prompts[0], *text])
        previous, text = text, first_row(generate(batch, prompts, n_new))
        if text == previous:
            break


def first_row(tokens: Iterator[Tensor]) -> list[int]:
    return [i for t in tokens for i in t[0].tolist() if i >= 0]
