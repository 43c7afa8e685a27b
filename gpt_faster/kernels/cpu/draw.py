"""Sampling as one native operation. C++: draw.h; the reference: sampling.Sampler.

    token = draw(logits, temperature, top_k, top_p, min_p, seeds)              # [B, V] -> [B, 1]
"""

import ctypes

import torch
from torch import Tensor

from gpt_faster.kernels.cpu import native


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
         seeds: Tensor) -> Tensor:
    """logits [B, V] fp32, parameters [B, 1] of each row (0 or 1 if off) -> token ids [B, 1].

    temperature 0: greedy. seeds [B, 1] int64: of this token's noise, from the row's seed and
    counter (sampling.uniform).
    """
    token = torch.empty_like(seeds)
    op = native.Draw(
        kind=native.DRAW, B=logits.shape[0], V=logits.shape[1], logits=logits.contiguous(),
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds, token=token)
    native.run([ctypes.addressof(op)], n_thread=None if len(logits) > 1 else 1)
    return token
