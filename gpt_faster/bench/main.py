"""benchmark.py's command: flags, cases and the result.

It times engines and peers, compares the engines' tokens, and measures memory bandwidth in the same
run. One command reproduces a table of the docs:

    python benchmark.py -m org/name -p 512 -n 200 --engines kv_cache,compile,int8 --peers llama.cpp
"""

import gc
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tp
from generate import dtype_name, log, number, pick_device
from gpt_faster.bench import plots, serving
from gpt_faster.bench.cases import BenchmarkCase, build_cases, run_workload
from gpt_faster.bench.engines import (
    DFLASH,
    EAGLE3,
    LADDER,
    MTP,
    NGRAM,
    PUBLISHED_ACCEPTANCE,
    SAMPLERS,
    split_cache,
)
from gpt_faster.bench.machine import describe_machine
from gpt_faster.bench.peers import peer_starter
from gpt_faster.bench.profiling import run_profiles
from gpt_faster.bench.ranks import run_ranks
from gpt_faster.bench.suites import SUITES, run_suite
from gpt_faster.bench.tables import OUTPUTS, PEERS, is_peer
from gpt_faster.bench.weights import is_scheme
from gpt_faster.bench.worker import split_cache_types
from gpt_faster.bench.workloads import Workload, encode_file
from gpt_faster.cli.common import guarded
from gpt_faster.cli.flags import add_activation_bits
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.decoding.ranks import as_rank
from gpt_faster.devices import pick_dtype
from gpt_faster.formats.known_shapes import SHAPES
from gpt_faster.kernels.cpu import native
from gpt_faster.loading import open_model
from tp import local_device

NANO_GPT_BATCHES = [1, 8, 64, 512]
EXPECTED_ERRORS = "out of memory|needs an|takes one"       # of rows; the exit status stays 0


# ---- Flags --------------------------------------------------------------------------------------

def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def counts(minimum: int) -> Callable:
    """An argparse type: comma-separated integers."""
    return lambda text: [number(int, minimum)(n) for n in names(text)]


def build_parser() -> Parser:
    p = Parser(description="Benchmark engines. The table goes to stdout.", formatter_class=Help)
    add_model_flags(p.add_argument_group("models").add_argument)
    add_workload_flags(p.add_argument_group("tests (comma-separated lists)").add_argument)
    add_run_flags(p.add_argument_group("runs").add_argument)
    add_output_flags(p.add_argument_group("output").add_argument)
    return p


def add_model_flags(add: Callable) -> None:
    add("--checkpoint_path", "--model", "-m", "--init_from", action="append",
        metavar="PATH_OR_NAME", help="same as for generate.py, or a name of --random; repeatable")
    add("--random", metavar="NAMES", help="random weights in these models' shapes, comma-separated")
    add("--quantize", default="none", metavar="LIST",
        help="none, int8, int4 (groups of 32), int4-g64, …, comma-separated: run every engine with "
             "each; none keeps the quantization of the file")
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--dtype", default="auto", type=dtype_name,
        choices=["auto", "bfloat16", "float16", "float32"])
    add_activation_bits(add)


def add_workload_flags(add: Callable) -> None:
    add("-p", "--n_prompt", type=counts(1), default=[], metavar="LIST",
        help="time prefill of N tokens: ppN")
    add("-n", "--max_new_tokens", type=counts(0), default=[200], metavar="LIST",
        help="time decoding of N tokens: tgN; 0: skip")
    add("-d", "--depth", type=counts(1), default=[5], metavar="LIST",
        help="prompt tokens before decoding: tgN @ dN")
    add("-b", "--batch_size", type=counts(1), metavar="LIST",
        help="batch sizes; default: 1, or 1,8,64,512 with --init_from")
    add("--text", type=Path, metavar="FILE",
        help="use this file as the prompt instead of DEPTH tokens, with the chat template if any")
    add("--temperature", type=number(float, 0), default=0.0,
        help="of all engines except sorted and sort_free; above 0 each run has another seed")
    add("--max_seq_length", type=counts(0), default=[0], metavar="LIST",
        help="KV cache length; 0: as needed")
    add("--requests", type=number(int, 1), metavar="N",
        help="continuous batching of N requests with 1 to DEPTH prompt tokens and 1 to "
             "MAX_NEW_TOKENS new tokens, BATCH_SIZE at a time: total tok/s, and the median per "
             "request")


