"""From logits to tokens: each row's parameters, the filters, and the draw.

It knows neither the model nor the tokenizer. Rows of one batch may differ in every parameter:
these are tensors, so that a compiled step serves any of them. To add a filter, give SamplingParams
a field whose default changes nothing, RANGES its values, and FILTERS the function that says which
tokens stay; LOGIT_FILTERS, where it needs logits and not probabilities. What depends on the tokens
so far is a logits processor, as RepetitionPenalty.

    sampler = Sampler([SamplingParams(temperature=0.8)] * B, n_vocab)
    token = sampler(logits)                        # [B, V] -> [B, 1], without a host sync
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Range(NamedTuple):
    """The values that a parameter may have."""

    kind: type
    minimum: float
    maximum: float
    above: bool = False                            # the minimum itself is not allowed

    def check(self, value):
        """-> the value. ValueError says what it may be."""
        is_enough = value > self.minimum if self.above else value >= self.minimum
        if not (is_enough and value <= self.maximum):          # NaN is neither
            least = f"{'above' if self.above else 'at least'} {self.minimum}"
            raise ValueError(f"must be {least}, at most {self.maximum}, got {str(value)[:40]}")
        return value


# Flags, JSON lines, requests and a model's generation_config.json ask this table. Its values fit
# into fp32 and int64, and leave the logits finite.
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
    """How to sample a row. Defaults are neutral: the model's own distribution.

    ValueError names a value that is not in its range.
    """

    temperature: float = 1.0                       # 0: greedy
    top_k: int = 0                                 # 0: off
    top_p: float = 1.0                             # 1: off; arXiv 1904.09751
    min_p: float = 0.0                             # 0: off; arXiv 2407.01082
    repetition_penalty: float = 1.0                # 1: off; arXiv 1909.05858
    seed: int | None = None                        # of this row alone; None: the batch's generator
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
# At least one must stay in every row. probs sum to 1 over what the filters before have kept.

def keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    ordered = probs.sort(-1, descending=True).values
    n = probs.shape[-1]
    last = (top_k.long().clamp(max=n) - 1) % n     # 0, off: the very last
    return probs >= ordered.gather(-1, last)


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """The fewest likeliest tokens that have top_p together, and all that tie with the last.

    On a GPU gpt_faster/kernels/cuda/sort_free.py stands in for it (gpt_faster/decoding/engines.py).
    """
    ordered = probs.sort(-1, descending=True).values
    mass_above = ordered.cumsum(-1) - ordered
    n_more = (mass_above < top_p)[..., 1:].sum(-1, keepdim=True)       # than one
    return (probs >= ordered.gather(-1, n_more)) | (top_p >= 1)


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs >= min_p * probs.amax(-1, keepdim=True)


FILTERS = {"top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p}  # in this order


# ---- Filters that see logits [B, V]: after the processors, before the temperature ----------------

def keep_top_n_sigma(logits: Tensor, n: Tensor) -> Tensor:
    """Those at most n standard deviations below the best; n [B, 1], 0: all.

    The deviation is that of the logits that are finite: what a grammar forbids does not count.
    """
    allowed = logits > -torch.inf
    count = allowed.sum(-1, keepdim=True)
    mean = torch.where(allowed, logits, 0).sum(-1, keepdim=True) / count
    variance = torch.where(allowed, logits - mean, 0).square().sum(-1, keepdim=True) / count
    least = logits.amax(-1, keepdim=True) - n * variance.sqrt()
    return (logits >= least) | (n == 0)


LOGIT_FILTERS = {"top_n_sigma": keep_top_n_sigma}


# ---- Logits processors: what a row's tokens so far do to its logits ------------------------------

class Processor(nn.Module):
    """Keeps state for each row. One of your own is appended to sampler.processors before anything
    is compiled.

    begin() is called for a new sequence in a row, observe() after each token, forward(logits, rows,
    draft_tokens) on the logits of some rows. `users`, the rows whose parameters are not neutral,
    lets a sampler that is not traced leave it out.
    """

    def __init__(self):
        super().__init__()
        self.users = set()

    def use(self, row: int, needed: bool) -> None:
        (self.users.add if needed else self.users.discard)(row)

    def begin(self, row: int, prompt: list[int], params: SamplingParams) -> None:
        """A new sequence in this row."""

    def observe(self, token: Tensor) -> None:
        """token [B, 1] has been generated."""


class RepetitionPenalty(Processor):
    """Makes the tokens of prompt and answer less likely."""

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
        self.seen[row].copy_(seen, non_blocking=True)          # pinned: a GPU is not waited for

    def observe(self, token: Tensor) -> None:
        self.seen.scatter_(1, token, True)

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        """logits [b, V] of these rows. Or, when one row's drafts are verified, [T, V]: the last
        place has seen all of draft_tokens [1, k] too, each place before it one less."""
        seen = self.seen[rows]
        if draft_tokens is not None:
            seen = seen | (counts_so_far(draft_tokens, *logits.shape) > 0)
        penalty = self.penalty[rows]
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, penalized, logits)


def counts_so_far(draft_tokens: Tensor, n_place: int, n_vocab: int) -> Tensor:
    """How often each place [n_place, V] has seen each of draft_tokens [1, k]: the last place all,
    each place before it one less."""
    one_hot = F.one_hot(draft_tokens[0], n_vocab)
    return F.pad(one_hot.cumsum(0), (0, 0, 1, 0))[-n_place:]


# ---- The draw -----------------------------------------------------------------------------------

def exponential(shape: tuple, device, generator=None) -> Tensor:
    """Exp(1) noise, never zero: 0 / 0 would win every race."""
    noise = torch.empty(shape, device=device).exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(torch.float32).tiny)


def draw(probs: Tensor, ids: Tensor | None, noise: Tensor) -> Tensor:
    """argmax(p / Exp(1)) is a draw from p: no multinomial, no sync. -> token ids [B, 1].

    noise [B, C], of the candidates; or [B, V], of all tokens.
    """
    if noise.shape[-1] > probs.shape[-1]:
        noise = noise.gather(-1, ids)
    winner = (probs / noise).argmax(-1, keepdim=True)
    return winner if ids is None else ids.gather(-1, winner)


COLUMNS = ("temperature", *FILTERS, *LOGIT_FILTERS)        # tensors [B, 1]: a value for each row


class Sampler(nn.Module):
    """The sampling of a batch: each row's parameters, its noise, and its logits processors.

    What a step computes is fixed here, by `rows` and whatever may come `later`: the filters that
    some row uses, and how many of the likeliest tokens can be drawn (1: all rows are greedy).
    """

    @torch.inference_mode(False)                   # ordinary tensors even if the caller is in it
    def __init__(self, rows: list[SamplingParams], n_vocab: int, device="cpu",
                 generator: torch.Generator | None = None, later: list[SamplingParams] = ()):
        super().__init__()
        known = [*rows, *later]
        n_row = len(rows)
        self.n_vocab = n_vocab
        self.params = list(rows)
        self.generator = generator                 # of all rows
        self.own_generators = {}                   # of those with a seed
        top_ks = {p.top_k or n_vocab for p in known if p.temperature > 0}
        self.n_candidates = min(n_vocab, max(top_ks, default=1))
        self.some_greedy = len(top_ks) > 0 and any(p.temperature == 0 for p in known)
        self.filters = {}
        for name, keep in FILTERS.items():
            values = {getattr(p, name) for p in known}
            if values != {getattr(NEUTRAL, name)}:
                self.filters[name] = keep
        if len(top_ks) < 2:                        # the candidates are the top k
            self.filters.pop("top_k", None)
        self.logit_filters = {}
        for name, keep in LOGIT_FILTERS.items():
            if any(getattr(p, name) != getattr(NEUTRAL, name) for p in known):
                self.logit_filters[name] = keep
        for name in COLUMNS:
            column = [[float(getattr(p, name))] for p in rows]
            self.register_buffer(name, torch.tensor(column, device=device))
        self.has_noise_by_token = any(p.seed is not None for p in known)   # see draw()
        n_noise = n_vocab if self.has_noise_by_token else self.n_candidates
        noise = torch.ones(n_row, n_noise, device=device)
        self.register_buffer("noise", noise)
        self.register_buffer("not_finite", torch.zeros(n_row, 1, device=device))   # see note()
        self.processors = nn.ModuleList()
        if any(p.repetition_penalty != 1 for p in known):
            penalty = RepetitionPenalty(n_row, n_vocab, device)
            self.processors.append(penalty)

    def begin(self, row: int, prompt: list[int], params: SamplingParams | None = None) -> None:
        """A new sequence in this row. params: None keeps those of the last one.

        ValueError where they need what `rows` and `later` did not announce.
        """
        if params is not None:
            self._check(params)
            self.params[row] = params
            for name in COLUMNS:
                getattr(self, name)[row] = getattr(params, name)
        params = self.params[row]
        self.not_finite[row] = 0
        self.own_generators.pop(row, None)
        if params.seed is not None:
            generator = torch.Generator(self.noise.device)
            self.own_generators[row] = generator.manual_seed(params.seed)
        for processor in self.processors:
            processor.begin(row, prompt, params)

    def _check(self, params: SamplingParams) -> None:
        n = self.n_candidates
        k = min(params.top_k or self.n_vocab, self.n_vocab)
        fits = k == n or (k < n and "top_k" in self.filters)
        if params.temperature > 0 and not fits:
            raise ValueError(f"{n} candidates were announced: {params}")
        if params.temperature == 0 and n > 1 and not self.some_greedy:
            raise ValueError(f"no row was to be greedy: {params}")
        if params.seed is not None and params.temperature > 0 and not self.has_noise_by_token:
            raise ValueError(f"no row was to have a seed of its own: {params}")
        penalties = [p for p in self.processors if isinstance(p, RepetitionPenalty)]
        if params.repetition_penalty != 1 and not penalties:
            raise ValueError(f"no row was to have a penalty: {params}")
        for name in (*FILTERS, *LOGIT_FILTERS):
            if name in self.filters or name in self.logit_filters or name == "top_k":
                continue
            if getattr(params, name) != getattr(NEUTRAL, name):
                raise ValueError(f"no row was to have {name}: {params}")

    def note(self, logits: Tensor, rows=slice(None)) -> None:
        """Remember on the device which of these rows have logits [b, V] that are none.

        not_finite [B, 1]: 0 for a row whose logits have all been numbers, or -inf for some tokens;
        NaN from then on where one was infinite or NaN, or all were -inf. Read where tokens are.
        """
        best = logits.amax(-1, keepdim=True)
        self.not_finite[rows] += best - best       # inf - inf is NaN

    def observe(self, token: Tensor) -> None:
        """token [B, 1] has been generated."""
        for processor in self.processors:
            processor.observe(token)

    def generator_of(self, row: int) -> torch.Generator | None:
        return self.own_generators.get(row, self.generator)

    def draw_noise(self, rows: list[int] | None = None) -> None:
        """New noise of these rows, or of all: before each token."""
        if self.n_candidates == 1:
            return
        n_row, n_noise = self.noise.shape
        rows = list(range(n_row)) if rows is None else rows
        device = self.noise.device
        noise = exponential((len(rows), n_noise), device, self.generator)
        for i, row in enumerate(rows):
            if own := self.own_generators.get(row):            # whatever the other rows are
                noise[i] = exponential((n_noise,), device, own)
        if rows == list(range(n_row)):
            self.noise.copy_(noise)
        else:
            self.noise[rows] = noise

    def noise_at(self, rows, pos=None, draft=False) -> Tensor:
        """For the tokens after pos [1] or [b, 1]: what draw_noise() drew, wherever they are."""
        return self.noise[rows]

    def distribution(self, logits: Tensor, rows=slice(None),
                     draft_tokens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """logits [b, V] -> probs [b, C] of the candidates, and their token ids; None: all tokens.

        rows [b]: whose logits these are; draft_tokens: see RepetitionPenalty. Greedy is one token
        of probability 1. The order is transformers': temperature, top-k, top-p, min-p.
        """
        for processor in self.processors:
            logits = processor(logits, rows, draft_tokens)
        for name, keep in self.logit_filters.items():
            logits = torch.where(keep(logits, getattr(self, name)[rows]), logits, -torch.inf)
        if self.n_candidates == 1:
            ids = logits.argmax(-1, keepdim=True)
            return torch.ones_like(ids, dtype=torch.float32), ids
        temperature, ids = self.temperature[rows], None
        if self.some_greedy:
            best = logits.argmax(-1, keepdim=True)
            one_hot = torch.full_like(logits, -torch.inf)
            one_hot = one_hot.scatter(1, best, 0.0)
            logits = torch.where(temperature == 0, one_hot, logits)
        if self.n_candidates < logits.shape[-1]:
            logits, ids = logits.topk(self.n_candidates)
        logits = logits - logits.amax(-1, keepdim=True)        # tiny temperatures too
        logits = logits / temperature.clamp(min=1e-20)
        probs = torch.softmax(logits, dim=-1)
        for name, keep in self.filters.items():
            probs = probs * keep(probs, getattr(self, name)[rows])
            probs = probs / probs.sum(-1, keepdim=True)
        return probs, ids

    def sample(self, logits: Tensor, rows=slice(None), pos=None) -> Tensor:
        """logits [b, V] of these rows, after pos [1] or [b, 1] -> token [b, 1].

        For the noise that draw_noise() drew: a step that is compiled, or recorded as a CUDA graph,
        asks no generator.
        """
        probs, ids = self.distribution(logits, rows)
        return draw(probs, ids, self.noise_at(rows, pos))

    def forward(self, logits: Tensor, rows=slice(None), pos=None) -> Tensor:
        """draw_noise() and sample(): logits [b, V] of these rows -> token [b, 1]."""
        self.draw_noise(None if isinstance(rows, slice) else rows.tolist())
        return self.sample(logits, rows, pos)
