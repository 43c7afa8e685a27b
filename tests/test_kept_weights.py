"""Weights mapped at the next start: the same model, or made anew; and nothing kept that should not be."""

import os
import shutil
import time

import pytest
import torch
from conftest import SMOLLM2
from helpers import GREEDY, generated

import model as core
import quantize
from gpt_faster import loading
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.compile import compile_model
from gpt_faster.storage import disk, weight_cache
from quantize import Int4


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(loading, "MIN_SAVE_SECONDS", 0)
    torch_internals.note_once.cache_clear()
    return tmp_path / "kept"


@pytest.fixture
def at_once(monkeypatch):
    """Without a thread of its own."""
    class Thread:
        def __init__(self, target, args):
            self.start = lambda: target(*args)
    monkeypatch.setattr(loading.threading, "Thread", Thread)


def sets(home):
    return sorted((home / "weights").glob("[!.]*"))


def logits(model):
    model.setup_cache(1, 32)
    return model(torch.arange(3, 11)[None], torch.arange(8), 8)


@torch.no_grad()
@pytest.mark.parametrize("scheme, head", [(None, None), ("int8", "int8"), ("int4", "int8"), ("int4", "none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["compile", "kv_cache"])
def test_the_same_model_without_reading_it(families, home, at_once, monkeypatch, scheme, head, dtype, engine):
    for name in ("llama3", "gemma2", "qwen3_moe", "gpt2"):
        directory, _ = families(name)
        source = read_checkpoint(directory)
        if scheme:
            source = quantized(source, scheme, 32, head)
        first = loading.load(source, dtype, "cpu", engine)
        expected = logits(first)
        n = len(sets(home))
        with monkeypatch.context() as m:
            m.setattr(loading, "code_digest", lambda code=loading.code_digest(): code)
            m.setattr(loading, "load_shard", None)    # no other way
            again = loading.load(source, dtype, "cpu", engine)
        assert len(sets(home)) == n
        assert torch.equal(logits(again), expected)
        assert [n for n, _ in again.named_parameters()] == [n for n, _ in first.named_parameters()]
        if name == "llama3":
            compile_model(again)
            compile_model(first)
            assert torch.equal(logits(again), logits(first))


def test_what_they_depend_on(families, home, at_once, monkeypatch, tmp_path):
    directory, _ = families("llama3")
    path = tmp_path / "model"
    shutil.copytree(directory, path)

    def kept(dtype=torch.float32, **asked):
        source = read_checkpoint(path)
        loading.load(quantized(source, **asked) if asked else source, dtype, "cpu", "compile")
        return len(sets(home))
    assert kept() == 1 and kept() == 1
    assert kept(torch.bfloat16) == 2
    assert kept(mode="int8") == 3 and kept(mode="int4") == 4 and kept(mode="int4", head="none") == 5
    weights = path / "model.safetensors"
    os.utime(weights)                                      # touched: read again, the same content
    assert kept() == 5
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    weights.write_bytes(data)
    os.utime(weights, ns=times)                            # as if it were the old one
    assert kept() == 6
    shutil.copytree(path, tmp_path / "copy")
    loading.load(read_checkpoint(tmp_path / "copy"), torch.float32, "cpu", "compile")
    assert len(sets(home)) == 6                            # the same content elsewhere
    monkeypatch.setattr(loading, "code_digest", lambda: "other code")
    assert kept() == 7


@torch.no_grad()
@pytest.mark.parametrize("damage", ["truncated", "longer", "gone", "no index", "bad index", "no index field"])
def test_damaged_files_are_made_anew(families, home, at_once, damage, capsys):
    directory, _ = families("llama3")
    source = read_checkpoint(directory)
    expected = logits(loading.load(source, torch.float32, "cpu", "compile"))
    folder, = sets(home)
    data, index = folder / "data", folder / "index.json"
    size = data.stat().st_size
    if damage == "truncated":
        os.truncate(data, size // 2)
    if damage == "longer":
        os.truncate(data, size * 2)
    if damage == "gone":
        data.unlink()
    if damage == "no index":
        index.unlink()
    if damage == "bad index":
        index.write_text(index.read_text()[:200])
    if damage == "no index field":
        index.write_text("{}")
    for _ in range(2):
        assert torch.equal(logits(loading.load(source, torch.float32, "cpu", "compile")), expected)
    folder, = sets(home)
    assert (folder / "data").stat().st_size == size
    assert "rebuilding" in capsys.readouterr().err


def test_writing_into_them_stays_private(families, home, at_once):
    directory, _ = families("llama3")
    source = read_checkpoint(directory)
    loading.load(source, torch.float32, "cpu", "compile")
    model = loading.load(source, torch.float32, "cpu", "compile")
    with torch.no_grad():
        model.layers[0].attn.wo.weight.zero_()
    again = loading.load(source, torch.float32, "cpu", "compile")
    assert again.layers[0].attn.wo.weight.any()


def test_the_oldest_go_first_and_the_full_disk_keeps_nothing(families, home, at_once, monkeypatch):
    directory, _ = families("llama3")
    source = read_checkpoint(directory)
    loading.load(source, torch.float32, "cpu", "compile")
    first, = sets(home)
    size = (first / "data").stat().st_size
    loading.load(source, torch.bfloat16, "cpu", "compile")
    second, = set(sets(home)) - {first}
    os.utime(first, (time.time() + 99, time.time() + 99))  # used later than the second
    monkeypatch.setattr(weight_cache, "max_bytes", lambda: int(2.1 * size))
    loading.load(quantized(source, "int8"), torch.float32, "cpu", "compile")
    loading.load(quantized(source, "int4"), torch.float32, "cpu", "compile")
    assert first in sets(home) and second not in sets(home)
    monkeypatch.setattr(weight_cache, "max_bytes", lambda: size // 2)
    before = sets(home)
    loading.load(source, torch.bfloat16, "cpu", "compile")       # larger than all that may be kept
    assert sets(home) == before

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(weight_cache, "max_bytes", lambda: 1 << 40)
    monkeypatch.setattr(weight_cache, "_write", full)
    loading.load(source, torch.bfloat16, "cpu", "compile")
    assert sets(home) == before and not list((home / "weights").glob(".partial*"))


def test_random_weights_and_ranks_are_not_kept(home, families, monkeypatch):
    assert loading.cache_key(random_checkpoint("SmolLM2-135M"), torch.float32, torch.device("cpu"), False) is None
    source = read_checkpoint(families("llama3")[0])
    assert loading.cache_key(source, torch.float32, torch.device("cuda"), False) is None
    monkeypatch.setattr(loading.tp, "world", lambda: 2)
    assert loading.cache_key(source, torch.float32, torch.device("cpu"), False) is None


def test_limits(monkeypatch, home, capsys):
    (home / "weights").mkdir(parents=True)
    monkeypatch.setenv("GPT_FASTER_WEIGHTS_MB", "3")
    assert weight_cache.max_bytes() == 3 << 20
    monkeypatch.setenv("GPT_FASTER_WEIGHTS_MB", "many")
    assert weight_cache.max_bytes() <= 8192 << 20 and "not an integer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gguf(home, at_once):
    source = read_checkpoint(SMOLLM2)
    tokens = [[t.item() for t in generated(loading.load(source, torch.bfloat16, "cpu", "compile"), [[5, 9, 77]], 8, GREEDY)]
              for _ in range(2)]
    assert tokens[0] == tokens[1] and len(sets(home)) == 1
    assert disk.cache_dir() == home


def test_what_is_put_in_a_function_s_place_makes_them_anew(families, home, at_once, monkeypatch):
    """int4's rounding, as a fork would change it: in the running program, or (test_digest.py) in a file."""
    source = quantized(read_checkpoint(families("llama3")[0]), "int4")

    def kept():
        model = loading.load(source, torch.float32, "cpu", "compile")
        return len(sets(home)), logits(model)
    (n, plain), (again, same) = kept(), kept()
    assert (n, again) == (1, 1) and torch.equal(plain, same)
    rounded = quantize._as_bfloat16
    for place, name, new in ((quantize, "_as_bfloat16", lambda t: rounded(t * 1.25)), (quantize, "SHRINK", (0.5,)), (Int4, "grid", coarse_grid)):
        with monkeypatch.context() as m:
            m.setattr(place, name, new)
            source = quantized(read_checkpoint(families("llama3")[0]), "int4")
            now, changed = kept()
            n += 1
            assert now == n and not torch.equal(changed, plain), name
    source = quantized(read_checkpoint(families("llama3")[0]), "int4")
    now, same = kept()
    assert now == n and torch.equal(same, plain)


def coarse_grid(self, groups, importance=None):
    low, high = groups.aminmax(dim=-1)
    return (high - low) / 7, (high + low) / 2


def test_a_function_without_source_keeps_nothing(families, home, at_once, monkeypatch):
    scope = dict(vars(quantize))
    exec("def _as_bfloat16(t): return t.half().float()", scope)
    monkeypatch.setattr(quantize, "_as_bfloat16", scope["_as_bfloat16"])
    loading.load(quantized(read_checkpoint(families("llama3")[0]), "int4"), torch.float32, "cpu", "compile")
    assert not sets(home)


def test_after_a_compiler_ran(families, home, at_once):
    """torch.compile puts functions of its own into the globals of the module whose function it compiled."""
    torch._dynamo.reset()
    source = read_checkpoint(families("llama3")[0])
    expected = logits(loading.load(source, torch.float32, "cpu", "compile"))
    n = len(sets(home))
    torch.compile(core.swiglu, backend="eager")(torch.ones(2), torch.ones(2))
    assert any(name.startswith("__compiled_fn") for name in vars(core))
    assert torch.equal(logits(loading.load(source, torch.float32, "cpu", "compile")), expected) and len(sets(home)) == n


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_stays(home):
    folder = disk.trusted_cache() / "weights"
    for name in (".partial-left", ".partial-written"):
        (folder / name).mkdir(parents=True)
        (folder / name / "data").write_bytes(b"x")
    with disk.write_lock(folder / ".partial-written"):
        disk.remove_partials(folder)
        assert [p.name for p in folder.glob(".partial*")] == [".partial-written"]
        with pytest.raises(OSError), disk.write_lock(folder / ".partial-written"):
            pytest.fail("two at once")
        disk.remove_partials(folder)
        assert (folder / ".partial-written/data").exists()
    disk.remove_partials(folder)
    assert not list(folder.iterdir())
