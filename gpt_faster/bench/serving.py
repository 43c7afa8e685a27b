"""Benchmark serve.py under load, compared with generate.py on the same prompts and slots, and with
the servers of llama.cpp and vLLM if scripts/install_peers.sh has installed them.

Servers run as processes and are accessed over HTTP; nothing of gpt_faster/server is imported.

    python benchmark.py --suite serve
"""

import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import torch

from generate import log
from gpt_faster.bench.clients import ask_all, first_token
from gpt_faster.bench.machine import ROOT
from gpt_faster.bench.peers import environment, peer_path
from gpt_faster.formats.load import open_checkpoint
from gpt_faster.text import tokenizer_files
from gpt_faster.text.english import english_text

CLIENTS = (1, 8, 32)
REQUESTS_PER_CLIENT = {1: 6, 8: 3, 32: 2}
ROUNDS = 3                                         # interleaved; medians are reported
LENGTH = 1024                                      # context length of a slot
START_TIMEOUT = 300                                # seconds


def make_requests(n: int, seed: int = 0) -> list[dict]:
    """Prompts of about 100 to 500 tokens with 64 to 128 new ones; deterministic."""
    draw, text = random.Random(seed), english_text()
    results_of = []
    for _ in range(n):
        begin, length = draw.randrange(len(text) - 4000), 4 * draw.randrange(100, 500)
        prompt = text[begin:begin + length]
        results_of.append(dict(prompt=prompt, max_new_tokens=draw.randrange(64, 129)))
    return results_of


def our_server(n_slot: int, port: int, flags: list[str]) -> list:
    return [sys.executable, "serve.py", "--compile", "--port", port, "--batch_size", n_slot,
            "--max_seq_length", LENGTH, *flags]


def llama_server(n_slot: int, port: int, flags: list[str]) -> list:
    """The same weights in bf16, the same number of threads. ValueError if not installed."""
    binary = environment("llama.cpp") / "bin/llama-server"
    if not binary.exists():
        raise ValueError("llama.cpp is not installed: run scripts/install_peers.sh")
    weights = SimpleNamespace(quantization="none", dtype=torch.bfloat16)
    path = peer_path("llama.cpp", open_checkpoint(None), None, weights)
    n_thread = torch.get_num_threads()
    return [binary, "--model", path, "--host", "127.0.0.1", "--port", port, "--threads", n_thread,
            "--threads-batch", n_thread, "--parallel", n_slot, "--ctx-size", LENGTH * n_slot,
            "--no-kv-unified", "--cache-ram", 0, "--fit", "off", "--load-mode", "none"]


def vllm_server(n_slot: int, port: int, flags: list[str]) -> list:
    """The CPU build in bf16 with defaults, except sizes. ValueError if not installed."""
    directory = environment("vllm") / "bin"
    if not directory.parent.name.endswith("vllm"):
        raise ValueError("vLLM is not installed: run scripts/install_peers.sh vllm")
    weights = SimpleNamespace(quantization="none", dtype=torch.bfloat16)
    path = peer_path("vllm", open_checkpoint(None), None, weights)
    variables = dict(VLLM_CPU_KVCACHE_SPACE=2, VLLM_CPU_OMP_THREADS_BIND="nobind",
                     VLLM_NO_USAGE_STATS=1, OMP_NUM_THREADS=torch.get_num_threads(),
                     PATH=f"{directory}:{os.environ['PATH']}")
    return ["env", *(f"{name}={value}" for name, value in variables.items()), directory / "python",
            "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--host", "127.0.0.1",
            "--port", port, "--dtype", "bfloat16", "--max-model-len", LENGTH,
            "--max-num-seqs", n_slot]


SERVERS = {"vllm": vllm_server, "llama.cpp": llama_server, "serve.py": our_server}
NEEDS_IDS = {"vllm"}                               # its export has a dummy tokenizer


def is_installed(name: str) -> bool:
    """Whether the server is installed. Exports its model."""
    try:
        SERVERS[name](1, 0, [])
    except ValueError as e:
        log(str(e))
    else:
        return True
    return False


def as_ids(requests: list[dict]) -> list[dict]:
    tokenizer = tokenizer_files.load(open_checkpoint(None).tokenizer)
    return [dict(request, prompt=tokenizer.encode(request["prompt"])) for request in requests]


