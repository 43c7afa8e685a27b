"""Speculative decoding (arXiv 2211.17192): draft some tokens cheaply, verify them all in one call.

The output equals plain decoding: the same tokens if greedy, else draws from the same distribution.
SpeculativeBatch is a generate.Batch of one row. It takes a drafter (here a draft model; n-gram
lookup is in decoding/ngram.py) and a policy for the draft length (here fixed; adaptive in
decoding/draft_length.py).

    batch = SpeculativeBatch(model, sampler, steps, ModelDrafter(draft), FixedLength(5), 5)
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import tp
from generate import Batch, CompiledStep, Steps, bucket, to_device
from sampling import Sampler, draw

# ---- Verification -------------------------------------------------------------------------------

def token_probs(dist: tuple, tokens: Tensor | None, n_vocab: int) -> Tensor:
    """The probabilities [T, m] of tokens [T, m] under dist: probs [T, C] and token ids [T, C].

    ids None: probs cover the whole vocabulary. tokens None: return the whole vocabulary, [T, V].
    """
    probs, ids = dist
    if ids is None and tokens is None:
        return probs
    if ids is None:
        return probs.gather(1, tokens)
    if tokens is not None and ids.shape[1] * tokens.shape[1] <= n_vocab:
        same = ids[:, None] == tokens[..., None]                           # [T, m, C]
        return (probs[:, None] * same).sum(-1)
    dense = probs.new_zeros(len(probs), n_vocab).scatter(1, ids, probs)
    return token_probs((dense, None), tokens, n_vocab)


def accept(target: tuple, draft: tuple, draft_tokens: Tensor, chance: Tensor,
           noise: Callable, n_vocab: int) -> tuple[Tensor, Tensor]:
    """draft_tokens [1, k] -> tokens [1, k + 1] and n []: the first n + 1 tokens are valid.

    target: the model's distributions p at k + 1 positions; draft: the distributions q that the k
    drafts were drawn from. Draft x is accepted with probability min(1, p(x) / q(x)), decided by
    chance [k], uniform in [0, 1). The first rejected draft is replaced by a draw from max(0, p - q)
    with noise(ids), see Sampler.noise().
    """
    p, ids = target                                                        # [k + 1, C]
    x = draft_tokens.T                                                     # [k, 1]
    at_drafts = p[:-1], None if ids is None else ids[:-1]
    p_draft = token_probs(at_drafts, x, n_vocab)
    q_draft = token_probs(draft, x, n_vocab)
    accepted = p_draft > chance[:, None] * q_draft                         # [k, 1]
    n = accepted[:, 0].int().cumprod(0).sum()
    rest = (p[:-1] - token_probs(draft, at_drafts[1], n_vocab)).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:-1])       # p = q up to rounding
    rest = torch.cat((rest, p[-1:]))
    row = n.view(1)
    own_ids = None if ids is None else ids[row]
    own = draw(rest[row], own_ids, noise(own_ids))                         # [1, 1]
    place = torch.arange(len(p), device=p.device)
    return torch.where(place == n, own, F.pad(draft_tokens, (0, 1))), n


def verify(model, token, drafts, probs, ids, pos, kv_len, sampler) -> tuple:
    """Run token [1, 1] at pos [1] and the drafts [1, k] that follow it -> accept()'s result."""
    n = drafts.shape[1] + 1
    tokens = torch.cat((token, drafts), dim=1)
    places = pos + torch.arange(n, device=pos.device)
    logits = model(tokens, places, n, kv_len)[0]                           # [k + 1, V]
    every = slice(None)
    target = sampler.distribution(sampler.processed(logits, every, drafts))
    accepted, count = accept(target, (probs, ids), drafts, sampler.chance(places[:-1]),
                             partial(sampler.noise, every, pos), sampler.n_vocab)
    best = logits.amax(-1)                         # for Sampler.note(): valid positions only
    place = torch.arange(n, device=pos.device)
    sampler.note(torch.where(place <= count, best - best, 0)[None])
    return accepted, count


# ---- Drafts -------------------------------------------------------------------------------------

def draft_one_token(model, token, pos, kv_len, drafts, sampler, n_vocab) -> tuple:
    """Draft one more token after `drafts` [1, k] and token [1, 1] at pos [1]; return it with the
    distribution it was sampled from."""
    logits = model(token, pos, 1, kv_len)[:, -1, :n_vocab]
    logits = F.pad(logits, (0, n_vocab - logits.shape[-1]), value=-torch.inf)
    return draw_draft(logits, pos, drafts, sampler)


def draw_draft(logits: Tensor, pos: Tensor, drafts: Tensor, sampler: Sampler) -> tuple:
    """Sample a draft [1, 1] from logits [1, V] at pos [1], after drafts [1, k]; return it with its
    distribution."""
    every = slice(None)
    probs, ids = sampler.distribution(sampler.processed(logits, every, drafts))
    return draw(probs, ids, sampler.noise(every, pos, ids, draft=True)), probs, ids


def joined(dists: list[tuple], n_vocab: int) -> tuple[Tensor, Tensor | None]:
    """Concatenate distributions of one position each, over the whole vocabulary if they differ."""
    probs, ids = zip(*dists)
    if len({p.shape for p in probs}) > 1:          # some are shortlists
        dense = [token_probs(dist, None, n_vocab) for dist in dists]
        return torch.cat(dense), None
    return torch.cat(probs), None if ids[0] is None else torch.cat(ids)


