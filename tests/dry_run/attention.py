"""Attention of a step: numbers in Triton's interpreter against float64, and its machine code.

Caches hold garbage wherever no key is, new slots included; every case is launched twice, a position
further, as a graph is. What nobody wrote is NaN. A fault is a copy of the kernel's file with one
text exchanged.

    python scripts/dev/gpu_dryrun.py --only attention
"""

import importlib.util
import re
import sys
import tempfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from dry_run import device, interpreted, sass
from dry_run.report import judge_each, within
from gpt_faster.kernels.cuda import triton_attention, triton_cache
from gpt_faster.kernels.cuda.cached_attention import scales_and_turns
from gpt_faster.layers.quantized_cache import CacheFormat, QuantizedCache
from model import KVCache, n_slots, visible


@dataclass(frozen=True)
class Case:
    """A launch: row b's first new key is at starts[b]; its first query sees all before it."""

    N: int = 8
    K: int = 2
    H: int = 64
    T: int = 1
    starts: tuple[int, ...] = (37,)
    length: int = 256                              # of the cache
    window: int | None = None                      # None: no ring
    norm: bool = False
    sinks: bool = False
    cap: float | None = None
    dtype: torch.dtype = torch.float32
    cache: str = ""                                # a CacheFormat; "": keys and values as they are
    signs: bool = False                            # values of 1 and -1: many of equal magnitude


CASES = {
    **{f"{T} queries": Case(T=T, starts=(190,)) for T in (1, 2, 3, 5, 8)},
    **{f"groups of {g}": Case(N=2 * g, T=3) for g in (1, 2, 3, 7, 16)},
    **{f"heads of {H}": Case(H=H, starts=(141,)) for H in (24, 64, 80, 96, 128, 192, 256)},
    **{f"{n} keys": Case(T=1, starts=(n - 1,)) for n in (1, 2, 63, 64, 65, 128, 129, 256)},
    "a full cache of odd length": Case(K=1, N=2, length=1000, starts=(991,), T=2),
    "a cache of 32768": Case(K=1, N=4, length=32768, starts=(5000,)),
    "few keys in a long cache": Case(length=4096, starts=(205,)),
    "splits in several turns": Case(K=32, N=32, H=24, length=1024, starts=(600,), T=2),
    "a split of one key": Case(starts=(128,)),
    "a batch": Case(starts=(0, 3, 70, 200), T=2),
    "a batch of one length": Case(starts=(100, 100, 100)),
    "a ring": Case(window=100, length=4096, starts=(1000,)),
    "a ring's end": Case(window=100, length=4096, starts=(106,), T=4),
    "an unfilled ring": Case(window=100, length=4096, starts=(20,), T=2),
    "rings of a batch": Case(window=100, length=4096, starts=(5, 99, 3000), T=3),
    "a window without a ring": Case(window=300, length=256, starts=(180,), T=2),
    "norms": Case(norm=True, H=96, T=3, starts=(90, 10)),
    "sinks": Case(sinks=True, starts=(150, 0)),
    "a cap": Case(cap=0.5, T=2), "sinks, one split": Case(sinks=True, starts=(30,), T=2),
    "all of it": Case(N=6, K=2, H=80, T=5, starts=(63, 200), window=90, length=512, norm=True,
                      sinks=True, cap=2.0),
    **{f"{cache}, {T} queries": Case(cache=cache, T=T, starts=(190,), H=128)
       for cache in ("int8", "int4", "fp8", "int8/int4") for T in (1, 5)},
    **{f"{cache}, heads of {H}": Case(cache=cache, H=H, starts=(141,))
       for cache in ("int8/int4", "fp8") for H in (24, 80, 96, 192, 256)},
    "int4, heads of 34": Case(cache="int4", H=34, T=3),
    "int4, equal magnitudes": Case(cache="int4", T=8, signs=True),
    "int4, one split": Case(cache="int4", starts=(30,), T=2),
    "int4, few keys in a long cache": Case(cache="int4", length=4096, starts=(205,)),
    "int8, splits in several turns": Case(K=32, N=32, H=24, length=1024, starts=(600,), T=2,
                                          cache="int8"),
    "int4, a batch": Case(cache="int4", starts=(0, 3, 70, 200), T=2),
    "int8/int4, rings of a batch": Case(cache="int8/int4", window=100, length=4096,
                                        starts=(5, 99, 3000), T=3),
    "int4, a ring's end": Case(cache="int4", window=100, length=4096, starts=(106,), T=4),
    "int8/int4, all of it": Case(N=6, K=2, H=80, T=5, starts=(63, 200), window=90, length=512,
                                 norm=True, sinks=True, cap=2.0, cache="int8/int4"),
    "int8, bfloat16": Case(dtype=torch.bfloat16, H=128, starts=(205,), T=5, cache="int8"),
    "bfloat16": Case(dtype=torch.bfloat16, H=128, starts=(205,), length=512),
    "bfloat16, verified": Case(dtype=torch.bfloat16, H=128, starts=(205,), T=5, length=512)}
