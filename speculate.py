"""Speculative decoding (arXiv 2211.17192): draft some tokens cheaply, verify them all in one call.

The output is what plain decoding would give: greedily the same tokens, else draws from the same
distribution. A SpeculativeBatch is a generate.Batch of one row. What drafts (a model here, look-up
in decoding/ngram.py) and how many tokens (always as many here, by their cost in
decoding/draft_length.py) it is given.

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

# ---- What is accepted ---------------------------------------------------------------------------

def token_probs(dist: tuple, tokens: Tensor | None, n_vocab: int) -> Tensor:
    """What a distribution, probs [T, C] and their token ids, gives to tokens [T, m] -> [T, m].

    ids None: the candidates are the vocabulary. tokens None: all of the vocabulary is asked for.
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
    """draft_tokens [1, k] -> tokens [1, k + 1] and n []: n drafts and one more token count.

    target: the distributions at k + 1 places; draft: those that the k drafts were drawn from. A
    draft x is kept with probability min(1, p(x) / q(x)), for chance [k] uniform in [0, 1); the
    first that is not is replaced by a draw from max(0, p - q), for noise(ids) as sampling.py's.
    """
    p, ids = target                                                        # [k + 1, C]
    x = draft_tokens.T                                                     # [k, 1]
    at_drafts = p[:-1], None if ids is None else ids[:-1]
    p_draft = token_probs(at_drafts, x, n_vocab)
    q_draft = token_probs(draft, x, n_vocab)
    accepted = p_draft > chance[:, None] * q_draft                         # [k, 1]
    n = accepted[:, 0].int().cumprod(0).sum()
    rest = (p[:-1] - token_probs(draft, at_drafts[1], n_vocab)).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:-1])       # rounding left nothing
    rest = torch.cat((rest, p[-1:]))
    row = n.view(1)
    own_ids = None if ids is None else ids[row]
    own = draw(rest[row], own_ids, noise(own_ids))                         # [1, 1]
    place = torch.arange(len(p), device=p.device)
    return torch.where(place == n, own, F.pad(draft_tokens, (0, 1))), n


def verify(model, token, drafts, probs, ids, pos, kv_len, sampler) -> tuple:
    """token [1, 1] at pos [1] and drafts [1, k] after it -> accept()'s."""
    n = drafts.shape[1] + 1
    tokens = torch.cat((token, drafts), dim=1)
    places = pos + torch.arange(n, device=pos.device)
    logits = model(tokens, places, n, kv_len)[0]                           # [k + 1, V]
    every = slice(None)
    target = sampler.distribution(sampler.processed(logits, every, drafts))
    accepted, count = accept(target, (probs, ids), drafts, sampler.chance(places[:-1]),
                             partial(sampler.noise, every, pos), sampler.n_vocab)
    best = logits.amax(-1)                         # of the places that count
    place = torch.arange(n, device=pos.device)
    sampler.note(torch.where(place <= count, best - best, 0)[None])
    return accepted, count


# ---- Drafts -------------------------------------------------------------------------------------

def draft_one_token(model, token, pos, kv_len, drafts, sampler, n_vocab) -> tuple:
    """token [1, 1] at pos [1], behind drafts [1, k] -> the next one, and what it was drawn from."""
    logits = model(token, pos, 1, kv_len)[:, -1, :n_vocab]
    logits = F.pad(logits, (0, n_vocab - logits.shape[-1]), value=-torch.inf)
    return draw_draft(logits, pos, drafts, sampler)


def draw_draft(logits: Tensor, pos: Tensor, drafts: Tensor, sampler: Sampler) -> tuple:
    """logits [1, V] after pos [1], behind drafts [1, k] -> a token [1, 1], and what it was drawn
    from."""
    every = slice(None)
    probs, ids = sampler.distribution(sampler.processed(logits, every, drafts))
    return draw(probs, ids, sampler.noise(every, pos, ids, draft=True)), probs, ids


def joined(dists: list[tuple], n_vocab: int) -> tuple[Tensor, Tensor | None]:
    """Distributions of one place each -> of all places, with candidates or over all tokens."""
    probs, ids = zip(*dists)
    if len({p.shape for p in probs}) > 1:          # few candidates here, all tokens there
        dense = [token_probs(dist, None, n_vocab) for dist in dists]
        return torch.cat(dense), None
    return torch.cat(probs), None if ids[0] is None else torch.cat(ids)


