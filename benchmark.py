"""Time the engines side by side, compare what they say, and set them beside the machine and a peer.

It times generate.py's public functions from outside and has no loop of its own. One command gives a
table of the README again, with the memory bandwidth measured in the same run:

    python benchmark.py -m org/name -p 5 -n 200 -r 5 --engines kv_cache,compile --peers transformers
"""

import copy
import json
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint as checkpoints
import quantize
from cli import (
    Help,
    Parser,
    english_text,
    guarded,
    log,
    number,
    peak_memory,
    pick_device,
    pick_dtype,
)
from generate import (
    ENGINES,
    Row,
    build_steps,
    encode_prompt,
    figures,
    follow,
    generate,
    open_model,
    warm_up,
    weight_bytes,
)
from model import Transformer
from sampling import Sampling
from tokenizer import Numbers

GREEDY = Sampling(temperature=0)
MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def margin(model: Transformer) -> float:
    """In logits. Rounding makes a router exchange near-tied experts, so mixtures get twice that."""
    sparse = any(model.cfg.sparse) and model.dtype != torch.float32
    return MARGIN[model.dtype] * (1 + sparse)


def read_bandwidth(device: torch.device) -> float:
    """GB/s of reading 1 GB once, 1e9 bytes: the best of a few sums."""
    x = torch.ones(1 << 28, device=device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = 0.0
    for _ in range(7):
        sync()
        start = time.perf_counter()
        x.sum()
        sync()
        best = max(best, x.numel() * 4 / (time.perf_counter() - start) / 1e9)
    return best


def english(n: int, tokenizer, cfg) -> list[int]:
    """n tokens of Python's own documentation, or random ones where there is no tokenizer.

    Not always random: after nonsense, rounding alone can change what a model says in bf16.
    """
    if n < cfg.context and not isinstance(tokenizer, Numbers):
        return tokenizer.encode(english_text()[:20 * n])[:n]
    return encode_prompt(str(n), tokenizer, cfg, seed=0)


def twin(model: Transformer) -> Transformer:
    """Another model of the same weights, not a copy, so that each engine can compile its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


@torch.inference_mode()
def agrees(model: Transformer, prompt: torch.Tensor, ids: list[int], margin: float) -> bool:
    """Teacher-forced: is each token, after those before it, within `margin` of the best logit?"""
    whole = torch.tensor([prompt[0].tolist() + ids], device=prompt.device)
    model.setup_cache(0, whole.shape[1])
    pos = torch.arange(whole.shape[1] - 1, device=prompt.device)
    logits = model(whole[:, :-1], pos, keep=len(ids))[0]
    chosen = logits.gather(1, whole[0, -len(ids):, None])[:, 0]
    return bool((logits.amax(-1) - chosen <= margin).all())


class Transformers:
    """The peer: transformers' own generate, eager, on the same weights and prompt."""

    def __init__(self, source, device, dtype):
        from transformers import AutoModelForCausalLM, GgufConfig
        path, gguf = Path(source.path), {}
        if path.suffix == ".gguf":                 # as plain weights: what we run
            gguf = dict(gguf_file=path.name, quantization_config=GgufConfig(dequantize=True))
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **gguf)
        self.model = model.to(device)

    def __call__(self, prompt, n_new):
        times = [time.perf_counter()]

        class Clock:                               # generate() hands it the prompt, then each token
            def put(self, value):
                times.append(time.perf_counter())

            def end(self):
                del times[1]

        out = self.model.generate(
            prompt, max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False, streamer=Clock(),
            attention_mask=torch.ones_like(prompt), pad_token_id=0)
        return out[0, prompt.shape[1]:].tolist(), times


class Case(NamedTuple):
    """An engine or peer on a model, and what came of it."""

    name: str                                      # of the model
    quantization: str                              # of its weights, or none
    engine: str
    model: Transformer
    prompt: torch.Tensor
    runner: Callable                               # (prompt, n_new) -> ids, times
    tokens: list[int]                              # of the last run
    results: list[dict]