MOST = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of a truncated bfloat16; turned, it is twice


@torch.inference_mode()
def compare(case: Case, launch=None) -> float:
    """The largest error of two launches, as a share of the largest output."""
    launch = launch or triton_attention.launch
    B, T, H, K, N = len(case.starts), case.T, case.H, case.K, case.N
    n_slot = n_slots(case.window, case.length, T)
    ring = case.window is not None and n_slot < case.length
    cache = garbage(case, (B, K, n_slot, H))
    positions = torch.full((B, n_slot), 1 << 40) if ring else torch.arange(n_slot).repeat(B, 1)
    past = torch.randn(2, B, K, max(case.starts), H).to(case.dtype)
    for b, start in enumerate(case.starts):
        first = max(0, start - n_slot)
        old = torch.arange(first, start)
        positions[b, old % n_slot] = old
        cache(old[None] % n_slot, *past[:, b:b + 1, :, first:start], n_slot, torch.tensor([b]))
    arrivals = torch.zeros(256 * N, dtype=torch.int32)
    norms = [1 + 0.1 * torch.randn(H) if case.norm else None for _ in range(2)]
    sinks = torch.randn(N) if case.sinks else None
    shared = len(set(case.starts)) == 1 and B == 1  # positions without a batch's dimension
    worst = 0.0
    for step in range(2):
        pos = torch.tensor(case.starts)[:, None] + torch.arange(T)
        pos = (pos + step * T).clamp(max=case.length - 1)
        qkv = torch.randn(B, T, (N + 2 * K) * H).to(case.dtype)
        qkv = qkv.sign() if case.signs else qkv
        slot = pos % n_slot
        if ring:
            positions.scatter_(1, slot, pos)
        mask = visible(pos, positions, case.window)                        # [B, 1, T, S]
        angle = pos[:, None, :, None] * torch.rand(H // 2)                 # [B, 1, T, H / 2]
        inputs = [angle.cos(), angle.sin(), mask, slot]
        if shared:
            inputs = [t.view(*t.shape[-2:]) for t in inputs[:3]] + [slot[0]]
        expected = deepcopy(cache)
        y = launch(qkv, *norms, *inputs, cache.k, cache.v, sinks, arrivals, H**-0.5, case.cap, 1e-6,
                   ring, *scales_and_turns(cache))
        assert not arrivals.any(), "a counter is not zero"
        before = deepcopy(expected)
        true = reference(case, qkv, norms, angle, mask, slot, expected, cache, sinks)
        for b in range(B):                         # nothing else was written
            is_new = torch.zeros(n_slot, dtype=torch.bool)
            is_new[slot[b]] = True
            for new, old in zip(cache.buffers(), before.buffers()):
                assert torch.equal(bits(new[b, :, ~is_new]), bits(old[b, :, ~is_new])), "cache"
        if case.cache and case.dtype == torch.float32 and not case.norm:
            for name, codes in expected.named_buffers():
                assert torch.equal(bits(cache.get_buffer(name)), bits(codes)), f"codes of {name}"
        pairs = [(y, true), *zip(cache.read(n_slot, None), expected.read(n_slot, None))]
        for got, true in pairs:
            error = (got.double() - true).abs().max() / true.abs().max()
            worst = max(worst, error.nan_to_num(torch.inf).item())
    return worst


def garbage(case: Case, shape: tuple):
    """A cache that holds anything finite."""
    if not case.cache:
        cache = KVCache(shape, case.dtype, "cpu")
        for t in cache.buffers():
            t.copy_(7 * torch.randn(shape))
        return cache
    kinds = CacheFormat.parse(case.cache)
    cache = QuantizedCache(shape, case.dtype, "cpu", (kinds.keys, kinds.values))
    for name, t in cache.named_buffers():
        t.copy_(torch.rand(t.shape) if "scale" in name else torch.randint(0, 120, t.shape))
    return cache


def bits(t):
    """For comparing: float8 has no equality."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def reference(case, qkv, norms, angle, mask, slot, expected, cache, sinks) -> Tensor:
    """-> y [B, T, N H] in float64, of what the launch has left in `cache`; writes the new keys and
    values to `expected`, plainly and in fp32, from which their codes follow.
    """
    B, T, H, K, N = len(case.starts), case.T, case.H, case.K, case.N
    q, k, v = qkv.view(B, T, -1, H).transpose(1, 2).split((N, K, K), dim=1)
    rotated = []
    for x, norm, dtype in zip((q, k), norms, (torch.float64, torch.float32)):
        x = x.to(dtype)
        if norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.to(dtype)
        a, b = x.chunk(2, -1)
        cos, sin = angle.to(dtype).cos(), angle.to(dtype).sin()
        rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    q, k = rotated
    expected(slot, k.to(case.dtype), v, slot.max() + 1, None)
    for each in (expected, cache):
        each.dtype = torch.float64                 # of a quantized one's read()
    keys, values = (t.double().repeat_interleave(N // K, 1) for t in cache.read(mask.shape[-1], None))
    score = q @ keys.mT * H**-0.5
    if case.cap is not None:
        score = case.cap * torch.tanh(score / case.cap)
    score = score.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(1, N, 1, 1).expand(B, N, T, 1)
        score = torch.cat((score, sink), -1)
    prob = score.softmax(-1)[..., :keys.shape[2]]
    return (prob @ values).transpose(1, 2).reshape(B, T, N * H)


@contextmanager
def unwritten_is_nan():
    """What torch.empty() and new_empty() give to a launch is NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def filled(t):
        return t.fill_(torch.nan) if t.is_floating_point() else t
    with (patch.object(torch, "empty", lambda *a, **how: filled(empty(*a, **how))),
          patch.object(torch.Tensor, "new_empty",
                       lambda *a, **how: filled(new_empty(*a, **how)))):
        yield


def judge(case: Case, launch=None) -> tuple[bool, str]:
    torch.manual_seed(0)
    with unwritten_is_nan():
        most = MOST[case.dtype] * (2 if case.cache else 1)
        return within(most, compare, case=case, launch=launch)


def dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
    """In place of the interpreter's, which multiplies the bits of bfloat16 as integers."""
    a, b = ((x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16
            else x.data for x in (a, b))
    return interpreter.TensorHandle(a @ b + acc.data, acc.dtype.scalar)


# ---- Faults -------------------------------------------------------------------------------------

def with_fault(right: str, wrong: str):
    """The kernel's module, with one text of its file or of triton_cache.py's exchanged."""
    folder = tempfile.mkdtemp()                    # Triton reads the source when it compiles
    sources = {module: Path(module.__file__).read_text()
               for module in (triton_cache, triton_attention)}
    n_place = sum(source.count(right) for source in sources.values())
    assert n_place == 1, f"{n_place} places of {right!r}"
    for module, source in sources.items():
        name = "faulty_" + module.__name__.rpartition(".")[2]
        source = source.replace(right, wrong).replace(
            "from gpt_faster.kernels.cuda import triton_cache",
            "import faulty_triton_cache as triton_cache")
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        faulty = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(faulty)
    return faulty


NUMBER_FAULTS = {                                  # name: right, wrong, a case that shows it
    "a split of no keys is waited for": (
        "if n_before == n_active - 1:", "if n_before == n_split - 1:", "few keys in a long cache"),
    "a split too few": ("if n_before == n_active - 1:", "if n_before == n_active - 2:", "8 queries"),
    "splits of no keys are added up": (
        "is_row = (p < n_active) & (", "is_row = (p <= n_active) & (", "few keys in a long cache"),
    "another split's share": (
        "its_max = tl.load(maxes + row, is_row", "its_max = tl.load(maxes + row - N_ROW, is_row",
        "8 queries"),
    "a counter that goes on": ("tl.store(counter, 0)", "tl.store(counter, 1)", "8 queries"),
    "what a new slot held before": ("is_old & (s != new_slots[i])", "is_old", "5 queries"),
    "the last key left out": ("end = tl.maximum(end, new_slots[i])",
                              "end = tl.maximum(end, new_slots[i] - 1)", "65 keys"),
    "a ring read as a plain cache": ("end = kv_len if ring else tl", "end = tl", "a ring's end"),
    "no mask": ("visible = next_visible != 0", "visible = next_visible >= 0", "a ring's end"),
    "a query's turn the other way": ("tl.where(is_first, -b, b)", "tl.where(is_first, b, -b)",
                                     "1 queries"),
    "a sink counted in each split": ("+ tl.exp(sink - new_max)",
                                     "+ 2 * tl.exp(sink - new_max)", "sinks"),
    "new keys in every split": ("    if split == 0:\n        row_max",
                                "    if split <= 1:\n        row_max", "8 queries"),
    "the next group's scale": ("tl.load(scales + at, ", "tl.load(scales + at + 1, ",
                               "int8, 1 queries"),
    "nibbles exchanged where they are read": ("tl.interleave(low, high)", "tl.interleave(high, low)",
                                              "int4, 1 queries"),
    "nibbles exchanged where they are stored": ("low | high << 4", "high | low << 4",
                                                "int4, 1 queries"),
    "the output not turned back": ("triton_cache.turn(average, V_TURN)", "average * 1",
                                   "int8, 1 queries"),
    "queries not turned": ("triton_cache.turn(qs.to(tl.float32), K_TURN)", "qs", "int8, 1 queries"),
    "a short group's scale left out": ("tl.store(scales + at, scale, is_group)",
                                       "tl.store(scales + at, scale, is_group & (scale < 0))",
                                       "fp8, heads of 80"),
    "rounding towards zero": ("(x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000",
                              "x.to(tl.int32)", "int8, 1 queries"),
    "of equal magnitudes the last": ("tl.argmax(tl.abs(groups), 2)",
                                     "tl.argmax(tl.abs(groups), 2, tie_break_left=False)",
                                     "int4, equal magnitudes"),
}


def judge_fault(right: str, wrong: str, case: str) -> tuple[bool, str]:
    ok, text = judge(CASES[case], with_fault(right, wrong).launch)
    return not ok and text.startswith(("within", "AssertionError")), text


def main_numbers(only: str = "") -> list:
    interpreted.patch_language_once()
    interpreter.InterpreterBuilder.create_dot = dot
    lines = judge_each(((name, partial(judge, case)) for name, case in CASES.items()), only)
    return lines + judge_each(((f"planted: {name}", partial(judge_fault, *fault))
                               for name, fault in NUMBER_FAULTS.items()), only)


# ---- Machine code -------------------------------------------------------------------------------

@dataclass(frozen=True)
class Shape:
    name: str
    N: int
    K: int
    H: int
    T: int
    length: int
    least_programs: int = 2                        # on a multiprocessor
    cache: str = ""


SHAPES = (Shape("Llama-3.1-8B", 32, 8, 128, 1, 256), Shape("Llama-3.1-8B", 32, 8, 128, 1, 16384),
          Shape("Llama-3.1-8B, 5 queries", 32, 8, 128, 5, 16384),
          Shape("Llama-2-7B, 8 queries", 32, 32, 128, 8, 4096),
          Shape("Llama-3.2-1B", 32, 8, 64, 1, 16384), Shape("Phi-2", 32, 32, 80, 1, 2048),
          Shape("Gemma 3 270M", 4, 1, 256, 1, 2048),
          Shape("gpt-oss, 8 queries", 64, 8, 64, 8, 4096, 1),
          *(Shape(f"Llama-3.1-8B {cache}", 32, 8, 128, 1, 16384, cache=cache)
            for cache in ("int8", "int4", "fp8", "int8/int4")),
          Shape("Llama-3.1-8B int8, 5 queries", 32, 8, 128, 5, 16384, cache="int8"),
          Shape("Llama-3.2-1B int8", 32, 8, 64, 1, 16384, cache="int8"),
          Shape("Gemma 3 270M int4", 4, 1, 256, 1, 2048, cache="int4"))
LEAST_SHARED = 99 << 10                            # bytes that a program may have on every GPU
SHARED = {80: 164 << 10, 90: 228 << 10}            # of a multiprocessor
AFTER_ATOMIC = 4                                   # trips to memory of the last program
CODE_FAULTS = {                                    # name: right, wrong
    "a counter without a fence": ('sem="acq_rel"', 'sem="relaxed"'),
    "no wait for qkv": ("        gdc_wait()                                 # wait for qkv\n", "")}


def compiled(shape: Shape, module=triton_attention):
    """What Triton makes of a launch in bfloat16, sinks and a norm left out."""
    def empty(*size, dtype=torch.bfloat16):
        return torch.empty(*size, dtype=dtype, device="cuda")
    size = 1, shape.K, shape.length, shape.H
    cache = KVCache(size, torch.bfloat16, "cuda")
    if shape.cache:
        kinds = CacheFormat.parse(shape.cache)
        cache = QuantizedCache(size, torch.bfloat16, "cuda", (kinds.keys, kinds.values))
    angles = empty(shape.T, shape.H // 2).float()
    mask, slot = empty(shape.T, shape.length, dtype=torch.bool), empty(shape.T, dtype=torch.int64)
    module.launch(
        empty(1, shape.T, (shape.N + 2 * shape.K) * shape.H), None, None, angles, angles, mask,
        slot, cache.k, cache.v, None, empty(256, dtype=torch.int32), 0.1, None, 1e-5, False,
        *scales_and_turns(cache))
    return device.compile_launch(device.LAUNCHES.pop())


def wrong_order(ptx: str, sm: int) -> list[str]:
    """What may be read before it is written, by the order of PTX: races no run on a CPU shows."""
    lines = [line.strip() for line in ptx.splitlines()]

    def places(pattern):
        return [i for i, line in enumerate(lines) if re.search(pattern, line)]
    wrong = []
    loads, stores, atomics = places(r"ld\.global"), places(r"st\.global"), places(r"\batom\.")
    if sm >= 90 and not [i for i in places(r"griddepcontrol\.wait") if i < min(loads)]:
        wrong.append("loads before the previous kernel's end")
    last_store = max(i for i in stores if i < atomics[0])
    if not [i for i in places(r"bar(rier)?\.sync") if last_store < i < atomics[0]]:
        wrong.append("no barrier between partial results and the counter")
    if ".acq_rel." not in lines[atomics[0]] or ".gpu." not in lines[atomics[0]]:
        wrong.append("the counter does not order other threads' stores")
    return wrong


def judge_code(shape: Shape, sm: int) -> tuple[bool, str]:
    kernel = compiled(shape)
    code = sass.read(kernel)
    by_registers = 65536 // (-(-code.registers // 8) * 8 * 32 * code.warps)
    programs = min(by_registers, SHARED[sm] // (code.shared + 1024))
    before = code.listing.trips() - code.listing.trips_after_atomic()
    barriers = sum("BAR.SYNC" in line for line in code.listing.code)
    wrong = wrong_order(kernel.asm["ptx"], sm)
    if code.spilled or code.shared > LEAST_SHARED:
        wrong.append("too many registers or too much shared memory")
    if programs < shape.least_programs:
        wrong.append(f"{programs} programs on a multiprocessor")
    if code.listing.trips_after_atomic() > AFTER_ATOMIC:
        wrong.append("splits are added up one after another")
    text = (f"{code.registers} registers x {32 * code.warps} threads, {code.spilled} spilled, "
            f"{code.shared} bytes shared, {programs} programs on a multiprocessor, "
            f"{barriers} barriers, {before} + {code.listing.trips_after_atomic()} trips")
    return not wrong, "; ".join([*wrong, text])


def judge_code_fault(right: str, wrong: str, sm: int) -> tuple[bool, str]:
    ptx = compiled(SHAPES[0], with_fault(right, wrong)).asm["ptx"]
    found = wrong_order(ptx, sm)
    return bool(found), "; ".join(found)


def judge_barriers(sm: int) -> tuple[bool, str]:
    """In the text: Triton adds a barrier of its own where the source has none."""
    found = wrong_order(re.sub(r".*\bbar(rier)?\.sync.*\n", "", compiled(SHAPES[0]).asm["ptx"]), sm)
    return bool(found), "; ".join(found)


def main_code(sm: int, only: str = "") -> list:
    device.install(keep_arguments=True)
    lines = judge_each(((f"{shape.name}, cache of {shape.length}", partial(judge_code, shape, sm))
                        for shape in SHAPES), only, f"sm_{sm} ")
    faults = {name: partial(judge_code_fault, *fault, sm) for name, fault in CODE_FAULTS.items()
              if sm >= 90 or "qkv" not in name}
    faults["no barriers"] = partial(judge_barriers, sm)
    return lines + judge_each(((f"planted: {name}", judge) for name, judge in faults.items()),
                              only, f"sm_{sm} ")
