"""generate.py's command: a model as the flags want it, and what is done with it.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import tp
from cli import batch, flags
from cli.chat import Chat
from cli.common import free_memory, guarded, log, peak_memory, pick_device, pick_dtype
from cli.flags import HELLO
from cli.sequence import Sequence
from formats import quantized
from formats import tokenizer as tokenizers
from formats.checkpoint import n_bytes
from formats.parameters import count_parameters
from generate import (
    bucket,
    build_speculator,
    build_steps,
    generate,
    load_shard,
    measure,
    open_model,
    read_late,
    warm_up,
)
from model import MoE, Transformer, cache_bytes
from sampling import Sampling


def pick_engine(args, device: torch.device) -> str:
    """One of ENGINES. ValueError where the flags contradict each other or the device."""
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


def weight_bytes(model: Transformer) -> tuple[int, int]:
    """All weights, and those that one row's step reads: active experts, no lone embedding."""
    def size(parameters):
        return sum(p.numel() * p.element_size() for p in parameters)

    cfg, total = model.cfg, size(model.parameters())
    idle = 0 if model.head.weight is model.embed.weight else size(model.embed.parameters())
    for moe in (module for module in model.modules() if isinstance(module, MoE)):
        experts = size(p for part in (moe.gate, moe.up, moe.down) for p in part.parameters())
        idle += experts * (cfg.n_expert - cfg.n_active) // cfg.n_expert
    return total, total - idle


def open_draft(args, source, tokenizer, device):
    """The checkpoint that will guess, or None. ValueError where its vocabulary is another one."""
    if args.speculate in ("int8", "int4"):
        if args.random:
            raise ValueError("--speculate int8 and int4 make a copy, and --random no two alike")
        return quantized.quantized(source, args.speculate, device=device)
    if not args.draft_checkpoint_path:
        return None
    draft, other = open_model(args.draft_checkpoint_path)
    if difference := tokenizers.differ(tokenizer, other):
        raise ValueError(f"{draft.path} cannot guess for {source.path}: {difference}")
    return draft


def check_memory(sources, dtype, device, rows: int, length: int, chunk: int) -> None:
    """State what will be allocated. ValueError where it exceeds what is free."""
    sources = [tp.shard(source) for source in sources if source]
    free = free_memory(device) / (tp.n_local() if device.type == "cpu" else 1)
    weights = sum(n_bytes(source, dtype) for source in sources)
    cache = sum(cache_bytes(source.cfg, rows, length, min(chunk, length), dtype)
                for source in sources)
    each = f" on each of {tp.world()} ranks" * (tp.world() > 1)
    need = (f"{weights / 1e6:.0f} MB for weights and {cache / 1e6:.0f} MB for the KV cache "
            f"({rows} x {length} positions){each}")
    log(f"Memory: {need}")
    if weights + cache > free:
        raise ValueError(f"not enough memory: {need}, but only {free / 1e6:.0f} MB are free on "
                         f"{device}: try --quantize, a smaller --max_seq_length or --batch_size")


def main(argv: list[str] | None = None) -> int:
    return guarded(tp.as_rank(run), argv)


def run(argv: list[str] | None) -> int:
    parser = flags.build_parser()
    args = parser.parse_args(argv)
    flags.check(args)
    device = pick_device(tp.local_device(args.device))
    engine = pick_engine(args, device)
    many = flags.many(args)
    requests, complaints, before = tp.from_rank_0(lambda: (
        *(([], []) if args.interactive else batch.read_requests(args, HELLO)),
        batch.done_before(args.output) if args.output else set()))
    results = batch.Results(None if tp.rank() else args.output, args.json)

    start = time.perf_counter()
    source, tokenizer = open_model(args.checkpoint_path, args.random)
    parser.set_defaults(**source.defaults)                 # the model's, where the user is silent
    args = parser.parse_args(argv)
    limit = args.max_seq_length or source.cfg.context
    dtype = pick_dtype(args.dtype, device, source.cfg)
    if limit > source.cfg.context:
        raise ValueError(f"--max_seq_length {limit} exceeds the model's context of "
                         f"{source.cfg.context}")
    requests = [request for request in requests if request.id not in before]
    work, more = batch.encode_all(requests, tokenizer, source.cfg, args, limit)
    complaints += more
    if complaints and not many:
        raise ValueError(complaints[0])
    for complaint in complaints:
        log(f"generate.py: error: {complaint}")
    if before:
        log(f"{len(before)} results are in {args.output} already: {len(work)} prompts to go")
    if many and not work:
        return 1 if complaints else 0
    if not many and work and work[0].n_new < args.max_new_tokens:
        log(f"note: at most {work[0].n_new} new tokens, to stay within {limit} positions")

    session = Session(args, source, tokenizer, work, device, dtype, engine, start)
    if args.interactive:
        return talk(session)
    if many:
        jobs = {session.row(job.ids, job.n_new): job for job in work}
        interrupted = batch.run(jobs, session.n_rows,
                                lambda ids: read_late(session.tokens(ids, None)), results)
        return 130 if interrupted else 1 if complaints else 0
    return show_samples(session, work[0])


