"""Faults: killed at any moment, a full disk, no home, two that write one file, a lost rank. What is half-written is never
taken for whole, and the same command goes on."""

import fcntl
import hashlib
import http.server
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import test_hub
import torch
import transformers as hf
from commands import PYTHON
from conftest import ROOT
from faults import (
    N_KILLS,
    READ_ONLY,
    Child,
    build,
    command,
    fill_and_go_on,
    keep,
    limited,
    moments,
    mounted,
    with_a_clock_that_jumps,
    without_a_home,
)
from tokenizers import Tokenizer, models

from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels.cpu import native
from gpt_faster.storage import weight_cache

CONVERT, QUANTIZE = ("scripts/convert_hf_checkpoint.py", "--checkpoint_dir"), ("quantize.py", "--checkpoint_path")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """10 M parameters: long enough to be killed in the middle."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4, vocab_size=8000,
        max_position_embeddings=256)).save_pretrained(folder)
    words = models.WordLevel({"a": 0}, unk_token="a")
    (folder / "tokenizer.json").write_text(Tokenizer(words).to_str())
    return folder


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def report(what, outcomes, left=()):
    """For the table in docs/robustness.md: pytest -s shows it."""
    print(f"\n{what}: {dict(outcomes)}; left: {dict(Counter(left))}")


# ---- Killed at any moment ------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("script, flag, more", [(*CONVERT, []), (*QUANTIZE, ["--mode", "int8"]), (*QUANTIZE, ["--mode", "int4"])])
@pytest.mark.parametrize("before", ["nothing there", "an older one there"])
def test_killed_while_writing_a_checkpoint(checkpoint, tmp_path, script, flag, more, before):
    """The file is the old one or the new one, all of it; the next run makes it, and leaves nothing else."""
    output = tmp_path / "out" / "model.pth"
    call = command, script, flag, checkpoint, "--output", output, *more
    for _ in range(2):                                     # the second one is as quick as those to come
        whole = Child(tmp_path, *call)
        assert whole.wait() == 0, whole.said()
    new, outcomes, left = digest(output), Counter(), []
    old = "older" in before and b"as it was"
    for seconds, number in moments(whole.seconds):
        output.unlink(missing_ok=True)
        if old:
            output.write_bytes(old)
        killed = Child(tmp_path, *call).kill_after(seconds, number) < 0
        there = output.exists() and digest(output) == new
        assert there or (output.read_bytes() == old if old else not output.exists())
        assert there or killed
        outcomes["whole" if there else "as before"] += 1
        left += [p.name for p in output.parent.iterdir() if p != output]
    assert Child(tmp_path, *call).wait() == 0 and digest(output) == new
    assert list(output.parent.iterdir()) == [output]
    report(f"{script} {more}, {before}", outcomes, left)


@pytest.mark.slow
def test_two_write_one_checkpoint(checkpoint, tmp_path):
    """One does; the other says so, or comes after it. The file is whole whenever it is there."""
    output = tmp_path / "out" / "model.pth"
    call = command, *CONVERT, checkpoint, "--output", output
    assert Child(tmp_path, *call).wait() == 0
    new, outcomes = digest(output), Counter()
    for _ in range(max(3, N_KILLS // 3)):
        output.unlink()
        writers = [Child(tmp_path, *call) for _ in range(3)]
        while any(w.process.exitcode is None for w in writers):
            assert not output.exists() or digest(output) == new
        for writer in writers:
            if writer.wait():
                assert "model.pth: another process is writing it" in writer.error()
            outcomes[writer.process.exitcode] += 1
        assert digest(output) == new and list(output.parent.iterdir()) == [output]
    assert outcomes[0] and outcomes[2], outcomes
    report("two convert at once, exit statuses", outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("n_slots", [1, 4])
def test_killed_while_writing_results(checkpoint, tmp_path, n_slots):
    """The same command until it is done: every result once, the same as without interruption."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text("".join(json.dumps(dict(id=i, prompt=str(5 + i % 7))) + "\n" for i in range(24)))
    call = (command, "generate.py", "-m", checkpoint, "--prompts_file", prompts, "--batch_size", n_slots, "--max_new_tokens",
            24, "--temperature", 0, "--ignore_eos", "--dtype", "float32", "--output")
    for name in ("first.jsonl", "whole.jsonl"):            # the second one is as quick as those to come
        whole = Child(tmp_path, *call, tmp_path / name)
        assert whole.wait() == 0, whole.said()

    def results(path):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({r["id"] for r in found}) == len(found)
        return {r["id"]: r["new_ids"] for r in found}
    expected, outcomes, cut = results(tmp_path / "whole.jsonl"), Counter(), []
    for i, (seconds, number) in enumerate(moments(whole.seconds)):
        if i % 4 == 0:                                     # else it goes on from where it was
            output.unlink(missing_ok=True)
        child = Child(tmp_path, *call, output)
        outcomes["killed" if child.kill_after(seconds, number) < 0 else "done"] += 1
        if output.exists():
            lines = output.read_bytes().split(b"\n")
            cut += ["cut line"] if lines[-1] else []
            assert all(expected[json.loads(line)["id"]] == json.loads(line)["new_ids"] for line in lines[:-1])
    assert Child(tmp_path, *call, output).wait() == 0 and results(output) == expected
    report(f"--output, {n_slots} slots", outcomes, cut)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:5]) + b'{"id": 23, "slot": 0, "pro')
    assert Child(tmp_path, *call, output).wait() == 0 and results(output) == expected


