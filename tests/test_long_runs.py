"""scripts/dev/long_runs.py: what it would notice, and a short one."""

import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts/dev"))
import long_runs  # noqa: E402


def watched(memory, ids_of, monkeypatch):
    """-> what is wrong where memory is so after each run, and run i gives ids_of(i, again)."""
    n, left = len(memory), iter(memory)
    monkeypatch.setattr(long_runs, "resident_mb", lambda: next(left))

    def run(runner, n):
        yield from ((i, ids_of(i, False)) for i in range(n))
        yield from ((i, ids_of(i, True)) for i in range(long_runs.N_REPEATED))
    return long_runs.measure_part(long_runs.Part("runs", 1, run), None, n)[1]


@pytest.mark.parametrize("memory, grows", [
    ([100 + min(i, 50) for i in range(400)], False),       # warms up
    ([100 + 3 * (i % 7) for i in range(400)], False),      # malloc gives back, and takes
    ([100 + 4 * (i > 200) for i in range(800)], False),    # an arena more
    ([100 + 0.02 * i for i in range(400)], True),
    ([100 + 3 * (i // 40) for i in range(400)], True)])
def test_growth(memory, grows, monkeypatch):
    wrong = watched(memory, lambda i, again: [i], monkeypatch)
    assert ["memory grows" in line for line in wrong] == [True] * grows


def test_other_tokens(monkeypatch):
    wrong = watched([100.0] * 20, lambda i, again: [i, 5 + (again and i == 3)], monkeypatch)
    assert wrong == ["run 3 gave [3, 5] and later [3, 6]"]


@pytest.mark.slow
def test_a_short_one(tmp_path):
    argv = [sys.executable, "scripts/dev/long_runs.py", "--n", "48", "--plot", tmp_path / "memory.svg"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == ["48 requests through four slots", "12 turns of a conversation",
                                                      "12 texts with drafts"]
    assert all(line.endswith("of the first 8 again 8 the same") for line in lines)
    assert "<svg" in (tmp_path / "memory.svg").read_text()
