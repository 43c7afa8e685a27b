"""A sampler whose noise a compiled step makes itself, from a seed and the token's position.

torch's generators cannot be asked within a CUDA graph, and asking them before each is three
kernels more than the step. The noise of a token does not depend on how its step is run: eager,
compiled and recomputed tokens are the same. A compiled step draws in one kernel, where it may.
"""

import torch
from torch import Tensor

import sampling
from gpt_faster.kernels.as_read import unknown_functions
from gpt_faster.kernels.cuda.draw import FILTERS, draw
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.kernels.private import is_compiling
from sampling import Sampler

TINY = torch.finfo(torch.float32).tiny


class DeviceSampler(Sampler):
    """As Sampler, but draw_noise() has nothing to do."""

    @torch.inference_mode(False)
    def __init__(self, rows, *args, **kwargs):
        super().__init__(rows, *args, **kwargs)
        seeds = torch.zeros(len(rows), 1, dtype=torch.int64, device=self.noise.device)
        self.register_buffer("seeds", seeds)
        arrivals = torch.zeros(len(rows), dtype=torch.int32, device=seeds.device)
        self.register_buffer("arrivals", arrivals)
        some_k = self.n_candidates < self.n_vocab or "top_k" in self.filters
        of_some_k = some_k and "top_p" in self.filters         # then its mass is of the top k
        functions = [Sampler, sampling.draw, *self.filters.values()]
        self.in_one_kernel = (self.n_candidates > 1 and self.filters.keys() <= FILTERS
                              and not self.logit_filters and not of_some_k
                              and not unknown_functions(functions))

    def begin(self, row, prompt, params=None) -> None:
        super().begin(row, prompt, params)
        self.seeds[row] = torch.randint(1 << 62, (1,), generator=self.generator_of(row),
                                        device=self.seeds.device)

    def draw_noise(self, rows=None) -> None:
        pass

    def noise_at(self, rows, pos=None, draft=False) -> Tensor:
        """Exp(1) noise [b, V] from the row's seed, the position, and who asks."""
        column = torch.arange(self.n_vocab, device=self.seeds.device)
        bits = mixed(mixed(self.seeds_at(rows, pos) + draft) + column) & (1 << 63) - 1
        uniform = (bits.float() * 2.0**-63).clamp(max=1 - 2.0**-24)        # fine steps near 0
        return (-torch.log1p(-uniform)).clamp(min=TINY)

    def seeds_at(self, rows, pos: Tensor) -> Tensor:
        return self.seeds[rows] + 2 * pos.view(-1, 1)          # [b, 1]

    def sample(self, logits, rows=slice(None), pos=None) -> Tensor:
        if not (is_compiling() and self.in_one_kernel and has_kernels(logits.device)):
            return super().sample(logits, rows, pos)
        for processor in self.processors:
            logits = processor(logits, rows)
        params = (getattr(self, name)[rows] for name in ("temperature", "top_k", "top_p", "min_p"))
        return draw(logits, *params, self.seeds_at(rows, pos), self.arrivals[:len(logits)])


def mixed(x: Tensor) -> Tensor:
    """SplitMix64 of x int64, for numbers that follow each other: each bit depends on all."""
    x = x * -7046029254386353131                   # 0x9E3779B97F4A7C15, the golden ratio's
    x = (x ^ shifted(x, 30)) * -4658895280553007687            # 0xBF58476D1CE4E5B9
    x = (x ^ shifted(x, 27)) * -7723592293110705685            # 0x94D049BB133111EB
    return x ^ shifted(x, 31)


def shifted(x: Tensor, n: int) -> Tensor:
    """To the right, and zeros come in."""
    return x >> n & (1 << 64 - n) - 1
