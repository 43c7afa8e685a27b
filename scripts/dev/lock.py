"""Writes scripts/locks/: every package that requirements*.txt bring, with the hashes of its files.

A lock holds for all systems and for the Python versions that setup.sh takes; each begins where the
one before ends, as the requirements do. torch is not in them, since each index builds its own, nor
is what only its CUDA build needs, which torch itself pins; nor pip, which is there already.
Installing needs pip alone; this needs uv (pip install uv==0.13.9), and whatever index uv is set to.

    python scripts/dev/lock.py            # keeps the versions that are locked, where they still do
    python scripts/dev/lock.py --upgrade  # takes the newest that the requirements admit
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "scripts/locks"
# Requirements and the oldest Python that has their packages.
LAYERS = {"requirements": "3.10", "requirements-serve": "3.11", "requirements-dev": "3.11"}
NOT_LOCKED = re.compile(r"(pip|torch|triton)$|nvidia-|cuda-")


def read_lock(text: str) -> dict[str, list[str]]:
    """Name of each package -> its entries: a pin with its marker, and lines of hashes."""
    entries = {}
    for entry in re.findall(r"^\w\S*==(?:.*\\\n)*.*\n", text, re.M):
        entries.setdefault(entry.split("==")[0], []).append(entry)
    return entries


def resolve(name: str, constraints: Path, upgrade: bool) -> str:
    """What uv finds for NAME.txt. ValueError if it finds nothing."""
    uv = shutil.which("uv")
    if not uv:
        raise ValueError("no uv: pip install uv==0.13.9")
    before = constraints.with_name(f"{name}.lock")
    if not upgrade and (LOCKS / f"{name}.lock").exists():
        before.write_text((LOCKS / f"{name}.lock").read_text())
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header",
               "--no-annotate", "--python-version", LAYERS[name], "--constraints", str(constraints),
               "--output-file", str(before), str(ROOT / f"{name}.txt")]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        raise ValueError(f"uv cannot resolve {name}.txt:\n{process.stderr.strip()}")
    return before.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="also what is locked already")
    args = parser.parse_args()
    LOCKS.mkdir(exist_ok=True)
    texts = {}
    locked = {}
    below = ""                                     # the layer that this one begins with
    with tempfile.TemporaryDirectory() as directory:
        constraints = Path(directory) / "constraints.txt"
        for name in LAYERS:
            constraints.write_text("".join(e for entries in locked.values() for e in entries))
            try:
                found = read_lock(resolve(name, constraints, args.upgrade))
            except ValueError as e:
                print(f"error: {e}", file=sys.stderr)
                return 2
            # One that is there already comes again if more systems need it now: its marker differs.
            new = [entry for package, entries in found.items() if not NOT_LOCKED.match(package)
                   for entry in entries if entry not in locked.get(package, ())]
            texts[name] = f"# Made by scripts/dev/lock.py of {name}.txt\n{below}" + "".join(new)
            below = f"-r {name}.lock\n"
            locked |= found
    for name, text in texts.items():
        (LOCKS / f"{name}.lock").write_text(text)
        print(f"scripts/locks/{name}.lock: {len(read_lock(text))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
