"""Puts small faults into the product, one at a time, runs the tests that should see each, and says which survive.

    python tests/mutants.py                                # the named ones, all rows of mutant_rows.py
    python tests/mutants.py mask top-p                     # those whose names contain one of these
    python tests/mutants.py --random 40 --seed 1           # mechanical ones (mechanical.py), drawn from every room
    python tests/mutants.py --tree ../other --json r.json  # of another checkout, whose tests are run

A mutant lives in a copy of the tree, never in the tree. One process imports torch, transformers and pytest, and nothing
of ours; it forks for each mutant, which saves each the eight seconds of these imports. The child's caches are empty but
for the operations that were compiled of unchanged sources. A row whose old text is not in its file exactly once ends the
command with status 2 before anything runs; status 1: a mutant survived.
"""

import argparse
import ast
import contextlib
import ctypes
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mechanical import random_mutants  # noqa: E402
from mutant_rows import EQUIVALENT, NAMED, SHARED_IMPORTS, Mutant, room_tests  # noqa: E402

CACHE = ".cache/tests"                                     # conftest.py's, below the copy
PR_SET_CHILD_SUBREAPER = 36                                # <linux/prctl.h>


class Outcome(NamedTuple):
    """noticed_by: the first test that failed; None: none did. how: "test", "hang" or "collection"."""

    noticed_by: str | None
    how: str | None
    why: str
    cpu_seconds: float


# ---- The copy -----------------------------------------------------------------------------------

class Copy:
    """A copy of a tree's files, one of which is changed for as long as a mutant lives."""

    def __init__(self, tree: Path, folder: Path):
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=tree,
                                capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (tree / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, folder / name)
        for name in (".venv", "checkpoints"):
            if (tree / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to((tree / name).resolve())
        self.libraries = folder / ".cache/libraries"
        self.libraries.mkdir(parents=True)
        self.keep_libraries(tree / CACHE)

    def keep_libraries(self, cache: Path) -> None:
        """What was compiled of unchanged sources; the sources are part of its name."""
        for library in cache.glob("cpu_ops-*.so"):
            shutil.copy2(library, self.libraries)

    def clear_caches(self) -> None:
        shutil.rmtree(self.folder / CACHE, ignore_errors=True)
        shutil.copytree(self.libraries, self.folder / CACHE)

    @contextlib.contextmanager
    def changed(self, file: str, text: str):
        path = self.folder / file
        before = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)


@cache
def functions_of(path: Path) -> set[str]:
    """The names of a file's tests, read and not run."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def is_there(argument: str, root: Path) -> bool:
    """Does the tree have the test that an argument of pytest names?"""
    file, _, test = argument.partition("::")
    path = root / file
    return path.is_file() and (not test or test.partition("[")[0] in functions_of(path))


def existing(arguments: str, root: Path) -> list[str]:
    """Of a row's arguments those that this tree has; [] where no test is left."""
    kept, any_test = [], False
    words = iter(shlex.split(arguments))
    for word in words:
        if word in ("-k", "--deselect"):
            kept += [word, next(words)]
        elif word.startswith("-"):
            kept.append(word)
        elif is_there(word, root):
            kept.append(word)
            any_test = True
    return kept if any_test else []


# ---- A run --------------------------------------------------------------------------------------

class Reporter:
    """A plugin of pytest that writes each test's beginning and the first failure, a line of JSON each."""

    def __init__(self, path: Path, any_tier: bool):
        self.file, self.any_tier = open(path, "w"), any_tier

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        """any_tier: conftest.py leaves none out."""
        named = list(items)
        yield
        if self.any_tier:
            items[:] = named

    def write(self, **entry) -> None:
        print(json.dumps(entry), file=self.file, flush=True)

    def pytest_runtest_logstart(self, nodeid, location):
        self.write(began=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.write(failed=report.nodeid, how="test", why=reason(report))

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(failed=report.nodeid or "collection", how="collection", why=reason(report))


def reason(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines() or [""]
    return lines[0 if crash else -1][:200]


def import_what_is_shared() -> None:
    """What every mutant needs and no mutant changes. No operation runs here: threads do not survive a fork."""
    for name in SHARED_IMPORTS:
        with contextlib.suppress(ImportError):
            __import__(name)


def in_child(folder: Path, arguments: list[str], report: Path, any_tier: bool) -> None:
    """Runs pytest in the copy and ends the process."""
    status = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(folder / ".cache/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((null, log, log)):
            os.dup2(source, target)
        os.chdir(folder)
        sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != HERE]
        for name in ("mutants", "mutant_rows", "mechanical"):
            sys.modules.pop(name, None)
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments], plugins=[Reporter(report, any_tier)])
    finally:
        os._exit(int(status))