@pytest.mark.slow
def test_two_write_the_same_results(checkpoint, tmp_path):
    call = (command, "generate.py", "-m", checkpoint, "--prompt", 5, "--prompt", 7, "--max_new_tokens", 100, "--output",
            tmp_path / "out.jsonl")
    writers = [Child(tmp_path, *call) for _ in range(3)]
    done = [w for w in writers if w.wait() == 0]
    refused = [w for w in writers if w not in done]
    assert done and all("out.jsonl: another process is writing it" in w.error() and w.wait() == 2 for w in refused)
    ids = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(ids) == [0, 1]


# ---- What is kept between runs -------------------------------------------------------------------

@pytest.mark.slow
def test_killed_while_keeping_weights(checkpoint, tmp_path, monkeypatch):
    """A set is there whole or not at all; what a killed process left is gone after the next."""
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "cache"))
    env, home = dict(GPT_FASTER_CACHE=str(tmp_path / "cache")), tmp_path / "cache" / "weights"
    for _ in range(2):
        shutil.rmtree(home, ignore_errors=True)
        whole = Child(tmp_path, keep, checkpoint, env=env)
        assert whole.wait() == 0, whole.said()
    expected, outcomes, left = dict(load_model(read_checkpoint(checkpoint), torch.bfloat16, "cpu").named_parameters()), Counter(), []
    [folder] = home.iterdir()
    for seconds, number in moments(whole.seconds):
        shutil.rmtree(folder, ignore_errors=True)
        Child(tmp_path, keep, checkpoint, env=env).kill_after(seconds, number)
        kept = weight_cache.load(folder.name)
        outcomes["whole" if kept else "nothing"] += 1
        assert kept is None or all(torch.equal(kept[name], t) for name, t in expected.items())
        left += [re.sub("_?partial.*", "partial", p.name) for p in home.iterdir() if p != folder]
    shutil.rmtree(folder, ignore_errors=True)
    assert Child(tmp_path, keep, checkpoint, env=env).wait() == 0 and list(home.iterdir()) == [folder]
    report("kept weights", outcomes, left)
    shutil.rmtree(folder)
    several = [Child(tmp_path, keep, checkpoint, env=env) for _ in range(4)]
    assert [child.wait() for child in several] == [0] * 4 and list(home.iterdir()) == [folder]
    assert all(torch.equal(weight_cache.load(folder.name)[name], t) for name, t in expected.items())


