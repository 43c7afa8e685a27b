"""Loads, compiles and warms up a model with its batch: the base of the commands and the server.

Owns the memory check, the choice of a drafter, and the warm-up. It reads the model and speed
options only, and knows no prompts and no HTTP.

    class Session(Runtime):                        # defines how rows are sampled
        def make_sampler(self): return build_sampler(self.model, rows, self.generator)
"""

import time
from functools import partial
from pathlib import Path

import torch

import quantize
import tp
from checkpoint import Checkpoint
from generate import bucket, log, peak_memory, weight_bytes
from gpt_faster.decoding.dflash import state_bytes
from gpt_faster.decoding.engines import (
    RecomputeBatch,
    build_speculative,
    build_steps,
    measure_drafts,
    warm_up,
)
from gpt_faster.decoding.mtp import MAX_DRAFT, hidden_bytes
from gpt_faster.decoding.scheduler import RowsBatch
from gpt_faster.devices import free_memory
from gpt_faster.formats import quantize_on_load
from gpt_faster.formats.assistant import AssistantCheckpoint, is_assistant, open_assistant
from gpt_faster.formats.dflash import check_target, dflash_file, open_dflash
from gpt_faster.formats.eagle3 import Eagle3Checkpoint, is_eagle3, open_eagle3
from gpt_faster.formats.hub import resolve
from gpt_faster.formats.load import count_parameters, n_bytes
from gpt_faster.kernels.compile import can_switch_later
from gpt_faster.kernels.cpu import native
from gpt_faster.layers.dflash import DFlashConfig
from gpt_faster.layers.eagle3 import check_fit
from gpt_faster.layers.embedding import has_learned_positions
from gpt_faster.layers.quantized_cache import CacheFormat
from gpt_faster.loading import load, load_shard, open_model, part_of_rank
from model import cache_bytes
from sampling import Sampler
from tokenizer import differ
from tp import n_local


