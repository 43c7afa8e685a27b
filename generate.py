"""Generate text: load a model, prefill the prompt, decode token by token. The command too.

It composes the other files and holds the only generation loop. No file formats, no math of its own,
no flags: those are in flags.py.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

try:
    import torch
except ModuleNotFoundError:                                # not the Python that quickstart made
    python = Path(__file__).parent / ".venv/bin/python"
    if __name__ == "__main__" and python.exists() and sys.prefix != str(python.parent.parent):
        os.execv(python, [python, *sys.argv])
    print("generate.py: error: this Python has no torch: run `bash scripts/quickstart.sh`, "
          "which makes .venv", file=sys.stderr)
    sys.exit(2)
import torch.nn.functional as F
from torch import Tensor

import batch
import checkpoint as checkpoints
import compiled
import flags
import quantize
import speculate
import tokenizer as tokenizers
import tp
from chat import Chat
from cli import free_memory, guarded, log, peak_memory, pick_device, pick_dtype
from flags import HELLO, PREFILL_CHUNK
from model import MoE, Transformer, cache_bytes
from sampling import Sampling, exponential, n_candidates, sample
from speculate import Speculator
from tokenizer import Row

# ---- The two steps and the loop -----------------------------------------------------------------

def prefill(model, tokens, pos, last, n_key, noise, how, seen, rows=None) -> Tensor:
    """tokens [B, T] of prompts -> what comes after `last` [B, 1], an index into T, of each row.

    rows [B]: their rows of the cache; None: all.
    """
    return sample(model(tokens, pos, last, n_key, rows)[:, -1], noise, how, seen)


def decode_one_token(model, token, pos, n_key, noise, how, seen) -> Tensor:
    """token [B, 1] at pos [1] or [B, 1] -> the next token [B, 1]."""
    return sample(model(token, pos, 1, n_key)[:, -1], noise, how, seen)


class Steps(NamedTuple):
    """The two steps, compiled or not; pad: round prompts up, so that few lengths are compiled."""

    prefill: Callable = prefill
    decode: Callable = decode_one_token
    pad: bool = False


def bucket(n: int, limit: int, least: int = 256) -> int:
    """n rounded up to a power of two: attention reads the live cache only, in few shapes."""
    return min(limit, max(least, 1 << (n - 1).bit_length()))


def side_by_side(prompts: list[list[int]], device) -> Tensor:
    """[B, W]; shorter rows are filled up with their own first token, so that none seems seen."""
    W = max(map(len, prompts))
    return torch.tensor([[*ids, *ids[:1] * (W - len(ids))] for ids in prompts], device=device)


def together(prompts: dict[int, list[int]], B: int, most: int) -> list[list[int]]:
    """Which rows to prefill in one call: all B if they are equally long, else neighbours in length,
    of `most` tokens at most with what fills them up."""
    rows = sorted(prompts, key=lambda row: len(prompts[row]))
    if len(rows) == B and len(prompts[rows[0]]) == len(prompts[rows[-1]]):
        return [rows]
    parts = [[]]
    for row in rows:
        if parts[-1] and (len(parts[-1]) + 1) * len(prompts[row]) > most:
            parts.append([])
        parts[-1].append(row)
    return [sorted(part) for part in parts]


def next_pos(n: list[int], device) -> Tensor:
    """Where rows of n tokens each go on: [B, 1], or [1] where there is one row."""
    pos = torch.tensor(n, device=device)
    return pos if len(n) == 1 else pos[:, None]


@torch.inference_mode()
def generate(model: Transformer, prompts: Tensor | list[list[int]], max_new_tokens: int | None,
             how: Sampling = Sampling(), generator: torch.Generator | None = None,
             steps: Steps = Steps(), use_cache: bool = True, n_cached: int = 0,
             speculator: Speculator | None = None) -> Iterator[Tensor]:
    """Yield max_new_tokens tokens [B, 1] on the device, one at a time, without ever reading one.

    prompts: ids, [B, T] or B lists of any lengths; how: see sampling.py (temperature=0 is greedy);
    use_cache=False recomputes everything for each token; n_cached: that many tokens are in the
    cache already; speculator: guesses for one row (speculate.py). Stop by leaving the loop.
    Allocates a cache if the model's is too small. AssertionError where prompt and new tokens exceed
    the model's context.

    Rows can be exchanged: send {row: prompt}, and the next tokens are the first ones of these rows
    and mean nothing in the others; {row: None} ends a row for good. max_new_tokens=None goes on as
    long as one asks, and it is for the caller to let no row outgrow the cache.
    """
    device, n_vocab, B = model.freq.device, model.cfg.vocab_size, len(prompts)
    prompts = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    n = [len(ids) for ids in prompts]                      # tokens of each row; 0: it has ended
    limit = max(n) + max_new_tokens if max_new_tokens else model.max_seq_length
    assert limit <= model.cfg.context, \
        f"{max(n)} + {max_new_tokens} tokens exceed the context of {model.cfg.context}"
    assert not speculator or (B == 1 and use_cache), "guessing is for one row and the cache"
    k = speculator.k if speculator else 0
    if model.max_batch_size != B * use_cache or model.max_seq_length < limit:
        model.setup_cache(B * use_cache, limit, max(PREFILL_CHUNK, k + 1))
    assert k < model.longest_call, f"{k} + 1 tokens exceed the longest call, {model.longest_call}"
    limit = model.max_seq_length if use_cache else limit
    chunk = model.longest_call if use_cache else limit
    n_noise, seen = n_candidates(how, n_vocab), None
    if how.repetition_penalty != 1:
        seen = torch.zeros(B, n_vocab, dtype=torch.bool, device=device)

    def live(n: int) -> int:
        return bucket(min(n, limit), limit)

    def run(rows: list[int], tokens: Tensor, ends: list[int], begin: int = 0) -> Tensor:
        """Prefill tokens [b, W], ends[i] of them in row i -> the first new tokens [b, 1].

        What fills up a row or a call stands at the row's next position, which the next token takes.
        """
        alike = len(rows) == B and min(ends) == max(ends)
        which = None if len(rows) == B else torch.tensor(rows, device=device)
        end, longest = torch.tensor(ends, device=device)[:, None], max(ends)
        token, known = tokens[:, :1], None
        if seen is not None:
            seen[rows] = known = torch.zeros_like(seen[rows]).scatter_(1, tokens, True)
        noise = exponential((len(rows), n_noise), device, generator)
        for at in range(begin, longest, chunk):            # rows end in different chunks
            T = min(longest - at, chunk)
            width = bucket(T, chunk, 32) if steps.pad else T
            piece = F.pad(tokens[:, at:at + T], (0, width - T))
            pos = torch.arange(at, at + width, device=device).minimum(end[0] if alike else end)
            last = (end - 1 - at).clamp(0, T - 1)
            n_key = live(at + width) if steps.pad else at + T
            new = steps.prefill(model, piece, pos, last, n_key, noise, how, known, which)
            token = torch.where(end > at, new, token)
        return token

    def start(token: Tensor, new: dict[int, list[int]], begin: int = 0) -> Tensor:
        """token [B, 1] with the first new one of each of these rows."""
        if speculator:
            speculator.begin(new[0], begin, limit, chunk, device)
        for rows in together(new, B, 0 if steps.pad else chunk):
            some = [new[row] for row in rows]
            first = run(rows, side_by_side(some, device), [len(ids) for ids in some], begin)
            token = token.index_copy(0, torch.tensor(rows, device=device), first)
        return token

    tokens, left = side_by_side(prompts, device), max_new_tokens or math.inf
    token, pos = start(tokens[:, :1], dict(enumerate(prompts)), n_cached), next_pos(n, device)
    ready = []                                             # tokens that were guessed right
    while True:
        change = yield token
        left -= 1
        if change:
            n = [len(change[i] or ()) if i in change else n[i] for i in range(B)]
            pos, new = next_pos(n, device), {row: ids for row, ids in change.items() if ids}
            if new:
                token, left, ready = start(token, new), max_new_tokens or math.inf, []
                continue
        if not left:
            return
        n = [k and k + 1 for k in n]
        if seen is not None and use_cache:
            seen.scatter_(1, token, True)
        if speculator and not ready:
            ready = speculator.round(model, token, pos, n[0], live, how, generator, seen,
                                     steps.decode)
            pos = (pos + len(ready)).clamp(max=limit - 1)
        if ready:
            token, *ready = ready
        elif use_cache:
            noise = exponential((B, n_noise), device, generator)
            token = steps.decode(model, token, pos, live(max(n)), noise, how, seen)
            pos = (pos + (pos > 0)).clamp(max=limit - 1)   # ended rows stay at 0
        else:
            tokens = torch.cat((tokens, tokens[:, :1]), dim=1).scatter(1, pos.view(B, 1), token)
            token, pos = run(list(range(B)), tokens, n), pos + 1


# ---- Engines ------------------------------------------------------------------------------------

class CudaGraph:
    """decode_one_token captured once per live length. Replays read their inputs, the position among
    them, from fixed tensors, so nothing of the first call is baked in."""

    def __init__(self):
        self.graphs, self.cache = {}, None

    def __call__(self, model, token, pos, n_key, noise, how, seen):
        inputs = [token, pos, noise] + ([seen] if seen is not None else [])
        cache = model.layers[0].attn.cache         # another one: the graphs wrote the old one
        if cache is not self.cache:
            self.cache, self.graphs = cache, {}
        if n_key not in self.graphs:
            fixed = [t.clone() for t in inputs]

            def step():
                token, pos, noise, *seen = fixed
                return decode_one_token(model, token, pos, n_key, noise, how, *(seen or [None]))

            side = torch.cuda.Stream()                     # capture wants warmed-up libraries
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            self.graphs[n_key] = graph, fixed, out
        graph, fixed, out = self.graphs[n_key]
        for old, new in zip(fixed, inputs):
            old.copy_(new)
        graph.replay()
        return out.clone()


def on_gpu(step):
    """Keep a compiled step's results: the next replay of its CUDA graph overwrites them."""
    def run(*args):
        torch.compiler.cudagraph_mark_step_begin()
        out = step(*args)
        if isinstance(out, Tensor):
            return out.clone()
        return tuple(t if t is None else t.clone() for t in out)
    return run


