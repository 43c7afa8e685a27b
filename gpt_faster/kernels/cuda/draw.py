"""Sampling as one operator of a compiled GPU step: see triton_draw.py; sampling.py has the math.

    token = draw(logits, temperature, top_k, top_p, min_p, seeds, arrivals)    # [B, V] -> [B, 1]
"""

import torch
from torch import Tensor

FILTERS = {"top_k", "top_p", "min_p"}              # that it knows


@torch.library.custom_op("gpt_faster::draw", mutates_args=("arrivals",))
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
         seeds: Tensor, arrivals: Tensor) -> Tensor:
    """logits [B, V] fp32 and each row's parameters [B, 1], 0 or 1 where off -> token ids [B, 1].

    temperature 0: the likeliest token; seeds [B, 1] int64: of this token's noise, a row's
    seed and counter (sampling.uniform); arrivals [B] int32: zeros at first, then its own.
    """
    from gpt_faster.kernels.cuda.triton_draw import launch
    return launch(logits.contiguous(), temperature, top_k, top_p, min_p, seeds, arrivals)


@draw.register_fake
def _(logits, temperature, top_k, top_p, min_p, seeds, arrivals):
    return seeds.new_empty(logits.shape[0], 1)
