"""Speculative decoding (arXiv 2211.17192): guess some tokens cheaply, check them all in one call.

What comes out is what plain decoding would give: greedily the same tokens, else draws from the same
distribution. Owns the guesses, their acceptance, and how many to try. It receives the models and
the steps that it drives: no prefill, no sampler and no generation loop of its own.

    speculator = Speculator(8)                     # for generate.generate(…, speculator=speculator)
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling import Sampling, draw, exponential, n_candidates, penalize, truncate

NGRAM = 3                                          # so many tokens alike are a match


# ---- The distributions, and what is accepted ----------------------------------------------------

def distribution(logits: Tensor, how: Sampling, seen: Tensor | None = None) -> tuple:
    """logits [T, V] -> probabilities [T, C] and their token ids [T, C]; None: the vocabulary."""
    if seen is not None:
        logits = penalize(logits, seen, how.repetition_penalty)
    probs, ids = truncate(logits, how)
    return probs / probs.sum(-1, keepdim=True), ids


def chances(dist: tuple, tokens: Tensor | None, n_vocab: int) -> Tensor:
    """What a distribution gives to tokens [T, m], or to the whole vocabulary -> [T, m]."""
    probs, ids = dist
    many = ids is not None and tokens is not None and ids.shape[1] * tokens.shape[1] > n_vocab
    if ids is not None and (tokens is None or many):
        probs, ids = probs.new_zeros(len(probs), n_vocab).scatter(1, ids, probs), None
    if ids is None:
        return probs if tokens is None else probs.gather(1, tokens)
    return (probs[:, None] * (ids[:, None] == tokens[..., None])).sum(-1)


def accept(target: tuple, draft: tuple, guesses: Tensor, chance: Tensor, noise: Tensor,
           n_vocab: int) -> tuple[Tensor, Tensor]:
    """guesses [1, k] -> tokens [1, k + 1] and n []: n guesses and one more token count.

    target: the distributions at k + 1 places, draft: those that the k guesses were drawn from. A
    guess x is kept with probability min(1, p(x) / q(x)), for chance [k] uniform in [0, 1); the
    first that is not is replaced by a draw from max(0, p - q), for noise [1, C] as sampling.py's.
    """
    (p, ids), x = target, guesses.T                                        # [k + 1, C], [k, 1]
    ahead = p[:-1], None if ids is None else ids[:-1]
    likely = chances(ahead, x, n_vocab) > chance[:, None] * chances(draft, x, n_vocab)
    n = likely[:, 0].int().cumprod(0).sum()
    rest = (p[:-1] - chances(draft, ahead[1], n_vocab)).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:-1])       # rounding left nothing
    row, rest = n.view(1), torch.cat((rest, p[-1:]))
    own = draw(rest[row], None if ids is None else ids[row], noise)        # [1, 1]
    place = torch.arange(len(p), device=p.device)
    return torch.where(place == n, own, F.pad(guesses, (0, 1))), n


# ---- The two steps ------------------------------------------------------------------------------

def guess(model, token, pos, n_key, noise, how, seen, n_vocab) -> tuple:
    """token [1, 1] at pos [1] -> the draft's next token [1, 1], and what it was drawn from."""
    logits = model(token, pos, 1, n_key)[:, -1, :n_vocab]
    logits = F.pad(logits, (0, n_vocab - logits.shape[-1]), value=-torch.inf)
    dist = distribution(logits, how, seen)
    return draw(*dist, noise), *dist


def read(model, tokens, pos, n_key) -> None:
    """A draft model catches up with tokens [1, T]."""
    model(tokens, pos, 1, n_key)


def verify(model, token, guesses, probs, ids, pos, n_key, chance, noise, how, seen) -> tuple:
    """token [1, 1] at pos [1] and k guesses after it -> accept()'s. seen [1, V] or None."""
    k, n_vocab = guesses.shape[1], model.cfg.vocab_size
    tokens = torch.cat((token, guesses), dim=1)
    logits = model(tokens, pos + torch.arange(k + 1, device=pos.device), k + 1, n_key)[0]
    if seen is not None:                           # each place has seen the guesses before it
        later = torch.ones(k + 1, k, device=token.device).tril(-1)         # [place, guess]
        known = torch.zeros_like(logits).scatter_add_(1, guesses.expand(k + 1, -1), later)
        seen = seen | (known > 0)
    return accept(distribution(logits, how, seen), (probs, ids), guesses, chance, noise, n_vocab)


# ---- How many to try ----------------------------------------------------------------------------