def uncompiled(step):
    """Run a step eagerly although the model's layers are compiled."""
    def eager(*args):
        with compiled.eager():
            return step(*args)
    return eager


def build_steps(model: Transformer, engine: str, compile_prefill: bool = False) -> Steps:
    """The engine's prefill and decode step.

    compile: on a GPU the whole step becomes one CUDA graph. On a CPU, where unrolling 30 layers
    costs minutes, one block is compiled and serves every layer, and what comes before and after it.
    """
    device, first, decode = model.freq.device.type, prefill, decode_one_token
    if engine == "cuda_graph":
        decode = CudaGraph()
    elif engine == "compile" and device == "cpu":
        functions = compiled.Functions(f"{model.cfg} {tp.world()}")
        quantize.for_compiler(model)
        for layer in model.layers:
            layer.forward = compiled.Compiled(layer.forward, functions, cache="attn.cache")
        model.enter = for_one(model.enter, functions, "rings", "layers.")
        model.leave = for_one(model.leave, functions, "", ("layers.", "rings."))
        first = prefill if compile_prefill else uncompiled(prefill)
    elif engine == "compile":
        torch._dynamo.config.recompile_limit = 64          # buckets, prefill lengths
        decode = as_one_graph(decode, device)
        if compile_prefill:
            first = torch.compile(prefill, fullgraph=True, dynamic=False)
    return Steps(tp.agreed(first), tp.agreed(decode), compile_prefill)


