"""Generate text: load a model, prefill the prompt, decode token by token. The command line too.

It composes the other files and holds the only generation loop. No file formats, no math of its own.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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

import checkpoint as checkpoints
import quantize
import tokenizer as tokenizers
from chat import chat
from cli import Help, Parser, guarded, log, number, peak_memory, pick_device, pick_dtype
from model import MoE, Transformer
from sampling import Sampling, exponential, n_candidates, sample

ENGINES = ("recompute", "kv_cache", "compile", "cuda_graph")


# ---- The two steps and the loop -----------------------------------------------------------------

def prefill(model, tokens, pos, last, n_key, noise, how, seen) -> Tensor:
    """The prompt [B, T] in one call -> the first new token [B, 1]; last [B, 1]: each row's end."""
    return sample(model(tokens, pos, last, n_key)[:, -1], noise, how, seen)


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


@torch.inference_mode()
def generate(model: Transformer, prompt: Tensor, max_new_tokens: int, how: Sampling = Sampling(),
             generator: torch.Generator | None = None, steps: Steps = Steps(),
             use_cache: bool = True) -> Iterator[Tensor]:
    """Yield max_new_tokens tokens [B, 1] on the device, one at a time, without ever reading one.

    prompt [B, T] of token ids; how: see sampling.py (temperature=0 is greedy); use_cache=False
    recomputes everything for each token. Stop by leaving the loop. Allocates a cache if the model's
    is too small. AssertionError where prompt and new tokens exceed the model's context.
    """
    (B, T), device, n_vocab = prompt.shape, prompt.device, model.cfg.vocab_size
    end = T + max_new_tokens
    assert end <= model.cfg.context, \
        f"{T} + {max_new_tokens} tokens exceed the context of {model.cfg.context}"
    rows = B if use_cache else 0
    if model.max_batch_size != rows or model.max_seq_length < end:
        model.setup_cache(rows, end)
    shape = B, n_candidates(how, n_vocab)
    seen = None
    if how.repetition_penalty != 1:
        seen = torch.zeros(B, n_vocab, dtype=torch.bool, device=device).scatter_(1, prompt, True)

    limit = model.max_seq_length if use_cache else end
    width = bucket(T, limit, 32) if steps.pad else T       # padding is masked until overwritten
    tokens = F.pad(prompt, (0, width - T))
    last = torch.full((B, 1), T - 1, device=device)
    pos = torch.arange(width, device=device)
    n_key = bucket(width, limit) if use_cache else width
    noise = exponential(shape, device, generator)
    token = steps.prefill(model, tokens, pos, last, n_key, noise, how, seen)
    pos = torch.tensor([T], device=device)
    for n in range(T + 1, end):                            # n tokens are known, the last one is new
        yield token
        if seen is not None:
            seen.scatter_(1, token, True)
        noise = exponential(shape, device, generator)
        if use_cache:
            token = steps.decode(model, token, pos, bucket(n, limit), noise, how, seen)
            pos += 1
        else:
            prompt, pos = torch.cat((prompt, token), dim=1), torch.arange(n, device=device)
            token = prefill(model, prompt, pos, last + n - T, n, noise, how, seen)
    yield token


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


def on_gpu(decode):
    """Keep a compiled step's result: the next replay of its CUDA graph overwrites it."""
    def step(*args):
        torch.compiler.cudagraph_mark_step_begin()
        return decode(*args).clone()
    return step


def uncompiled(step):
    """Run a step eagerly although the model's layers are compiled."""
    def eager(*args):
        with torch.compiler.set_stance("force_eager"):
            return step(*args)
    return eager


def build_steps(model: Transformer, engine: str, compile_prefill: bool = False) -> Steps:
    """The engine's prefill and decode step.

    compile: on a GPU the whole step becomes one CUDA graph. On a CPU, where unrolling 30 layers
    costs minutes, one block is compiled and serves every layer, and the head is compiled.
    """
    device = model.embed.weight.device.type
    if engine == "cuda_graph":
        return Steps(decode=CudaGraph())
    if engine != "compile":
        return Steps()
    torch._dynamo.config.recompile_limit = 64              # buckets, window kinds, prefill lengths
    if device == "cpu":
        options = {"cpp.enable_floating_point_contract_flag": "fast",      # multiply-add in one
                   "cpp_wrapper": quantize.calls_kernels(model)}           # calls from C++
        for module in (*model.layers, model.head):
            module.compile(fullgraph=True, dynamic=False, options=options)
        first = prefill if compile_prefill else uncompiled(prefill)
        return Steps(first, decode_one_token, compile_prefill)
    decode = torch.compile(decode_one_token, mode="reduce-overhead", fullgraph=True, dynamic=False)
    first = torch.compile(prefill, fullgraph=True, dynamic=False) if compile_prefill else prefill
    return Steps(first, on_gpu(decode) if device == "cuda" else decode, compile_prefill)


