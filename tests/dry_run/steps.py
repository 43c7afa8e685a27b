"""One decode step at a real model's shapes: its launches, its kernels' machine code, a time.

A product's time is timing.py's, with its error bar; attention's is its trips to memory one after
another. Every rule takes a launch and its compiled kernel, and knows no kernel of ours by its
parts: a product is a launch that is given weights.

    python scripts/dev/gpu_dryrun.py --only steps --sm 90
"""

import dataclasses
import math
import re
import time
from dataclasses import dataclass

import torch
import triton
from torch._inductor.utils import run_and_get_code

from checkpoint import tensor_shapes
from dry_run import device, sass
from dry_run.machine_code import width
from dry_run.timing import (
    GPU,
    GPUS,
    STEP_BAR,
    Program,
    programs_per_sm,
    step_seconds,
)
from generate import decode_one_token
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels.compile import compile_steps
from gpt_faster.kernels.cuda import triton_attention
from gpt_faster.loading import load_shard
from sampling import SamplingParams

SHAPES = {"Llama-2-7B": ("none", "int8", "int4-g32"),
          "Llama-3.1-8B": ("none", "int8", "int4-g32", "int4-g64", "int4-g128"),
          "Llama-3.2-1B": ("none", "int8", "int4-g32"), "Qwen3-8B": ("none",),
          "gemma-3-270m": ("none",), "gpt-oss-20b": ("none",),
          "Qwen3-30B-A3B": ("none", "int4-g32"),
          "gpt2": ("none",)}
LEAST_ROWS = 256                                   # of a weight; activations have up to 32
SHARED = {80: 99 << 10, 90: 227 << 9}              # bytes: one on each GPU with this code; two on it
SUMS = 8 << 10                                     # that a product has, for threads' sums only
WIDEST = "LDG.E.EF.128"                            # loads of weights
WIDE_SHARE = 0.7                                   # of a product's bytes, by such loads: codes, no scales
MOST_ISSUE = 1.15                                  # times what bytes take, of lanes with columns
PER_WEIGHT = 2.1                                   # instructions of a thread, a code of one row
AFTER_ATOMIC = 4                                   # trips of attention's last program
SPILLED = 8                                        # bytes, by attention: of 64 queries two
MOST_LAUNCHES = {"Llama-2-7B": 5, "Llama-3.1-8B": 5, "Llama-3.2-1B": 5, "Qwen3-8B": 5}  # a layer
LENGTH, LONG = 208, 2048                           # of caches: estimated, and looked at too
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


def weights_of(launch) -> list[torch.Tensor]:
    """What a launch of ours multiplies by: tensors with as many rows as a layer has outputs."""
    if not isinstance(launch.kernel, triton.JITFunction) or launch.name == "_attention":
        return []
    return [t for t in launch.arguments if isinstance(t, torch.Tensor) and t.dim() in (2, 3)
            and math.prod(t.shape[:-1]) >= LEAST_ROWS]


def chosen(launch) -> float:
    """The share of its weights that a launch reads: of experts, those that its rows choose."""
    if named(launch).get("ids") is None:
        return 1.0
    return launch.grid[1] / max(weights_of(launch), key=lambda t: t.nbytes).shape[0]


def bytes_read(launch) -> int:
    """Of weights, their scales and zeros."""
    return round(chosen(launch) * sum(t.nbytes for t in weights_of(launch)))


def code_bytes(launch) -> int:
    """Of weights alone: what the widest loads bring."""
    return round(chosen(launch) * max(t.nbytes for t in weights_of(launch)))


@dataclass(frozen=True)
class Product:
    """A launch that multiplies by weights, and its machine code."""

    launch: object
    code: sass.Code
    turns: int                                     # of the main loop

    @property
    def n_in(self) -> int:
        return named(self.launch)["n_in"]

    @property
    def bits(self) -> int:
        """Of a weight, as the widest tensor has them; scales are beside."""
        weight = max(weights_of(self.launch), key=lambda t: t.nbytes)
        return round(8 * weight.nbytes / (math.prod(weight.shape[:-1]) * self.n_in))

    @property
    def n_weights(self) -> int:
        """That the launch multiplies by."""
        weight = max(weights_of(self.launch), key=lambda t: t.nbytes)
        return round(chosen(self.launch) * math.prod(weight.shape[:-1]) * self.n_in)

    @property
    def idle(self) -> float:
        """Bytes that its lanes would load, of those that there are: 1.5 with 11008 in int4."""
        listing = self.code.listing
        first, last = listing.main_loop()
        turns = self.turns + listing.peeled()
        loaded = turns * listing.loaded_bytes(range(first, last + 1)) or listing.loaded_bytes(
            range(len(listing.code)))
        lanes = 32 * self.code.warps * math.prod(self.launch.grid)
        return max(1.0, loaded * lanes / code_bytes(self.launch))

    @property
    def program(self) -> Program:
        return program_of(self.launch, self.code, self.turns)

    def per_weight(self) -> float:
        """Instructions of a thread for each weight."""
        warps = math.prod(self.launch.grid) * self.code.warps
        return 32 * self.code.instructions * warps / self.n_weights

    def __str__(self):
        weight = max(weights_of(self.launch), key=lambda t: t.nbytes)
        return f"{weight.shape[-2]}x{self.n_in} {self.bits} bits"