def for_one(method: Callable, *more) -> Callable:
    """Compiled for one position, x [B, 1, …]: calls of several are rare, long, and stay plain."""
    fast = compiled.Compiled(method, *more)
    return lambda x, *rest: (fast if x.shape[1] == 1 else method)(x, *rest)


def as_one_graph(step: Callable, device: str) -> Callable:
    """Compiled whole, and on an NVIDIA GPU replayed as a CUDA graph."""
    step = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
    return on_gpu(step) if device == "cuda" else step


def build_speculator(k: int, fixed: bool, draft: Transformer | None, engine: str,
                     device: str) -> Speculator:
    """Guesses by a draft model, whose layers are compiled as build_steps does, or by look-up."""
    if draft:
        build_steps(draft, engine)
    steps = [speculate.guess, speculate.verify]
    if engine == "compile" and device != "cpu":
        steps = [as_one_graph(step, device) for step in steps]
    return Speculator(k, draft, fixed, *map(tp.agreed, steps), uncompiled(speculate.read))


def measure(speculator: Speculator, model: Transformer, steps: Steps, n_key: int,
            how: Sampling) -> dict[int, float]:
    """Have it keep the sizes that can pay -> what a round of each costs, by rank 0's clock."""
    costs = speculator.measure(model, steps.decode, n_key, how)
    costs = tp.from_rank_0(lambda: costs)
    speculator.keep(costs)
    return costs


