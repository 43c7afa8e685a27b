"""The benchmarked engines, built from generate's public functions.

Only this file and drafts.py know the API of generate, speculate and sampling. Engines share
weights; each compiles its own model over them.

    tokens, times = Engine("compile", model, prompts, workload, tokenizer).run(prompts, 64)
"""

import copy
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from generate import PREFILL_CHUNK, Sequence, follow, generate
from gpt_faster.bench.drafts import use_fixed_acceptance
from gpt_faster.bench.workloads import Workload
from gpt_faster.cli import batch
from gpt_faster.cli.flags import ENGINES
from gpt_faster.decoding import dflash, eagle3, mtp
from gpt_faster.decoding.engines import (
    RecomputeBatch,
    build_speculative,
    build_steps,
    measure_drafts,
    warm_up,
)
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.layers import uses_operations
from gpt_faster.kernels.cpu.linears import format_of, is_packed
from model import Transformer
from sampling import Sampler, SamplingParams

LADDER = ("recompute", "kv_cache", "sorted", "sort_free", "cuda_graph", "torch_compile", "compile",
          "compile+prefill")
NGRAM = "ngram"                                    # compile, with n-gram drafts
MTP = "mtp"                                        # compile, with drafts by an MTP head: drafts.py
EAGLE3 = "eagle3"                                  # likewise, by an EAGLE-3 drafter
DFLASH = "dflash"                                  # likewise, by a DFlash drafter
DRAFTING = {NGRAM: 8, MTP: mtp.MAX_DRAFT, EAGLE3: eagle3.MAX_DRAFT, DFLASH: 15}    # max drafts
PUBLISHED_ACCEPTANCE = {MTP: mtp.PUBLISHED_ACCEPTANCE, EAGLE3: eagle3.PUBLISHED_ACCEPTANCE,
                        DFLASH: dflash.PUBLISHED_ACCEPTANCE}
SAMPLERS = ("sorted", "sort_free")
GREEDY = SamplingParams(temperature=0)
TOP_P = SamplingParams(temperature=0.8, top_p=0.95)      # for comparing the samplers
BF16_ROUNDING = {                                  # native.has_bf16() ->
    True: "bfloat16 activations",
    False: "14-bit weights and activations in matmuls of more than 32 rows",
}


