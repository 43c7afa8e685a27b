"""Scheduler of many sequences over the rows of a batch, with reuse of cached prompt prefixes.

It drives a generate.Batch. No HTTP, no files, no flags: cli/batch.py gives it a list of prompts,
server/ adds requests while it runs.

    scheduler = Scheduler(RowsBatch(model, sampler, steps))
    scheduler.waiting.append(Generation(tokenizer, ids, eos_ids, max_new=100))
    for event in scheduler.run(): print(event.text, end="")
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import tp
from generate import Batch, NotFinite, Sequence, read_late, to_device
from gpt_faster.decoding.request_sampler import GREEDY
from gpt_faster.layers.recurrent import max_rewind
from sampling import SamplingParams
from speculate import SpeculativeBatch

# ---- The device's side --------------------------------------------------------------------------

class RowsBatch(Batch):
    """A Batch that skips idle rows in a decode step on a CPU.

    On a GPU a step is one graph of fixed shape, so it runs all rows.
    """

    def active_rows(self) -> list[int]:
        rows = [row for row, n in enumerate(self.length) if n]
        return rows if rows and self.device.type == "cpu" else super().active_rows()

    def _decode(self) -> Tensor:
        rows = self.active_rows()
        if len(rows) == self.n_row:
            return super()._decode()
        index = to_device(rows, self.device)
        pos = self.pos[index]
        kv_len = self.kv_len(max(self.length) + 1)
        new = self.steps.prefill(self.model, self.token[index], pos, torch.zeros_like(pos), kv_len,
                                 self.sampler, index)
        return self.token.index_copy(0, index, tp.broadcast(new))


class SpeculativeRows(SpeculativeBatch, RowsBatch):
    """A SpeculativeBatch that skips idle rows on a CPU."""


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Length of the common prefix of two lists of ids."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])


def is_fault(error: BaseException) -> bool:
    """Whether an error is the fault of what ran. A Rust library's panic is no Exception; Ctrl-C and
    a generator's end are not faults."""
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


class Logprobs(NamedTuple):
    """Log-probability of one token, and the most likely ids with theirs.

    chosen is None for a prompt's first token, which nothing predicts.
    """

    chosen: float | None
    top: list[tuple[int, float]]


class Worker:
    """The calls that run on the device. Each rank makes the same ones in the same order."""

    def __init__(self, batch: Batch):
        self.batch = batch

    def prefill(self, rows: list[int], prompts: list[list[int]], n_cached: int,
                params: list[SamplingParams] | None) -> Tensor:
        return self.batch.prefill(rows, prompts, n_cached, params)

    def step(self) -> Tensor:
        return self.batch.step()

    def park(self, row: int, n_kept: int, reset: bool) -> None:
        """Take the row out of decode steps, keeping n_kept cached positions.

        For a sequence that ended or waits for its next prefill chunk. reset: clear its sampling
        parameters.
        """
        if reset:
            self.batch.sampler.begin(row, [], GREEDY)
        self.batch.end(row, n_kept)

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Zero the row's KV cache and recurrent states."""
        n_row = self.batch.n_row
        for layer in self.batch.model.layers:
            for t in layer.attn.buffers():
                if t.dim() > 1 and len(t) == n_row and t.is_floating_point():
                    t[row].zero_()

    def logprobs(self, row: int, token_id: int, n_top: int) -> Logprobs:
        """Log-probabilities of the row's last token, before temperature, filters and penalties."""
        logits = self.batch.sampler.processors[0].logits       # LogitsRecorder
        return self._logprobs(logits[row, self.batch.place][None], [token_id], n_top)[0]

    def stop_drafting(self, row: int) -> None:
        """Generate the row's sequence without drafts, one token a step."""
        self.batch.plain_rows.add(row)

    @torch.inference_mode()
    def set_token(self, row: int, token_id: int) -> None:
        """Replace the row's last token."""
        token = self.batch.token.clone()
        token[row] = token_id
        self.batch.token = token

    @torch.inference_mode()
    def prompt_logprobs(self, row: int, ids: list[int], n_top: int) -> list[Logprobs]:
        """Log-probabilities of each prompt token; fills the row's cache with the prompt."""
        model, device = self.batch.model, self.batch.device
        logprobs = [Logprobs(None, [])]
        size = min(128, self.batch.chunk)          # limits the fp32 logits [T, V]
        for start in range(0, len(ids), size):
            chunk = ids[start:start + size]
            pos = torch.arange(start, start + len(chunk), device=device)
            index = None if self.batch.n_row == 1 else torch.tensor([row], device=device)
            tokens = torch.tensor([chunk], device=device)
            logits = model(tokens, pos if index is None else pos[None], len(chunk),
                           start + len(chunk), index)[0]
            targets = ids[start + 1:start + 1 + len(chunk)]
            logprobs += self._logprobs(logits[:len(targets)], targets, n_top)
        return logprobs

    def _logprobs(self, logits: Tensor, token_ids: list[int], n_top: int) -> list[Logprobs]:
        """logits [T, V] and the T tokens that followed them."""
        probs = logits.float().log_softmax(-1)
        index = torch.tensor(token_ids, device=probs.device)[:, None]
        chosen = probs.gather(1, index)[:, 0].tolist()
        values, ids = probs.topk(n_top) if n_top else (probs[:, :0], probs[:, :0].long())
        return [Logprobs(p, list(zip(i, v)))
                for p, i, v in zip(chosen, ids.tolist(), values.tolist())]