class Pace:
    """As many guesses as allowed while a round gives more tokens than plain steps would in its
    time, else fewer; where the fewest do not pay either, none for a while, each time for twice as
    long: so bad guesses cost little."""

    def __init__(self, sizes: list[int], costs: list[float], fixed: bool = False):
        """sizes: how many may be guessed, most first; costs: what such a round takes, in steps."""
        self.sizes, self.costs, self.fixed = sizes, costs, fixed
        self.level, self.wait, self.pause = 0, 0, 1

    def next(self) -> int:
        self.wait -= self.wait > 0
        return 0 if self.wait or not self.sizes else self.sizes[self.level]

    def learn(self, n: int) -> None:
        """n of the last guesses were right."""
        if self.fixed:
            return
        if n + 1 >= self.costs[self.level]:
            self.level, self.pause = max(0, self.level - 1), 1
        elif self.level < len(self.sizes) - 1:
            self.level += 1
        else:
            self.pause = min(2 * self.pause, 64)
            self.wait = self.pause


class Speculator:
    """Rounds of guessing and checking, for one row. It remembers all tokens, on the device.

    Without a draft model the guesses are what followed the last NGRAM tokens when they were there
    before. A draft model has a KV cache of its own, and catches up with what it has not seen.
    """

    def __init__(self, k: int, draft=None, fixed: bool = False, guess: Callable = guess,
                 verify: Callable = verify, read: Callable = read):
        """k: guesses at most, or always if fixed; draft: a Transformer of the same vocabulary.

        guess, verify: the functions above, compiled or not; read: better not.
        """
        self.k, self.sizes = k, [k] if fixed or k < 3 or draft is None else [k, k // 3]
        self.costs, self.fixed = [2.0] * len(self.sizes), fixed            # see measure()
        self.draft, self.guess, self.verify, self.read = draft, guess, verify, read
        self.accept_counts, self.n_held = [0] * (k + 1), 0

    def begin(self, ids: list[int], n_cached: int, limit: int, chunk: int, device) -> None:
        """A new prompt, whose first n_cached tokens are as they were in the last one, in a cache of
        `limit` positions; chunk: the draft too runs so many tokens at a time."""
        self.known = torch.zeros(1, limit + self.k + 1, dtype=torch.int64, device=device)
        self.known[:, :len(ids)] = torch.tensor([ids], device=device)
        self.n_held = min(self.n_held, n_cached)   # of them, those in the draft's cache
        self.pace, self.limit, self.at = Pace(self.sizes, self.costs, self.fixed), limit, 0
        if self.draft and (self.draft.max_batch_size, self.draft.max_seq_length) != (1, limit):
            self.draft.setup_cache(1, limit, chunk)
            self.n_held = 0

    def round(self, model, token: Tensor, pos: Tensor, n: int, bucket: Callable, how: Sampling,
              generator, seen: Tensor | None, decode: Callable) -> list[Tensor]:
        """token [1, 1], the last of n known ones, at pos [1] -> those that follow, [1, 1] each.

        decode: generate's step, for when nothing is guessed. Reads the device once, or not at all.
        """
        device, n_vocab, guesses = token.device, model.cfg.vocab_size, None
        shape = 1, n_candidates(how, n_vocab)

        def noise():
            return exponential(shape, device, generator)
        self.known[:, n - 1:n] = token
        k = self.pace.next()
        k = k if 0 < n <= self.limit - k else 0    # there is room, and the row has not ended
        if k and self.draft:
            guesses, *dist = self.ask(n, k, bucket, noise, how, seen, n_vocab)
        elif k and self.at:
            guesses = self.known[:, self.at:self.at + k]
            dist = torch.ones(k, 1, device=device), guesses.T
        if guesses is None:
            tokens = decode(model, token, pos, bucket(n), noise(), how, seen)
            count = torch.zeros((), dtype=torch.int64, device=device)
        else:
            chance = torch.rand(k, device=device, generator=generator)
            tokens, count = self.verify(model, token, guesses, *dist, pos, bucket(n + k), chance,
                                        noise(), how, seen)
        self.known[:, n:n + tokens.shape[1]] = tokens      # what is beyond the count is replaced
        if self.sizes and self.draft is None and self.pace.wait < 2:       # it may guess next time
            count, self.at = torch.stack((count, self.look_up(n + 1 + count))).tolist()
        else:
            count, self.at = 0 if guesses is None else int(count), 0
        if guesses is not None:
            self.n_held = min(self.n_held, n + count)
            self.accept_counts[count] += 1
            self.pace.learn(count)
        return list(tokens[:, :count + 1].split(1, dim=1))

    def look_up(self, n: Tensor) -> Tensor:
        """Where what followed the last NGRAM of n tokens begins, the last time they were there; 0
        if they never were. n [] -> []"""
        known = self.known[0]
        last = known[(n - NGRAM + torch.arange(NGRAM, device=known.device)).clamp(min=0)]
        alike = (known.unfold(0, NGRAM, 1) == last).all(-1)
        after = NGRAM + torch.arange(len(alike), device=known.device)
        return torch.where(alike & (after < n), after, 0).amax()

    def ask(self, n: int, k: int, bucket, noise, how, seen, n_vocab) -> tuple:
        """The draft model -> guesses [1, k], their distributions: [k, C] and ids [k, C] or None."""
        pos, found = torch.arange(n + k, device=self.known.device), []
        known = self.known.clamp(max=self.draft.cfg.vocab_size - 1)        # it may know fewer
        if n - self.n_held > 2:                    # more than what a full acceptance leaves
            for at in range(self.n_held, n - 1, self.draft.longest_call):
                end = min(at + self.draft.longest_call, n - 1)
                self.read(self.draft, known[:, at:end], pos[at:end], end)
            self.n_held = n - 1
        for at in range(self.n_held, n + k - 1):
            token = known[:, at:at + 1] if at < n else found[-1][0]
            token, *dist = self.guess(self.draft, token, pos[at:at + 1], bucket(at + 1), noise(),
                                      how, seen, n_vocab)
            if at >= n - 1:                        # else it only catches up
                seen = None if seen is None else seen.scatter(1, token, True)
                found.append((token, *dist))
        self.n_held = n + k - 1                    # all but the last guess
        guesses, probs, ids = zip(*found)
        return (torch.cat(guesses, dim=1), torch.cat(probs),
                None if ids[0] is None else torch.cat(ids))

    def calls(self, model, decode: Callable, n_key: int, how: Sampling) -> list[Callable]:
        """What a run calls, each as a function that does it and reads the result: a plain step, a
        check of each size, and a draft's guess."""
        device, n_vocab = model.freq.device, model.cfg.vocab_size
        noise, seen = exponential((1, n_candidates(how, n_vocab)), device), None
        if how.repetition_penalty != 1:
            seen = torch.zeros(1, n_vocab, dtype=torch.bool, device=device)
        pos = torch.zeros(1, dtype=torch.int64, device=device)
        token, dist = pos[None], (torch.ones(1, 1, device=device), pos[None])

        def ask():
            return self.guess(self.draft, token, pos, n_key, noise, how, seen, n_vocab)

        def check(k):
            probs, ids = (t if t is None else t.repeat(k, 1) for t in dist)
            chance = torch.rand(k, device=device)
            self.verify(model, token, token.repeat(1, k), probs, ids, pos, n_key, chance, noise,
                        how, seen)[1].item()
        calls = [lambda: decode(model, token, pos, n_key, noise, how, seen).item()]
        calls += [lambda k=k: check(k) for k in self.sizes]
        if self.draft:
            _, *dist = ask()
            calls.append(lambda: ask()[0].item())
        return calls

    @torch.inference_mode()
    def measure(self, model, decode: Callable, n_key: int, how: Sampling) -> dict[int, float]:
        """What a round of each size costs here, in plain steps. For keep().

        Overwrites the beginning of the caches.
        """
        seconds = []
        for call in self.calls(model, decode, n_key, how):
            times = [time.perf_counter()]
            for _ in range(9):
                call()
                times.append(time.perf_counter())
            seconds.append(statistics.median(b - a for a, b in zip(times[1:], times[2:])))
        plain, checks = seconds[0], seconds[1:1 + len(self.sizes)]
        ask = seconds[-1] if self.draft else 0.0
        return {k: ((k + 1) * ask + check) / plain for k, check in zip(self.sizes, checks)}

    def keep(self, costs: dict[int, float]) -> None:
        """Of the sizes those that can pay."""
        self.sizes = [k for k in costs if costs[k] < k + 1]
        self.costs = [costs[k] for k in self.sizes]

    def stats(self) -> dict:
        """How many rounds kept how many guesses."""
        counts = self.accept_counts
        kept = sum(n * count for n, count in enumerate(counts))
        return dict(accept_counts=counts, rounds=sum(counts),
                    mean_accepted=kept / sum(counts) if sum(counts) else None)
