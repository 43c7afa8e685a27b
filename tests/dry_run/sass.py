"""What a Triton kernel is on a real GPU, read from its machine code: instructions, loads, spills.

Loops are counted as often as they run where their length is a number in the code; a branch that is
taken or not counts as taken.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Code:
    registers: int
    spilled: int                                   # bytes of stack
    shared: int                                    # bytes
    instructions: int                              # of one warp, loops multiplied out
    loads: Counter                                 # LDG…, LDGSTS… -> how many in the code
    in_loop: Counter                               # opcodes of the innermost long loop


def read(kernel, trips: int) -> Code:
    """kernel: triton's compiled one; trips: how often its longest loop runs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage = _run("cuobjdump", "-res-usage", f.name)
        text = _run("nvdisasm", "-c", f.name)
    code, loops = _instructions(text)
    body = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    inside = code[body[0]:body[1] + 1]
    return Code(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled=int(re.search(r"STACK:(\d+)", usage)[1]), shared=kernel.metadata.shared,
        instructions=len(code) + len(inside) * (trips - 1),
        loads=Counter(m for line in code for m in re.findall(r"LDG(?:STS)?\.[\w.]+", line)),
        in_loop=Counter(line.split()[1 if line.startswith("@") else 0] for line in inside))


def _run(tool: str, *args) -> str:
    return subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def _instructions(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """nvdisasm's -> the instructions, and each loop's first and last."""
    code, labels, loops = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    for i, line in enumerate(code):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if target and labels.get(target[1], len(code)) < i:
            loops.append((labels[target[1]], i))
    while code and re.match(r"NOP|BRA `", code[-1]):
        code.pop()
    return code, loops
