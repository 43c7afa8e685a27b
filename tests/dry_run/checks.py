"""Do the scripts for whoever has a GPU get from their first line to their last?

scripts/gpu_check.py whole, and of scripts/gpu_measure.py what has code for a GPU alone. Numbers are
garbage here, so they run without assertions: Python is to be started optimized.

    PYTHONOPTIMIZE=1 python scripts/dev/gpu_dryrun.py --only check
"""

import contextlib
import io

import gpu_check
import gpu_measure
import torch

from dry_run import device, loops
from gpt_faster.bench import gpu


def main() -> list[tuple[str, bool, str]]:
    device.install()
    return measured() + checked()


def measured() -> list[tuple[str, bool, str]]:
    """Products, attention and a model, at the sizes of --dry."""
    rows = []
    run = gpu.Run(torch.device("cuda"), gpu_measure.dry_sizes(), 600, rows.append)
    with gpu.without_pauses():
        for part in (gpu.products, gpu.prompt_products, gpu.attention, gpu.llama_1b):
            part(run)
    for row in rows:
        print(gpu_measure.show(row), flush=True)
    return [(row["row"], "error" not in row, gpu_measure.show(row)) for row in rows]


def checked() -> list[tuple[str, bool, str]]:
    loops.decide_drafts()
    gpu_check.MATRICES["cuda"] = [(576, 1536)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        gpu_check.run([])
    lines = said.getvalue().splitlines()
    print(said.getvalue(), end="")
    return [(line.split()[1], line.startswith("ok"), line) for line in lines]
