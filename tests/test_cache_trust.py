"""Nothing is loaded from, or written to, a cache that others may write: the caches of the compilers, and digests of sources."""

import json
import os
from pathlib import Path

import pytest

from gpt_faster.decoding import engines
from gpt_faster.kernels import digest, torch_internals
from gpt_faster.storage import disk

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("GPT_FASTER_CACHE", str(folder))
    for name in NAMES:
        monkeypatch.setenv(name, "x")              # so that it is put back
        monkeypatch.delenv(name)
    torch_internals.note_once.cache_clear()
    disk.set_compiler_caches.cache_clear()
    yield folder
    disk.set_compiler_caches.cache_clear()


def test_compilers_keep_what_they_build_in_the_cache(cache, monkeypatch):
    """Before, in /tmp/torchinductor_USER, which anybody may make first."""
    monkeypatch.setattr(engines.core, "compile_steps", lambda *a: dict(os.environ))
    environment = engines.build_steps(None, "torch_compile")
    for name in NAMES:
        folder = Path(environment[name])
        assert folder.parent == cache and folder.stat().st_mode & 0o777 == 0o700
    from torch._inductor.runtime import cache_dir_utils
    assert Path(cache_dir_utils.cache_dir()).parent == cache


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_of_the_environment_that_others_may_write_is_not_used(cache, tmp_path, monkeypatch, capsys, mode):
    private, public = tmp_path / "private", tmp_path / "public"
    private.mkdir(mode=0o700)
    public.mkdir()
    public.chmod(mode)
    monkeypatch.setenv(NAMES[0], str(public))
    monkeypatch.setenv(NAMES[1], str(private))
    disk.set_compiler_caches()
    assert Path(os.environ[NAMES[0]]).parent == cache and os.environ[NAMES[1]] == str(private)
    [line] = capsys.readouterr().err.splitlines()
    assert str(public) in line and "chmod go-w" in line


def test_where_the_cache_is_others_a_folder_of_this_process_serves(cache, capsys):
    cache.chmod(0o777)
    disk.set_compiler_caches()
    folders = {Path(os.environ[name]).parent for name in NAMES}
    assert cache not in folders and all(disk.is_trusted(folder) for folder in folders)


def test_digests_of_sources_that_others_may_write_are_neither_read_nor_written(cache):
    right = digest.digest_with_imports(disk)
    known = cache / "sources.json"
    entries = json.loads(known.read_text())
    entries[disk.__file__]["digest"] = "0" * 32
    known.write_text(json.dumps(entries))
    assert digest.digest_with_imports(disk) != right
    known.chmod(0o666)
    assert digest.digest_with_imports(disk) == right
    target = cache.parent / "target"
    target.write_text("mine")
    known.unlink()
    cache.chmod(0o777)
    (cache / f".sources.json.{os.getpid()}").symlink_to(target)
    assert digest.digest_with_imports(disk) == right and target.read_text() == "mine" and not known.exists()
