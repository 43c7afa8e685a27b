"""RoPE's frequencies, and how they are stretched to a context longer than the one trained on.

Owns what transformers calls rope_scaling; model.py has the turning.

    freq = rope_frequencies(rope, head_dim, length)            # radians per position, [H / 2]
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the base, and how its frequencies are stretched to a longer context."""

    theta: float = 10000.0
    kind: str = "default"                          # linear | dynamic | llama3 | yarn | none
    factor: float = 1.0
    low_freq_factor: float = 1.0                   # llama3, yarn (beta_slow, beta_fast): waves that
    high_freq_factor: float = 4.0                  # turn less often than low in the original
    original_context: int = 8192                   # context are stretched, more than high kept
    truncate: bool = True                          # yarn: round the ends of the ramp in between
    amplitude: float = 1.0                         # of cos and sin (yarn, longrope)
    partial: float = 1.0                           # the share of a head that turns
    divisors: tuple[float, ...] | None = None      # one per frequency (longrope, GGUF files)
    long_divisors: tuple[float, ...] | None = None # the same, beyond original_context


def rope_frequencies(rope: Rope, head_dim: int, length: int = 0) -> Tensor:
    """Radians per position, fp32 [H / 2] on CPU, for sequences of `length` at most."""
    n = int(head_dim * rope.partial)               # the rest of a head stands still
    exponent = torch.arange(0, n, 2, dtype=torch.int64, device="cpu").float() / n
    freq = stretch(1.0 / dynamic_theta(rope, n, length) ** exponent, rope, length)
    return F.pad(freq, (0, head_dim // 2 - n // 2))


def dynamic_theta(rope: Rope, n: int, length: int) -> float:
    """The base for sequences of `length` at most; n: how many entries of a head turn."""
    if rope.kind != "dynamic" or length <= rope.original_context:
        return rope.theta
    stretched = rope.factor * length / rope.original_context - rope.factor + 1
    return rope.theta * stretched ** (n / (n - 2))


def stretch(freq: Tensor, rope: Rope, length: int) -> Tensor:
    """Plain frequencies [n / 2], fp32 on a CPU -> those for sequences of `length` at most.

    As transformers' modeling_rope_utils, where "dynamic" and "longrope" follow the length.
    """
    if rope.divisors is not None:
        use_long = rope.long_divisors and length > rope.original_context
        return freq / torch.tensor(rope.long_divisors if use_long else rope.divisors, device="cpu")
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(freq, rope)
    if rope.kind == "yarn":
        return _yarn(freq, rope)
    if rope.kind == "none":
        return torch.zeros_like(freq)
    assert rope.kind in ("default", "dynamic"), f"unknown kind of RoPE: {rope.kind}"
    return freq


def _llama3(freq: Tensor, rope: Rope) -> Tensor:
    turns = rope.original_context * freq / (2 * math.pi)   # full turns over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    unchanged = ((turns - low) / (high - low)).clamp(0, 1)
    return unchanged * freq + (1 - unchanged) * freq / rope.factor


def _yarn(freq: Tensor, rope: Rope) -> Tensor:
    """As llama3, but a ramp over the index."""
    n = 2 * len(freq)

    def index_of(turns):
        waves = rope.original_context / (turns * 2 * math.pi)
        return n * math.log(waves) / (2 * math.log(rope.theta))

    low, high = index_of(rope.high_freq_factor), index_of(rope.low_freq_factor)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    ramp = (torch.arange(n // 2, device="cpu") - low) / (high - low or 0.001)
    share = ramp.clamp(0, 1)
    return (1 - share) * freq + share * freq / rope.factor
