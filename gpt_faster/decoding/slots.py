"""Sequences in the rows of a batch: which is where, what each call of the batch does, what a row's
cache still holds.

It drives a generate.Batch. No HTTP, no files, no flags: cli/batch.py gives it a list, server/ what
comes in while it runs.

    slots = Slots(RowsBatch(model, sampler, steps))
    slots.waiting.append(Generation(tokenizer, ids, eos_ids, max_new=100))
    for event in slots.run(): print(event.text, end="")
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

class Generation(Sequence):
    """One text: its prompt, how it is sampled and where it ends, what has come of it so far, and
    how far it is in the slots."""

    def __init__(self, tokenizer, prompt_ids: list[int], eos_ids: set[int] = frozenset(),
                 stops: list[str] = (), max_new: int | None = None,
                 params: SamplingParams | None = None, n_top: int | None = None,
                 prompt_too: bool = False, about=None):
        """params: None: as the batch's rows are; n_top: of how many likeliest tokens logprobs are
        wanted, None: of none at all; prompt_too: also the prompt's; about: the caller's own."""
        super().__init__(tokenizer, prompt_ids, eos_ids, stops, max_new)
        self.params, self.n_top, self.prompt_too, self.about = params, n_top, prompt_too, about
        self.begun_s = self.first_s = self.last_s = 0.0    # got its slot, first and last token
        self.prompt_logprobs = []
        self.n_done = 0                            # prompt tokens in the cache
        self.n_reused = 0                          # of which it found there
        self.n_drawn = 0                           # tokens of the answer since it began
        self.n_known = 0                           # of which an earlier run gave the same
        self.begins_alone = False                  # a prefill that it shared raised
        self.is_suspect = False                    # a step that it shared raised


class Event(NamedTuple):
    """What a token added to a generation, or several; or what went wrong with it, which ends it.

    text: to show now, perhaps none, as it may begin a stop string; logprobs: of each token, with
    its id, where they are wanted.
    """

    generation: Generation
    slot: int | None = None
    text: str = ""
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    finish_reason: str | None = None
    error: Exception | str | None = None


class Slots:
    """Which generation is in which row. run() goes on for ever where more may come, else until all
    end.

    waiting: those that have no row yet, the next one first; running: slot -> generation.

    A call that raises fails the generation that was in it. If several were, it is not known whose
    fault that is, nor what became of their caches, so they begin anew: after a prefill each in one
    of its own, after a step each half of them with nobody else, until one that fails is alone. They
    are fed the tokens that they had, so that their samplers are where they were.
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
        self.suspects = deque()                    # groups of generations, each to be run by itself
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
        """Give generations that wait a free slot: the one whose cache begins like the prompt."""
        free, waiting = self.free(), self.waiting
        in_use = [*self.running.values(), *self.beginning.values()]
        while self.suspects and not self.suspects[0]:          # all have left
            self.suspects.popleft()
        if self.suspects and in_use or any(generation.is_suspect for generation in in_use):
            return
        if self.suspects:
            waiting = deque(self.suspects.popleft())
        while free and waiting:
            generation = waiting.popleft()
            ids, n_reused = generation.prompt_ids, {}
            for slot in free:                      # the last token is always run: it gives the next
                n_same = min(n_common(self.kept[slot], ids), len(ids) - 1)
                n_reused[slot] = 0 if generation.prompt_too else self.reusable(slot, n_same)
            slot = max(free, key=lambda s: (n_reused[s], -self.used_at[s]))
            free.remove(slot)
            generation.n_done = generation.n_reused = n_reused[slot]
            self.kept[slot] = self.kept[slot][:generation.n_done]
            if not generation.n_done:
                self.n_written[slot] = 0
            self.n_use += 1
            self.used_at[slot] = self.n_use
            generation.begun_s = time.perf_counter()
            self.beginning[slot] = generation

    def drop(self, generation: Generation, keep: bool = True) -> None:
        """It is over, wherever it was; its slot is free. keep: what its cache holds is right."""
        for waiting in (self.waiting, *self.suspects):
            if generation in waiting:
                waiting.remove(generation)
        for slots in (self.running, self.beginning):
            for slot in [slot for slot, other in slots.items() if other is generation]:
                begun = slots is self.running
                del slots[slot]
                if begun:                          # the last token was never fed
                    ids = generation.ids
                    n_fed = max(0, min(len(ids), generation.n_drawn) - 1)
                    self.kept[slot] = generation.prompt_ids + ids[:n_fed]
                    self.n_written[slot] = max(self.n_written[slot],
                                               len(self.kept[slot]) + self.batch.n_beyond)
                if not keep:
                    self.kept[slot] = []
                self.call("park", slot, len(self.kept[slot]), self.between is not None)

    def run(self) -> Iterator[Event]:
        """What each token adds, as it is known. Who ends has left its slot by then."""
        not_finite = self.batch.sampler.not_finite
        for ids, (owners, logprobs, failed) in read_late(self._tokens(), not_finite):
            for slot, generation in owners.items():
                if failed:
                    yield self._failed(generation, slot, failed)
                elif self.running.get(slot) is not generation:
                    continue                       # its row went on meanwhile
                elif ids[slot] is None:
                    # masked positions count 0 times a value, which NaN outlives
                    self.call("clear", slot)
                    error = NotFinite(f"slot {slot}", self.batch.model.dtype)
                    yield self._failed(generation, slot, error)
                else:
                    yield self._taken(generation, slot, ids[slot], logprobs.get(slot))

    def _taken(self, generation: Generation, slot: int, token_id: int,
               logprobs: Logprobs | None) -> Event:
        generation.last_s = time.perf_counter()
        generation.first_s = generation.first_s or generation.last_s
        try:
            text = generation.push(token_id)
        except Exception as e:                     # whatever a tokenizer does with odd ids
            if self.between is None:
                raise
            return self._failed(generation, slot, e)
        if generation.finish_reason:
            self.drop(generation)
        about = ((token_id, logprobs),) if logprobs else ()
        return Event(generation, slot, text, about, generation.finish_reason)

    def _failed(self, generation: Generation, slot: int, error: Exception) -> Event:
        self.drop(generation, keep=False)
        return Event(generation, slot, error=error)

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
        """A call that raises ends the generation that was in it, or begins several anew."""
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

    def _separate(self, owners: dict[int, Generation]) -> None:
        """After a call that raised: they begin anew, and not together."""
        stepped = []
        for slot, generation in owners.items():
            self.kept[slot], self.n_written[slot] = [], 0
            self.call("park", slot, 0, True)
            generation.n_known = max(generation.n_known, len(generation.ids))
            generation.n_done = generation.n_reused = generation.n_drawn = 0
            if slot in self.running:
                del self.running[slot]
                generation.is_suspect = True
                stepped.append(generation)
            else:
                generation.begins_alone = True
        half = len(stepped) // 2
        self.suspects.extendleft([stepped[half:], stepped[:half]])

    def _begin_some(self, owners: dict[int, Generation]) -> tuple | None:
        """Of the prompts, as many tokens as one call may have; those that end give a token."""
        first = next(iter(self.beginning.values()))
        budget = self.between or sum(len(t.prompt_ids) for t in self.beginning.values())
        longest = 0
        for slot, generation in self.beginning.items():  # which have as many tokens in the cache
            n = len(generation.prompt_ids) - generation.n_done
            if generation.n_done != first.n_done or generation.prompt_too != first.prompt_too:
                continue
            if owners and (first.begins_alone or generation.begins_alone):
                continue
            padded = max(longest, min(n, budget)) * (len(owners) + 1)
            if owners and (padded > budget or first.prompt_too):
                continue                           # a shorter one may fit
            longest = max(longest, min(n, budget))
            owners[slot] = generation
        n_cached = first.n_done
        if first.prompt_too:
            return self._score_prompt(owners)
        ends = {slot: min(len(generation.prompt_ids), n_cached + budget)
                for slot, generation in owners.items()}
        whole = {slot for slot, end in ends.items() if end == len(owners[slot].prompt_ids)}
        return self._prefill(owners, ends, whole, n_cached)

    def _prefill(self, owners, ends: dict[int, int], whole: set[int], n_cached: int):
        """From n_cached to its end in each row; whole: whose prompts end there."""
        prompts = [generation.prompt_ids[:ends[slot]] for slot, generation in owners.items()]
        params = [each.params if slot in whole else GREEDY for slot, each in owners.items()]
        if all(p is None for p in params):
            params = None                          # as the batch's rows are
        token = self.call("prefill", list(owners), prompts, n_cached, params)
        for slot, prompt in zip(list(owners), prompts):
            generation = owners[slot]
            generation.n_done = len(prompt)
            self.kept[slot] = prompt
            self.n_written[slot] = max(self.n_written[slot], len(prompt) + self.batch.n_beyond)
            if slot in whole:
                self.running[slot] = self.beginning.pop(slot)
            else:
                self.call("park", slot, len(prompt), True)
                del owners[slot]
        return self._drawn(token, owners) if owners else None

    def _score_prompt(self, owners: dict[int, Generation]):
        """One prompt whose own logprobs are wanted, whole; then its last token once more."""
        [(slot, generation)] = owners.items()
        ids = generation.prompt_ids
        generation.prompt_logprobs = self.call("prompt_logprobs", slot, ids, generation.n_top)
        return self._prefill(owners, {slot: len(ids)}, {slot}, len(ids) - 1)

    def _step(self, owners: dict[int, Generation]) -> tuple:
        owners.update(self.running)
        token = self.call("step")
        return self._drawn(token, owners)

    def _drawn(self, token: Tensor, owners: dict[int, Generation]) -> tuple:
        """A call's tokens, whose they are, and their logprobs; without those that are known."""
        new = {}
        for slot, generation in owners.items():
            if generation.n_drawn < generation.n_known:
                self.call("set_token", slot, generation.ids[generation.n_drawn])
            else:
                new[slot] = generation
            generation.n_drawn += 1
        return token, (new, self._logprobs(token, new), None)

    def _logprobs(self, token: Tensor, owners: dict[int, Generation]) -> dict[int, Logprobs]:
        """Of those that want them: this reads the device."""
        return {slot: self.worker.logprobs(slot, int(token[slot]), generation.n_top)
                for slot, generation in owners.items() if generation.n_top is not None}
