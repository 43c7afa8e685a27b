"""Damaged files: each is refused in a line, or runs. What tests/fuzz.py found, more of it, and bombs made by hand."""

import json
import os
import re
import struct
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import fuzz
import pytest
import torch
from conftest import ROOT

from checkpoint import Unforeseen
from gpt_faster.cli import common
from gpt_faster.formats import load
from gpt_faster.formats.gguf_file import read_gguf_header
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.text import sandbox, tokenizer_files
from gpt_faster.text.chat_template import render
from tokenizer import TokenizersBackend

RECIPES = [json.loads(line) for line in (ROOT / "tests/damaged/finds.jsonl").read_text().splitlines()]
LLAMA = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=160)


@pytest.fixture(scope="module")
def bases():
    return fuzz.load_bases()


@pytest.fixture(scope="module")
def worker(bases):
    worker = fuzz.Worker(bases, fuzz.SECONDS, fuzz.MB)
    yield worker
    worker.stop()


def finds(worker, cases):
    answers = [(base, ops, *worker.run(base, ops)) for base, ops in cases]
    return [found for found in answers if found[2] in fuzz.FINDS]


@pytest.mark.parametrize("part", range(4))
def test_what_was_found_stays_mended(worker, part):
    assert finds(worker, [(r["base"], r["ops"]) for r in RECIPES[part::4]]) == []


def cases(bases, seed, first, n):
    formats = sorted({info["format"] for _, info in bases.values()})
    return [fuzz.case(seed, i, bases, formats) for i in range(first, first + n)]


@pytest.mark.parametrize("seed, first", [*((0, first) for first in range(0, 300, 100)), *((7, first) for first in range(0, 3000, 100))])
def test_100_cases(worker, bases, seed, first):
    """Drawn by the seed, from the first one on."""
    assert finds(worker, cases(bases, seed, first, 100)) == []


@pytest.mark.slow
def test_sound_bases_run(worker, bases):
    """Else the fuzzer would damage what is refused anyhow."""
    refused = [name for name in bases if worker.run(name, [])[0] != "ok"]
    assert refused == ["hub-bitsandbytes"]


def test_a_process_with_threads_has_a_worker(bases):
    """A fork has none of libgomp's threads, and its first parallel loop would wait for them."""
    torch.randn(1 << 22).exp().sum()
    worker = fuzz.Worker(bases, fuzz.SECONDS, fuzz.MB)
    assert finds(worker, [("generation", [["set", "generation_config.json", ["top_p"], "1e-300"]])]) == []
    worker.stop()


# ---- The fuzzer sees what it should ----------------------------------------------------------------

def mistake(*_):
    return {}["a key"]


def no_end(*_):
    while True:
        pass


def all_memory(*_):
    return [bytes(1 << 28) for _ in range(100)]


def death(*_):
    os.kill(os.getpid(), 9)


def accident(*_):
    return int("no number")


@pytest.mark.parametrize("planted, answer", [(mistake, "unforeseen"), (accident, "unforeseen"), (no_end, "hang"), (all_memory, "memory"),
                                             (death, "crash")])
def test_planted_mistakes_are_finds(bases, monkeypatch, planted, answer):
    monkeypatch.setattr(load, "read", planted)
    worker = fuzz.Worker(bases, 1, 1000, is_fork=True)
    assert worker.run("family-llama2", [])[0] == answer
    worker.stop()


@pytest.mark.slow
def test_a_library_that_hangs_is_killed(bases, monkeypatch):
    monkeypatch.setattr(fuzz.signal, "setitimer", lambda *_: None)         # as where no bytecode comes
    worker = fuzz.Worker(bases, 0, 4000, is_fork=True)
    monkeypatch.setattr(load, "read", no_end)
    assert worker.run("family-llama2", []) == ("hang", "in a library's code")


# ---- What nobody foresaw says so ---------------------------------------------------------------------

@pytest.mark.parametrize("debug", [None, "flag", "environment"])
def test_an_unforeseen_error(families, monkeypatch, capsys, debug):
    from gpt_faster.cli import session
    directory, _ = families("llama2")
    monkeypatch.setattr(load, "read", mistake)
    if debug == "environment":
        monkeypatch.setenv("GPT_FASTER_DEBUG", "1")
    with pytest.raises(SystemExit) as e:
        session.main(["-m", str(directory), *(["--debug"] if debug == "flag" else [])])
    err = capsys.readouterr().err
    assert e.value.code == 2
    assert f"error: {directory}: internal error while reading: KeyError ('a key')" in err.splitlines()[-1]
    assert ("Traceback" in err) == ("in mistake" in err) == bool(debug)
    assert debug or len(err.splitlines()) == 1


def test_our_own_mistakes_keep_their_traceback():
    with pytest.raises(KeyError):
        common.guarded(mistake, [])


