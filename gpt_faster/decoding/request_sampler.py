"""The server's sampler: each request has its own parameters, which are not known in advance.

RequestParams adds the parameters that only requests have: count penalties, logit bias, grammar.

    sampler = build_request_sampler(model, n_row, generator, matcher_of)
"""

from dataclasses import dataclass

from gpt_faster.decoding.logits_processors import CountPenalty, LogitBias, LogitsRecorder, TokenMask
from gpt_faster.decoding.samplers import build_sampler
from model import Transformer
from sampling import RANGES, Range, Sampler, SamplingParams

REQUEST_RANGES = {**RANGES, "presence_penalty": Range(float, -2, 2),
                  "frequency_penalty": Range(float, -2, 2), "logit_bias": Range(float, -100, 100)}


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    """SamplingParams and a request's additional parameters."""

    presence_penalty: float = 0.0                  # see decoding/logits_processors.py
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: tuple[str, str] | None = None         # (kind, text), as decoding/grammar.py
    thinks_first: bool = False                     # the grammar begins after the thoughts
    logprobs: bool = False                         # record the model's logits of each token


GREEDY = RequestParams(temperature=0.0)
ANY_PARAMS = [GREEDY, RequestParams(), RequestParams(top_k=RANGES["top_k"].maximum, top_p=0.5,
                                                   min_p=0.1, repetition_penalty=1.1)]


def build_request_sampler(model: Transformer, n_row: int, generator, matcher_of,
                          max_draft: int = 0) -> Sampler:
    """A sampler whose rows may use any parameter. matcher_of: as TokenMask's; max_draft: the
    longest draft."""
    n_vocab, device = model.cfg.vocab_size, model.freq.device
    sampler = build_sampler(model, [GREEDY] * n_row, generator, ANY_PARAMS)
    sampler.processors.insert(0, LogitsRecorder(n_row, 1 + max_draft, n_vocab, device))
    sampler.processors.append(CountPenalty(n_row, n_vocab, device))
    sampler.processors.append(LogitBias(n_row, n_vocab, device))
    sampler.processors.append(TokenMask(n_row, n_vocab, device, matcher_of))
    return sampler
