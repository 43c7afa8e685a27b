"""Which functions of the core and of layers/ the kernels stand for, by their source.

After an edit of one of them a compiled model runs as it is read, uncompiled, until the kernels do
the same again and this command says so: it runs the kernels' tests with the new digests and keeps
them only if all pass.

    python scripts/known_sources.py                # what differs from kernels/known_sources.json
    python scripts/known_sources.py --write
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli.common import Parser, guarded
from kernels import as_read, linear

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("model", "sampling", *sorted(f"layers.{p.stem}" for p in ROOT.glob("layers/*.py")
                                        if p.stem != "__init__"))
TESTS = ("tests/test_cpu_ops.py", "tests/test_what_is_read_runs.py")


def current() -> dict[str, dict[str, str]]:
    quantized = *linear.EXCHANGED, *linear.stands_for()
    reached = as_read.all_of_core(map(importlib.import_module, MODULES), quantized)
    return dict(names=dict(sorted(reached.names.items())),
                sources=dict(sorted(reached.sources.items())))


def differing() -> list[str]:
    """The names whose entry is not in the file, or another one."""
    now = current()
    return [name for part in now for name in sorted(now[part].keys() | as_read.known()[part].keys())
            if now[part].get(name) != as_read.known()[part].get(name)]


def write() -> int:
    """-> the exit status of the tests; where they fail the file is as it was."""
    before = as_read.FILE.read_bytes() if as_read.FILE.exists() else None
    as_read.FILE.write_text(json.dumps(current(), indent=1) + "\n")
    status = 1
    try:
        status = subprocess.run([sys.executable, "-m", "pytest", "-q", "--all", *TESTS],
                                cwd=ROOT).returncode
    finally:
        if status and before is not None:
            as_read.FILE.write_bytes(before)
    return status


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--write", action="store_true", help="test the kernels, then write the digests")
    args = p.parse_args(argv)
    if args.write:
        return write()
    for name in differing():
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
