"""Decoding speed on a CPU when modules with hooks run in PyTorch and the others in kernels.

    python scripts/dev/hooked.py                       # the default model; or -m org/name
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from generate import Batch, Steps, generate
from gpt_faster.cli.common import guarded
from gpt_faster.cli.parser import Parser
from gpt_faster.decoding.engines import build_steps
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.kernels.guard import guard_of
from gpt_faster.loading import load_model
from sampling import SamplingParams

N_NEW, ROUNDS = 120, 5
HOOKED = {                                         # modules with a hook
    "nothing": lambda model: [],
    "one layer": lambda model: [model.layers[len(model.layers) // 2]],
    "one layer's attention": lambda model: [model.layers[len(model.layers) // 2].attn],
    "the last norm": lambda model: [model.norm],
    "each layer's attention": lambda model: [layer.attn for layer in model.layers],
    "each layer": lambda model: list(model.layers),
}


def step_ms(model, ids: list[int], steps: Steps) -> float:
    """The median time of a greedy decode step."""
    batch = Batch(model, build_sampler(model, [SamplingParams(temperature=0)]), steps)
    times = [time.perf_counter() for _ in generate(batch, [ids], N_NEW)]
    return 1000 * statistics.median(b - a for a, b in zip(times, times[1:]))


def time_us(call, n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n * 1e6


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--checkpoint_path", "-m", metavar="PATH_OR_NAME", help="default: SmolLM2")
    args = p.parse_args(argv)
    model, _, tokenizer = load_model(args.checkpoint_path, "cpu", torch.bfloat16)
    ids = tokenizer.encode("Hello, my name is")
    model.setup_cache(1, len(ids) + N_NEW)
    uncompiled = step_ms(model, ids, Steps())
    steps = build_steps(model, "compile")
    times = {name: [] for name in HOOKED}
    for _ in range(ROUNDS):
        for name, modules in HOOKED.items():
            hooks = [m.register_forward_hook(lambda *_: None) for m in modules(model)]
            times[name].append(step_ms(model, ids, steps))
            for hook in hooks:
                hook.remove()
    print("| hook on | ms per token | relative speed |\n|---|---|---|")
    for name, step_times in times.items():
        relative_speed = statistics.median(a / b for a, b in zip(times["nothing"], step_times))
        print(f"| {name} | {statistics.median(step_times):.1f} | {relative_speed:.2f} |")
    relative_speed = statistics.median(times["nothing"]) / uncompiled
    print(f"| (uncompiled) | {uncompiled:.1f} | {relative_speed:.2f} |")
    model(torch.tensor([ids]), torch.arange(len(ids)))     # re-check after removing the hooks
    module_watch = guard_of(model).snapshot
    full_us = time_us(module_watch.is_unchanged, 2000)
    hooks_us = time_us(module_watch.has_no_new_hook, 100_000)
    print(f"\n{len(module_watch.modules)} modules are checked in {full_us:.0f} µs, "
          f"only for new hooks in {hooks_us:.2f} µs.")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
