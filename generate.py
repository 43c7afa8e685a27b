"""Generate text: load a model, prefill the prompt, decode token by token. The command too.

It composes the other files and holds the only generation loop. No file formats, no math of its own,
no flags: those are in flags.py.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
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

import quantize
import speculate
import tp
from cli.flags import PREFILL_CHUNK
from formats import tokenizer as tokenizers
from formats.load import load_model as load_weights
from formats.load import open_checkpoint
from formats.quantized import quantized
from formats.shapes import random_checkpoint
from kernels import inductor as compiled
from model import Transformer
from sampling import Sampling, exponential, n_candidates, sample
from speculate import Speculator

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


# ---- Loading ------------------------------------------------------------------------------------

def open_model(path: str | None = None, shape: str | None = None):
    """A path or hub name, None for the default model, or a known shape -> checkpoint, tokenizer.

    No weight is read yet. FileNotFoundError, ValueError or OSError say in one line what was found
    and what to do.
    """
    if shape is not None and path is not None:
        raise ValueError("--random and --checkpoint_path exclude each other")
    if shape is not None:
        return random_checkpoint(shape), tokenizers.NullTokenizer()
    source = open_checkpoint(path)
    return source, tokenizers.load(source.tokenizer)


def load_model(path: str | None = None, device="cpu", dtype: torch.dtype = torch.bfloat16, **how):
    """For use from Python: as open_model, with the weights -> model, checkpoint, tokenizer.

    how: mode="int8" or "int4" and quantized()'s other arguments quantize while loading.
    """
    source, tokenizer = open_model(path)
    source.eos_ids = source.eos_ids or tokenizer.eos_ids
    if how:
        source = quantized(source, **how)
    return load_weights(source, dtype, device), source, tokenizer


def load_shard(source, dtype: torch.dtype, device) -> Transformer:
    """This rank's part of a model, joined to the others'; alone, the whole."""
    return tp.join(load_weights(tp.shard(source), dtype, device), source.cfg.vocab_size)


if __name__ == "__main__":
    sys.modules["generate"] = sys.modules["__main__"]      # imported below: one module, not two
    from cli.session import main
    sys.exit(main())
