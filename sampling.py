"""Logits to tokens: sampling parameters of each row, the filters, and the draw.

Knows neither the model nor the tokenizer. Every parameter may differ between the rows of a batch:
parameters are tensors, so one compiled step serves all values. To add a filter, add a field with a
neutral default to SamplingParams, its range to RANGES, and a function that returns which tokens
stay to FILTERS, or to LOGIT_FILTERS if it needs logits instead of probabilities. A filter that
depends on earlier tokens is a logits processor, like RepetitionPenalty.

    sampler = Sampler([SamplingParams(temperature=0.8)] * B, n_vocab)
    token = sampler(logits)                        # [B, V] -> [B, 1], without a host sync
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Range(NamedTuple):
    """The range of a parameter."""

    kind: type
    minimum: float
    maximum: float
    above: bool = False                            # the minimum itself is excluded

    def check(self, value):
        """Return the value. ValueError states the range."""
        is_enough = value > self.minimum if self.above else value >= self.minimum
        if not (is_enough and value <= self.maximum):          # NaN is neither
            least = f"{'above' if self.above else 'at least'} {self.minimum}"
            raise ValueError(f"must be {least}, at most {self.maximum}, got {str(value)[:40]}")
        return value

    def of(self, value):
        """A JSON number -> a value of type `kind`. ValueError states the range."""
        is_one = type(value) in (int, float) and value - value == 0        # inf and NaN are not
        if not is_one or self.kind is int and value != int(value):
            what = "an integer" if self.kind is int else "a number"
            raise ValueError(f"expected {what}, got {str(value)[:40]}")
        return self.kind(self.check(value))


# Used for flags, JSON lines, HTTP requests and generation_config.json. All values fit in fp32 and
# int64 and keep the logits finite.
RANGES = {
    "temperature": Range(float, 0, 1e6),
    "top_k": Range(int, 0, 1 << 30),
    "top_p": Range(float, 0, 1, above=True),
    "min_p": Range(float, 0, 1),
    "top_n_sigma": Range(float, 0, 1000),
    "repetition_penalty": Range(float, 0.001, 1000),
    "seed": Range(int, -1 << 63, (1 << 63) - 1),
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one row. The defaults are neutral: the model's own distribution.

    ValueError names a value that is out of range.
    """

    temperature: float = 1.0                       # 0: greedy
    top_k: int = 0                                 # 0: off
    top_p: float = 1.0                             # 1: off; arXiv 1904.09751
    min_p: float = 0.0                             # 0: off; arXiv 2407.01082
    repetition_penalty: float = 1.0                # 1: off; arXiv 1909.05858
    seed: int | None = None                        # of this row; None: from the batch's generator
    top_n_sigma: float = 0.0                       # 0: off; arXiv 2411.07641

    def __post_init__(self):
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is None and name == "seed":
                continue
            try:
                allowed.check(value)
            except ValueError as e:
                raise ValueError(f"{name} {e}") from None


NEUTRAL = SamplingParams()


# ---- Filters: probs [B, C] and each row's parameter [B, 1] -> True where a token stays ----------
# Each row must keep at least one token. probs are renormalized after every filter. They cover the
# whole vocabulary or a shortlist in descending order. A parameter [1, 1] applies to all rows.

def keep_top_k(probs: Tensor, top_k: Tensor, most: int) -> Tensor:
    """The k most likely tokens, and all that tie with the last. 0: all. most: the largest top_k."""
    if most > MOST_SORTED:
        return keep_likeliest(probs, torch.ones_like(probs), top_k) | (top_k == 0)
    ordered = probs.topk(min(most, probs.shape[-1])).values
    last = (top_k.long() - 1).clamp(0, ordered.shape[-1] - 1)
    return (probs >= ordered.gather(-1, last.expand(len(probs), 1))) | (top_k == 0)


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """The fewest most likely tokens whose probabilities sum to top_p, and all that tie with the
    last. 1: all."""
    return keep_likeliest(probs, probs, top_p) | (top_p >= 1)


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs >= min_p * probs.amax(-1, keepdim=True)


