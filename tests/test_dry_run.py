"""The dry run's own eyes, without CUDA or Triton: its reading of machine code, its model of time."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from dry_run import timing
from dry_run.machine_code import Listing
from dry_run.timing import GPUS, Program

MEASURED = json.loads((Path(timing.__file__).parent / "measured.json").read_text())
H200 = GPUS["H200"]


def listing(text: str) -> Listing:
    """Instructions one a line, as nvdisasm prints them; labels end in a colon."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return Listing("\n".join(line if line.endswith(":") else f"        /*{16 * i:04x}*/  {line} ;"
                             for i, line in enumerate(lines)))


def programs(row: dict) -> list[Program]:
    return [Program(**launch) for launch in row["launches"]]


def seconds(row: dict, **change) -> float:
    return sum(timing.seconds_of(H200, replace(p, **change), row["bytes"]) for p in programs(row))


def row(bits: int, out: int, n_in: int, rows: int = 1) -> dict:
    [found] = [r for r in MEASURED["products"]
               if (r["bits"], r["out"], r["n_in"], r["rows"]) == (bits, out, n_in, rows)]
    return found


# ---- Time ---------------------------------------------------------------------------------------

def test_measured_products_are_within_the_error_bar():
    ratios = []
    for r in MEASURED["products"]:
        if r["us"] is None:
            continue
        estimate = seconds(r)
        bar = sum(timing.bar(timing.seconds_of(H200, p, r["bytes"])) for p in programs(r))
        assert abs(estimate - r["us"] / 1e6) <= bar, (r, estimate)
        ratios.append(estimate * 1e6 / r["us"])
    assert len(ratios) > 30 and 0.95 < statistics.median(ratios) < 1.05
    assert sum(0.84 < ratio < 1.16 for ratio in ratios) > 0.9 * len(ratios)        # no wide bar hides it


def step_seconds(step: dict, gpu=H200) -> float:
    def product(bits, shape, times):
        found = row(bits, *shape)
        return programs(found)[0], found["bytes"], times
    products = [product(step["bits"], shape, step["n_layer"]) for shape in step["layer"]]
    products.append(product(step["head_bits"], step["head"], 1))
    attention = Program(**MEASURED["attention"][step["head_dim"]])
    return timing.step_seconds(gpu, products, attention, step["n_layer"], n_other=9)


@pytest.mark.parametrize("step", MEASURED["steps"], ids=lambda s: f"{s['model']}, {s['bits']} bits")
def test_measured_steps_are_within_the_error_bar(step):
    speed = 1 / step_seconds(step)
    assert abs(speed - step["tok_s"]) <= timing.STEP_BAR * speed, speed
    assert 1 / step_seconds(step, GPUS["H100"]) < speed                    # less bandwidth


