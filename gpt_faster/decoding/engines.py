"""Builds the batch of an engine, by the engine's name.

recompute: no KV cache, each token recomputes all tokens so far. kv_cache: eager.
torch_compile: generate.compile_steps(), torch.compile alone. compile: kernels/compile.py.
cuda_graph: the eager step captured in a CUDA graph.

    batch = build_batch(model, "compile", [SamplingParams()], generator)
    warm_up(batch, [prompt], range(len(prompt) + 1, 256))
"""

from collections.abc import Callable

import torch
from torch import Tensor

import generate as core
import speculate
import tp
from generate import (
    Batch,
    Steps,
    decode_one_token,
    generate,
    pad_batch,
    prefill,
)
from gpt_faster.decoding import dflash, mtp
from gpt_faster.decoding.assistant import AssistantDrafter
from gpt_faster.decoding.dflash import DFlashDrafter
from gpt_faster.decoding.draft_length import DraftLengthController, draft_costs, run_round
from gpt_faster.decoding.eagle3 import Eagle3Drafter
from gpt_faster.decoding.mtp import MTPDrafter
from gpt_faster.decoding.ngram import NgramDrafter
from gpt_faster.decoding.ranks import from_rank_0
from gpt_faster.decoding.samplers import ShortlistSampler
from gpt_faster.decoding.scheduler import SpeculativeRows
from gpt_faster.kernels.compile import (
    WhileUnmodified,
    as_cuda_graph,
    assume_exclusive,
    can_switch_later,
    compile_sharing_head,
    compile_steps,
    prepare_for_cuda,
    switch_when_compiled,
)
from gpt_faster.kernels.cuda.graph import CudaGraph
from gpt_faster.kernels.guard import guard_of
from gpt_faster.kernels.modifications import is_known
from gpt_faster.layers.dflash import DFlash
from gpt_faster.layers.eagle3 import Eagle3
from gpt_faster.layers.gemma4_assistant import Assistant
from gpt_faster.layers.mtp_head import MTPHead
from gpt_faster.layers.recurrent import StateRing, max_rewind
from gpt_faster.storage import disk
from model import Transformer
from sampling import Sampler
from speculate import FixedLength, ModelDrafter, SpeculativeBatch


def build_steps(model: Transformer, engine: str, compile_prefill: bool = False,
                wait: bool = True) -> Steps:
    """The engine's prefill and decode steps, for a generation loop that alone uses the model.

    compile and torch_compile modify the model in place. wait: if the C++ compiler is still running,
    wait for it; otherwise start uncompiled and switch over when it is done.
    """
    if engine in ("compile", "torch_compile"):
        disk.set_compiler_caches()
    if engine == "compile" and not wait and can_switch_later(model):
        # prefill runs before it is compiled
        decode = switch_when_compiled(model, build_decode())
        return Steps(prefill, decode)
    if engine == "compile":
        steps = compile_steps(model, compile_prefill)
        assume_exclusive(model)
        return steps._replace(decode=build_decode()) if model.freq.device.type == "cpu" else steps
    if engine == "torch_compile":
        return core.compile_steps(model, compile_prefill)
    if engine == "cuda_graph":
        return Steps(decode=WhileUnmodified(CudaGraph(decode_one_token), decode_one_token, False))
    return Steps()


def build_decode() -> Callable:
    """decode_one_token for a CPU: greedy tokens need no Python between the layers and the choice,
    once a step's operations run again."""
    if not is_known(decode_one_token):
        return decode_one_token

    def decode(model, token, pos, kv_len, sampler) -> Tensor:
        guard, new = guard_of(model), None
        if guard and isinstance(sampler, ShortlistSampler) and sampler.takes_likeliest():
            new = guard.likeliest(token, pos, kv_len, sampler.not_finite)
        if new is None:
            return decode_one_token(model, token, pos, kv_len, sampler)
        return tp.broadcast(new)

    return decode