@torch.inference_mode()
def warm_up(model: Transformer, prompt: Tensor, max_new_tokens: int, how: Sampling,
            steps: Steps) -> None:
    """Compile all that a generation of this size will run: its prefill and each live length."""
    if steps.pad:                                          # the prefill is compiled too
        next(generate(model, prompt, 1, how, steps=steps))
    (B, T), n_vocab, device = prompt.shape, model.cfg.vocab_size, prompt.device
    seen = None
    if how.repetition_penalty != 1:
        seen = torch.zeros(B, n_vocab, dtype=torch.bool, device=device)
    lengths = {bucket(n, model.max_seq_length) for n in range(T + 1, T + max_new_tokens)}
    for n_key in sorted(lengths) * 3:                      # CUDA graphs: warm up, record, replay
        noise = exponential((B, n_candidates(how, n_vocab)), device)
        pos = torch.tensor([T], device=device)
        steps.decode(model, prompt[:, -1:], pos, n_key, noise, how, seen)


def read_late(tokens: Iterator[Tensor]) -> Iterator[list[int]]:
    """Tokens [B, 1] -> ids on the host. A GPU works on the next one while we look at the last."""
    waiting = deque()
    for token in tokens:
        if not token.is_cuda:
            yield token[:, 0].tolist()
            continue
        host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
        host.copy_(token, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        waiting.append((host, copied))
        if len(waiting) > 1:
            host, copied = waiting.popleft()
            copied.synchronize()
            yield host[:, 0].tolist()
    for host, copied in waiting:
        copied.synchronize()
        yield host[:, 0].tolist()


# ---- One row's text, and when it ends -----------------------------------------------------------

class Row:
    """Collects one row's ids and text; knows when to stop."""

    def __init__(self, tokenizer, prompt_ids: list[int], eos_ids: set[int], stops: list[str]):
        self.stream = tokenizers.Stream(tokenizer, prompt_ids)
        self.eos_ids, self.stops = eos_ids, stops
        self.ids, self.text, self.shown, self.finish_reason = [], "", 0, None

    def push(self, token_id: int) -> str:
        """-> text to show now. What may turn out to be the beginning of a stop string waits."""
        if self.finish_reason:
            return ""
        self.ids.append(token_id)
        if token_id in self.eos_ids:
            return self.finish("stop")
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += self.stream.push(token_id)
        found = [at for at in (self.text.find(s, searched) for s in self.stops) if at >= 0]
        if found:
            self.text, self.finish_reason = self.text[:min(found)], "stop"
            return self._show(len(self.text))
        begun = [n for s in self.stops for n in range(len(s)) if self.text.endswith(s[:n])]
        return self._show(len(self.text) - max(begun, default=0))

    def finish(self, reason: str) -> str:
        """-> what was still held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.text += self.stream.flush()
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece, self.shown = self.text[self.shown:end], max(self.shown, end)
        return piece


# ---- Command line -------------------------------------------------------------------------------

def build_parser() -> Parser:
    p = Parser(description="Generate text from an open-weight transformer. "
                           "Text goes to stdout, everything else to stderr.", formatter_class=Help)
    add = p.add_argument_group("model").add_argument
    add("--checkpoint_path", "--model", "-m", metavar="PATH_OR_NAME",
        help="a Hugging Face directory, .safetensors, .pth, .pt, .gguf, or a hub name org/name; "
             "default: the model that scripts/quickstart.sh fetched")
    add("--random", metavar="NAME",
        help="a known shape with random weights and no files, for speed trials with an integer "
             "--prompt: " + ", ".join(checkpoints.SHAPES))
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, xpu")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
        help="of weights and arithmetic; auto: bfloat16, or float16 on a GPU without it")
    quantize.add_flags(add)
    add("--max_seq_length", type=number(int, 2),
        help="positions to allocate; default: what the prompt and the new tokens need. RoPE of "
             "the kinds dynamic and longrope takes its factors for this length")
    add = p.add_argument_group("text").add_argument
    add("--prompt", default="Hello, my name is",
        help="text, or an integer for a synthetic prompt of that many random tokens")
    add("--max_new_tokens", type=number(int, 1), default=200, help="new tokens at most")
    add("--num_samples", type=number(int, 1), default=1, help="samples, one after another")
    add("--batch_size", type=number(int, 1), default=1, help="copies of the prompt side by side")
    add("--interactive", action="store_true",
        help="chat: messages from the terminal, by the model's own chat template")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end before this text appears (repeatable)")
    add("--ignore_eos", action="store_true", help="go on after an end-of-sequence token")
    add = p.add_argument_group(
        "sampling", "The model's own generation_config.json overrides these defaults.").add_argument
    add("--temperature", type=number(float, 0), default=0.8, help="0: greedy")
    add("--top_k", type=number(int, 0), default=200, help="only the k likeliest tokens; 0: all")
    add("--top_p", type=number(float, 0, 1, above=True), default=1.0,
        help="only the likeliest tokens that together make up this probability")
    add("--min_p", type=number(float, 0, 1), default=0.0,
        help="only tokens at least this fraction as likely as the likeliest")
    add("--repetition_penalty", type=number(float, 0, above=True), default=1.0,
        help="above 1 makes tokens that already appeared less likely")
    add("--seed", type=number(int, 0), default=1234, help="of the random draws")
    add = p.add_argument_group("speed").add_argument
    add("--compile", action="store_true", help="compile the decode step")
    add("--compile_prefill", action="store_true", help="compile prefill too; implies --compile")
    add("--engine", choices=ENGINES,
        help="recompute: no KV cache; kv_cache: eager, the default; compile: as --compile; "
             "cuda_graph: the eager step captured in a CUDA graph")
    add = p.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object per sample and row on stdout, no text")
    add("--profile", type=Path, metavar="FILE",
        help="write a Chrome trace of the last sample to FILE.json")
    return p


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


def encode_prompt(text: str, tokenizer, cfg, seed: int) -> list[int]:
    """A text's ids, or as many random ones as an integer says. ValueError if none or too many."""
    ids, n = [], 0
    if re.fullmatch(r"[+-]?\d+", text):
        n = int(text)
        if n < 1:
            raise ValueError(f"--prompt {text}: a synthetic prompt needs at least 1 token")
    elif not text:
        raise ValueError("the prompt is empty: give --prompt some text")
    else:
        ids = tokenizer.encode(text)
        n = len(ids)
        if max(ids) >= cfg.vocab_size:
            raise ValueError(f"the tokenizer gives id {max(ids)}, but the model has "
                             f"{cfg.vocab_size} tokens: they do not belong together")
    if n >= cfg.context:
        raise ValueError(f"the prompt has {n} tokens and the model's context is {cfg.context}, "
                         "which leaves no room for a new one: shorten the prompt")
    generator = torch.Generator().manual_seed(seed)
    return ids or torch.randint(min(1024, cfg.vocab_size), (n,), generator=generator).tolist()


def fit(n_prompt: int, args, cfg) -> tuple[int, int]:
    """-> how many new tokens, and the cache's length. ValueError where nothing fits."""
    limit = args.max_seq_length or cfg.context
    if limit > cfg.context:
        raise ValueError(f"--max_seq_length {limit} exceeds the model's context of {cfg.context}")
    if n_prompt >= limit:
        raise ValueError(f"the prompt has {n_prompt} tokens and --max_seq_length is {limit}, which "
                         "leaves no room for a new one")
    n_new = min(args.max_new_tokens, limit - n_prompt)
    if n_new < args.max_new_tokens:
        log(f"note: at most {n_new} new tokens, to stay within {limit} positions")
    if args.interactive and not args.max_seq_length:
        return n_new, min(limit, 4096)                     # a whole conversation
    return n_new, args.max_seq_length or bucket(n_prompt + n_new, limit, 32)


def main(argv: list[str] | None = None) -> int:
    return guarded(run, argv)


def run(argv: list[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    engine = pick_engine(args, device)
    if not all(args.stop):
        raise ValueError("--stop needs some text")
    if args.profile and (args.profile.is_dir() or not args.profile.absolute().parent.is_dir()):
        raise ValueError(f"--profile {args.profile}: a file in a directory that exists is needed")
    for flag in ("json", "random", "profile"):
        if args.interactive and getattr(args, flag):
            raise ValueError(f"--interactive does not go with --{flag}")
    if args.interactive and (args.batch_size > 1 or args.num_samples > 1):
        raise ValueError("--interactive answers one message at a time: one row, one sample")

    start = time.perf_counter()
    source, tokenizer = open_model(args.checkpoint_path, args.random)
    parser.set_defaults(**source.defaults)                 # the model's, where the user is silent
    args, cfg = parser.parse_args(argv), source.cfg
    dtype = pick_dtype(args.dtype, device, cfg)
    prompt_ids = encode_prompt(args.prompt, tokenizer, cfg, args.seed)
    n_new, length = fit(len(prompt_ids), args, cfg)
    source = quantize.as_flagged(source, args, device)
    model = quantize.load(source, dtype, device)
    load_s = time.perf_counter() - start

    total_bytes, read_bytes = weight_bytes(model)
    linears, head = quantize.schemes(source)
    packed = quantize.describe(source)
    log(f"{source.path.name}: {checkpoints.n_parameters(source) / 1e6:.0f}M parameters, "
        f"{packed and packed + ', '}{str(dtype)[6:]}, {total_bytes / 1e6:.0f} MB on {device}")
    log(f"Time to load model: {load_s:.2f} seconds")
    use_cache = engine != "recompute"
    model.setup_cache(args.batch_size if use_cache else 0, length)
    prompt = torch.tensor([prompt_ids] * args.batch_size, device=device)

    how = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
    steps, compile_s = build_steps(model, engine, args.compile_prefill), 0.0
    if engine in ("compile", "cuda_graph"):
        start = time.perf_counter()
        ahead = min(1024, length) - len(prompt_ids) if args.interactive else n_new
        warm_up(model, prompt, ahead, how, steps)
        compile_s = time.perf_counter() - start
        log(f"Compilation time: {compile_s:.2f} seconds")

    generator = torch.Generator(device).manual_seed(args.seed)
    eos_ids = set() if args.ignore_eos else set(source.eos_ids or tokenizer.eos_ids)
    shown = None if args.json or args.batch_size > 1 else "" if args.random else args.prompt
    if args.interactive:
        def answer(ids):
            row, room = Row(tokenizer, ids, eos_ids, args.stop), length - len(ids)
            tokens = generate(model, torch.tensor([ids], device=device),
                              min(args.max_new_tokens, room), how, generator, steps, use_cache)
            times, _ = follow(tokens, [row], "")
            log(describe(figures(times, len(ids), 1, read_bytes)))
            return row.text

        chat(tokenizer, answer, length - 1, log)
        return 0

    speeds, interrupted = [], False
    for i in range(args.num_samples):
        rows = [Row(tokenizer, prompt_ids, eos_ids, args.stop) for _ in range(args.batch_size)]
        profile = args.profile and i == args.num_samples - 1
        with torch.profiler.profile() if profile else nullcontext() as trace:
            tokens = generate(model, prompt, n_new, how, generator, steps, use_cache)
            times, interrupted = follow(tokens, rows, shown)
        if profile:
            path = args.profile.with_name(args.profile.name.removesuffix(".json") + ".json")
            trace.export_chrome_trace(str(path))
            if not path.exists():                          # it only logs that it could not
                raise OSError(f"{path}: the trace could not be written")
            log(f"Trace written to {path}")
        f = figures(times, len(prompt_ids), args.batch_size, read_bytes)
        for j, row in enumerate(rows):
            if args.json:
                print(json.dumps(dict(
                    prompt=args.prompt, text=row.text, prompt_ids=prompt_ids, new_ids=row.ids,
                    finish_reason=row.finish_reason, sample=i, row=j, **f, load_s=load_s,
                    compile_s=compile_s, peak_memory_bytes=peak_memory(device),
                    model_bytes=total_bytes, quantization=linears, quantized_head=head,
                    engine=engine, batch_size=args.batch_size, seed=args.seed,
                    device=str(device), dtype=str(dtype)[6:],
                    torch=torch.__version__)), flush=True)
            elif args.batch_size > 1:
                print(f"--- row {j} ---\n{args.prompt}{row.text}", flush=True)
        log(f"Sample {i + 1}: {describe(f)}")
        speeds += [f["decode_tok_s_total"]] if f["decode_tok_s"] else []
        if interrupted:
            break
    log("==========")
    if speeds:
        log(f"Average tokens/sec: {sum(speeds) / len(speeds):.2f}")
    log(f"Memory used: {peak_memory(device) / 1e9:.2f} GB")
    return 130 if interrupted else 0


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

    decode_tok_s is per row; bandwidth_gb_s counts the weights that each step reads, 1e9 bytes.
    """
    ttft_s = times[1] - times[0] if len(times) > 1 else None
    step_s = (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None
    return dict(ttft_s=ttft_s, prefill_tok_s=n_prompt * batch_size / ttft_s if ttft_s else None,
                decode_tok_s=1 / step_s if step_s else None,
                decode_tok_s_total=batch_size / step_s if step_s else None,
                bandwidth_gb_s=read_bytes / step_s / 1e9 if step_s else None)


def describe(f: dict) -> str:
    """figures() in a line."""
    if f["ttft_s"] is None:
        return "no token"
    line = f"time to first token {f['ttft_s']:.3f} s, prefill {f['prefill_tok_s']:.1f} tok/s"
    if f["decode_tok_s"]:
        line += f", decode {f['decode_tok_s']:.2f} tok/s, bandwidth {f['bandwidth_gb_s']:.1f} GB/s"
        if f["decode_tok_s_total"] > f["decode_tok_s"]:
            line += f" ({f['decode_tok_s_total']:.2f} tok/s in all rows)"
    return line


if __name__ == "__main__":
    sys.exit(main())
