"""Faster samplers for CPU and GPU that draw the same tokens as sampling.Sampler.

On a CPU, outside of tracing, a step does only what its rows' parameters need, and filters a
shortlist of the most likely tokens if no other can pass. Where the C++ kernels are loaded, and on a
GPU in a compiled step, one kernel filters and draws if it has all the filters. All fall back to
Sampler if functions of sampling.py were edited.

    sampler = build_sampler(model, [SamplingParams()] * B, generator)
"""

import operator

import torch
from torch import Tensor

import sampling
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.draw import draw as draw_on_cpu
from gpt_faster.kernels.cpu.draw import likeliest as likeliest_on_cpu
from gpt_faster.kernels.cpu.draw import note as note_on_cpu
from gpt_faster.kernels.cuda.draw import draw as draw_on_gpu
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.kernels.modifications import find_modified
from gpt_faster.kernels.torch_internals import is_compiling, note_once
from model import Transformer
from sampling import Sampler, SamplingParams

SHORTLIST = 1024                                   # most likely tokens, if no row has a top_k
# Filters that drop a token only together with all less likely ones. With any other filter a
# shortlist does not show whether a token outside of it may be drawn.
SHORTLIST_FILTERS = {"top_k", "top_p", "min_p"}
KERNEL_FILTERS = ["top_k", "top_p", "min_p"]       # in the order of the kernels


def build_sampler(model: Transformer, rows: list[SamplingParams], generator=None,
                  later: list[SamplingParams] = ()) -> Sampler:
    """The device's sampler. rows: parameters of each row; later: parameters a row may get
    afterwards."""
    device = model.freq.device
    kind = {"cpu": ShortlistSampler, "cuda": DeviceSampler}.get(device.type, Sampler)
    return kind(rows, model.cfg.vocab_size, device, generator, later)


def kernels_have_filters(sampler: Sampler) -> bool:
    """Whether the draw kernels know all of the sampler's filters, and apply them in its order."""
    return list(sampler.filters) == [name for name in KERNEL_FILTERS if name in sampler.filters]


def draw_args(sampler: Sampler, logits: Tensor, rows, pos: Tensor) -> tuple:
    """The arguments of the draw kernels for processed() logits."""
    params = (getattr(sampler, name)[rows] for name in ("temperature", *KERNEL_FILTERS))
    return logits, *params, sampler.seeds[rows] + sampler.counter(pos.view(-1, 1), False)


def likeliest(logits: Tensor) -> Tensor:
    """logits [b, V] on a CPU -> the ids [b, 1] of the largest, the first of equal ones."""
    if native.is_loaded() and logits.dtype == torch.float32:
        return likeliest_on_cpu(logits)
    return logits.argmax(-1, keepdim=True)


def is_unmodified(sampler: Sampler) -> bool:
    """Whether the functions of sampling.py that the samplers here replace are the known ones. A
    note says which one is not."""
    filters = {**sampler.filters, **sampler.logit_filters}.values()
    reason = find_modified([Sampler, sampling.draw, *filters])
    if reason:
        note_once(f"{reason}; sampling runs as written in sampling.py")
    return not reason


METHOD_NAMES = "sample", "processed", "distribution", "noise", "counter", "observe", "note"
METHODS = operator.attrgetter(*METHOD_NAMES)
FUNCTIONS = operator.attrgetter("draw", "renormalized", "keep_likeliest", "uniform", "exponential")


def replaced_functions(sampler: Sampler) -> list:
    """The current functions of sampling.py that the samplers here replace, for comparison."""
    return [*METHODS(Sampler), *FUNCTIONS(sampling), *sampler.filters.values(),
            *sampler.logit_filters.values()]


