"""How many tokens to draft: as many as pay, by what a round costs here and how many are right.

    batch = SpeculativeBatch(model, sampler, steps, drafter, DraftLengthController([5, 1]), 5)
"""

import statistics
import time
from collections.abc import Callable

import torch


class FixedLength:
    """Always k drafts."""

    paused = False

    def __init__(self, k: int):
        self.k = k
        self.lengths = [k]                         # that may come

    def begin(self) -> None:
        pass

    def next(self) -> int:
        return self.k

    def learn(self, n_accepted: int) -> None:
        pass


class DraftLengthController:
    """As many drafts as allowed while a round gives more tokens than plain steps would in its time,
    else fewer; where the fewest do not pay either, none for a while, each time for twice as long:
    so bad drafts cost little."""

    def __init__(self, lengths: list[int], costs: dict[int, float] | None = None):
        """lengths: how many may be drafted, most first; costs: what such a round takes, in plain
        steps: lengths that cannot pay are dropped. None: 2, and none is dropped."""
        self.lengths, self.costs = lengths, dict.fromkeys(lengths, 2.0)
        if costs is not None:
            self.lengths, self.costs = [k for k in lengths if costs[k] < k + 1], costs
        self.begin()

    def begin(self) -> None:
        """Another text: what was learned of the last one does not count."""
        self.level, self.wait, self.pause = 0, 0, 1

    @property
    def paused(self) -> bool:
        """Will next() be 0 after the coming round?"""
        return not self.lengths or self.wait >= 2

    def next(self) -> int:
        self.wait = max(0, self.wait - 1)
        return 0 if self.wait or not self.lengths else self.lengths[self.level]

    def learn(self, n_accepted: int) -> None:
        """n_accepted of the last drafts were right."""
        if n_accepted + 1 >= self.costs[self.lengths[self.level]]:
            self.level = max(0, self.level - 1)
            self.pause = 1
        elif self.level < len(self.lengths) - 1:
            self.level += 1
        else:
            self.pause = min(2 * self.pause, 64)
            self.wait = self.pause


@torch.inference_mode()
def draft_costs(batch, kv_len: int, lengths: list[int], n: int = 10) -> dict[int, float]:
    """What a round of each draft length takes, in plain steps: the medians of n - 1 runs.

    Overwrites the beginning of the caches.
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
        chance = torch.rand(k, device=token.device)
        args = token, token.repeat(1, k), probs, ids, pos, kv_len, chance, sampler

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
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)
