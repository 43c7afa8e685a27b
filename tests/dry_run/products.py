"""Products of codes: numbers by Triton's interpreter, machine code by class, waits, planted faults.

mma runs by ptx.py's fragments, so that what the interpreter sees is the kernel as on a GPU. Without
a time: instructions a weight, registers, programs on a multiprocessor, bytes on their way.

    python scripts/dev/gpu_dryrun.py --only products
"""

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

import quantize
from dry_run import device, ptx, sass
from dry_run.report import judge_each
from gpt_faster.kernels.cuda import matvec

MOST = {4: 1e-4, 8: 1e-5}                          # relative error before rounding to bfloat16
MOST_INSTRUCTIONS = 2.1                            # of a thread, a weight, one row
MOST_OF_FIVE = 6.0                                 # bf16 weights' bytes take the time of 11.7
SPILLED_OF_FIVE = 128                              # bytes of a thread; the count has their instructions
REGISTERS, WARPS = 65536, 16                       # of a multiprocessor; that shall be there
SHAPES = {"qkv": (6144, 4096, False), "out": (4096, 4096, False), "gate, up": (14336, 4096, True),
          "down": (4096, 14336, False)}            # Llama-3.1-8B: outputs, inputs, gated


# ---- Numbers ------------------------------------------------------------------------------------

def error(bits: int, n_out: int, n_in: int, M: int = 1, group: int = 32, activation: str = "",
          norm: bool = False, residual: bool = False, bias: bool = False, n_expert: int = 0,
          share: int = 1, stacked: bool = False, scale_dtype=torch.bfloat16) -> float:
    """Of the kernel beside float64, of fp32 x with heavy tails."""
    n_row = n_out * (2 if activation else 1)
    scheme = quantize.Int4(group) if bits == 4 else quantize.Int8()
    kept = slice(n_row, 2 * n_row) if stacked else slice(None)   # stacked: between other rows
    leaves = scheme.quantize(torch.randn(max(1, n_expert) * n_row * (2 if stacked else 1), n_in))
    weight, scales, zeros = (leaves.get(name) for name in quantize.LEAVES)
    exact = dequantized(weight, scales, zeros)
    scales = matvec.interleaved(weight, scales.to(scale_dtype), zeros)
    if n_expert:
        weight, scales, exact = (t.unflatten(0, (n_expert, -1))[:, kept]
                                 for t in (weight, scales, exact))
    x = torch.randn(M, n_in) * torch.randn(M, n_in).exp()
    ids = torch.randint(0, n_expert, (M * share,)) if n_expert else None
    h = x.double()
    weights = torch.rand(n_in) + 0.5 if norm else None
    if norm:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * weights.double()
    shift = torch.randn(*exact.shape[:-1]) if bias and not stacked else None
    added = torch.randn(M, n_out) if residual else None
    y = matvec.matvec(x, weight, scales, None, shift, weights, 1e-5, added, activation, ids, share)
    if ids is None:
        expected = F.linear(h, exact, None if shift is None else shift.double())
    else:
        expected = (exact[ids] @ h.repeat_interleave(share, 0)[..., None]).squeeze(-1)
        expected = expected if shift is None else expected + shift[ids]
    if activation:
        gate, up = expected.chunk(2, -1)
        expected = matvec.GATED[activation](gate, up)
    expected = expected if added is None else expected + added
    return ((y - expected).norm() / expected.norm()).item()


def dequantized(weight, scales, zeros) -> torch.Tensor:
    if zeros is None:
        return weight.double() * scales.double()[:, None]
    q = quantize.unpack_nibbles(weight).double().unflatten(-1, (scales.shape[-1], -1)) - 8
    return (q * scales.double()[..., None] + zeros.double()[..., None]).flatten(-2)


