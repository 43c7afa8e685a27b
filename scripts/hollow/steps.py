"""One decode step at a real model's shapes: its launches, its kernels' machine code, a time.

The time is an estimate: for each of our kernels the longer of its bytes at the memory's measured
speed and its instructions at 85 % of what the chip can issue, and for every launch a constant.

    python scripts/gpu_dryrun.py --only steps --sm 90
"""

import dataclasses
import time
from dataclasses import dataclass

import torch
import triton
from torch._inductor.utils import run_and_get_code

import generate
from cli.engines import build_sampler
from formats.parameters import tensor_shapes
from formats.quantized import quantized
from formats.shapes import random_checkpoint
from generate import decode_one_token, load_shard
from hollow import device, sass
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
MOST_LAUNCHES = {"Llama-2-7B": 5, "Llama-3.1-8B": 5, "Llama-3.2-1B": 5, "Qwen3-8B": 5}  # a layer


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
    model = load_shard(source, torch.bfloat16, "cuda")
    model.setup_cache(rows, length, 1024)
    return model


def compiled_step(model, rows: int, params: SamplingParams):
    """-> the launches of one step in order, and the code that Inductor made."""
    torch._dynamo.reset()
    generate.compile_steps(model)                  # exchanges the model's parts
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


def read_kernels(launches) -> dict:
    """Our kernels among them, compiled -> their code, by the launch's key."""
    codes = {}
    for launch in launches:
        if launch.key in codes or not isinstance(launch.kernel, triton.JITFunction):
            continue
        binary = device.compile_launch(launch)
        codes[launch.key] = sass.read(binary, launch.trips())
    return codes


def main(sm: int, only: str = "") -> list:
    device.install(keep_arguments=True)
    rows = []
    for name, schemes in SHAPES.items():
        for scheme in schemes:
            label = f"{name} {scheme}"
            if only in label:
                rows.append(look_at(sm, name, scheme))
    return rows


def look_at(sm: int, name: str, scheme: str):
    start = time.perf_counter()
    seen = {}
    for n in (2, 4):
        model = model_of(name, scheme, n, 1, 2048)
        seen[n] = compiled_step(model, 1, SamplingParams(0.8, 200))
        del model
    per_layer = (seen[4][1] - seen[2][1]) / 2
    other = seen[2][1] - 2 * per_layer
    launches = seen[2][0]
    seconds = time.perf_counter() - start
    print(f"sm_{sm} {name} {scheme}: {per_layer:g} launches a layer, {other:g} beside "
          f"({seconds:.0f} s)", flush=True)
    return launches, seen[2][2]