class Session:
    """A model as the flags want it for these prompts (none: a conversation): loaded and warm.

    start: when loading began.
    """

    def __init__(self, args, source, tokenizer, work: list[batch.Job], device: torch.device,
                 dtype: torch.dtype, engine: str, start: float):
        self.args, self.tokenizer, self.device, self.engine = args, tokenizer, device, engine
        self.dtype, self.use_cache = dtype, engine != "recompute"
        limit = args.max_seq_length or source.cfg.context
        ends = [len(job.ids) + job.n_new for job in work] or [4096]        # a conversation
        self.length = args.max_seq_length or bucket(min(max(ends), limit), limit, 32)
        self.n_rows = min(args.batch_size, len(work)) if flags.many(args) else args.batch_size
        draft_source = open_draft(args, source, tokenizer, device)
        self.source = source = quantized.as_flagged(source, args, device)
        self.guesser = args.speculate or (draft_source and draft_source.path.name)
        self.k = self.check_guesses(draft_source)
        chunk = max(args.prefill_chunk, (self.k + 1) * bool(self.guesser))
        check_memory([source, draft_source], dtype, device, self.n_rows * self.use_cache,
                     self.length, chunk)

        self.model = load_shard(source, dtype, device)
        draft = draft_source and load_shard(draft_source, dtype, device)
        self.load_s, self.compile_s = time.perf_counter() - start, 0.0
        self.total_bytes, self.read_bytes = weight_bytes(self.model)
        self.each = f" on each of {tp.world()} ranks" * (tp.world() > 1)
        packed = quantized.describe(source)
        log(f"{source.path.name}: {count_parameters(source.cfg) / 1e6:.0f}M parameters, "
            f"{packed and packed + ', '}{str(dtype)[6:]}, {self.total_bytes / 1e6:.0f} MB on "
            f"{device}{self.each and ',' + self.each}")
        log(f"Time to load model: {self.load_s:.2f} seconds")

        self.model.setup_cache(self.n_rows * self.use_cache, self.length, chunk)
        self.how = Sampling(args.temperature, args.top_k, args.top_p, args.min_p,
                            args.repetition_penalty)
        start = time.perf_counter()
        self.steps, self.speculator = build_steps(self.model, engine, args.compile_prefill), None
        if self.guesser:
            self.speculator = build_speculator(self.k, bool(args.speculate_k), draft, engine,
                                               device.type)
        if engine in ("compile", "cuda_graph"):
            self.compile([job.ids for job in work] or [[0]], max(ends) if work else 1024)
            self.compile_s = time.perf_counter() - start
            log(f"Compilation time: {self.compile_s:.2f} seconds")
        if self.speculator and not args.speculate_k:
            self.measure(len(work[0].ids) + 1 if work else 1)
        self.generator = torch.Generator(device).manual_seed(args.seed)
        self.eos_ids = set() if args.ignore_eos else set(source.eos_ids or tokenizer.eos_ids)

    def check_guesses(self, draft) -> int:
        """How many tokens to guess at most. ValueError where they do not fit."""
        args, length = self.args, self.length
        k = args.speculate_k or min(8 if args.speculate == "ngram" else 5, length - 1)
        if self.guesser and k >= length:
            raise ValueError(f"--speculate_k {k} does not fit into {length} positions")
        if draft and draft.cfg.learned_pos and length > draft.cfg.context:
            raise ValueError(f"{draft.path} knows {draft.cfg.context} positions, and {length} are "
                             "asked for: give a smaller --max_seq_length")
        return k

    def compile(self, prompts: list[list[int]], most: int) -> None:
        """Warm up for prompts like these, and for at most so many positions."""
        least = min(map(len, prompts))
        prompts = (prompts * self.n_rows)[:self.n_rows]
        most = min(most + self.k * bool(self.guesser), self.length)
        warm_up(self.model, prompts, range(least + 1, most), self.how, self.steps, self.speculator)

    def measure(self, n: int) -> None:
        """What guessing costs here, after n tokens."""
        speculator, length = self.speculator, self.length
        speculator.begin([0], 0, length, self.model.longest_call, self.device)
        costs = measure(speculator, self.model, self.steps, bucket(n, length), self.how)
        costs = [f"{k} tokens takes as long as {costs[k]:.1f} steps" for k in costs]
        log(f"Guessing {', '.join(costs)}" + ": it cannot pay here" * (not speculator.sizes))

    def tokens(self, prompts: list, n_new: int | None, n_cached: int = 0,
               guess: bool = True) -> Iterator[Tensor]:
        return generate(self.model, prompts, n_new, self.how, self.generator, self.steps,
                        self.use_cache, n_cached, self.speculator if guess else None)

    def row(self, ids: list[int], n_new: int) -> Sequence:
        return Sequence(self.tokenizer, ids, self.eos_ids, self.args.stop, n_new)

    def figures(self, times: list[float], n_prompt: int, guess: bool = True) -> dict:
        read_bytes = 0 if guess and self.speculator else self.read_bytes
        return figures(times, n_prompt, self.n_rows, read_bytes)

    def about(self) -> dict:
        """What --json says beside the text and its figures."""
        linears, head = quantized.schemes(self.source)
        guesses = dict(speculate=self.guesser, speculate_k=self.k) if self.guesser else {}
        return dict(
            load_s=self.load_s, compile_s=self.compile_s,
            peak_memory_bytes=peak_memory(self.device), model_bytes=self.total_bytes,
            quantization=linears, quantized_head=head, engine=self.engine, ranks=tp.world(),
            batch_size=self.args.batch_size, seed=self.args.seed, **guesses,
            **(self.speculator.stats() if self.speculator else {}),
            device=str(self.device), dtype=str(self.dtype)[6:], torch=torch.__version__)