class Engine:
    """One of generate.py's engines, compiled and warm."""

    def __init__(self, name, model, prompt, n_new, tokenizer):
        self.model, self.tokenizer, self.cached = twin(model), tokenizer, name != "recompute"
        B, T = prompt.shape
        self.model.setup_cache(B if self.cached else 0, T + n_new)
        self.steps = build_steps(self.model, name)
        start = time.perf_counter()
        if name in ("compile", "cuda_graph"):
            warm_up(self.model, prompt, n_new, GREEDY, self.steps)
        self.compile_s = time.perf_counter() - start

    def __call__(self, prompt, n_new):
        rows = [Row(self.tokenizer, [], set(), []) for _ in prompt]
        tokens = generate(self.model, prompt, n_new, GREEDY, None, self.steps, self.cached)
        times, interrupted = follow(tokens, rows, None)
        if interrupted:
            raise KeyboardInterrupt
        return rows[0].ids, times


def build_parser():
    p = Parser(description="Benchmark engines; the table goes to stdout.", formatter_class=Help)
    add = p.add_argument
    add("--checkpoint_path", "--model", "-m", action="append", metavar="PATH_OR_NAME",
        help="as generate.py's; repeatable, each is run beside the others")
    add("--random", metavar="NAMES",
        help="known shapes with random weights, with commas: each is run beside the others")
    add("-p", "--n_prompt", type=number(int, 1), default=5, help="tokens in the prompt")
    add("-n", "--max_new_tokens", type=number(int, 2), default=200, help="new tokens")
    add("-b", "--batch_size", type=number(int, 1), default=1, help="rows")
    add("-r", "--repetitions", type=number(int, 1), default=5, help="interleaved, in random order")
    add("--quantize", default="none", metavar="LIST",
        help="none, int8, int4 (groups of 32), int4-g64, …, with commas: each is run beside the "
             "others; a file that is quantized already stays as it is with none")
    add("--engines", default="kv_cache,compile", help="a list, with commas: " + ", ".join(ENGINES))
    add("--peers", default="", help="transformers: its eager generate(), in the same run")
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    add("-o", "--output", default="md", choices=["md", "json"], help="a table, or one JSON object")
    return p


