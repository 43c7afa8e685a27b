"""How many tokens to draft: as many as pay, by what a round costs here and how many are right.

    batch = SpeculativeBatch(model, sampler, steps, drafter, DraftLengthController([5, 1]), 5)
"""

import statistics
import time
from collections.abc import Callable

import torch

from gpt_faster.decoding.ranks import from_rank_0

ASSUMED, TRUST = 0.8, 2.0                          # acceptance before the first draft, as if so
MEMORY = 0.9                                       # many were judged; what a round leaves of before


class DraftLengthController:
    """The length whose rounds should give most tokens for their time, if as many drafts are right
    as were of late. Where none should pay, none for a while, each time for twice as long: so bad
    drafts cost little."""

    def __init__(self, lengths: list[int], costs: dict[int, float] | None = None,
                 acceptance: float = 1.0):
        """lengths: how many may be drafted; costs: what such a round takes, in plain steps: lengths
        that cannot pay where this share of drafts is right are dropped. None: 2, and none is
        dropped."""
        self.lengths, self.costs = lengths, dict.fromkeys(lengths, 2.0)
        if costs is not None:
            self.costs = costs
            self.lengths = [k for k in lengths if costs[k] < expected(k, acceptance)]
        self.begin()

    def begin(self) -> None:
        """Another text: what was learned of the last one does not count."""
        self.right, self.judged = ASSUMED * TRUST, TRUST
        self.k, self.wait, self.pause = 0, 0, 1

    @property
    def paused(self) -> bool:
        """Will next() be 0 after the coming round?"""
        return not self.lengths or self.wait >= 2

    def speedup(self, k: int) -> float:
        return expected(k, self.right / self.judged) / self.costs[k]

    def next(self) -> int:
        self.wait = max(0, self.wait - 1)
        if self.wait or not self.lengths:
            return 0
        self.k = max(self.lengths, key=self.speedup)
        return self.k

    def learn(self, n_accepted: int) -> None:
        """n_accepted of the last drafts were right; those behind a wrong one nobody judged."""
        self.right = ASSUMED * TRUST + MEMORY * (self.right - ASSUMED * TRUST) + n_accepted
        self.judged = TRUST + MEMORY * (self.judged - TRUST) + min(n_accepted + 1, self.k)
        if max(map(self.speedup, self.lengths)) > 1:
            self.pause = 1
        else:
            self.pause = min(2 * self.pause, 64)
            self.wait = self.pause


def expected(k: int, acceptance: float) -> float:
    """How many tokens a round of k drafts gives: those right before a wrong one, and one more."""
    return sum(acceptance ** i for i in range(k + 1))


@torch.inference_mode()
def draft_costs(batch, kv_len: int, lengths: list[int], n: int = 10) -> dict[int, float]:
    """What a round of each draft length takes, in plain steps: the medians of n - 1 runs, or of
    fewer that take half a second.

    Overwrites the beginning of the caches. Every rank makes the same calls.
    """
    model, sampler, drafter = batch.model, batch.sampler, batch.drafter
    pos = torch.zeros(1, dtype=torch.int64, device=batch.token.device)
    token = pos[None].clone()

    def plain():
        batch.steps.decode(model, token, pos, kv_len, sampler).item()

    def draft(k):
        """What a round's drafts take -> what they were drawn from."""
        if hasattr(drafter, "trial"):
            return drafter.trial(k, 1 + k // 2, kv_len, sampler)
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