class ModelDrafter:
    """A smaller model drafts. It has a KV cache of its own, and catches up with what it lacks."""

    min_kv_len = 256

    def __init__(self, model, step: Callable = draft_one_token, max_rejected: int = 16):
        """step: draft_one_token, compiled or not. max_rejected: how many of its cached tokens may
        turn out not to count, at a verification or with a new prompt."""
        self.model, self.step, self.max_rejected = model, step, max_rejected
        self.n_cached = 0                          # tokens of the history in its cache

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        """A new prompt, whose first n_same tokens are those of the last one."""
        cache = self.model.max_batch_size, self.model.max_seq_length
        if cache != (1, max_length):
            self.model.setup_cache(1, max_length, chunk, None, self.max_rejected)
            self.n_cached = 0
        self.n_cached = min(self.n_cached, n_same)

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        return None

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple:
        """What follows the first n tokens of history -> tokens [1, k], probs [k, C] and ids."""
        model, n_vocab = self.model, sampler.n_vocab
        known = history.clamp(max=model.cfg.vocab_size - 1)    # it may know fewer
        pos = torch.arange(n + k, device=history.device)
        if n - self.n_cached > 2:                  # more than what a full acceptance leaves
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
            if at >= n - 1:                        # else it only catches up
                drafts[:, at - n + 1] = tp.broadcast(token)[:, 0]
                dists.append(dist)
        self.n_cached = n + k - 1                  # all but the last draft
        return drafts, *joined(dists, n_vocab)

    def accepted(self, n: int, at: int | None) -> None:
        """Of the last drafts those hold that are among the first n tokens."""
        self.n_cached = min(self.n_cached, n)


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


# ---- The batch ----------------------------------------------------------------------------------

class SpeculativeBatch(Batch):
    """One sequence, whose tokens come in rounds of drafting and verifying."""

    def __init__(self, model, sampler: Sampler, steps: Steps, drafter, draft_length,
                 max_draft: int, verify: Callable = verify):
        """max_draft: what draft_length may ask for at most; verify: the function, compiled or not.

        ValueError where such calls do not fit into the cache.
        """
        super().__init__(model, sampler, steps)
        if max_draft >= self.chunk:
            raise ValueError(f"{max_draft} + 1 tokens exceed the longest call, {self.chunk}")
        self.drafter, self.draft_length = drafter, draft_length
        self.verify, self.n_beyond = verify, max_draft + 1
        self.history = self.token.new_zeros(1, self.max_length + max_draft + 1)
        self.accept_counts = [0] * (max_draft + 1)             # [n]: rounds that kept n drafts
        self.ready = deque()                       # tokens that step() has not given yet

    def prefill(self, rows, prompts, n_cached=0, params=None) -> Tensor:
        prompt = prompts[0]
        self.ready.clear()
        self.draft_length.begin()
        self.history[:, :len(prompt)] = to_device([prompt], self.device)
        self.drafter.begin(n_cached, self.max_length, self.chunk)
        return super().prefill(rows, prompts, n_cached, params)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The next token [1, 1], of the last round or of a new one, which reads the device once."""
        self.sampler.observe(self.token)
        if not self.ready:
            self.ready.extend(self._round())
        self.token = self.ready.popleft()
        return self.token

    def _round(self) -> list[Tensor]:
        n = self.length[0] + 1                     # tokens known; the last one is not in the cache
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
        self.history[:, n:n + tokens.shape[1]] = tokens        # beyond the count: to be replaced
        n_accepted, at = 0, None
        if not self.draft_length.paused:
            at = self.drafter.find(self.history, n + 1 + count)
        if at is not None:                         # one read for both
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
        """How many rounds kept how many drafts."""
        return dict(accept_counts=self.accept_counts, rounds=sum(self.accept_counts),
                    mean_accepted=self.mean_accepted())

    def mean_accepted(self) -> float | None:
        rounds = sum(self.accept_counts)
        accepted = sum(n * count for n, count in enumerate(self.accept_counts))
        return accepted / rounds if rounds else None


def build_speculative(model, sampler: Sampler, steps: Steps, draft, k: int,
                      compiles: bool) -> SpeculativeBatch:
    """Always k drafts by the model `draft`. compiles: by torch.compile, as `steps` are."""
    step, check = draft_one_token, verify
    if compiles:
        step, check = CompiledStep(step), CompiledStep(check)
    drafter = ModelDrafter(draft, step, max_rejected=k + 1)
    return SpeculativeBatch(model, sampler, steps, drafter, FixedLength(k), k, check)
