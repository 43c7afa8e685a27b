"""Speculative decoding (arXiv 2211.17192): draft some tokens cheaply, verify them all in one call.

The output equals plain decoding: the same tokens if greedy, else draws from the same distribution.
SpeculativeBatch is a generate.Batch whose rows accept different numbers of drafts. It takes a
drafter (here a draft model; n-gram lookup is in decoding/ngram.py) and a policy for the draft
length (here fixed; adaptive in decoding/draft_length.py).

    batch = SpeculativeBatch(model, sampler, steps, ModelDrafter(draft), FixedLength(5), 5)
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tp
from generate import Batch, CompiledStep, Steps, bucket, to_device
from sampling import Sampler, draw

# ---- Verification -------------------------------------------------------------------------------

def token_probs(dist: tuple, tokens: Tensor | None, n_vocab: int) -> Tensor:
    """The probabilities [b, T, m] of tokens [b, T, m] under dist: probs [b, T, C] and token ids
    [b, T, C].

    ids None: probs cover the whole vocabulary. tokens None: return the whole vocabulary, [b, T, V].
    """
    probs, ids = dist
    if ids is None and tokens is None:
        return probs
    if ids is None:
        return probs.gather(-1, tokens)
    if tokens is not None and ids.shape[-1] * tokens.shape[-1] <= n_vocab:
        same = ids[..., None, :] == tokens[..., None]                      # [b, T, m, C]
        return (probs[..., None, :] * same).sum(-1)
    dense = probs.new_zeros(*probs.shape[:-1], n_vocab).scatter(-1, ids, probs)
    return token_probs((dense, None), tokens, n_vocab)


def accept(target: tuple, draft: tuple, draft_tokens: Tensor, drafted: Tensor, chance: Tensor,
           noise: Callable, n_vocab: int) -> tuple[Tensor, Tensor]:
    """draft_tokens [b, k] -> tokens [b, k + 1] and n [b]: a row's first n + 1 tokens are valid.

    target: the model's distributions p at k + 1 positions, probs and ids [b, k + 1, C]; draft: the
    distributions q that the drafts were drawn from, [b, k, C]. Draft x is accepted with probability
    min(1, p(x) / q(x)), decided by chance [b, k], uniform in [0, 1). The first draft that a row
    rejects is replaced by a draw from max(0, p - q) with noise(ids), see Sampler.noise(). drafted
    [b, 1]: False in a row without drafts, whose one token is drawn from p.
    """
    p, ids = target                                                        # [b, k + 1, C]
    b, n_place = p.shape[:2]
    x = draft_tokens[..., None]                                            # [b, k, 1]
    at_drafts = p[:, :-1], None if ids is None else ids[:, :-1]
    p_draft = token_probs(at_drafts, x, n_vocab)[..., 0]
    q_draft = token_probs(draft, x, n_vocab)[..., 0]
    accepted = (p_draft > chance * q_draft) & drafted                      # [b, k]
    n = accepted.int().cumprod(1).sum(1)
    rest = (p[:, :-1] - token_probs(draft, at_drafts[1], n_vocab)).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:, :-1])    # p = q up to rounding
    rest = torch.where(drafted[..., None], rest, p[:, :-1])
    rest = torch.cat((rest, p[:, -1:]), dim=1)
    row = torch.arange(b, device=p.device)
    own_ids = None if ids is None else ids[row, n]
    own = draw(rest[row, n], own_ids, noise(own_ids))                      # [b, 1]
    place = torch.arange(n_place, device=p.device)
    return torch.where(place == n[:, None], own, F.pad(draft_tokens, (0, 1))), n


def verify(model, token, drafts, probs, ids, pos, drafted, kv_len, sampler,
           batch_idx=None) -> tuple:
    """Run each row's token [b, 1] at pos [1] or [b, 1] and the drafts [b, k] that follow it ->
    accept()'s result.

    drafted [b, 1]: False in rows that take one token, as in a plain step: their drafts are ignored.
    batch_idx [b]: these rows' numbers in the batch; None: all.
    """
    b, n = drafts.shape[0], drafts.shape[1] + 1
    tokens = torch.cat((token, torch.where(drafted, drafts, token)), dim=1)
    place = torch.arange(n, device=pos.device)
    places = pos + place                                                   # [n] or [b, n]
    # without drafts the rest is padding, at the row's next position
    last = pos + torch.where(drafted, n - 1, 1).view_as(pos)
    places = places.minimum(last.clamp(max=model.max_seq_length - 1))
    logits = model(tokens, places, n, kv_len, batch_idx)                   # [b, n, V]
    rows = torch.arange(b, device=pos.device) if batch_idx is None else batch_idx
    each = rows.repeat_interleave(n)                                       # [b n]
    target = sampler.distribution(sampler.processed(logits.flatten(0, 1), each, drafts), each)
    target = [t if t is None else t.unflatten(0, (b, n)) for t in target]
    chance = sampler.chance(rows, places[..., :-1])
    accepted, count = accept(target, (probs, ids), drafts, drafted, chance,
                             partial(sampler.noise, rows, pos), sampler.n_vocab)
    best = logits.amax(-1)                         # for Sampler.note(): valid positions only
    sampler.note(torch.where(place <= count[:, None], best - best, 0), rows)
    return accepted, count


# ---- Drafters -----------------------------------------------------------------------------------

class Rows(NamedTuple):
    """The b rows of a batch that take part in a round, each at its own position.

    On a CPU these are the rows in use. On a GPU shapes are fixed: all rows take part, and an idle
    one has a position too, where it may be written.
    """

    index: list[int]                               # their numbers in the batch
    batch_idx: Tensor | None                       # the same on the device [b]; None: all rows
    history: Tensor                                # [b, S] the tokens so far; past them: stale ids
    token: Tensor                                  # [b, 1] the last one, which the model's cache
                                                   # does not have yet
    pos: Tensor                                    # [b, 1] its position; [1] if the batch has 1 row
    lengths: list[int]                             # pos + 1: how many tokens are known
    drafting: list[bool]                           # False: the row's drafts will be ignored


class Drafter:
    """The interface of what drafts tokens for the rows of a batch.

    A round calls propose(), then accepted() for each row. The rows' numbers are those of the batch;
    a drafter with a state of its own keeps it by row. No method but find() may leave something for
    the host to read: a round reads the device once.
    """

    varies = True                                  # propose()'s shapes: by how many tokens the last
                                                   # round added

    def setup(self, n_row: int, max_length: int, longest_call: int) -> None:
        """Called once, when the batch is made: allocate what n_row rows of max_length need."""

    def begin(self, row: int, n_same: int) -> None:
        """A new sequence begins in this row. Its first n_same tokens are those of the last one."""

    def can_draft(self, row: int) -> bool:
        """Whether there is something to propose for this row now."""
        return True

    def propose(self, rows: Rows, k: int, sampler: Sampler) -> tuple:
        """Draft k tokens for each row -> tokens [b, k], and the distributions that they were drawn
        from: probs [b, k, C] of the token ids [b, k, C] (None: C is the vocabulary).

        Rows that are not drafting need any ids in range, and must not lose what they have cached.
        """
        raise NotImplementedError

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        """n [b] of each row's history [b, S] are known -> integers [b] on the device that the host
        reads together with the numbers of accepted drafts; None: nothing."""

    def accepted(self, row: int, n: int, found: int | None) -> None:
        """The first n tokens of this row are final; drafts past them were rejected. found: of
        find()."""

    def resume(self, row: int, n: int, n_new: int, k: int) -> None:
        """Assume that the row has n tokens, and that the last round had k drafts and added n_new
        tokens, whatever the caches hold. To measure a round's time, and to warm up."""


