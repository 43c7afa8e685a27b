"""One decode step at a real model's shapes: its launches, its kernels' machine code, a time.

The time is an estimate: for each of our kernels the longer of its bytes at the memory's measured
speed and its instructions at 85 % of what the chip can issue, and for every launch a constant.

    python scripts/dev/gpu_dryrun.py --only steps --sm 90
"""

import dataclasses
import math
import re
import time
from dataclasses import dataclass

import torch
from torch._inductor.utils import run_and_get_code

from checkpoint import tensor_shapes
from dry_run import device, sass
from dry_run import products as products_of_codes
from generate import decode_one_token
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels.compile import compile_steps
from gpt_faster.kernels.cuda import triton_attention
from gpt_faster.loading import load_shard
from sampling import SamplingParams


@dataclass(frozen=True)
class GPU:
    """What a step's time is estimated with: multiprocessors, Hz, bytes a second that are reached,
    seconds a launch adds in a graph (low, high)."""

    sm: int
    n_sm: int
    clock: float
    bandwidth: float
    launch: tuple[float, float]


# launch: A100's such that gpt-fast's own step meets its published figures; H100's by notes of 2026
GPUS = {"A100": GPU(80, 108, 1.41e9, 1.72e12, (4.3e-6, 5.9e-6)),
        "H100": GPU(90, 132, 1.755e9, 3.0e12, (3.0e-6, 4.5e-6)),
        "H200": GPU(90, 132, 1.755e9, 4.3e12, (3.0e-6, 4.5e-6))}
SHAPES = {"Llama-2-7B": ("none", "int8", "int4-g32"),
          "Llama-3.1-8B": ("none", "int8", "int4-g32", "int4-g64", "int4-g128"),
          "Llama-3.2-1B": ("none", "int8", "int4-g32"), "Qwen3-8B": ("none",),
          "gemma-3-270m": ("none",), "gpt-oss-20b": ("none",),
          "Qwen3-30B-A3B": ("none", "int4-g32"),
          "gpt2": ("none",)}
LEAST_SHARED = 99 << 10                            # bytes that a program may have on every GPU
SUMS = 8 << 10                                     # that a product has, for threads' sums only
WIDEST = "LDG.E.EF.128"                            # loads of weights
MOST_ISSUE = 1.15                                  # times what bytes take, of lanes with columns
SPILLED = 8                                        # bytes, by attention: of 64 queries two
MOST_LAUNCHES = {"Llama-2-7B": 5, "Llama-3.1-8B": 5, "Llama-3.2-1B": 5, "Qwen3-8B": 5}  # a layer
N_ROW = 4                                          # of a batch, whose weights stay packed too


def model_of(name: str, scheme: str, n_layer: int, rows: int, length: int):
    """Weights are memory that nobody has written."""
    source = random_checkpoint(name)
    cfg = dataclasses.replace(source.cfg, n_layer=n_layer)
    known = tensor_shapes(cfg)
    tensors = {n: dataclasses.replace(source.tensors[n], fill=lambda t: None)
               if dataclasses.is_dataclass(source.tensors[n]) else source.tensors[n] for n in known}
    source = dataclasses.replace(source, cfg=cfg, tensors=tensors)
    if scheme != "none":
        source = quantized(source, scheme, device="cuda")
    model = load_shard(source, torch.bfloat16, "cuda", "compile")
    model.setup_cache(rows, length, 1024)
    return model


def compiled_step(model, rows: int, params: SamplingParams):
    """-> the launches of one step in order, and the code that Inductor made."""
    torch._dynamo.reset()
    compile_steps(model)                  # exchanges the model's parts
    step = torch.compile(decode_one_token, fullgraph=True, dynamic=False)
    sampler = build_sampler(model, [params] * rows, torch.Generator("cuda").manual_seed(0))
    token = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    pos = torch.zeros((1,) if rows == 1 else (rows, 1), dtype=torch.int64, device="cuda")
    arguments = model, token, pos, model.max_seq_length, sampler
    with torch.inference_mode():
        _, codes = run_and_get_code(step, *arguments)
        before, at = device.counts()["launches"], len(device.LAUNCHES)
        step(*arguments)
    own = device.LAUNCHES[at:]
    return own, device.counts()["launches"] - before, codes[-1]