@pytest.fixture
def slow_compiler(tmp_path):
    """One that has the library already, and takes a second to write it."""
    script = tmp_path / "slow-g++"
    library = native.library_path()
    assert native.is_available()
    script.write_text(f"""#!/bin/sh
case "$*" in *-fsyntax-only*) exit 0;; esac
while [ "$1" != -o ]; do shift; done
: > "$2"
for i in 0 1 2 3 4 5 6 7 8 9; do
  dd if='{library}' bs=16k skip=$i count=1 2>/dev/null >> "$2" || exit 1
  sleep 0.1
done
tail -c +{10 * 16384 + 1} '{library}' | head -c -{len(native.END_MARK)} >> "$2"
""")
    script.chmod(0o755)
    return dict(CXX=str(script), GPT_FASTER_CACHE=str(tmp_path / "cache"))


def end_compilers(name):
    """Kill those of this name as they are found, with their shells."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            if name.encode() in words and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ValueError):
            pass


@pytest.mark.slow
def test_killed_while_compiling(tmp_path, slow_compiler):
    """Whether the process or its compiler is killed: the next one has a library that works."""
    home, outcomes, left = tmp_path / "cache", Counter(), []
    for seconds, number in moments(1.0):
        shutil.rmtree(home, ignore_errors=True)
        child = Child(tmp_path, build, env=slow_compiler)
        time.sleep(seconds)
        end_compilers(slow_compiler["CXX"])
        child.kill_after(seconds, number)
        there = list(home.glob("cpu_ops-*.so"))
        outcomes["library" if there else "nothing"] += 1
        assert all(digest(path) == digest(native.library_path()) for path in there)
        left += ["partial"] * len(list(home.glob("*.partial")))
        again = Child(tmp_path, build, env=slow_compiler)
        assert again.wait() == 0, again.said()
    report("compiling", outcomes, left)


@pytest.mark.slow
def test_several_compile_at_once_and_one_is_killed(tmp_path, slow_compiler):
    """A compiler goes on without the process that started it, and is no other's hindrance."""
    for n in range(3):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        children = [Child(tmp_path, build, env=slow_compiler) for _ in range(4)]
        assert children[0].kill_after(0.2 + 0.1 * n) == -signal.SIGKILL
        assert [child.wait() for child in children[1:]] == [0] * 3
        end = time.monotonic() + 10
        while list((tmp_path / "cache").glob("*.partial")) and time.monotonic() < end:
            time.sleep(0.1)
        [library] = (tmp_path / "cache").iterdir()
        assert digest(library) == digest(native.library_path())


@pytest.mark.slow
def test_a_damaged_library_is_built_again(tmp_path, slow_compiler):
    """As a crash of the machine may leave it: not loaded, which would end the process."""
    assert Child(tmp_path, build, env=slow_compiler).wait() == 0
    [library] = (tmp_path / "cache").iterdir()
    for content in (b"", library.read_bytes()[:1000]):
        library.write_bytes(content)
        child = Child(tmp_path, build, env=slow_compiler)
        assert child.wait() == 0 and digest(library) == digest(native.library_path()), child.said()


# ---- Downloads -----------------------------------------------------------------------------------