def add_run_flags(add: Callable) -> None:
    add("--engines", metavar="LIST",
        help=f"of {', '.join(LADDER)}, {NGRAM} (compile with n-gram speculation), "
             f"{MTP} (compile with MTP speculation at an acceptance rate of "
             f"{PUBLISHED_ACCEPTANCE[MTP]}), {EAGLE3}, {DFLASH} (likewise with a drafter of random "
             f"weights: EAGLE-3 at {PUBLISHED_ACCEPTANCE[EAGLE3]}, or DFlash with blocks of 16, at "
             f"{PUBLISHED_ACCEPTANCE[DFLASH]}), int8, int4, int4-g64, "
             "… (compile with such weights); NAME@int8, NAME@int8/int4, …: with a KV cache of this "
             "precision; sorted and sort_free sample (temperature 0.8, top-p "
             "0.95), the others are greedy; default: kv_cache,torch_compile,compile, or all of "
             "them with --init_from")
    add("--peers", default="", metavar="LIST",
        help=f"other programs to run interleaved, of {', '.join(PEERS)} (our own, as a check); "
             "llama.cpp@q8_0, llama.cpp@q8_0/q4_0, …: with a KV cache of these types; see "
             "scripts/install_peers.sh")
    add("--ranks", type=counts(1), default=[], metavar="LIST",
        help="repeat with these numbers of tensor-parallel processes on this machine")
    add("-r", "--repetitions", type=number(int, 1), default=5,
        help="rounds; each runs all cases in random order")
    add("--no_check", action="store_true",
        help="do not check the tokens afterwards: the check computes each text again in plain "
             "PyTorch, which takes minutes for a long prompt of a large model")
    add("--suite", choices=(*SUITES, "serve"),
        help="run a list of benchmarks into benchmarks/MACHINE.json; resumes an interrupted run at "
             "the same commit; serve: serve.py under load, table on stdout")
    add("--only", metavar="TITLES", help="run only these tables of the suite, comma-separated")


def add_output_flags(add: Callable) -> None:
    add("-o", "--output", default="md", choices=list(OUTPUTS), help="output format")
    add("--plot", type=Path, metavar="DIR", help="write PNG charts of throughput, time to first "
                                                 "token, memory and bandwidth (needs matplotlib)")
    add("--profile", type=Path, metavar="DIR",
        help="instead of timing, write a Chrome trace of steady-state decode steps for each case "
             "and test, and print the ten most expensive kernels")


# ---- Cases and workloads ------------------------------------------------------------------------

def read_engines(args, is_nano_gpt: bool) -> list[tuple[str, str]]:
    """-> (engine, scheme) in the order of the rows."""
    default = ",".join(LADDER) if is_nano_gpt else "kv_cache,torch_compile,compile"
    requested = names(default if args.engines is None else args.engines)
    schemes = names(args.quantize)
    if not requested or not schemes:
        raise ValueError(f"--engines or --quantize is empty: choose from {', '.join(LADDER)}, "
                         "int8, int4")
    known = (*LADDER, NGRAM, MTP, EAGLE3, DFLASH)
    quantizable = [name for name in known if name not in ("recompute", *SAMPLERS)]
    for name in requested:
        engine, kv_cache = split_cache(name)
        if kv_cache and engine not in quantizable:
            raise ValueError(f"engine '{name}': only {', '.join(quantizable)} take a KV cache of "
                             "another precision")
        if engine not in known and not is_scheme(engine):
            raise ValueError(f"unknown engine '{name}' (engines: {', '.join(known)}, int8, int4, "
                             "int4-g64, …)")
    for scheme in schemes:
        if scheme != "none" and not is_scheme(scheme):
            raise ValueError(f"--quantize {scheme}: expected none, int8, int4, or int4-g64 (groups "
                             "of 32, 64, 128 or 256); with --random also nvfp4, mxfp4")
    engines = [name for name in requested if split_cache(name)[0] in known]
    pairs = [(engine, scheme) for scheme in schemes for engine in engines]
    return pairs + [("compile", name) for name in requested if name not in engines]