def named(launch) -> dict:
    return dict(zip(launch.kernel.arg_names, launch.arguments))


def bytes_read(launch) -> int:
    """Of weights, by a launch of _matvec or _product."""
    args = named(launch)
    tensors = [args[name] for name in ("weight", "scales") if args.get(name) is not None]
    n = sum(t.numel() * t.element_size() for t in tensors)
    return n if args["ids"] is None else n // args["weight"].shape[0] * launch.grid[1]


def read_code(launch, known: dict) -> sass.Code:
    """The machine code of a launch of _matvec or _product; of the same kernel only once."""
    if launch.name == "_product":
        n_sm = torch.cuda.get_device_properties(0).multi_processor_count
        return products_of_codes.read(launch, n_sm, known).code
    constants = tuple(v if isinstance(v, int | float | str) else v is None
                      for v in launch.arguments)
    if constants not in known:
        known[constants] = sass.read(device.compile_launch(launch), named(launch)["n_turn"])
    return known[constants]


def seconds_of(gpu: GPU, launch, code: sass.Code) -> tuple[float, float]:
    """What its bytes take, and what its instructions take: the longer counts."""
    warps = launch.grid[0] * launch.grid[1] * launch.options["num_warps"]
    issue = code.instructions * warps / (gpu.n_sm * 4 * gpu.clock)
    return bytes_read(launch) / gpu.bandwidth, issue / 0.85


def whole_matrices(model, rows: int, code: str) -> list[str]:
    """Buffers in Inductor's code that are too large to be activations."""
    most = rows * max(model.cfg.vocab_size, model.cfg.dim * 16)
    shapes = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code)
    return [f"{rows} rows: a buffer of {shape}: a whole matrix?" for shape in shapes
            if math.prod(int(d) for d in shape.split(",") if d.strip()) > most]


def with_queries(launch, T: int):
    """A launch of attention -> of T queries."""
    args = named(launch)
    cos, slot = args["cos"].new_empty(T, args["cos"].shape[-1]), args["slot"].new_zeros(T)
    mask = args["mask"].new_empty(T, args["mask"].shape[-1])
    triton_attention.launch(
        args["qkv"].new_empty(1, T, args["qkv"].shape[-1]), args["q_norm"], args["k_norm"], cos,
        cos, mask, slot, args["k_cache"], args["v_cache"], args["sinks"], args["arrivals"],
        args["scale"], args["cap"], args["eps"], args["ring"])
    return device.LAUNCHES.pop()


@dataclass
class Step:
    """What was seen of one kind of model in one precision."""

    name: str
    scheme: str
    per_layer: float                               # launches
    beside: float
    wrong: list[str]
    tokens_per_s: dict[str, tuple[float, float]]   # estimated, by GPU


