"""What scripts/gpu_measure.py measures on a GPU, part by part: products, attention, checks, models.

A part is a function of a Run that calls run.row() for each of its rows, the most valuable first. A
row that fails prints its error, and the next one runs. Every size is in a Sizes, so that a test
runs each row's code on a CPU. It knows no plan and starts no part.

    run = Run(torch.device("cuda"), Sizes(), limit=60, record=print); products(run)
"""

import contextlib
import copy
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import quantize
from gpt_faster.bench import cases as bench_cases
from gpt_faster.bench import machine, serving
from gpt_faster.bench.exports import export_hf
from gpt_faster.bench.machine import ROOT, synchronize
from gpt_faster.bench.workloads import Workload
from gpt_faster.formats.known_shapes import with_random_weights
from gpt_faster.kernels.cuda.cached_attention import (
    cached_attention,
    plain_attention,
    scales_and_turns,
)
from gpt_faster.kernels.cuda.matvec import matvec
from gpt_faster.kernels.cuda.products import INT4_CUDA, INT8_CUDA, prompt_product
from gpt_faster.layers.quantized_cache import QuantizedCache
from gpt_faster.loading import open_model
from model import KVCache
from tokenizer import NullTokenizer

# a layer of Llama-3.1-8B: outputs (of gate and up: each), inputs, gated, normalized
PRODUCTS = {"qkv": (6144, 4096, False, True), "out": (4096, 4096, False, False),
            "gate, up": (14336, 4096, True, True), "down": (4096, 14336, False, False)}
# heads, key heads, head width; new tokens; keys; slots of the cache
ATTENTION = (((32, 8, 128), 1, 205, 208), ((32, 8, 128), 1, 205, 16384),
             ((32, 8, 128), 1, 8192, 16384), ((32, 8, 64), 1, 205, 208),
             ((32, 8, 64), 1, 8192, 16384), ((32, 8, 128), 5, 8192, 16384),
             ((32, 8, 128), 1, 8192, 16384, "int8"), ((32, 8, 128), 1, 8192, 16384, "int4"))
MOST_ERROR = 0.03                                  # relative, in bf16; right ones have 0.005


@dataclass(frozen=True)
class Sizes:
    """Of what is measured. models: a shape's config by name, instead of the known ones."""

    products: dict = field(default_factory=lambda: PRODUCTS)
    attention: tuple = ATTENTION
    cycled: int = 512 << 20                        # bytes of weights in turn: beyond every cache
    launches: int = 24                             # in a graph, at least
    replays: int = 9
    new_tokens: int = 200
    prompt: int = 2048
    prompt_rows: tuple = (32, 128, 16, 64)         # of products by codes
    repetitions: int = 2
    clients: int = 8
    requests: int = 24
    models: dict = field(default_factory=dict)
    engines: dict = field(default_factory=dict)    # others instead of these


class Run:
    """Where rows go, and until when they may start."""

    def __init__(self, device: torch.device, sizes: Sizes, limit: float,
                 record: Callable[[dict], None]):
        self.device, self.sizes, self.record = device, sizes, record
        self.end = time.monotonic() + limit

    def row(self, name: str, seconds: float, measure: Callable[..., dict], *args) -> dict | None:
        """measure(*args), unless its usual seconds are not left -> what it gave, if it did."""
        start = time.monotonic()
        figures = None
        if self.end - start < seconds:
            result = dict(skipped=f"{self.end - start:.0f} s are left, it needs about {seconds}")
        else:
            try:
                result = figures = measure(*args)
            except Exception as e:                 # the other rows must still be measured
                result = dict(error=f"{type(e).__name__}: {first_line(e)}")
        self.record(dict(row=name, **result, took_s=round(time.monotonic() - start, 1)))
        return figures


@contextlib.contextmanager
def without_pauses() -> Iterator[None]:
    """For sizes at which nothing is measured: no pause between runs, little memory to read."""
    before = bench_cases.PAUSE, machine.N_FLOATS
    bench_cases.PAUSE, machine.N_FLOATS = 0.0, 1 << 16
    machine._cpu_buffer.cache_clear()
    try:
        yield
    finally:
        bench_cases.PAUSE, machine.N_FLOATS = before
        machine._cpu_buffer.cache_clear()


