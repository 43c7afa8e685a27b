"""Run the core tests with other versions of torch, transformers and huggingface_hub.

Each version and its dependencies are installed into a folder under .cache/versions that precedes
.venv's packages, and removed after the run: torch's CUDA build takes several GB.

    python scripts/dev/versions.py                 # run all, print a table
    python scripts/dev/versions.py --only "torch 2.11.0" --keep
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache/versions"
# Name -> pins. The oldest transformers is the first with all classes of tests/tiny.py; the oldest
# huggingface_hub is the oldest that it supports.
VERSIONS = {
    "as pinned": [],
    "torch 2.11.0": ["torch==2.11.0"],
    "torch 2.12.0": ["torch==2.12.0"],
    "transformers 5.15.1": ["transformers==5.15.1"],
    "transformers 5.24.0": ["transformers==5.24.0"],
    "huggingface_hub 1.5.0": ["huggingface_hub==1.5.0", "transformers==5.15.1"],
}
PACKAGES = ("torch", "transformers", "huggingface_hub")
# Models, sampling, CPU kernels, quantized linears, file formats and the hub (quick tier).
TESTS = ("test_model.py", "test_sampling.py", "test_cpu_ops.py", "test_quantize.py",
         "test_formats.py", "test_hub.py")
TIMEOUT = 900


def folder_of(name: str) -> Path:
    return FOLDER / name.replace(" ", "-")


def install(name: str, pins: list[str]) -> Path:
    """Install pins -> their folder. ValueError if pip fails."""
    folder = folder_of(name)
    if not pins or folder.exists():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    process = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--target", str(partial), *pins], stderr=subprocess.PIPE, text=True)
    if process.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(f"pip: {process.stderr.strip().splitlines()[-1]}")
    partial.rename(folder)
    return folder


def run(folder: Path) -> tuple[str, str]:
    """Run the tests -> the imported versions, pytest's summary."""
    env = dict(os.environ, PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
    code = f"import {', '.join(PACKAGES)}; print({', '.join(f'{n}.__version__' for n in PACKAGES)})"
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    if first.returncode:
        return "–", first.stderr.strip().splitlines()[-1]
    try:
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", *(f"tests/{name}" for name in TESTS)],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return first.stdout.strip(), f"timeout after {TIMEOUT} seconds"
    print(tests.stdout, file=sys.stderr)
    last = re.findall(r"^\d+ (?:passed|failed).*", tests.stdout, re.M)
    return first.stdout.strip(), last[-1] if last else f"exit status {tests.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=VERSIONS, help="test only this one")
    parser.add_argument("--keep", action="store_true", help="keep the folder for another run")
    args = parser.parse_args()
    print(f"| what | {', '.join(PACKAGES)} | tests | seconds |\n|---|---|---|---|", flush=True)
    status = 0
    for name in [args.only] if args.only else VERSIONS:
        start = time.perf_counter()
        try:
            versions, outcome = run(install(name, VERSIONS[name]))
        except ValueError as e:
            versions, outcome = "–", str(e)
        if not args.keep:
            shutil.rmtree(folder_of(name), ignore_errors=True)
        seconds = time.perf_counter() - start
        print(f"| {name} | {versions} | {outcome} | {seconds:.0f} |", flush=True)
        status |= not re.match(r"\d+ passed", outcome)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
