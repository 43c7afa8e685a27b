"""Where the time of a decode step goes on a CPU, and what reading the weights alone takes.

The operations of one step are recorded, then run again by part, interleaved. "Reading" is a loop
that only reads the same weights in the order, tasks and threads of the products (roofline.cpp).

    python scripts/dev/roofline.py --random Llama-1.1B none int8 int4
    python scripts/dev/roofline.py -m checkpoints/SmolLM2-135M-Instruct none int8 int4
"""

import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
from generate import number  # noqa: E402
from gpt_faster.bench.engines import Engine  # noqa: E402
from gpt_faster.bench.machine import describe_machine, read_bandwidth  # noqa: E402
from gpt_faster.bench.weights import load_weights  # noqa: E402
from gpt_faster.bench.workloads import Workload  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.kernels.cpu import native  # noqa: E402
from gpt_faster.loading import open_model  # noqa: E402

DEPTH, N_NEW = 128, 24
BITS = {native.FP32: 32, native.BF16: 16, native.INT8: 8, native.INT4: 4}      # of a weight
AROUND_THE_LAYERS = {native.EMBED, native.ROPE_TABLE, native.MASK, native.RING_MASK, native.DRAW}
PARTS = ("reading", "products", "head", "attention", "others", "all operations")


def build_reader(folder: Path) -> ctypes.CDLL:
    path = folder / "roofline.so"
    subprocess.run([native.compiler(), *native.options(), "-I", native.SOURCE.parent,
                    Path(__file__).with_suffix(".cpp"), "-o", path], check=True)
    return ctypes.CDLL(str(path))


def kind_of(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def record_step(engine: Engine, prompts: list) -> tuple[list[int], list[int], float]:
    """Run a text -> a step's operations in the layers, the head's, and seconds a token."""
    calls, run = [], native.run

    def recorded(addresses, n_thread=None):
        calls.append(list(addresses))
        run(addresses, n_thread)
    with patch.object(native, "run", recorded):
        engine.run(prompts, 6)                     # the last steps are run again, each as one list
    step = [address for address in calls[-1] if kind_of(address) not in AROUND_THE_LAYERS]
    layers, head = step[:-1], step[-1:]
    _, times = engine.run(prompts, N_NEW)
    return layers, head, statistics.median(b - a for a, b in zip(times[2:], times[3:]))


def time_parts(reader: ctypes.CDLL, layers: list[int], head: list[int], rounds: int) -> dict:
    """-> part -> median seconds."""
    of_kind = {name: [a for a in layers if kind_of(a) == kind]
               for name, kind in (("products", native.LINEAR), ("attention", native.ATTENTION))}
    known = {address for part in of_kind.values() for address in part}
    parts = of_kind | {"head": head, "others": [a for a in layers if a not in known],
                       "all operations": layers + head}
    weights = of_kind["products"] + head
    addresses = (ctypes.c_void_p * len(weights))(*weights)

    def read():
        reader.read_all_weights(addresses, len(weights), torch.get_num_threads())
    runs = {"reading": read} | {name: lambda part=part: native.run(part)
                                for name, part in parts.items() if part}
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, each in runs.items():
            start = time.perf_counter()
            each()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


@torch.inference_mode()
def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--random", metavar="NAME", help="random weights in this model's shape")
    p.add_argument("--model", "-m", metavar="PATH", help="a checkpoint of a dense model")
    p.add_argument("schemes", nargs="+", help="none, int8, int4, …")
    p.add_argument("--rounds", type=number(int, 1), default=60)
    args = p.parse_args(argv)
    if bool(args.random) == bool(args.model):
        p.error("give --random or --model")
    device = torch.device("cpu")
    source, tokenizer = open_model(args.model, args.random)
    workload = Workload(DEPTH, N_NEW, 1)
    machine = describe_machine(device)
    print(f"{source.path.name}, {machine['machine']}, {machine['capability']}, "
          f"{machine['threads']} threads, {machine['commit']}; ms a token after {DEPTH}\n")
    print(f"| weights | MB | GB/s | bytes at that | {' | '.join(PARTS)} | a token | of bandwidth |")
    print("|---" * (len(PARTS) + 6) + "|")
    with tempfile.TemporaryDirectory() as folder:
        reader = build_reader(Path(folder))
        for scheme in args.schemes:
            weights = load_weights(source, scheme, torch.bfloat16, device)
            prompts, _ = workload.requests(tokenizer, weights.cfg)
            engine = Engine("compile", weights.model, prompts, workload, tokenizer)
            layers, head, token_s = record_step(engine, prompts)
            check_dense(layers, head)
            gb_s = read_bandwidth(device)
            parts = time_parts(reader, layers, head, args.rounds)
            n_byte = sum(weight_bytes_of(a) for a in (*layers, *head))
            cells = [f"{n_byte / 1e6:.0f}", f"{gb_s:.1f}", f"{n_byte / gb_s / 1e6:.1f}"]
            cells += [f"{1e3 * parts[name]:.2f}" if name in parts else "–" for name in PARTS]
            cells += [f"{1e3 * token_s:.2f}", f"{n_byte / token_s / gb_s / 1e9:.0%}"]
            print(f"| {weights.quantization} | {' | '.join(cells)} |", flush=True)
    return 0


def check_dense(layers: list[int], head: list[int]) -> None:
    """ValueError: operations that cannot be repeated alone, or that roofline.cpp cannot read."""
    known = {native.LINEAR, native.ATTENTION, native.ADD_NORM}
    linears = [native.Linear.from_address(a) for a in (*layers, *head)
               if kind_of(a) == native.LINEAR]
    is_whole = len(linears) > 1 and set(map(kind_of, (*layers, *head))) <= known
    if not is_whole or any(op.n_expert or op.format not in BITS for op in linears):
        raise ValueError("only dense models that run as operations alone, in bf16, int8 or int4")


def weight_bytes_of(address: int) -> int:
    """Bytes that an operation's product reads, with scales; 0 of other operations."""
    if kind_of(address) != native.LINEAR:
        return 0
    op = native.Linear.from_address(address)
    bits = BITS[op.format]
    n_scale = op.N * op.K // op.group_size if op.format == native.INT4 else 0
    return op.N * op.K * bits // 8 + 4 * n_scale


if __name__ == "__main__":
    sys.exit(guarded(run))