def first_line(e: Exception) -> str:
    return (str(e).strip() or "no message").splitlines()[0][:200]


# ---- Kernels ------------------------------------------------------------------------------------

def microseconds(run: Run, launches: list[Callable]) -> float:
    """Of one launch, by a CUDA graph of them in turn: the median of the replays."""
    n = max(len(launches), run.sizes.launches)

    def all_of_them():
        for i in range(n):
            launches[i % len(launches)]()
    launches[0]()                                  # compiles
    synchronize(run.device)
    if run.device.type != "cuda":
        start = time.perf_counter()
        all_of_them()
        return (time.perf_counter() - start) / n * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    times = []
    for _ in range(run.sizes.replays + 1):         # the first warms up
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        synchronize(run.device)
        times.append(begin.elapsed_time(end) * 1e3 / n)
    return sorted(times[1:])[len(times[1:]) // 2]


def random_leaves(scheme, n_row: int, n_in: int, device) -> dict[str, Tensor]:
    """A scheme's tensors of a matrix, drawn on the device."""
    leaves = {}
    for name, t in scheme.quantize(torch.randn(8, n_in)).items():
        shape = (n_row, *t.shape[1:])
        if t.is_floating_point():
            leaves[name] = (torch.rand(shape, device=device) * 0.01 + 0.005).to(t.dtype)
        else:
            limits = torch.iinfo(t.dtype)
            leaves[name] = torch.randint(limits.min, limits.max + 1, shape, device=device,
                                         dtype=t.dtype)
    return leaves


def relative_error(y: Tensor, x: Tensor, weight: Tensor, norm: Tensor | None,
                   gated: bool) -> float:
    """Of a product, beside fp32's with the weight written out."""
    h = x.float()
    if norm is not None:
        h = F.rms_norm(h, h.shape[-1:], norm, 1e-5)
    expected = F.linear(h, weight)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    return ((y.float() - expected).norm() / expected.norm()).item()


def one_product(run: Run, shape: tuple, scheme, rows: int, by: str = "ours") -> dict:
    """µs, bytes a second, error. scheme: None for bf16. by: ours, with norm and gate; BLAS; fused,
    as a prompt's; written out, for BLAS.
    """
    n_out, n_in, gated, has_norm = shape
    n_row = n_out * (2 if gated else 1)
    device, dtype = run.device, torch.bfloat16
    x = torch.randn(rows, n_in, device=device).to(dtype)
    is_whole = by == "ours"
    norm = torch.rand(n_in, device=device) + 0.5 if has_norm and is_whole else None
    first = dense = None
    sets = []
    n_bytes = 0
    while len(sets) < 2 or n_bytes * len(sets) < run.sizes.cycled:
        if scheme is None:
            leaves = dict(weight=torch.randn(n_row, n_in, device=device, dtype=dtype) * 0.02)
            packed = (leaves["weight"],)
        else:
            leaves = random_leaves(scheme, n_row, n_in, device)
            kernel = INT4_CUDA if "zeros" in leaves else INT8_CUDA
            packed = kernel.pack(*(leaves.get(leaf) for leaf in quantize.LEAVES))
        first = first or leaves
        n_bytes = sum(t.nbytes for t in leaves.values())
        sets.append(packed)

    def launch(packed):
        if by == "BLAS":
            return F.linear(x, packed[0])
        if by == "fused":
            return prompt_product(x, *packed[:2])
        if by == "written out":
            return F.linear(x, kernel.dequantize(*packed, dtype))
        return matvec(x, *packed, norm=norm, eps=1e-5, activation="silu" if gated else "")
    if scheme is None:
        dense = first["weight"].float()
    else:
        dense = quantize.dequantize(*(first.get(leaf) for leaf in quantize.LEAVES), torch.float32)
    error = relative_error(launch(sets[0]), x, dense, norm, gated and is_whole)
    assert error < MOST_ERROR, f"off by {error:.1e} of the result"
    us = microseconds(run, [lambda packed=packed: launch(packed) for packed in sets])
    return dict(us=round(us, 2), tb_s=round(n_bytes / us / 1e6, 3), off_by=float(f"{error:.1e}"))


def reading(run: Run, shape: tuple, bits: int) -> dict:
    """The bytes of a product, only summed."""
    n_out, n_in, gated, _ = shape
    n_float = n_out * (2 if gated else 1) * n_in * bits // 32
    n_set = max(2, -(-run.sizes.cycled // (4 * n_float)))
    parts = torch.ones(n_set, n_float, device=run.device)
    us = microseconds(run, [part.sum for part in parts])
    return dict(us=round(us, 2), tb_s=round(4 * n_float / us / 1e6, 3))


SCHEMES = {"int4-g32": quantize.Int4(32), "int8": quantize.Int8(), "int4-g128": quantize.Int4(128),
           "bf16": None}


def products(run: Run) -> None:
    """A layer's four products at the speed of their bytes? One row, then five."""
    shapes = run.sizes.products
    plan = [(scheme, name, 1) for scheme in ("int4-g32", "int8") for name in reversed(shapes)]
    plan += [("bf16", name, 1) for name in reversed(shapes)]
    plan += [(scheme, name, 5) for scheme in ("int4-g32", "int8", "bf16")
             for name in reversed(shapes)]
    plan += [("int4-g128", name, 1) for name in reversed(shapes)]
    for scheme, name, rows in plan:
        shape = shapes[name]
        label = f"{name} {shape[0] * (2 if shape[2] else 1)}x{shape[1]} {scheme}, {rows} rows"
        if rows == 1 and scheme != "int4-g128":
            bits = 16 if scheme == "bf16" else 8 if scheme == "int8" else 4
            run.row(f"{label}, only read", 2, reading, run, shape, bits)
        if scheme == "bf16":
            run.row(f"{label}, BLAS", 2, one_product, run, shape, None, rows, "BLAS")
        if scheme != "bf16" or rows == 1:
            run.row(label, 2, one_product, run, shape, SCHEMES[scheme], rows)


def prompt_products(run: Run) -> None:
    """A prompt's rows by codes: as weights in registers, or written out for BLAS?"""
    for rows in run.sizes.prompt_rows:
        for scheme in ("int4-g32", "int8"):
            for name, shape in reversed(run.sizes.products.items()):
                n_row = shape[0] * (2 if shape[2] else 1)
                label = f"{name} {n_row}x{shape[1]} {scheme}, {rows} rows"
                for by in ("fused", "written out"):
                    run.row(f"{label}, {by}", 2, one_product, run, shape, SCHEMES[scheme], rows, by)


def attention(run: Run) -> None:
    """A layer's attention, by the keys in use and by the cache's length."""
    for heads, T, used, length, *precision in run.sizes.attention:
        name = f"attention, {heads} heads, {T} new, {used} keys in a cache of {length}"
        name = " ".join([name, *precision])
        run.row(name, 2, one_attention, run, heads, T, used, length, *precision)


def one_attention(run: Run, heads: tuple, T: int, used: int, length: int,
                  precision: str = "") -> dict:
    """precision: of a quantized cache."""
    N, K, H = heads
    device = run.device
    qkv = torch.randn(1, T, (N + 2 * K) * H, device=device).bfloat16()
    cos, sin = (torch.rand(T, H // 2, device=device) for _ in range(2))
    slot = torch.arange(used - T, used, device=device)
    mask = torch.arange(length, device=device) <= slot[:, None]
    n_set = max(2, -(-run.sizes.cycled // (4 * K * length * H)))
    sets = [random_cache((1, K, length, H), precision, device) for _ in range(n_set)]
    n_byte = sum(t.nbytes for t in sets[0].buffers()) * used // length
    arrivals = torch.zeros(256 * N, dtype=torch.int32, device=device)

    def launch(cache, attend=cached_attention):
        return attend(qkv, None, None, cos, sin, mask, slot, cache.k, cache.v, None, arrivals,
                      H**-0.5, None, 1e-5, False, *scales_and_turns(cache))
    expected = launch(copy.deepcopy(sets[0]), plain_attention).float()
    error = ((launch(sets[0]).float() - expected).norm() / expected.norm()).item()
    assert error < MOST_ERROR, f"off by {error:.1e} of the result"
    us = microseconds(run, [lambda cache=cache: launch(cache) for cache in sets])
    return dict(us=round(us, 2), tb_s=round(n_byte / us / 1e6, 3), off_by=float(f"{error:.1e}"))


def random_cache(shape: tuple, precision: str, device: torch.device):
    """Filled with normal bfloat16 keys and values [B, K, S, H]."""
    cache = KVCache(shape, torch.bfloat16, device)
    if precision:
        cache = QuantizedCache(shape, torch.bfloat16, device, (precision, precision))
    keys, values = torch.randn(2, *shape, device=device).bfloat16()
    cache(torch.arange(shape[2], device=device), keys, values, shape[2], None)
    return cache


# ---- Models -------------------------------------------------------------------------------------

def models(run: Run, rows: list[tuple[str, str, str, Workload]], seconds: float = 40) -> None:
    """rows: shape, engine, scheme, workload; see benchmark.py. A row's weights go with it."""
    for shape, engine, scheme, workload in rows:
        engine = run.sizes.engines.get(engine, engine)
        name = f"{shape} {scheme.replace('none', 'bf16')} {engine} {workload}"
        name += f", batch {workload.batch_size}" if workload.batch_size > 1 else ""
        run.row(name, seconds, one_model, run, shape, engine, scheme, workload)
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def checkpoint_of(run: Run, shape: str):
    if shape in run.sizes.models:
        return with_random_weights(Path(shape), run.sizes.models[shape]()), NullTokenizer()
    return open_model(None, shape)


def one_model(run: Run, shape: str, engine: str, scheme: str, workload: Workload) -> dict:
    """of_reading: the bytes that a step reads, embedding tables not among them, by the speed of a
    kernel that only reads."""
    source, tokenizer = checkpoint_of(run, shape)
    cases = bench_cases.build_cases(source, [(engine, scheme)], {}, torch.bfloat16, run.device, 0.0)
    [row], reads = bench_cases.run_workload(
        cases, {source.path.name: tokenizer}, workload, run.sizes.repetitions, run.device)
    if row["error"]:
        raise RuntimeError(row["error"])
    digits = dict(tok_s=1, ttft_ms=1, itl_ms=3, achieved_gb_s=0, compile_s=1)
    figures = {key: round(row[key], n) for key, n in digits.items() if row[key] is not None}
    if row["achieved_gb_s"]:
        figures["of_reading"] = round(row["achieved_gb_s"] / max(reads), 3)
    return figures


def decoding(run: Run, batch: int = 1) -> Workload:
    return Workload(5, run.sizes.new_tokens, batch)


def llama_8b(run: Run, schemes=("int4", "int8")) -> None:
    models(run, [("Llama-3.1-8B", "compile", scheme, decoding(run)) for scheme in schemes])


def llama_1b(run: Run, schemes=("int4", "int8", "none")) -> None:
    models(run, [("Llama-3.2-1B", "compile", scheme, decoding(run)) for scheme in schemes], 25)


def all_of_8b(run: Run) -> None:
    llama_8b(run, ("none", "int8", "int4", "int4-g128"))


def plain_engine(run: Run) -> None:
    """The core's torch.compile, beside which ours has to be faster."""
    models(run, [("Llama-3.1-8B", "torch_compile", "none", decoding(run)),
                 ("Llama-3.1-8B", "torch_compile", "int4", decoding(run)),
                 ("Llama-3.2-1B", "torch_compile", "none", decoding(run))], 60)


def batches(run: Run) -> None:
    """Several rows, and a long prompt."""
    models(run, [("Llama-3.1-8B", "compile", "int4", decoding(run, 8)),
                 ("Llama-3.1-8B", "compile", "none", decoding(run, 8)),
                 ("Llama-3.1-8B", "compile", "none", Workload(run.sizes.prompt, 1, 1)),
                 ("Llama-3.1-8B", "compile", "int4", Workload(run.sizes.prompt, 1, 1)),
                 ("Llama-3.1-8B", "compile", "int4", decoding(run, 32)),
                 ("Llama-3.1-8B", "compile", "none", decoding(run, 32))], 35)


def drafts(run: Run) -> None:
    """MTP at a published acceptance; n-grams of random tokens, so only what they cost."""
    models(run, [("Llama-3.1-8B", "mtp", "none", decoding(run)),
                 ("Llama-3.1-8B", "ngram", "none", decoding(run)),
                 ("Llama-3.1-8B", "mtp", "int4", decoding(run))], 60)


def families(run: Run) -> None:
    """DeltaNet layers, per-layer embeddings and windows, latent attention."""
    models(run, [(shape, "compile", "none", decoding(run))
                 for shape in ("Qwen3.5-4B", "gemma-4-E2B", "GLM-4.7-Flash-4L")], 45)


def server(run: Run) -> None:
    """serve.py with clients that send token ids; the 1B's shape, written out once."""
    run.row(f"serve.py, Llama-3.2-1B bf16, {run.sizes.clients} clients", 60, serve, run)


def serve(run: Run) -> dict:
    n = run.sizes.clients
    source, _ = checkpoint_of(run, "Llama-3.2-1B")
    n_vocab = source.cfg.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        path = export_hf(source, Path(folder) / "model", torch.bfloat16)
        flags = ["--checkpoint_path", str(path), "--device", str(run.device)]
        with serving.running_server(serving.our_server, n, flags) as port:
            requests = [dict(request, prompt=as_ids(request["prompt"], n_vocab))
                        for request in serving.make_requests(run.sizes.requests)]
            for each in requests:
                each["max_new_tokens"] = min(each["max_new_tokens"], run.sizes.new_tokens)
            serving.ask_all(port, requests[:n], n)                         # warms up
            begin = time.perf_counter()
            answers = serving.ask_all(port, requests, n)
            seconds = time.perf_counter() - begin
    first = sorted(answer.times[0] - answer.start for answer in answers)
    n_new = sum(request["max_new_tokens"] for request in requests)
    return dict(tok_s=round(n_new / seconds, 1), first_ms=round(1e3 * first[len(first) // 2], 1))


def as_ids(text: str, n_vocab: int) -> list[int]:
    return [3 + ord(c) % (n_vocab - 3) for c in text[::4]]


def two_ranks(run: Run) -> None:
    """benchmark.py on two GPUs, where there are two."""
    n = torch.cuda.device_count()
    if n < 2:
        run.record(dict(row="two ranks", skipped=f"{n} GPU here, two are needed", took_s=0.0))
        return
    for scheme in ("none", "int4"):
        run.row(f"Llama-3.1-8B {scheme}, two ranks", 60, benchmark_ranks, run, scheme)


def benchmark_ranks(run: Run, scheme: str, shape: str = "Llama-3.1-8B") -> dict:
    command = [sys.executable, str(ROOT / "benchmark.py"), "--random", shape, "--engines",
               "compile", "--quantize", scheme, "--ranks", "2", "-r", str(run.sizes.repetitions),
               "-n", str(run.sizes.new_tokens), "--device", run.device.type, "-o", "json"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                         timeout=max(1.0, run.end - time.monotonic()))
    if out.returncode:
        raise RuntimeError((out.stderr.strip() or f"exit status {out.returncode}").splitlines()[-1])
    [row] = json.loads(out.stdout)["rows"]
    if row["error"]:
        raise RuntimeError(row["error"])
    return dict(tok_s=round(row["tok_s"], 1))


def checks(run: Run) -> None:
    """scripts/gpu_check.py, a check a row."""
    import gpu_check
    for check in gpu_check.CHECKS:
        run.row(f"check: {check.__name__}", 3, one_check, run, check)


def one_check(run: Run, check: Callable) -> dict:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        return dict(ok=check(run.device))
    finally:
        torch._dynamo.reset()
