"""The .pth that we write: sound for zip programs and for torch.load, whole or not at all."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from conftest import ROOT

import checkpoint as core
from checkpoint import LazyTensor, save_checkpoint
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized


def written(families, path, mode=None, name="llama3"):
    source = read_checkpoint(families(name)[0])
    source = quantized(source, mode) if mode else source
    save_checkpoint(source, path, None)
    return source


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_every_zip_reader_finds_it_whole(families, tmp_path, name, mode):
    path = tmp_path / "model.pth"
    source = written(families, path, mode, name)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        assert len(entries) == len(source.tensors) and all(e.compress_type == zipfile.ZIP_STORED for e in entries)
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-tq", path], capture_output=True, text=True)
        assert done.returncode == 0 and "No errors detected" in done.stdout
    data = path.read_bytes()
    for mapped in (False, True):
        content = torch.load(path, weights_only=True, mmap=mapped)
        assert content["model"].keys() == source.tensors.keys()
        for n, t in source.tensors.items():
            found = content["model"][n]
            assert torch.equal(found.float(), t.whole().float()) and found.is_contiguous()
            if mapped:
                assert found.data_ptr() % 64 == 0, "bytes begin at a multiple of 64 in the file"
    assert data.count(b"FB") >= len(source.tensors)


def test_a_large_tensor_has_a_zip64_entry(families, tmp_path, monkeypatch):
    """As above 2 GiB, whose limit is set to 4 KB here."""
    with monkeypatch.context() as m:
        m.setattr(zipfile, "ZIP64_LIMIT", 4096)
        source = written(families, tmp_path / "model.pth")
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "model.pth", weights_only=True, mmap=True)["model"]
    assert all(torch.equal(found[n], t.whole()) and found[n].data_ptr() % 64 == 0 for n, t in source.tensors.items())


def test_scalars_empty_names_and_every_dtype(tmp_path):
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in core.STORAGES}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["experts"] = torch.arange(24.0).view(2, 3, 4)
    lazies = {n: LazyTensor(n, tuple(t.shape), t.dtype, lambda a, b, t=t: (t.flatten(0, 1) if t.dim() > 2 else t.reshape(1) if t.dim() == 0 else t)[a:b])
              for n, t in tensors.items()}
    content = dict(model={n: core.Blank(str(i), t.shape, t.dtype) for i, (n, t) in enumerate(tensors.items())}, text="ß", none=None)
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as archive:
        core._write(archive, "x", content, lazies, lambda i, n: None)
    found = torch.load(tmp_path / "x.pth", weights_only=True)
    assert found["text"] == "ß" and found["none"] is None
    for n, t in tensors.items():
        assert found["model"][n].dtype == t.dtype and torch.equal(found["model"][n], t)


def test_memory_is_a_chunk(families, tmp_path, monkeypatch):
    """No more than a chunk of one tensor is converted at a time."""
    sizes, original = [], core.raw_bytes
    monkeypatch.setattr(core, "raw_bytes", lambda t: sizes.append(t.numel()) or original(t))
    monkeypatch.setattr("checkpoint.CHUNK", 64 * 7)
    written(families, tmp_path / "model.pth")
    assert max(sizes) <= 64 * 7


def test_a_flipped_bit_is_noticed(families, tmp_path):
    path = tmp_path / "model.pth"
    written(families, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None


@pytest.mark.parametrize("keep", [10, 0.3, 0.9, 0.9999])
def test_truncated(families, tmp_path, keep):
    path = tmp_path / "model.pth"
    written(families, path)
    data = path.read_bytes()
    path.write_bytes(data[:keep if keep > 1 else int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"not a readable PyTorch file \(truncated\?\)"):
        read_checkpoint(path)


SLOWLY = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from gpt_faster.cli.common import guarded
import checkpoint
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.load import read_checkpoint
original = checkpoint.raw_bytes
def slow(t):
    print("writing", flush=True)
    time.sleep(0.2)
    return original(t)
checkpoint.raw_bytes = slow
def run(_):
    checkpoint.save_checkpoint(read_checkpoint(Path({source!r})), Path({path!r}), None)
    return 0
sys.exit(guarded(run, []))
"""


def test_interrupted_by_ctrl_c(families, tmp_path):
    """A file that is there already stays as it was; nothing else is left."""
    path = tmp_path / "model.pth"
    path.write_bytes(b"before")
    code = SLOWLY.format(root=str(ROOT), source=str(families("llama3")[0]), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(4):
        assert process.stdout.readline() == "writing\n"
    assert {p.name for p in tmp_path.iterdir()} == {"model.pth", "model.pth.partial"}
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.strip().splitlines()[-1] == "interrupted"
    assert {p.name for p in tmp_path.iterdir()} == {"model.pth"} and path.read_bytes() == b"before"


def test_no_disk_left(families, tmp_path):
    """The real thing, on a file system of 256 KB, where one can be made; else the call that fails."""
    written(families, tmp_path / "model.pth")
    directory = tmp_path / "small"
    directory.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", directory], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        with pytest.raises(OSError, match="No space left"):
            written(families, directory / "model.pth")
        assert not list(directory.iterdir())
    finally:
        subprocess.run(["umount", directory])