def look_at(sm: int, name: str, scheme: str, known: dict) -> Step:
    n_all = random_checkpoint(name).cfg.n_layer
    counted, wrong, plain = {}, [], name in MOST_LAUNCHES
    for n, rows in ((4, 1), (2, N_ROW), (2, 1)) if plain else ((4, 1), (2, 1)):
        model = model_of(name, scheme, n, rows, 2048)
        launches, counted[n, rows], code = compiled_step(model, rows, SamplingParams(0.8, 200))
        wrong += whole_matrices(model, rows, code)
    per_layer = (counted[4, 1] - counted[2, 1]) / 2
    beside = counted[2, 1] - 2 * per_layer
    vocab = model.cfg.vocab_size
    if per_layer > MOST_LAUNCHES.get(name, 20):
        wrong.append(f"more than {MOST_LAUNCHES.get(name, 20)} launches a layer")
    slowest = next(gpu for gpu in GPUS.values() if gpu.sm == sm)   # of memory
    products = [launch for launch in launches if launch.name in ("_matvec", "_product")]
    codes = [read_code(launch, known) for launch in products]
    for launch, kernel in zip(products, codes):
        args = named(launch)
        bits = args.get("bits", 16)
        least, step = args.get("R"), 8 * args.get("T", 0)      # loads at once, columns in turn
        if bits < 16:
            least, step = 2 * args["C"], args["W"] * args["C"] * 512 // bits
        label = f"{args['n_out']}x{args['n_in']} {bits} bits"
        if kernel.spilled:
            wrong.append(f"{label}: {kernel.spilled} bytes spilled")
        weights = {load: n for load, n in kernel.loads.items() if ".EF" in load}
        if not weights.get(WIDEST, 0) >= least:
            wrong.append(f"{label}: loads of {weights}")
        if kernel.shared > SUMS:
            wrong.append(f"{label}: {kernel.shared} bytes shared")
        by_bytes, by_instructions = seconds_of(slowest, launch, kernel)
        idle = math.ceil(args["n_in"] / step) * step / args["n_in"]    # 1.5 with 11008 in int4
        if by_instructions > MOST_ISSUE * idle * by_bytes:
            wrong.append(f"{label}: bound by instructions, {by_instructions / by_bytes:.2f}")
    attention = next(launch for launch in launches if launch.name == "_attention")
    for what, launch in (("decode", attention), ("verify", with_queries(attention, 5))):
        kernel = sass.read(device.compile_launch(launch), 1)
        if kernel.spilled > SPILLED or kernel.shared > LEAST_SHARED:
            wrong.append(f"{what}'s attention: {kernel.spilled} bytes spilled, "
                         f"{kernel.shared} shared")
    if plain and math.prod(attention.grid) < slowest.n_sm:
        wrong.append(f"attention: {math.prod(attention.grid)} programs for {slowest.n_sm} SMs")
    estimates = {}
    for gpu_name, gpu in GPUS.items():
        if gpu.sm != sm:
            continue
        each = [(named(launch)["n_out"] == vocab, max(seconds_of(gpu, launch, kernel)))
                for launch, kernel in zip(products, codes)]
        head = sum(t for is_head, t in each if is_head)
        layers = sum(t for is_head, t in each if not is_head) / 2 * n_all
        n_launch = per_layer * n_all + beside
        estimates[gpu_name] = tuple(1 / (head + layers + n_launch * c) for c in gpu.launch[::-1])
    return Step(name, scheme, per_layer, beside, wrong, estimates)


def row(step: Step) -> str:
    """Of a table."""
    text = "; ".join(f"{gpu} {low:.0f} to {high:.0f}"
                     for gpu, (low, high) in step.tokens_per_s.items())
    return " | ".join([f"{step.per_layer:g}", f"{step.beside:g}", text, "; ".join(step.wrong)])


def main(sm: int, only: str = "") -> list[Step]:
    device.install(keep_arguments=True)
    known, steps = {}, []
    for name, schemes in SHAPES.items():
        for scheme in schemes:
            if only not in f"{name} {scheme}":
                continue
            start = time.perf_counter()
            step = look_at(sm, name, scheme, known)
            device.LAUNCHES.clear()
            steps.append(step)
            verdict = "FAILED" if step.wrong else "ok    "
            text = ", ".join(f"{gpu} {low:.0f} to {high:.0f} tok/s"
                             for gpu, (low, high) in step.tokens_per_s.items())
            print(f"{verdict}  sm_{sm} {name} {scheme}: {'; '.join([*step.wrong, ''])}"
                  f"{step.per_layer:g} launches a layer, {step.beside:g} beside; estimated {text} "
                  f"({time.perf_counter() - start:.0f} s)", flush=True)
    return steps