@contextmanager
def running_server(command: Callable, n_slot: int, flags: list[str]):
    """Start a server -> its port, once it is ready. RuntimeError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [str(part) for part in command(n_slot, port, flags)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_TIMEOUT
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{Path(argv[0]).name} did not start")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def is_ready(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError):                        # not listening yet, or 503 while it loads
        return opener.open(f"http://127.0.0.1:{port}/health").status == 200
    return False


def measure_server(port: int, n: int, requests: list[dict], seed: int,
                   convert: Callable = list) -> dict:
    """n clients on n slots -> tokens per second, and latencies in seconds.

    convert: adapts requests to this server.
    """
    requests = convert(requests)
    begin = time.perf_counter()
    answers = ask_all(port, requests, n)
    seconds = time.perf_counter() - begin
    background = convert([dict(prompt=f"{seed} {i} waves", max_new_tokens=900)
                          for i in range(n - 1)])
    [alone_request, loaded_request] = convert([dict(r, prompt=r["prompt"][:800])
                            for r in make_requests(2, seed=-1 - seed)])
    alone_s = first_token(port, alone_request, [])
    beside_s = first_token(port, loaded_request, background)
    first = sorted(answer.times[0] - answer.start for answer in answers)
    steps = [(answer.times[-1] - answer.times[0]) / (answer.request["max_new_tokens"] - 1)
             for answer in answers]
    pauses = sorted(b - a for answer in answers for a, b in zip(answer.times, answer.times[1:])
                    if b > a)                      # events may arrive together
    n_new = sum(request["max_new_tokens"] for request in requests)
    return dict(tok_s=n_new / seconds, first_s=statistics.median(first),
                first_99_s=quantile(first, 0.99),
                step_s=statistics.median(steps), pause_99_s=quantile(pauses, 0.99), alone_s=alone_s,
                beside_s=beside_s)


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_command(n_slot: int, requests: list[dict], flags: list[str]) -> dict:
    """generate.py --prompts_file -> total tokens per second."""
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory) / "prompts.jsonl"
        prompts.write_text("\n".join(map(json.dumps, requests)))
        command = [sys.executable, "generate.py", "--compile", "--batch_size", str(n_slot),
                   "--prompts_file", prompts, "--output", Path(directory) / "out.jsonl",
                   "--temperature", "0", "--ignore_eos", "--max_seq_length", str(LENGTH), *flags]
        result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True)
    return dict(tok_s=float(re.search(r"([\d.]+) tok/s in total", result.stderr)[1]))


def measure(n: int, servers: dict[str, Callable], flags: list[str], rounds: int) -> dict:
    """-> medians over interleaved rounds, for each server and for the command.

    All servers stay up and get new prompts in each round. of_command: the median over rounds of
    tokens per second relative to the command.
    """
    results_of = {}
    with ExitStack() as stack:
        ports = {name: stack.enter_context(running_server(command, n, flags))
                 for name, command in servers.items()}
        for i in range(-1, rounds):                # the first one is a warm-up
            log(f"{n} clients, round {i + 1} of {rounds}" if i >= 0 else f"{n} clients, warm up")
            requests = make_requests(n * REQUESTS_PER_CLIENT.get(n, 2) if i >= 0 else n, seed=i)
            results = {name: measure_server(port, n, requests, i,
                                            as_ids if name in NEEDS_IDS else list)
                       for name, port in ports.items()}
            base = results["generate.py"] = measure_command(n, requests, flags)
            for name, result in results.items():
                result["of_command"] = result["tok_s"] / base["tok_s"]
                if i >= 0:
                    results_of.setdefault(name, []).append(result)
    return {name: {key: statistics.median(r[key] for r in results) for key in results[0]}
            for name, results in results_of.items()}


def run(flags: list[str], clients=CLIENTS, rounds: int = ROUNDS) -> int:
    """Print a table -> exit status. flags: for serve.py and generate.py."""
    servers = {name: command for name, command in SERVERS.items() if is_installed(name)}
    print("| clients | | tok/s | of generate.py's | first token, ms (99 %) | between tokens, ms "
          "(pauses, 99 %) | a first token alone, ms | beside the others |\n|" + "---|" * 8)
    for n in clients:
        results = measure(n, servers, flags, rounds)
        base = results.pop("generate.py")["tok_s"]
        print(f"| {n} | generate.py | {base:.1f} | | | | | |", flush=True)
        for name, r in reversed(results.items()):
            ms = {key: f"{1000 * value:.1f}" for key, value in r.items()}
            print(f"| {n} | {name} | {r['tok_s']:.1f} | {r['of_command']:.2f} "
                  f"| {ms['first_s']} ({ms['first_99_s']}) | {ms['step_s']} ({ms['pause_99_s']}) "
                  f"| {ms['alone_s']} | {ms['beside_s']} |", flush=True)
    return 0
