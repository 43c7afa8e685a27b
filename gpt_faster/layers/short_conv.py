"""Gated short convolutions (LFM2): a causal depthwise convolution with a gate before and after.

Replaces Attention in some layers. Its cache holds the inputs of the last n_tap - 1 tokens, in
layers/recurrent.py's ring, so its cost does not depend on the length of the text.

    b, c, h = w x;   y = wo (c * conv(b * h))
    mixer=(ShortConv(width=2048, n_tap=3),) * 2 + (None,)
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from gpt_faster.layers.part import IN, OUT, Part
from gpt_faster.layers.recurrent import StateRing, convolve


@dataclass(frozen=True)
class ShortConv(Part):
    """The layer's shape."""

    width: int                                     # channels
    n_tap: int                                     # kernel size
    bias: bool = False                             # of both projections and the convolution
    kind: str = "short_conv"                       # name in a .pth

    split = {"wb": OUT, "wc": OUT, "wx": OUT, "taps": OUT, "taps_bias": OUT, "wo": IN}

    def make(self, cfg, earlier=()) -> nn.Module:
        return ShortConvolution(cfg.dim, self)

    def shard(self, n: int) -> "ShortConv":
        """The layer of one of n ranks."""
        return replace(self, width=self.width // n)

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide."""
        return {"number of convolution channels": self.width}


class ShortConvolution(nn.Module):
    def __init__(self, dim: int, shape: ShortConv):
        super().__init__()
        self.shape, self.split = shape, (shape.width,) * 3
        self.wbcx = nn.Linear(dim, sum(self.split), bias=shape.bias)
        self.taps = nn.Parameter(torch.zeros(shape.width, shape.n_tap, dtype=torch.float32))
        self.taps_bias = None
        if shape.bias:
            self.taps_bias = nn.Parameter(torch.zeros(shape.width, dtype=torch.float32))
        self.wo = nn.Linear(shape.width, dim, bias=shape.bias)
        self.cache = None                          # without a cache, each call starts from zeros

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device,
                    max_rejected: int = 0) -> None:
        """Allocate the cache, independent of n_slot; batch_size 0 removes it."""
        self.cache = None
        if batch_size:                             # state shape (0,): it has inputs only
            self.cache = StateRing(batch_size, max_rejected, (0,), self.shape.width,
                                   self.shape.n_tap, dtype, device)

    def forward(self, x, rope, slot, mask, batch_idx=None):
        """slot: the positions. rope and mask are unused. Padding does not affect other tokens."""
        B, T, _ = x.shape
        pos = slot.expand(B, T)
        in_gate, out_gate, h = self.wbcx(x).chunk(3, dim=-1)               # [B, T, width]
        h = in_gate * h
        if self.cache is None:
            earlier = h.new_zeros(B, self.shape.n_tap - 1, h.shape[-1])
        else:
            earlier, _ = self.cache.read(pos, batch_idx)
        h = torch.cat((earlier, h), dim=1)                                 # [B, n_tap - 1 + T, …]
        y = convolve(h, self.taps, self.taps_bias)
        if self.cache is not None:
            in_order = pos == pos[:, :1] + torch.arange(T, device=x.device)
            self.cache.write(pos, in_order.sum(-1), h, [], batch_idx)
        return self.wo(out_gate * y.type_as(x))
