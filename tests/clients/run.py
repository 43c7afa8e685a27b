"""Runs the clients' scripts against a server, and writes docs/clients.md from what they print.

    python tests/clients/run.py                        # starts serve.py; a line for each step
    python tests/clients/run.py --write                # also the table in docs/clients.md
    python tests/clients/run.py --url http://127.0.0.1:8000 openai_python llm_cli

It knows neither the clients nor the server: a script prints one JSON line for each of its steps (steps.py, steps.mjs).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PYTHON = ROOT / ".venv-clients/bin/python"
NODE = ROOT / ".venv-clients/node"
PAGE = ROOT / "docs/clients.md"
MODEL = ROOT / "checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
# A model of 135M parameters: greedy, so that its answers end; tools in the system prompt, since its template has none.
FLAGS = ["--temperature", "0", "--tool_format", "hermes"]
LENGTH = 2048
CLIENTS = {"openai_python": "OpenAI, Python", "openai_node": "OpenAI, node", "ai_sdk": "AI SDK", "anthropic_python": "Anthropic, Python",
           "anthropic_node": "Anthropic, node", "litellm_client": "LiteLLM", "langchain_client": "LangChain",
           "pydantic_ai_client": "Pydantic AI", "instructor_client": "Instructor", "openai_agents": "OpenAI Agents SDK", "llm_cli": "llm"}
COLUMNS = ["chat", "stream", "tools", "structured", "errors"]
SECONDS = 600                                      # for a script; on two idle cores it takes less than a minute


def script(name: str) -> Path:
    return next(path for path in (FOLDER / f"{name}.py", FOLDER / f"{name}.mjs") if path.exists())


def missing(name: str) -> str | None:
    """Why a client cannot run here. scripts/install_clients.sh writes `installed` when it has ended well."""
    if script(name).suffix == ".mjs":
        has_all = shutil.which("node") and (NODE / "installed").exists()
    else:
        has_all = (PYTHON.parent.parent / "installed").exists()
    return None if has_all else f"no {'node ' if script(name).suffix == '.mjs' else ''}clients: bash scripts/install_clients.sh"


def command(name: str, url: str) -> list:
    if script(name).suffix == ".py":
        return [PYTHON, script(name), url]
    for path in FOLDER.glob("*.mjs"):              # modules are looked up beside the script
        shutil.copy(path, NODE)
    return ["node", NODE / f"{name}.mjs", url]


def run(name: str, url: str, show=lambda step: None) -> tuple[dict, list[dict]]:
    """-> the client and its version, the steps with what came of them. show: called with each step as it ends."""
    without = {key: value for key, value in os.environ.items() if not re.match("OPENAI_|ANTHROPIC_|LITELLM_|LLM_|.*_PROXY$", key, re.I)}
    environment = dict(without, PATH=f"{PYTHON.parent}:{os.environ['PATH']}", PYTHONDONTWRITEBYTECODE="1")
    lines = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command(name, url), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=FOLDER)
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                lines.append(json.loads(line))
                show(lines[-1])
        status = process.wait()
        timer.cancel()
        errors.seek(0)
        if status or not lines or "version" not in lines[0]:
            raise RuntimeError(f"{name} ended with status {status} after {lines[-1:]}: {errors.read()[-1500:]}")
    return lines[0], lines[1:]


# ---- The table ------------------------------------------------------------------------------------

def row(name: str, steps: list[dict], version: str, api: str) -> str:
    cells = [CLIENTS[name], version, f"`/v1/{'chat/completions' if api == 'chat' else api}`"]
    for column in COLUMNS:
        passed = [step["ok"] for step in steps if (step["api"], step["column"]) == (api, column)]
        cells.append(f"{sum(passed)} of {len(passed)}" if passed else "–")
    return f"| {' | '.join(cells)} |"


def table(results: dict, commit: str) -> str:
    lines = [f"Commit {commit}; steps that passed:", "", f"| client | version | API | {' | '.join(COLUMNS)} |", "|---" * (3 + len(COLUMNS)) + "|"]
    for name, (client, steps) in results.items():
        for api in dict.fromkeys(step["api"] for step in steps):
            lines.append(row(name, steps, client["version"], api))
    return "\n".join(lines)


def write(results: dict) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    before, marker, rest = PAGE.read_text().partition("<!-- clients -->\n")
    after = rest[rest.index("<!-- end -->"):]
    PAGE.write_text(f"{before}{marker}{table(results, commit)}\n{after}")


def start() -> tuple[subprocess.Popen, str]:
    """serve.py on a free port -> its process and URL."""
    command = [sys.executable, "serve.py", "-m", MODEL, "--device", "cpu", "--dtype", "float32", "--compile", "--port", "0", "--batch_size",
               "4", "--max_seq_length", str(LENGTH), *FLAGS]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"on (http://127\.0\.0\.1:\d+)", line):
            return server, found[1]
    raise SystemExit("serve.py did not start")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--url", help="a running server; default: start serve.py")
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md; of all clients")
    options = parser.parse_args()
    names = options.clients or list(CLIENTS)
    if unknown := set(names) - set(CLIENTS):
        parser.error(f"unknown clients {', '.join(sorted(unknown))}: expected {', '.join(CLIENTS)}")
    if options.write and options.clients:
        parser.error("--write runs all clients: name none")
    if reasons := {missing(name) for name in names} - {None}:
        parser.error("; ".join(reasons))
    server, url = (None, options.url) if options.url else start()
    results = {}
    try:
        for name in names:
            results[name] = run(name, url, lambda step: print(json.dumps(step), flush=True))
    finally:
        if server:
            server.terminate()
    if options.write:
        write(results)
    return any(not step["ok"] for _, steps in results.values() for step in steps)


if __name__ == "__main__":
    sys.exit(main())
