"""Chooses the draft length from the measured cost of a round and the recent acceptance rate.

    batch = SpeculativeBatch(model, sampler, steps, drafter, DraftLengthController([5, 1]), 5)
"""

import statistics
import time
from collections.abc import Callable

import torch

from gpt_faster.decoding.ranks import from_rank_0

PRIOR_ACCEPTANCE = 0.8                             # assumed before the first draft,
PRIOR_WEIGHT = 2.0                                 # as if from this many verified drafts
DECAY = 0.9                                        # weight of earlier rounds, per round


class DraftLengthController:
    """Picks the length with the most expected tokens per unit of time, at the recent acceptance
    rate. If no length is expected to pay, drafting pauses, each time for twice as many rounds, so
    that bad drafts cost little."""

    def __init__(self, lengths: list[int], costs: dict[int, float] | None = None,
                 acceptance: float = 1.0):
        """lengths: candidates. costs: time of a round with each length, in plain decode steps;
        lengths that cannot pay at this acceptance rate are dropped. None: each costs 2 steps, and
        all are kept."""
        self.lengths, self.costs = lengths, dict.fromkeys(lengths, 2.0)
        if costs is not None:
            self.costs = costs
            self.lengths = [k for k in lengths if costs[k] < expected_tokens(k, acceptance)]
        self.begin()

    def begin(self) -> None:
        """Reset the acceptance rate for a new text."""
        self.n_accepted, self.n_verified = PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self.k, self.wait, self.pause = 0, 0, 1    # wait: rounds left of a pause of `pause` rounds

    @property
    def paused(self) -> bool:
        """Whether next() will return 0 after the coming round."""
        return not self.lengths or self.wait >= 2

    def speedup(self, k: int) -> float:
        return expected_tokens(k, self.n_accepted / self.n_verified) / self.costs[k]

    def next(self) -> int:
        self.wait = max(0, self.wait - 1)
        if self.wait or not self.lengths:
            return 0
        self.k = max(self.lengths, key=self.speedup)
        return self.k

    def learn(self, n_accepted: int) -> None:
        """Update the rate. Drafts after the first rejected one were not verified."""
        prior = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        n_verified = min(n_accepted + 1, self.k)
        self.n_accepted = prior + DECAY * (self.n_accepted - prior) + n_accepted
        self.n_verified = PRIOR_WEIGHT + DECAY * (self.n_verified - PRIOR_WEIGHT) + n_verified
        if max(map(self.speedup, self.lengths)) > 1:
            self.pause = 1
        else:
            self.pause = min(2 * self.pause, 64)
            self.wait = self.pause


def expected_tokens(k: int, acceptance: float) -> float:
    """Expected tokens per round of k drafts: those before the first rejected one, plus one."""
    return sum(acceptance ** i for i in range(k + 1))


@torch.inference_mode()
def draft_costs(batch, kv_len: int, lengths: list[int], n: int = 10) -> dict[int, float]:
    """Time of a round of each draft length, in plain decode steps. Medians of n - 1 runs, or fewer
    once half a second has passed.

    Overwrites the beginning of the caches. Each rank makes the same calls.
    """
    model, sampler, drafter = batch.model, batch.sampler, batch.drafter
    pos = torch.zeros(1, dtype=torch.int64, device=batch.token.device)
    token = pos[None].clone()

    def plain():
        batch.steps.decode(model, token, pos, kv_len, sampler).item()

    def draft(k):
        """Do the work of k drafts -> their distributions, probs and ids."""
        if hasattr(drafter, "draft_for_timing"):
            return drafter.draft_for_timing(k, 1 + k // 2, kv_len, sampler)
        args = token, pos, kv_len, token.repeat(1, k), sampler, sampler.n_vocab
        for _ in range(k + 1):
            _, probs, ids = drafter.step(drafter.model, *args)
        return [t if t is None else t.repeat(k, 1) for t in (probs, ids)]

    def check(k):
        probs, ids = torch.ones(k, 1, device=token.device), token.repeat(k, 1)
        if hasattr(drafter, "step"):
            probs, ids = draft(k)
        args = token, token.repeat(1, k), probs, ids, pos, kv_len, sampler

        def run():
            batch.verify(model, *args)[1].item()
        return run

    plain_s = _seconds(plain, n)
    costs = {}
    for k in lengths:
        round_s = _seconds(check(k), n)
        if hasattr(drafter, "step"):
            round_s += _seconds(lambda k=k: draft(k)[0][0, 0].item(), n)
        costs[k] = round_s / plain_s
    return costs


def _seconds(call: Callable, n: int) -> float:
    times = []

    def enough():
        return len(times) >= 3 and from_rank_0(lambda: sum(times) > 0.5)
    while len(times) < n and not enough():
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)
