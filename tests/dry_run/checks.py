"""Does scripts/gpu_check.py get from its first line to its last, for whoever has a GPU?

Numbers are garbage here, so it runs without its assertions: Python is to be started optimized.

    PYTHONOPTIMIZE=1 python scripts/dev/gpu_dryrun.py --only check
"""

import contextlib
import io

import gpu_check

from dry_run import device, loops


def main() -> list[tuple[str, bool, str]]:
    device.install()
    loops.decide_drafts()
    gpu_check.MATRICES["cuda"] = [(576, 1536)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        gpu_check.run([])
    lines = said.getvalue().splitlines()
    print(said.getvalue(), end="")
    return [(line.split()[1], line.startswith("ok"), line) for line in lines]
