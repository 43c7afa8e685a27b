"""benchmark.py --profile: Chrome traces of steady-state decode steps, and the top kernels.

    run_profiles(cases, tokenizers, workloads, Path("traces"))
"""

import re
from pathlib import Path

import torch

import tp
from generate import log
from gpt_faster.bench.cases import BenchmarkCase, CaseRun
from gpt_faster.bench.machine import synchronize
from gpt_faster.bench.workloads import Workload

MAX_STEPS, N_LARGEST = 20, 10


def file_name(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower())


def run_profiles(cases: list[BenchmarkCase], tokenizers: dict, workloads: list[Workload],
                 directory: Path) -> None:
    """Write a trace for each engine and each decode workload."""
    for workload in workloads:
        for case in cases:
            if workload.n_new == 1 or case.start_peer or case.error:
                continue
            weights = case.weights
            name = file_name(f"{weights.name}-{weights.quantization}-{case.engine}-{workload}-"
                             f"b{workload.batch_size}")
            rank = f".rank{tp.rank()}" if tp.rank() else ""
            path = directory / f"{name}{rank}.json"
            print(profile(case, tokenizers[weights.name], workload, path), flush=True)
            log(f"Trace written to {path}")


@torch.inference_mode()
def profile(case: BenchmarkCase, tokenizer, workload: Workload, path: Path) -> str:
    """Write a Chrome trace of steady-state decode steps -> the ten largest kernels, as text."""
    run = CaseRun(case, workload, tokenizer)
    run.prepare()
    device = case.weights.model.freq.device
    tokens = run.runner.tokens(run.prompts, workload.n_new)
    for _ in range(workload.n_new // 2):
        next(tokens)
    n_steps = min(MAX_STEPS, workload.n_new - workload.n_new // 2)
    with torch.profiler.profile() as trace:
        for _ in range(n_steps):
            next(tokens)
        synchronize(device)
    trace.export_chrome_trace(str(path))
    return f"{case.engine} {case.weights.quantization}: {n_steps} steps, the largest:\n" + (
        largest_kernels(trace, n_steps, on_gpu=device.type == "cuda"))


def largest_kernels(trace, n_steps: int, on_gpu: bool) -> str:
    """One line per kernel: milliseconds and calls per step, name."""
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(trace.key_averages(), key=lambda event: -getattr(event, time_of))
    lines = []
    for event in events[:N_LARGEST]:
        name = event.key if len(event.key) < 90 else f"{event.key[:60]} … {event.key[-26:]}"
        ms = getattr(event, time_of) / n_steps / 1e3
        lines.append(f"{ms:9.3f} ms per step {event.count / n_steps:6.0f} calls  {name}")
    return "\n".join(lines)
