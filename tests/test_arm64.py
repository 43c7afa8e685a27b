"""The C++ kernels as on a 64-bit ARM CPU, by qemu: every operation, and every family's layers (scripts/dev/arm64.sh)."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT

TOOLS = "qemu-aarch64", "clang++-19", "aarch64-linux-gnu-g++", "gcc"
# With products of bytes and of bfloat16, and without.
CPUS = {"armv8.2-a+dotprod+i8mm+bf16": "not other_cpus and not any_cpu", "armv8-a": "products or rows or weights"}


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cpu", CPUS)
def test_operations_on_arm(cpu, exhaustive):
    if not exhaustive:
        pytest.skip("ten minutes: in the exhaustive tier")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"needs {', '.join(missing)}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    command = ["bash", ROOT / "scripts/dev/arm64.sh", "--all", "--kernels", "-q", "-k", CPUS[cpu], "-p", "no:cacheprovider",
               ROOT / "tests/test_cpu_ops.py", ROOT / "tests/test_cpu_cache.py"]
    result = subprocess.run(command, env=environment | {"ARM64": cpu}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