def program_of(launch, code: sass.Code, turns: int = 1) -> Program:
    first, last = code.listing.main_loop()
    loaded = code.listing.loaded_bytes(range(first, last + 1)) or code.listing.loaded_bytes(
        range(len(code.listing.code)))
    return Program(grid=math.prod(launch.grid), warps=code.warps, registers=code.registers,
                   shared=code.shared, instructions=code.instructions, ahead=code.listing.ahead(),
                   trips=code.listing.trips(turns), in_flight=32 * loaded or 1 << 30)


def read_product(launch, known: dict) -> Product:
    """The machine code of a product's launch; of the same kernel and grid only once."""
    constants = launch.name, launch.grid, *(
        v if isinstance(v, int | float | str) else v is None for v in launch.arguments)
    if constants not in known:
        kernel = device.compile_launch(launch)
        code = sass.read(kernel)
        # each turn of the main loop loads as much: so many turns load the codes that those
        # before the loop, multiplied behind it, have left
        first, last = code.listing.main_loop()
        a_turn = 32 * code.warps * code.listing.loaded_bytes(range(first, last + 1))
        turns = 1
        if a_turn:
            tiles = math.ceil(code_bytes(launch) / (math.prod(launch.grid) * a_turn))
            turns = max(1, tiles - code.listing.peeled())
        known[constants] = dataclasses.replace(
            code, instructions=code.listing.instructions(turns)), turns
    return Product(launch, *known[constants])


def wrong_in(gpu: GPU, product: Product) -> list[str]:
    """What keeps a product from running at the speed of its bytes."""
    code, found = product.code, []
    if code.spilled:
        found.append(f"{code.spilled} bytes spilled")
    bytes_of = {load: n * width(load) for load, n in code.loads.items() if ".EF" in load}
    if bytes_of.get(WIDEST, 0) < WIDE_SHARE * sum(bytes_of.values()) or not bytes_of:
        found.append(f"loads of {bytes_of} bytes")
    if code.shared > SUMS:
        found.append(f"{code.shared} bytes shared")
    resident = programs_per_sm(gpu, product.program)
    if resident < 2 and not product.program.is_carried:
        found.append(f"one program of {code.warps} warps on a multiprocessor, and it loads "
                     "nothing ahead: nothing overlaps")
    rows = named(product.launch).get("M", 1)
    by_bytes = bytes_read(product.launch) / gpu.bandwidth
    warps = math.prod(product.launch.grid) * code.warps
    by_instructions = code.instructions * warps / (gpu.n_sm * 4 * gpu.clock * 0.85)
    if by_instructions > MOST_ISSUE * product.idle * by_bytes:
        found.append(f"bound by instructions, {by_instructions / by_bytes:.2f}")
    if product.bits < 16 and rows == 1 and product.per_weight() > PER_WEIGHT * product.idle:
        found.append(f"{product.per_weight():.2f} instructions a weight")
    return [f"{product}: {text}" for text in found]


def wrong_in_attention(what: str, code: sass.Code) -> list[str]:
    """Spills, and trips to memory that its last program takes one after another."""
    found = []
    major, minor = torch.cuda.get_device_capability()
    if code.spilled > SPILLED or code.shared > SHARED[10 * major + minor]:
        found.append(f"{code.spilled} bytes spilled, {code.shared} shared")
    serial = code.listing.trips_after_atomic()
    if serial > AFTER_ATOMIC:
        found.append(f"{serial} trips to memory in turn after its atomic")
    return [f"{what}'s attention: {text}" for text in found]


