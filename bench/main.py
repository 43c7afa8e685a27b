"""Time the engines side by side, compare what they say, and set them beside machine and peers.

It times generate.py's public functions from outside and has no loop of its own. One command gives a
table of the README again, with the memory bandwidth measured in the same run:

    python benchmark.py -m org/name -p 512 -n 200 --engines kv_cache,compile,int8 --peers llama.cpp
"""

import copy
import gc
import json
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import quantize
import tp
from bench import peers, plots
from bench.tables import OUTPUTS, PEERS, table
from cli import batch
from cli.common import (
    Help,
    Parser,
    english_text,
    free_memory,
    guarded,
    log,
    number,
    peak_memory,
    pick_device,
    pick_dtype,
    reset_peak_memory,
)
from cli.flags import ENGINES, PREFILL_CHUNK
from cli.sequence import Sequence
from cli.session import figures, follow, weight_bytes
from formats.checkpoint import n_bytes
from formats.parameters import count_parameters
from formats.quantized import quantized, schemes
from formats.shapes import SHAPES
from formats.tokenizer import NullTokenizer
from generate import (
    Steps,
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
from model import KVCache, ModelConfig, Transformer
from quantize import SCHEMES
from sampling import Sampling

HERE = Path(__file__).resolve().parent.parent
GREEDY, TYPICAL = Sampling(temperature=0), Sampling(temperature=0.8, top_p=0.95)
MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
LADDER = ("recompute", "kv_cache", "sorted", "sort_free", "cuda_graph", "compile",
          "compile+prefill")
GUESSING = "ngram"
PAUSE = 0.5                                        # seconds

# The tables of gpt-fast's README and of nanoGPT's inference bench that such a machine bears.
SUITES = {
    "cpu": {
        "SmolLM2-135M": "--engines recompute,kv_cache,sorted,sort_free,compile,compile+prefill,"
                        "int8,int4 --peers llama.cpp,transformers,generate.py",
        "Against llama.cpp": "-p 512 -d 128 -n 128 --engines compile,int8,int4 --peers llama.cpp "
                             "-r 15",
        "Prompts and depths": "--engines kv_cache,compile,compile+prefill -p 128,512,2048 -n 64 "
                              "-d 128,1024,4096 -r 3",
        "Caches": "--engines compile -n 100 --max_seq_length 256,8192",
        "Requests": "--requests 64 -n 64 -d 200 -b 1,8,32 -r 3 --peers transformers",
        "Copied text": "--text benchmarks/edit.txt --engines compile,ngram --peers llama.cpp",
        "A new story": "--text benchmarks/story.txt --temperature 0.8 --engines compile,ngram -r 9",
        "Batches": "--engines kv_cache,compile -n 64 -b 1,4,16,64 -r 3",
        "Several processes": "-m checkpoints/gemma-3-270m/gemma-3-270m-q4_k_m.gguf --engines "
                             "compile -n 64 --ranks 1,2,4",
        "Mixture of experts": "--random Mixtral-8x160M,Mixtral-8x160M-dense --engines compile "
                              "-n 100",
        "Llama-1.1B": "--random Llama-1.1B -p 512 -d 128 -n 64 --engines compile,int8,int4 "
                      "--peers llama.cpp -r 9",
        "gpt2-xl": "--init_from gpt2-xl --max_new_tokens 20 -b 1,8 -r 1",
    },
    "gpu": {
        "Llama-2-7B": "--random Llama-2-7B --engines compile,cuda_graph,int8,int4",
        "Llama-3.1-8B": "--random Llama-3.1-8B --engines compile,cuda_graph,int8,int4 "
                        "--peers transformers-compile",
        "Llama-3.2-1B": "--random Llama-3.2-1B --engines compile,cuda_graph,int8,int4 "
                        "--peers transformers-compile",
        "Mixtral-8x7B": "--random Mixtral-8x7B --engines compile,int8 -r 3",
        "Llama-2-70B": "--random Llama-2-70B --engines int8,int4 -r 3",
        "Llama-3.1-70B": "--random Llama-3.1-70B --engines int8,int4 -r 3",
        "gpt2-xl": "--init_from gpt2-xl --max_new_tokens 100",
    },
}


# ---- The machine --------------------------------------------------------------------------------

def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


kept = cache(torch.ones)                           # a virtual machine gets new pages slowly: 2 s


def read_bandwidth(device: torch.device) -> float:
    """GB/s of reading 1 GB once, 1e9 bytes: the best of a few sums."""
    x = (kept if device.type == "cpu" else torch.ones)(1 << 28, device=device)
    best = 0.0
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        x.sum()
        synchronize(device)
        best = max(best, x.numel() * 4 / (time.perf_counter() - start) / 1e9)
    return best


def told(*command: str) -> str:
    """What a program prints, "" where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine(device: torch.device) -> dict:
    """What figures depend on beside the code: the processor, its clocks, versions, the commit."""
    cpu = dict(re.findall(r"^(model name|cpu MHz)\s*: (.*)$", Path("/proc/cpuinfo").read_text(),
                          re.M)) if Path("/proc/cpuinfo").exists() else {}
    name, clocks = cpu.get("model name", platform.processor()), f"{cpu.get('cpu MHz', '?')} MHz"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        clocks = told("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit",
                      "--format=csv,noheader")
    return dict(device=str(device), machine=name, clocks=clocks, threads=torch.get_num_threads(),
                capability=torch.backends.cpu.get_cpu_capability(),
                versions=dict(torch=torch.__version__, python=platform.python_version()),
                commit=told("git", "describe", "--always") + "-dirty" * bool(
                    told("git", "status", "--short", "-uno", ".", ":!benchmarks")))


# ---- Engines ------------------------------------------------------------------------------------

class Test(NamedTuple):
    """n_new tokens after a prompt, in each of `batch` rows; n_new = 1 times the prompt alone.

    n_cache: positions of the cache, if more than those. n_request: so many different prompts of 1
    to n_prompt tokens with 1 to n_new new ones, `batch` at a time. text: a file that is the prompt.
    """

    n_prompt: int
    n_new: int
    batch: int
    n_cache: int = 0
    n_request: int = 0
    text: Path | None = None

    def length(self) -> int:
        return max(self.n_prompt + self.n_new, self.n_cache)

    def work(self, tokenizer, cfg) -> tuple[list[list[int]], list[int]]:
        """The prompts, and how many new tokens each gets: the same at every batch."""
        if self.text:
            return [text_ids(self.text, tokenizer)] * self.batch, [self.n_new] * self.batch
        if not self.n_request:
            ids = english(self.n_prompt, tokenizer, cfg)
            return [ids] * self.batch, [self.n_new] * self.batch
        draw, n = random.Random(0), self.n_request
        sizes = [(draw.randint(1, self.n_prompt), draw.randint(1, self.n_new)) for _ in range(n)]
        texts = [english(17 * i + size, tokenizer, cfg) for i, (size, _) in enumerate(sizes)]
        return [ids[-size:] for ids, (size, _) in zip(texts, sizes)], [new for _, new in sizes]

    def needs(self, cfg, dtype: torch.dtype, cached: bool) -> int:
        """Bytes, roughly: the cache, ten activations as wide as the model, logits three times."""
        per_token = cached * 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * dtype.itemsize
        n_seen = self.n_prompt + self.n_new * (not cached)
        return self.batch * (per_token * self.length()
                             + n_seen * 10 * cfg.dim * dtype.itemsize + 12 * cfg.vocab_size)

    def __str__(self):
        if self.n_request:
            return f"rq{self.n_request} @ d1-{self.n_prompt}, tg1-{self.n_new}"
        where = self.text.name if self.text else f"d{self.n_prompt}"
        name = f"tg{self.n_new} @ {where}" if self.n_new > 1 else f"pp{self.n_prompt}"
        return name + f", cache {self.n_cache}" * bool(self.n_cache)


def english(n: int, tokenizer, cfg) -> list[int]:
    """n tokens of Python's own documentation, or random ones where there is no tokenizer.

    Not always random: after nonsense, rounding alone can change what a model says in bf16.
    """
    if n < cfg.context and not isinstance(tokenizer, NullTokenizer):
        return tokenizer.encode(english_text()[:20 * n])[:n]
    return batch.encode_prompt(str(n), tokenizer, cfg, seed=0)


def text_ids(path: Path, tokenizer) -> list[int]:
    """A file as a message where the model has a chat template, else as it is."""
    text = path.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([dict(role="user", content=text)])


def twin(model: Transformer) -> Transformer:
    """Another model of the same weights, not a copy, so that each engine can compile its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def by_sorting(model, tokens, pos, last, n_key, noise, how, seen, rows=None) -> Tensor:
    """As generate's prefill, the textbook's way: top-p by sorting the whole vocabulary."""
    logits = model(tokens, pos, last, n_key, rows)[:, -1]
    probs = torch.softmax(logits / how.temperature, -1)
    ordered = probs.sort(-1, descending=True).values
    n_kept = (ordered.cumsum(-1) - ordered < how.top_p).sum(-1, keepdim=True)
    least = ordered.gather(-1, n_kept - 1)                 # and all that are as likely
    return (probs * (probs >= least) / noise).argmax(-1, keepdim=True)


class Engine:
    """One of LADDER on a model's weights, compiled and warm. how: unless the engine says it."""

    def __init__(self, name: str, model: Transformer, prompts: list, test: Test, tokenizer,
                 how: Sampling = GREEDY):
        self.model, self.tokenizer, self.cached = twin(model), tokenizer, name != "recompute"
        if test.n_request and name in ("recompute", "sorted", "sort_free"):
            raise ValueError("takes one prompt at a time")
        self.how = TYPICAL if name in ("sorted", "sort_free") else how
        self.speculator, self.seed = None, 0
        self.model.setup_cache(test.batch * self.cached, test.length(), PREFILL_CHUNK)
        base = "compile" if name == GUESSING else name.removesuffix("+prefill")
        self.steps = build_steps(self.model, base if base in ENGINES else "kv_cache",
                                 name.endswith("+prefill"))
        if name == GUESSING:
            self.speculator = build_speculator(8, False, None, base, self.model.freq.device.type)
        if name == "sorted":
            self.steps = Steps(by_sorting, lambda model, token, pos, *rest: by_sorting(
                model, token, pos, 1, *rest))
        self.compile_s = None
        if base in ("compile", "cuda_graph"):
            start = time.perf_counter()
            begin = 1 if test.n_request else test.n_prompt + 1
            lengths = range(begin, test.n_prompt + test.n_new)
            warm_up(self.model, prompts[:test.batch], lengths, self.how, self.steps,
                    self.speculator)
            if self.speculator:
                n_key = bucket(test.n_prompt + 1, test.length())
                measure(self.speculator, self.model, self.steps, n_key, self.how)
            self.compile_s = time.perf_counter() - start

    def tokens(self, prompts: list, n_new: int | None) -> Iterator[Tensor]:
        generator = torch.Generator(self.model.freq.device).manual_seed(self.seed)
        return generate(self.model, prompts, n_new, self.how, generator, self.steps, self.cached,
                        speculator=self.speculator)

    def __call__(self, prompts: list, n_new: int) -> tuple[list[list[int]], list[float]]:
        """-> each row's new tokens, and follow()'s times."""
        rows = [Sequence(self.tokenizer, []) for _ in prompts]
        self.seed += self.how not in (GREEDY, TYPICAL)     # another text each time
        times, interrupted = follow(self.tokens(prompts, n_new), rows, None)
        if interrupted:
            raise KeyboardInterrupt
        return [row.ids for row in rows], times

    def serve(self, prompts: list, news: list[int], n_slots: int) -> tuple[list[list[int]], dict]:
        """-> each prompt's new tokens, and the seconds of the whole and of each."""
        rows = {Sequence(self.tokenizer, p, max_new=n): i
                for i, (p, n) in enumerate(zip(prompts, news))}
        start = time.perf_counter()
        done = list(batch.serve(rows, n_slots, lambda some: read_late(self.tokens(some, None))))
        done.sort(key=lambda one: rows[one.row])
        return [one.row.ids for one in done], dict(
            total_s=time.perf_counter() - start, request_s=[d.end_s - d.begun_s for d in done],
            first_s=[d.first_s - d.begun_s for d in done])

    def cache_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for m in self.model.modules()
                   if isinstance(m, KVCache) for t in (m.k, m.v))