def read_models(args) -> list[tuple[str | None, str | None]]:
    """-> (path, None) or (None, shape). -m also accepts a shape's name if no such file exists."""
    shapes = {shape.lower(): shape for shape in SHAPES}
    if args.random is not None and args.checkpoint_path:
        raise ValueError("--random and --checkpoint_path are mutually exclusive")
    if args.random is not None and not names(args.random):
        raise ValueError("--random is empty: known shapes are " + ", ".join(shapes.values()))
    if args.random is not None:
        return [(None, shape) for shape in names(args.random)]
    models = []
    for path in args.checkpoint_path or [None]:
        shape = shapes.get(path.lower()) if path and not Path(path).exists() else None
        if shape:
            log(f"{path}: no such file: using random weights of that shape")
            path = None
        models.append((path, shape))
    return models


def read_peers(args) -> list[str]:
    peers = names(args.peers)
    for peer in peers:
        name, _ = split_cache_types(peer)
        if name not in PEERS:
            raise ValueError(f"unknown peer '{name}' (peers: {', '.join(PEERS)})")
    return peers


def read_workloads(args, is_nano_gpt: bool, text_model: tuple) -> list[Workload]:
    """Workloads in the order of the rows. text_model: its tokenizer measures --text."""
    batch_sizes = args.batch_size or (NANO_GPT_BATCHES if is_nano_gpt else [1])
    if 1 in args.max_new_tokens:
        raise ValueError("-n 1: decode timing needs at least 2 tokens (0: only -p)")
    if args.text and args.requests:
        raise ValueError("--text and --requests are mutually exclusive")
    workloads = [Workload(n, 1, b) for n in args.n_prompt for b in batch_sizes]
    workloads += [
        Workload(depth, n_new, b, cache_length, args.requests or 0, args.text)
        for depth in args.depth for n_new in args.max_new_tokens if n_new
        for cache_length in args.max_seq_length for b in batch_sizes]
    if not workloads:
        raise ValueError("nothing to time: set -p or -n")
    if args.text:
        n_prompt = len(encode_file(args.text, open_model(*text_model)[1]))
        workloads = [workload._replace(n_prompt=n_prompt) for workload in workloads]
    return workloads


def check_suite(args, parser: Parser, device: torch.device) -> list[str]:
    """-> the titles to run. ValueError if other flags conflict with --suite."""
    if args.suite == "serve" and args.only:
        raise ValueError("--suite serve has one table: it cannot be combined with --only")
    if args.suite == "gpu" and device.type == "cpu":
        raise ValueError("--suite gpu needs a GPU, but the device is cpu: use --suite cpu")
    explicit = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    conflicting = explicit - {"suite", "device", "plot", "only"}
    if conflicting:
        raise ValueError(f"--suite has its own commands and cannot be combined with "
                         f"--{min(conflicting)}")
    if args.suite == "serve":
        return []
    titles = names(args.only) if args.only else list(SUITES[args.suite])
    for title in titles:
        if title not in SUITES[args.suite]:
            raise ValueError(f"--only {title}: the tables are {', '.join(SUITES[args.suite])}")
    return titles


def check_ranks(args) -> None:
    for flag in ("suite", "peers", "plot", "profile"):
        if getattr(args, flag):
            raise ValueError(f"--ranks cannot be combined with --{flag}")


# ---- The command --------------------------------------------------------------------------------

