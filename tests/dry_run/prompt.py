"""A prompt's products of codes: numbers by Triton's interpreter, machine code, estimates of time.

PTX runs by ptx.py, so that the interpreter sees the kernel as on a GPU, but with x in fp32, as the
interpreter's products of bfloat16 are wrong. Estimates are timing.py's, none was measured.

    python scripts/dev/gpu_dryrun.py --only prompt
"""

import re
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

import quantize
from dry_run import device, ptx, sass, timing
from dry_run.products import SHAPES, as_triton, dequantized, seen
from dry_run.report import judge_each
from gpt_faster.kernels.cuda import matvec, products
from gpt_faster.kernels.cuda.matvec import interleaved

MOST = 2e-6                                        # relative error, x in fp32
MOST_INSTRUCTIONS = 4.6                            # of a thread, a weight, rows up to 32


# ---- Numbers ------------------------------------------------------------------------------------

def random_codes(bits: int, n_out: int, n_in: int, group: int, scale_dtype=torch.bfloat16):
    scheme = quantize.Int4(group) if bits == 4 else quantize.Int8()
    leaves = scheme.quantize(torch.randn(n_out, n_in) * torch.rand(n_out, 1))
    weight, scales, zeros = (leaves.get(name) for name in quantize.LEAVES)
    zeros = zeros if zeros is None else zeros.to(scale_dtype)
    return weight, scales.to(scale_dtype), zeros


