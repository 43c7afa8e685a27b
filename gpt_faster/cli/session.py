"""generate.py's command: a model as the flags want it, and what is done with it.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import quantize
import tp
from generate import (
    HELLO,
    Sequence,
    bucket,
    describe,
    figures,
    follow,
    generate,
    log,
    peak_memory,
    pick_device,
    sampling_params,
    summarize,
    traced,
    weight_bytes,
)
from gpt_faster import kept_weights
from gpt_faster.cli import batch, flags
from gpt_faster.cli.chat import Chat
from gpt_faster.cli.common import free_memory, guarded, pick_dtype
from gpt_faster.decoding.draft_length import DraftLengthController
from gpt_faster.decoding.engines import (
    RecomputeBatch,
    build_speculative,
    build_steps,
    measure_drafts,
    rewind,
    warm_up,
)
from gpt_faster.decoding.grammar import Grammars, import_llguidance, json_schema
from gpt_faster.decoding.logits_processors import TokenMask
from gpt_faster.decoding.mtp import MAX_DRAFT, PUBLISHED_ACCEPTANCE, hidden_bytes
from gpt_faster.decoding.ranks import as_rank, from_rank_0, run_on_rank_0
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.slots import RowsBatch
from gpt_faster.formats import quantized
from gpt_faster.formats.assistant import AssistantCheckpoint, is_assistant, open_assistant
from gpt_faster.formats.hub import resolve
from gpt_faster.formats.load import count_parameters, n_bytes, open_checkpoint
from gpt_faster.formats.shapes import random_checkpoint
from gpt_faster.kernels.compile import will_change_over
from gpt_faster.kernels.cpu import native
from gpt_faster.layers.embedding import has_learned_positions
from gpt_faster.loading import load_shard
from gpt_faster.text.tokenizer_files import load_for
from model import cache_bytes
from sampling import SamplingParams
from tokenizer import NullTokenizer, differ
from tp import local_device, n_local


def main(argv: list[str] | None = None) -> int:
    return guarded(as_rank(run), argv)


def run(argv: list[str] | None) -> int:
    parser = flags.build_parser()
    args = parser.parse_args(argv)
    flags.check(args)
    device = pick_device(local_device(args.device))
    engine = pick_engine(args, device)
    many = flags.many(args)
    if engine == "compile" and device.type == "cpu":
        native.start_building()                   # beside the loading
    if args.json_schema:
        schema_of(args.json_schema)                # before the model is loaded
        import_llguidance()
    results = batch.Results(args.json)
    requests, complaints, finished = from_rank_0(lambda: read_work(args, results))

    start = time.perf_counter()
    source, tokenizer = open_model(args.checkpoint_path, args.random, args.adapter)
    parser.set_defaults(**source.defaults)                 # the model's, where the user is silent
    args = parser.parse_args(argv)
    limit = args.max_seq_length or source.cfg.context
    dtype = pick_dtype(args.dtype, device, source.cfg)
    if limit > source.cfg.context:
        raise ValueError(f"--max_seq_length {limit} exceeds the model's context of "
                         f"{source.cfg.context}")
    requests = [request for request in requests if request.id not in finished]
    work, more = batch.encode_all(requests, tokenizer, source.cfg, args, limit)
    complaints += more
    if complaints and not many:
        raise ValueError(complaints[0])
    for complaint in complaints:
        log(f"generate.py: error: {complaint}")
    if finished:
        log(f"{len(finished)} results are in {args.output} already: {len(work)} prompts to go")
    if many and not work:
        return 1 if complaints else 0
    acceptance = 1.0                               # that drafts which are asked for may reach
    if source.mtp and flags.may_draft(args) and from_rank_0(lambda: drafts_by_default(source)):
        args.speculate, acceptance = "mtp", PUBLISHED_ACCEPTANCE
    if not many and work and work[0].n_new < args.max_new_tokens:
        log(f"note: at most {work[0].n_new} new tokens, to stay within {limit} positions")

    session = Session(args, source, tokenizer, work, device, dtype, engine, start, acceptance)
    for request in [job.request for job in work if job.request.n_random is not None]:
        log(f"note: {request.where} {request.prompt}: a synthetic prompt of so many random tokens "
            "(--prompts_file reads digits as text)")
    if args.interactive:
        return talk(session)
    if many:
        jobs = {session.sequence(job.ids, job.n_new): job for job in work}
        interrupted = batch.run(jobs, session.batch, results)
        return 130 if interrupted else 1 if complaints else 0
    return show_samples(session, work[0])


def schema_of(path: Path) -> tuple[str, str]:
    """A file's JSON schema, for decoding/grammar.py. OSError or ValueError where there is none."""
    try:
        return json_schema(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def read_work(args, results: batch.Results) -> tuple[list, list, set]:
    """-> requests, complaints about others, and the ids of those that are finished already."""
    requests, complaints = [], []
    if not args.interactive:
        requests, complaints = batch.read_requests(args, HELLO)
    return requests, complaints, results.append_to(args.output) if args.output else set()


# ---- The model that the flags ask for -----------------------------------------------------------

def open_model(path: str | None = None, shape: str | None = None, adapter: str | None = None):
    """A path or hub name, None for the default model, or a known shape -> checkpoint, tokenizer.

    No weight is read yet. FileNotFoundError, ValueError or OSError say in one line what was found
    and what to do.
    """
    if shape is not None and path is not None:
        raise ValueError("--random and --checkpoint_path exclude each other")
    if shape is not None and adapter is not None:
        raise ValueError("--random has no weights that --adapter could be added to")
    if shape is not None:
        return random_checkpoint(shape), NullTokenizer()
    source = open_checkpoint(path, adapter)
    return source, load_for(source)


def pick_engine(args, device: torch.device) -> str:
    """One of ENGINES, set up. ValueError where the flags contradict each other or the device."""
    native.set_activation_bits(args.activation_bits)
    wants_compile = args.compile or args.compile_prefill
    engine = args.engine or ("compile" if wants_compile else "kv_cache")
    if wants_compile and engine != "compile":
        raise ValueError(f"--engine {engine} contradicts --compile")
    if engine == "cuda_graph" and device.type != "cuda":
        raise ValueError(f"--engine cuda_graph needs an NVIDIA GPU, the device is {device}: "
                         "use --compile")
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if engine == "compile" and device.type == "cpu" and not compiler:
        log("note: --compile needs a C++ compiler, none found: running eager (apt-get install g++)")
        return "kv_cache"
    return engine


def drafts_by_default(source) -> bool:
    """Not while operations are built: that text begins uncompiled, and drafts would wait."""
    if native.is_building():
        return False
    try:
        source.mtp()
    except ValueError as e:
        log(f"note: the head of this checkpoint that drafts tokens is not used: {e}")
        return False
    log("note: this checkpoint's own head drafts tokens, where that pays (--no_speculate: it does "
        "not)")
    return True


def open_draft(args, source, tokenizer, device):
    """The checkpoint that drafts, or None. ValueError where its vocabulary is another one."""
    if args.speculate in ("int8", "int4"):
        if args.random:
            raise ValueError(f"--speculate {args.speculate} drafts with a copy of the model, and "
                             "--random makes no two alike")
        return quantized.quantized(source, args.speculate, device=device)
    if args.speculate == "mtp" and not source.mtp:
        raise ValueError(f"--speculate mtp: {source.path} has no head that drafts (mtp.* tensors, "
                         "or a layer that num_nextn_predict_layers counts): try --speculate ngram")
    if args.speculate == "mtp":
        return quantized.as_flagged(source, args, device).mtp()
    if not args.draft_checkpoint_path:
        return None
    path = resolve(args.draft_checkpoint_path)
    if is_assistant(path):
        return open_drafter_of_gemma(path, args, source, device)
    draft, other = open_model(args.draft_checkpoint_path)
    if difference := differ(tokenizer, other):
        raise ValueError(f"{draft.path} cannot draft for {source.path}: {difference}")
    return draft


def open_drafter_of_gemma(path: Path, args, source, device) -> AssistantCheckpoint:
    """ValueError where it cannot draft for this model, or not on this device."""
    draft, cfg = open_assistant(path), source.cfg
    if (draft.cfg.backbone_dim, draft.cfg.vocab_size) != (cfg.dim, cfg.vocab_size):
        raise ValueError(f"{path} drafts for models {draft.cfg.backbone_dim} wide with "
                         f"{draft.cfg.vocab_size} tokens, and {source.path} is {cfg.dim} wide with "
                         f"{cfg.vocab_size}")
    if tp.world() > 1:
        raise ValueError(f"{path}: Gemma 4's drafter runs in one process, not on several ranks")
    as_graph = args.compile or args.compile_prefill or args.engine in ("compile", "cuda_graph")
    if device.type != "cpu" and as_graph:
        raise ValueError(f"{path}: on a GPU Gemma 4's drafter needs --engine kv_cache")
    return draft


def check_memory(sources, dtype, device, rows: int, length: int, chunk: int,
                 max_rejected: int) -> None:
    """State what will be allocated. ValueError where it exceeds what is free."""
    sources = [tp.shard(source) for source in sources if source]
    free = free_memory(device) / (n_local() if device.type == "cpu" else 1)
    weights = sum(n_bytes(source, dtype, device) for source in sources)
    cache = sum(cache_bytes(source.cfg, rows, length, min(chunk, length), dtype, max_rejected)
                for source in sources) + hidden_bytes(sources, length, dtype)
    need = (f"{weights / 1e6:.0f} MB for weights and {cache / 1e6:.0f} MB for the KV cache "
            f"({rows} x {length} positions){on_each_rank()}")
    log(f"Memory: {need}")
    if weights + cache > free:
        no_drafts = ", or no drafts" if len(sources) > 1 else ""
        raise ValueError(f"not enough memory: {need}, but only {free / 1e6:.0f} MB are free on "
                         f"{device}: try --quantize, a smaller --max_seq_length or --batch_size"
                         f"{no_drafts}")


def on_each_rank() -> str:
    return f" on each of {tp.world()} ranks" if tp.world() > 1 else ""


class Session:
    """A model as the flags want it for these prompts (none: a conversation): loaded and warm.

    start: when loading began; acceptance: a share of right drafts; lengths of drafts that would not
    pay with it are left out.
    """

    def __init__(self, args, source, tokenizer, work: list[batch.Job], device: torch.device,
                 dtype: torch.dtype, engine: str, start: float, acceptance: float = 1.0):
        self.args, self.tokenizer, self.device, self.engine = args, tokenizer, device, engine
        self.dtype = dtype
        limit = args.max_seq_length or source.cfg.context
        ends = [len(job.ids) + job.n_new for job in work] or [4096]        # a conversation
        self.length = args.max_seq_length or bucket(min(max(ends), limit), limit, 32)
        self.n_rows = min(args.batch_size, len(work)) if flags.many(args) else args.batch_size
        n_cache_rows = 0 if engine == "recompute" else self.n_rows
        draft_source = open_draft(args, source, tokenizer, device)
        self.source = source = quantized.as_flagged(source, args, device)
        self.drafter = args.speculate or (draft_source and draft_source.path.name)
        self.k = self.max_draft(draft_source)
        chunk = max(args.prefill_chunk, self.k + 1 if self.drafter else 0)
        max_rejected = self.k if self.drafter else 0
        max_rejected += not work                   # a conversation may read its last token late
        check_memory([source, draft_source], dtype, device, n_cache_rows, self.length, chunk,
                     max_rejected)

        load = kept_weights.load
        if engine == "torch_compile":
            load = partial(load_shard, kernels=False)
        self.model = load(source, dtype, device)
        if isinstance(draft_source, AssistantCheckpoint):
            load = AssistantCheckpoint.load
        draft = draft_source and load(draft_source, dtype, device)
        self.load_s, self.compile_s = time.perf_counter() - start, 0.0
        self.describe_model()

        self.model.setup_cache(n_cache_rows, self.length, chunk, max_rejected=max_rejected)
        start = time.perf_counter()
        self.build(draft, [job.params for job in work])
        log(f"Engine: {engine}")
        if self.changes_over:
            log("Compiling beside the text, which begins uncompiled")
        elif engine in ("torch_compile", "compile", "cuda_graph"):
            self.compile([job.ids for job in work] or [[0]], max(ends) if work else 1024)
            self.compile_s = time.perf_counter() - start
            log(f"Compilation time: {self.compile_s:.2f} seconds")
        if self.drafter and not args.speculate_k:
            self.measure(len(work[0].ids) + 1 if work else 1, acceptance)
        self.eos_ids = set() if args.ignore_eos else set(source.eos_ids)

    def describe_model(self) -> None:
        self.total_bytes, self.read_bytes = weight_bytes(self.model)
        scheme = quantize.describe(self.source)
        log(f"{self.source.path.name}: {count_parameters(self.source.cfg) / 1e6:.0f}M "
            f"parameters, {scheme + ', ' if scheme else ''}{str(self.dtype)[6:]}, "
            f"{self.total_bytes / 1e6:.0f} MB on {self.device}"
            f"{',' + on_each_rank() if tp.world() > 1 else ''}")
        log(f"Time to load model: {self.load_s:.2f} seconds")

    def max_draft(self, draft) -> int:
        """How many tokens to draft at most. ValueError where they do not fit."""
        args, length = self.args, self.length
        longest = {"ngram": 8, "mtp": MAX_DRAFT}.get(args.speculate, 5)
        k = args.speculate_k or min(longest, length - 1)
        if self.drafter and k >= length:
            raise ValueError(f"--speculate_k {k} does not fit into {length} positions")
        if draft and has_learned_positions(draft.cfg) and length > draft.cfg.context:
            raise ValueError(f"{draft.path} knows {draft.cfg.context} positions, and {length} are "
                             "asked for: give a smaller --max_seq_length")
        return k

    def build(self, draft, params: list[SamplingParams]) -> None:
        """The batch that runs; params: of each request."""
        args, default = self.args, sampling_params(self.args)
        self.generator = self.new_generator()
        sampler = build_sampler(self.model, [default] * self.n_rows, self.generator, params)
        needs_figures = args.json or args.profile or self.drafter or args.compile_prefill
        if args.json_schema:
            self.constrain(sampler)
        self.changes_over = (self.engine == "compile" and not needs_figures
                             and will_change_over(self.model))
        steps = build_steps(self.model, self.engine, args.compile_prefill, not self.changes_over)
        if self.engine == "recompute":
            self.plain = self.batch = RecomputeBatch(self.model, sampler, steps, self.length)
            return
        self.plain = self.batch = RowsBatch(self.model, sampler, steps)
        if self.drafter:
            self.batch = build_speculative(self.model, sampler, steps, self.engine, self.k,
                                           bool(args.speculate_k), draft)

    def constrain(self, sampler) -> None:
        """Every row's text is JSON of --json_schema. Where it ends, only an end may follow."""
        spec = schema_of(self.args.json_schema)
        n_vocab = self.model.cfg.vocab_size
        grammars = Grammars(self.tokenizer, self.source.eos_ids, n_vocab)
        try:
            grammars.check(spec)
        except ValueError as e:
            raise ValueError(f"{self.args.json_schema}: {e}") from None
        mask = TokenMask(sampler.n_row, n_vocab, self.device, lambda params: grammars.matcher(spec))
        sampler.processors.append(mask)

    def new_generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.args.seed)

    def compile(self, prompts: list[list[int]], longest: int) -> None:
        """Warm up for prompts like these, and for at most `longest` positions."""
        shortest = min(map(len, prompts))
        prompts = (prompts * self.n_rows)[:self.n_rows]
        longest = min(longest + (self.k if self.drafter else 0), self.length)
        warm_up(self.batch, prompts, range(shortest + 1, longest))

    def measure(self, n: int, acceptance: float) -> None:
        """What drafting costs here, after n tokens."""
        costs = measure_drafts(self.batch, n)
        pace = DraftLengthController(self.batch.draft_length.lengths, costs, acceptance)
        self.batch.draft_length = pace
        text = ", ".join(f"{k} tokens costs {cost:.1f} decode steps" for k, cost in costs.items())
        log(f"Drafting {text}" + ("" if pace.lengths else ": disabled"))

    def tokens(self, prompts: list, n_new: int, n_cached: int = 0,
               draft: bool = True) -> Iterator[Tensor]:
        return generate(self.batch if draft else self.plain, prompts, n_new, n_cached)

    def sequence(self, ids: list[int], n_new: int) -> Sequence:
        return Sequence(self.tokenizer, ids, self.eos_ids, self.args.stop, n_new)

    def figures(self, times: list[float], n_prompt: int, sequences: list[Sequence],
                draft: bool = True) -> dict:
        """n_prompt: of each row."""
        read_bytes = 0 if draft and self.drafter else self.read_bytes
        return figures(times, n_prompt * len(sequences), [len(s.ids) for s in sequences],
                       read_bytes)

    def about(self) -> dict:
        """What --json says beside the text and its figures."""
        linears, head = quantize.schemes(self.source)
        drafts = {}
        if self.drafter:
            drafts = dict(speculate=self.drafter, speculate_k=self.k, **self.batch.accept_stats())
        return dict(
            load_s=self.load_s, compile_s=self.compile_s,
            peak_memory_bytes=peak_memory(self.device), model_bytes=self.total_bytes,
            quantization=linears, quantized_head=head, engine=self.engine, ranks=tp.world(),
            batch_size=self.args.batch_size, seed=self.args.seed, **drafts,
            device=str(self.device), dtype=str(self.dtype)[6:], torch=torch.__version__)


