"""Sampling as one operator of a compiled GPU step. Kernel: triton_draw.py, math: sampling.py.

    token = draw(logits, temperature, top_k, top_p, min_p, seeds, arrivals)    # [B, V] -> [B, 1]
"""

import torch
from torch import Tensor


@torch.library.custom_op("gpt_faster::draw", mutates_args=("arrivals",))
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
         seeds: Tensor, arrivals: Tensor) -> Tensor:
    """logits [B, V] fp32, parameters [B, 1] per row (0 or 1 if off) -> token ids [B, 1].

    temperature 0: greedy. seeds [B, 1] int64: of this token's noise, from the row's seed and
    counter (sampling.uniform). arrivals [B] int32: the kernel's counters, initialized to zero and
    not changed by others.
    """
    from gpt_faster.kernels.cuda.triton_draw import launch
    return launch(logits.contiguous(), temperature, top_k, top_p, min_p, seeds, arrivals)


@draw.register_fake
def _(logits, temperature, top_k, top_p, min_p, seeds, arrivals):
    return seeds.new_empty(logits.shape[0], 1)
