"""RoPE that a Llama does not have: of part of a head, with factors by frequency, or none.

Owns what of transformers' rope_scaling model.Rope does not: longrope, partial_rotary_factor, and
the factors that a GGUF states.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Rope


@dataclass(frozen=True)
class RopeVariant(Rope):
    """kind "none": nothing turns. divisors take the place of what `kind` does to frequencies."""

    partial: float = 1.0                           # the share of a head that turns
    divisors: tuple[float, ...] | None = None      # one per frequency (longrope, GGUF files)
    long_divisors: tuple[float, ...] | None = None # the same, beyond original_context
    head_dim: int | None = None                    # of its layers; None: the model's

    def frequencies(self, head_dim: int, length: int = 0) -> Tensor:
        """As model.Rope; narrower heads than the model's widest have fewer."""
        head_dim = self.head_dim or head_dim
        n = n_rotated(self, head_dim)                # the rest of a head stands still
        if self.divisors is not None:
            use_long = self.long_divisors and length > self.original_context
            divisors = self.long_divisors if use_long else self.divisors
            freq = self.unstretched(n, length) / torch.tensor(divisors, device="cpu")
        elif self.kind == "none":
            freq = torch.zeros_like(self.unstretched(n, length))
        else:
            freq = super().frequencies(n, length)
        return F.pad(freq, (0, head_dim // 2 - n // 2))

    def amplitudes(self, head_dim: int) -> Tensor:
        """1 where a head stands still."""
        head_dim = self.head_dim or head_dim
        amplitude = torch.ones(head_dim // 2, device="cpu")
        amplitude[:n_rotated(self, head_dim) // 2] = self.amplitude
        return amplitude


def n_rotated(rope: Rope, head_dim: int) -> int:
    """How many numbers of a head it turns."""
    return int(head_dim * rope.partial) if isinstance(rope, RopeVariant) else head_dim


def rope_from_fields(facts: dict) -> Rope:
    """A Rope of these fields, or a RopeVariant where they say what only that one has."""
    plain = {field.name for field in fields(Rope)}
    more = {f.name: f.default for f in fields(RopeVariant) if f.name not in plain}
    stated = {name: value for name, value in facts.items() if name in more}
    if facts.get("kind") == "none" or any(more[name] != v for name, v in stated.items()):
        return RopeVariant(**facts)
    return Rope(**{name: value for name, value in facts.items() if name not in stated})