class Runtime:
    """A loaded and compiled model, by the options.

    batch: runs the model; plain: the same without speculation; drafter: the drafter's name or None.
    """

    def __init__(self, options, source, tokenizer, device: torch.device, dtype: torch.dtype,
                 engine: str, *, n_row: int, longest: int, start: float,
                 prompts: list[list[int]] = ([0],), speculate: str | None = None,
                 acceptance: float = 1.0, rewinds: int = 0, waits: bool = True):
        """n_row: rows of the batch; longest: positions needed, within the model's context.

        start: time at which loading began; prompts: examples for the warm-up; speculate: as the
        option; acceptance: draft lengths that do not pay at this acceptance rate are dropped;
        rewinds: tokens a sequence may rewind in addition to rejected drafts; waits: wait for a
        running compiler instead of starting uncompiled.
        """
        self.options, self.tokenizer, self.device, self.engine = options, tokenizer, device, engine
        self.dtype, self.n_row, self.speculate = dtype, n_row, speculate
        limit = options.max_seq_length or source.cfg.context
        self.length = options.max_seq_length or bucket(min(longest, limit), limit, 32)
        n_cache_rows = 0 if engine == "recompute" else n_row
        draft_source = self.open_draft(source)
        self.source = source = self.quantize_source(source)
        self.drafter = speculate or (draft_source and draft_source.path.name)
        self.k = self.max_draft(draft_source)
        chunk = max(options.prefill_chunk, self.k + 1 if self.drafter else 0)
        max_rejected = (self.k if self.drafter else 0) + rewinds
        check_memory([source, draft_source], dtype, device, n_cache_rows, self.length, chunk,
                     max_rejected, options.kv_cache)

        waits = waits or "fp4" in quantize.describe(source)    # uncompiled it would be slow
        begins_uncompiled = not waits and engine == "compile" and native.is_building()
        runs_first = "kv_cache" if begins_uncompiled else engine
        load_one = partial(load_shard if engine == "torch_compile" else load, engine=runs_first)
        self.model = load_one(source, dtype, device)
        if isinstance(draft_source, AssistantCheckpoint):
            load_one = AssistantCheckpoint.load
        draft = draft_source and load_one(draft_source, dtype, device)
        if isinstance(draft_source, Eagle3Checkpoint):
            draft_source.finish(draft)
        self.load_s, self.compile_s = time.perf_counter() - start, 0.0
        self.describe_model()

        for model in filter(None, (self.model, draft)):        # drafts only cost time if rejected
            model.kv_cache = options.kv_cache
        self.model.setup_cache(n_cache_rows, self.length, chunk, max_rejected=max_rejected)
        start = time.perf_counter()
        self.changes_over = not waits and engine == "compile" and can_switch_later(self.model)
        self.build(draft)
        log(f"Engine: {engine}")
        if self.changes_over:
            log("Compiling in the background: generation starts uncompiled")
        elif engine in ("torch_compile", "compile", "cuda_graph"):
            self.compile(prompts, longest)
            self.compile_s = time.perf_counter() - start
            log(f"Compilation time: {self.compile_s:.2f} seconds")
        if self.drafter and not options.speculate_k:
            self.measure(len(prompts[0]) + 1, acceptance)

    def make_sampler(self) -> Sampler:
        """A sampler for all rows and all later parameters."""
        raise NotImplementedError

    def quantize_source(self, source):
        """Apply --quantize, --groupsize and --quantize_head."""
        options = self.options
        return quantize_on_load.quantize_as_requested(
            source, options.quantize, options.groupsize, options.quantize_head, self.device,
            quantize_on_load.multiplies_fp4(self.engine, self.device))

    # ---- Drafts ---------------------------------------------------------------------------------

    def open_draft(self, source):
        """The draft model's checkpoint, or None. ValueError if its vocabulary differs."""
        options, speculate = self.options, self.speculate
        if speculate in ("int8", "int4"):
            if options.random:
                raise ValueError(f"--speculate {speculate} drafts with a quantized copy of the "
                                 "model: it cannot be combined with --random, whose weights "
                                 "cannot be read twice")
            return quantize_on_load.quantized(source, speculate, device=self.device)
        if speculate == "mtp" and not source.mtp:
            raise ValueError(f"--speculate mtp: {source.path} has no MTP head (mtp.* tensors, or "
                             "layers counted by num_nextn_predict_layers): try --speculate ngram")
        if speculate == "mtp":
            return self.quantize_source(source).mtp()
        if not options.draft_checkpoint_path:
            return None
        path = resolve(options.draft_checkpoint_path)
        if is_assistant(path):
            return self.open_gemma_assistant(path, source)
        if file := dflash_file(path):
            return self.open_dflash(file, source)
        if is_eagle3(path):
            return self.open_eagle3(path, source)
        draft, other = open_model(options.draft_checkpoint_path)
        if difference := differ(self.tokenizer, other):
            raise ValueError(f"{draft.path} cannot draft for {source.path}: {difference}")
        return draft

    def open_gemma_assistant(self, path: Path, source) -> AssistantCheckpoint:
        """ValueError if it does not fit the model, or is not supported on this device."""
        draft, cfg = open_assistant(path), source.cfg
        if (draft.cfg.backbone_dim, draft.cfg.vocab_size) != (cfg.dim, cfg.vocab_size):
            raise ValueError(f"{path} drafts for models of width {draft.cfg.backbone_dim} with "
                             f"{draft.cfg.vocab_size} tokens, but {source.path} has width "
                             f"{cfg.dim} and {cfg.vocab_size} tokens")
        if tp.world() > 1:
            raise ValueError(f"{path}: Gemma 4's assistant does not support tensor parallelism")
        if self.device.type != "cpu" and self.engine in ("compile", "cuda_graph"):
            raise ValueError(f"{path}: on a GPU Gemma 4's assistant needs --engine kv_cache")
        return draft

    def open_dflash(self, file: Path, source) -> Checkpoint:
        """A DFlash drafter, quantized as the model. ValueError if it does not fit the model."""
        draft = open_dflash(file)
        check_target(draft, source)
        options = self.options
        head = options.quantize_head if draft.cfg.own_head else "none"
        return quantize_on_load.quantize_as_requested(draft, options.quantize, options.groupsize,
                                                      head, self.device)

    def open_eagle3(self, path: Path, source) -> Eagle3Checkpoint:
        """Quantized as the model is. ValueError if it does not fit the model."""
        draft = open_eagle3(path)
        check_fit(draft.cfg, source.cfg, path)
        options = self.options
        head = options.quantize_head if draft.cfg.draft_vocab else "none"      # the target's
        return quantize_on_load.quantize_as_requested(draft, options.quantize, options.groupsize,
                                                      head, self.device)

    def max_draft(self, draft) -> int:
        """The longest draft. ValueError if it does not fit into the cache, or the drafter's block.
        """
        length = self.length
        longest = {"ngram": 8, "mtp": MAX_DRAFT}.get(self.speculate, 5)
        if draft and isinstance(draft.cfg, DFlashConfig):
            longest = draft.cfg.block_size - 1
            if (self.options.speculate_k or 0) > longest:
                raise ValueError(f"--speculate_k {self.options.speculate_k}: {draft.path.name} "
                                 f"drafts at most {longest} tokens at once")
        k = self.options.speculate_k or min(longest, length - 1)
        if self.drafter and k >= length:
            raise ValueError(f"--speculate_k {k} does not fit into {length} positions")
        if draft and has_learned_positions(draft.cfg) and length > draft.cfg.context:
            raise ValueError(f"{draft.path} has {draft.cfg.context} positions, but {length} are "
                             "needed: give a smaller --max_seq_length")
        return k

    # ---- The batch ------------------------------------------------------------------------------

    def build(self, draft) -> None:
        options = self.options
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        sampler = self.make_sampler()
        steps = build_steps(self.model, self.engine, options.compile_prefill,
                            not self.changes_over)
        if self.engine == "recompute":
            self.plain = self.batch = RecomputeBatch(self.model, sampler, steps, self.length)
            return
        self.plain = self.batch = RowsBatch(self.model, sampler, steps)
        if self.drafter:
            self.batch = build_speculative(self.model, sampler, steps, self.engine, self.k,
                                           bool(options.speculate_k), draft)

    def compile(self, prompts: list[list[int]], longest: int) -> None:
        """Warm up for prompts of these lengths and at most `longest` positions."""
        shortest = min(map(len, prompts))
        prompts = (list(prompts) * self.n_row)[:self.n_row]
        longest = min(longest + (self.k if self.drafter else 0), self.length)
        warm_up(self.batch, prompts, range(shortest + 1, longest))

    def measure(self, n: int, acceptance: float) -> None:
        """Measure the cost of drafting after n tokens, and choose the draft lengths by it."""
        measured = measure_drafts(self.batch, n, acceptance)
        length = self.batch.draft_length
        for n_row, costs in measured.items():
            text = ", ".join(f"{k} tokens costs {c:.1f} decode steps" for k, c in costs.items())
            where = "" if self.n_row == 1 else f" in {n_row} rows" if n_row > 1 else " in 1 row"
            log(f"Drafting{where} {text}"
                + ("" if any(length.can_pay(k, n_row, n_row) for k in costs) else ": disabled"))

    # ---- Reports --------------------------------------------------------------------------------

    def describe_model(self) -> None:
        self.total_bytes, self.read_bytes = weight_bytes(self.model)
        scheme = quantize.describe(self.source)
        log(f"{self.source.path.name}: {count_parameters(self.source.cfg) / 1e6:.0f}M "
            f"parameters, {scheme + ', ' if scheme else ''}{str(self.dtype)[6:]}, "
            f"{self.total_bytes / 1e6:.0f} MB on {self.device}"
            f"{',' + on_each_rank() if tp.world() > 1 else ''}")
        log(f"Time to load model: {self.load_s:.2f} seconds")

    def about(self) -> dict:
        """The fields of --json that describe the model and the run, not the text."""
        linears, head = quantize.schemes(self.source)
        drafts = {}
        if self.drafter:
            drafts = dict(speculate=self.drafter, speculate_k=self.k, **self.batch.accept_stats())
        return dict(
            load_s=self.load_s, compile_s=self.compile_s,
            peak_memory_bytes=peak_memory(self.device), model_bytes=self.total_bytes,
            quantization=linears, quantized_head=head, engine=self.engine, ranks=tp.world(),
            kv_cache=self.options.kv_cache and str(self.options.kv_cache),
            batch_size=self.options.batch_size, seed=self.options.seed, **drafts,
            device=str(self.device), dtype=str(self.dtype)[6:], torch=torch.__version__)


