"""How long a one-token request takes beside requests that are slow to prepare or to run.

    python serve.py -m MODEL --port 8000 &
    python scripts/dev/serve_block.py http://127.0.0.1:8000 [--key KEY] [--only NAME]
"""

import argparse
import http.client
import json
import random
import threading
import time
from urllib.parse import urlparse

CHAT, COMPLETIONS, SECONDS = "/v1/chat/completions", "/v1/completions", 60
TOOL = dict(type="function", function=dict(name="f", parameters=dict(type="object")))


def user(text: str) -> list[dict]:
    return [dict(role="user", content=text)]


def slow_schema(n: int, salt: int) -> dict:
    """A JSON schema whose grammar takes long to compile."""
    fields = {f"field{salt}_{i}": dict(type="string", pattern=f"^(a|b){{{i % 50 + 1},60}}c$")
              for i in range(n)}
    return dict(type="object", properties=fields, required=list(fields),
                additionalProperties=False)


def cases(limit: int) -> dict[str, list[tuple[str, bytes]]]:
    """Name -> the requests sent side by side. limit: positions of a slot."""
    def form(path, **fields):
        return path, json.dumps(dict(dict(max_tokens=1, temperature=0), **fields)).encode()

    words = "one two three " * 40_000
    fits = words[:limit * 3]                       # about 0.8 of the slot's positions
    dense = "\u4e2d" * 40_000                      # a token or more for each character
    wide = {str(i): 1.0 for i in range(4096)}
    return {
        "7 MB prompt": [(COMPLETIONS, b'{"prompt": "' + b"a " * 3_500_000 + b'"}')],
        "4 prompts of 7 MB": [(COMPLETIONS, b'{"prompt": "' + b"a " * 3_500_000 + b'"}')] * 4,
        "7 MB of escapes": [(COMPLETIONS, b'{"prompt": "' + rb"\u0061" * 1_200_000 + b'"}')],
        "40 prompts near the limit of bytes": [form(COMPLETIONS, prompt=f"{i} {dense}")
                                               for i in range(40)],
        "20 chats near the limit of bytes": [form(CHAT, messages=user(f"{i} {dense}"))
                                             for i in range(20)],
        "one prompt that fills a slot": [form(COMPLETIONS, prompt=fits)],
        "100 prompts of a third of a slot": [form(COMPLETIONS, prompt=f"{i} {fits[:limit]}")
                                             for i in range(100)],
        "50,000 token ids, 128 prompts": [form(COMPLETIONS, prompt=[[5] * 390] * 128)],
        "10^6 token ids": [form(COMPLETIONS, prompt=[5] * 1_000_000)] * 4,
        "16,000 messages": [form(CHAT, messages=user("a") * 16_000)] * 4,
        "1,500 messages": [form(CHAT, messages=user("a") * 1_500)] * 20,
        "schemas that compile slowly": [
            form(CHAT, messages=user("a"), response_format=dict(
                type="json_schema", json_schema=dict(schema=slow_schema(120, salt))))
            for salt in random.sample(range(10**9), 8)],
        "regex with many states": [
            form(COMPLETIONS, prompt="a", max_tokens=20, regex=f"{i}?(a|b)*a(a|b|c){{{40 + i}}}")
            for i in range(4)],
        "128 choices": [form(COMPLETIONS, prompt="a b c", n=64, max_tokens=4)],
        "4096 biases": [form(COMPLETIONS, prompt=f"a {i}", logit_bias=wide, max_tokens=4)
                        for i in range(20)],
    }


def post(base: str, key: str, path: str, body: bytes) -> tuple[float, int]:
    """-> seconds and status."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(urlparse(base).netloc, timeout=300)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST" if body else "GET", path, body or None, headers)
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    except OSError:
        status = 0
    connection.close()
    return time.perf_counter() - start, status


class Stream(threading.Thread):
    """A neighbour that was there before: the times at which its events come."""

    def __init__(self, base: str, key: str):
        super().__init__(daemon=True)
        self.base, self.key, self.times, self.is_over = base, key, [], False

    def run(self) -> None:
        body = dict(prompt="one two", max_tokens=600, stream=True, ignore_eos=True)
        connection = http.client.HTTPConnection(urlparse(self.base).netloc, timeout=300)
        connection.request("POST", COMPLETIONS, json.dumps(body), {
            "Content-Type": "application/json", "Authorization": f"Bearer {self.key}"})
        for line in connection.getresponse():
            if self.is_over:
                break
            if line.strip():
                self.times.append(time.perf_counter())
        connection.close()

    def stop(self) -> None:
        self.is_over = True
        self.join()


def measure(base: str, key: str, requests: list) -> dict:
    results, done = [], threading.Event()
    stream = Stream(base, key)
    stream.start()
    time.sleep(0.3)
    threads = [threading.Thread(target=lambda r=r: results.append(post(base, key, *r)))
               for r in requests]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    short, grammar, health = [], [], []

    def probe(times, path, body):
        while not done.is_set() and time.perf_counter() - start < SECONDS:
            times.append(post(base, key, path, body))
            time.sleep(0.02)

    one = json.dumps(dict(prompt="a", max_tokens=1)).encode()
    with_grammar = json.dumps(dict(messages=user("a"), max_tokens=1,
                                   response_format=dict(type="json_object"))).encode()
    probes = [threading.Thread(target=probe, args=args) for args in (
        (short, COMPLETIONS, one), (grammar, CHAT, with_grammar), (health, "/health", b""))]
    for each in probes:
        each.start()
    for thread in threads:
        thread.join(SECONDS)
    done.set()
    for each in probes:
        each.join()
    seconds = time.perf_counter() - start
    gaps = [b - a for a, b in zip(stream.times, stream.times[1:]) if b > start] or [0]
    stream.stop()
    worst = dict(short=short, grammar=grammar, health=health)
    worst = {name: round(max(times)[0], 3) for name, times in worst.items()}
    statuses = [status for _, status in results]
    return dict(worst, pause=round(max(gaps), 3), all=round(seconds, 2),
                status={s: statuses.count(s) for s in sorted(set(statuses))},
                not_200=sum(s != 200 for _, s in short + grammar))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--key", default="none")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    connection = http.client.HTTPConnection(urlparse(args.base).netloc)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {args.key}"})
    except OSError as e:
        parser.error(f"no server at {args.base}: {e}")
    limit = json.loads(connection.getresponse().read())["data"][0]["max_model_len"]
    print("seconds: the slowest one-token request, one with a grammar, /health; a stream's longest "
          "pause; all")
    alone = json.dumps(dict(prompt="a", max_tokens=60)).encode()
    print("alone", measure(args.base, args.key, [(COMPLETIONS, alone)]))
    for name, requests in cases(limit).items():
        if args.only in name:
            print(name, measure(args.base, args.key, requests), flush=True)


if __name__ == "__main__":
    main()
