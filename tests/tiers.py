"""Which tests run, in what order, and until when: the three tiers, as conftest.py and this command see them.

    bash scripts/test.sh                 # quick: cheap tests alone, 4 to 5 minutes on 2 cores
    bash scripts/test.sh --all           # quick, then slow tests until 15 minutes of wall-clock time are over
    bash scripts/test.sh --exhaustive    # everything at full length, in shards; the record is tests/exhaustive.json
    bash scripts/test.sh --measure       # runs the tests that have no measured cost yet, and adds theirs
    bash scripts/test.sh --exhaustive --coverage    # also tests/reach.json and docs/coverage.md, by coverage.py

What a test costs is in tests/costs.json (seconds of one process on 2 cores); a test that is not there,
new or renamed, counts as slow. Slow tests come in this order: those that reach a file changed since the
commit at which the exhaustive tier last passed (tests/reach.json, recorded with coverage.py), then the
group of this run's seed, then the other groups. There are ten groups, so ten runs with successive seeds
start every slow test. A seed that is not given is the last run's plus one.

A slow test that fails, and fails at the parent commit too, is named and does not fail the run.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = ROOT / "tests/costs.json"
REACH = ROOT / "tests/reach.json"
RECORD = ROOT / "tests/exhaustive.json"
COVERAGE = ROOT / "tests/coverage.ini"
COVERAGE_PAGE = ROOT / "docs/coverage.md"
LAST_SEED = ROOT / ".cache/tests/seed"
QUICK_SECONDS = 0.6                                # a test that costs more is slow
BUDGET = 14 * 60                                   # of --all, in seconds; a minute is left for start and end
GROUPS = 10
SHARDS = 3
UNKNOWN_SECONDS = 5.0                              # assumed of a test without a measured cost


# ---- What a test costs --------------------------------------------------------------------------

def split_id(nodeid: str) -> tuple[str, str]:
    """tests/test_x.py::test_y[a-b] -> test_x.py::test_y, a-b"""
    function, _, parameters = nodeid.removeprefix("tests/").partition("[")
    return function, parameters.removesuffix("]")


def read_costs() -> dict[str, dict[str, float]]:
    """function -> parameters -> seconds. On disk seconds come first, since many tests share them."""
    if not COSTS.exists():
        return {}
    stored = json.loads(COSTS.read_text())
    return {function: {name: float(seconds) for seconds, names in of.items() for name in names}
            for function, of in stored.items()}


def write_costs(costs: dict[str, dict[str, float]]) -> None:
    """A line for each function. Costs are rounded to a tenth, and above ten to a second."""
    lines = []
    for function in sorted(costs):
        grouped = {}
        for name, seconds in sorted(costs[function].items()):
            rounded = round(seconds, 1) if seconds < 10 else round(seconds)
            grouped.setdefault(str(rounded), []).append(name)
        grouped = dict(sorted(grouped.items(), key=lambda item: float(item[0])))
        lines.append(f"{json.dumps(function)}: {json.dumps(grouped, ensure_ascii=False)}")
    COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def cost_of(costs: dict, nodeid: str) -> float | None:
    """Seconds, or None: not measured yet."""
    function, parameters = split_id(nodeid)
    return costs.get(function, {}).get(parameters)


# ---- Which tests, in which order ----------------------------------------------------------------

def group_of(nodeid: str) -> int:
    """By the name alone, so that a test stays in its group when others come and go."""
    return zlib.crc32(nodeid.removeprefix("tests/").encode()) % GROUPS


def shard_of(nodeid: str) -> int:
    """1 to SHARDS. All parameters of a function are in one shard."""
    return zlib.crc32(split_id(nodeid)[0].encode()) % SHARDS + 1


def slow_order(ids: list[str], costs: dict, affected: set[str], seed: int, budget: float) -> list[str]:
    """All slow ids, the most wanted first.

    affected: functions that reach a changed file. They may take what the budget leaves beside this
    seed's group, so that the rotation does not stand still while a large change is being worked on.
    """
    def seconds(nodeid):
        measured = cost_of(costs, nodeid)
        return UNKNOWN_SECONDS if measured is None else measured

    mine = [nodeid for nodeid in ids if group_of(nodeid) == seed % GROUPS]
    room = budget - sum(map(seconds, mine))
    first, later = [], []
    for nodeid in ids:
        if group_of(nodeid) == seed % GROUPS:
            continue
        new = cost_of(costs, nodeid) is None
        if (new or split_id(nodeid)[0] in affected) and seconds(nodeid) <= room:
            room -= seconds(nodeid)
            first.append(nodeid)
        else:
            later.append(nodeid)
    later.sort(key=lambda nodeid: (group_of(nodeid) - seed) % GROUPS)      # stable: file order in a group
    return first + mine + later


def for_workers(quick: list, slow: list, n_worker: int) -> list:
    """One list that xdist's worksteal cuts into n_worker equal parts: each begins with quick tests."""
    parts = []
    for i in range(n_worker):
        start, end = i * len(quick) // n_worker, (i + 1) * len(quick) // n_worker
        parts += quick[start:end] + slow[i::n_worker]
    return parts