def test_debug_shows_what_an_error_followed_from(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_text("")
    from gpt_faster.cli import session
    with pytest.raises(SystemExit):
        session.main(["-m", str(tmp_path), "--debug"])
    assert "JSONDecodeError" in capsys.readouterr().err


def test_control_characters_of_a_file_do_not_reach_the_terminal():
    assert common.error_line(ValueError("a\x1b[2Jb\nc\u202ed")) == "a\\x1b[2Jb c\\u202ed"


# ---- Sizes are checked before they are allocated -------------------------------------------------------

def refused(path):
    """The line, in a process that may take 600 MB more than it has, and a minute on a busy machine."""
    code = ("import resource, re, sys; sys.path[:0] = ['.', 'tests']; from gpt_faster.cli import session\n"
            "used = int(re.search(r'VmData:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
            "resource.setrlimit(resource.RLIMIT_DATA, (used + (600 << 20),) * 2)\n"
            f"sys.exit(session.main(['-m', {str(path)!r}, '--device', 'cpu']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr[-2000:]
    return done.stderr.split("error: ", 1)[1]


def put(directory, config=LLAMA, weights=b"\x02\0\0\0\0\0\0\0{}", name="model.safetensors"):
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (directory / name).write_bytes(weights)
    return directory


def read_line(path):
    with pytest.raises((ValueError, OSError)) as e:
        read_checkpoint(path)
    assert str(path) in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim", "intermediate_size",
                                 "max_position_embeddings", "num_key_value_heads"])
@pytest.mark.parametrize("value", [1 << 40, 1 << 63, 10**30, -1])
def test_numbers_of_any_size(tmp_path, key, value):
    message = read_line(put(tmp_path, {**LLAMA, key: value}))
    assert f"config.json: '{key}' is {value}, expected" in message


def test_the_largest_config_that_is_let_through_takes_no_memory(tmp_path):
    big = dict(LLAMA, hidden_size=1 << 22, num_hidden_layers=1000, num_attention_heads=1 << 16, head_dim=1 << 16, vocab_size=1 << 22)
    assert "tensors are missing" in refused(put(tmp_path, big))


def test_json_bombs(tmp_path):
    for text, words in (("[" * 10**6, "nested too deeply"), ('{"a":' * 10**6, "nested too deeply"),
                        ('{"hidden_size": ' + "9" * 10**5 + "}", "not valid JSON (Exceeds the limit"), ('{"a": "\xff"}', None)):
        (tmp_path / "x").mkdir(exist_ok=True)
        put(tmp_path / "x", text)
        if words is None:
            (tmp_path / "x/config.json").write_bytes(b'{"a": "\xff"}')
            words = "not UTF-8 text: invalid start byte at byte 7"
        assert words in read_line(tmp_path / "x")


def gguf(n_tensors, n_keys, rest):
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest


KEY = struct.pack("<Q", 1) + b"k"
GGUF_BOMBS = {
    "tensors": (gguf(1 << 60, 0, b"\0" * 64), "1,152,921,504,606,846,976 tensors"),
    "keys": (gguf(0, 1 << 60, b"\0" * 64), "1,152,921,504,606,846,976 metadata keys"),
    "text": (gguf(0, 1, struct.pack("<Q", 1 << 60) + b"k" * 64), "string runs past the end"),
    "array": (gguf(0, 1, KEY + struct.pack("<IIQ", 9, 4, 1 << 60) + b"\0" * 64), "1,152,921,504,606,846,976 array entries"),
    "nested": (gguf(0, 1, KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 4000), "arrays are nested too deeply"),
    "axes": (gguf(1, 0, KEY + struct.pack("<I", 1 << 31) + b"\0" * 64), "axes of k"),
    "alignment": (gguf(0, 1, struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0) + b"\0" * 64), "general.alignment is 0"),
}


@pytest.mark.parametrize("name", GGUF_BOMBS)
def test_gguf_bombs(tmp_path, name):
    data, words = GGUF_BOMBS[name]
    (tmp_path / "model.gguf").write_bytes(data)
    assert words in read_line(tmp_path / "model.gguf")