def run(argv=None) -> int:
    args = build_parser().parse_args(argv)
    names, peers, schemes = ([name.strip() for name in text.split(",") if name.strip()]
                             for text in (args.engines, args.peers, args.quantize))
    for name in [n for n in names if n not in ENGINES] + [p for p in peers if p != "transformers"]:
        raise ValueError(f"unknown engine or peer '{name}' (engines: {', '.join(ENGINES)}; "
                         "peers: transformers)")
    for scheme in schemes:
        if not re.fullmatch(r"none|int8|int4(-g(32|64|128|256))?", scheme):
            raise ValueError(f"--quantize {scheme}: expected none, int8, int4, or int4-g64 (groups "
                             "of 32, 64, 128 or 256)")
    if not names:
        raise ValueError(f"--engines names none: choose from {', '.join(ENGINES)}")
    device = pick_device(args.device)
    if device.type != "cuda" and "cuda_graph" in names:
        raise ValueError(f"the engine cuda_graph needs an NVIDIA GPU, the device is {device}")
    cases, models = [], [(path, None) for path in args.checkpoint_path or [None]]
    if args.random is not None:
        shapes = [shape.strip() for shape in args.random.split(",") if shape.strip()]
        if not shapes:
            raise ValueError("--random names none: known shapes are "
                             + ", ".join(checkpoints.SHAPES))
        models = [(path, shape) for shape in shapes for path, _ in models]
    for path, shape in models:
        source, tokenizer = open_model(path, shape)
        dtype = pick_dtype(args.dtype, device, source.cfg)
        if peers and source.path.suffix not in (".gguf", ".safetensors", ".json", ".bin"):
            raise ValueError("--peers transformers needs a Hugging Face directory or a GGUF")
        ids = english(args.n_prompt, tokenizer, source.cfg)
        if args.n_prompt + args.max_new_tokens > source.cfg.context:
            raise ValueError(f"{args.n_prompt} + {args.max_new_tokens} tokens exceed the context "
                             f"of {source.cfg.context}")
        prompt = torch.tensor([ids] * args.batch_size, device=device)
        for scheme in schemes:
            packed = source
            if scheme != "none":
                mode, _, group = scheme.partition("-g")
                packed = quantize.quantized(source, mode, int(group or 32), device=device)
            model = quantize.load(packed, dtype, device)
            stated = quantize.schemes(packed)[0]
            for name in names:
                log(f"Preparing {source.path.name} {scheme} {name}")
                runner = Engine(name, model, prompt, args.max_new_tokens, tokenizer)
                cases.append(Case(source.path.name, stated, name, model, prompt, runner, [], []))
        if peers:
            log("Preparing transformers")
            if "none" not in schemes:              # a peer reads plain weights
                model = quantize.load(source, dtype, device)
            model = next((c.model for c in cases if c.name == source.path.name
                          and c.quantization == "none"), model)
            cases.append(Case(source.path.name, "none", "transformers, eager", model, prompt,
                              Transformers(source, device, dtype), [], []))

    bandwidths = []
    for i in range(args.repetitions + 1):
        bandwidths.append(read_bandwidth(device))
        for case in random.sample(cases, len(cases)):
            time.sleep(0.5)                        # let clocks and caches of the last one settle
            case.tokens[:], times = case.runner(case.prompt, args.max_new_tokens)
            if i:                                  # the first round warms up
                case.results.append(figures(times, args.n_prompt, args.batch_size,
                                            weight_bytes(case.model)[1]))
    bandwidth, rows = statistics.median(bandwidths), []
    for case in cases:
        middle = {key: statistics.median(f[key] for f in case.results) for key in case.results[0]}
        speeds, same = [f["decode_tok_s_total"] for f in case.results], None
        if isinstance(case.runner, Engine):
            same = agrees(twin(case.model), case.prompt, case.tokens, margin(case.model))
        rows.append(dict(
            model=case.name, model_bytes=weight_bytes(case.model)[0], engine=case.engine,
            quantization=case.quantization, dtype=str(case.model.dtype)[6:],
            test=f"tg{args.max_new_tokens} @ pp{args.n_prompt}", batch=args.batch_size,
            tok_s=middle["decode_tok_s_total"], tok_s_min=min(speeds), tok_s_max=max(speeds),
            tok_s_per_request=middle["decode_tok_s"], ttft_ms=1e3 * middle["ttft_s"],
            compile_s=getattr(case.runner, "compile_s", 0.0),
            achieved_gb_s=middle["bandwidth_gb_s"],
            bandwidth_fraction=middle["bandwidth_gb_s"] / bandwidth, compared=same))
    result = dict(
        device=str(device), machine=platform.machine(), threads=torch.get_num_threads(),
        versions=dict(torch=torch.__version__, python=platform.python_version()),
        command=" ".join(["python", "benchmark.py", *(sys.argv[1:] if argv is None else argv)]),
        bandwidth_gb_s=bandwidth, peak_memory_bytes=peak_memory(device),
        rows=rows)
    print(json.dumps(result) if args.output == "json" else table(result))
    wrong = [case for case, row in zip(cases, rows) if row["compared"] is False]
    for case in wrong:
        log(f"benchmark.py: error: tokens of {case.engine} are more than {margin(case.model)} in "
            "logits away from the reference's")
    return 1 if wrong else 0


def table(result: dict) -> str:
    """As Markdown; the ratio is to the last row, the peer if there is one."""
    several = len({row["model"] for row in result["rows"]}) > 1
    lines = ["| engine | weights | MB | test | batch | tok/s (min–max) | ratio | first token, ms "
             "| GB/s | of bandwidth | compile, s | tokens agree |", "|---" * 12 + "|"]
    for row in result["rows"]:
        same = {True: "yes", False: "NO", None: "–"}[row["compared"]]
        engine = f"{row['model']}: {row['engine']}" if several else row["engine"]
        weights = row["dtype"] if row["quantization"] == "none" else row["quantization"]
        cells = (engine, weights, f"{row['model_bytes'] / 1e6:.0f}", row["test"], row["batch"],
                 f"{row['tok_s']:.1f} ({row['tok_s_min']:.1f}–{row['tok_s_max']:.1f})",
                 f"{row['tok_s'] / result['rows'][-1]['tok_s']:.2f}", f"{row['ttft_ms']:.0f}",
                 f"{row['achieved_gb_s']:.1f}", f"{row['bandwidth_fraction']:.0%}",
                 f"{row['compile_s']:.1f}", same)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + (
        f"\n\n{result['rows'][0]['dtype']} on {result['device']}, {result['threads']} threads, "
        f"reading memory at {result['bandwidth_gb_s']:.1f} GB/s in this run; "
        f"torch {result['versions']['torch']}.")


if __name__ == "__main__":
    sys.exit(guarded(run))
