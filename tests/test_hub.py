"""Hub names: the real client against a server on this machine that answers as the hub does."""

import hashlib
import http.server
import json
import os
import subprocess
import threading

import pytest
from commands import PYTHON
from conftest import ROOT

SHA = "0" * 40
ERRORS = {"gated": (403, "GatedRepo"), "missing": (404, "RepoNotFound"), "broken": (500, None),
          "token": (401, None)}


class Hub(http.server.BaseHTTPRequestHandler):
    files: dict = {}
    asked: list = []

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        for name, (status, code) in ERRORS.items():
            if f"org/{name}" in path:
                return self.answer(status, b'{"error": "Invalid credentials"}', **({"X_Error_Code": code} if code else {}))
        if path.startswith("/api/models/org/model/tree"):
            tree = [dict(type="file", path=n, size=len(d), oid=hashlib.sha1(d).hexdigest()) for n, d in self.files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if path.startswith("/api/models/org/model"):
            siblings = [dict(rfilename=n) for n in self.files]
            return self.answer(200, json.dumps(dict(id="org/model", sha=SHA, siblings=siblings)).encode())
        name = path.rpartition("/resolve/")[2].partition("/")[2]
        if name not in self.files:
            return self.answer(404, X_Error_Code="EntryNotFound")
        if self.command == "GET":
            self.asked.append(name)
        self.answer(200, self.files[name], ETag=f'"{hashlib.sha1(self.files[name]).hexdigest()}"', X_Repo_Commit=SHA)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked = []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(script, *argv, cwd, endpoint, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_OFFLINE"))}
    environment = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(cwd / "home"), **environment}
    return subprocess.run([*PYTHON, str(ROOT / script), *argv], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=120)


def test_download_convert_generate(hub, families, tmp_path):
    """The whole way of a hub name, and only the files that are needed."""
    directory, _ = families("llama3")
    Hub.files = {p.name: p.read_bytes() for p in directory.iterdir()}
    from tokenizers import Tokenizer, models
    Hub.files["tokenizer.json"] = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    Hub.files.update({"README.md": b"x", "model.gguf": b"x", "pytorch_model.bin": b"x",
                      "original/consolidated.00.pth": b"x", "onnx/model.onnx": b"x"})
    done = run("scripts/download.py", "--repo_id", "org/model", cwd=tmp_path, endpoint=hub)
    assert done.returncode == 0, done.stderr
    assert set(Hub.asked) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    done = run("scripts/convert_hf_checkpoint.py", "--checkpoint_dir", "checkpoints/org/model",
               cwd=tmp_path, endpoint=hub)
    assert done.stdout.strip() == "checkpoints/org/model/model.pth", done.stderr
    argv = ["--prompt", "4", "--max_new_tokens", "3", "--json", "--temperature", "0", "--device", "cpu"]
    local = run("generate.py", "-m", "checkpoints/org/model/model.pth", *argv, cwd=tmp_path, endpoint=hub)
    Hub.asked.clear()
    named = run("generate.py", "-m", "org/model", *argv, cwd=tmp_path, endpoint=hub)
    assert json.loads(local.stdout)["new_ids"] == json.loads(named.stdout)["new_ids"]
    assert "model.safetensors" in Hub.asked
    Hub.asked.clear()                                      # from the cache: offline, and unreachable
    for endpoint, more in ((hub, {"HF_HUB_OFFLINE": "1"}), ("http://127.0.0.1:9", {})):
        again = run("generate.py", "-m", "org/model", *argv, cwd=tmp_path, endpoint=endpoint, **more)
        assert json.loads(again.stdout)["new_ids"] == json.loads(named.stdout)["new_ids"], again.stderr
    assert Hub.asked == []


@pytest.mark.parametrize("script, argument", [("scripts/download.py", "--repo_id"), ("generate.py", "-m")])
def test_failures_say_the_remedy(hub, tmp_path, script, argument):
    for name, remedy in (("gated", "org/gated is gated: accept its licence"),
                         ("missing", "the hub has no org/missing, or it is private"),
                         ("token", "the hub refused the token for org/token"),
                         ("broken", "the hub failed on org/broken, try again later")):
        done = run(script, argument, f"org/{name}", cwd=tmp_path, endpoint=hub, HF_TOKEN="hf_bad")
        lines = [line for line in done.stderr.splitlines() if "error: " in line]
        assert done.returncode == 2 and remedy in lines[0] and "Traceback" not in done.stderr, done.stderr
    done = run(script, argument, "org/model", cwd=tmp_path, endpoint="http://127.0.0.1:9")
    assert done.returncode == 2 and "the hub cannot be reached" in done.stderr and "Traceback" not in done.stderr


def test_full_disk(monkeypatch):
    import huggingface_hub

    from gpt_faster.formats.hub import download

    def full(*_, **__):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(OSError, match="the disk is full while downloading org/model: free some space"):
        download("org/model")


def test_bad_names(tmp_path):
    done = run("scripts/download.py", "--repo_id", "a/b/c", cwd=tmp_path, endpoint="http://127.0.0.1:9")
    assert done.returncode == 2 and "'a/b/c' is not a hub name: expected org/name" in done.stderr
