"""Sampling where each request brings parameters of its own, and anything may come.

RequestParams adds what only requests have: penalties by count, a bias, a grammar. On a CPU, where
nothing is traced, RequestSampler computes in each step what the rows in it ask for and no more; on
a GPU the step has all of it.

    sampler = build_request_sampler(model, n_row, generator, matcher_of)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_faster.decoding.engines import build_sampler
from gpt_faster.decoding.logits_processors import CountPenalty, KeptLogits, LogitBias, TokenMask
from model import Transformer
from sampling import FILTERS, RANGES, Range, Sampler, SamplingParams, draw, exponential, keep_top_k

SHORTLIST = 1024                                   # of the likeliest tokens: sorted in place of all
REQUEST_RANGES = {**RANGES, "presence_penalty": Range(float, -2, 2),
                  "frequency_penalty": Range(float, -2, 2), "logit_bias": Range(float, -100, 100)}


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    """What a request may ask for beside SamplingParams."""

    presence_penalty: float = 0.0                  # see decoding/logits_processors.py
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: tuple[str, str] | None = None         # a kind of decoding/grammar.py, and its text
    logprobs: bool = False                         # keep what the model says of each token


GREEDY = RequestParams(temperature=0.0)
ANYTHING = [GREEDY, RequestParams(),
            RequestParams(top_k=1, top_p=0.5, min_p=0.1, repetition_penalty=1.1, seed=0)]


def build_request_sampler(model: Transformer, n_row: int, generator, matcher_of,
                          speculates: bool = False) -> Sampler:
    """For rows that may ask for anything; matcher_of: TokenMask's."""
    n_vocab, device = model.cfg.vocab_size, model.freq.device
    if device.type == "cpu" and not speculates:
        sampler = RequestSampler([GREEDY] * n_row, n_vocab, device, generator, ANYTHING)
    else:
        sampler = build_sampler(model, [GREEDY] * n_row, generator, ANYTHING)
    sampler.processors.insert(0, KeptLogits(n_row, n_vocab, device))
    sampler.processors.append(CountPenalty(n_row, n_vocab, device))
    sampler.processors.append(LogitBias(n_row, n_vocab, device))
    sampler.processors.append(TokenMask(n_row, n_vocab, device, matcher_of))
    return sampler


class RequestSampler(Sampler):
    """Sampler's distribution of each row, by the work that its own parameters need."""

    def draw_noise(self, rows: list[int] | None = None) -> None:
        """sample() draws it: only there is known how much."""

    def observe(self, token: Tensor) -> None:
        for processor in self.processors:
            if processor.users:
                processor.observe(token)

    def sample(self, logits: Tensor, rows=slice(None), pos=None) -> Tensor:
        index = list(range(len(logits))) if isinstance(rows, slice) else rows.tolist()
        for processor in self.processors:
            if not processor.users.isdisjoint(index):
                logits = processor(logits, rows)
        token = logits.argmax(-1, keepdim=True)
        whole, few = [], []                        # places whose rows may draw any token, or not
        for place, row in enumerate(index):
            p = self.params[row]
            if p.temperature > 0:
                filtered = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
                (few if filtered else whole).append(place)
        if whole:
            probs = torch.softmax(self._scaled(logits, whole, index), dim=-1)
            token[whole] = draw(probs, None, self._noise([index[i] for i in whole], None))
        if few:
            token[few] = self._filtered(logits, few, index)
        return token

    def _scaled(self, logits: Tensor, places: list[int], index: list[int]) -> Tensor:
        temperature = self.temperature[[index[place] for place in places]]
        logits = logits[places]
        logits = logits - logits.amax(-1, keepdim=True)        # tiny temperatures too
        return logits / temperature.clamp(min=1e-20)

    def _filtered(self, logits: Tensor, places: list[int], index: list[int]) -> Tensor:
        rows = [index[place] for place in places]
        params = [self.params[row] for row in rows]
        logits = self._scaled(logits, places, index)
        n = max(p.top_k or SHORTLIST for p in params)
        n = min(n, self.n_vocab)
        likeliest, ids = logits.topk(n)
        probs = torch.exp(likeliest - logits.logsumexp(-1, keepdim=True))  # of the whole vocabulary
        if n < self.n_vocab and not self._suffices(probs, params):
            likeliest, ids = logits.sort(dim=-1, descending=True)
            probs = torch.softmax(likeliest, dim=-1)
        top_k = self.top_k[rows]
        if any(p.top_k for p in params):
            kept = probs * keep_top_k(probs, top_k)
            probs = torch.where(top_k > 0, kept / kept.sum(-1, keepdim=True), probs)
        for name in ("top_p", "min_p"):
            if any(getattr(p, name) != getattr(GREEDY, name) for p in params):
                probs = probs * FILTERS[name](probs, getattr(self, name)[rows])
        return draw(probs, ids, self._noise(rows, ids))

    def _suffices(self, probs: Tensor, params: list[SamplingParams]) -> bool:
        """Are all tokens that may stay among these, the likeliest?"""
        mass, last = probs.sum(-1).tolist(), (probs[:, -1] / probs[:, 0]).tolist()
        return all(p.top_k or (p.top_p < 1 and m >= p.top_p) or (p.min_p > 0 and f < p.min_p)
                   for p, m, f in zip(params, mass, last))

    def _noise(self, rows: list[int], ids: Tensor | None) -> Tensor:
        """Exp(1) for each candidate. A row with a seed draws for all tokens, in any company."""
        n = self.n_vocab if ids is None else ids.shape[1]
        noise = exponential((len(rows), n), self.noise.device, self.generator)
        for i, row in enumerate(rows):
            if own := self.own_generators.get(row):
                drawn = exponential((self.n_vocab,), noise.device, own)
                noise[i] = drawn if ids is None else drawn[ids[i]]
        return noise