class RecomputeBatch(Batch):
    """No KV cache: each token recomputes all tokens so far. The reference for the other engines."""

    def __init__(self, model, sampler, steps=Steps(), max_length: int | None = None):
        super().__init__(model, sampler, steps)
        self.max_length = self.chunk = max_length or model.cfg.context

    @torch.inference_mode()
    def prefill(self, rows, prompts, n_cached=0, params=None) -> Tensor:
        """All rows at once."""
        for row, prompt in enumerate(prompts):
            self.sampler.begin(row, prompt, params[row] if params else None)
            self.length[row] = len(prompt)
        self.tokens = pad_batch(prompts, self.token.device)
        self.token = self._run_prompts(list(rows), self.tokens)
        self._set_pos()
        return self.token

    @torch.inference_mode()
    def step(self) -> Tensor:
        self.sampler.observe(self.token)
        tokens = torch.cat((self.tokens, self.tokens[:, :1]), dim=1)
        self.tokens = tokens.scatter(1, self.pos.view(-1, 1), self.token)
        self.advance(1)
        self.token = self._run_prompts(list(range(self.n_row)), self.tokens)
        return self.token


# ---- Speculation --------------------------------------------------------------------------------

def build_speculative(model: Transformer, sampler: Sampler, steps: Steps, engine: str, k: int,
                      fixed: bool, draft: Transformer | None = None) -> SpeculativeBatch:
    """draft: a draft model, an MTP head, an EAGLE-3 or DFlash drafter, Gemma 4's assistant; None:
    n-gram lookup.

    fixed: always draft k tokens, else at most k. Call it after the model's steps were built.
    ValueError if the model's recurrent states cannot rewind by k tokens (setup_cache's
    max_rejected).
    """
    if (limit := max_rewind(model)) is not None and k > limit:
        raise ValueError(f"{k} draft tokens may be rejected, but the cache can rewind by at most "
                         f"{limit}: call setup_cache with max_rejected={k}")
    as_graph = engine == "compile" and model.freq.device.type != "cpu"
    compiled = None
    if as_graph:
        compiled = as_cuda_graph
    elif engine == "torch_compile":
        compiled = core.CompiledStep
    verify = compiled(speculate.verify) if compiled else speculate.verify
    drafter, lengths = NgramDrafter(), [k, 3] if k > 3 else [k]
    if isinstance(draft, MTPHead | Eagle3):
        drafter = build_mtp_drafter(model, draft, engine, as_graph, k)
        lengths = [k, k // 2, 1]
    elif isinstance(draft, DFlash):
        drafter = build_dflash_drafter(model, draft, engine, compiled, k)
        lengths = [k, k // 2, k // 3, k // 5]
    elif isinstance(draft, Assistant):
        drafter, lengths = AssistantDrafter(model, draft), [k, k // 3] if k > 2 else [k]
    elif draft:
        min_kv_len = build_steps(draft, engine).min_kv_len
        step = speculate.draft_one_token
        drafter = ModelDrafter(draft, compiled(step) if compiled else step, max_rejected=k + 1)
        drafter.min_kv_len = min_kv_len
        drafter.is_recurrent = any(isinstance(m, StateRing) for m in draft.modules())
        lengths = [k, k // 3] if k > 2 else [k]
    lengths = [n for n in dict.fromkeys(lengths) if n]
    length = FixedLength(k) if fixed else DraftLengthController(lengths)
    # torch.compile would compile a step for each number of rows in use
    kind = SpeculativeBatch if engine == "torch_compile" else SpeculativeRows
    return kind(model, sampler, steps, drafter, length, k, verify)


def build_mtp_drafter(model: Transformer, head: MTPHead | Eagle3, engine: str,
                      as_graph: bool, max_draft: int) -> MTPDrafter:
    """Join the head to the model's embedding and output layer, and compile it as the model is."""
    head.join(model)
    is_eagle = isinstance(head, Eagle3)
    drafter = (Eagle3Drafter if is_eagle else MTPDrafter)(model, head, max_draft=max_draft)
    if as_graph:
        drafter.min_kv_len = prepare_for_cuda(head)
        drafter.step = as_cuda_graph(mtp.draft_one_token)
    elif engine == "compile":
        compile_sharing_head(head, is_eagle and head.cfg.draft_vocab > 0)
    return drafter


def build_dflash_drafter(model: Transformer, draft: DFlash, engine: str,
                         compiled: Callable | None, max_draft: int) -> DFlashDrafter:
    """Join the drafter to the model's embedding and output layer, and compile it as the model is.

    compiled: compiles a step, for one graph per block length; None: eager, or operations.
    """
    draft.join(model)
    step = compiled(dflash.draft_block) if compiled else dflash.draft_block
    drafter = DFlashDrafter(model, draft, step, max_draft + 1 if compiled else None)
    if compiled is as_cuda_graph:
        drafter.min_kv_len = prepare_for_cuda(draft)
    elif engine == "compile":
        compile_sharing_head(draft, draft.cfg.own_head)
    return drafter


def rewind(batch: Batch) -> int:
    """How many of a row's last cached tokens a new prompt may replace while the rest stays valid.

    A row may be written beyond its known tokens: by rejected drafts, and by a GPU's next step.
    """
    model, n_beyond = batch.model, batch.n_beyond
    if (limit := max_rewind(model)) is not None:
        return limit - n_beyond
    if model.rings:
        return model.longest_call - 1 - (n_beyond if n_beyond > 1 else 0)
    return batch.max_length


def measure_drafts(batch: SpeculativeBatch, n: int, acceptance: float = 1.0
                   ) -> dict[int, dict[int, float]]:
    """Measure draft lengths and give the batch a DraftLengthController, for this acceptance rate ->
    number of rows -> cost of a round of each length, in plain decode steps, on rank 0's clock.

    n: tokens so far. Overwrites the caches.
    """
    widths = [batch.n_row]                         # a step on a GPU has a fixed shape
    if batch.device.type == "cpu" and isinstance(batch, SpeculativeRows):
        widths = [1 << i for i in range((batch.n_row - 1).bit_length())] + widths
    lengths = batch.draft_length.lengths
    costs = {n_row: draft_costs(batch, n, lengths, n_row) for n_row in widths}
    costs = from_rank_0(lambda: costs)
    batch.draft_length = DraftLengthController(lengths, costs, acceptance)
    for row in range(batch.n_row):
        batch.drafter.begin(row, 0)
    return costs


# ---- Warm up ------------------------------------------------------------------------------------

@torch.inference_mode()
def warm_up(batch: Batch, prompts: list[list[int]], lengths: range) -> None:
    """Compile prefill for prompts of these lengths, and decode steps at these cache lengths."""
    model, sampler, limit = batch.model, batch.sampler, batch.max_length
    if batch.steps.pad:                                    # prefill is compiled too
        next(generate(batch, prompts, 1))
        if batch.n_row > 1:                                # and the prefill of a single row
            batch.prefill([0], prompts[:1])
    kv_lens = sorted({batch.kv_len(length) for length in lengths})
    if isinstance(batch, SpeculativeBatch):
        compiles = model.freq.device.type != "cpu" or isinstance(batch.verify, core.CompiledStep)
        varies = batch.drafter.varies and compiles
        for kv_len in kv_lens:
            for k in batch.draft_length.lengths:
                n = max(2, min(kv_len, limit - 1) - k)
                for n_new in range(1, batch.max_draft + 2 if varies else 2):
                    run_round(batch, n, batch.n_row, k, n_new)
        for row in range(batch.n_row):
            batch.drafter.begin(row, 0)
    # contiguous like a decode step's result: compiled CPU code depends on the strides
    token = pad_batch(prompts, batch.token.device)[:, :1]
    token = token.clone(memory_format=torch.contiguous_format)
    pos = torch.tensor([len(prompt) for prompt in prompts], device=token.device)
    pos = pos if len(prompts) == 1 else pos[:, None]
    for kv_len in kv_lens:
        batch.steps.decode(model, token, pos, kv_len, sampler)
