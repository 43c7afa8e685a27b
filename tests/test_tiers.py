"""Which tests a tier runs: every slow one within ten seeds, those of a change first, none after the budget."""

import json
import subprocess
import sys

import pytest
import tiers

IDS = [f"tests/test_{file}.py::test_{i}[{i % 3}]" for file in "abc" for i in range(60)]
COSTS = {tiers.split_id(nodeid)[0]: {str(i % 3): float(i % 7)} for i, nodeid in enumerate(IDS)}


def taken(order, budget):
    """What a budget lets start, one after the other."""
    started, seconds = [], 0.0
    for nodeid in order:
        seconds += tiers.cost_of(COSTS, nodeid)
        if seconds > budget:
            break
        started.append(nodeid)
    return started


@pytest.mark.parametrize("n_affected", [0, 20, 180])
def test_ten_seeds_start_every_slow_test(n_affected):
    affected = {tiers.split_id(nodeid)[0] for nodeid in IDS[:n_affected]}
    total = sum(tiers.cost_of(COSTS, nodeid) for nodeid in IDS)
    started = set()
    for seed in range(17, 27):
        order = tiers.slow_order(IDS, COSTS, affected, seed, total / 4)
        assert sorted(order) == sorted(IDS)
        started |= set(taken(order, total / 4))
    assert started == set(IDS)


def test_what_a_change_reaches_comes_first():
    affected = {"test_b.py::test_7", "test_c.py::test_59"}
    order = tiers.slow_order(IDS, COSTS, affected, 3, 1000.0)
    first = {tiers.split_id(nodeid)[0] for nodeid in order[:2]}
    assert first == affected or all(tiers.group_of(nodeid) == 3 for nodeid in IDS if tiers.split_id(nodeid)[0] in affected - first)


def test_a_test_without_a_cost_is_among_the_first():
    new = "tests/test_a.py::test_new"
    assert new in tiers.slow_order([*IDS, new], COSTS, set(), tiers.group_of(new) + 1, 1000.0)[:1]


def test_each_worker_begins_with_quick_tests():
    quick, slow = [f"q{i}" for i in range(10)], [f"s{i}" for i in range(21)]
    order = tiers.for_workers(quick, slow, 2)
    assert sorted(order) == sorted(quick + slow)
    assert order[:5] == quick[:5] and order[16:21] == quick[5:]


def test_costs_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "COSTS", tmp_path / "costs.json")
    costs = {"test_a.py::test_x": {"": 0.1}, "test_a.py::test_y": {"a-b": 12.0, "[1]": 0.0, "é": 0.0}}
    tiers.write_costs(costs)
    assert tiers.read_costs() == costs
    assert tiers.split_id("tests/test_a.py::test_y[a[1]-b]") == ("test_a.py::test_y", "a[1]-b")


def test_shards_have_every_function_once():
    shards = {tiers.shard_of(nodeid) for nodeid in IDS}
    assert shards == set(range(1, tiers.SHARDS + 1))
    assert len({tiers.shard_of(f"tests/test_a.py::test_x[{i}]") for i in range(9)}) == 1


SUITE = """
import pytest

@pytest.fixture(scope="module")
def held():
    yield 1

@pytest.mark.parametrize("i", range(4))
def test_quick(i):
    pass

@pytest.mark.parametrize("i", range(30))
def test_slow(held, i):
    assert i != 1000
"""


@pytest.fixture
def suite(tmp_path):
    """A suite of its own with this project's plugin."""
    (tmp_path / "tests").mkdir()
    for name in ("tier_plugin.py", "tiers.py"):
        (tmp_path / "tests" / name).write_text((tiers.ROOT / "tests" / name).read_text())
    (tmp_path / "tests/tiny.py").write_text("FAMILIES = COVER = {}\n")
    (tmp_path / "tests/conftest.py").write_text('pytest_plugins = ["tier_plugin"]\n')
    (tmp_path / "tests/test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\npythonpath = tests\n")
    costs = {"test_it.py::test_quick": {"0.1": list("0123")}, "test_it.py::test_slow": {"2": [str(i) for i in range(10)], "10000": [str(i) for i in range(10, 29)]}}
    (tmp_path / "tests/costs.json").write_text(json.dumps(costs))

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--log-tests", "log", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        log = tmp_path / "log"
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return done, entries
    return run


def test_without_a_flag_quick_tests_run(suite):
    done, entries = suite()
    assert [entry["slow"] for entry in entries] == [False] * 4 and "30 deselected" in done.stdout
    done, entries = suite("tests/test_it.py::test_slow[29]")   # named: it runs, measured or not
    assert [entry["outcome"] for entry in entries] == ["passed"] and done.returncode == 0


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_budget_ends_the_run(suite, workers):
    done, entries = suite("--all", "--budget", "600", "-n", workers)
    assert done.returncode == 0, done.stdout
    assert sum(not entry["slow"] for entry in entries) == 4    # whatever the budget
    slow = {tiers.split_id(entry["id"])[1] for entry in entries if entry["slow"]}
    assert slow == {*map(str, range(10)), "29"}                # not one that would need hours
    assert "19 slow tests were not started" in done.stdout
    nothing, entries = suite("--all", "--budget", "0.001", "-n", workers)
    assert len(entries) == 4 and "30 slow tests were not started" in nothing.stdout