class ModelDrafter:
    """Drafts with a smaller model. It has its own KV cache and first reads the tokens it lacks."""

    min_kv_len = 256

    def __init__(self, model, step: Callable = draft_one_token, max_rejected: int = 16):
        """step: draft_one_token, compiled or not. max_rejected: how many cached tokens of the draft
        model may be discarded, by a verification or a new prompt."""
        self.model, self.step, self.max_rejected = model, step, max_rejected
        self.n_cached = 0                          # tokens of the sequence in its cache

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        """Begin a new prompt that shares its first n_same tokens with the last sequence."""
        cache = self.model.max_batch_size, self.model.max_seq_length
        if cache != (1, max_length):
            self.model.setup_cache(1, max_length, chunk, None, self.max_rejected)
            self.n_cached = 0
        self.n_cached = min(self.n_cached, n_same)

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        return None

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple:
        """Draft k tokens after the first n of history -> tokens [1, k], probs [k, C] and ids."""
        model, n_vocab = self.model, sampler.n_vocab
        known = history.clamp(max=model.cfg.vocab_size - 1)    # its vocabulary may be smaller
        pos = torch.arange(n + k, device=history.device)
        if n - self.n_cached > 2:                  # more than after a full acceptance: prefill
            for at in range(self.n_cached, n - 1, model.longest_call):
                end = min(at + model.longest_call, n - 1)
                model(known[:, at:end], pos[at:end], 1, end)
            self.n_cached = n - 1
        drafts = history[:, n - 1:n].repeat(1, k)  # filled from the left
        dists = []
        for at in range(self.n_cached, n + k - 1):
            token = known[:, at:at + 1]
            if at >= n:
                token = drafts[:, at - n:at - n + 1]
            kv_len = bucket(at + 1, model.max_seq_length, self.min_kv_len)
            args = token, pos[at:at + 1], kv_len, drafts, sampler, n_vocab
            token, *dist = self.step(model, *args)
            if at >= n - 1:                        # earlier tokens only fill the cache
                drafts[:, at - n + 1] = tp.broadcast(token)[:, 0]
                dists.append(dist)
        self.n_cached = n + k - 1                  # all but the last draft
        return drafts, *joined(dists, n_vocab)

    def accepted(self, n: int, at: int | None) -> None:
        """The first n tokens of the sequence are final; drafts past them were rejected."""
        self.n_cached = min(self.n_cached, n)


class FixedLength:
    """Always k drafts."""

    paused = False

    def __init__(self, k: int):
        self.k = k
        self.lengths = [k]                         # all possible draft lengths

    def begin(self) -> None:
        pass

    def next(self) -> int:
        return self.k

    def learn(self, n_accepted: int) -> None:
        pass


# ---- The batch ----------------------------------------------------------------------------------

class SpeculativeBatch(Batch):
    """One sequence, generated in rounds of drafting and verification."""

    def __init__(self, model, sampler: Sampler, steps: Steps, drafter, draft_length,
                 max_draft: int, verify: Callable = verify):
        """max_draft: the longest draft; verify: the function above, compiled or not.

        ValueError if max_draft + 1 tokens exceed the longest call that the cache was set up for.
        """
        super().__init__(model, sampler, steps)
        if max_draft >= self.chunk:
            raise ValueError(f"{max_draft} + 1 tokens exceed the longest call, {self.chunk}")
        self.drafter, self.draft_length = drafter, draft_length
        self.verify, self.n_beyond = verify, max_draft + 1
        self.history = self.token.new_zeros(1, self.max_length + max_draft + 1)
        self.accept_counts = [0] * (max_draft + 1)             # [n]: rounds that accepted n drafts
        self.ready = deque()                       # accepted tokens not yet returned by step()

    def prefill(self, rows, prompts, n_cached=0, params=None) -> Tensor:
        prompt = prompts[0]
        self.ready.clear()
        self.draft_length.begin()
        self.history[:, :len(prompt)] = to_device([prompt], self.device)
        self.drafter.begin(n_cached, self.max_length, self.chunk)
        return super().prefill(rows, prompts, n_cached, params)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The next token [1, 1]. A new round, when one is needed, reads the device once."""
        self.sampler.observe(self.token)
        if not self.ready:
            self.ready.extend(self._round())
        self.token = self.ready.popleft()
        return self.token

    def _round(self) -> list[Tensor]:
        n = self.length[0] + 1                     # the last token is not in the cache yet
        self.history[:, n - 1:n] = self.token
        k, draft = self.draft_length.next(), None
        if k and n + k <= self.max_length:
            draft = self.drafter.propose(self.history, n, k, self.sampler)
        if draft is None:
            args = self.token, self.pos, self.kv_len(n), self.sampler
            tokens = self.steps.decode(self.model, *args)
            count = self.pos.new_zeros(())
        else:
            args = self.pos, self.kv_len(n + k), self.sampler
            tokens, count = self.verify(self.model, self.token, *draft, *args)
        tokens, count = tp.broadcast(tokens), tp.broadcast(count)
        self.history[:, n:n + tokens.shape[1]] = tokens        # past n_accepted: overwritten later
        n_accepted, at = 0, None
        if not self.draft_length.paused:
            at = self.drafter.find(self.history, n + 1 + count)
        if at is not None:                         # one device read for both
            n_accepted, at = torch.stack((count, at)).tolist()
        elif draft is not None:
            n_accepted = int(count)
        self.drafter.accepted(n + n_accepted, at)
        if draft is not None:
            self.accept_counts[n_accepted] += 1
            self.draft_length.learn(n_accepted)
        self.advance(n_accepted + 1)
        return list(tokens[:, :n_accepted + 1].split(1, dim=1))

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