@torch.inference_mode()
def warm_up(model: Transformer, prompts: Tensor | list[list[int]], lengths: range,
            how: Sampling, steps: Steps, speculator: Speculator | None = None) -> None:
    """Compile the prefill of prompts like these, and decoding with so many positions in use."""
    if steps.pad:                                          # the prefill is compiled too
        next(generate(model, prompts, 1, how, steps=steps))
    prompts = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    n, n_vocab, device = [len(ids) for ids in prompts], model.cfg.vocab_size, model.freq.device
    seen = None
    if how.repetition_penalty != 1:
        seen = torch.zeros(len(n), n_vocab, dtype=torch.bool, device=device)
    n_keys = {bucket(length, model.max_seq_length) for length in lengths}
    # with strides of its own, as a step's result has: a compiled step depends on them
    token = side_by_side(prompts, device)[:, :1].clone(memory_format=torch.contiguous_format)
    if speculator:
        speculator.begin(prompts[0], 0, model.max_seq_length, model.longest_call, device)
        for n_key in sorted(n_keys) * 3:
            for call in speculator.calls(model, steps.decode, n_key, how):
                call()
    for n_key in sorted(n_keys) * 3:                       # CUDA graphs: warm up, record, replay
        noise = exponential((len(n), n_candidates(how, n_vocab)), device)
        steps.decode(model, token, next_pos(n, device), n_key, noise, how, seen)


def read_late(tokens: Iterator[Tensor]) -> Iterator[list[int | None]]:
    """Tokens [B, 1] -> ids on the host. A GPU works on the next one while we look at the last.

    What is sent goes to generate(), to exchange rows; an id that means nothing then is None.
    """
    waiting, change = deque(), None
    with suppress(StopIteration):
        while True:
            host, copied = tokens.send(change), None
            if host.is_cuda:
                token = host
                host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
                host.copy_(token, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
            begun = {row for row, ids in (change or {}).items() if ids}
            waiting.append((host, copied, begun or set(range(len(host)))))
            change = None
            if len(waiting) > (copied is not None):
                change = yield _on_host(*waiting.popleft())
                for *_, rows in waiting:                   # theirs were under way
                    rows.difference_update(change or ())
    for item in waiting:
        yield _on_host(*item)


def _on_host(host, copied, rows) -> list[int | None]:
    if copied:
        copied.synchronize()
    return [i if row in rows else None for row, i in enumerate(host[:, 0].tolist())]


# ---- Command line -------------------------------------------------------------------------------

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


def open_model(path: str | None = None, shape: str | None = None):
    """A path or hub name, None for the default model, or a known shape -> checkpoint, tokenizer.

    No weight is read yet. FileNotFoundError, ValueError or OSError say in one line what was found
    and what to do.
    """
    if shape is not None and path is not None:
        raise ValueError("--random and --checkpoint_path exclude each other")
    if shape is not None:
        return checkpoints.random_weights(shape), tokenizers.Numbers()
    source = checkpoints.read(checkpoints.find(path))
    return source, tokenizers.load(source.tokenizer)


def load_model(path: str | None = None, device="cpu", dtype: torch.dtype = torch.bfloat16, **how):
    """For use from Python: as open_model, with the weights -> model, checkpoint, tokenizer.

    how: mode="int8" or "int4" and quantize.quantized()'s other arguments quantize while loading.
    """
    source, tokenizer = open_model(path)
    source.eos_ids = source.eos_ids or tokenizer.eos_ids
    if how:
        source = quantize.quantized(source, **how)
    return quantize.load(source, dtype, device), source, tokenizer


def load_shard(source, dtype: torch.dtype, device) -> Transformer:
    """This rank's part of a model, joined to the others'; alone, the whole."""
    return tp.join(quantize.load(tp.shard(source), dtype, device), source.cfg.vocab_size)


def open_draft(args, source, tokenizer, device):
    """The checkpoint that will guess, or None. ValueError where its vocabulary is another one."""
    if args.speculate in ("int8", "int4"):
        if args.random:
            raise ValueError("--speculate int8 and int4 make a copy, and --random no two alike")
        return quantize.quantized(source, args.speculate, device=device)
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
    weights = sum(checkpoints.n_bytes(source, dtype) for source in sources)
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
        self.source = source = quantize.as_flagged(source, args, device)
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
        packed = quantize.describe(source)
        log(f"{source.path.name}: {checkpoints.n_parameters(source) / 1e6:.0f}M parameters, "
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

    def row(self, ids: list[int], n_new: int) -> Row:
        return Row(self.tokenizer, ids, self.eos_ids, self.args.stop, n_new)

    def figures(self, times: list[float], n_prompt: int, guess: bool = True) -> dict:
        read_bytes = 0 if guess and self.speculator else self.read_bytes
        return figures(times, n_prompt, self.n_rows, read_bytes)

    def about(self) -> dict:
        """What --json says beside the text and its figures."""
        linears, head = quantize.schemes(self.source)
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


def follow(tokens: Iterator[Tensor], rows: list[Row],
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


if __name__ == "__main__":
    sys.exit(main())
