"""Sequences in the rows of a batch: which is where, what each call of the batch does, what a row's
cache still holds.

It drives a generate.Batch. No HTTP, no files, no flags: cli/batch.py gives it a list, server/ what
comes in while it runs.

    slots = Slots(RowsBatch(model, sampler, steps)); slots.waiting.append(Task(sequence, params))
    for task, slot, token_id, about in slots.run(): task.sequence.push(token_id)
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

import tp
from generate import Batch, NotFinite, Sequence, read_late, to_device
from gpt_faster.decoding.request_sampler import GREEDY
from gpt_faster.layers.recurrent import max_rewind
from sampling import SamplingParams

# ---- The device's side --------------------------------------------------------------------------

class RowsBatch(Batch):
    """A Batch whose steps run the rows in use only, where a step may have any shape: on a CPU.

    On a GPU a step is one graph, of all rows.
    """

    @torch.inference_mode()
    def step(self) -> Tensor:
        rows = [row for row, n in enumerate(self.length) if n]
        if self.device.type != "cpu" or not 0 < len(rows) < self.n_row:
            return super().step()
        self.sampler.observe(self.token)
        index = to_device(rows, self.device)
        pos = self.pos[index]
        kv_len = self.kv_len(max(self.length) + 1)
        new = self.steps.prefill(self.model, self.token[index], pos, torch.zeros_like(pos), kv_len,
                                 self.sampler, index)
        self.token = self.token.index_copy(0, index, tp.broadcast(new))
        self.advance(1)
        return self.token


def n_common(a: list[int], b: list[int]) -> int:
    """How many ids two lists begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])


class Logprobs(NamedTuple):
    """Of one token: its own, and the likeliest ids with theirs. None: nothing came before it."""

    own: float | None
    top: list[tuple[int, float]]


class Worker:
    """What is done on the device: each rank makes these calls, in the same order."""

    def __init__(self, batch: Batch):
        self.batch = batch

    def prefill(self, rows: list[int], prompts: list[list[int]], n_cached: int,
                params: list[SamplingParams] | None) -> Tensor:
        return self.batch.prefill(rows, prompts, n_cached, params)

    def step(self) -> Tensor:
        return self.batch.step()

    def park(self, row: int, n_kept: int, reset: bool) -> None:
        """Its sequence is over, or waits for its next chunk; reset: it asks for nothing now."""
        if reset:
            self.batch.sampler.begin(row, [], GREEDY)
        self.batch.end(row, n_kept)

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Zeros in the row's cache and states."""
        n_row = self.batch.n_row
        for layer in self.batch.model.layers:
            for t in layer.attn.buffers():
                if t.dim() > 1 and len(t) == n_row and t.is_floating_point():
                    t[row].zero_()

    def logprobs(self, row: int, token_id: int, n_top: int) -> Logprobs:
        """Of the token that the last call gave this row: the model's own, before any parameter."""
        logits = self.batch.sampler.processors[0].logits       # KeptLogits
        return self._logprobs(logits[row:row + 1], [token_id], n_top)[0]

    @torch.inference_mode()
    def set_token(self, row: int, token_id: int) -> None:
        """As if the last call had given this row this token."""
        token = self.batch.token.clone()
        token[row] = token_id
        self.batch.token = token

    @torch.inference_mode()
    def prompt_logprobs(self, row: int, ids: list[int], n_top: int) -> list[Logprobs]:
        """Of each token of a prompt, which the row's cache then holds."""
        model, device = self.batch.model, self.batch.device
        found = [Logprobs(None, [])]
        chunk = min(128, self.batch.chunk)         # [T, V] in fp32
        for at in range(0, len(ids), chunk):
            piece = ids[at:at + chunk]
            pos = torch.arange(at, at + len(piece), device=device)
            index = None if self.batch.n_row == 1 else torch.tensor([row], device=device)
            tokens = torch.tensor([piece], device=device)
            logits = model(tokens, pos if index is None else pos[None], len(piece),
                           at + len(piece), index)[0]
            following = ids[at + 1:at + 1 + len(piece)]
            found += self._logprobs(logits[:len(following)], following, n_top)
        return found

    def _logprobs(self, logits: Tensor, token_ids: list[int], n_top: int) -> list[Logprobs]:
        """logits [T, V], and the T tokens that followed."""
        probs = logits.float().log_softmax(-1)
        own = probs.gather(1, torch.tensor(token_ids, device=probs.device)[:, None])[:, 0].tolist()
        values, ids = probs.topk(n_top) if n_top else (probs[:, :0], probs[:, :0].long())
        return [Logprobs(p, list(zip(i, v)))
                for p, i, v in zip(own, ids.tolist(), values.tolist())]