# ---- What a change reaches ----------------------------------------------------------------------

def git(*arguments: str) -> str:
    """What git prints; "" where it fails, in a copy without history for example."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def base_commit() -> str:
    """The commit that this tree is compared with: where everything last passed, else the parent."""
    record = read_record()
    commits = {git("rev-parse", "--verify", "--quiet", entry["commit"]) for entry in record.values()}
    if len(record) == SHARDS and len(commits) == 1:
        commit = commits.pop()
        if commit and git("merge-base", commit, "HEAD") == commit:
            return commit
    return parent_commit()


def parent_commit() -> str:
    """HEAD where the tree has changes that are not committed, else the commit before it."""
    return git("rev-parse", "HEAD" if is_changed() else "HEAD^")


def is_changed() -> bool:
    """Is anything not committed? What the tiers themselves write does not count."""
    written = [f":!{path.relative_to(ROOT)}" for path in (COSTS, REACH, RECORD, COVERAGE_PAGE)]
    return bool(git("status", "--porcelain", "--", ".", *written))


def changed_files(base: str) -> set[str]:
    """Since base, committed or not; new files too."""
    listed = git("diff", "--name-only", base) + "\n" + git("ls-files", "--others", "--exclude-standard")
    return set(listed.split())


def affected_functions(changed: set[str]) -> set[str]:
    """Test functions that executed a line of a changed file when coverage was recorded.

    A changed test file counts whole; a file of C++ counts as the Python that compiles it.
    """
    reach = json.loads(REACH.read_text()) if REACH.exists() else {"files": [], "functions": {}}
    if any(name.startswith("gpt_faster/kernels/cpu/") and name.endswith((".h", ".cpp")) for name in changed):
        changed = changed | {"gpt_faster/kernels/cpu/native.py"}
    wanted = {i for i, name in enumerate(reach["files"]) if name in changed}
    found = {function for function, files in reach["functions"].items() if wanted & set(files)}
    test_files = {name.removeprefix("tests/") for name in changed if name.startswith("tests/test_")}
    return found | {function for function in read_costs() if function.split("::")[0] in test_files}


# ---- The record of the exhaustive tier ----------------------------------------------------------

def read_record() -> dict[str, dict]:
    """shard -> commit, date, tests, minutes, machine"""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write_record(shard: int, n_test: int, seconds: float, passed: bool) -> None:
    """A shard that fails is in the record no more."""
    record = read_record()
    record.pop(str(shard), None)
    if passed:
        record[str(shard)] = {
            "commit": git("rev-parse", "--short", "HEAD"), "date": str(datetime.date.today()), "tests": n_test,
            "minutes": round(seconds / 60, 1), "machine": f"{os.cpu_count()} cores, {cpu_name()}"}
    lines = [f"{json.dumps(key)}: {json.dumps(record[key])}" for key in sorted(record)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = text.partition("model name")[2].partition(":")[2].partition("\n")[0].strip()
    return name + (", AVX-512" if "avx512f" in text else ", AVX2" if "avx2" in text else "")


# ---- The command --------------------------------------------------------------------------------

def pytest(*arguments: str, log: Path, cwd: Path = ROOT) -> tuple[int, dict[str, dict]]:
    """Run it with two processes -> its exit status, and what each test did (see conftest.py)."""
    # Paths are given with "=": behind a blank pytest takes one that exists for a folder of tests.
    n = os.environ.get("TEST_PROCESSES", "2")
    command = [sys.executable, "-m", "pytest", "-n", n, "--dist", "worksteal", f"--log-tests={log}", *arguments]
    status = subprocess.run(command, cwd=cwd).returncode
    lines = log.read_text().splitlines() if log.exists() else []
    return status, {entry["id"]: entry for entry in map(json.loads, lines)}


def next_seed() -> int:
    """One more than the last; in a clone without a last run, a number that changes from commit to commit."""
    try:
        return int(LAST_SEED.read_text()) + 1
    except (OSError, ValueError):
        return int(git("rev-list", "--count", "HEAD") or 0)


def fails_at(commit: str, ids: list[str], seconds: float) -> set[str]:
    """Those of these tests that fail in a checkout of that commit too, as far as the time allows."""
    with tempfile.TemporaryDirectory() as directory:
        tree, log = Path(directory) / "tree", Path(directory) / "log"
        if not commit or subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit],
                                        cwd=ROOT).returncode:
            return set()
        try:
            for name in (".venv", "checkpoints"):
                if (ROOT / name).exists():
                    (tree / name).symlink_to(ROOT / name)
            known = [nodeid for nodeid in ids if (tree / nodeid.split("::")[0]).exists()]
            _, done = pytest("--all", "--budget", str(seconds), *known, log=log, cwd=tree)
            return {nodeid for nodeid in ids if done.get(nodeid, {}).get("outcome") == "failed"}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT)


def run_all(args, rest: list[str], log: Path) -> int:
    seed = next_seed() if args.seed is None else args.seed
    base = base_commit()
    changed = changed_files(base)
    affected = log.with_name("affected")
    affected.write_text("\n".join(sorted(affected_functions(changed))))
    print(f"seed {seed}: --seed {seed} draws the same slow tests again; {len(changed)} files differ from "
          f"{base[:7] or 'no earlier commit'}", file=sys.stderr)
    status, done = pytest("--all", "--budget", str(args.budget), "--seed", str(seed), f"--affected={affected}",
                          *rest, log=log)
    LAST_SEED.parent.mkdir(parents=True, exist_ok=True)
    LAST_SEED.write_text(str(seed))
    failed = [nodeid for nodeid, entry in done.items() if entry["outcome"] == "failed"]
    if status != 1 or not failed or any(not done[nodeid]["slow"] for nodeid in failed):
        return status                              # all passed, a quick test failed, or pytest itself did
    parent = parent_commit()
    print(f"{len(failed)} slow tests failed: do they at {parent[:7]} too?", file=sys.stderr)
    before = fails_at(parent, failed, seconds=300)
    for nodeid in failed:
        print(f"{nodeid}: " + ("failed at the parent commit too, does not count" if nodeid in before
                               else "passed, or did not exist, at the parent commit"), file=sys.stderr)
    return 0 if before >= set(failed) else 1


def run_exhaustive(args, rest: list[str], log: Path) -> int:
    partial = bool(set(rest) - {"--kernels"}) or is_changed()
    before, costs = read_costs(), {}
    data = ROOT / ".cache/tests/coverage/data"
    if args.coverage:
        shutil.rmtree(data.parent, ignore_errors=True)
        data.parent.mkdir(parents=True)
        os.environ |= dict(COVERAGE_FILE=str(data), COVERAGE_PROCESS_START=str(COVERAGE))
    failed = 0
    for shard in [args.shard] if args.shard else range(1, SHARDS + 1):
        print(f"shard {shard} of {SHARDS}", file=sys.stderr)
        start = time.monotonic()
        log.unlink(missing_ok=True)
        status, done = pytest("--exhaustive", "--timeout", "900", "--shard", str(shard), *rest, log=log)
        failed = failed or status
        add_costs(costs, {nodeid: entry for nodeid, entry in done.items() if not entry["full_length"]})
        for nodeid, entry in done.items():         # --measure finds what they cost in the other tiers
            if entry["full_length"] and (cost := cost_of(before, nodeid)) is not None:
                add_costs(costs, {nodeid: {"seconds": cost}})
        if not partial:
            write_record(shard, len(done), time.monotonic() - start, passed=status == 0)
    if partial:
        print("not recorded: " + ("only a part ran" if rest else "there are uncommitted changes"), file=sys.stderr)
    if not partial and not args.shard:
        write_costs(costs)
    if args.coverage:
        write_coverage(data)
    return failed


def add_costs(costs: dict, done: dict[str, dict]) -> None:
    for nodeid, entry in done.items():
        function, parameters = split_id(nodeid)
        costs.setdefault(function, {})[parameters] = entry["seconds"]


def run_measure(args, rest: list[str], log: Path) -> int:
    costs = read_costs()
    status, done = pytest("--all", "--unmeasured", *rest, log=log)
    add_costs(costs, {nodeid: entry for nodeid, entry in done.items() if entry["outcome"] == "passed"})
    write_costs(costs)
    return status


def write_coverage(data: Path) -> None:
    """tests/reach.json and docs/coverage.md of what processes left beside `data`."""
    import coverage
    os.environ.pop("COVERAGE_PROCESS_START")      # this process is not measured
    measured = coverage.Coverage(data_file=str(data), config_file=str(COVERAGE))
    measured.combine(keep=True)
    of_lines = measured.get_data()
    files = [file for file in sorted(of_lines.measured_files())           # not those that tests wrote elsewhere
             if Path(file).is_relative_to(ROOT) and Path(file).exists()]
    reach = {}
    for i, file in enumerate(files):
        for function in {name for names in of_lines.contexts_by_lineno(file).values() for name in names if name}:
            reach.setdefault(function, []).append(i)
    names = [str(Path(file).relative_to(ROOT)) for file in files]
    lines = [f"{json.dumps(function)}: {json.dumps(reach[function])}" for function in sorted(reach)]
    REACH.write_text('{"files": ' + json.dumps(names) + ',\n"functions": {\n' + ",\n".join(lines) + "\n}}\n")
    rows = []
    for file, name in zip(files, names):
        _, statements, _, missing, _ = measured.analysis2(file)
        if statements:
            rows.append((name, len(statements), len(missing), ranges(missing)))
    total, missed = sum(row[1] for row in rows), sum(row[2] for row in rows)
    COVERAGE_PAGE.write_text(
        "# Coverage\n\nStatement coverage of the exhaustive tier on a CPU, with all subprocesses that tests start, written "
        "by\n`bash scripts/test.sh --exhaustive --coverage` at " + git("rev-parse", "--short", "HEAD") + f" on "
        f"{datetime.date.today()} ({os.cpu_count()} cores, {cpu_name()}). Triton kernels are\ncompiled and not counted; code "
        "for GPUs runs only in `scripts/dev/gpu_dryrun.sh` and on a GPU.\n\n"
        f"Total: {total - missed} of {total} statements, {100 * (total - missed) // total} %.\n\n"
        "| file | statements | covered | lines not covered |\n|---|---|---|---|\n" + "".join(
            f"| `{name}` | {n} | {100 * (n - missing) // n} % | {where} |\n" for name, n, missing, where in rows))


def ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> 1-3, 7"""
    found = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     epilog="Other arguments go to pytest.")
    parser.add_argument("--all", action="store_true", help="quick tests, then slow ones until the budget is over")
    parser.add_argument("--seed", type=int, help="which slow tests come first; printed by each run")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds of wall-clock time ({BUDGET})")
    parser.add_argument("--exhaustive", action="store_true", help="everything, in shards, and a record of what passed")
    parser.add_argument("--shard", type=int, choices=range(1, SHARDS + 1), help="of the exhaustive tier, this one alone")
    parser.add_argument("--measure", action="store_true", help="run tests without a measured cost, and add theirs")
    parser.add_argument("--coverage", action="store_true", help="with --exhaustive: under coverage.py; writes docs/coverage.md")
    parser.add_argument("--kernels", action="store_true",
                        help="the kernels' tests fail, and are not skipped, where the core was edited; CI's")
    args, rest = parser.parse_known_args()
    rest = [*rest, "--kernels"] if args.kernels else rest
    if (args.shard or args.coverage) and not args.exhaustive:
        parser.error("--shard and --coverage need --exhaustive")
    if args.seed is not None and not args.all:
        parser.error("--seed needs --all")
    # What tests and the commands that they start leave behind goes with the run: it would fill a small disk.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache/tests/inductor"))
    with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as directory:
        tempfile.tempdir = os.environ["TMPDIR"] = directory
        log = Path(directory) / "log"
        print(f"{shutil.disk_usage(directory).free / 1e9:.1f} GB of disk are free; a run needs about 4", file=sys.stderr)
        if args.exhaustive:
            return run_exhaustive(args, rest, log)
        if args.measure:
            return run_measure(args, rest, log)
        if args.all:
            return run_all(args, rest, log)
        return pytest(*rest, log=log)[0]


if __name__ == "__main__":
    sys.exit(main())