def run(argv: list[str] | None = None) -> int:
    """-> exit status: 1 if an engine failed or its tokens are wrong."""
    argv = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "benchmark.py", *argv])
    parser = build_parser()
    args = parser.parse_args(argv)
    device = pick_device(local_device(args.device))
    if args.plot:
        plots.load_matplotlib()                    # fail now, not after an hour
    if args.only and not args.suite:
        raise ValueError("--only requires --suite")
    if tp.world() > 1 and (args.suite or args.peers or args.ranks):
        raise ValueError("--suite, --peers and --ranks start processes themselves: do not use "
                         "torchrun")
    if args.suite:
        titles = check_suite(args, parser, device)
        if args.suite == "serve":
            return serving.run(["--device", args.device])
        return run_suite(args.suite, titles, device, args.plot)
    if args.ranks:
        check_ranks(args)
        status, result = run_ranks(args.ranks, argv, command)
        if result:
            print(OUTPUTS[args.output](result), flush=True)
        return status
    return run_benchmark(args, device, command)


def run_benchmark(args, device: torch.device, command: str) -> int:
    """Run the benchmark and print the result -> exit status."""
    native.set_activation_bits(args.activation_bits)
    is_nano_gpt = bool(re.search(r"--init[-_]from\b", command))
    engines = read_engines(args, is_nano_gpt)
    models = read_models(args)
    peers = read_peers(args)
    workloads = read_workloads(args, is_nano_gpt, models[0])
    for directory in (args.plot, args.profile):
        if directory:
            directory.mkdir(parents=True, exist_ok=True)
    if args.profile:
        torch._inductor.config.cpp.enable_kernel_profile = True
    length = max(workload.n_positions() for workload in workloads)
    cases = []
    tokenizers = {}
    for path, shape in models:
        more, tokenizer = open_cases(path, shape, engines, peers, args, device, length)
        cases += more
        tokenizers[more[0].weights.name] = tokenizer
    if args.profile:
        run_profiles(cases, tokenizers, workloads, args.profile)
        return 0
    result = time_workloads(cases, tokenizers, workloads, args.repetitions, device, command,
                            not args.no_check)
    print(OUTPUTS[args.output](result), flush=True)
    if args.plot and tp.rank() == 0:
        for path in plots.plot(result, args.plot):
            log(f"Wrote {path}")
    return report_failures(result["rows"])


def open_cases(path: str | None, shape: str | None, engines: list, peers: list[str], args,
               device: torch.device, length: int) -> tuple[list[BenchmarkCase], object]:
    """Load a model -> its cases, its tokenizer. ValueError if `length` exceeds its context."""
    source, tokenizer = open_model(path, shape)
    dtype = pick_dtype(args.dtype, device, source.cfg)
    if length > source.cfg.context:
        raise ValueError(f"{length} tokens exceed the context of {source.cfg.context}")
    starters = {peer: peer_starter(peer, source, shape, device, length) for peer in peers}
    return build_cases(source, engines, starters, dtype, device, args.temperature), tokenizer


def time_workloads(cases: list[BenchmarkCase], tokenizers: dict, workloads: list[Workload],
                   repetitions: int, device: torch.device, command: str,
                   check_tokens: bool = True) -> dict:
    """-> the result: machine, command, and a row for each case and workload."""
    machine = describe_machine(device)
    rows = []
    bandwidths = []
    for workload in workloads:
        more, measured = run_workload(cases, tokenizers, workload, repetitions, device,
                                      check_tokens)
        rows += more
        bandwidths += measured
        gc.collect()
    return machine | dict(command=command, repetitions=repetitions,
                          bandwidth_gb_s=statistics.median(bandwidths), rows=rows)


def report_failures(rows: list[dict]) -> int:
    """Log wrong tokens and unexpected errors of engines -> exit status."""
    status = 0
    for row in rows:
        error = row["error"]
        is_external = is_peer(row["engine"]) or row["engine"] in PEERS
        if row["compared"] is False:
            problem = "generates other tokens than the reference"
        elif error and not is_external and not re.match(EXPECTED_ERRORS, error):
            problem = f"failed: {error}"
        else:
            continue
        log(f"benchmark.py: error: {row['engine']} ({row['quantization']}, {row['test']}, batch "
            f"{row['batch']}) {problem}")
        status = 1
    return status


def main() -> int:
    return guarded(as_rank(run))