# ---- The plan -----------------------------------------------------------------------------------

@dataclass(eq=False)
class Task:
    """A sequence, and how it is run. n_top: of how many likeliest tokens logprobs are wanted, None:
    of none at all; prompt_too: also the prompt's."""

    sequence: Sequence
    params: SamplingParams | None = None
    n_top: int | None = None
    prompt_too: bool = False
    begun_s: float = 0.0                           # when it got its slot
    n_done: int = 0                                # prompt tokens in the cache
    n_reused: int = 0                              # of which it found there
    n_drawn: int = 0                               # tokens of the answer since it began
    n_known: int = 0                               # of which an earlier run gave the same
    begins_alone: bool = False                     # a prefill that it shared raised
    is_suspect: bool = False                       # a step that it shared raised
    failed: bool = False                           # its logits were no numbers
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


class Event(NamedTuple):
    """A task's next token, and its logprobs if it wanted some; or what went wrong with it."""

    task: Task
    slot: int
    token_id: int | None
    logprobs: Logprobs | None = None
    error: Exception | None = None


class Slots:
    """Which task is in which row. run() goes on for ever where more may come, else until all end.

    waiting: the tasks that have no row yet, the next one first; running: slot -> task.

    A call that raises fails the task that was in it. If several were, it is not known whose fault
    that is, nor what became of their caches, so they begin anew: after a prefill each in one of its
    own, after a step each half of them with nobody else, until a task that fails is alone. They are
    fed the tokens that they had, so that their samplers are where they were.
    """

    def __init__(self, batch: Batch, between: int | None = None, call: Callable | None = None,
                 reuse: bool = False):
        """between: at most so many prompt tokens between two steps of those that run; None: all.

        call(name, *args) does what Worker's method of this name does, on all ranks; reuse: go on
        from what a row's cache still holds, where a prompt begins like it.
        """
        self.batch, self.between = batch, between
        self.worker = Worker(batch)
        self.call = call or (lambda name, *args: getattr(self.worker, name)(*args))
        self.arrivals = lambda: None               # called before each look at who waits
        self.waiting, self.running, self.beginning = deque(), {}, {}
        self.suspects = deque()                    # groups of tasks, each to be run by itself
        self.kept = [[] for _ in range(batch.n_row)]           # ids that each row's cache holds
        self.n_written = [0] * batch.n_row         # positions that a ring may have given away
        self.used_at = [0] * batch.n_row           # by a count of uses: the oldest goes first
        self.n_use = 0
        self.reuse = reuse
        self.max_rewind = max_rewind(batch.model)  # walks all modules: a millisecond

    def reusable(self, slot: int, n_same: int) -> int:
        """How much of a row's first n_same positions the model can go on from.

        A ring has given away what is more than a call behind the furthest position written, a state
        what is behind those that setup_cache(max_rejected=…) keeps.
        """
        model, n_behind = self.batch.model, self.n_written[slot] - n_same
        if self.max_rewind is not None:
            reaches = n_behind <= self.max_rewind + 1
        else:
            reaches = not model.rings or n_behind <= model.longest_call - 1 - self.batch.n_beyond
        return n_same if reaches and self.reuse else 0

    def n_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self.suspects))

    def free(self) -> list[int]:
        return [slot for slot in range(self.batch.n_row)
                if slot not in self.running and slot not in self.beginning]

    def admit(self) -> None:
        """Give tasks that wait a free slot: the one whose cache begins like the prompt."""
        free, waiting = self.free(), self.waiting
        in_use = [*self.running.values(), *self.beginning.values()]
        while self.suspects and not self.suspects[0]:          # all have left
            self.suspects.popleft()
        if self.suspects and in_use or any(task.is_suspect for task in in_use):
            return
        if self.suspects:
            waiting = deque(self.suspects.popleft())
        while free and waiting:
            task = waiting.popleft()
            ids, n_reused = task.sequence.prompt_ids, {}
            for slot in free:                      # the last token is always run: it gives the next
                n_same = min(n_common(self.kept[slot], ids), len(ids) - 1)
                n_reused[slot] = 0 if task.prompt_too else self.reusable(slot, n_same)
            slot = max(free, key=lambda s: (n_reused[s], -self.used_at[s]))
            free.remove(slot)
            task.n_done = task.n_reused = n_reused[slot]
            self.kept[slot] = self.kept[slot][:task.n_done]
            if not task.n_done:
                self.n_written[slot] = 0
            self.n_use += 1
            self.used_at[slot] = self.n_use
            task.begun_s = time.perf_counter()
            self.beginning[slot] = task

    def drop(self, task: Task, keep: bool = True) -> None:
        """It is over, wherever it was; its slot is free. keep: what its cache holds is right."""
        keep = keep and not task.failed
        for waiting in (self.waiting, *self.suspects):
            if task in waiting:
                waiting.remove(task)
        for slots in (self.running, self.beginning):
            for slot in [slot for slot, other in slots.items() if other is task]:
                begun = slots is self.running
                del slots[slot]
                if begun:                          # the last token was never fed
                    ids = task.sequence.ids
                    n_fed = max(0, min(len(ids), task.n_drawn) - 1)
                    self.kept[slot] = task.sequence.prompt_ids + ids[:n_fed]
                    self.n_written[slot] = max(self.n_written[slot],
                                               len(self.kept[slot]) + self.batch.n_beyond)
                if not keep:
                    self.kept[slot] = []
                self.call("park", slot, len(self.kept[slot]), self.between is not None)

    def run(self) -> Iterator[Event]:
        """Each token as it is known, of tasks that have not ended. The caller pushes it, and drops
        the task that it ends."""
        not_finite = self.batch.sampler.not_finite
        for ids, (owners, logprobs, failed) in read_late(self._tokens(), not_finite):
            for slot, task in owners.items():
                if failed:
                    yield Event(task, slot, None, error=failed)
                elif ids[slot] is None:
                    if self.running.get(slot) is task:
                        yield self._not_finite(task, slot)
                elif self.running.get(slot) is task:           # else its row went on meanwhile
                    yield Event(task, slot, ids[slot], logprobs.get(slot))

    def _not_finite(self, task: Task, slot: int) -> Event:
        """Its row's cache is cleared: masked positions count 0 times a value, which NaN outlives.
        """
        task.failed = True
        self.call("clear", slot)
        return Event(task, slot, None, error=NotFinite(f"slot {slot}", self.batch.model.dtype))

    def _tokens(self) -> Iterator[tuple]:
        """Each call's tokens, whose they are, and their logprobs."""
        while True:
            self.arrivals()
            self.admit()
            if not self.beginning and not self.running:
                return
            if self.beginning:
                yield from self._guarded(self._begin_some)
                if self.between is None:           # who ended at once makes room before a step
                    continue
            if self.running:
                yield from self._guarded(self._step)

    def _guarded(self, run: Callable) -> Iterator[tuple]:
        """A call that raises ends the task that was in it, or begins several anew."""
        owners = {}
        try:
            result = run(owners)
        except Exception as e:
            if self.between is None:
                raise
            if len(owners) > 1:
                self._separate(owners)
                result = self.batch.token, ({}, {}, None)      # a GPU's last tokens come before
            else:
                result = self.batch.token, (owners, {}, e)
        if result is not None:
            yield result

    def _separate(self, owners: dict[int, Task]) -> None:
        """After a call that raised: they begin anew, and not together."""
        stepped = []
        for slot, task in owners.items():
            self.kept[slot], self.n_written[slot] = [], 0
            self.call("park", slot, 0, True)
            task.n_known = max(task.n_known, len(task.sequence.ids))
            task.n_done = task.n_reused = task.n_drawn = 0
            if slot in self.running:
                del self.running[slot]
                task.is_suspect = True
                stepped.append(task)
            else:
                task.begins_alone = True
        half = len(stepped) // 2
        self.suspects.extendleft([stepped[half:], stepped[:half]])

    def _begin_some(self, owners: dict[int, Task]) -> tuple | None:
        """Of the prompts, as many tokens as one call may have; those that end give a token."""
        first = next(iter(self.beginning.values()))
        budget = self.between or sum(len(t.sequence.prompt_ids) for t in self.beginning.values())
        longest = 0
        for slot, task in self.beginning.items():  # which have as many tokens in the cache
            n = len(task.sequence.prompt_ids) - task.n_done
            if task.n_done != first.n_done or task.prompt_too != first.prompt_too:
                continue
            if owners and (first.begins_alone or task.begins_alone):
                continue
            padded = max(longest, min(n, budget)) * (len(owners) + 1)
            if owners and (padded > budget or first.prompt_too):
                continue                           # a shorter one may fit
            longest = max(longest, min(n, budget))
            owners[slot] = task
        n_cached = first.n_done
        if first.prompt_too:
            return self._score_prompt(owners)
        ends = {slot: min(len(task.sequence.prompt_ids), n_cached + budget)
                for slot, task in owners.items()}
        whole = {slot for slot, end in ends.items() if end == len(owners[slot].sequence.prompt_ids)}
        return self._prefill(owners, ends, whole, n_cached)

    def _prefill(self, owners, ends: dict[int, int], whole: set[int], n_cached: int):
        """From n_cached to its end in each row; whole: whose prompts end there."""
        prompts = [task.sequence.prompt_ids[:ends[slot]] for slot, task in owners.items()]
        params = [task.params if slot in whole else GREEDY for slot, task in owners.items()]
        if all(p is None for p in params):
            params = None                          # as the batch's rows are
        token = self.call("prefill", list(owners), prompts, n_cached, params)
        for slot, prompt in zip(list(owners), prompts):
            task = owners[slot]
            task.n_done = len(prompt)
            self.kept[slot] = prompt
            self.n_written[slot] = max(self.n_written[slot], len(prompt) + self.batch.n_beyond)
            if slot in whole:
                self.running[slot] = self.beginning.pop(slot)
            else:
                self.call("park", slot, len(prompt), True)
                del owners[slot]
        return self._drawn(token, owners) if owners else None

    def _score_prompt(self, owners: dict[int, Task]):
        """One prompt whose own logprobs are wanted, whole; then its last token once more."""
        [(slot, task)] = owners.items()
        ids = task.sequence.prompt_ids
        task.prompt_logprobs = self.call("prompt_logprobs", slot, ids, task.n_top)
        return self._prefill(owners, {slot: len(ids)}, {slot}, len(ids) - 1)

    def _step(self, owners: dict[int, Task]) -> tuple:
        owners.update(self.running)
        token = self.call("step")
        return self._drawn(token, owners)

    def _drawn(self, token: Tensor, owners: dict[int, Task]) -> tuple:
        """A call's tokens, whose they are, and their logprobs; without those that are known."""
        new = {}
        for slot, task in owners.items():
            if task.n_drawn < task.n_known:
                self.call("set_token", slot, task.sequence.ids[task.n_drawn])
            else:
                new[slot] = task
            task.n_drawn += 1
        return token, (new, self._logprobs(token, new), None)

    def _logprobs(self, token: Tensor, owners: dict[int, Task]) -> dict[int, Logprobs]:
        """Of those that want them: this reads the device."""
        return {slot: self.worker.logprobs(slot, int(token[slot]), task.n_top)
                for slot, task in owners.items() if task.n_top is not None}
