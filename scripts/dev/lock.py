"""Write scripts/locks/: all packages that requirements*.txt need, with hashes.

Locks are valid for all systems and the Python versions that setup.sh supports; each includes the
previous one, like the requirements. Not locked: torch, whose builds differ between indexes, the
CUDA packages that torch pins itself, and pip. Installing needs only pip; this script needs uv (pip
install uv==0.13.9) and a configured index.

    python scripts/dev/lock.py            # keep locked versions that still satisfy the requirements
    python scripts/dev/lock.py --upgrade  # use the newest versions that satisfy them
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
# requirements file -> oldest Python that its packages support
LAYERS = {"requirements": "3.10", "requirements-serve": "3.11", "requirements-dev": "3.11"}
NOT_LOCKED = re.compile(r"(pip|torch|triton)$|nvidia-|cuda-")


def read_lock(text: str) -> dict[str, list[str]]:
    """Package name -> its entries: a pin with its marker, and hash lines."""
    entries = {}
    for entry in re.findall(r"^\w\S*==(?:.*\\\n)*.*\n", text, re.M):
        entries.setdefault(entry.split("==")[0], []).append(entry)
    return entries


def resolve(name: str, constraints: Path, upgrade: bool) -> str:
    """Resolve NAME.txt with uv -> the lock's text. ValueError if that fails."""
    uv = shutil.which("uv")
    if not uv:
        raise ValueError("no uv: pip install uv==0.13.9")
    output = constraints.with_name(f"{name}.lock")
    if not upgrade and (LOCKS / f"{name}.lock").exists():
        output.write_text((LOCKS / f"{name}.lock").read_text())
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header",
               "--no-annotate", "--python-version", LAYERS[name], "--constraints", str(constraints),
               "--output-file", str(output), str(ROOT / f"{name}.txt")]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        raise ValueError(f"uv cannot resolve {name}.txt:\n{process.stderr.strip()}")
    return output.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true",
                        help="upgrade packages that are already locked")
    args = parser.parse_args()
    LOCKS.mkdir(exist_ok=True)
    texts = {}
    locked = {}
    include_line = ""                              # includes the previous lock
    with tempfile.TemporaryDirectory() as directory:
        constraints = Path(directory) / "constraints.txt"
        for name in LAYERS:
            constraints.write_text("".join(e for entries in locked.values() for e in entries))
            try:
                entries_of = read_lock(resolve(name, constraints, args.upgrade))
            except ValueError as e:
                print(f"error: {e}", file=sys.stderr)
                return 2
            # A package may repeat with another marker if more systems need it now.
            new = [entry for package, entries in entries_of.items() if not NOT_LOCKED.match(package)
                   for entry in entries if entry not in locked.get(package, ())]
            header = f"# Made by scripts/dev/lock.py of {name}.txt\n{include_line}"
            texts[name] = header + "".join(new)
            include_line = f"-r {name}.lock\n"
            locked |= entries_of
    for name, text in texts.items():
        (LOCKS / f"{name}.lock").write_text(text)
        print(f"scripts/locks/{name}.lock: {len(read_lock(text))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
