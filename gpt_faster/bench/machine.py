"""Describe the machine: memory bandwidth, processor, package versions, commit.

It knows no model and no engine.

    read_bandwidth(torch.device("cpu"))            # GB/s
"""

import platform
import re
import subprocess
import time
from datetime import date
from functools import cache
from pathlib import Path

import torch

from gpt_faster.kernels import torch_internals

ROOT = Path(__file__).resolve().parents[2]
N_FLOATS = 1 << 28                                 # 1 GB, far beyond every cache


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@cache
def _cpu_buffer() -> torch.Tensor:
    """Allocated once: page faults for 1 GB take 2 s on a virtual machine."""
    return torch.ones(N_FLOATS)


def read_bandwidth(device: torch.device) -> float:
    """Memory read bandwidth in GB/s (1e9 bytes): the best of 7 sums over 1 GB."""
    x = _cpu_buffer() if device.type == "cpu" else torch.ones(N_FLOATS, device=device)
    seconds = []
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        x.sum()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds) / 1e9


def run_command(*command: str) -> str:
    """A program's stdout, or "" if it is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def commit() -> str:
    """The checked-out commit, with "-dirty" if files other than results differ."""
    name = run_command("git", "describe", "--always")
    changes = run_command("git", "status", "--short", "-uno", ".", ":!benchmarks")
    return f"{name}-dirty" if changes else name


def cpu_capability() -> str:
    """The widest instruction set: AVX2, AVX512, AMX, …"""
    has_matrices = "amx_tile" in (torch_internals.cpu_flags() or "").split()
    return "AMX" if has_matrices else torch.backends.cpu.get_cpu_capability()


def describe_machine(device: torch.device) -> dict:
    """The machine-dependent fields of a result."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        clocks = run_command("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit",
                             "--format=csv,noheader")
    else:
        path = Path("/proc/cpuinfo")
        text = path.read_text() if path.exists() else ""
        fields = dict(re.findall(r"^(model name|cpu MHz)\s*: (.*)$", text, re.M))
        name = fields.get("model name", platform.processor())
        clocks = f"{fields.get('cpu MHz', '?')} MHz"
    return dict(device=str(device), machine=name, clocks=clocks, threads=torch.get_num_threads(),
                capability=cpu_capability(),
                versions=dict(torch=torch.__version__, python=platform.python_version()),
                date=date.today().isoformat(), commit=commit())
