"""Do our kernels compile for an AMD GPU (gfx942, MI300)? Triton's target only; nothing runs.

The launches are sm_80's: as on an AMD GPU, none begins while the one before it ends.

    python scripts/dev/gpu_dryrun.py --only amd
"""

import re

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dry_run import device
from gpt_faster.kernels.cuda import (
    matvec,
    products,
    triton_attention,
    triton_matvec,
    triton_prompt,
    triton_quantized,
)
from gpt_faster.kernels.cuda.cached_attention import scales_and_turns
from gpt_faster.layers.quantized_cache import QuantizedCache
from model import KVCache

MOST_SHARED = 64 << 10                             # bytes of a program


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def launch_each() -> None:
    """Products of 8, 4 and no bits, a prompt's too, and attention, at Llama-3.1-8B's shapes."""
    x, norm = empty(1, 4096), empty(4096, dtype=torch.float32)
    int8 = empty(6144, 4096, dtype=torch.int8), empty(6144)
    int4 = empty(6144, 2048, dtype=torch.uint8), empty(6144, 128, 2)
    for weights in ((empty(6144, 4096), None), int8, int4):
        matvec.matvec(x, *weights, norm=norm, eps=1e-5)
    for weights in (int8, int4):
        for rows in (16, 32, 64, 128, 129):        # the last ones are written out
            products.product(empty(rows, 4096), *weights)
    shape, angles = (1, 8, 4096, 128), empty(1, 64, dtype=torch.float32)
    for cache in (KVCache(shape, torch.bfloat16, "cuda"),
                  QuantizedCache(shape, torch.bfloat16, "cuda", ("int8", "int4")),
                  QuantizedCache(shape, torch.bfloat16, "cuda", ("fp8", "fp8"))):
        triton_attention.launch(
            empty(1, 1, 48 * 128), None, None, angles, angles, empty(1, 4096, dtype=torch.bool),
            empty(1, dtype=torch.int64), cache.k, cache.v, None, empty(256, dtype=torch.int32),
            0.1, None, 1e-5, False, *scales_and_turns(cache))


def main() -> list[tuple[str, bool, str]]:
    device.install(keep_arguments=True)
    triton_matvec.WARP, triton_attention.MIN_QUERIES = 64, 16
    triton_prompt.STAGES = 2
    triton_quantized.has_mma = lambda device: False
    launch_each()
    hollow = driver.active
    hollow.__class__.get_current_target = lambda self: GPUTarget("hip", "gfx942", 64)
    lines = []
    for i, launch in enumerate(device.LAUNCHES):
        if not launch.arguments:
            continue
        try:
            kernel = device.compile_launch(launch)
            spilled = int(re.search(r"vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"])[1])
            ok = not spilled and kernel.metadata.shared <= MOST_SHARED
            text = f"{spilled} registers spilled, {kernel.metadata.shared} bytes shared"
        except Exception as e:
            ok, text = False, f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
        lines.append((f"{launch.name} {i}", ok, text))
        print(f"{'ok    ' if ok else 'FAILED'}  gfx942 {launch.name}: {text}", flush=True)
    return lines
