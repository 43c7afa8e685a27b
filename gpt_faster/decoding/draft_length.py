"""Chooses the draft length from the measured cost of a round and the recent acceptance.

    batch = SpeculativeBatch(model, sampler, steps, drafter, DraftLengthController([5, 1]), 5)
"""

import time
from collections.abc import Callable

import torch

from gpt_faster.decoding.ranks import from_rank_0

PRIOR_ACCEPTANCE = 0.8                             # assumed before the first draft,
PRIOR_WEIGHT = 2.0                                 # as if from this many verified drafts
DECAY = 0.9                                        # weight of earlier rounds, per round
LOSS = 0.01                                        # of plain steps' time, which trials may cost,
ALLOWANCE = 1.0                                    # and plain steps beyond that, for a new text


class Acceptance:
    """How often a row's recent drafts were accepted, by position.

    Drafts of n-grams are all right or all wrong, those of a drafter less often right the later they
    are: one rate for all positions would expect too much of the former.
    """

    def __init__(self, n: int):
        self.accepted, self.verified = [0.0] * n, [0.0] * n    # of each position, decayed
        self.expected = self._expected()

    def learn(self, k: int, n: int) -> None:
        """The first n of k drafts were accepted. Those after the first rejected one were not
        verified."""
        for i in range(len(self.verified)):
            self.accepted[i] = DECAY * self.accepted[i] + (i < n)
            self.verified[i] = DECAY * self.verified[i] + (i < min(n + 1, k))
        self.expected = self._expected()

    def _expected(self) -> list[float]:
        """[k]: expected tokens of a round of k drafts."""
        total = PRIOR_WEIGHT + sum(self.verified)
        rate = (PRIOR_ACCEPTANCE * PRIOR_WEIGHT + sum(self.accepted)) / total
        expected, reached = [1.0], 1.0
        for accepted, verified in zip(self.accepted, self.verified):
            reached *= (rate * PRIOR_WEIGHT + accepted) / (PRIOR_WEIGHT + verified)
            expected.append(expected[-1] + reached)
        return expected


class DraftLengthController:
    """Picks the length with the most expected tokens per unit of time.

    If none is expected to pay, rows take plain steps until there is credit for a trial of the
    cheapest one. Each round earns LOSS, and a text that begins ALLOWANCE; wrong drafts, trials or
    not, use it up. So they cost little.
    """

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
        self.rates = {}                            # row -> Acceptance
        self.credit = 0.0                          # plain steps
        self.k, self.n_row = 0, 1                  # of this round

    def begin(self, row: int) -> None:
        """A new text: nothing is known of its acceptance, and the row's part of the credit."""
        self.rates[row] = Acceptance(max(self.lengths, default=0))
        self._earn(ALLOWANCE / max(self.costs))

    def end(self, row: int) -> None:
        """The row drafts no more: what it had learnt says nothing of the others."""
        self.rates.pop(row, None)

    def _earn(self, n_step: float) -> None:
        self.credit = min(ALLOWANCE, self.credit + n_step)

    @property
    def paused(self) -> bool:
        """Whether next() will return 0 after the coming round, whichever of the rows can draft."""
        if not self.lengths:
            return True
        if self.k or not self.rates:               # this round changes what is expected
            return False
        best = sorted(self.rates, key=lambda row: self.rates[row].expected[-1])[-self.n_row:]
        return not self._choose(best, self.n_row, self.credit + LOSS)

    def can_pay(self, k: int, n_drafting: int, n_row: int) -> bool:
        """Whether k drafts in some of n_row rows may pay, at the best acceptance rate."""
        n_more = expected_tokens(k, self.acceptance) - 1
        return 1 + n_more * n_drafting / n_row >= self.cost(k, n_row)

    def cost(self, k: int, n_row: int) -> float:
        widths = sorted(self.costs)
        return self.costs[next((n for n in widths if n >= n_row), widths[-1])][k]

    def speedup(self, k: int, drafting: list[int], n_row: int) -> float:
        """Of n_row rows that take part; those that are not drafting get one token a round."""
        n_more = sum(self.rates[row].expected[k] - 1 for row in drafting)
        return (1 + n_more / n_row) / self.cost(k, n_row)

    def next(self, drafting: list[int], n_row: int) -> int:
        self._earn(LOSS)
        self.k, self.n_row = self._choose(drafting, n_row, self.credit), n_row
        return self.k

    def _choose(self, drafting: list[int], n_row: int, credit: float) -> int:
        lengths = [k for k in self.lengths if self.can_pay(k, len(drafting), n_row)]
        if not drafting or not lengths:
            return 0
        best = max(lengths, key=lambda k: self.speedup(k, drafting, n_row))
        if self.speedup(best, drafting, n_row) > 1:
            return best
        cheapest = min(lengths, key=lambda k: self.cost(k, n_row))
        return cheapest if credit >= self.cost(cheapest, n_row) - 1 else 0

    def learn(self, n_accepted: dict[int, int]) -> None:
        for row, n in n_accepted.items():
            self.rates[row].learn(self.k, n)
        self._earn(1 + sum(n_accepted.values()) / self.n_row - self.cost(self.k, self.n_row))


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
    tokens. The shortest of up to n_time runs each, in turn, so that a busy machine shortens none of
    them alone; of three or more once they have taken a quarter of a second.

    Overwrites the caches, so begin() must follow for each row. Each rank makes the same calls.
    """
    n = max(2, min(n, batch.max_length - max(lengths) - 1))
    times = {k: [] for k in (0, *lengths)}

    def enough():
        spent = [sum(of_length) for of_length in times.values()]
        return len(times[0]) >= 3 and from_rank_0(lambda: sum(spent) > 0.25 * len(spent))
    while len(times[0]) < n_time and not enough():
        for k, of_length in times.items():
            of_length.append(_seconds(lambda k=k: run_round(batch, n, n_row, k, 1 + k // 2)))
    fastest = {k: min(of_length) for k, of_length in times.items()}
    return {k: fastest[k] / fastest[0] for k in lengths}


def _seconds(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