def share_weights(model: Transformer) -> Transformer:
    """A new model over the same weights, so that each engine can compile its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def has_our_kernels(name: str) -> bool:
    return name in DRAFTING or name.startswith("compile")


def compiled_layout_bytes(name: str, model: Transformer) -> int:
    """Bytes of the packed weight copy that our CPU kernels make."""
    if model.freq.device.type != "cpu" or not has_our_kernels(name):
        return 0
    return sum(p.nbytes for p in model.parameters())


def keep_top_p_by_sorting(probs: Tensor, top_p: Tensor) -> Tensor:
    """sampling.keep_top_p() by sorting the whole vocabulary, as other programs do it."""
    ordered = probs.sort(-1, descending=True).values
    n_more = (ordered.cumsum(-1) - ordered < top_p)[..., 1:].sum(-1, keepdim=True)
    return probs >= ordered.gather(-1, n_more)


class Engine:
    """One engine on a model's weights, compiled and warmed up for such prompts.

    temperature: except for SAMPLERS, which use TOP_P. ValueError if the engine does not support
    the workload.
    """

    def __init__(self, name: str, model: Transformer, prompts: list[list[int]],
                 workload: Workload, tokenizer, temperature: float = 0.0,
                 draft: Transformer | None = None):
        """draft: the MTP head or the drafter, for the engines of PUBLISHED_ACCEPTANCE."""
        if workload.n_requests and name in ("recompute", *PUBLISHED_ACCEPTANCE, *SAMPLERS):
            raise ValueError("takes one prompt at a time")
        if name in PUBLISHED_ACCEPTANCE and temperature:
            raise ValueError("needs an expected text: temperature 0")
        self.model = share_weights(model)
        self.draft = share_weights(draft) if name in PUBLISHED_ACCEPTANCE else None
        self.tokenizer = tokenizer
        self.sampling_params = TOP_P if name in SAMPLERS else SamplingParams(temperature)
        self.seed = 0
        n_rows = 0 if name == "recompute" else workload.batch_size
        self.model.setup_cache(n_rows, workload.n_positions(), PREFILL_CHUNK,
                               max_rejected=DRAFTING.get(name, 0))
        self.batch = self._build_batch(name, workload)
        self.compile_s = None
        if has_our_kernels(name) or name in ("torch_compile", "cuda_graph"):
            start = time.perf_counter()
            self._warm_up(name, prompts, workload)
            self.compile_s = time.perf_counter() - start

    def _build_batch(self, name: str, workload: Workload) -> RowsBatch | RecomputeBatch:
        engine = "compile" if name in DRAFTING else name.removesuffix("+prefill")
        engine = engine if engine in ENGINES else "kv_cache"
        steps = build_steps(self.model, engine, name.endswith("+prefill"))
        generator = torch.Generator(self.model.freq.device)
        rows = [self.sampling_params] * workload.batch_size
        sampler = build_sampler(self.model, rows, generator)
        if name in SAMPLERS:
            sampler = Sampler(rows, self.model.cfg.vocab_size, self.model.freq.device, generator)
        if name == "sorted":
            sampler.filters["top_p"] = keep_top_p_by_sorting
        if name == "recompute":
            return RecomputeBatch(self.model, sampler, steps, workload.n_positions())
        if name in DRAFTING:
            return build_speculative(self.model, sampler, steps, engine, DRAFTING[name],
                                     fixed=False, draft=self.draft)
        return RowsBatch(self.model, sampler, steps)

    def _warm_up(self, name: str, prompts: list[list[int]], workload: Workload) -> None:
        first = 1 if workload.n_requests else workload.n_prompt + 1
        lengths = range(first, workload.n_prompt + workload.n_new)
        warm_up(self.batch, prompts[:workload.batch_size], lengths)
        if name in DRAFTING:
            measure_drafts(self.batch, workload.n_prompt + 1)
        if acceptance := PUBLISHED_ACCEPTANCE.get(name):
            use_fixed_acceptance(self.batch, prompts, workload.n_new, acceptance)

    @property
    def version(self) -> str | None:
        """The precision of matmuls, or None if they round nothing."""
        if not uses_operations(self.model):
            return None
        packed = [m for m in self.model.modules() if is_packed(m)]
        is_exact = self.model.dtype == torch.float32
        kinds = {format_of(m.packed, m.scales) for m in packed if m.scales is not None}
        if not kinds:
            return None if is_exact else BF16_ROUNDING[native.has_bf16()]
        if is_exact or all(native.activation_bits(kind) == 16 for kind in kinds):
            return "16-bit activations"
        amx = ", bfloat16 in those of more than 48 rows" if native.has_amx() else ""
        return f"8-bit activations in multi-row matmuls{amx}, 16-bit elsewhere"

    @property
    def is_greedy(self) -> bool:
        return self.sampling_params == GREEDY

    @property
    def is_repeatable(self) -> bool:
        """Whether each run generates the same tokens: not at other temperatures."""
        return self.sampling_params in (GREEDY, TOP_P)

    def tokens(self, prompts: list[list[int]], n_new: int) -> Iterator[Tensor]:
        """Yield each step's tokens [B, 1], on the device."""
        self.batch.sampler.generator.manual_seed(self.seed)
        return generate(self.batch, prompts, n_new)

    def run(self, prompts: list[list[int]], n_new: int) -> tuple[list[list[int]], list[float]]:
        """-> each row's new tokens; the time before the first step and after each token."""
        sequences = [Sequence(self.tokenizer, []) for _ in prompts]
        if not self.is_repeatable:
            self.seed += 1                         # new samples in each run
        times, interrupted = follow(self.tokens(prompts, n_new), sequences, None)
        if interrupted:
            raise KeyboardInterrupt
        return [sequence.ids for sequence in sequences], times

    def serve(self, prompts: list[list[int]], max_new_tokens: list[int], n_slots: int) -> dict:
        """Run different prompts, n_slots at a time -> ids, total_s, request_s, first_s, as a peer.

        All but total_s are lists in the order of the prompts.
        """
        work = [Generation(self.tokenizer, prompt, max_new=n_new)
                for prompt, n_new in zip(prompts, max_new_tokens)]
        start = time.perf_counter()
        for _ in batch.serve(self.batch, work):
            pass
        total_s = time.perf_counter() - start
        return dict(ids=[each.ids for each in work], total_s=total_s,
                    request_s=[each.last_s - each.start_s for each in work],
                    first_s=[each.first_s - each.start_s for each in work])

    def cache_bytes(self) -> int:
        """KV cache bytes, and the weights of a drafter."""
        layers = [*self.model.layers, *(self.draft.layers if self.draft else ())]
        n_bytes = sum(t.nbytes for layer in layers for t in layer.attn.buffers())
        if self.draft:
            shared = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
            n_bytes += sum(p.nbytes for p in self.draft.parameters()
                           if p.untyped_storage().data_ptr() not in shared)
            n_bytes += sum(t.nbytes for t in self.model.hidden.buffers())
        return n_bytes