def cases():
    """-> name, arguments of error()."""
    for bits in (4, 8):
        odd = 1056 if bits == 4 else 1040          # blocks
        for n_out, n_in in ((24, 512), (16, 352), (17, 64), (8, 96), (33, odd)):
            yield (f"int{bits} {n_out}x{n_in}",
                   dict(bits=bits, n_out=n_out, n_in=n_in, norm=n_out % 2 == 1))
        for M in (2, 3, 5, 8):
            yield (f"int{bits} {M} rows", dict(bits=bits, n_out=20, n_in=288, M=M, bias=M == 5,
                                               residual=M % 2 == 1, norm=M == 3))
        for activation in matvec.FUSED_ACTIVATIONS:
            yield (f"int{bits} {activation}", dict(bits=bits, n_out=12, n_in=256, norm=True,
                                                   bias=True, activation=activation))
        yield f"int{bits} gated, 3 rows", dict(bits=bits, n_out=9, n_in=128, M=3, activation="silu")
        yield f"int{bits} experts", dict(bits=bits, n_out=20, n_in=288, M=2, n_expert=3, share=2,
                                         activation="silu", norm=True, bias=True)
        yield (f"int{bits} experts, parts of a matrix",
               dict(bits=bits, n_out=16, n_in=160, M=3, n_expert=4, stacked=True))
        yield (f"int{bits} fp32 scales",
               dict(bits=bits, n_out=16, n_in=64, scale_dtype=torch.float32))
        for M in (2, 5):
            yield (f"int{bits} {M} long rows",
                   dict(bits=bits, n_out=18, n_in=115200 // bits, M=M, residual=True))
        yield f"int{bits} several tiles", dict(bits=bits, n_out=200, n_in=128, residual=True)
    for group in (64, 96, 128, 256, 768):
        yield f"int4 groups of {group}", dict(bits=4, n_out=16, n_in=768, group=group, norm=True)


def judge(bits: int, **arguments) -> tuple[bool, str]:
    torch.manual_seed(0)
    worst, most = error(bits=bits, **arguments), MOST[bits]
    gated = 3 if arguments.get("activation") else 1            # a product of two such sums
    return worst <= gated * most, f"{worst:.1e}"


@contextmanager
def emulated(texts=None, launch=None):
    """Within, the interpreter runs mma by ptx.py. texts: other PTX; launch: for matvec's operator.
    """
    from gpt_faster.kernels.cuda import mma, triton_quantized
    texts = texts or (mma.INT4, mma.INT8)

    def dots(w, v, low, high, T):
        return as_triton(ptx.run(texts[0], registers(w, v, low, high), 2), torch.float32)

    def sums(w, v, f, c, T):
        return as_triton(ptx.run(texts[1], registers(w, v, f, *c), 4), torch.int32)
    with (patch.object(triton_quantized, "_mma_int4_dots", dots),
          patch.object(triton_quantized, "_mma_int8_sums", sums),
          patch.object(triton_quantized, "has_mma", lambda device: True),
          patch.object(matvec, "_matvec", launch or matvec._matvec)):
        yield


def registers(*tensors) -> list:
    """The interpreter's [T] or [T, n] -> int32 [warps, 32] for each register."""
    import numpy as np
    arrays = [np.asarray(t.handle.data).astype(np.int32) for t in tensors]
    T = max(a.shape[0] for a in arrays)
    arrays = [np.broadcast_to(a, (T, *a.shape[1:])).reshape(T // 32, 32, -1) for a in arrays]
    return [a[..., i] for a in arrays for i in range(a.shape[-1])]


def as_triton(values: list, dtype: torch.dtype) -> tuple:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    kind, array = (tl.float32, np.float32) if dtype == torch.float32 else (tl.int32, np.int32)
    flat = [np.ascontiguousarray(v.reshape(-1)).view(array) for v in values]
    return tuple(tl.tensor(TensorHandle(v, kind), tl.block_type(kind, [v.size])) for v in flat)


def number_faults() -> list[tuple[str, dict, dict]]:
    """-> name, arguments of emulated() and of judge()."""
    from gpt_faster.kernels.cuda import mma
    small, launch = dict(n_out=16, n_in=256), matvec._matvec

    def next_group(x, weight, scales, *rest):
        return launch(x, weight, scales.roll(1, -2), *rest)
    exchanged = mma.INT4.replace("{a0,a1,a2,a3}", "{a0,a2,a1,a3}"), mma.INT8
    moved = mma.INT4, mma.INT8.replace("{$12,$13}", "{$13,$12}")
    return [("fragments of A exchanged", dict(texts=exchanged), dict(bits=4, **small)),
            ("a word of x in another's place", dict(texts=moved), dict(bits=8, **small)),
            ("the next group's scale", dict(launch=next_group), dict(bits=4, **small))]


def unquantized_error(n_out: int, n_in: int, M: int, activation: str = "") -> float:
    """Of normalized rows, one larger than the other, by unquantized weights beside float64."""
    weight = torch.randn(n_out * (2 if activation else 1), n_in)
    x = torch.randn(M, n_in) * torch.arange(1, M + 1)[:, None]
    norm, added = torch.rand(n_in) + 0.5, None if activation else torch.randn(M, n_out)
    y = matvec.matvec(x, weight, norm=norm, eps=1e-5, residual=added, activation=activation)
    expected = F.linear(F.rms_norm(x.double(), (n_in,), norm.double(), 1e-5), weight.double())
    if activation:
        gate, up = expected.chunk(2, -1)
        expected = matvec.GATED[activation](gate, up)
    expected = expected if added is None else expected + added
    return ((y - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


def judge_unquantized(**arguments) -> tuple[bool, str]:
    torch.manual_seed(0)
    worst = unquantized_error(**arguments)
    return worst <= 1e-6, f"{worst:.1e}"


def non_finite(bits: int) -> tuple[bool, str]:
    """NaN and infinity in a row of x: none of its outputs is finite, all of the other row's are."""
    leaves = (quantize.Int4(32) if bits == 4 else quantize.Int8()).quantize(torch.randn(16, 64))
    weights = [leaves.get(name) for name in quantize.LEAVES]
    wrong = []
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(2, 64)
        x[0, 5] = value
        y = matvec.matvec(x, *weights)
        alone = matvec.matvec(x[:1], *weights)
        if y[0].isfinite().any() or alone.isfinite().any() or not y[1].isfinite().all():
            wrong.append(str(value))
    return not wrong, f"finite for {', '.join(wrong)}" if wrong else "as x is"


def main_numbers(only: str = "") -> list[tuple[str, bool, str]]:
    lines = judge_each(((f"plain: {name}", partial(judge, **how)) for name, how in cases()), only)
    lines += judge_each(((f"unquantized, {M} rows, {n_in} columns {activation}",
                          partial(judge_unquantized, n_out=9, n_in=n_in, M=M, activation=activation))
                         for M, n_in, activation in ((1, 96, ""), (3, 96, ""), (5, 4352, ""),
                                                     (8, 96, "silu"))), only)
    with emulated():
        lines += judge_each(((f"mma: {name}", partial(judge, **how)) for name, how in cases()),
                            only)
        lines += judge_each(((f"int{bits} not finite", partial(non_finite, bits))
                             for bits in (4, 8)), only)
    for name, fault, how in number_faults():
        with emulated(**fault):
            lines += judge_each([(f"seen: {name}", lambda how=how: seen(*judge(**how)))], only)
    return lines


def seen(ok: bool, text: str) -> tuple[bool, str]:
    return not ok, text


# ---- Machine code -------------------------------------------------------------------------------

@dataclass(frozen=True)
class Product:
    """A launch of _product, as machine code."""

    code: sass.Code                                # instructions: of a warp, on average
    weights: int                                   # of all programs
    programs: int
    threads: int                                   # of a program
    per_weight: float                              # thread instructions
    resident: int                                  # programs on a multiprocessor, by registers
    in_flight: int                                 # bytes of weights on a multiprocessor


def named(launch) -> dict:
    return dict(zip(launch.kernel.arg_names, launch.arguments))


def read(launch, n_sm: int, known: dict) -> Product:
    """known: of kernels that were read before."""
    args = named(launch)
    programs = launch.grid[0] * launch.grid[1]
    n_tile = -(-args["n_out"] // (8 if args["activation"] else 16))
    tiles = n_tile * launch.grid[1] / programs     # of a program, on average
    key = tuple(v if isinstance(v, int | float | str) else v is None for v in launch.arguments)
    if key not in known:
        kernel = device.compile_launch(launch)
        known[key] = kernel, sass.read(kernel, 1)
    kernel, code = known[key]
    # a turn of the loop: all tiles of a program but its last; loops within are over segments
    first, last = (0, -1) if args["one_tile"] else code.listing.main_loop()
    inner = [(a, b) for a, b in code.listing.loops if args["n_looped"] and (a, b) != (first, last)]
    more = {(a, b): (b - a + 1) * (args["n_looped"] - 1) for a, b in inner}
    loop = last - first + 1 + sum(n for (a, b), n in more.items() if first <= a and b <= last)
    instructions = code.instructions + sum(more.values())
    instructions += loop * (tiles - 2 if tiles > 1 else -1 if loop else 0)
    weights = n_tile * 16 * args["n_in"] * launch.grid[1]
    threads = 32 * args["W"]
    resident = REGISTERS // (-(-code.registers // 8) * 8 * threads)
    on_each = min(resident, -(-programs // n_sm))
    per_weight = instructions * threads * programs / weights
    code = replace(code, instructions=round(instructions))
    return Product(code, weights, programs, threads, per_weight, resident,
                   on_each * args["W"] * args["C"] * 1024)


def early_faults(kernel, name: str = "_product") -> list[str]:
    """What a program does while the launch before it may still run, other than reading weights."""
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    if not wait:
        return ["no wait for the launch before"]
    wrong = ["stores before the wait"] if re.search(r"(st|red|atom)\.global", before) else []
    known = [arg for arg, kind in kernel.src.signature.items() if kind != "constexpr"]
    sources = {}                                   # register -> what it is computed from
    for line in before.splitlines():
        if m := re.match(r"\s*(?:@\S+\s+)?(\S+)\s+(\{[^}]*\}|%\w+),\s*(.*);", line):
            for target in re.findall(r"%\w+", m[2]):
                sources.setdefault(target, []).extend(re.findall(r"%\w+|_param_\d+", m[3]))
    loads = re.findall(r"ld\.global\S*\s+(?:\{[^}]*\}|%\w+),\s*\[\s*(%\w+)", before)
    read = set()
    for register in loads:
        todo, reached = [register], set()
        while todo:
            if (at := todo.pop()) not in reached:
                reached.add(at)
                todo += sources.get(at, [])
        read |= {known[int(at[7:])] for at in reached if at.startswith("_param_")
                 and kernel.src.signature[known[int(at[7:])]].startswith("*")}
    if not loads:
        wrong.append("no weights are loaded before the wait")
    if read - {"weight", "scales"}:
        wrong.append(f"{', '.join(sorted(read))} read before the wait")
    return wrong


def layouts_are_lanes(kernel) -> bool:
    """Are the operands of mma laid out one to a lane, in order? Elsewise fragments are mixed up."""
    text = kernel.asm["ttgir"]
    used = set(re.findall(r"elementwise_inline_asm.*?: tensor<\d+xi32, (#\w+)>", text))
    used |= set(re.findall(r"elementwise_inline_asm[^\n]*-> tensor<\d+x\w+, (#\w+)>", text))
    kinds = [re.search(rf"{name} = (.*)", text)[1] for name in used]
    return bool(kinds) and all("sizePerThread = [1], threadsPerWarp = [32]" in k for k in kinds)


def launched(name: str, bits: int, M: int = 1, group: int = 32):
    """A launch of _product at a shape of Llama-3.1-8B, as a layer has it."""
    n_out, n_in, gated = SHAPES[name]
    n_row = n_out * (2 if gated else 1)

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="cuda")
    weight = empty(n_row, n_in * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = empty(n_row) if bits == 8 else empty(n_row, n_in // group, 2)
    has_norm = name in ("qkv", "gate, up")
    norm = empty(n_in, dtype=torch.float32) if has_norm else None
    residual = None if has_norm else empty(M, n_out)
    device.LAUNCHES.clear()
    matvec.matvec(empty(M, n_in), weight, scales, None, None, norm, 1e-5, residual,
                  "silu" if gated else "")
    return device.LAUNCHES[-1]


def look_at(name: str, bits: int, M: int, group: int, known: dict) -> tuple[bool, str]:
    launch = launched(name, bits, M, group)
    n_sm = torch.cuda.get_device_properties(0).multi_processor_count
    product = read(launch, n_sm, known)
    kernel, wrong = next(reversed(known.values()))[0], []
    if product.code.spilled > (0 if M == 1 else SPILLED_OF_FIVE):
        wrong.append("too many registers")
    if product.per_weight > (MOST_INSTRUCTIONS if M == 1 else MOST_OF_FIVE):
        wrong.append("too many instructions")
    if not layouts_are_lanes(kernel):
        wrong.append("mma's operands are not laid out by lanes")
    if not any(load.endswith(".128") for load in product.code.loads):
        wrong.append(f"loads of {dict(product.code.loads)}")
    if torch.cuda.get_device_capability() >= (9, 0):
        wrong += early_faults(kernel)
    args = named(launch)
    if product.resident < 2 and args["one_tile"]:
        wrong.append("one program on a multiprocessor, and no loads carried over")
    text = (f"{product.per_weight:.2f} instructions a weight, {product.code.registers} registers, "
            f"{args['W']} warps x {args['C']} chunks, {product.programs} programs, "
            f"{product.resident} on a multiprocessor, {product.in_flight >> 10} KiB of weights on "
            f"their way, {product.code.spilled} bytes spilled")
    return not wrong, "; ".join([text, *wrong])


def main_code(only: str = "") -> list[tuple[str, bool, str]]:
    device.install(keep_arguments=True)
    known, checks = {}, []
    for bits, group, M, names in ((4, 32, 1, SHAPES), (8, 32, 1, SHAPES), (4, 128, 1, ["gate, up"]),
                                  (4, 32, 5, SHAPES), (8, 32, 5, SHAPES)):
        for name in names:
            label = f"int8 {name}" if bits == 8 else f"int4-g{group} {name}"
            checks.append((f"{label}, {M} rows", partial(look_at, name, bits, M, group, known)))
    checks.append(("a missing wait is seen", missing_wait_is_seen))
    return judge_each(checks, only, f"sm_{os.environ['HOLLOW_SM']} ")


def missing_wait_is_seen() -> tuple[bool, str]:
    import triton

    from gpt_faster.kernels.cuda import triton_quantized
    if torch.cuda.get_device_capability() < (9, 0):
        return True, "launches do not overlap here"

    @triton.jit
    def no_wait():
        pass
    launch, kernel = launched("out", 8), triton_quantized._product
    with patch.object(triton_quantized, "gdc_wait", no_wait):
        kernel.hash = None                         # of its source and what that calls
        kernel.device_caches.clear()
        wrong = early_faults(device.compile_launch(launch))
    kernel.hash = None
    kernel.device_caches.clear()
    return bool(wrong), "; ".join(wrong)