FILTERS = {"top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p}  # in this order
MOST_SORTED = 4096                                 # for more tokens bisection is faster than a sort


def keep_likeliest(probs: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
    """Keep a token if the weights [B, C] of all more likely tokens sum to less than limit [B, 1].
    Tokens that tie are kept or dropped together."""
    if probs.shape[-1] <= MOST_SORTED:
        ordered, order = probs.sort(-1, descending=True)
        weight = weight.gather(-1, order)
        n_more = (weight.cumsum(-1) - weight < limit)[..., 1:].sum(-1, keepdim=True)   # than one
        return probs >= ordered.gather(-1, n_more)
    bits = probs.contiguous().view(torch.int32)    # positive floats sort like their bit patterns
    low, high = torch.zeros_like(bits[..., :1]), bits.amax(-1, keepdim=True)
    for _ in range(31):                            # bisect the bit pattern of the last kept token
        middle = low + (high - low) // 2
        stays = (weight * (bits > middle)).sum(-1, keepdim=True) < limit
        low = torch.where(stays, low, middle + 1)
        high = torch.where(stays, middle, high)
    return bits >= high


def renormalized(probs: Tensor, stays: Tensor, is_off: Tensor) -> Tensor:
    """Drop the tokens where `stays` is False. is_off [B, 1]: rows to leave unchanged."""
    kept = probs * stays
    return torch.where(is_off, probs, kept / kept.sum(-1, keepdim=True))


# ---- Filters of logits [B, V]: after the processors, before the temperature ----------------------

def keep_top_n_sigma(logits: Tensor, n: Tensor) -> Tensor:
    """The tokens at most n standard deviations below the maximum; n [B, 1], 0: all.

    The standard deviation excludes logits of -inf, which a grammar sets.
    """
    allowed = logits > -torch.inf
    count = allowed.sum(-1, keepdim=True)
    mean = torch.where(allowed, logits, 0).sum(-1, keepdim=True) / count
    variance = torch.where(allowed, logits - mean, 0).square().sum(-1, keepdim=True) / count
    least = logits.amax(-1, keepdim=True) - n * variance.sqrt()
    return (logits >= least) | (n == 0)


LOGIT_FILTERS = {"top_n_sigma": keep_top_n_sigma}


# ---- Logits processors: they change logits by the tokens so far ----------------------------------

class Processor(nn.Module):
    """Keeps a state for each row. Append your own to sampler.processors before compiling.

    begin() is called for a new sequence in a row, observe() after each token, and forward(logits,
    rows, draft_tokens) on the logits of some rows. A processor that calls use() may be skipped when
    none of the rows in a call needs it; one that never does is always called.
    """

    follows_drafts = True                          # False: its rows are generated without drafts

    def __init__(self):
        super().__init__()
        self.users = None                          # rows that need this processor; None: all

    def use(self, row: int, needed: bool) -> None:
        self.users = self.users or set()
        (self.users.add if needed else self.users.discard)(row)

    def begin(self, row: int, prompt: list[int], params: SamplingParams) -> None:
        """A new sequence begins in this row."""

    def observe(self, token: Tensor, rows: Tensor | None = None) -> None:
        """token [b, 1] was generated in these rows [b]; None: in all."""

    def end(self, row: int) -> None:
        """The row's sequence has ended: what observe() and forward() do for it has no meaning."""


class RepetitionPenalty(Processor):
    """Makes tokens of the prompt and the generated text less likely."""

    def __init__(self, n_row: int, n_vocab: int, device):
        super().__init__()
        penalty = torch.ones(n_row, 1, device=device)
        seen = torch.zeros(n_row, n_vocab, dtype=torch.bool, device=device)
        self.register_buffer("penalty", penalty)
        self.register_buffer("seen", seen)

    def begin(self, row: int, prompt: list[int], params: SamplingParams) -> None:
        self.use(row, params.repetition_penalty != 1)
        self.penalty[row] = params.repetition_penalty
        seen = torch.zeros(self.seen.shape[1], dtype=torch.bool, pin_memory=self.seen.is_cuda)
        seen[prompt] = True
        self.seen[row].copy_(seen, non_blocking=True)          # pinned: no sync with the GPU

    def observe(self, token: Tensor, rows: Tensor | None = None) -> None:
        if rows is None:
            self.seen.scatter_(1, token, True)
        else:
            self.seen[rows[:, None], token] = True

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        """logits [b, V] of these rows. With draft_tokens [b, k], logits [b T, V] of T positions of
        each row: the last follows all of the row's drafts, and each earlier one one fewer."""
        seen = self.seen[rows]
        if draft_tokens is not None:
            seen = seen | (counts_so_far(draft_tokens, *logits.shape) > 0)
        penalty = self.penalty[rows]
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, penalized, logits)


def counts_so_far(draft_tokens: Tensor, n: int, n_vocab: int) -> Tensor:
    """Counts [n, V] of the draft_tokens [b, k] before each of n / b positions of b rows: the last
    position has all of the row's drafts before it, and each earlier one one fewer."""
    one_hot = F.one_hot(draft_tokens, n_vocab)
    n_place = n // len(draft_tokens)
    return F.pad(one_hot.cumsum(1), (0, 0, 1, 0))[:, -n_place:].flatten(0, 1)


# ---- The draw -----------------------------------------------------------------------------------

def draw(probs: Tensor, ids: Tensor | None, noise: Tensor) -> Tensor:
    """Draw token ids [B, 1] from probs: argmax(p / Exp(1)) is distributed as p and needs no sync.

    ids [B, C]: the token ids of the candidates; None: the whole vocabulary. noise [B, C]: Exp(1).
    """
    winner = (probs / noise).argmax(-1, keepdim=True)
    return winner if ids is None else ids.gather(-1, winner)


def exponential(uniform: Tensor) -> Tensor:
    """Uniform in [0, 1) -> Exp(1). Never zero, since 0 / 0 = NaN would win argmax."""
    return (-torch.log1p(-uniform)).clamp(min=torch.finfo(torch.float32).tiny)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Counter-based random numbers: seed and counter, int64 -> [0, 1). SplitMix64 (Steele et al.,
    "Fast splittable pseudorandom number generators", 2014). It has no state, so compiled steps,
    other rows and the order of calls do not change the result."""
    x = (seed + counter) * -7046029254386353131    # 0x9E3779B97F4A7C15, from the golden ratio
    x = (x ^ shifted(x, 30)) * -4658895280553007687            # 0xBF58476D1CE4E5B9
    x = (x ^ shifted(x, 27)) * -7723592293110705685            # 0x94D049BB133111EB
    bits = (x ^ shifted(x, 31)) & (1 << 63) - 1
    return (bits.float() * 2.0**-63).clamp(max=1 - 2.0**-24)   # full resolution near 0


def shifted(x: Tensor, n: int) -> Tensor:
    """Logical right shift."""
    return x >> n & (1 << 64 - n) - 1


COLUMNS = ("temperature", *FILTERS, *LOGIT_FILTERS)        # stored as tensors [B, 1]


class Sampler(nn.Module):
    """Samples a batch: the parameters and seed of each row, and the logits processors.

    The traced step is fixed at construction: it has the filters that `rows` or `later` use, and
    knows whether all or some of them are greedy. List in `later` any parameters a row may get
    afterwards.
    """

    @torch.inference_mode(False)                   # normal tensors even in an inference_mode caller
    def __init__(self, rows: list[SamplingParams], n_vocab: int, device="cpu",
                 generator: torch.Generator | None = None, later: list[SamplingParams] = ()):
        """generator: draws the seed of each sequence whose parameters have none."""
        super().__init__()
        known = [*rows, *later]
        n_row = len(rows)
        self.n_vocab, self.n_row = n_vocab, n_row
        self.params = list(rows)
        self.generator, self.n_call = generator, 0
        self.all_greedy = all(p.temperature == 0 for p in known)
        self.some_greedy = any(p.temperature == 0 for p in known)
        self.most_k = max(p.top_k for p in known)
        self.filters, self.logit_filters = {}, {}
        for all_of_kind, used in ((FILTERS, self.filters), (LOGIT_FILTERS, self.logit_filters)):
            for name, keep in all_of_kind.items():
                if any(getattr(p, name) != getattr(NEUTRAL, name) for p in known):
                    used[name] = keep
        for name in COLUMNS:
            column = [[float(getattr(p, name))] for p in rows]
            self.register_buffer(name, torch.tensor(column, device=device))
        self.register_buffer("seeds", torch.zeros(n_row, 1, dtype=torch.int64, device=device))
        self.register_buffer("not_finite", torch.zeros(n_row, 1, device=device))   # set by note()
        self.processors = nn.ModuleList()
        if any(p.repetition_penalty != 1 for p in known):
            penalty = RepetitionPenalty(n_row, n_vocab, device)
            self.processors.append(penalty)
        for row in range(n_row):
            self._seed(row)

    def begin(self, row: int, prompt: list[int], params: SamplingParams | None = None) -> None:
        """Begin a new sequence in this row. params: None keeps the row's parameters.

        ValueError if params need a filter, penalty or top_k that `rows` and `later` did not list.
        """
        if params is not None:
            self._check(params)
            self.params[row] = params
            for name in COLUMNS:
                getattr(self, name)[row] = getattr(params, name)
        self.not_finite[row] = 0
        self._seed(row)
        for processor in self.processors:
            processor.begin(row, prompt, self.params[row])

    def _seed(self, row: int) -> None:
        generator, seed = self.generator, self.params[row].seed
        if seed is not None:
            generator = torch.Generator(self.seeds.device).manual_seed(seed)
        self.seeds[row] = torch.randint(1 << 62, (1,), generator=generator,
                                        device=self.seeds.device)

    def _check(self, params: SamplingParams) -> None:
        is_greedy = params.temperature == 0
        if self.all_greedy and not is_greedy:
            raise ValueError(f"all rows were to be greedy: {params}")
        if is_greedy and not self.some_greedy:
            raise ValueError(f"no row was to be greedy: {params}")
        penalties = [p for p in self.processors if isinstance(p, RepetitionPenalty)]
        if params.repetition_penalty != 1 and not penalties:
            raise ValueError(f"no row was to have a penalty: {params}")
        if params.top_k > self.most_k:
            raise ValueError(f"top_k was to be {self.most_k} at most: {params}")
        for name in (*FILTERS, *LOGIT_FILTERS):
            is_used = name in self.filters or name in self.logit_filters
            if getattr(params, name) != getattr(NEUTRAL, name) and not is_used:
                raise ValueError(f"no row was to have {name}: {params}")

    def note(self, logits: Tensor, rows=slice(None)) -> None:
        """Record on the device which of these rows have invalid logits [b, V].

        not_finite [B, 1] is 0 as long as a row's logits are finite, or -inf for some tokens. It
        becomes NaN for good once a logit is NaN or +inf, or all are -inf. The caller reads it
        together with the tokens.
        """
        best = logits.amax(-1, keepdim=True)
        self.not_finite[rows] += best - best       # inf - inf is NaN

    def observe(self, token: Tensor, rows: Tensor | None = None) -> None:
        """token [b, 1] was generated in these rows [b]; None: in all."""
        for processor in self.processors:
            if rows is None:
                processor.observe(token)
            else:
                processor.observe(token, rows)

    def end(self, row: int) -> None:
        """The row's sequence has ended."""
        for processor in self.processors:
            processor.end(row)

    def follows_drafts(self, row: int) -> bool:
        """Whether drafts of this row can be verified: each processor that it uses follows them."""
        return all(processor.follows_drafts for processor in self.processors
                   if processor.users is None or row in processor.users)

    def noise(self, rows, pos: Tensor, ids: Tensor | None = None, draft: bool = False) -> Tensor:
        """Exp(1) noise for the candidates ids [b, C], or the whole vocabulary [b, V], that may
        follow pos [1] or [b, 1] in these rows.

        A function of the row's seed, the position and the token id, so it does not depend on the
        engine or on other rows. draft: noise for the draft model.
        """
        if self.all_greedy:                        # nothing to draw
            return torch.ones(1, 1, device=self.seeds.device)
        if ids is None:
            ids = torch.arange(self.n_vocab, device=self.seeds.device)
        return exponential(uniform(self.seeds[rows], self.counter(pos.view(-1, 1), draft) + ids))

    def chance(self, rows, pos: Tensor) -> Tensor:
        """Uniform in [0, 1) for these rows at each of pos [k] or [b, k]: decides if a draft is
        accepted."""
        return uniform(self.seeds[rows], self.counter(pos, True) + self.n_vocab)

    def counter(self, pos: Tensor, draft: bool) -> Tensor:
        """The counter of token 0 at a position, far from the counters of all other positions."""
        return (2 * pos + draft) * 0x632BE59BD9B4E019

    def processed(self, logits: Tensor, rows=slice(None),
                  draft_tokens: Tensor | None = None) -> Tensor:
        """Apply the processors and the logit filters to logits [b, V] of these rows.

        draft_tokens: see RepetitionPenalty.
        """
        for processor in self.processors:
            logits = processor(logits, rows, draft_tokens)
        for name, keep in self.logit_filters.items():
            logits = torch.where(keep(logits, getattr(self, name)[rows]), logits, -torch.inf)
        return logits

    def distribution(self, logits: Tensor, rows=slice(None),
                     shortlist: int | None = None) -> tuple[Tensor, Tensor | None]:
        """processed() logits [b, V] of these rows -> probs [b, C] of the candidates and their token
        ids; ids None: the whole vocabulary.

        A greedy row has one token of probability 1. Temperature, top-k, top-p and min-p are applied
        in transformers' order. shortlist: consider only this many of the most likely tokens; no row
        may be greedy. The shortlist was long enough if its last probability is 0.
        """
        if self.all_greedy:
            ids = logits.argmax(-1, keepdim=True)
            return torch.ones_like(ids, dtype=torch.float32), ids
        temperature, ids, everything = self.temperature[rows], None, logits
        if shortlist is not None:
            logits, ids = logits.topk(shortlist)
        elif self.some_greedy:
            best = logits.argmax(-1, keepdim=True)
            one_hot = torch.full_like(logits, -torch.inf).scatter(1, best, 0.0)
            logits = torch.where(temperature == 0, one_hot, logits)
        best = logits.amax(-1, keepdim=True)
        cool = temperature.clamp(min=1e-20)
        probs = torch.softmax((logits - best) / cool, dim=-1)  # tiny temperatures too
        if shortlist is not None and not self.top_k[rows].all():
            mass = [((t - best) / cool).logsumexp(-1, keepdim=True) for t in (logits, everything)]
            probs = probs * (mass[0] - mass[1]).exp()          # normalize by the whole vocabulary
        cut_short = None
        for name, keep in self.filters.items():
            value = getattr(self, name)[rows]
            stays = keep(probs, value, self.most_k) if name == "top_k" else keep(probs, value)
            if name == "top_k" and shortlist is not None:
                cut_short = stays[:, -1:] & (value > 0)        # ties with the k-th are missing
            probs = renormalized(probs, stays, value == getattr(NEUTRAL, name))
        if cut_short is not None:
            probs[:, -1:] = torch.where(cut_short, 1.0, probs[:, -1:])
        return probs, ids

    def sample(self, logits: Tensor, rows, pos: Tensor) -> Tensor:
        """logits [b, V] of these rows at pos [1] or [b, 1] -> the next token [b, 1]."""
        probs, ids = self.distribution(self.processed(logits, rows), rows)
        return ids if self.all_greedy else draw(probs, ids, self.noise(rows, pos, ids))

    def forward(self, logits: Tensor, rows=slice(None), pos: Tensor | None = None) -> Tensor:
        """Like sample(). pos None: each call counts as the next position."""
        if pos is None:
            pos = torch.tensor([self.n_call], device=self.seeds.device)
            self.n_call += 1
        return self.sample(logits, rows, pos)