def test_time_grows_with_what_costs_time():
    product = row(4, 28672, 4096)
    [p] = programs(product)
    now = seconds(product)
    assert now > product["bytes"] / H200.bandwidth
    assert seconds(product, instructions=2 * p.instructions) > 1.3 * now
    assert seconds(product, ahead=0.9) < 0.85 * now                        # carried over
    assert seconds(product, trips=p.trips + 40) > 1.05 * now
    assert seconds(product, in_flight=64) > 3 * now                        # too little asked for
    assert timing.programs_per_sm(H200, p) == 6
    assert timing.programs_per_sm(H200, replace(p, registers=255)) == 2
    assert timing.programs_per_sm(H200, replace(p, shared=100 << 10)) == 2
    alone = replace(p, warps=16, grid=p.grid // 4)                         # the same work
    assert timing.programs_per_sm(H200, alone) == 1
    assert timing.seconds_of(H200, alone, product["bytes"]) > 1.2 * now
    alone = Program(**MEASURED["attention"]["128"])
    serial = replace(alone, trips=alone.trips + 60)
    assert timing.seconds_alone(H200, serial) - timing.seconds_alone(H200, alone) == pytest.approx(
        60 * timing.ALONE)


def test_one_program_that_loads_nothing_ahead_is_seen():
    """int4 4096 x 14336 as it was measured: 16 warps of 78 registers; loading and computing add."""
    [p] = programs(row(4, 4096, 14336))
    assert timing.programs_per_sm(H200, p) == 1 and not p.is_carried
    assert all(timing.programs_per_sm(H200, p) > 1 or p.is_carried
               for r in MEASURED["products"] if r["rows"] == 1 and r["bits"] != 4
               for p in programs(r))


# ---- Machine code -------------------------------------------------------------------------------

PIPELINED = """
    LDG.E.EF.128 R8, desc[UR4][R2.64]
    .L_x_0:
    {early}
    FFMA R20, R8, R30, R20
    FFMA R20, R9, R30, R20
    SHFL.BFLY PT, R21, R20, 0x10, 0x1f
    FADD R20, R20, R21
    {late}
    MOV R8, R12
    MOV R9, R13
    ISETP.NE.U32.AND P1, PT, R40, UR4, PT
    @P1 BRA `(.L_x_0)
    EXIT
    .L_x_1:
    BRA `(.L_x_1)
"""
NEXT = "LDG.E.EF.128 R12, desc[UR4][R4.64]"


def test_loads_before_the_arithmetic_are_carried_over():
    early = listing(PIPELINED.format(early=NEXT, late="NOP"))
    late = listing(PIPELINED.format(early="NOP", late=NEXT))
    assert early.ahead() > timing.AHEAD > late.ahead()
    assert early.loops == [(1, 10)] == late.loops
    assert early.loaded_bytes(range(1, 11)) == 16 and early.loaded_bytes(range(12)) == 32
    assert early.instructions(turns=5) == early.instructions(turns=1) + 4 * 10
    straight = listing("LDG.E.EF.128 R8, desc[UR4][R2.64]\nFFMA R1, R8, R8, R1\nEXIT")
    assert straight.ahead() == 0 and straight.main_loop() == (0, -1)


def test_a_last_turn_behind_the_loop_is_seen():
    """A tile's products stand twice where the last tile, which loads nothing, has code of its own."""
    turn = "IMMA.16832.U8.S8 R20, R8, R12, R20\nIMMA.16832.U8.S8 R24, R8, R14, R24"
    loop = f".L_x_0:\nLDG.E.EF.128 R8, desc[UR4][R2.64]\n{turn}\n@P1 BRA `(.L_x_0)"
    assert listing(f"{loop}\nEXIT").peeled() == 0
    assert listing(f"{loop}\n{turn}\nEXIT").peeled() == 1
    assert listing(f"{turn}\nEXIT").peeled() == 0


def test_trips_are_waits_for_loads_asked_for_since_the_last_wait():
    together = """
        LDG.E R4, desc[UR4][R2.64]
        LDG.E R5, desc[UR4][R2.64+0x10]
        FADD R6, R4, R5
        STG.E desc[UR4][R2.64], R6
        EXIT"""
    assert listing(together).trips() == 1
    lines = together.strip().splitlines()
    dependent = [lines[0], "IADD3 R2, R4, 0x1, RZ", *lines[1:]]
    assert listing("\n".join(dependent)).trips() == 2
    as_address = [lines[0], "LDG.E R5, desc[UR4][R4.64]", "FADD R6, R5, R5"]
    assert listing("\n".join(as_address)).trips() == 2
    beside = [lines[0], "LDG.E R5, desc[UR4][R6.64]", "STS.128 [R9], R16", "FADD R6, R4, R5"]
    assert listing("\n".join(beside)).trips() == 1                         # no pair or quad is R4
    wide = ["LDG.E.128 R4, desc[UR4][R2.64]", "FADD R9, R7, R9"]
    assert listing("\n".join(wide)).trips() == 1
    assert listing("LDG.E.128 R4, desc[UR4][R2.64]\nFADD R9, R8, R9").trips() == 0
    product = "LDG.E R{}, desc[UR4][R2.64]\nHMMA.16816.F32.BF16 R52, R16, R78, R56"       # D, A, B, C
    assert [listing(product.format(n)).trips() for n in (19, 59, 79, 80)] == [1, 1, 1, 0]
    shared = ["LDGSTS.E.BYPASS.128 [R17], desc[UR4][R20.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x0"]
    assert listing("\n".join(shared)).trips() == 1


def adding_up(step: str) -> str:
    """As attention's last program did: the splits one after another, after the atomic."""
    return f"""
        LDG.E R4, desc[UR4][R2.64]
        STG.E desc[UR4][R2.64], R4
        MEMBAR.ALL.GPU
        ATOMG.E.ADD.STRONG.GPU PT, R16, desc[UR4][R16.64], R3
        ISETP.NE.AND P0, PT, R16, 0x1f, PT
        @P0 EXIT
        .L_x_7:
        LDG.E.STRONG.GPU R2, desc[UR4][R8.64]
        FADD R5, R2, R5
        {step}
        ISETP.NE.U32.AND P0, PT, R25, 0x20, PT
        ISETP.NE.U32.AND.EX P0, PT, R26, RZ, PT, P0
        @P0 BRA `(.L_x_7)
        EXIT"""


@pytest.mark.parametrize("step, n", [("IADD3 R25, R25, 0x1, RZ", 32), ("VIADD R25, R25, 0x4", 8),
                                     ("NOP", 32)])
def test_splits_added_up_in_turn_are_counted(step, n):
    code = listing(adding_up(step))
    assert code.trips_after_atomic() == 1 + n      # the atomic's own answer, then each split
    assert code.trips() == 3 + n                   # and before it: a load, a fence
    parallel = re.sub(r"@P0 BRA.*", "NOP", adding_up(step))
    assert listing(parallel).trips_after_atomic() == 2


def test_unrolled_splits_are_counted_too():
    turns = "\n".join(f"LDG.E R{2 + i}, desc[UR4][R40.64]\nFADD R1, R{2 + i}, R1" for i in range(4))
    code = listing("ATOMG.E.ADD.STRONG.GPU PT, R16, desc[UR4][R16.64], R3\n"
                   f"IADD3 R17, R16, 0x1, RZ\n{turns}\nEXIT")
    assert code.trips_after_atomic() == 5


# ---- A prompt's product -------------------------------------------------------------------------

PROMPT = timing.Prompt(
    rows=32, n_out=28672, n_in=4096, n_bytes=73_400_320, tile=(32, 128, 128), n_split=1, before=400,
    inside=381, program=Program(grid=224, warps=4, registers=128, shared=62 << 10, instructions=0, trips=2))


def test_a_prompts_time_grows_with_what_costs_time():
    now, plain = timing.prompt_seconds(H200, PROMPT), timing.written_out_seconds(H200, PROMPT)
    assert PROMPT.n_bytes / H200.bandwidth < now < plain / 2               # five bytes a weight more
    slow = replace(PROMPT, inside=4 * PROMPT.inside)
    assert timing.prompt_seconds(H200, slow) > 1.5 * now                   # bound by instructions
    more = replace(PROMPT, rows=2048, program=replace(PROMPT.program, grid=64 * 224))
    assert timing.prompt_seconds(H200, more) > timing.written_out_seconds(H200, more)
    halves = replace(PROMPT, n_split=2, program=replace(PROMPT.program, grid=448))
    few = replace(PROMPT, n_out=4096, n_bytes=PROMPT.n_bytes // 7, program=replace(PROMPT.program, grid=32))
    parts = replace(few, n_split=4, program=replace(PROMPT.program, grid=128))
    assert timing.prompt_seconds(H200, few) > timing.prompt_seconds(H200, parts)       # idle SMs
    assert timing.prompt_seconds(H200, halves) > now                       # sums cost, none was idle
    assert timing.prompt_seconds(GPUS["A100"], PROMPT) > 1.5 * now


def test_blas_reads_a_small_matrix_from_the_cache():
    small = replace(PROMPT, n_out=2048, n_in=2048, n_bytes=2_621_440)
    large = replace(small, n_out=16384, n_bytes=8 * 2_621_440)
    assert timing.written_out_seconds(H200, large) > 6 * (
        timing.written_out_seconds(H200, small) - 2 * timing.LAUNCH)
