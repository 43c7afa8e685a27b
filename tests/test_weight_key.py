"""The key of cached weights names all that makes them: every file of ours that takes part, and gguf's version."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from gpt_faster import loading
from gpt_faster.formats import load as reading
from gpt_faster.formats import quantize_on_load
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels import digest

# Called by load_shard and not in the key's files: load_shard has a digest of its own, is_packed_for's answer is in the
# key, part_of_rank matters on several ranks only, which keep nothing, and use_fused_attention changes no weight.
ELSEWHERE = {("gpt_faster/loading.py", "load_shard"), ("gpt_faster/loading.py", "is_packed_for"), ("gpt_faster/loading.py", "part_of_rank"),
             ("gpt_faster/kernels/cuda/attention.py", "use_fused_attention")}


def files_of_key():
    files, pending = set(), [Path(module.__file__) for module in (reading, quantize_on_load)]
    while pending:
        path = pending.pop()
        if path not in files:
            files.add(path)
            pending += [digest.ROOT / name for name in digest._source_entry(path, None)["imports"]]
    return {str(path.relative_to(ROOT)) for path in files}


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["llama3", "gemma3_text", "qwen3_moe", "gpt2"])
def test_each_function_that_runs_is_of_a_file_in_the_key(families, family, scheme):
    source = read_checkpoint(families(family)[0])
    source = quantized(source, scheme, 32) if scheme else source
    called = set()

    def record(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.parent.name != "tests" and ".venv" not in path.parts:
            called.add((str(path.relative_to(ROOT)), frame.f_code.co_name))
    for engine in ("compile", "kv_cache"):
        sys.setprofile(record)
        try:
            loading.load_shard(source, torch.bfloat16, "cpu", engine)
        finally:
            sys.setprofile(None)
    assert len(called) > 30
    in_key = files_of_key()
    assert {(path, name) for path, name in called - ELSEWHERE if path not in in_key} == set()


def test_the_gguf_package_dequantizes(monkeypatch, families, tmp_path):
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "cache"))
    source = read_checkpoint(families("llama3")[0])

    def key():
        return loading.cache_key(source, torch.float32, torch.device("cpu"), False)
    usual = key()
    monkeypatch.setattr(loading.metadata, "version", lambda name: "another")
    assert key() == usual                                  # safetensors: it takes no part
    monkeypatch.setattr(loading, "is_gguf", lambda path: True)
    changed = key()
    monkeypatch.setattr(loading.metadata, "version", lambda name: "a third")
    assert len({usual, changed, key()}) == 3