class ShortlistSampler(Sampler):
    """For a CPU. Skips processors that no row uses."""

    @torch.inference_mode(False)
    def __init__(self, rows, *args, **kwargs):
        super().__init__(rows, *args, **kwargs)
        self.known = replaced_functions(self) if is_unmodified(self) else None
        self.may_use_kernel = not self.all_greedy and kernels_have_filters(self)

    def falls_back(self) -> bool:
        """Whether to run Sampler's code: while traced, or if sampling.py was edited."""
        return is_compiling() or replaced_functions(self) != self.known

    def observe(self, token: Tensor, rows: Tensor | None = None) -> None:
        if rows is not None or self.falls_back():
            return super().observe(token, rows)
        for processor in self.processors:
            if processor.users is None or processor.users:
                processor.observe(token)

    def takes_likeliest(self) -> bool:
        """Are note() and sample() as here, and do they give every row the likeliest token alone?"""
        return (self.all_greedy and not self.processors and not self.logit_filters
                and type(self) is ShortlistSampler and METHODS(ShortlistSampler) == OWN_METHODS
                and vars(self).keys().isdisjoint(METHOD_NAMES) and not self.falls_back())

    def note(self, logits, rows=slice(None)) -> None:
        is_whole = isinstance(rows, slice) and logits.shape[:-1] == self.not_finite.shape[:1]
        has_kernel = native.is_loaded() and logits.dtype == torch.float32
        if not (is_whole and rows == slice(None) and has_kernel) or self.falls_back():
            return super().note(logits, rows)
        note_on_cpu(logits, self.not_finite)

    def processed(self, logits, rows=slice(None), draft_tokens=None) -> Tensor:
        if self.falls_back():
            return super().processed(logits, rows, draft_tokens)
        in_use = set(self.indices(rows))
        for processor in self.processors:
            if processor.users is None or not processor.users.isdisjoint(in_use):
                logits = processor(logits, rows, draft_tokens)
        for name, keep in self.logit_filters.items():
            if any(getattr(self.params[row], name) for row in in_use):
                value = getattr(self, name)[rows]
                logits = torch.where(keep(logits, value), logits, -torch.inf)
        return logits

    def distribution(self, logits, rows=slice(None), shortlist=None) -> tuple:
        if shortlist is not None or self.falls_back():
            return super().distribution(logits, rows, shortlist)
        params = [self.params[row] for row in self.indices(rows)]
        if all(p.temperature == 0 for p in params):
            ids = likeliest(logits)
            return torch.ones_like(ids, dtype=torch.float32), ids
        is_sorted = self.filters.keys() <= SHORTLIST_FILTERS
        if is_sorted and all(p.temperature and is_filtered(p) for p in params):
            k = max(p.top_k for p in params)
            n = k + max(32, k // 4) if k else SHORTLIST        # room for ties with the k-th
            if n < self.n_vocab:
                probs, ids = super().distribution(logits, rows, n)
                if not probs[:, -1].any():
                    return probs, ids
        return super().distribution(logits, rows)

    def sample(self, logits, rows, pos) -> Tensor:
        """Without a kernel, samples filtered, unfiltered and greedy rows separately."""
        if self.falls_back():
            return super().sample(logits, rows, pos)
        logits = self.processed(logits, rows)
        if self.all_greedy:
            return likeliest(logits)
        if self.may_use_kernel and native.is_loaded() and logits.dtype == torch.float32:
            return draw_on_cpu(*draw_args(self, logits, rows, pos))
        index = self.indices(rows)
        kinds = [is_filtered(self.params[row]) for row in index if self.params[row].temperature]
        if len(kinds) == len(index) and len(set(kinds)) == 1:
            probs, ids = self.distribution(logits, rows)
            return sampling.draw(probs, ids, self.noise(rows, pos, ids))
        token = likeliest(logits)
        for kind in set(kinds):
            places = [i for i, row in enumerate(index) if self.params[row].temperature
                      and is_filtered(self.params[row]) == kind]
            group, row_pos = torch.tensor([index[i] for i in places]), pos.view(-1, 1)
            probs, ids = self.distribution(logits[places], group)
            noise = self.noise(group, row_pos if len(row_pos) == 1 else row_pos[places], ids)
            token[places] = sampling.draw(probs, ids, noise)
        return token

    def indices(self, rows) -> list[int]:
        return list(range(self.n_row))[rows] if isinstance(rows, slice) else rows.tolist()


OWN_METHODS = METHODS(ShortlistSampler)


def is_filtered(params: SamplingParams) -> bool:
    """Whether a filter excludes tokens from the draw."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


class DeviceSampler(Sampler):
    """For a GPU."""

    @torch.inference_mode(False)
    def __init__(self, rows, *args, **kwargs):
        super().__init__(rows, *args, **kwargs)
        arrivals = torch.zeros(len(rows), dtype=torch.int32, device=self.seeds.device)
        self.register_buffer("arrivals", arrivals)
        top_p_of_top_k = {"top_k", "top_p"} <= self.filters.keys()     # not in the kernel
        self.uses_draw_kernel = (not self.all_greedy and kernels_have_filters(self)
                                 and not self.logit_filters and not top_p_of_top_k
                                 and is_unmodified(self))

    def sample(self, logits, rows, pos) -> Tensor:
        if not (is_compiling() and self.uses_draw_kernel and has_kernels(logits.device)):
            return super().sample(logits, rows, pos)
        logits = self.processed(logits, rows)
        return draw_on_gpu(*draw_args(self, logits, rows, pos), self.arrivals[:len(logits)])