def check_memory(sources, dtype, device, rows: int, length: int, chunk: int, max_rejected: int,
                 kv_cache: CacheFormat | None = None) -> None:
    """Log the memory that will be allocated. ValueError if it exceeds the free memory, or if a
    model cannot have such a KV cache."""
    sources = [part_of_rank(source) for source in sources if source]
    free = free_memory(device) / (n_local() if device.type == "cpu" else 1)
    weights = sum(n_bytes(source, dtype, device) for source in sources)
    cache = sum(cache_bytes(source.cfg, rows, length, min(chunk, length), dtype, max_rejected,
                            kv_cache)
                for source in sources)
    cache += rows * (hidden_bytes(sources, length, dtype) + state_bytes(sources, length, dtype))
    need = (f"{weights / 1e6:.0f} MB for weights and {cache / 1e6:.0f} MB for the KV cache "
            f"({f'{kv_cache}, ' if kv_cache else ''}{rows} x {length} positions){on_each_rank()}")
    log(f"Memory: {need}")
    if weights + cache > free:
        no_drafts = ", or no draft model" if len(sources) > 1 else ""
        raise ValueError(f"not enough memory: {need}, but only {free / 1e6:.0f} MB are free on "
                         f"{device}: try --quantize, --kv_cache, a smaller --max_seq_length or "
                         f"--batch_size{no_drafts}")


def on_each_rank() -> str:
    return f" on each of {tp.world()} ranks" if tp.world() > 1 else ""
