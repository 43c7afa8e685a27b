"""What a Triton kernel is on a real GPU, read from its machine code: instructions, loads, spills,
and what machine_code.py finds in it. Takes any compiled kernel; knows none of ours.

    code = read(kernel, turns=4); code.instructions, code.listing.ahead()
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

from dry_run.machine_code import Listing

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Code:
    """Branches count as taken, in all of it."""

    registers: int
    spilled: int                                   # bytes of stack
    shared: int                                    # bytes
    warps: int
    loads: Counter                                 # LDG…, LDGSTS… -> how many in the code
    instructions: int                              # of one warp, loops multiplied out
    listing: Listing


def read(kernel, turns: int = 1) -> Code:
    """kernel: triton's compiled one; turns: how often its main loop runs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage = _run("cuobjdump", "-res-usage", f.name)
        listing = Listing(_run("nvdisasm", "-c", f.name))
    return Code(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled=int(re.search(r"STACK:(\d+)", usage)[1]), shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps, listing=listing,
        instructions=listing.instructions(turns),
        loads=Counter(m for line in listing.code for m in re.findall(r"LDG(?:STS)?\.[\w.]+", line)))


def _run(tool: str, *args) -> str:
    return subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout
