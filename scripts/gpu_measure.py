"""Measure the fast paths on a GPU in six minutes, the most valuable rows first; needs no files.

Each part is a process of its own: a crash, a hang or a broken CUDA context ends that part alone.
Each row is printed when it is known and appended to a file of JSON lines. Weights are random.

    python scripts/gpu_measure.py                  # products, attention, checks, 8B, 1B
    python scripts/gpu_measure.py --plan whole     # the whole path: models, batches, drafts, server
    python scripts/gpu_measure.py --parts families,server --seconds 200
    python scripts/gpu_measure.py --dry            # every row's code, tiny, on a CPU
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from generate import number, pick_device
from gpt_faster.bench import gpu
from gpt_faster.bench.machine import describe_machine
from gpt_faster.cli.common import guarded
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.formats.config import config_from_hf

PARTS = {part.__name__: part for part in (
    gpu.products, gpu.attention, gpu.prompt_products, gpu.checks, gpu.llama_8b, gpu.llama_1b,
    gpu.all_of_8b, gpu.plain_engine, gpu.batches, gpu.drafts, gpu.families, gpu.server,
    gpu.two_ranks)}
# name: seconds that a part may take; one that ends early leaves its rest to those after it
PLANS = {"first": dict(products=110, attention=30, prompt_products=40, checks=110, llama_8b=90,
                       llama_1b=90),
         "whole": dict(checks=90, all_of_8b=130, llama_1b=80, batches=120, plain_engine=80,
                       families=110, drafts=90, server=70, two_ranks=70)}
LEAST_SECONDS = 15                                 # to start a process and measure a row
GRACE = 5                                          # seconds: then a part that hangs is killed


# ---- Parts --------------------------------------------------------------------------------------

def run_parts(limits: dict[str, float], seconds: float, command: Callable) -> list[str]:
    """Run command(name, limit) for each part -> what went wrong outside of rows."""
    end, wrong = time.monotonic() + seconds, []
    for name, limit in limits.items():
        left = end - time.monotonic()
        if left < min(LEAST_SECONDS, limit):
            print(f"skipped {name}: {max(0, left):.0f} s are left", flush=True)
            continue
        limit = min(limit, left)
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        process = subprocess.Popen(command(name, limit), start_new_session=True)
        try:
            status = process.wait(limit + GRACE)
            if status:
                wrong.append(f"{name}: exit status {status}")
        except subprocess.TimeoutExpired:
            wrong.append(f"{name}: over its {limit:.0f} s, killed")
        finally:
            if process.poll() is None:             # its own children too
                os.killpg(process.pid, 9)
                process.wait()
        if wrong and wrong[-1].startswith(f"{name}:"):
            print(f"FAILED  {wrong[-1]}", flush=True)
    return wrong


def show(row: dict) -> str:
    """A line for people."""
    figures = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("row",))
    word = "FAILED " if "error" in row else "skipped" if "skipped" in row else "ok     "
    return f"{word} {row['row']}: {figures}"


def record_to(path: Path | None, row: dict) -> None:
    print(show(row), flush=True)
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_part(name: str, device: torch.device, sizes: gpu.Sizes, seconds: float,
             path: Path | None) -> None:
    PARTS[name](gpu.Run(device, sizes, seconds, partial(record_to, path)))


# ---- Dry ----------------------------------------------------------------------------------------

def tiny(**more):
    """A config of two layers."""
    return config_from_hf(dict(
        model_type="llama", hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, vocab_size=256,
        max_position_embeddings=2048) | more)[0]


def dry_sizes() -> gpu.Sizes:
    """Every row of every part, as small as its code allows."""
    models = {
        "Llama-3.1-8B": tiny, "Llama-3.2-1B": tiny,
        "Qwen3.5-4B": partial(
            tiny, model_type="qwen3_5_text", num_hidden_layers=4, head_dim=32,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
            linear_value_head_dim=16),
        "gemma-4-E2B": partial(
            tiny, model_type="gemma4_text", sliding_window=16, hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=256, num_kv_shared_layers=0, head_dim=16,
            global_head_dim=16, layer_types=["sliding_attention", "full_attention"]),
        "GLM-4.7-Flash-4L": partial(
            tiny, model_type="deepseek_v3", num_key_value_heads=4, q_lora_rank=None,
            kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
            first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32)}
    return gpu.Sizes(
        products={"qkv": (96, 128, False, True), "gate, up": (64, 128, True, True)},
        attention=(((4, 2, 16), 1, 20, 32), ((4, 2, 16), 3, 20, 64),
                   ((4, 2, 16), 1, 20, 32, "int4")),
        cycled=1, launches=2, replays=2, new_tokens=4, prompt=24, prompt_rows=(9,), repetitions=1,
        clients=2, requests=3, models=models, engines=dict(torch_compile="kv_cache"))


# ---- The command --------------------------------------------------------------------------------

def run(argv: list[str] | None = None) -> int:
    """-> exit status: 1 if a row or a part failed."""
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(description=__doc__.splitlines()[0], formatter_class=Help)
    p.add_argument("--plan", choices=PLANS, default="first", help="which parts, in which order")
    p.add_argument("--parts", help=f"these parts instead, of {', '.join(PARTS)}")
    p.add_argument("--seconds", type=number(int, 1), default=360, help="for all of it")
    p.add_argument("--output", type=Path, metavar="FILE",
                   help="JSON lines; default: $OUT/gpu_measure.jsonl where OUT is set")
    p.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    p.add_argument("--dry", action="store_true",
                   help="tiny sizes on a CPU: does each row's code run?")
    p.add_argument("--one", metavar="PART", help="run this part in this process")
    args = p.parse_args(argv)
    names = args.parts.split(",") if args.parts else [args.one] if args.one else PLANS[args.plan]
    for name in names:
        if name not in PARTS:
            raise ValueError(f"no part '{name}': the parts are {', '.join(PARTS)}")
    device = pick_device("cpu" if args.dry else args.device)
    if device.type == "cpu" and not args.dry:
        raise ValueError("--device cpu needs --dry: the sizes are a GPU's")
    path = args.output
    if path is None and os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / "gpu_measure.jsonl"
    if args.one:
        with gpu.without_pauses() if args.dry else nullcontext():
            run_part(args.one, device, dry_sizes() if args.dry else gpu.Sizes(), args.seconds, path)
        return 0
    n_before = len(read_rows(path))
    machine = dict(row="machine", command=" ".join(argv), **describe_machine(device))
    record_to(path, machine)
    limits = {name: PLANS[args.plan].get(name, args.seconds) for name in names}

    def command(name: str, limit: float) -> list[str]:
        flags = ["--dry"] if args.dry else ["--device", str(device)]
        more = ["--output", str(path)] if path else []
        return [sys.executable, __file__, "--one", name, "--seconds", str(max(1, int(limit))),
                *flags, *more]
    wrong = run_parts(limits, args.seconds, command)
    rows = read_rows(path)[n_before:]
    failed = [row["row"] for row in rows if "error" in row]
    if path:
        print(f"{len(rows) - len(failed)} rows without an error, {len(failed)} with one, in {path}")
    return int(bool(wrong or failed))


def read_rows(path: Path | None) -> list[dict]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(guarded(run))
