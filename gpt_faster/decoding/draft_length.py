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
    """Picks the length with the most expected tokens per unit of time, at each row's recent
    acceptance rate. If no length is expected to pay, drafting pauses, each time for twice as many
    rounds, so that bad drafts cost little."""

    def __init__(self, lengths: list[int], costs: dict[int, dict[int, float]] | None = None,
                 acceptance: float = 1.0):
        """lengths: candidates. costs[n_row][k]: time of a round of n_row rows that draft k tokens,
        in their plain decode steps; other numbers of rows cost what the next larger one does.
        Lengths that cannot pay at this acceptance rate are dropped. None: each costs 2 steps, and
        all are kept."""
        self.lengths, self.costs = lengths, costs or {1: dict.fromkeys(lengths, 2.0)}
        if costs is not None:
            self.lengths = [k for k in lengths if any(
                of_width[k] < expected_tokens(k, acceptance) for of_width in costs.values())]
        self.acceptance = acceptance
        self.rates = {}                            # row -> accepted, verified drafts
        self.wait, self.pause = 0, 1               # rounds left of a pause of `pause` rounds
        self.k, self.n_row, self.drafting = 0, 1, []           # of this round

    def begin(self, row: int) -> None:
        """A new text: reset the row's acceptance rate, and end a pause."""
        self.rates[row] = PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self.wait, self.pause = 0, 1

    @property
    def paused(self) -> bool:
        """Whether next() will return 0 after the coming round."""
        return not self.lengths or (self.wait >= 2 and self.n_row == 1)

    def can_pay(self, k: int, n_drafting: int, n_row: int) -> bool:
        """Whether k drafts in some of n_row rows may pay, at the best acceptance rate."""
        n_more = expected_tokens(k, self.acceptance) - 1
        return 1 + n_more * n_drafting / n_row >= self.cost(k, n_row)

    def cost(self, k: int, n_row: int) -> float:
        widths = sorted(self.costs)
        return self.costs[next((n for n in widths if n >= n_row), widths[-1])][k]

    def speedup(self, k: int) -> float:
        """Of all rows that take part; those without drafts get one token a round."""
        expected = [expected_tokens(k, accepted / verified)
                    for accepted, verified in map(self.rates.get, self.drafting)]
        n_tokens = sum(expected) + self.n_row - len(expected)
        return n_tokens / self.n_row / self.cost(k, self.n_row)

    def next(self, drafting: list[int], n_row: int) -> int:
        self.wait = max(0, self.wait - 1)
        self.drafting, self.n_row = drafting, n_row
        lengths = [k for k in self.lengths if self.can_pay(k, len(drafting), n_row)]
        if not drafting or not lengths:
            return 0
        self.k = max(lengths, key=self.speedup)
        if self.wait and self.speedup(self.k) <= 1:            # other rows draft than at its start?
            return 0
        return self.k

    def learn(self, n_accepted: dict[int, int]) -> None:
        """Update the rates. Drafts after the first rejected one were not verified."""
        prior = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        for row, n in n_accepted.items():
            accepted, verified = self.rates[row]
            accepted = prior + DECAY * (accepted - prior) + n
            verified = PRIOR_WEIGHT + DECAY * (verified - PRIOR_WEIGHT) + min(n + 1, self.k)
            self.rates[row] = accepted, verified
        if max(map(self.speedup, self.lengths)) > 1:
            self.pause = 1
        else:
            self.pause = min(2 * self.pause, 64)
            self.wait = self.pause


def expected_tokens(k: int, acceptance: float) -> float:
    """Expected tokens per round of k drafts: those before the first rejected one, plus one."""
    return sum(acceptance ** i for i in range(k + 1))


@torch.inference_mode()
def run_round(batch, n: int, n_row: int, k: int, n_new: int = 1) -> None:
    """A round of k drafts (0: a plain step) in the first n_row rows, as if each had n tokens, of
    which the last round added n_new. Waits for the device. Overwrites the caches."""
    batch.length = [n - 1] * n_row + [0] * (batch.n_row - n_row)
    batch._set_pos()
    if k:
        rows = batch.rows_of_round(set(range(n_row)))
        for row in range(n_row):
            batch.drafter.resume(row, n, n_new, k)
        batch.draft_and_verify(rows, k)[1].tolist()
    else:
        batch._decode().tolist()
    batch.length = [0] * batch.n_row
    batch._set_pos()


def draft_costs(batch, n: int, lengths: list[int], n_row: int, n_time: int = 10
                ) -> dict[int, float]:
    """Time of a round of n_row rows with each draft length, in their plain decode steps, at n known
    tokens. Medians of n_time - 1 runs, or fewer once a quarter of a second has passed.

    Overwrites the caches, so begin() must follow for each row. Each rank makes the same calls.
    """
    n = max(2, min(n, batch.max_length - max(lengths) - 1))
    seconds = {k: _seconds(lambda k=k: run_round(batch, n, n_row, k, 1 + k // 2), n_time)
               for k in (0, *lengths)}
    return {k: seconds[k] / seconds[0] for k in lengths}


def _seconds(call: Callable, n: int) -> float:
    times = []

    def enough():
        return len(times) >= 3 and from_rank_0(lambda: sum(times) > 0.25)
    while len(times) < n and not enough():
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)
