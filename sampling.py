"""From logits to a token: pure functions on fp32 tensors, no state, no host sync, no sort.

It knows neither the model nor the tokenizer. Randomness comes in from outside as Exp(1) noise, so
that eager and compiled steps, and a reference that sorts, draw the same token from the same seed:

    noise = exponential(noise_shape(how, B, V), device, generator)
    token = sample(logits, noise, how)             # [B, V] -> [B, 1]
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to draw. The values here are neutral: the logits' own distribution, nothing removed."""

    temperature: float = 1.0                       # 0: greedy
    top_k: int = 0                                 # 0: off
    top_p: float = 1.0                             # 1: off
    min_p: float = 0.0                             # 0: off
    repetition_penalty: float = 1.0                # 1: off; arXiv 1909.05858


def n_candidates(how: Sampling, n_vocab: int) -> int:
    """How many tokens take part in the draw: 1 if greedy, top_k, or the vocabulary."""
    return 1 if how.temperature == 0 else min(how.top_k or n_vocab, n_vocab)


def exponential(shape: tuple, device, generator: torch.Generator | None = None) -> Tensor:
    """Exp(1) noise, never zero: 0 / 0 would win every race."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.empty(shape, device=device).exponential_(generator=generator).clamp_(min=tiny)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """True where top-p keeps a token: the mass strictly above it is < top_p. [B, V] -> [B, V].

    Bisection finds the smallest threshold with less than top_p above it. Positive floats order like
    their bit patterns, so 31 halvings of the patterns are exact, where a sort would be slow.
    """
    bits = probs.view(torch.int32)
    low = torch.zeros_like(bits[:, :1])
    high = bits.amax(-1, keepdim=True)                                     # nothing is above it
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = (probs * (bits > middle)).sum(-1, keepdim=True) < top_p
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return bits >= high


def truncate(logits: Tensor, how: Sampling) -> tuple[Tensor, Tensor | None]:
    """The distribution to draw from, up to a factor: probs [B, C] and their token ids [B, C].

    Greedy is one candidate of probability 1. Ids are None where the candidates are the vocabulary.
    The order is transformers': temperature, top-k, top-p, min-p.
    """
    if how.temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
        return torch.ones_like(ids, dtype=torch.float32), ids
    k = n_candidates(how, logits.shape[-1])
    logits, ids = logits.topk(k) if k < logits.shape[-1] else (logits, None)
    logits = logits.float() - logits.amax(-1, keepdim=True)                # tiny temperatures too
    probs = torch.softmax(logits / max(how.temperature, 1e-20), dim=-1)    # over the survivors
    keep = probs >= how.min_p * probs.amax(-1, keepdim=True)
    if how.top_p < 1:
        above = probs.cumsum(-1) - probs                                   # topk is sorted
        keep = keep & (nucleus(probs, how.top_p) if ids is None else above < how.top_p)
    return probs * keep, ids


def draw(probs: Tensor, ids: Tensor | None, noise: Tensor) -> Tensor:
    """argmax(p / Exp(1)) is a draw from p: no multinomial, no sync. -> token ids [B, 1]."""
    winner = (probs / noise).argmax(-1, keepdim=True)
    return winner if ids is None else ids.gather(-1, winner)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make every token of `seen` [B, V] less likely."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample(logits: Tensor, noise: Tensor, how: Sampling, seen: Tensor | None = None) -> Tensor:
    """logits [B, V], noise [B, n_candidates] -> token [B, 1]."""
    if seen is not None:
        logits = penalize(logits, seen, how.repetition_penalty)
    return draw(*truncate(logits, how), noise)
