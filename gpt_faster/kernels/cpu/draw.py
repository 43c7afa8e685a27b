"""Sampling as one native operation. C++: draw.h; the reference: sampling.Sampler.

    token = draw(logits, temperature, top_k, top_p, min_p, seeds)              # [B, V] -> [B, 1]
    token = likeliest(logits)                      # greedy
    note(logits, sampler.not_finite)
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


def likeliest(logits: Tensor) -> Tensor:
    """logits [B, V] fp32 -> the ids [B, 1] of the largest, the first of equal ones. Rows with NaN
    get any id."""
    token = torch.empty(logits.shape[0], 1, dtype=torch.int64)
    _run(logits, token=token)
    return token


def note(logits: Tensor, not_finite: Tensor) -> None:
    """sampling.Sampler.note() for logits [B, V] of all its rows, and not_finite [B, 1]; fp32."""
    _run(logits, not_finite=not_finite)


def _run(logits: Tensor, **pointers: Tensor) -> None:
    """The operation with these contiguous tensors, without native.Struct's checks, which take as
    long as a small operation does."""
    logits = logits.contiguous()
    op = native.Draw()
    op.kind, (op.B, op.V), op.logits = native.DRAW, logits.shape, logits.data_ptr()
    for name, t in pointers.items():
        setattr(op, name, t.data_ptr())
    native.run([ctypes.addressof(op)], n_thread=None if len(logits) > 1 else 1)
