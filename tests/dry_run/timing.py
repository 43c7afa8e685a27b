"""How long a kernel takes on a GPU, estimated from its machine code and its grid; no GPU, no Triton.

The form is physical, its three constants are fitted to 33 products that were measured on an H200
(measured.json). They are rewritten with the kernels' source, not with every kernel, so an estimate
of a new kernel is an extrapolation: `bar` is what the measured ones were off by.

    product = Program(grid=512, warps=16, registers=78, shared=512, instructions=1357, trips=4)
    seconds_of(GPUS["H200"], product, n_bytes=36_700_160)          # 2.2e-05
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """clock: Hz, boosted; bandwidth: bytes a second that a kernel that only reads reaches.

    tensor: bfloat16 multiplications a second by the data sheet, dense; l2, l2_bytes: bytes a second
    from the L2 cache (published microbenchmarks, not ours) and its size.
    """

    sm: int                                        # compute capability times ten
    n_sm: int                                      # multiprocessors
    clock: float
    bandwidth: float
    shared: int                                    # bytes a multiprocessor has for programs
    tensor: float
    l2: float
    l2_bytes: int


GPUS = {"A100": GPU(80, 108, 1.41e9, 1.72e12, 164 << 10, 156e12, 4.4e12, 40 << 20),
        "H100": GPU(90, 132, 1.98e9, 3.0e12, 228 << 10, 494e12, 5.6e12, 50 << 20),
        "H200": GPU(90, 132, 1.98e9, 4.3e12, 228 << 10, 494e12, 5.6e12, 50 << 20)}
LAUNCH = 1.8e-6                                    # seconds until the first program has loaded
DRIFT = 3.9                                        # waves until half of load and compute overlap
TRIP = 0.10e-6                                     # a wait for memory that other warps do not fill
ALONE = 0.45e-6                                    # one that nothing else fills: to L2 and back
LATENCY = 0.8e-6                                   # of memory under load, for bytes in flight
AHEAD = 0.25                                       # of a turn: loads issued earlier are carried over
TENSOR = 0.6                                       # of the data sheet, by Triton; not measured
BLAS = 0.75                                        # the same of cuBLAS
WRITE = 0.9                                        # of bandwidth, where more is written than read
BAR = 0.2, 1.7e-6                                  # of an estimate, and a launch
STEP_BAR = 0.14                                    # of a whole step's speed


@dataclass(frozen=True)
class Program:
    """A launch: its grid, what a program occupies, what a warp of it executes (loops multiplied out).

    ahead: see Listing.ahead(); trips: waits for memory of a warp; in_flight: bytes of weights that
    a warp asks for before it waits.
    """

    grid: int
    warps: int
    registers: int                                 # a thread
    shared: int                                    # bytes
    instructions: int
    trips: int
    ahead: float = 0.0
    in_flight: int = 1 << 30

    @property
    def is_carried(self) -> bool:
        """Are the next weights loaded while the current ones are multiplied?"""
        return self.ahead >= AHEAD


def programs_per_sm(gpu: GPU, program: Program) -> int:
    """How many are resident at a time, by registers, warps and shared memory."""
    of_a_warp = math.ceil(program.registers * 32 / 256) * 256
    by_registers = 65536 // (of_a_warp * program.warps)
    by_shared = gpu.shared // (program.shared + 1024)              # the driver takes 1 KB
    return max(1, min(by_registers, 64 // program.warps, by_shared, 32))


def seconds_of(gpu: GPU, program: Program, n_bytes: int) -> float:
    """A product that reads n_bytes of weights.

    Bytes and instructions overlap if loads are carried over. If not, the shorter of the two adds to
    the longer: whole where a multiprocessor has one program, less the more waves there are, as
    programs drift apart. A partial wave costs a whole one's instructions.
    """
    resident = programs_per_sm(gpu, program)
    waves = max(1.0, program.grid / gpu.n_sm / resident)
    in_flight = program.in_flight * program.warps * resident * gpu.n_sm
    transfer = max(n_bytes / gpu.bandwidth, n_bytes * LATENCY / in_flight)
    issue = (program.instructions * program.warps * math.ceil(program.grid / gpu.n_sm)
             / (4 * gpu.clock))
    if program.is_carried:
        return LAUNCH + max(transfer, issue)
    exposed = 1 / (1 + waves * (1 - 1 / resident) / DRIFT)
    waits = TRIP * program.trips * waves / resident
    return LAUNCH + max(transfer, issue) + exposed * min(transfer, issue) + waits


def seconds_alone(gpu: GPU, program: Program) -> float:
    """A kernel with few bytes, as attention of a step: its trips to memory, one after another."""
    resident = programs_per_sm(gpu, program)
    waves = math.ceil(max(1.0, program.grid / gpu.n_sm / resident))
    issue = program.instructions * program.warps * min(resident, math.ceil(program.grid / gpu.n_sm))
    return LAUNCH + waves * (program.trips * ALONE + issue / (4 * gpu.clock))


@dataclass(frozen=True)
class Prompt:
    """A product of many rows by codes: its sizes, and what reading its machine code gave.

    before: instructions of a warp outside of the loop; inside: of a turn of it.
    """

    rows: int
    n_out: int
    n_in: int
    n_bytes: int                                   # of codes, scales and zeros
    tile: tuple[int, int, int]                     # rows, outputs, columns of a turn
    n_split: int
    program: Program
    before: int
    inside: int


def prompt_seconds(gpu: GPU, prompt: Prompt) -> float:
    """The product's launch, x's reordering and, if the columns are split, adding up: an estimate,
    none of whose parts was measured.

    Loads are carried over. Instructions and the tensor core take turns in a program, so of the
    shorter one programs' share stays that nothing overlaps.
    """
    BM, BN, BK = prompt.tile
    p = prompt.program
    resident = min(programs_per_sm(gpu, p), math.ceil(p.grid / gpu.n_sm))
    n_chunk = math.ceil(prompt.n_in / BK)
    turns = math.ceil(p.grid / gpu.n_sm) * math.ceil(n_chunk / prompt.n_split)     # of an SM
    issue = (math.ceil(p.grid / gpu.n_sm) * prompt.before + turns * prompt.inside) * p.warps / (
        4 * gpu.clock)
    tensor = turns * BM * BN * BK * gpu.n_sm / (TENSOR * gpu.tensor)
    compute = max(issue, tensor) + min(issue, tensor) / resident
    n_tile = math.ceil(prompt.rows / BM) * math.ceil(prompt.n_out / BN)
    cached = prompt.n_bytes * math.ceil(prompt.rows / BM) + 2 * BM * prompt.n_in * n_tile
    transfer = max(prompt.n_bytes / gpu.bandwidth, cached / gpu.l2)
    seconds = LAUNCH + LATENCY + max(transfer, compute)
    seconds += LAUNCH + 4 * prompt.rows * prompt.n_in / gpu.l2     # the reordered x
    if prompt.n_split > 1:
        n_sum = prompt.rows * prompt.n_out
        seconds += LAUNCH + (8 * prompt.n_split + 2) * n_sum / gpu.l2
    return seconds


def written_out_seconds(gpu: GPU, prompt: Prompt) -> float:
    """The same by a matrix of bfloat16, written once, and cuBLAS at its best."""
    n_weight = prompt.n_out * prompt.n_in
    write = LAUNCH + (prompt.n_bytes + 2 * n_weight) / (WRITE * gpu.bandwidth)
    rate = gpu.l2 if 2 * n_weight < 0.7 * gpu.l2_bytes else gpu.bandwidth
    multiply = prompt.rows * n_weight / (BLAS * gpu.tensor)
    return write + LAUNCH + max(2 * n_weight / rate, multiply)


def bar(seconds: float) -> float:
    """Half the error bar of an estimate by seconds_of()."""
    return BAR[0] * seconds + BAR[1]


def step_seconds(gpu: GPU, products: list[tuple[Program, int, float]], attention: Program,
                 n_layer: int, n_other: float) -> float:
    """A decode step: (program, bytes, how often) of each product, and n_other small launches."""
    total = n_other * LAUNCH + n_layer * seconds_alone(gpu, attention)
    return total + sum(times * seconds_of(gpu, program, n) for program, n, times in products)
