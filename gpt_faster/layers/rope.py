"""RoPE variants: on part of a head, with a divisor per frequency, or none.

Covers what model.Rope does not of transformers' rope_scaling: longrope, partial_rotary_factor, and
the frequency factors of GGUF files.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Rope


@dataclass(frozen=True)
class RopeVariant(Rope):
    """kind "none": no rotation. divisors replace the scaling of frequencies by `kind`."""

    partial: float = 1.0                           # rotated fraction of a head
    divisors: tuple[float, ...] | None = None      # one per frequency (longrope, GGUF files)
    long_divisors: tuple[float, ...] | None = None # for lengths beyond original_context
    head_dim: int | None = None                    # of the layers that use it; None: the model's

    def frequencies(self, head_dim: int, length: int = 0) -> Tensor:
        """As model.Rope, zero for unrotated entries, [head_dim / 2] of these layers."""
        head_dim = self.head_dim or head_dim
        n = n_rotated(self, head_dim)
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
        """Factors of cos and sin: 1 for unrotated entries."""
        head_dim = self.head_dim or head_dim
        amplitude = torch.ones(head_dim // 2, device="cpu")
        amplitude[:n_rotated(self, head_dim) // 2] = self.amplitude
        return amplitude


def n_rotated(rope: Rope, head_dim: int) -> int:
    """How many entries of a head are rotated."""
    return int(head_dim * rope.partial) if isinstance(rope, RopeVariant) else head_dim


def rope_from_fields(values: dict) -> Rope:
    """A Rope with these fields, or a RopeVariant if one of its own fields is not the default."""
    plain = {field.name for field in fields(Rope)}
    defaults = {f.name: f.default for f in fields(RopeVariant) if f.name not in plain}
    extra = {name: value for name, value in values.items() if name in defaults}
    if values.get("kind") == "none" or any(defaults[name] != v for name, v in extra.items()):
        return RopeVariant(**values)
    return Rope(**{name: value for name, value in values.items() if name not in extra})