def missing(rows: Rows, n_cached: list[int], n_last: int, most: int,
            longest_call: int) -> Iterator[tuple]:
    """The positions that a drafter has to compute for drafting rows which lack more than `most` of
    those before their last n_last tokens, in calls of up to longest_call tokens.

    Yields: which of the round's rows [b], their numbers in the batch [b], pos [b, T] (a shorter row
    has padding at its next position), and the kv_len that covers all calls. Then n_cached, by row
    of the batch, counts them.
    """
    ends = {i: n - n_last for i, n in enumerate(rows.lengths) if rows.drafting[i]}
    ends = {i: end for i, end in ends.items() if end - n_cached[rows.index[i]] > most}
    if not ends:
        return
    numbers, device = [rows.index[i] for i in ends], rows.pos.device
    starts = [n_cached[row] for row in numbers]
    which, batch_idx = to_device(list(ends), device), to_device(numbers, device)
    first, end = (to_device(n, device)[:, None] for n in (starts, list(ends.values())))
    n_longest = max(b - a for a, b in zip(starts, ends.values()))
    size = max(1, longest_call // len(ends))       # tokens of each row in a call
    for at in range(0, n_longest, size):
        place = torch.arange(at, min(at + size, n_longest), device=device)
        yield which, batch_idx, (first + place).minimum(end), max(ends.values()) + 1
    for row, end in zip(numbers, ends.values()):
        n_cached[row] = end


def draft_one_token(model, tokens, pos, last, kv_len, drafts, sampler, n_vocab,
                    batch_idx=None) -> tuple:
    """Run tokens [b, T] at pos [T] or [b, T], and draft one more after the one at index `last`
    [b, 1] -> the draft [b, 1] and the distribution it was sampled from.

    drafts: see draw_draft().
    """
    logits = model(tokens, pos, last, kv_len, batch_idx)[:, -1, :n_vocab]
    logits = F.pad(logits, (0, n_vocab - logits.shape[-1]), value=-torch.inf)
    at = pos.expand(len(tokens), -1).gather(1, last)
    return draw_draft(logits, at, drafts, sampler, batch_idx)


def draw_draft(logits: Tensor, pos: Tensor, drafts: Tensor, sampler: Sampler,
               batch_idx: Tensor | None = None) -> tuple:
    """Sample a draft [b, 1] from logits [b, V] at pos [1] or [b, 1], after drafts [b, k]; return it
    with its distribution, probs [b, C] and ids."""
    rows = slice(None) if batch_idx is None else batch_idx
    probs, ids = sampler.distribution(sampler.processed(logits, rows, drafts), rows)
    return draw(probs, ids, sampler.noise(rows, pos, ids, draft=True)), probs, ids


def joined(dists: list[tuple], n_vocab: int) -> tuple[Tensor, Tensor | None]:
    """Stack the distributions of k drafts, probs and ids [b, C], to [b, k, C]; over the whole
    vocabulary if they differ."""
    probs, ids = zip(*dists)
    if len({p.shape for p in probs}) > 1:          # some are shortlists
        dense = [token_probs(dist, None, n_vocab) for dist in dists]
        return torch.stack(dense, dim=1), None
    return torch.stack(probs, dim=1), None if ids[0] is None else torch.stack(ids, dim=1)


class ModelDrafter(Drafter):
    """Drafts with a smaller model. It has its own KV cache and first reads the tokens it lacks."""

    min_kv_len = 256
    is_recurrent = False                           # its cache keeps states of the last tokens only

    def __init__(self, model, step: Callable = draft_one_token, max_rejected: int = 16):
        """step: draft_one_token, compiled or not. max_rejected: how many cached tokens of the draft
        model may be discarded, by a verification or a new prompt."""
        self.model, self.step, self.max_rejected = model, step, max_rejected

    def setup(self, n_row: int, max_length: int, longest_call: int) -> None:
        model = self.model
        if (model.max_batch_size, model.max_seq_length) != (n_row, max_length):
            model.setup_cache(n_row, max_length, longest_call, None, self.max_rejected)
        self.n_cached = [0] * n_row                # tokens of each row in its cache

    def begin(self, row: int, n_same: int) -> None:
        self.n_cached[row] = min(self.n_cached[row], n_same)

    def propose(self, rows: Rows, k: int, sampler: Sampler) -> tuple:
        model, n_vocab, end = self.model, sampler.n_vocab, self.model.max_seq_length - 1
        history = rows.history.clamp(max=model.cfg.vocab_size - 1)         # it may have fewer ids
        self._catch_up(rows, history)
        n_back = [max(0, n - 1 - self.n_cached[row]) if is_drafting else 0
                  for row, n, is_drafting in zip(rows.index, rows.lengths, rows.drafting)]
        # after a full acceptance a row lacks two tokens; then the others get one of padding
        n_new = 1 + max(n_back)
        back = to_device(n_back, history.device)[:, None]                  # [b, 1]
        place = torch.arange(n_new, device=history.device)
        pos = (rows.pos - back.view_as(rows.pos) + place).clamp(max=end)
        tokens = history.gather(1, pos.expand(len(history), -1))
        drafts, dists, last = rows.token.repeat(1, k), [], back            # filled from the left
        for i in range(k):
            kv_len = bucket(max(rows.lengths) + i + n_new - 1, end + 1, self.min_kv_len)
            args = tokens, pos, last, kv_len, drafts, sampler, n_vocab, rows.batch_idx
            token, *dist = self.step(model, *args)
            drafts[:, i] = tp.broadcast(token)[:, 0]
            dists.append(dist)
            tokens = drafts[:, i:i + 1].clamp(max=model.cfg.vocab_size - 1)
            pos, last, n_new = (rows.pos + i + 1).clamp(max=end), torch.zeros_like(back), 1
        for row, n, is_drafting in zip(rows.index, rows.lengths, rows.drafting):
            if is_drafting:
                self.n_cached[row] = n + k - 1     # all but the last draft
            elif self.n_cached[row] >= n - 1 or not self.is_recurrent:
                self.n_cached[row] = min(self.n_cached[row], n - 1)
            else:
                self.n_cached[row] = 0             # these steps overwrote the states it had
        return drafts, *joined(dists, n_vocab)

    def _catch_up(self, rows: Rows, history: Tensor) -> None:
        """Prefill all but the last token of rows that lack more than two."""
        model = self.model
        for which, batch_idx, pos, kv_len in missing(rows, self.n_cached, 1, 1, model.longest_call):
            tokens = history[which].gather(1, pos)
            if model.max_batch_size == 1:
                model(tokens, pos[0], 1, kv_len)
            else:
                model(tokens, pos, 1, kv_len, batch_idx)

    def accepted(self, row: int, n: int, found: int | None) -> None:
        self.n_cached[row] = min(self.n_cached[row], n)

    def resume(self, row: int, n: int, n_new: int, k: int) -> None:
        self.n_cached[row] = max(0, n - 2 if n_new > k else n - 1)


class FixedLength:
    """The policy of always k drafts."""

    paused = False                                 # whether next() will return 0 after this round

    def __init__(self, k: int):
        self.k = k
        self.lengths = [k]                         # all possible draft lengths

    def begin(self, row: int) -> None:
        """A new text begins in this row."""

    def end(self, row: int) -> None:
        """The row's text has ended."""

    def next(self, drafting: list[int], n_row: int) -> int:
        """The number of drafts of the coming round, for the rows in `drafting`; n_row rows take
        part."""
        return self.k

    def learn(self, n_accepted: dict[int, int]) -> None:
        """row -> the number of its drafts that were accepted."""


# ---- The batch ----------------------------------------------------------------------------------

class Ready(NamedTuple):
    """The tokens of one place of a round, on the device."""

    rows: list[int]                                # rows that have one
    token: Tensor                                  # [B, 1]; -1 in the other rows
    place: int                                     # 0: the first of the round


class SpeculativeBatch(Batch):
    """Sequences generated in rounds of drafting and verification, each at its own pace."""

    def __init__(self, model, sampler: Sampler, steps: Steps, drafter: Drafter, draft_length,
                 max_draft: int, verify: Callable = verify):
        """max_draft: the longest draft; verify: the function above, compiled or not.

        ValueError if max_draft + 1 tokens exceed the longest call that the cache was set up for.
        """
        super().__init__(model, sampler, steps)
        if max_draft >= self.chunk:
            raise ValueError(f"{max_draft} + 1 tokens exceed the longest call, {self.chunk}")
        self.drafter, self.draft_length, self.max_draft = drafter, draft_length, max_draft
        self.verify, self.n_beyond = verify, max_draft + 1
        self.history = self.token.new_zeros(self.n_row, self.max_length + max_draft + 1)
        self.ready = deque()                       # Ready tokens, not yet returned by step()
        self.unobserved = set()                    # rows whose last token the sampler has not seen
        drafter.setup(self.n_row, self.max_length, self.chunk)
        self.reset_stats()

    @torch.inference_mode()
    def prefill(self, rows, prompts, n_cached=0, params=None) -> Tensor:
        for row, prompt in zip(rows, prompts):
            self._discard(row)
            self.history[row, :len(prompt)] = to_device(prompt, self.device)
            self.draft_length.begin(row)
            self.drafter.begin(row, n_cached)
            self.row_stats[row] = 0, 0
            self.plain_rows.discard(row)
            self.unobserved.add(row)
        self.place = 0
        return super().prefill(rows, prompts, n_cached, params)

    def end(self, row: int, n_kept: int = 0) -> None:
        self._discard(row)
        self.draft_length.end(row)
        super().end(row, n_kept)

    @torch.inference_mode()
    def _discard(self, row: int) -> None:
        """Drop the row's tokens that step() has not returned."""
        for ready in self.ready:
            if row in ready.rows:
                ready.rows.remove(row)
                ready.token[row] = -1
        self.ready = deque(ready for ready in self.ready if ready.rows)
        self.unobserved.discard(row)

    @property
    def has_ready(self) -> bool:
        return bool(self.ready)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The next token of each row that has one, [B, 1]; -1 in the other rows. A new round, when
        no row has one, reads the device once."""
        self._observe(sorted(self.unobserved))
        if not self.ready:
            self._round()
        self.new_rows, token, self.place = self.ready.popleft()
        self.unobserved = set(self.new_rows)
        self.token = torch.where(token < 0, self.token, token)
        return token

    def _observe(self, rows: list[int]) -> None:
        """Tell the sampler the last token of these rows."""
        if len(rows) == self.n_row:
            self.sampler.observe(self.token)
        elif rows:
            index = to_device(rows, self.device)
            self.sampler.observe(self.token[index], index)

    def _round(self) -> None:
        """Draft and verify, or decode one token in each row; adds to `ready`."""
        in_use = [row for row, n in enumerate(self.length) if n]
        drafting = [row for row in in_use if self._may_draft(row)]
        self.history.scatter_(1, self.pos.view(-1, 1), self.token)
        k = self.draft_length.next(drafting, len(self.active_rows()))
        n_left = self.max_length - max(self.length)            # positions of the longest row
        if drafting and k and n_left >= 2:                     # one is for padding
            rows = self.rows_of_round(set(drafting))
            tokens, count = map(tp.broadcast, self.draft_and_verify(rows, k))
            self._finish_round(rows, drafting, tokens, count)
        else:
            self._plain_round(tp.broadcast(self._decode()))

    def _plain_round(self, token: Tensor) -> None:
        """A new token [B, 1] in each row in use. Few operations: most rounds are plain where drafts
        do not pay."""
        self.history.scatter_(1, self.pos.view(-1, 1) + 1, token)
        n_known = self.pos.flatten() + 2
        self.ready.append(Ready([row for row, n in enumerate(self.length) if n],
                                torch.where(self.in_use.view(-1, 1) > 0, token, -1), 0))
        self.length = [min(n + 1, self.max_length) if n else 0 for n in self.length]
        self.pos = (self.pos + self.in_use).clamp(max=self.max_length - 1)
        found = None
        if not self.draft_length.paused:
            found = self.drafter.find(self.history, n_known)
        found = [None] * self.n_row if found is None else found.tolist()
        for row in self.ready[-1].rows:
            self.drafter.accepted(row, self.length[row], found[row])

    def draft_and_verify(self, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        """-> accept()'s result for k drafts in each row."""
        draft = self.drafter.propose(rows, k, self.sampler)
        drafted = to_device([[d] for d in rows.drafting], self.device)
        kv_len = self.kv_len(min(max(rows.lengths) + k, self.max_length))
        return self.verify(self.model, rows.token, *draft, rows.pos, drafted, kv_len, self.sampler,
                           rows.batch_idx)

    def _finish_round(self, rows: Rows, drafting: list[int], tokens: Tensor, count: Tensor) -> None:
        """tokens [b, n] of which count [b] + 1 are valid, in rows of which some drafted."""
        device, n = self.device, tokens.shape[1]
        place = torch.arange(n, device=device)
        batch_idx = rows.batch_idx
        if batch_idx is None:
            batch_idx = torch.arange(self.n_row, device=device)
        at = rows.pos.view(-1, 1) + 1 + place                  # [b, n]
        self.history[batch_idx[:, None], at] = tokens          # invalid ones: overwritten later
        found = None
        if not self.draft_length.paused:
            found = self.drafter.find(self.history[batch_idx], rows.pos.flatten() + 2 + count)
        if found is None:
            counts, found = count.tolist(), [None] * len(rows.index)
        else:                                      # one device read
            counts, found = torch.stack((count, found)).tolist()
        each = tokens.new_full((self.n_row, n), -1)            # [B, n]
        is_valid = (place <= count[:, None]) & (self.in_use.view(-1, 1)[batch_idx] > 0)
        each[batch_idx] = torch.where(is_valid, tokens, -1)
        accepted = {}
        for row, n_known, n_accepted, at in zip(rows.index, rows.lengths, counts, found):
            if self.length[row]:
                self.drafter.accepted(row, n_known + n_accepted, at)
                self.length[row] = min(n_known + n_accepted, self.max_length)
                accepted[row] = n_accepted
        self._set_pos()
        for i in range(max(accepted.values(), default=0) + 1):
            new = [row for row, n_accepted in accepted.items() if n_accepted >= i]
            self.ready.append(Ready(new, each[:, i:i + 1], i))
        self._learn({row: accepted[row] for row in drafting})

    def _may_draft(self, row: int) -> bool:
        has_room = self.length[row] + 1 + self.max_draft <= self.max_length
        return (has_room and row not in self.plain_rows and self.drafter.can_draft(row)
                and self.sampler.follows_drafts(row))

    def rows_of_round(self, drafting: set[int]) -> Rows:
        """The rows that take part; drafting: those whose drafts count."""
        index = self.active_rows()
        batch_idx, tensors = None, (self.history, self.token, self.pos)
        if len(index) < self.n_row:
            batch_idx = to_device(index, self.device)
            tensors = (t[batch_idx] for t in tensors)
        lengths = [min(self.length[row] or self.kept[row], self.max_length - 1) + 1
                   for row in index]
        return Rows(index, batch_idx, *tensors, lengths, [row in drafting for row in index])

    # ---- Statistics -----------------------------------------------------------------------------

    def _learn(self, n_accepted: dict[int, int]) -> None:
        for row, n in n_accepted.items():
            self.accept_counts[n] += 1
            rounds, total = self.row_stats[row]
            self.row_stats[row] = rounds + 1, total + n
        self.draft_length.learn(n_accepted)

    def reset_stats(self) -> None:
        # [n]: how often a row accepted n drafts
        self.accept_counts = [0] * (self.max_draft + 1)
        # of each row's sequence: rounds with drafts, accepted drafts
        self.row_stats = [(0, 0)] * self.n_row

    def accept_stats(self) -> dict:
        """Statistics of the accepted drafts."""
        return dict(accept_counts=self.accept_counts, rounds=sum(self.accept_counts),
                    mean_accepted=self.mean_accepted())

    def mean_accepted(self) -> float | None:
        rounds = sum(self.accept_counts)
        accepted = sum(n * count for n, count in enumerate(self.accept_counts))
        return accepted / rounds if rounds else None


def build_speculative(model, sampler: Sampler, steps: Steps, draft, k: int,
                      compiles: bool) -> SpeculativeBatch:
    """Speculation with a draft model and a fixed draft length k. compiles: use torch.compile."""
    step, check = draft_one_token, verify
    if compiles:
        step, check = CompiledStep(step), CompiledStep(check)
    drafter = ModelDrafter(draft, step, max_rejected=k + 1)
    return SpeculativeBatch(model, sampler, steps, drafter, FixedLength(k), k, check)