# ---- The schedule -------------------------------------------------------------------------------

class Generation(Sequence):
    """One text to generate: prompt, sampling parameters, limits, output so far, progress."""

    def __init__(self, tokenizer, prompt_ids: list[int], eos_ids: set[int] = frozenset(),
                 stops: list[str] = (), max_new: int | None = None,
                 params: SamplingParams | None = None, n_top: int | None = None,
                 score_prompt: bool = False, user_data=None):
        """params: None keeps the batch's own. n_top: return logprobs with this many most likely
        tokens, None for no logprobs. score_prompt: return the prompt's logprobs too. user_data:
        anything of the caller's."""
        super().__init__(tokenizer, prompt_ids, eos_ids, stops, max_new)
        self.params, self.n_top, self.score_prompt = params, n_top, score_prompt
        self.user_data = user_data
        self.start_s = self.first_s = self.last_s = 0.0    # admission, first and last token
        self.prompt_logprobs = []
        self.n_prefilled = 0                       # prompt tokens in the cache
        self.n_reused = 0                          # of these, cached by an earlier sequence
        self.n_sampled = 0                         # tokens sampled since (re)admission
        self.n_replay = 0                          # tokens to repeat after a restart
        self.n_rounds = self.n_accepted = 0        # rounds with drafts, accepted drafts
        self.prefill_alone = False                 # a shared prefill raised
        self.is_suspect = False                    # a shared decode step raised


class Event(NamedTuple):
    """New output of a generation, or the error that ended it.

    text: may be empty while a stop string is possible. thoughts: new text of a model's thoughts.
    logprobs: (id, logprobs) of each new token, if requested.
    """

    generation: Generation
    row: int | None = None
    text: str = ""
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    finish_reason: str | None = None
    error: BaseException | str | None = None
    thoughts: str = ""