def end_children(pid: int | None = None) -> None:
    """Ends what a run has left, which has become this process's own children."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    while True:
        mine = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    mine.append(int(stat.parent.name))
        if not mine:
            return
        for child in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def run(copy: Copy, arguments: list[str], test_seconds: float, any_tier: bool = False) -> Outcome:
    """-> the first failure of these tests; one that takes longer than test_seconds of wall-clock time hangs.

    any_tier: of those that the quick tier leaves out, too.
    """
    copy.clear_caches()
    report = copy.folder / ".cache/report"
    report.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        in_child(copy.folder, arguments, report, any_tier)
    hangs, status = False, 0
    try:
        size, since = -1, time.monotonic()
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            now = report.stat().st_size if report.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > test_seconds:
                hangs = True
                break
            time.sleep(0.1)
    finally:
        end_children(pid)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    entries = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    for entry in entries:
        if "failed" in entry:
            return Outcome(entry["failed"], entry["how"], entry["why"], seconds)
    began = entries[-1]["began"] if entries else "the beginning"
    if hangs:
        return Outcome(began, "hang", f"no end within {test_seconds:g} s", seconds)
    if os.WIFSIGNALED(status):
        return Outcome(began, "crash", f"signal {os.WTERMSIG(status)}", seconds)
    code = os.WEXITSTATUS(status)
    if code == 5:                                          # all of them belong to another tier
        return Outcome(None, None, "no test was run", seconds)
    if code not in (0, 1) or not entries:
        log = (copy.folder / ".cache/log").read_text()[-1500:]
        raise SystemExit(f"mutants.py: error: pytest ended with {code} for {shlex.join(arguments)}:\n{log}")
    return Outcome(None, None, "", seconds)


# ---- Mutants ------------------------------------------------------------------------------------

def text_of(mutant: Mutant, root: Path) -> str | None:
    """The changed file; None where its old text is not in it exactly once."""
    path = root / mutant.file
    text = path.read_text() if path.is_file() else ""
    if mutant.place is not None:                           # a mechanical one's, made of this very text
        begin, end = mutant.place
        return text[:begin] + mutant.new + text[end:]
    return text.replace(mutant.old, mutant.new) if text.count(mutant.old) == 1 else None


def judge(mutant: Mutant, copy: Copy, args) -> dict:
    """Runs its own tests, then, if it survives these, those of its room -> a row of the results."""
    row = dict(name=mutant.name, file=mutant.file, old=mutant.old, new=mutant.new, status="survived", noticed_by=None,
               why="", cpu_seconds=0.0)
    text = text_of(mutant, copy.folder)
    if text is None:
        return row | dict(status="no such code")
    if mutant.name in EQUIVALENT:
        return row | dict(status="same program", why=EQUIVALENT[mutant.name])
    mutant_free = (copy.folder / mutant.file).read_text()
    with copy.changed(mutant.file, text):
        lists = [mutant.tests, room_tests(mutant.file)]
        if args.narrow and existing(mutant.tests, copy.folder):
            lists.pop()
        for wanted in filter(None, lists):
            arguments = existing(wanted, copy.folder)
            while arguments:
                outcome = run(copy, arguments, args.test_seconds, any_tier=wanted == mutant.tests)
                row["cpu_seconds"] += outcome.cpu_seconds
                if not outcome.noticed_by:
                    row["why"] = row["why"] or outcome.why
                    break
                row |= dict(status=outcome.how, noticed_by=outcome.noticed_by, why=outcome.why)
                with copy.changed(mutant.file, mutant_free):
                    if outcome.how != "test" or wanted == mutant.tests or passes(outcome.noticed_by, copy, args.test_seconds):
                        return row
                row |= dict(status="survived", noticed_by=None, why=f"{outcome.noticed_by} fails without it, too")
                arguments += ["--deselect", outcome.noticed_by]
    return row


_passes = {}                                               # a test -> does it pass without a mutant?


def passes(test: str, copy: Copy, test_seconds: float) -> bool:
    """Of an unchanged copy."""
    if test not in _passes:
        _passes[test] = run(copy, [test], test_seconds, any_tier=True).noticed_by is None
    return _passes[test]


def check(mutants: list[Mutant], copy: Copy, args) -> int:
    """Runs the tests of these mutants without any: one that fails then proves nothing. -> how many fail"""
    wanted = dict.fromkeys(arguments for m in mutants for arguments in (m.tests, room_tests(m.file)) if arguments)
    n_failed = 0
    for arguments in wanted:
        any_tier = any(arguments == m.tests for m in mutants)
        outcome = run(copy, existing(arguments, copy.folder), args.test_seconds, any_tier)
        said = f"FAILS: {outcome.noticed_by}: {outcome.why}" if outcome.noticed_by else "passes"
        n_failed += bool(outcome.noticed_by)
        print(f"{outcome.cpu_seconds:7.1f}  {said}  {arguments}", flush=True)
    return n_failed


def show(row: dict) -> None:
    what = {"survived": f"SURVIVED ({row['why']})" if row["why"] else "SURVIVED", "no such code": "(no such code in this tree)", "same program": "the same program: "
            f"{row['why']}"}.get(row["status"])
    how = {"hang": "hang: ", "crash": "crash: ", "collection": "at import: "}.get(row["status"], "")
    print(f"{row['name']:44} {row['cpu_seconds']:7.1f}  {what or how + row['noticed_by']}", flush=True)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="parts of names, or =NAME= for one; none: all named ones")
    p.add_argument("--random", type=int, default=0, metavar="N", help="N mechanical ones instead")
    p.add_argument("--seed", type=int, default=1, help="of --random")
    p.add_argument("--rooms", help="of --random: only these, as core,layers,formats")
    p.add_argument("--tree", type=Path, default=HERE.parent, help="the checkout that is copied")
    p.add_argument("--json", type=Path, metavar="FILE", help="the results, written after each mutant")
    p.add_argument("--check", action="store_true", help="run the tests without a mutant, and no mutant")
    p.add_argument("--narrow", action="store_true", help="a row's own tests only, where it has some")
    p.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    p.add_argument("--test_seconds", type=float, default=300, help="a test that takes longer hangs (wall-clock time)")
    return p.parse_args()


def main() -> int:
    args = parse()
    if args.random:
        mutants = random_mutants(args.tree, args.random, args.seed, args.rooms)
    else:
        mutants = [m for m in NAMED if not args.names or any(name in f"={m.name}=" for name in args.names)]
    if args.list:
        for m in mutants:
            print(f"{m.name}\n    {m.old.strip()!r}\n    {m.new.strip()!r}")
        return 0
    is_own = args.tree.resolve() == HERE.parent            # another commit may lack what a row changes
    lost = [m.name for m in mutants if is_own and text_of(m, args.tree) is None]
    if lost:
        print(f"mutants.py: error: the old text is not exactly once in its file: {', '.join(lost)}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):         # ends the mutant and removes the copy, in the background too
        signal.signal(number, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false",
                      PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True                         # a changed file may have the size and the second of the other
    import_what_is_shared()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(args.tree.resolve(), Path(folder))
        run(copy, ["tests/test_cpu_ops.py::test_inputs_that_fill_no_group"], 600)      # compiles the operations
        copy.keep_libraries(copy.folder / CACHE)
        if args.check:
            return min(1, check(mutants, copy, args))
        rows = []
        for mutant in mutants:
            rows.append(judge(mutant, copy, args))
            show(rows[-1])
            if args.json:
                args.json.write_text(json.dumps(dict(rows=rows), indent=1) + "\n")
    survived = [row["name"] for row in rows if row["status"] == "survived"]
    print(f"{len(rows)} mutants, {len(survived)} survived{': ' * bool(survived)}{', '.join(survived)}")
    return min(1, len(survived))


if __name__ == "__main__":
    sys.exit(main())
