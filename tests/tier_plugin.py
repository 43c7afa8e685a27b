"""pytest's side of tests/tiers.py: chooses and orders the tests of a tier, keeps a budget of time, logs costs.

conftest.py loads it, so its options work with pytest alone too:

    python -m pytest --all tests/test_model.py     # slow tests too; without --all quick ones alone
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import tiers
import tiny

COSTS = tiers.read_costs()


def pytest_addoption(parser):
    group = parser.getgroup("tiers of tests")
    group.addoption("--all", action="store_true", help="slow tests too; without it quick tests, or those named one by one")
    group.addoption("--exhaustive", action="store_true", help="every test, at full length")
    group.addoption("--shard", type=int, help=f"this part of the tests alone, 1 to {tiers.SHARDS}")
    group.addoption("--unmeasured", action="store_true", help="tests without a measured cost alone")
    group.addoption("--seed", type=int, default=0, help="which slow tests come first under a budget")
    group.addoption("--budget", type=float, help="seconds of wall-clock time; a slow test that would end later is not started")
    group.addoption("--affected", help="a file with test functions that come first under a budget")
    group.addoption("--log-tests", help="a file that gets a line of JSON for each test: its outcome and cost")


def pytest_configure(config):
    config.pluginmanager.register(Costs(config), "costs")
    if config.getoption("budget"):
        config.pluginmanager.register(Budget(config), "budget")


# ---- Which tests --------------------------------------------------------------------------------

def is_slow(item) -> bool:
    """Marked so, dear or not measured, or of a variant whose every config field another one of tiny.COVER has too.

    Logits are compared with transformers for every variant in all tiers.
    """
    cost = tiers.cost_of(COSTS, item.nodeid)
    if item.get_closest_marker("slow") or cost is None or cost > tiers.QUICK_SECONDS:
        return True
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return name in tiny.FAMILIES and name not in tiny.COVER and item.originalname != "test_logits_equal_transformers"


def pytest_collection_modifyitems(config, items):
    option = config.getoption
    config.slow_ids = {item.nodeid for item in items if is_slow(item)}
    named_one_by_one = any("::" in str(argument) for argument in config.args)
    if option("unmeasured"):
        chosen = [item for item in items if tiers.cost_of(COSTS, item.nodeid) is None]
    elif option("shard"):
        chosen = [item for item in items if tiers.shard_of(item.nodeid) == option("shard")]
    elif option("all") or option("exhaustive") or named_one_by_one:
        chosen = list(items)
    else:
        chosen = [item for item in items if item.nodeid not in config.slow_ids]
    left_out = set(items) - set(chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = in_budget_order(config, chosen) if option("budget") else chosen


def in_budget_order(config, items: list) -> list:
    option = config.getoption
    affected = set(Path(option("affected")).read_text().split()) if option("affected") else set()
    n_worker = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    by_id = {item.nodeid: item for item in items}
    quick = [nodeid for nodeid in by_id if nodeid not in config.slow_ids]
    slow = tiers.slow_order([nodeid for nodeid in by_id if nodeid in config.slow_ids], COSTS, affected,
                            option("seed"), option("budget") * n_worker)
    return [by_id[nodeid] for nodeid in tiers.for_workers(quick, slow, n_worker)]


# ---- What they cost -----------------------------------------------------------------------------

class Costs:
    """Measures each test with its fixtures, and writes a line about it."""

    def __init__(self, config):
        self.log = config.getoption("log_tests")
        self.outcome = None                        # of the test that runs
        self.seconds = 0.0                         # of the tests so far
        self.expected = 0.0                        # what costs.json says of them

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        """The worst of setup, call and teardown is the test's outcome."""
        report = yield
        if report.failed or (report.skipped and self.outcome == "passed"):
            self.outcome = report.outcome
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.outcome = "passed"
        name_the_test(tiers.split_id(item.nodeid)[0])
        start, start_cpu = time.monotonic(), sum(os.times()[:4])
        item.was_started = True
        result = yield
        if not item.was_started:
            return result
        seconds, cpu = time.monotonic() - start, sum(os.times()[:4]) - start_cpu
        self.seconds += seconds
        self.expected += tiers.cost_of(COSTS, item.nodeid) or seconds
        if self.log:
            entry = dict(id=item.nodeid, outcome=self.outcome, slow=item.nodeid in item.config.slow_ids,
                         seconds=round(seconds, 2), cpu=round(cpu, 2), full_length=is_full_length(item))
            with open(self.log, "a") as file:
                file.write(json.dumps(entry) + "\n")          # in one write: several processes append
        return result


def is_full_length(item) -> bool:
    """Does it take longer in the exhaustive tier than in others?"""
    return item.config.getoption("exhaustive") and "exhaustive" in item.fixturenames


def name_the_test(function: str) -> None:
    """To coverage, where it runs (tests/coverage.ini)."""
    coverage = sys.modules.get("coverage")
    if coverage and (measured := coverage.Coverage.current()):
        os.environ["TEST_FUNCTION"] = function     # read by processes that the test starts
        measured.switch_context(function)


class Budget:
    """Starts no slow test that would end after the budget, at the speed that this machine has shown so far."""

    def __init__(self, config):
        self.config = config
        self.seconds = config.getoption("budget")
        worker = getattr(config, "workerinput", None)
        self.start = worker["budget_start"] if worker else time.time()
        self.not_started = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["budget_start"] = self.start

    def fits(self, item) -> bool:
        if item.nodeid not in self.config.slow_ids:
            return True
        costs = self.config.pluginmanager.get_plugin("costs")
        slowness = max(1.0, costs.seconds / costs.expected) if costs.expected > 20 else 1.0
        cost = tiers.cost_of(COSTS, item.nodeid)
        seconds = slowness * (tiers.UNKNOWN_SECONDS if cost is None else cost)
        return time.time() + seconds < self.start + self.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if self.fits(item):
            return None                            # pytest's own goes on
        item.was_started = False
        self.not_started += 1
        item.session._setupstate.teardown_exact(nextitem)      # else fixtures of this test's module would stay
        return True

    def pytest_sessionfinish(self):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["not_started"] = self.not_started

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.not_started += getattr(node, "workeroutput", {}).get("not_started", 0)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(f"{self.not_started} slow tests were not started: the budget is {self.seconds:.0f} s")
