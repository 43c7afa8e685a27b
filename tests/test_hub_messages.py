"""Whatever a hub answers, and wherever its cache cannot be written: one line with the next step, status 2."""

import json
import os
import threading
from http.server import ThreadingHTTPServer

import pytest
import test_hub
from test_hub import run

STATUS = {"private": (401, dict(X_Error_Code="RepoNotFound")), "busy": (429, {}), "expired": (401, dict(X_Error_Message="Invalid username or password.")),
          "disabled": (403, dict(X_Error_Message="Access to this resource is disabled.")), "forbidden": (403, {}), "gone": (404, dict(X_Error_Code="RepoNotFound"))}
PAGE = b"<!DOCTYPE html><html>Sign in to this network</html>"


class Hub(test_hub.Hub):
    def do_GET(self):
        name = next((part for part in self.path.split("?")[0].split("/") if part in (*STATUS, "renamed", "portal", "cut")), None)
        if name in STATUS:
            status, headers = STATUS[name]
            return self.answer(status, b'{"error": "no"}', **headers)
        if name == "renamed":
            return self.answer(307, Location=self.path.replace("org/renamed", "org/model"))
        if name == "portal":
            return self.answer(200, PAGE, Content_Type="text/html")
        if name == "cut":
            self.path = self.path.replace("org/cut", "org/model")
            if self.command == "GET" and "model.safetensors" in self.path:
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
                return self.wfile.write(b"x" * 1000)       # and the connection ends
        return super().do_GET()

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked = []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def serve(directory):
    Hub.files = {p.name: p.read_bytes() for p in directory.iterdir()}
    from tokenizers import Tokenizer, models
    Hub.files["tokenizer.json"] = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()


def line(done):
    """-> the one line that says why, of a process."""
    lines = [text for text in done.stderr.splitlines() if "error: " in text]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0].split("error: ", 1)[1]


@pytest.mark.parametrize("name, expected", [
    ("private", "the hub has no org/private, or it is private: check the name, or run `hf auth login` or set HF_TOKEN"),
    ("gone", "the hub has no org/gone, or it is private"), ("busy", "the hub failed on org/busy, try again later: "),
    ("expired", "the hub refused the token for org/expired: run `hf auth login` again"),
    ("disabled", "the hub has disabled org/disabled"), ("forbidden", "the hub refused the token for org/forbidden")])
def test_what_the_hub_answers(hub, tmp_path, name, expected):
    for script, flag in (("generate.py", "-m"), ("scripts/download.py", "--repo_id")):
        assert expected in line(run(script, flag, f"org/{name}", cwd=tmp_path, endpoint=hub, HF_TOKEN="hf_bad"))


def test_a_renamed_repository_is_followed(hub, families, tmp_path):
    serve(families("llama3")[0])
    argv = ["--prompt", "4", "--max_new_tokens", "3", "--json", "--temperature", "0", "--device", "cpu"]
    done = [run("generate.py", "-m", name, *argv, cwd=tmp_path, endpoint=hub) for name in ("org/model", "org/renamed")]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert len({str(json.loads(one.stdout)["new_ids"]) for one in done}) == 1


def test_a_network_that_answers_for_the_hub(hub, tmp_path):
    """A hotel's page in place of everything."""
    assert "the hub cannot be reached" in line(run("generate.py", "-m", "org/portal", cwd=tmp_path, endpoint=hub))


def test_a_download_that_is_cut_off(hub, families, tmp_path):
    serve(families("llama3")[0])
    message = line(run("generate.py", "-m", "org/cut", cwd=tmp_path, endpoint=hub, HF_HUB_DOWNLOAD_TIMEOUT="1"))
    assert "the download of org/cut broke off, running it again resumes it" in message


@pytest.mark.parametrize("files, expected", [
    (["m.Q4_K_M.gguf", "m.Q8_0.gguf", "README.md"], "org/model has GGUF files only: `hf download org/model m.Q4_K_M.gguf` downloads one"),
    (["README.md", "model.onnx"], "org/model has no weights that are read (.safetensors, *_model.bin), it has README.md, model.onnx"),
    (["adapter_config.json", "adapter_model.safetensors"], "a LoRA adapter, not a model: --checkpoint_path BASE_MODEL --adapter")])
def test_repositories_without_a_model(hub, tmp_path, files, expected):
    Hub.files = {name: b"{}" for name in files}
    assert expected in line(run("generate.py", "-m", "org/model", cwd=tmp_path, endpoint=hub))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(hub, families, tmp_path):
    serve(families("llama3")[0])
    (tmp_path / "home").mkdir(mode=0o500)
    assert "cannot be written" in line(run("generate.py", "-m", "org/model", cwd=tmp_path, endpoint=hub))


def test_a_cache_that_is_a_file(hub, families, tmp_path):
    serve(families("llama3")[0])
    (tmp_path / "home").write_text("")
    message = line(run("generate.py", "-m", "org/model", cwd=tmp_path, endpoint=hub))
    assert "the hub's cache cannot be written" in message and "set HF_HOME" in message and "network" not in message


def test_offline_without_a_copy(hub, tmp_path):
    message = line(run("generate.py", "-m", "org/model", cwd=tmp_path, endpoint=hub, HF_HUB_OFFLINE="1"))
    assert "org/model is not in the local cache and HF_HUB_OFFLINE is set: unset it, or give a path" in message
