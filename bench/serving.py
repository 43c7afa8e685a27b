"""How fast serve.py answers many clients, beside generate.py with the same prompts and slots.

It starts both as processes, and speaks HTTP as any client does: it imports nothing of the server.

    python benchmark.py --suite serve
"""

import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.machine import ROOT
from cli.common import english_text, log

CLIENTS = (1, 8, 32)
REQUESTS_PER_CLIENT = {1: 6, 8: 3, 32: 2}


def make_requests(n: int) -> list[dict]:
    """Prompts of about 100 to 500 tokens, and 64 to 128 new ones; always the same."""
    draw, text = random.Random(0), english_text()
    found = []
    for _ in range(n):
        begin, length = draw.randrange(len(text) - 4000), 4 * draw.randrange(100, 500)
        prompt = text[begin:begin + length]
        found.append(dict(prompt=prompt, max_new_tokens=draw.randrange(64, 129)))
    return found


def post(port: int, request: dict) -> tuple[float, list[float]]:
    """-> when it was sent, and when each token came."""
    body = dict(prompt=request["prompt"], max_tokens=request["max_new_tokens"], temperature=0,
                stream=True, ignore_eos=True)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    start, times = time.perf_counter(), []
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    return start, times


def measure_server(n_client: int, requests: list[dict], flags: list[str]) -> dict:
    """Each client sends its next request when its last one has ended."""
    command = [sys.executable, "serve.py", "--compile", "--port", "0", "--batch_size",
               str(n_client), "--max_seq_length", "1024", *flags]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            raise RuntimeError("serve.py did not start")
        port, waiting, results = int(found[1]), list(requests), []
        threading.Thread(target=server.stderr.read, daemon=True).start()
        post(port, dict(prompt="Warm up", max_new_tokens=4))

        def client():
            while waiting:
                results.append(post(port, waiting.pop(0)))

        clients = [threading.Thread(target=client) for _ in range(n_client)]
        begin = time.perf_counter()
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        seconds = time.perf_counter() - begin
    finally:
        server.terminate()
        server.wait(60)
    first = sorted(times[0] - start for start, times in results)
    gaps = sorted(b - a for _, times in results for a, b in zip(times, times[1:]))
    n_new = sum(request["max_new_tokens"] for request in requests)
    return dict(tok_s=n_new / seconds, ttft_s=statistics.median(first), ttft_p99_s=at(first, 0.99),
                gap_s=statistics.median(gaps), gap_p99_s=at(gaps, 0.99))


def at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_command(n_slot: int, requests: list[dict], flags: list[str]) -> float:
    """generate.py --prompts_file -> tok/s in all."""
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory) / "prompts.jsonl"
        prompts.write_text("\n".join(map(json.dumps, requests)))
        command = [sys.executable, "generate.py", "--compile", "--batch_size", str(n_slot),
                   "--prompts_file", prompts, "--output", Path(directory) / "out.jsonl",
                   "--temperature", "0", "--ignore_eos", "--max_seq_length", "1024", *flags]
        result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True)
    return float(re.search(r"([\d.]+) tok/s in all", result.stderr)[1])


def run(flags: list[str], clients=CLIENTS) -> int:
    """Print a table -> exit status. flags: for both commands."""
    print("| clients | tok/s | generate.py | ratio | first token, ms (99 %) "
          "| between tokens, ms (99 %) |\n|" + "---|" * 6)
    for n in clients:
        log(f"{n} clients")
        requests = make_requests(n * REQUESTS_PER_CLIENT.get(n, 2))
        measure_command(n, requests[:1], flags)    # what is compiled, is from here on
        served, command = measure_server(n, requests, flags), measure_command(n, requests, flags)
        ms = {name: 1000 * value for name, value in served.items()}
        print(f"| {n} | {served['tok_s']:.1f} | {command:.1f} | {served['tok_s'] / command:.2f} "
              f"| {ms['ttft_s']:.0f} ({ms['ttft_p99_s']:.0f}) "
              f"| {ms['gap_s']:.1f} ({ms['gap_p99_s']:.1f}) |", flush=True)
    return 0
