"""Real clients at their defaults, each in a process of its own, against one server; and docs/clients.md is of these clients."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from test_serve import Process

sys.path.insert(0, str(ROOT / "tests/clients"))
import run as clients  # noqa: E402

SECTIONS = {"openai_python": "openai", "anthropic_python": "anthropic", "litellm_client": "litellm", "langchain_client": "langchain-openai",
            "pydantic_ai_client": "pydantic-ai-slim", "instructor_client": "instructor", "openai_agents": "openai-agents", "llm_cli": "llm"}


@pytest.fixture(scope="module")
def server():
    process = Process(*clients.FLAGS, length=clients.LENGTH)
    yield process
    assert process.stop() == 0 and not [line for line in process.lines if "Traceback" in line or "error: " in line]


@pytest.mark.slow
@pytest.mark.timeout(clients.SECONDS + 30)
@pytest.mark.parametrize("name", clients.CLIENTS)
def test_a_client_at_its_defaults(server, name):
    if reason := clients.missing(name):
        pytest.skip(reason)
    _, steps = clients.run(name, f"http://127.0.0.1:{server.port}")
    assert {"errors"} < {step["column"] for step in steps}
    failed = [step for step in steps if not step["ok"]]
    assert not failed, "\n".join(json.dumps(step) for step in failed)


@pytest.mark.slow
def test_the_documentation_s_curl_commands(server):
    text = "".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
    commands = re.findall(r"^```(?:bash|sh)?\n(curl [^`]*127\.0\.0\.1:8000[^`]*)^```", text, re.M)
    assert commands
    for command in commands:
        words = shlex.split(command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"))
        done = subprocess.run([*words, "--silent", "--fail-with-body"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stdout)


def test_every_script_has_a_place_in_the_table_and_every_client_is_one_that_is_installed():
    scripts = {path.stem for path in (ROOT / "tests/clients").glob("*.*") if path.suffix in (".py", ".mjs")} - {"run", "steps"}
    assert scripts == set(clients.CLIENTS)
    pins = dict(line.split("==") for line in re.sub(r"\[.*?\]", "", (ROOT / "requirements-clients.txt").read_text()).split())
    node = dict(re.findall(r"((?:@[\w-]+/)?[\w-]+)@(\d[\d.]+)", (ROOT / "scripts/install_clients.sh").read_text()))
    versions = {**{name: pins[package] for name, package in SECTIONS.items()}, "openai_node": node["openai"], "ai_sdk": node["ai"],
                "anthropic_node": node["@anthropic-ai/sdk"]}
    page = (ROOT / "docs/clients.md").read_text()
    for name, label in clients.CLIENTS.items():
        rows = re.findall(rf"^\| {re.escape(label)} \| ([\d.]+) \| .*$", page, re.M)
        assert set(rows) == {versions[name]}, f"{label}: python tests/clients/run.py --write"


def test_a_step_that_fails_is_counted_and_a_script_that_ends_early_is_an_error(tmp_path, monkeypatch):
    steps = [dict(api="chat", column="chat", ok=True), dict(api="chat", column="chat", ok=False), dict(api="responses", column="tools", ok=True)]
    text = clients.table({"llm_cli": (dict(version="1.0"), steps)}, "0123abc")
    assert "| llm | 1.0 | `/v1/chat/completions` | 1 of 2 | – | – | – | – |\n| llm | 1.0 | `/v1/responses` | – | – | 1 of 1 | – | – |" in text
    monkeypatch.setattr(clients, "PYTHON", clients.Path(sys.executable))
    monkeypatch.setattr(clients, "FOLDER", tmp_path)
    (tmp_path / "llm_cli.py").write_text("raise SystemExit('no server')")
    with pytest.raises(RuntimeError, match="llm_cli ended with status 1 after .*: no server"):
        clients.run("llm_cli", "http://127.0.0.1:1")
