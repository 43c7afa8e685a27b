"""Layers whose heads and feed-forward widths are not the model's (Gemma 4).

    cfg = own_widths(cfg, layer=5)                 # what the parts of that layer read
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Widths:
    """One layer's, in place of what ModelConfig says under these names."""

    head_dim: int
    n_kv_head: int
    ffn_dim: int


def shared_by(n: int, widths: tuple) -> tuple:
    """ModelConfig.widths for one of n ranks; a key/value head may be several ranks'."""
    return tuple(own and Widths(own.head_dim, max(1, own.n_kv_head // n), own.ffn_dim // n)
                 for own in widths)


def own_widths(cfg, layer: int):
    """A model's config with the layer's widths in it."""
    own = cfg.widths[layer % len(cfg.widths)]
    return cfg if own is None else replace(cfg, **vars(own))