class Scheduler:
    """Assigns generations to rows and runs them until all have ended.

    waiting: generations without a row, in order; prefilling, running: row -> generation.

    If a call with one generation raises, that generation fails. If the call had several, the
    culprit is unknown and all restart with empty caches: one at a time after a prefill, by
    bisection after a decode step. A restarted generation replays the tokens it already had, which
    leaves its sampler in the same state.
    """

    def __init__(self, batch: Batch, max_prefill: int | None = None, call: Callable | None = None,
                 reuse: bool = False):
        """max_prefill: prompt tokens per prefill call between two decode steps; None: unlimited,
        and exceptions propagate. call(name, *args): runs Worker's method on all ranks. reuse: keep
        a row's cached prefix where the next prompt begins with it."""
        self.batch, self.max_prefill = batch, max_prefill
        self.worker = Worker(batch)
        self.call = call or (lambda name, *args: getattr(self.worker, name)(*args))
        self.poll = lambda: None                   # called before `waiting` is read
        self.waiting, self.running, self.prefilling = deque(), {}, {}
        self.suspects = deque()                    # groups of generations that must run apart
        self.n_ahead = 0                           # tokens prefilled ahead of the oldest prompt
        self.cached_ids = [[] for _ in range(batch.n_row)]     # by row
        self.n_written = [0] * batch.n_row         # furthest position written, by row: beyond
                                                   # cached_ids where drafts were rejected
        # by row: value of use_count when last assigned, for LRU selection
        self.last_use = [0] * batch.n_row
        self.use_count = 0
        self.reuse = reuse
        self.max_rewind = max_rewind(batch.model)  # computed once: it walks all modules (1 ms)

    def n_reusable(self, row: int, n_same: int) -> int:
        """The number of the row's first n_same cached positions that a new prompt can reuse.

        A ring overwrites keys more than one call behind the furthest position written; a recurrent
        layer keeps the last max_rejected + 1 states (setup_cache).
        """
        model, n_behind = self.batch.model, self.n_written[row] - n_same
        if self.max_rewind is not None:
            is_kept = n_behind <= self.max_rewind + 1
        else:
            is_kept = not model.rings or n_behind <= model.longest_call - 1 - self.batch.n_beyond
        return n_same if is_kept and self.reuse else 0

    def n_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self.suspects))

    def free(self) -> list[int]:
        return [row for row in range(self.batch.n_row)
                if row not in self.running and row not in self.prefilling]

    def admit(self) -> None:
        """Assign waiting generations to free rows: to the row that saves most and loses least.

        A row saves the prefix that can be reused, and loses what else it has cached: less the
        longer ago it was used. So a short prompt does not take a long conversation's row because
        both begin with the same token.
        """
        free, waiting = self.free(), self.waiting
        active = [*self.running.values(), *self.prefilling.values()]
        while self.suspects and not self.suspects[0]:          # all of the group were removed
            self.suspects.popleft()
        if self.suspects and active or any(generation.is_suspect for generation in active):
            return
        if self.suspects:
            waiting = deque(self.suspects.popleft())
        while free and waiting:
            generation = waiting.popleft()
            ids, n_reused = generation.prompt_ids, {}
            for row in free:                       # the last token is always run, for its logits
                n_same = min(common_prefix_length(self.cached_ids[row], ids), len(ids) - 1)
                n_reused[row] = 0 if generation.score_prompt else self.n_reusable(row, n_same)
            latest_first = sorted(free, key=lambda r: -self.last_use[r])
            lost = {r: (len(self.cached_ids[r]) - n_reused[r]) / 2 ** age if self.reuse else 0
                    for age, r in enumerate(latest_first)}
            row = min(reversed(latest_first), key=lambda r: lost[r] - n_reused[r])
            free.remove(row)
            generation.n_prefilled = generation.n_reused = n_reused[row]
            self.cached_ids[row] = self.cached_ids[row][:generation.n_prefilled]
            if not generation.n_prefilled:
                self.n_written[row] = 0
            self.use_count += 1
            self.last_use[row] = self.use_count
            generation.start_s = time.perf_counter()
            self.prefilling[row] = generation

    def drop(self, generation: Generation, keep: bool = True) -> None:
        """Remove a generation, wherever it is, and free its row. keep: its cache is valid."""
        for waiting in (self.waiting, *self.suspects):
            if generation in waiting:
                waiting.remove(generation)
        for active in (self.running, self.prefilling):
            for row in [row for row, other in active.items() if other is generation]:
                del active[row]
                if active is self.running:         # its last token was not run yet
                    generation.n_rounds, generation.n_accepted = self.batch.row_stats[row]
                    ids = generation.ids
                    n_fed = max(0, min(len(ids), generation.n_sampled) - 1)
                    self.cached_ids[row] = generation.prompt_ids + ids[:n_fed]
                    self.n_written[row] = max(self.n_written[row],
                                              len(self.cached_ids[row]) + self.batch.n_beyond)
                if not keep:
                    self.cached_ids[row] = []
                self.call("park", row, len(self.cached_ids[row]), self.max_prefill is not None)

    def run(self) -> Iterator[Event]:
        """An event for each new token. A generation that ended has left its row by then."""
        not_finite = self.batch.sampler.not_finite
        for ids, (active, logprobs, error) in read_late(self._tokens(), not_finite):
            for row, generation in active.items():
                if error:
                    yield self._fail(generation, row, error)
                elif self.running.get(row) is not generation:
                    continue                       # it ended; this token was computed in advance
                elif ids[row] is None:
                    # a masked NaN value would still spread: its weight is 0, and 0 * NaN is NaN
                    self.call("clear", row)
                    not_finite_error = NotFinite(f"row {row}", self.batch.model.dtype)
                    yield self._fail(generation, row, not_finite_error)
                else:
                    yield self._push(generation, row, ids[row], logprobs.get(row))

    def _push(self, generation: Generation, row: int, token_id: int,
              logprobs: Logprobs | None) -> Event:
        generation.last_s = time.perf_counter()
        generation.first_s = generation.first_s or generation.last_s
        try:
            text = generation.push(token_id)
            thoughts = getattr(generation.detokenizer, "take", str)()      # text/reasoning.py
        except BaseException as e:                 # a tokenizer may raise on unusual ids
            if self.max_prefill is None or not is_fault(e):
                raise
            return self._fail(generation, row, e)
        if generation.finish_reason:
            self.drop(generation)
        token_logprobs = ((token_id, logprobs),) if logprobs else ()
        return Event(generation, row, text, token_logprobs, generation.finish_reason,
                     thoughts=thoughts)

    def _fail(self, generation: Generation, row: int, error: BaseException) -> Event:
        self.drop(generation, keep=False)
        return Event(generation, row, error=error)

    def _tokens(self) -> Iterator[tuple]:
        """Each call's tokens, with (row -> generation, row -> logprobs, error)."""
        while True:
            self.poll()
            self.admit()
            if not self.prefilling and not self.running:
                return
            if self.prefilling and not self.batch.has_ready:
                yield from self._guard(self._prefill_some)
                # before stepping, refill rows that ended on their first token
                if self.max_prefill is None:
                    continue
            if self.running:
                yield from self._guard(self._step)

    def _guard(self, run: Callable) -> Iterator[tuple]:
        """Call run(active), which adds the rows it processes to `active`. Handle any exception."""
        active = {}
        try:
            result = run(active)
        except BaseException as e:
            if self.max_prefill is None or not is_fault(e):
                raise
            if len(active) > 1:
                self._restart_apart(active)
                result = self.batch.token, ({}, {}, None)      # delivers a GPU's pending tokens
            else:
                result = self.batch.token, (active, {}, e)
        if result is not None:
            yield result

    def _restart_apart(self, active: dict[int, Generation]) -> None:
        """After a call that raised: restart its generations, separated from each other."""
        stepped = []
        for row, generation in active.items():
            self.cached_ids[row], self.n_written[row] = [], 0
            self.call("park", row, 0, True)
            generation.n_replay = max(generation.n_replay, len(generation.ids))
            generation.n_prefilled = generation.n_reused = generation.n_sampled = 0
            if row in self.running:
                del self.running[row]
                generation.is_suspect = True
                stepped.append(generation)
            else:
                generation.prefill_alone = True
        half = len(stepped) // 2
        self.suspects.extendleft([stepped[half:], stepped[:half]])

    def _prefill_some(self, active: dict[int, Generation]) -> tuple | None:
        """Prefill up to max_prefill prompt tokens; a completed prompt gives its first new token."""
        first = self._next_prompt()
        budget = self.max_prefill or sum(len(g.prompt_ids) for g in self.prefilling.values())
        longest = 0
        by_age = sorted(self.prefilling.items(), key=lambda item: item[1] is not first)
        for row, generation in by_age:             # one call: equal n_prefilled
            n = len(generation.prompt_ids) - generation.n_prefilled
            if (generation.n_prefilled != first.n_prefilled
                    or generation.score_prompt != first.score_prompt):
                continue
            if active and (first.prefill_alone or generation.prefill_alone):
                continue
            padded = max(longest, min(n, budget)) * (len(active) + 1)
            if active and (padded > budget or first.score_prompt):
                continue                           # a shorter one may fit
            longest = max(longest, min(n, budget))
            active[row] = generation
        n_cached = first.n_prefilled
        if first.score_prompt:
            return self._score_prompt(active)
        ends = {row: min(len(generation.prompt_ids), n_cached + budget)
                for row, generation in active.items()}
        complete = {row for row, end in ends.items() if end == len(active[row].prompt_ids)}
        return self._prefill(active, ends, complete, n_cached)

    def _next_prompt(self) -> Generation:
        """The oldest prompt, or shorter ones ahead of it, so that they wait for one chunk of a long
        one, not for all: at most a chunk's work between two of its chunks, so that it goes on."""
        def n_left(generation):
            return len(generation.prompt_ids) - generation.n_prefilled

        oldest = next(iter(self.prefilling.values()))
        shortest = min(self.prefilling.values(), key=n_left)
        if shortest is not oldest and self.max_prefill is not None:
            self.n_ahead += max(n_left(shortest), self.max_prefill // 8)   # a call's least cost
            if self.n_ahead <= self.max_prefill:
                return shortest
        self.n_ahead = 0
        return oldest

    def _prefill(self, active, ends: dict[int, int], complete: set[int], n_cached: int):
        """Prefill positions [n_cached, ends[row]) of each row; complete: rows whose prompt ends."""
        prompts = [generation.prompt_ids[:ends[row]] for row, generation in active.items()]
        params = [each.params if row in complete else GREEDY for row, each in active.items()]
        if all(p is None for p in params):
            params = None                          # keep the batch's own
        token = self.call("prefill", list(active), prompts, n_cached, params)
        for row, prompt in zip(list(active), prompts):
            generation = active[row]
            generation.n_prefilled = len(prompt)
            self.cached_ids[row] = prompt
            self.n_written[row] = max(self.n_written[row], len(prompt) + self.batch.n_beyond)
            if row in complete:
                self.running[row] = self.prefilling.pop(row)
                if generation.n_replay:            # set_token() would follow a round too late
                    self.call("stop_drafting", row)
            else:
                self.call("park", row, len(prompt), True)
                del active[row]
        return self._with_logprobs(token, active) if active else None

    def _score_prompt(self, active: dict[int, Generation]):
        """Score one whole prompt, then run its last token again to sample."""
        [(row, generation)] = active.items()
        ids = generation.prompt_ids
        generation.prompt_logprobs = self.call("prompt_logprobs", row, ids, generation.n_top)
        return self._prefill(active, {row: len(ids)}, {row}, len(ids) - 1)

    def _step(self, active: dict[int, Generation]) -> tuple:
        active.update(self.running)
        token = self.call("step")
        new = {row: active[row] for row in self.batch.new_rows if row in active}
        return self._with_logprobs(token, new)

    def _with_logprobs(self, token: Tensor, active: dict[int, Generation]) -> tuple:
        """A call's tokens as _tokens() yields them, without rows that replay old tokens."""
        new = {}
        for row, generation in active.items():
            if generation.n_sampled < generation.n_replay:
                self.call("set_token", row, generation.ids[generation.n_sampled])
            else:
                new[row] = generation
            generation.n_sampled += 1
        return token, (new, self._logprobs(token, new), None)

    def _logprobs(self, token: Tensor, active: dict[int, Generation]) -> dict[int, Logprobs]:
        """Logprobs of the rows that request them. Waits for the device."""
        return {row: self.worker.logprobs(row, int(token[row]), generation.n_top)
                for row, generation in active.items() if generation.n_top is not None}