class SlowHub(test_hub.Hub):
    """As the hub: in pieces, and from where a download was interrupted."""

    n_bytes = 0

    def answer(self, status, body=b"", **headers):
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(start[1]) if start and status == 200 else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.send_response(206 if start else status)
        for name, value in {"Content-Length": str(len(body) - start), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(start, len(body), 1 << 19):
            try:
                self.wfile.write(body[at:at + (1 << 19)])
            except OSError:
                return
            SlowHub.n_bytes += len(body[at:at + (1 << 19)])
            time.sleep(0.01)


@pytest.fixture
def hub(checkpoint):
    test_hub.Hub.files = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def shell(folder, endpoint, *argv):
    """A process of its own, since huggingface_hub reads the environment as it is imported."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = dict(clean, HF_ENDPOINT=endpoint, HF_HOME=str(folder / "home"), HF_HUB_DISABLE_PROGRESS_BARS="1")
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=folder, env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


DOWNLOAD = (ROOT / "scripts/download.py", "--repo_id", "org/model")


@pytest.mark.slow
def test_killed_while_downloading(hub, tmp_path):
    """Each file is there whole or not at all, the directory is refused until all are, and the same command goes on."""
    folder, files, outcomes = tmp_path / "checkpoints/org/model", test_hub.Hub.files, Counter()
    before = SlowHub.n_bytes
    for i, (seconds, number) in enumerate(moments(1.2, max(5, N_KILLS // 2))):
        if i % 3 == 0:                                     # else it goes on from where it was
            shutil.rmtree(folder, ignore_errors=True)
        n = SlowHub.n_bytes
        process = shell(tmp_path, hub, *DOWNLOAD)
        while SlowHub.n_bytes == n and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(number)
        process.communicate()
        if not folder.exists():
            outcomes["nothing"] += 1
            continue
        there = [p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]
        assert all(p.read_bytes() == files[p.name] for p in there)
        finished = not (folder / ".download_is_not_finished").exists()
        outcomes["all files" if finished else "some files" if there else "no file yet"] += 1
        assert not finished or {p.name for p in there} == set(files)
        if not finished:
            with pytest.raises(ValueError, match="incomplete download: run .*download.py --repo_id org/model. again"):
                read_checkpoint(folder)
    process = shell(tmp_path, hub, *DOWNLOAD)
    assert process.communicate() and process.returncode == 0
    read_checkpoint(folder)
    report(f"download of {sum(map(len, files.values())) >> 20} MB, sent in all {(SlowHub.n_bytes - before) >> 20}", outcomes)


@pytest.mark.slow
def test_two_download_at_once(hub, tmp_path):
    processes = [shell(tmp_path, hub, *DOWNLOAD) for _ in range(2)]
    processes += [shell(tmp_path, hub, ROOT / "generate.py", "-m", "org/model", "--prompt", "4", "--max_new_tokens", "2")
                  for _ in range(2)]
    said = [p.communicate()[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * 4, said
    folder = tmp_path / "checkpoints/org/model"
    assert all((folder / name).read_bytes() == content for name, content in test_hub.Hub.files.items())


@pytest.mark.slow
def test_a_hub_name_killed_while_it_downloads(hub, tmp_path):
    """By name: what is in the hub's cache is not taken for the model before it is all there, offline neither."""
    argv = [ROOT / "generate.py", "-m", "org/model", "--prompt", "4", "--max_new_tokens", "2"]
    outcomes = Counter()
    for seconds in (0.1, 0.2, 0.3):
        n = SlowHub.n_bytes
        process = shell(tmp_path, hub, *argv)
        while SlowHub.n_bytes < n + (1 << 20) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
        process.communicate()
        offline = shell(tmp_path, "http://127.0.0.1:9", *argv)
        error = offline.communicate()[1]
        assert offline.returncode in (0, 2) and "Traceback" not in error, error
        outcomes["refused offline" if offline.returncode else "whole"] += 1
    assert outcomes["refused offline"]
    again = shell(tmp_path, hub, *argv)
    assert again.communicate() and again.returncode == 0
    report("killed while downloading by name", outcomes)


# ---- A full disk ---------------------------------------------------------------------------------

GENERATE = ("generate.py", "-m")
SHORT = ("--temperature", 0, "--ignore_eos", "--dtype", "float32", "--device", "cpu")


def results_of(checkpoint, output):
    return [command, *GENERATE, checkpoint, *SHORT, "--prompts_file", checkpoint / "prompts.txt", "--max_new_tokens", 60,
            "--output", output]


@pytest.fixture
def prompts(checkpoint):
    (checkpoint / "prompts.txt").write_text("".join(f"{3 + i % 9}\n" for i in range(20)))


@pytest.mark.parametrize("mb", [0, 1, 9])
@pytest.mark.parametrize("script, flag, more", [(*CONVERT, ["--dtype", "bfloat16"]), (*QUANTIZE, ["--mode", "int8", "--quantize_head", "none"])])
def test_no_room_for_a_checkpoint(checkpoint, tmp_path, script, flag, more, mb):
    """A limit of the process, which says so as a full disk does: an error in one line, and nothing left."""
    output = tmp_path / "out" / "model.pth"
    call = command, script, flag, checkpoint, "--output", output, *more
    child = Child(tmp_path, limited, resource.RLIMIT_FSIZE, (mb << 20) + 4096, *call)
    assert child.wait() == 2 and "model.pth cannot be written: File too large: free some space" in child.error()
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize("size", ["8k", "2m", "12m"])
def test_full_disk_for_a_checkpoint(checkpoint, tmp_path, size):
    folder = tmp_path / "disk"
    folder.mkdir()
    call = command, *CONVERT, checkpoint, "--output", folder / "model.pth"
    child = Child(tmp_path, mounted, folder, f"size={size}", 0, fill_and_go_on, folder, *call)
    if child.wait() == 77:
        pytest.skip("mounting is not allowed here")
    full, done = (json.loads(line[7:]) for line in child.said().splitlines() if line.startswith("ended: "))
    assert full == [2, {}] and done[0] == 0 and set(done[1]) == {"model.pth"}, child.said()
    assert "model.pth cannot be written: No space left on device: free some space" in child.error()


@pytest.mark.slow
def test_full_disk_for_results(checkpoint, prompts, tmp_path):
    """What is there stays, a line that was cut short goes, the same command goes on."""
    folder = tmp_path / "disk"
    folder.mkdir()
    child = Child(tmp_path, mounted, folder, "size=8k", 0, fill_and_go_on, folder, *results_of(checkpoint, folder / "out.jsonl"))
    if child.wait() == 77:
        pytest.skip("mounting is not allowed here")
    full, done = (json.loads(line[7:]) for line in child.said().splitlines() if line.startswith("ended: "))
    assert full[0] == 2 and 0 < full[1]["out.jsonl"] <= 8192 and done[0] == 0
    assert "out.jsonl cannot be written: No space left on device: free some space" in child.error()
    went_on = re.search(r"out.jsonl has (\d+) results already: (\d+) prompts to go", child.said())
    assert int(went_on[1]) > 0 and int(went_on[1]) + int(went_on[2]) == 20
    whole = Child(tmp_path, *results_of(checkpoint, tmp_path / "whole.jsonl"))
    assert whole.wait() == 0
    assert done[1]["out.jsonl"] == pytest.approx((tmp_path / "whole.jsonl").stat().st_size, abs=500)      # but the times in it


@pytest.mark.slow
@pytest.mark.parametrize("kb", [1, 10])
def test_no_room_for_results(checkpoint, prompts, tmp_path, kb):
    call = results_of(checkpoint, tmp_path / "out.jsonl")
    child = Child(tmp_path, limited, resource.RLIMIT_FSIZE, kb << 10, *call)
    assert child.wait() == 2 and "out.jsonl cannot be written" in child.error()
    again = Child(tmp_path, *call)
    assert again.wait() == 0
    assert sorted(json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()) == list(range(20))


@pytest.mark.parametrize("mb", [0, 1, 6])
def test_no_room_for_what_is_kept(checkpoint, tmp_path, mb):
    """Neither weights nor operations are kept, nothing is left of them, and the run does what it was asked to."""
    env = dict(GPT_FASTER_CACHE=str(tmp_path / "cache"))
    size = (mb << 20) + 4096
    assert Child(tmp_path, limited, resource.RLIMIT_FSIZE, size, keep, checkpoint, env=env).wait() == 0
    left = {p.relative_to(tmp_path / "cache").parts[0] for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    assert left <= {"contents.json", "sources.json"}           # digests, not weights
    folder = tmp_path / "disk"
    folder.mkdir()
    child = Child(tmp_path, mounted, folder, f"size={size}", 0, fill_and_go_on, folder, keep, checkpoint,
                  env=dict(GPT_FASTER_CACHE=str(folder)))
    if child.wait() == 77:
        pytest.skip("mounting is not allowed here")
    full, done = (json.loads(line[7:]) for line in child.said().splitlines() if line.startswith("ended: "))
    assert full[0] == done[0] == 0 and set(full[1]) <= {"contents.json", "sources.json"}
    assert {name.rpartition("/")[2] for name in done[1]} == {"contents.json", "sources.json", "index.json", "data"}


@pytest.mark.slow
def test_full_disk_for_the_compiler(checkpoint, tmp_path):
    """It goes on uncompiled, with a line, and compiles when there is room."""
    folder, tokens = tmp_path / "disk", []
    folder.mkdir()
    call = command, *GENERATE, checkpoint, *SHORT, "--prompt", 6, "--max_new_tokens", 8, "--compile", "--json"
    child = Child(tmp_path, mounted, folder, "size=8k", 0, fill_and_go_on, folder, *call,
                  env=dict(GPT_FASTER_CACHE=str(folder), TMPDIR=str(folder)))
    if child.wait() == 77:
        pytest.skip("mounting is not allowed here")
    lines = child.said().splitlines()
    full, done = (json.loads(line[7:]) for line in lines if line.startswith("ended: "))
    assert full[0] == 0 and done[0] == 0, child.said()
    assert "this runs uncompiled" in child.said() and not any("cpu_ops" in name for name in full[1])
    tokens = [json.loads(line)["new_ids"] for line in lines if line.startswith("{")]
    assert len(tokens) == 2 and tokens[0] == tokens[1]


# ---- No home, no terminal, no reader, no memory --------------------------------------------------

def one_text(checkpoint, *more):
    return [command, *GENERATE, checkpoint, *SHORT, "--prompt", 6, "--max_new_tokens", 8, "--json", *more]


def ids_said(child):
    return [json.loads(line)["new_ids"] for line in child.said().splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_no_home_or_one_that_is_read_only(checkpoint, tmp_path):
    """Nothing is kept, and the text is the same."""
    expected = Child(tmp_path, *one_text(checkpoint))
    assert expected.wait() == 0, expected.said()
    for home in ("/dev/null/home", "/proc/home", ""):
        child = Child(tmp_path, *one_text(checkpoint), env=dict(HOME=home, GPT_FASTER_CACHE="", XDG_CACHE_HOME=""))
        assert child.wait() == 0 and ids_said(child) == ids_said(expected), child.said()
    child = Child(tmp_path, without_a_home, *one_text(checkpoint))
    assert child.wait() == 0 and ids_said(child) == ids_said(expected), child.said()
    home = tmp_path / "home"
    home.mkdir()
    child = Child(tmp_path, mounted, home, "size=1m", READ_ONLY, *one_text(checkpoint), env=dict(
        HOME=str(home), GPT_FASTER_CACHE=""))
    assert child.wait() == 77 or ids_said(child) == ids_said(expected), child.said()
    assert not (tmp_path / "~").exists() and not list(home.iterdir())


def test_a_clock_that_jumps(checkpoint, tmp_path):
    """Durations are of a clock that does not: speeds stay what they are, and nothing kept is taken for old."""
    env = dict(GPT_FASTER_CACHE=str(tmp_path / "cache"))
    for _ in range(2):
        child = Child(tmp_path, with_a_clock_that_jumps, keep, checkpoint, env=env)
        assert child.wait() == 0 and len(list((tmp_path / "cache/weights").iterdir())) == 1, child.said()
    child = Child(tmp_path, with_a_clock_that_jumps, *one_text(checkpoint))
    assert child.wait() == 0
    [figures] = [json.loads(line) for line in child.said().splitlines() if line.startswith("{")]
    assert 0 < figures["ttft_s"] < 60 and 0 < figures["load_s"] < 60 and figures["decode_tok_s"] > 0


def test_wall_time_is_read_only_where_it_is_meant():
    """When an answer was made, as OpenAI's API says it; how old a file is."""
    wall = re.compile(r"\btime\.time\(|datetime\.now\(|from time import .*\btime\b")
    files = [*ROOT.glob("*.py"), *ROOT.glob("gpt_faster/**/*.py"), *ROOT.glob("scripts/**/*.py")]
    found = {str(p.relative_to(ROOT)) for p in files if wall.search(p.read_text())}
    assert found <= {"gpt_faster/storage/disk.py", "gpt_faster/server/answers.py", "gpt_faster/server/model_card.py", "gpt_faster/server/responses.py",
                     "gpt_faster/text/chat_template.py"}


@pytest.mark.slow
def test_the_output_is_closed_or_full(checkpoint):
    """No traceback, whoever reads; status 141 where the reader left, 2 where the disk is full."""
    argv = [sys.executable, ROOT / "generate.py", "-m", checkpoint, *SHORT, "--prompt", "6", "--max_new_tokens", "200"]
    text = " ".join(f"'{a}'" for a in map(str, argv))
    for tail, status in ((">&-", 0), ("| true; exit ${PIPESTATUS[0]}", 141), ("> /dev/full", 2), ("2>&-", 0)):
        done = subprocess.run(["bash", "-c", f"{text} {tail}"], capture_output=True, text=True)
        assert done.returncode == status and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, (
            tail, done.returncode, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_the_terminal_is_gone(checkpoint, ignored):
    """A conversation ends with its terminal, also where SIGHUP is ignored: no loop that reads nothing."""
    def start():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-u", str(ROOT / "generate.py"), "-m", str(checkpoint), *map(str, SHORT), "--interactive"]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=checkpoint,
                               preexec_fn=start)
    os.close(theirs)
    said = b""
    while not said.endswith(b"> "):
        assert select.select([ours], [], [], 60)[0], said
        said += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(20) == -signal.SIGHUP or ignored


@pytest.mark.slow
def test_memory_is_refused_in_the_middle(checkpoint, tmp_path):
    """Wherever an allocation fails: one line that says so, or the text, whole."""
    expected = Child(tmp_path, *one_text(checkpoint))
    assert expected.wait() == 0
    outcomes = Counter()
    for mb in (0, 2, 8, 20, 32, 44, 56, 68, 80, 92, 104, 128, 256):
        for more in ([], ["--compile"]):
            child = Child(tmp_path, limited, resource.RLIMIT_AS, mb << 20, *one_text(checkpoint, *more))
            if status := child.wait():
                assert status == 2 and ": error: out of memory: " in child.error(), child.said()
            else:
                assert ids_said(child) == ids_said(expected), child.said()
            outcomes["done" if status == 0 else "refused"] += 1
    assert outcomes["done"] and outcomes["refused"]
    report("memory refused", outcomes)


# ---- Ranks ---------------------------------------------------------------------------------------

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "slow": None}


def two_ranks(checkpoint, folder, who, moment, fault, *more, wait="4"):
    """-> what ranks 0 and 1 say and how they end; `who` meets its fault at the moment."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, OMP_NUM_THREADS="1", GPT_FASTER_TIMEOUT=wait, WORLD_SIZE="2", MASTER_ADDR="localhost",
               MASTER_PORT=str(port))
    argv = [*PYTHON, ROOT / "tests/faulty_rank.py", who, moment, fault, "-m", checkpoint, *SHORT, "--max_new_tokens",
            "24", "--json", *more]
    ranks = [subprocess.Popen(list(map(str, argv)), cwd=folder, env=dict(env, RANK=str(i)), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for i in range(2)]
    try:
        said = {i: ranks[i].communicate(timeout=240) for i in range(2) if i != who or fault == "slow"}
        return said, {i: ranks[i].returncode for i in said}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("moment", ["load", "prefill", "decode", "speculation"])
def test_a_rank_that_is_killed_stopped_or_slow(checkpoint, tmp_path, moment, who):
    """The other one ends with a line within the time that it waits; one that is slow is waited for."""
    more = ["--prompt", 40] + ["--speculate", "ngram"] * (moment == "speculation")
    for fault in FAULTS:
        said, statuses = two_ranks(checkpoint, tmp_path, who, moment, fault, *more)
        other = 1 - who
        if fault == "slow":
            assert statuses == {0: 0, 1: 0}, said
            slow_ids = json.loads(said[0][0].splitlines()[-1])["new_ids"]
            continue
        assert statuses == {other: 2}, said
        error = [line for line in said[other][1].splitlines() if "error: " in line]
        assert len(error) == 1 and "lost another one, which ended or did not answer within 4 s" in error[0], said
        assert "Traceback" not in said[other][1]
    alone = Child(tmp_path, command, *GENERATE, checkpoint, *SHORT, "--max_new_tokens", 24, "--json", "--prompt", 40)
    assert alone.wait() == 0 and ids_said(alone) == [slow_ids]