class Script:
    """generate.py itself, a process for each run, as a check that its figures and ours agree."""

    def __init__(self, argv: list[str]):
        self.argv = [sys.executable, str(HERE / "generate.py"), *argv, "--compile", "--json",
                     "--ignore_eos", "--temperature", "0"]

    def __call__(self, prompt: list[int], n_new: int, n_row: int) -> dict:
        done = subprocess.run([*self.argv, "--prompt", str(len(prompt)), "--max_new_tokens",
                               str(n_new), "--batch_size", str(n_row)], capture_output=True,
                              text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        said = json.loads(done.stdout.splitlines()[0])
        step_s = said["decode_tok_s"] and 1 / said["decode_tok_s"]
        return dict(said, step_s=step_s, ids=said["new_ids"])

    def serve(self, *_):
        raise ValueError("takes one prompt at a time, here")

    def close(self):
        pass


# ---- What they say ------------------------------------------------------------------------------

def margin(model: Transformer) -> float:
    """In logits. Rounding makes a router exchange near-tied experts, so mixtures get twice that."""
    sparse = any(model.cfg.sparse) and model.dtype != torch.float32
    return MARGIN[model.dtype] * (1 + sparse)


@torch.inference_mode()
def agrees(model: Transformer, prompt: list[int], ids: list[int], margin: float) -> bool:
    """Teacher-forced: is each token, after those before it, within `margin` of the best logit?"""
    whole = torch.tensor([prompt + ids], device=model.freq.device)
    model.setup_cache(0, whole.shape[1])
    pos = torch.arange(whole.shape[1] - 1, device=whole.device)
    logits = model(whole[:, :-1], pos, keep=len(ids))[0]
    chosen = logits.gather(1, whole[0, -len(ids):, None])[:, 0]
    return bool((logits.amax(-1) - chosen <= margin).all())


def compare(case: "Case", cases: list["Case"], test: Test) -> bool | None:
    """Does every row of the case's last run say what it should?

    In fp32 the tokens are those of the first engine with these weights; else an uncached forward is
    asked, see agrees(). Engines that sample draw the same as the other one of them.
    """
    engine = case.engine_run
    if engine.how not in (GREEDY, TYPICAL):
        return None                                # each draws its own
    said = {(tuple(prompt), tuple(ids)) for prompt, ids in zip(case.prompts, case.tokens)}
    if engine.how != GREEDY:
        other = Engine("sorted" if case.engine == "sort_free" else "sort_free", case.model,
                       case.prompts, test, engine.tokenizer)
        return case.tokens == other(case.prompts, test.n_new)[0]
    if engine.model.dtype == torch.float32:
        first = next(c for c in cases if c.model is case.model and c.tokens and not c.error
                     and c.engine_run.how == GREEDY)
        if case is not first:
            return case.tokens == first.tokens
    return all(agrees(twin(case.model), list(prompt), list(ids), margin(case.model))
               for prompt, ids in said)


# ---- One test -----------------------------------------------------------------------------------

@dataclass
class Case:
    """An engine or peer with a model's weights, and what came of it."""

    name: str                                      # of the model
    cfg: ModelConfig                               # of all ranks together
    n_parameters: int
    quantization: str                              # of its weights, or none
    dtype: torch.dtype
    engine: str
    model: Transformer | None = None               # None: it does not fit
    how: Sampling = GREEDY
    start: Callable | None = None                  # peers: -> what answers (ids, n_new, batch)
    prompts: list = field(default_factory=list)    # of ids, a row each, or a request each
    news: list = field(default_factory=list)       # and how many new tokens each gets
    error: str | None = None
    engine_run: "Engine | peers.Peer | Script | None" = None
    tokens: list = field(default_factory=list)     # of the last run
    results: list[dict] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)                # between tokens, seconds
    peak: int | None = 0                           # bytes

    def attempt(self, what: Callable) -> None:
        """Out of memory and whatever else a case cannot do is its row's, not the run's."""
        try:
            what()
        except (RuntimeError, ValueError, OSError, AssertionError) as e:
            if tp.world() > 1 and not isinstance(e, ValueError):           # the others wait
                raise
            memory = isinstance(e, torch.OutOfMemoryError) or "allocate memory" in str(e)
            line = (str(e).strip() or type(e).__name__).splitlines()[0][:160]
            self.error = "out of memory: " * memory + line
            self.engine_run = None
            log(f"{self.engine}: {self.error}")

    def prepare(self, tokenizer, test: Test) -> None:
        log(f"Preparing {self.name} {self.quantization} {self.engine} {test}")
        needed = test.needs(self.model.cfg, self.model.dtype, self.engine != "recompute")
        device = self.model.freq.device
        free = free_memory(device)
        if device.type == "cpu" and (self.engine == GUESSING or self.engine.startswith("compile")):
            needed += sum(p.nbytes for module in self.model.modules()      # beside all engines'
                          if quantize.has_compiled_layout(module) for p in module.parameters())
        if self.start:
            self.engine_run = self.start()
        elif needed > free:                        # a CPU's allocator would not say no
            raise torch.OutOfMemoryError(
                f"some {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} free")
        else:
            self.engine_run = Engine(self.engine, self.model, self.prompts, test, tokenizer,
                                     self.how)

    def run(self, test: Test, count: bool) -> None:
        device, read_bytes = self.model.freq.device, weight_bytes(self.model)[1]
        before, news = reset_peak_memory(device), [min(n, test.n_new) for n in self.news]
        if test.n_request and self.start:
            said = self.engine_run.serve(self.prompts, news, test.batch)
            self.peak = said["peak_memory_bytes"]
        elif self.start:
            said = self.engine_run(self.prompts[0], test.n_new, test.batch)
            times = [0.0, said["ttft_s"]]
            steps = [said["step_s"]] * (test.n_new - 1)
            times += [said["ttft_s"] + (i + 1) * s for i, s in enumerate(steps)]
            self.peak = said["peak_memory_bytes"]
        else:
            if test.n_request:
                self.tokens, said = self.engine_run.serve(self.prompts, news, test.batch)
            else:
                self.tokens, times = self.engine_run(self.prompts, test.n_new)
                steps = [b - a for a, b in zip(times[1:], times[2:])]
            grown = peak_memory(device) - before
            held = weight_bytes(self.model)[0] + self.engine_run.cache_bytes()
            self.peak = max(self.peak, held + grown)
        if count and test.n_request:
            self.results.append(dict(
                ttft_s=statistics.median(said["first_s"]) if said["first_s"] else None,
                bandwidth_gb_s=0.0,
                decode_tok_s_total=sum(news) / said["total_s"],
                per_request=statistics.median(n / s for n, s in zip(news, said["request_s"]))))
        elif count:
            read_bytes *= self.engine != GUESSING  # there a step gives several tokens
            f = figures(times, test.n_prompt, test.batch, read_bytes)
            speed = f["decode_tok_s_total"] or f["prefill_tok_s"]
            self.results.append(dict(f, per_request=speed / test.batch))
            self.gaps += steps

    def row(self, cases: list["Case"], test: Test, bandwidths: list[float]) -> dict:
        foreign = self.engine in peers.NAMES and self.quantization != "none"   # other bytes
        row = dict(
            model=self.name, parameters=self.n_parameters, engine=self.engine,
            quantization=self.quantization, dtype=str(self.dtype)[6:],
            model_bytes=weight_bytes(self.model)[0] if self.model and not foreign else None,
            ranks=tp.world(), sent_bytes=tp.sent_bytes(self.cfg, self.dtype),
            test=str(test), n_prompt=test.n_prompt, n_new=test.n_new if test.n_new > 1 else 0,
            batch=test.batch, error=self.error)
        measured = ("tok_s", "tok_s_runs", "tok_s_min", "tok_s_max", "tok_s_per_request", "ttft_ms",
                    "itl_ms", "itl_p99_ms", "peak_memory_bytes", "compile_s", "achieved_gb_s",
                    "bandwidth_fraction", "compared")
        if not self.results or self.error:
            return row | dict.fromkeys(measured)
        decoding = test.n_new > 1
        speeds = [f["decode_tok_s_total" if decoding else "prefill_tok_s"] for f in self.results]
        speed = statistics.median(speeds)
        gaps, ttfts = sorted(self.gaps), [f["ttft_s"] for f in self.results if f["ttft_s"]]
        moved = [f["bandwidth_gb_s"] or 0.0 for f in self.results if decoding and not foreign]
        moved = moved if any(moved) else []
        compared = None if self.start else compare(self, cases, test)
        return row | dict(zip(measured, (
            speed, speeds, min(speeds), max(speeds),
            statistics.median(f["per_request"] for f in self.results),
            1e3 * statistics.median(ttfts) if ttfts else None,
            1e3 * statistics.median(gaps) if gaps else None,
            1e3 * gaps[len(gaps) * 99 // 100] if gaps and not self.start else None,
            self.peak, getattr(self.engine_run, "compile_s", None),
            statistics.median(moved) if moved else None,
            statistics.median(a / b for a, b in zip(moved, bandwidths)) if moved else None,
            compared), strict=True))


def run_test(cases: list[Case], tokenizers: dict, test: Test, repetitions: int,
             device: torch.device) -> tuple[list[dict], list[float]]:
    """Every case interleaved with the others, in random order -> rows, and bandwidths in GB/s."""
    cases = [replace(case, tokens=[], results=[], gaps=[]) for case in cases]
    torch._dynamo.reset()                          # what earlier tests compiled is in the way
    bandwidths = [read_bandwidth(device)]          # all there is if nothing runs
    for case in cases:
        tokenizer = tokenizers[case.name]
        if case.error is None:
            case.prompts, case.news = test.work(tokenizer, case.model.cfg)
            case.attempt(lambda case=case, t=tokenizer: case.prepare(t, test))
    for i in range(repetitions + 1):               # the first round warms up
        read = []                                  # between the runs of this round
        for case in random.sample(cases, len(cases)):
            if case.error is None:
                read += [read_bandwidth(device)] if i else []
                time.sleep(PAUSE)                  # let clocks and caches of the last one settle
                n_new = test.n_new if i else min(test.n_new, 16)
                case.attempt(lambda c=case, n=n_new, i=i: c.run(test._replace(n_new=n), i > 0))
        if read:
            bandwidths.append(statistics.median(read))
    rows = [case.row(cases, test, bandwidths[1:]) for case in cases]
    for case in cases:
        if case.start and case.engine_run:
            case.engine_run.close()
    return rows, bandwidths


@torch.inference_mode()
def profile(case: Case, tokenizer, test: Test, path: Path) -> str:
    """A Chrome trace of steady decode steps -> the ten largest kernels, as text."""
    case.prepare(tokenizer, test)
    tokens = case.engine_run.tokens(case.prompts, test.n_new)
    for _ in range(test.n_new // 2):
        next(tokens)
    n_steps = min(20, test.n_new - test.n_new // 2)
    with torch.profiler.profile() as trace:
        for _ in range(n_steps):
            next(tokens)
        synchronize(case.model.freq.device)
    trace.export_chrome_trace(str(path))
    kind = "self_device_time_total" if case.model.freq.is_cuda else "self_cpu_time_total"
    largest = sorted(trace.key_averages(), key=lambda e: -getattr(e, kind))[:10]
    lines = [f"{case.engine} {case.quantization}: {n_steps} steps, the largest:"]
    for e in largest:
        key = e.key if len(e.key) < 90 else f"{e.key[:60]} … {e.key[-26:]}"
        ms = getattr(e, kind) / n_steps / 1e3
        lines.append(f"{ms:9.3f} ms per step {e.count / n_steps:6.0f} calls  {key}")
    return "\n".join(lines)


# ---- The command --------------------------------------------------------------------------------

def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def counts(least: int) -> Callable:
    """An argparse type: integers with commas."""
    return lambda text: [number(int, least)(n) for n in names(text)]


def build_parser():
    p = Parser(description="Benchmark engines; the table goes to stdout.", formatter_class=Help)
    add = p.add_argument_group("models").add_argument
    add("--checkpoint_path", "--model", "-m", "--init_from", action="append",
        metavar="PATH_OR_NAME", help="as generate.py's, or a shape of --random; repeatable")
    add("--random", metavar="NAMES", help="known shapes with random weights, with commas")
    add("--quantize", default="none", metavar="LIST",
        help="none, int8, int4 (groups of 32), int4-g64, …, with commas: every engine with each; a "
             "file that is quantized already stays as it is with none")
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    add = p.add_argument_group("tests, each with commas").add_argument
    add("-p", "--n_prompt", type=counts(1), default=[], metavar="LIST",
        help="time prompts of so many tokens: ppN")
    add("-n", "--max_new_tokens", type=counts(0), default=[200], metavar="LIST",
        help="time decoding so many tokens: tgN; 0: do not")
    add("-d", "--depth", type=counts(1), default=[5], metavar="LIST",
        help="tokens before the new ones: tgN @ dN")
    add("-b", "--batch_size", type=counts(1), metavar="LIST",
        help="rows; default: 1, or 1,8,64,512 with --init_from")
    add("--text", type=Path, metavar="FILE",
        help="a prompt, as a message where the model has a chat template; instead of DEPTH")
    add("--temperature", type=number(float, 0), default=0.0,
        help="of all but sorted and sort_free; above 0 each run draws its own text")
    add("--max_seq_length", type=counts(0), default=[0], metavar="LIST",
        help="positions of the cache, where more than needed; 0: what is needed")
    add("--requests", type=number(int, 1), metavar="N",
        help="instead: N prompts of 1 to DEPTH tokens with 1 to MAX_NEW_TOKENS new ones, of which "
             "BATCH_SIZE run at a time: total tok/s, and the median of a request's")
    add = p.add_argument_group("runs").add_argument
    add("--engines", metavar="LIST",
        help=f"of {', '.join(LADDER)}, {GUESSING} (compile with tokens guessed ahead), int8, int4, "
             "int4-g64, … (compile with weights like that); "
             "sorted and sort_free sample (temperature 0.8, top-p 0.95), the others are greedy; "
             "default: kv_cache,compile, or the whole ladder with --init_from")
    add("--peers", default="", metavar="LIST",
        help=f"in the same run, of {', '.join(PEERS)}: see scripts/install_peers.sh; generate.py "
             "is ours, as a check")
    add("--ranks", type=counts(1), default=[], metavar="LIST",
        help="the same on so many processes of this machine, which share the model")
    add("-r", "--repetitions", type=number(int, 1), default=5, help="interleaved, in random order")
    add("--suite", choices=SUITES,
        help="a list of benchmarks, into benchmarks/MACHINE.json; goes on where it was "
             "interrupted, at the same commit")
    add("--only", metavar="TITLES", help="of the suite, these tables, with commas")
    add = p.add_argument_group("output").add_argument
    add("-o", "--output", default="md", choices=list(OUTPUTS), help="on stdout")
    add("--plot", type=Path, metavar="DIR", help="charts of throughput, first token, memory and "
                                                 "bandwidth, as PNG (needs matplotlib)")
    add("--profile", type=Path, metavar="DIR",
        help="instead of timing, a Chrome trace of steady decode steps for each case and test, "
             "and the ten largest kernels")
    return p


def is_scheme(name: str) -> bool:
    return name == "int4" or name in SCHEMES


def llama_cpp_format(scheme: str) -> str | None:
    """llama.cpp's equivalent of what formats.quantized.schemes() gives, None if there is none."""
    if scheme == "none":
        return "BF16"
    return SCHEMES[scheme].gguf if scheme in SCHEMES else None


def read_engines(args, nano: bool) -> list[tuple[str, str]]:
    """-> (engine, scheme) in the order of the rows."""
    asked = names(args.engines if args.engines is not None
                  else ",".join(LADDER) if nano else "kv_cache,compile")
    schemes = names(args.quantize)
    if not asked or not schemes:
        raise ValueError(f"--engines or --quantize names none: choose from {', '.join(LADDER)}, "
                         "int8, int4")
    for name in asked:
        if name not in (*LADDER, GUESSING) and not is_scheme(name):
            raise ValueError(f"unknown engine '{name}' (engines: {', '.join(LADDER)}, {GUESSING}, "
                             "int8, int4, int4-g64, …)")
    for scheme in schemes:
        if scheme != "none" and not is_scheme(scheme):
            raise ValueError(f"--quantize {scheme}: expected none, int8, int4, or int4-g64 (groups "
                             "of 32, 64, 128 or 256)")
    engines = [name for name in asked if name in (*LADDER, GUESSING)]
    pairs = [(name, scheme) for scheme in schemes for name in engines]
    return pairs + [("compile", name) for name in asked if name not in engines]


def read_models(args) -> list[tuple[str | None, str | None]]:
    """-> (path, None) or (None, shape). A shape's name serves as -m where no such file is."""
    shapes = {shape.lower(): shape for shape in SHAPES}
    if args.random is not None and args.checkpoint_path:
        raise ValueError("--random and --checkpoint_path exclude each other")
    if args.random is not None and not names(args.random):
        raise ValueError("--random names none: known shapes are " + ", ".join(shapes.values()))
    if args.random is not None:
        return [(None, shape) for shape in names(args.random)]
    found = []
    for path in args.checkpoint_path or [None]:
        shape = path and not Path(path).exists() and shapes.get(path.lower())
        if shape:
            log(f"{path}: no such file, so random weights of that shape")
        found.append((None, shape) if shape else (path, None))
    return found


def build_cases(path, shape, pairs, peer_names, args, device, length) -> tuple[list[Case], object]:
    """All engines and peers for one model; each scheme's weights are loaded once."""
    source, tokenizer = open_model(path, shape)
    dtype = pick_dtype(args.dtype, device, source.cfg)
    if length > source.cfg.context:
        raise ValueError(f"{length} tokens exceed the context of {source.cfg.context}")
    n_parameters, name = count_parameters(source.cfg), source.path.name
    cases, model_of = [], {}
    for scheme in dict.fromkeys(scheme for _, scheme in pairs):
        model, packed, error = None, source, None
        try:
            if scheme != "none":
                mode, _, group = scheme.partition("-g")
                packed = quantized(source, mode, int(group or 32), device=device)
            needed = n_bytes(tp.shard(packed), dtype)
            if needed > free_memory(device) / (tp.n_local() if device.type == "cpu" else 1):
                raise torch.OutOfMemoryError(f"the weights take {needed / 1e9:.1f} GB")
            model = load_shard(packed, dtype, device)
        except torch.OutOfMemoryError as e:
            error = f"out of memory: {str(e).splitlines()[0][:160]}"
            log(f"{name} {scheme}: {error}")
        model_of[scheme] = model, schemes(packed)[0], error
    for engine, scheme in pairs:
        model, stated, error = model_of[scheme]
        if engine == "cuda_graph" and device.type != "cuda":
            error = "needs an NVIDIA GPU"
        cases.append(Case(name, source.cfg, n_parameters, stated, dtype, engine, model, error=error,
                          how=Sampling(args.temperature)))
    for peer in peer_names:
        for scheme, (model, stated, error) in model_of.items():
            case = Case(name, source.cfg, n_parameters, stated, dtype, peer, model, error=error)
            if peer.startswith(("transformers", "vllm")) and scheme != "none":
                continue                           # plain weights only
            case.start = start_peer(peer, source, shape, stated, scheme, dtype, device, length)
            cases.append(case)
    return cases, tokenizer


def start_peer(peer, source, shape, stated, scheme, dtype, device, length) -> Callable:
    """-> a function that starts the peer with these weights, or raises ValueError with why not."""
    def start():
        if peer == "generate.py":
            mode, _, group = scheme.partition("-g")
            argv = ["--random", shape] if shape else ["-m", str(source.path)]
            argv += [] if scheme == "none" else ["--quantize", mode, "--groupsize", group or "32"]
            return Script([*argv, "--device", str(device), "--dtype", str(dtype)[6:]])
        path, folder = source.path, HERE / "checkpoints/twins"
        if peer == "llama.cpp":
            kind = llama_cpp_format(stated)
            if kind is None or dtype != torch.bfloat16:
                raise ValueError(f"no twin of {stated} weights in {str(dtype)[6:]}")
            path = peers.gguf_twin(source, folder / f"{path.stem}.{kind}.gguf", kind)
        elif shape and peer.startswith("transformers"):
            path = peers.hf_twin(source.cfg, folder / f"{shape}.json")
        elif shape:
            raise ValueError("reads files, not random shapes")
        elif path.suffix in (".safetensors", ".json", ".bin"):
            path = path.parent
        elif path.suffix != ".gguf" and not path.is_dir():
            raise ValueError("reads Hugging Face directories and GGUF files")
        return peers.Peer(peer, path, threads=torch.get_num_threads(), device=device.type,
                          dtype=str(dtype)[6:], length=length)
    return start


def run(argv=None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    said = shlex.join(["python", "benchmark.py", *(sys.argv[1:] if argv is None else argv)])
    device = pick_device(tp.local_device(args.device))
    if args.plot:
        plots.load_matplotlib()                    # complains now, not after an hour
    if args.suite == "gpu" and device.type == "cpu":
        raise ValueError("--suite gpu needs a GPU, the device is cpu: use --suite cpu")
    given = {k for k, value in vars(args).items() if value != parser.get_default(k)}
    if args.only and not args.suite:
        raise ValueError("--only chooses from a --suite")
    if tp.world() > 1 and (args.suite or args.peers or args.ranks):
        raise ValueError("--suite, --peers and --ranks are not for torchrun: they start processes "
                         "of their own")
    if args.suite and (more := given - {"suite", "device", "plot", "only"}):
        raise ValueError(f"--suite has its own commands and does not go with --{min(more)}")
    if args.suite:
        titles = names(args.only) if args.only else list(SUITES[args.suite])
        if unknown := [title for title in titles if title not in SUITES[args.suite]]:
            raise ValueError(f"--only {unknown[0]}: the tables are {', '.join(SUITES[args.suite])}")
        return run_suite(args.suite, titles, device, args.plot)
    if args.ranks:
        return run_ranks(args, sys.argv[1:] if argv is None else argv, said)
    nano = bool(re.search(r"--init[-_]from\b", said))
    pairs, models, peer_names = read_engines(args, nano), read_models(args), names(args.peers)
    for peer in peer_names:
        if peer not in PEERS:
            raise ValueError(f"unknown peer '{peer}' (peers: {', '.join(PEERS)})")
    batches = args.batch_size or ([1, 8, 64, 512] if nano else [1])
    if any(n == 1 for n in args.max_new_tokens):
        raise ValueError("-n 1: decoding is timed between tokens, so at least 2 (or 0: -p alone)")
    tests = [Test(n, 1, b) for n in args.n_prompt for b in batches]
    if args.text and args.requests:
        raise ValueError("--text and --requests exclude each other")
    tests += [Test(d, n, b, cache, args.requests or 0, args.text) for d in args.depth
              for n in args.max_new_tokens if n for cache in args.max_seq_length for b in batches]
    if not tests:
        raise ValueError("nothing to time: give -p or -n")
    for folder in (args.plot, args.profile):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    if args.profile:
        torch._inductor.config.cpp.enable_kernel_profile = True
    cases, tokenizers = [], {}
    if args.text:                                  # its length is the first model's
        tokenizer = open_model(*models[0])[1]
        tests = [test._replace(n_prompt=len(text_ids(args.text, tokenizer))) for test in tests]
    length = max(test.length() for test in tests)
    for path, shape in models:
        found, tokenizer = build_cases(path, shape, pairs, peer_names, args, device, length)
        tokenizers[found[0].name] = tokenizer
        cases += found
    if args.profile:
        return run_profile(cases, tokenizers, tests, args.profile, device)

    result, rows, bandwidths = machine(device), [], []
    for test in tests:
        more, measured = run_test(cases, tokenizers, test, args.repetitions, device)
        rows, bandwidths = rows + more, bandwidths + measured
        gc.collect()
    result |= dict(command=said, repetitions=args.repetitions,
                   bandwidth_gb_s=statistics.median(bandwidths), rows=rows)
    print(OUTPUTS[args.output](result), flush=True)
    if args.plot and tp.rank() == 0:
        for path in plots.plot(result, args.plot):
            log(f"Wrote {path}")
    wrong = [(row, "says other tokens than the reference") for row in rows
             if row["compared"] is False]
    wrong += [(row, f"failed: {row['error']}") for row in rows if row["error"] and not (
        row["engine"] in PEERS or re.match("out of memory|needs an|takes one", row["error"]))]
    for row, why in wrong:
        log(f"benchmark.py: error: {row['engine']} ({row['quantization']}, {row['test']}, batch "
            f"{row['batch']}) {why}")
    return 1 if wrong else 0


def run_ranks(args, argv: list[str], said: str) -> int:
    """The same with each number of ranks, in processes of their own, as one table."""
    for flag in ("suite", "peers", "plot", "profile"):
        if getattr(args, flag):
            raise ValueError(f"--ranks does not go with --{flag}")
    results, status = [], 0
    for n in args.ranks:
        log(f"== {n} ranks")
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
        done = subprocess.run([sys.executable, *(start if n > 1 else []), HERE / "benchmark.py",
                               *argv, "--ranks", "", "-o", "json"], stdout=subprocess.PIPE)
        status = max(status, done.returncode)
        results += [json.loads(done.stdout)] if done.stdout else []
        if done.returncode == 130 or not done.stdout:
            break
    if results:
        result = dict(results[0], command=said, rows=[row for r in results for row in r["rows"]])
        print(OUTPUTS[args.output](result), flush=True)
    return status


def run_profile(cases, tokenizers, tests, folder: Path, device) -> int:
    for test in (t for t in tests if t.n_new > 1):
        for case in (c for c in cases if not c.start and not c.error):
            case.prompts, case.news = test.work(tokenizers[case.name], case.model.cfg)
            name = f"{case.name}-{case.quantization}-{case.engine}-{test}-b{test.batch}"
            path = folder / f"{slug(name)}{f'.rank{tp.rank()}' * bool(tp.rank())}.json"
            print(profile(case, tokenizers[case.name], test, path), flush=True)
            log(f"Trace written to {path}")
    return 0


def slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower())


def run_suite(suite: str, titles: list[str], device: torch.device, charts: Path | None) -> int:
    """Each entry in a process of its own, so that its memory is too; the file grows by entry."""
    about = machine(device)
    name = slug(f"{about['machine']} {about['threads']} threads")
    path, status = HERE / f"benchmarks/{name}.json", 0
    path.parent.mkdir(exist_ok=True)
    tables = json.loads(path.read_text())["tables"] if path.exists() else {}
    for title, command in SUITES[suite].items():
        if title not in titles:
            continue
        if tables.get(title, {}).get("commit") == about["commit"]:
            log(f"{title}: measured already at {about['commit']}")
            continue
        log(f"== {title}: benchmark.py {command}")
        done = subprocess.run([sys.executable, str(HERE / "benchmark.py"), *shlex.split(command),
                               "--device", str(device), "-o", "json"], stdout=subprocess.PIPE,
                              text=True)
        if done.returncode == 130:
            return 130
        status = max(status, done.returncode)
        if not done.stdout:
            log(f"{title}: no result, exit status {done.returncode}")
            continue
        tables[title] = json.loads(done.stdout)
        tables[title]["command"] = f"python benchmark.py {command}"
        tables = {t: tables[t] for t in SUITES[suite] if t in tables}      # in that order
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dict(about, tables=tables), indent=1) + "\n")
        os.replace(partial, path)
        print(f"### {title}\n\n{table(tables[title])}\n", flush=True)
        if charts:
            plots.plot(tables[title], charts / slug(title))
    return status


def main() -> int:
    return guarded(tp.as_rank(run))