# ---- What is done with it -----------------------------------------------------------------------

def talk(session: Session) -> int:
    """A conversation in the terminal."""
    args, length = session.args, session.length

    def answer(ids, n_cached):
        n_new = min(args.max_new_tokens, length - len(ids))
        sequence = session.sequence(ids, n_new)
        times, _ = follow(session.tokens([ids], n_new, n_cached), [sequence], "",
                          session.batch)
        return sequence, describe(session.figures(times, len(ids) - n_cached, [sequence]))

    room = length - max(1, min(args.max_new_tokens, length // 4))
    max_rewind = rewind(session.batch, session.k if session.drafter else 0)
    run_on_rank_0(answer, lambda answer: Chat(
        session.tokenizer, answer, room, max_rewind, log, args.system_prompt,
        args.chat_template_kwargs).run())
    return 0


def show_samples(session: Session, job: batch.Job) -> int:
    """--num_samples times, one prompt in --batch_size rows."""
    args, request, ids = session.args, job.request, job.ids
    shown = None if args.json or args.batch_size > 1 else "" if args.random else request.shown
    speeds, interrupted = [], False
    for i in range(args.num_samples):
        sequences = [session.sequence(ids, job.n_new) for _ in range(args.batch_size)]
        with traced(args.profile if i == args.num_samples - 1 else None):
            tokens = session.tokens([ids] * len(sequences), job.n_new)
            times, interrupted = follow(tokens, sequences, shown, session.batch)
        f = session.figures(times, len(ids), sequences)
        if args.compare and not interrupted:
            interrupted = compare(session, job, f)
        for j, sequence in enumerate(sequences):
            if args.json:
                print(json.dumps(dict(
                    prompt=request.prompt, text=sequence.text, prompt_ids=ids,
                    new_ids=sequence.ids, finish_reason=sequence.finish_reason, sample=i, row=j,
                    **f, **session.about())), flush=True)
            elif args.batch_size > 1:
                print(f"--- row {j} ---\n{request.shown}{sequence.text}", flush=True)
        log(f"Sample {i + 1}: {describe(f)}")
        speeds += [f["decode_tok_s_total"]] if f["decode_tok_s"] else []
        if interrupted:
            break
    summarize(session.batch, speeds, on_each_rank())
    return 130 if interrupted else 0


def compare(session: Session, job: batch.Job, f: dict) -> bool:
    """The same without drafts: puts the speedup into f -> whether Ctrl-C ended it."""
    tokens = session.tokens([job.ids], job.n_new, draft=False)
    sequences = [session.sequence(job.ids, job.n_new)]
    times, interrupted = follow(tokens, sequences, None, session.plain)
    plain = session.figures(times, len(job.ids), sequences, draft=False)
    f["speedup"] = None
    if f["decode_tok_s"] and plain["decode_tok_s"]:
        f["speedup"] = f["decode_tok_s"] / plain["decode_tok_s"]
    log(f"Without drafts: {describe(plain)}")
    log(f"Speedup: {f['speedup'] or 0:.2f}")
    return interrupted