def test_an_array_of_a_sparse_file_has_an_end(tmp_path):
    """Ten billion entries that the file could hold: no vocabulary is as long."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(0, 1, KEY + struct.pack("<IIQ", 9, 0, 10**10)))
    os.truncate(path, 11 * 10**9)
    assert "10,000,000,000 array entries, but the file can hold at most 16,777,216" in refused(path)


def test_gguf_arrays_of_arrays_are_read():
    data = gguf(0, 1, KEY + struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQII", 4, 2, 5, 6) + struct.pack("<IQ", 4, 0) + b"\0" * 64)
    assert read_gguf_header(memoryview(data))[0] == {"k": [[5, 6], []]}


def test_a_zip_that_expands(tmp_path):
    for compressed in (True, False):
        with zipfile.ZipFile(tmp_path / "model.pth", "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
            archive.writestr("model/data.pkl", b"\x80\x02}q\0." + b"\0" * (50_000_000 if compressed else 10))
        data = (tmp_path / "model.pth").read_bytes()
        if not compressed:                                 # a size that is a lie
            at = data.rindex(b"PK\x01\x02")
            (tmp_path / "model.pth").write_bytes(data[:at + 24] + struct.pack("<I", 1 << 31) + data[at + 28:])
        words = "is compressed; PyTorch files are not" if compressed else "claim more bytes than the file has"
        assert words in refused(tmp_path / "model.pth")


def test_a_tensor_that_is_larger_than_its_bytes(tmp_path):
    torch.save({"tok_embeddings.weight": torch.zeros(1).expand(1 << 40, 4)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text(json.dumps(dict(dim=4, n_layers=1, n_heads=1)))
    assert "has shape [1099511627776, 4], but its storage has 4 bytes" in read_line(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", "..", "a/b.safetensors", 7, None, ["x"]])
def test_shards_elsewhere(tmp_path, shard):
    put(tmp_path, weights=json.dumps(dict(weight_map={"x": shard})).encode(), name="model.safetensors.index.json")
    assert "is not the name of a file in this directory" in read_line(tmp_path)


def test_links(tmp_path):
    """They are followed, as the hub's cache consists of them; what they lead to must be a file, with an end."""
    for name, made in (("zero", lambda path: path.symlink_to("/dev/zero")), ("loop", lambda path: path.symlink_to(path)),
                       ("pipe", os.mkfifo), ("folder", lambda path: path.mkdir())):
        for file in ("config.json", "model.safetensors", "model.gguf", "tokenizer.json"):
            directory = tmp_path / f"{name}-{file}"
            directory.mkdir()
            if file != "model.gguf":
                put(directory)
            (directory / file).unlink(missing_ok=True)
            made(directory / file)
            if file != "tokenizer.json":
                assert re.search("no such file|missing|not there|no model|not a regular file", read_line(directory))
            elif name == "zero":
                with pytest.raises(OSError, match="not a regular file"):
                    tokenizer_files.load(directory)


# ---- Nothing hangs -------------------------------------------------------------------------------------

ENDLESS = ["{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
           "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
           "{% for x in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
           "{% for a in 'x' * 1000 %}{% for a in 'x' * 1000 %}{% for a in 'x' * 1000 %}{% endfor %}{% endfor %}{% endfor %}"]
TOO_MUCH = ["{{ 'x' * 10**10 }}", "{{ 10**10**10 }}", "{{ 'a'.ljust(10**9) }}", "{{ 'a' | center(10**9) }}", "{{ '%9999999999d' % 1 }}",
            "{{ '{:{}}'.format(1, 10**9) }}", "{{ [1, 2] | batch(10**9, 'x') | list }}", "{{ 'aaaa' | replace('a', 'b' * 4000000) }}",
            "{{ (['x' * 4000000] * 1000) | join }}", "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
            "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "{{ 1 / 0 }}", "{{ lipsum(10**6) }}"]


@pytest.mark.parametrize("template", ENDLESS + TOO_MUCH)
def test_templates_end(monkeypatch, template):
    monkeypatch.setattr(sandbox, "TIMEOUT", 0.3)
    start = time.process_time()                            # of this process: a busy machine takes longer
    with pytest.raises(ValueError, match="the chat template does not render: "):
        render(SimpleNamespace(chat_template=template, names={}), [dict(role="user", content="hi")])
    assert time.process_time() - start < 3


def test_limits_change_no_template():
    """loop's variables, filters with a context or none, and what counts beside loops."""
    template = ("{% for m in messages if m.role %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.content | trim ~ '!' }}{{ loop.revindex }}"
                "{% if loop.previtem is defined %}{{ loop.previtem.role }}{% endif %}{% else %}none{% endfor %}{{ [1, 2] | sum }}{{ 7 % 3 }}"
                "{{ messages | map(attribute='role') | join(', ') }}{{ '%s-%05d' % ('a', 3) }}{{ '{:>4}'.format('b') }}{{ 1700000000 | string }}"
                "{% for x in missing %}{% else %}{{ 'no' }}{% endfor %}{{ messages[::-1][0].content.split('a')[0] }}{{ dict(a=1) | tojson }}")
    messages = [dict(role="user", content=" hi "), dict(role="tool", content="ab")]
    tokenizer = SimpleNamespace(chat_template=template, names={})
    assert render(tokenizer, messages) == "1False2hi!22True2ab!1user31user, toola-00003   b1700000000no{\"a\": 1}"


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(1*)*[^1]$", r"(\s+)+$"])
def test_expressions_without_end_are_refused(pattern):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    fast = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    start = time.process_time()
    with pytest.raises(ValueError, match="retry-limit|take .* seconds"):
        tokenizer_files.check_regex_speed(TokenizersBackend(fast.to_str()))
    assert time.process_time() - start < 10


def test_an_expression_that_gives_up_later_is_no_panic():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    fast = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"((foo)+)+$"), "isolated")
    backend = TokenizersBackend(fast.to_str())
    tokenizer_files.check_regex_speed(backend)
    with pytest.raises(ValueError, match="not a tokenizer that encodes this text: .*retry-limit"):
        backend.encode("foo" * 40 + "!", special=True)


def test_unforeseen_is_no_value_error():
    assert not issubclass(Unforeseen, (ValueError, OSError, ImportError))