def whole_matrices(model, rows: int, code: str) -> list[str]:
    """Buffers in Inductor's code that are too large to be activations."""
    most = rows * max(model.cfg.vocab_size, model.cfg.dim * 16)
    shapes = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code)
    return [f"{rows} rows: a buffer of {shape}: a whole matrix?" for shape in shapes
            if math.prod(int(d) for d in shape.split(",") if d.strip()) > most]


def with_cache(launch, T: int, length: int):
    """A launch of attention -> of T queries, in a cache of this length."""
    args = named(launch)
    cos, slot = args["cos"].new_empty(T, args["cos"].shape[-1]), args["slot"].new_zeros(T)
    mask = args["mask"].new_empty(T, length)
    _, K, _, H = args["k_cache"].shape
    caches = [args["k_cache"].new_empty(1, K, length, H) for _ in range(2)]
    triton_attention.launch(
        args["qkv"].new_empty(1, T, args["qkv"].shape[-1]), args["q_norm"], args["k_norm"], cos,
        cos, mask, slot, *caches, args["sinks"], args["arrivals"],
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
    tokens_per_s: dict[str, float]                 # estimated, by GPU
    products: dict[str, str]                       # each: what was read in its machine code


def look_at(sm: int, name: str, scheme: str, known: dict) -> Step:
    n_all = random_checkpoint(name).cfg.n_layer
    counted, wrong, plain = {}, [], name in MOST_LAUNCHES
    for n, rows in ((4, 1), (2, N_ROW), (2, 1)) if plain else ((4, 1), (2, 1)):
        model = model_of(name, scheme, n, rows, LENGTH)
        launches, counted[n, rows], code = compiled_step(model, rows, SamplingParams(0.8, 200))
        wrong += whole_matrices(model, rows, code)
    per_layer = (counted[4, 1] - counted[2, 1]) / 2
    beside = counted[2, 1] - 2 * per_layer
    vocab = model.cfg.vocab_size
    if per_layer > MOST_LAUNCHES.get(name, 20):
        wrong.append(f"more than {MOST_LAUNCHES.get(name, 20)} launches a layer")
    slowest = next(gpu for gpu in GPUS.values() if gpu.sm == sm)   # of memory
    products = [read_product(launch, known) for launch in launches if weights_of(launch)]
    for product in products:
        wrong += wrong_in(slowest, product)
    attention = next(launch for launch in launches if launch.name == "_attention")
    for what, launch in (("decode", with_cache(attention, 1, LONG)),
                         ("verify", with_cache(attention, 5, LONG))):
        code = sass.read(device.compile_launch(launch))
        wrong += wrong_in_attention(what, code)
        if plain and math.prod(launch.grid) < slowest.n_sm:
            wrong.append(f"{what}'s attention: {math.prod(launch.grid)} programs for "
                         f"{slowest.n_sm} SMs")
    attention = program_of(attention, sass.read(device.compile_launch(attention)))
    times = [1 if named(p.launch)["n_out"] == vocab else n_all / 2 for p in products]
    each = [(p.program, bytes_read(p.launch), n) for p, n in zip(products, times)]
    n_other = per_layer * n_all + beside - sum(times) - n_all
    estimates = {name: 1 / step_seconds(gpu, each, attention, n_all, n_other)
                 for name, gpu in GPUS.items() if gpu.sm == sm}
    kinds = {str(p): f"{p.per_weight():.2f} instr., {programs_per_sm(slowest, p.program)} programs, "
                     f"{p.program.ahead:.2f} ahead, {p.program.trips} trips" for p in products}
    return Step(name, scheme, per_layer, beside, list(dict.fromkeys(wrong)), estimates, kinds)


def estimated(step: Step) -> str:
    """With the error bar."""
    return "; ".join(f"{gpu} {speed:.0f} ± {speed * STEP_BAR:.0f} tok/s"
                     for gpu, speed in step.tokens_per_s.items())


def row(step: Step) -> str:
    """Of a table."""
    return " | ".join([f"{step.per_layer:g}", f"{step.beside:g}", estimated(step),
                       "; ".join(step.wrong)])


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
            print(f"{verdict}  sm_{sm} {name} {scheme}: {'; '.join([*step.wrong, ''])}"
                  f"{step.per_layer:g} launches a layer, {step.beside:g} beside; estimated "
                  f"{estimated(step)} ({time.perf_counter() - start:.0f} s)", flush=True)
            for product, text in step.products.items():
                print(f"        {product}: {text}", flush=True)
    return steps
