"""Selects the engine and the dtype for a device, and reports its memory.

    device = generate.pick_device("auto"); engine = pick_engine(device, None, compiles=True)
"""

import os
import re
import shutil
import sys
from pathlib import Path

import torch

import generate
from generate import log, peak_memory
from gpt_faster.kernels.torch_internals import has_bf16
from gpt_faster.layers.embedding import embed_scale


def pick_engine(device: torch.device, name: str | None, compiles: bool) -> str:
    """name: --engine; compiles: --compile or --compile_prefill -> one of ENGINES.

    ValueError if they contradict each other or the device.
    """
    engine = name or ("compile" if compiles else "kv_cache")
    if compiles and engine != "compile":
        raise ValueError(f"--engine {engine} contradicts --compile")
    if engine == "cuda_graph" and device.type != "cuda":
        raise ValueError(f"--engine cuda_graph needs an NVIDIA GPU, the device is {device}: "
                         "use --compile")
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if engine == "compile" and device.type == "cpu" and not compiler:
        log("note: --compile needs a C++ compiler, none found: running eager (apt-get install g++)")
        return "kv_cache"
    return engine


def pick_dtype(name: str, device: torch.device, cfg, many_rows: bool = False) -> torch.dtype:
    """generate.pick_dtype(), but float32 instead of float16 for models that overflow float16.

    many_rows: also float32 on a CPU without native bfloat16, where matmuls are five times slower.
    """
    if many_rows and name == "auto" and device.type == "cpu" and not has_bf16():
        return torch.float32
    dtype = generate.pick_dtype(name, device)
    # Gemma 2 and 3 give NaN in float16
    overflows = getattr(cfg.block, "post_norm", False) and embed_scale(cfg) != 1
    if name == "float16" and overflows:
        raise ValueError("this model's activations exceed float16's range: use --dtype bfloat16 "
                         "or float32")
    return torch.float32 if dtype == torch.float16 and overflows else dtype


def free_memory(device: torch.device) -> float:
    """Free bytes: the GPU's, or Linux's MemAvailable; infinite if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    match = meminfo.exists() and re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())
    return int(match[1]) * 1024 if match else float("inf")


def reset_peak_memory(device: torch.device) -> int:
    """Reset the peak memory counter (CUDA and Linux only) -> bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory(device)
