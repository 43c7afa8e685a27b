"""Random load on serve.py: every request must be answered, no slot leaked; prints memory.

    python scripts/dev/serve_load.py --minutes 20
"""

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the sea was calm and the lamp burned low while the keeper wrote his log".split()
SCHEMA = {"type": "object", "required": ["a"], "additionalProperties": False,
          "properties": {"a": {"type": "integer", "maximum": 9999, "minimum": 0}}}


def random_request(draw: random.Random) -> tuple[str, dict]:
    """Random lengths, parameters, streaming and grammars; some requests are invalid."""
    text = " ".join(draw.choices(WORDS, k=draw.choice([1, 5, 50, 200])))
    fields = dict(max_tokens=draw.randrange(1, 60), temperature=draw.choice([0, 0.7, 1.3]))
    for name, value in dict(stream=True, top_p=0.9, top_k=40, seed=3, n=2, stop=["."],
                            frequency_penalty=0.5, repetition_penalty=1.1).items():
        if draw.random() < 0.3:
            fields[name] = value
    if draw.random() < 0.1:
        fields[draw.choice(["nonsense", "temperature"])] = "x"
    if draw.random() < 0.5:
        return "/v1/completions", dict(fields, prompt=text, **draw.choice(
            [{}, dict(echo=True, logprobs=1), dict(regex="[a-z]{3,9}")]))
    if draw.random() < 0.2:
        fields["response_format"] = dict(type="json_schema", json_schema=dict(schema=SCHEMA))
    return "/v1/chat/completions", dict(fields, messages=[dict(role="user", content=text)])


def client(port: int, seed: int, end: float, counts: Counter) -> None:
    draw = random.Random(seed)
    while time.monotonic() < end:
        path, fields = random_request(draw)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", path, json.dumps(fields),
                               {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if draw.random() < 0.1:                # disconnect early
                counts["left"] += 1
                answer.read(20)
            else:
                body = answer.read()
                ended = not fields.get("stream") or b"[DONE]" in body or answer.status != 200
                counts[answer.status if ended else "cut short"] += 1
        except OSError as e:
            counts[type(e).__name__] += 1
        finally:
            connection.close()


def resident_mb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) // 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="duration")
    parser.add_argument("--clients", type=int, default=12, help="concurrent clients")
    args = parser.parse_args()
    command = [sys.executable, "serve.py", "--compile", "--port", "0", "--batch_size", "4",
               "--max_seq_length", "512", "--max_queue", "16"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    port, lines, counts = None, [], Counter()
    for line in server.stderr:
        if match := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
            port = int(match[1])
            break
    threading.Thread(target=lambda: lines.extend(server.stderr), daemon=True).start()
    end = time.monotonic() + 60 * args.minutes
    clients = [threading.Thread(target=client, args=(port, i, end, counts))
               for i in range(args.clients)]
    for thread in clients:
        thread.start()
    while any(thread.is_alive() for thread in clients):
        time.sleep(min(20, max(1, end - time.monotonic())))
        seconds = 60 * args.minutes - (end - time.monotonic())
        print(f"{seconds:5.0f} s  {resident_mb(server.pid)} MB  {dict(counts)}", flush=True)
    time.sleep(2)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/health")
    health = json.loads(connection.getresponse().read())
    server.send_signal(signal.SIGTERM)
    status = server.wait(60)
    unexpected = {k: n for k, n in counts.items() if k not in (200, 400, 429, "left")}
    leaked = health["running"] + health["waiting"]
    print(f"exit status {status}; still in slots: {leaked}; unexpected: {unexpected}; "
          f"log: {lines[:-1][:5]}")
    return int(bool(status or unexpected or leaked))


if __name__ == "__main__":
    sys.exit(main())
