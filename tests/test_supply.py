"""What is installed is what the locks say: hashes, versions, and nothing missing from them."""

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts/dev"))
import audit  # noqa: E402
import lock  # noqa: E402

LAYERS = list(lock.LAYERS)


def layer(name):
    return lock.read_lock((ROOT / f"scripts/locks/{name}.lock").read_text())


def locked():
    """Package -> its requirements in all layers."""
    found = {}
    for name in LAYERS:
        for package, entries in layer(name).items():
            found.setdefault(package, []).extend(Requirement(entry.split("\\")[0]) for entry in entries)
    return found


def pins(name):
    lines = (ROOT / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("-r", "#"))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_lock_has_what_its_requirements_pin(name):
    for pin in pins(name):
        package = canonicalize_name(pin.name)
        if not lock.NOT_LOCKED.match(package):
            assert {str(r.specifier) for r in locked()[package]} == {str(pin.specifier)}, "run: python scripts/dev/lock.py"


@pytest.mark.parametrize("name", LAYERS)
def test_every_entry_has_hashes(name):
    text = (ROOT / f"scripts/locks/{name}.lock").read_text()
    entries = [entry for package in layer(name).values() for entry in package]
    assert sum(len(entry.splitlines()) for entry in entries) == sum(not line.startswith(("#", "-r")) for line in text.splitlines())
    for entry in entries:
        first, *hashes = entry.splitlines()
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+(\[.*\])? (; .* )?\\", first), first
        assert hashes and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), first


def test_torch_is_pinned_once_and_not_locked():
    assert [str(pin) for name in LAYERS for pin in pins(name) if pin.name == "torch"] == ["torch==2.13.0"]
    assert not [package for package in locked() if lock.NOT_LOCKED.match(package)]


def test_what_locked_packages_need_is_locked():
    """For this Python and system, by what the installed ones say that they need."""
    have = {package for package, entries in locked().items() if any(r.marker is None or r.marker.evaluate() for r in entries)}
    for package in have | {"torch"}:
        try:
            needs = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            continue                                       # only part of the layers is installed
        for need in map(Requirement, needs):
            wanted = need.marker is None or need.marker.evaluate({"extra": ""})
            name = canonicalize_name(need.name)
            assert not wanted or name in have or lock.NOT_LOCKED.match(name), f"{package} needs {need}"


def test_another_hash_is_refused(tmp_path):
    """pip, with a file of ours: nothing is fetched."""
    with zipfile.ZipFile(tmp_path / "toy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        wheel.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("toy-1.0.dist-info/RECORD", "")
    (tmp_path / "toy.lock").write_text(f"toy==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    script = (ROOT / "scripts/setup.sh").read_text()
    options = re.search(r"pip install (--require-hashes --no-deps) -r", script)[1].split()
    process = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--no-index", "--find-links", tmp_path, "--target", tmp_path / "to",
         "-r", tmp_path / "toy.lock"], capture_output=True, text=True)
    assert process.returncode and "DO NOT MATCH THE HASHES" in process.stderr and not (tmp_path / "to").exists()


def finding(name, *fixed, aliases=()):
    return {"id": name, "fix_versions": list(fixed), "aliases": list(aliases), "description": ""}


@pytest.mark.parametrize("found,status,says", [
    ([], 0, "1 packages scanned, 0 found, 0 to fix"),
    ([finding("GHSA-1", "2.0", "1.9.1")], 1, "toy 1.0: GHSA-1, fixed in 2.0, 1.9.1"),
    ([finding("GHSA-1")], 0, "toy 1.0: GHSA-1, fixed in no version yet"),
    ([finding("GHSA-1", "2.0", aliases=["CVE-1"])], 0, "toy 1.0: GHSA-1, accepted: not reached"),
])
def test_what_a_scan_finds(monkeypatch, capsys, found, status, says):
    """Answers of an index that has advisories, which the tests cannot ask."""
    answer = json.dumps({"dependencies": [{"name": "toy", "version": "1.0", "vulns": found}]})
    monkeypatch.setattr(audit.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, answer, ""))
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-1": "not reached"} if "accepted" in says else {})
    assert audit.main([]) == status and says in capsys.readouterr().out


@pytest.mark.parametrize("stdout,stderr,says", [
    ("", "ERROR: could not connect", "pip-audit: ERROR: could not connect"),
    ("", "", "no output"),
    ('{"dependencies": [{"name": "torch", "skip_reason": "unknown"}]}', "", "unknown"),
])
def test_an_index_without_advisories_is_said(monkeypatch, capsys, stdout, stderr, says):
    calls = []

    def run(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, stdout, stderr)

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main([]) == 0 and len(calls) == 1
    out = capsys.readouterr().out
    assert out.startswith("Vulnerabilities: not scanned") and says in out and out.count("\n") == 1


def test_a_scan_ends(monkeypatch, capsys):
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main([]) == 0 and "no answer in 120 seconds" in capsys.readouterr().out