def talk(session: Session) -> int:
    """A conversation in the terminal."""
    args, model, length = session.args, session.model, session.length

    def answer(ids, n_cached):
        mine = session.row(ids, n_new := min(args.max_new_tokens, length - len(ids)))
        times, _ = follow(session.tokens([ids], n_new, n_cached), [mine], "")
        return mine, describe(session.figures(times, len(ids) - n_cached))

    room = length - max(1, min(args.max_new_tokens, length // 4))
    guesses = (session.k + 1) * bool(session.guesser)      # were in a ring too
    rewind = model.longest_call - 1 - guesses if model.rings else length
    tp.led(answer, lambda answer: Chat(session.tokenizer, answer, room, rewind, log,
                                       args.system_prompt, args.chat_template_kwargs).run())
    return 0


def show_samples(session: Session, job: batch.Job) -> int:
    """--num_samples times, one prompt in --batch_size rows."""
    args, (request, ids, n_new) = session.args, job
    shown = None if args.json or args.batch_size > 1 else "" if args.random else request.shown
    speeds, interrupted = [], False
    for i in range(args.num_samples):
        rows = [session.row(ids, n_new) for _ in range(args.batch_size)]
        with traced(args.profile if i == args.num_samples - 1 else None):
            times, interrupted = follow(session.tokens([ids] * len(rows), n_new), rows, shown)
        f = session.figures(times, len(ids))
        if args.compare and not interrupted:
            times, interrupted = follow(session.tokens([ids], n_new, guess=False),
                                        [session.row(ids, n_new)], None)
            plain = session.figures(times, len(ids), guess=False)
            f["speedup"] = f["decode_tok_s"] and plain["decode_tok_s"] and (
                f["decode_tok_s"] / plain["decode_tok_s"])
            log(f"Without guessing: {describe(plain)}")
            log(f"With it {f['speedup'] or 0:.2f} times as fast")
        for j, one in enumerate(rows):
            if args.json:
                print(json.dumps(dict(
                    prompt=request.prompt, text=one.text, prompt_ids=ids, new_ids=one.ids,
                    finish_reason=one.finish_reason, sample=i, row=j, **f, **session.about())),
                    flush=True)
            elif args.batch_size > 1:
                print(f"--- row {j} ---\n{request.shown}{one.text}", flush=True)
        log(f"Sample {i + 1}: {describe(f)}")
        speeds += [f["decode_tok_s_total"]] if f["decode_tok_s"] else []
        if interrupted:
            break
    log("==========")
    guesses = session.speculator.stats() if session.speculator else {}
    if guesses.get("rounds"):
        shares = [round(n / guesses["rounds"], 4) for n in guesses["accept_counts"]]
        log(f"Acceptance probs: {shares}")
        log(f"Mean Accepted: {guesses['mean_accepted']:.4f}")
    if speeds:
        log(f"Average tokens/sec: {sum(speeds) / len(speeds):.2f}")
    log(f"Memory used: {peak_memory(session.device) / 1e9:.2f} GB{session.each}")
    return 130 if interrupted else 0


@contextmanager
def traced(path: Path | None):
    """Write a Chrome trace of what happens within, of each rank its own; None: do not."""
    if path is None:
        yield
        return
    with torch.profiler.profile() as trace:
        yield
    name = path.name.removesuffix(".json") + f".rank{tp.rank()}" * bool(tp.rank())
    path = path.with_name(name + ".json")
    trace.export_chrome_trace(str(path))
    if not path.exists():                                  # it only logs that it could not
        raise OSError(f"{path}: the trace could not be written")
    log(f"Trace written to {path}")


def follow(tokens: Iterator[Tensor], rows: list[Sequence],
           shown: str | None) -> tuple[list[float], bool]:
    """Run one generation to its end: rows collect, and the first one's text streams to stdout.

    shown: what to print before it; None: print nothing. -> the time before the first step and after
    each token, and whether Ctrl-C ended it.
    """
    show = (lambda text: None) if shown is None else lambda text: print(text, end="", flush=True)
    show(shown)
    times, reason = [time.perf_counter()], "length"
    try:
        for ids in read_late(tokens):
            times.append(time.perf_counter())
            for row, token_id in zip(rows, ids):
                piece = row.push(token_id)
                if row is rows[0]:
                    show(piece)
            if all(row.finish_reason for row in rows):
                break
    except KeyboardInterrupt:
        reason = "interrupted"
    for row in rows:
        piece = row.finish(reason)
        if row is rows[0]:
            show(piece + "\n")
    return times, reason == "interrupted"


def figures(times: list[float], n_prompt: int, batch_size: int, read_bytes: int) -> dict:
    """Speeds from `follow`'s times: prefill ends with the first token, decode is what comes after.

    decode_tok_s is per row; bandwidth_gb_s counts the weights that each step reads, 1e9 bytes;
    read_bytes=0: a step gives more than a token.
    """
    ttft_s = times[1] - times[0] if len(times) > 1 else None
    step_s = (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None
    return dict(ttft_s=ttft_s, prefill_tok_s=n_prompt * batch_size / ttft_s if ttft_s else None,
                decode_tok_s=1 / step_s if step_s else None,
                decode_tok_s_total=batch_size / step_s if step_s else None,
                bandwidth_gb_s=read_bytes / step_s / 1e9 if step_s and read_bytes else None)


def describe(f: dict) -> str:
    """figures() in a line."""
    if f["ttft_s"] is None:
        return "no token"
    line = f"time to first token {f['ttft_s']:.3f} s, prefill {f['prefill_tok_s']:.1f} tok/s"
    if f["decode_tok_s"]:
        line += f", decode {f['decode_tok_s']:.2f} tok/s"
        line += f", bandwidth {f['bandwidth_gb_s']:.1f} GB/s" if f["bandwidth_gb_s"] else ""
        if f["decode_tok_s_total"] > f["decode_tok_s"]:
            line += f" ({f['decode_tok_s_total']:.2f} tok/s in all rows)"
    return line