def error(bits: int, n_out: int, n_in: int, M: int, group: int = 32, rounded: bool = False,
          launch=None, **how) -> float:
    """Of the kernel beside float64. rounded: weights to bfloat16, as PTX does."""
    from gpt_faster.kernels.cuda import triton_prompt
    weight, scales, zeros = random_codes(bits, n_out, n_in, group, **how)
    exact = dequantized(weight, scales, zeros)
    if rounded and bits == 4:
        exact = quantize.dequantize(weight, scales, zeros, torch.bfloat16).double()
    x = torch.randn(M, n_in) * torch.randn(M, n_in).exp()
    y = (launch or triton_prompt.multiply)(x, weight, interleaved(weight, scales, zeros))
    expected = F.linear(x.double(), exact)
    return ((y - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


def written_error(bits: int, n_in: int, group: int = 32, dtype=torch.float32) -> float:
    """Of written-out weights beside quantize.py's: the largest difference, which shall be 0."""
    from gpt_faster.kernels.cuda import triton_prompt
    weight, scales, zeros = random_codes(bits, 3 * 7, n_in, group)
    weight, scales = (t.unflatten(0, (3, 7)) for t in (weight, interleaved(weight, scales, zeros)))
    w = triton_prompt.write_out(weight, scales, dtype)
    expected = matvec.dequantize_interleaved(weight, scales, dtype)
    return (w - expected).abs().max().item()


def cases():
    """-> name, arguments of error()."""
    for bits in (4, 8):
        for M in (1, 9, 17, 33, 100, 128):
            yield f"int{bits} {M} rows", dict(bits=bits, n_out=130, n_in=256, M=M)
        for n_out, n_in in ((24, 512), (16, 352), (17, 64), (8, 96), (1, 32), (300, 1056)):
            yield f"int{bits} {n_out}x{n_in}", dict(bits=bits, n_out=n_out, n_in=n_in, M=9)
        yield f"int{bits} split columns", dict(bits=bits, n_out=40, n_in=2048, M=20)
        yield f"int{bits} fp32 scales", dict(bits=bits, n_out=16, n_in=288, M=9,
                                             scale_dtype=torch.float32)
    yield "int8 of 16 columns more", dict(bits=8, n_out=16, n_in=528, M=9)
    for group in (64, 96, 128, 256, 384, 768):
        yield f"int4 groups of {group}", dict(bits=4, n_out=16, n_in=768, M=9, group=group)
        yield f"int4 groups of {group}, 40 rows", dict(bits=4, n_out=16, n_in=2304, M=40,
                                                       group=group)


def judge(**arguments) -> tuple[bool, str]:
    torch.manual_seed(0)
    worst = error(**arguments)
    return worst <= MOST, f"{worst:.1e}"


def judge_written(**arguments) -> tuple[bool, str]:
    torch.manual_seed(0)
    worst = written_error(**arguments)
    return worst == 0, f"{worst:.1e}"


@contextmanager
def emulated(texts=None):
    """Within, the interpreter runs PTX by ptx.py, and gets bfloat16 weights as fp32. Columns of few
    multiprocessors are split."""
    from gpt_faster.kernels.cuda import mma, triton_prompt
    texts = texts or (mma.INT4_WEIGHTS, mma.INT8_WEIGHTS)

    def int4(w, s, z):
        return planes(texts[0], [w, s, z], 4)

    def int8(w):
        return planes(texts[1], [w], 2)
    with (patch.object(triton_prompt, "_ptx_int4", int4),
          patch.object(triton_prompt, "_ptx_int8", int8),
          patch.object(triton_prompt, "uses_ptx", lambda x, scales: scales.dtype != torch.float32),
          patch.object(triton_prompt, "launch_options", lambda device: (132, {}))):
        yield


def planes(text: str, tensors: list, n_out: int) -> tuple:
    """The interpreter's 16-bit tensors [BN, n] -> fp32 of n_out registers' bfloat16."""
    import numpy as np
    arrays = [np.ascontiguousarray(t.handle.data).view(np.uint16) for t in tensors]
    words = [np.ascontiguousarray(a).view(np.uint32) for a in np.broadcast_arrays(*arrays)]
    results = [ptx.halves(word).reshape(arrays[0].shape) for word in ptx.run(text, words, n_out)]
    return tuple(as_fp32(values) for values in results)


def as_fp32(values):
    import triton.language as tl
    [flat] = as_triton([values.astype("float32")], torch.float32)
    flat.handle.data = flat.handle.data.reshape(values.shape)
    return tl.tensor(flat.handle, tl.block_type(tl.float32, list(values.shape)))


def number_faults() -> list[tuple[str, tuple | None, dict]]:
    """-> name, other PTX, arguments of judge()."""
    from gpt_faster.kernels.cuda import mma, triton_prompt
    small = dict(n_out=16, n_in=512, M=9)

    def next_group(x, weight, scales):
        return triton_prompt.multiply(x, weight, scales.roll(1, -2).contiguous())

    def exchanged(x, weight, scales):
        return triton_prompt.multiply(x, weight >> 4 | weight << 4, scales)
    shifted = mma.INT4_WEIGHTS.replace("$4, 8", "$4, 12"), mma.INT8_WEIGHTS
    unsigned = mma.INT4_WEIGHTS, mma.INT8_WEIGHTS.replace("0x00800080", "0x00000000")
    return [("the next group's scale", None, dict(bits=4, launch=next_group, **small)),
            ("nibbles exchanged", None, dict(bits=4, launch=exchanged, **small)),
            ("a shift of PTX", shifted, dict(bits=4, rounded=True, **small)),
            ("codes without a sign", unsigned, dict(bits=8, **small))]


def main_numbers(only: str = "") -> list[tuple[str, bool, str]]:
    lines = judge_each(((f"plain: {name}", partial(judge, **how)) for name, how in cases()), only)
    written = [(f"written out: int{bits} {n_in} columns, groups of {group}",
                partial(judge_written, bits=bits, n_in=n_in, group=group))
               for bits, n_in, group in ((4, 2080, 32), (4, 768, 96), (4, 4096, 128), (8, 528, 0))]
    lines += judge_each(written, only)
    with emulated():
        lines += judge_each(((f"PTX: {name}", partial(judge, rounded=True, **how))
                             for name, how in cases() if "fp32" not in name), only)
    for name, texts, how in number_faults():
        with emulated(texts):
            lines += judge_each([(f"seen: {name}", lambda how=how: seen(*judge(**how)))], only)
    return lines


# ---- Machine code and estimates -----------------------------------------------------------------

def launched(name: str, bits: int, group: int, M: int, dtype=torch.bfloat16):
    """A launch of _multiply at a shape of Llama-3.1-8B."""
    n_out, n_in, gated = SHAPES[name]
    n_row = n_out * (2 if gated else 1)

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="cuda")
    precise = torch.float32 if dtype == torch.float16 else dtype
    weight = empty(n_row, n_in * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = empty(n_row, dtype=precise) if bits == 8 else empty(n_row, n_in // group, 2,
                                                                 dtype=precise)
    device.LAUNCHES.clear()
    products.product(empty(M, n_in, dtype=dtype), weight, scales)
    return next(launch for launch in device.LAUNCHES if launch.name == "_multiply"), (
        weight.nbytes + scales.nbytes)


def read(launch, n_bytes: int) -> tuple[sass.Code, timing.Prompt]:
    args = dict(zip(launch.kernel.arg_names, launch.arguments))
    code = sass.read(device.compile_launch(launch))
    first, last = code.listing.main_loop()
    inside = last - first + 1
    grid = launch.grid[0] * launch.grid[1]
    program = timing.Program(grid, code.warps, code.registers, code.shared, code.instructions,
                             code.listing.trips())
    tile = args["BM"], args["BN"], args["BK"]
    return code, timing.Prompt(args["M"], args["n_out"], args["n_in"], n_bytes, tile,
                               args["n_split"], program, len(code.listing.code) - inside, inside)


def look_at(sm: int, name: str, bits: int, group: int, M: int,
            dtype=torch.bfloat16) -> tuple[bool, str]:
    launch, n_bytes = launched(name, bits, group, M, dtype)
    code, prompt = read(launch, n_bytes)
    gpus = {known: gpu for known, gpu in timing.GPUS.items() if gpu.sm == sm}
    slowest = next(iter(gpus.values()))
    BM, BN, BK = prompt.tile
    per_weight = prompt.inside * 32 * code.warps / (BN * BK)
    text = "\n".join(code.listing.code)
    unit, wrong = "HGMMA" if sm >= 90 else "HMMA", []
    if code.spilled:
        wrong.append(f"{code.spilled} bytes spilled")
    if not re.search(rf"\b{unit}\.", text):
        wrong.append(f"no {unit}")
    if BM <= 32 and dtype == torch.bfloat16 and per_weight > MOST_INSTRUCTIONS:
        wrong.append("too many instructions")
    if not code.loads["LDGSTS.E.BYPASS.128"]:
        wrong.append(f"loads of {dict(code.loads)}")
    resident = timing.programs_per_sm(slowest, prompt.program)
    if resident < 2:
        wrong.append("one program on a multiprocessor")
    times = []
    for known, gpu in gpus.items():
        fused = timing.prompt_seconds(gpu, prompt)
        plain = timing.written_out_seconds(gpu, prompt)
        times.append(f"{known} {fused * 1e6:.0f} µs, written out {plain * 1e6:.0f}")
        if fused > plain:
            wrong.append(f"slower than writing out on an {known}")
    text = (f"{per_weight:.2f} instructions a weight, {code.registers} registers, {code.shared >> 10} "
            f"KiB, {resident} programs on a multiprocessor, tiles of {BM}x{BN}x{BK}, "
            f"{prompt.n_split} parts; estimated {'; '.join(times)}")
    return not wrong, "; ".join([text, *wrong])


def main_code(sm: int, only: str = "") -> list[tuple[str, bool, str]]:
    device.install(keep_arguments=True)
    rows = 16, 32, 64, 128
    plan = [(4, 32, M, name) for M in rows for name in SHAPES]
    plan += [(8, 0, M, name) for M in rows for name in SHAPES]
    plan += [(4, 128, M, "gate, up") for M in rows]
    checks = []
    for bits, group, M, name in plan:
        label = f"int8 {name}" if bits == 8 else f"int4-g{group} {name}"
        checks.append((f"{label}, {M} rows", partial(look_at, sm, name, bits, group, M)))
    checks.append(("int4-g32 out, 64 rows, fp16",
                   partial(look_at, sm, "out", 4, 32, 64, torch.float16)))
    return judge_each(checks, only, f"sm_{sm} ")
