"""int8, int4 and GPTQ: the kernels, rounding, the solver, files, the command line, and bad input.

The numbers of a quantized tensor are worked out here a second time, from the layout that
quantize.py states, in float64: `meant`. None of its code, nor of kernels/, goes into it.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from helpers import GREEDY, generated

import checkpoint as core
import quantize
from checkpoint import (
    Checkpoint,
    LazyTensor,
    blank_model,
    disk_names,
    save_checkpoint,
    tensor_shapes,
)
from generate import weight_bytes
from gpt_faster import devices, loading
from gpt_faster.cli import common as cli
from gpt_faster.cli import quantizing, session
from gpt_faster.decoding import engines
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import fill, quantize_tensor, quantized
from gpt_faster.kernels.compile import compile_model
from gpt_faster.kernels.cpu import products as kernels
from gpt_faster.kernels.cpu.products import INT4_CPU, INT8_CPU
from gpt_faster.kernels.linear import PackedExpertLinear, PackedLinear, kernel_for
from gpt_faster.kernels.moe import expert_rows
from gpt_faster.kernels.plain import PLAIN
from gpt_faster.layers.latent import HeadLinear
from gpt_faster.quantization import calibrate, refine
from gpt_faster.quantization import solve as gptq
from gpt_faster.text.english import english_text
from model import ExpertLinear
from quantize import Int4, Int8, QuantizedExperts, QuantizedLinear, describe, pack_nibbles, schemes

BF16, FP32 = torch.bfloat16, torch.float32


def meant(weight, scales, zeros=None):
    """What quantized tensors on disk stand for, in float64, by quantize.py's words."""
    scales = scales.double()
    if zeros is None:
        return weight.double() * scales[..., None]
    q = torch.empty(*weight.shape[:-1], 2 * weight.shape[-1], dtype=torch.float64)
    q[..., 0::2], q[..., 1::2] = (weight % 16).double(), (weight // 16).double()
    group = torch.arange(q.shape[-1]) // (q.shape[-1] // scales.shape[-1])
    return (q - 8) * scales[..., group] + zeros.double()[..., group]


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(n=24, batch=2):
    return torch.randint(0, 160, (batch, n), generator=torch.Generator().manual_seed(1))


# ---- Products with one matrix -------------------------------------------------------------------

MATRICES = [(72, 32), (130, 96), (64, 640), (40, 2048)]
ROWS = [1, 2, 7, 16, 17, 64, 200]
INT4 = [(*shape, g) for shape in MATRICES for g in (32, 64, 128, 256) if shape[1] % g == 0]
INT4 += [(72, 96, 96), (40, 320, 160), (130, 1024, 512), (40, 1536, 768)]      # groups that the Hub has and ATen lacks


def int8_matrix(n_out, n_in, dtype):
    g = torch.Generator().manual_seed(n_out)
    weight = torch.randint(-127, 128, (n_out, n_in), dtype=torch.int8, generator=g)
    return weight, (torch.rand(n_out, generator=g) + 0.1).bfloat16().to(dtype), None


def int4_matrix(n_out, n_in, group, dtype):
    g = torch.Generator().manual_seed(n_in)
    weight = torch.randint(0, 256, (n_out, n_in // 2), dtype=torch.uint8, generator=g)
    scales = (torch.rand(n_out, n_in // group, generator=g) + 0.1).bfloat16().to(dtype)
    return weight, scales, torch.randn(n_out, n_in // group, generator=g).bfloat16().to(dtype)


def check_product(product, kernel, matrix, dtype, rows=ROWS):
    """Rounded are the sum and, before it, the weights or the sum without its factor: two halves of a last bit, 2^-7 in bf16."""
    w, packed = meant(*matrix), kernel.pack(*matrix)
    n_out, n_in = w.shape
    for m in rows:
        x = drawn(m, m, n_in).to(dtype)
        y = product(x, *packed)
        assert y.dtype == dtype and y.shape[0] == m
        expected, size = x.double() @ w.T, x.double().abs() @ w.T.abs()
        off = ((y[:, :n_out].double() - expected).abs() / size).max().item()
        assert off < {BF16: 2**-7, FP32: 1e-5 / 4, torch.float16: 2**-10}[dtype], (kernel.name, m, n_in, off)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [PLAIN, INT8_CPU], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_int8_product(shape, kernel, dtype, two_threads):
    scales = FP32 if dtype == torch.float16 else dtype                     # as QuantizedLinear has them
    check_product(kernel.product, kernel, int8_matrix(*shape, scales), dtype)


@pytest.mark.parametrize("kernel, dtype", [(PLAIN, FP32), (PLAIN, BF16), (INT4_CPU, BF16)],
                         ids=["plain-fp32", "plain-bf16", INT4_CPU.name])
@pytest.mark.parametrize("shape", INT4, ids=str)
def test_int4_product(shape, kernel, dtype):
    check_product(kernel.product, kernel, int4_matrix(*shape, dtype), dtype, [*ROWS, 40, 41])


@pytest.mark.parametrize("has_bf16", [True, False])
def test_many_rows_on_either_kind_of_cpu_a_piece_at_a_time(monkeypatch, has_bf16, two_threads):
    """A CPU without bf16 arithmetic takes the other way; a large matrix is taken in pieces."""
    if has_bf16 and not kernels.HAS_BF16:
        pytest.skip("this CPU has no bf16 arithmetic")
    monkeypatch.setattr(kernels, "HAS_BF16", has_bf16)
    monkeypatch.setattr(kernels, "SCRATCH_SIZE", 640 * 80)
    monkeypatch.setattr(kernels, "scratch", kernels.Scratch())
    for dtype in (FP32, BF16):
        check_product(INT8_CPU.product, INT8_CPU, int8_matrix(210, 640, dtype), dtype, [1, 16, 17, 96, 97])
    check_product(INT4_CPU.product, INT4_CPU, int4_matrix(210, 640, 32, BF16), BF16, [1, 16, 17, 40, 41, 96, 97])


def test_inputs_that_are_views():
    """Every second column, every second row, a later row: as the model's slices may be."""
    for kernel, matrix in ((INT8_CPU, int8_matrix(72, 96, BF16)), (INT4_CPU, int4_matrix(72, 96, 32, BF16))):
        packed, x = kernel.pack(*matrix), drawn(1, 220, 192).bfloat16()
        for view in (x[:, ::2], x[::2, :96], x[3:5, 96:], x[7:8, 5:101], x[:192].T[:150, :96], x[:96].T[:40], x[:96, :8].T, x[:1].expand(130, -1)[:, :96]):
            assert torch.equal(kernel.product(view, *packed), kernel.product(view.clone().contiguous(), *packed))


def test_scratch_memory_serves_inside_and_outside_of_inference_mode(monkeypatch):
    """generate() runs inside, whoever calls the model may be outside."""
    for kernel, matrix, dtype, m in ((INT8_CPU, int8_matrix(72, 96, FP32), FP32, 4),
                                     (INT8_CPU, int8_matrix(72, 96, BF16), BF16, 64),
                                     (INT4_CPU, int4_matrix(72, 96, 32, BF16), BF16, 128)):
        packed, x = kernel.pack(*matrix), drawn(1, m, 96).to(dtype)
        monkeypatch.setattr(kernels, "scratch", kernels.Scratch())
        with torch.inference_mode():
            first = kernel.product(x, *packed)
        assert torch.equal(kernel.product(x, *packed), first)
        with torch.inference_mode():
            assert torch.equal(kernel.product(x, *packed), first)


def every_byte(n_out, n_in):
    """int8 [n_out, n_in] with all 256 values, and all floats of four of them that are NaN in kind."""
    weight = torch.randint(-128, 128, (n_out, n_in), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    weight.view(-1)[:256] = torch.arange(-128, 128, dtype=torch.int8)
    weight[-1, 3 * n_in // 4:] = 0x7f                      # sign and exponent of a NaN; the quiet bit:
    weight[-1, n_in // 2:3 * n_in // 4] = torch.arange(n_in // 4).remainder(256).to(torch.uint8).view(torch.int8)
    return weight


def test_unpack_gives_back_every_byte_of_int8():
    for n_out, n_in in ((72, 32), (130, 1024), (3, 2048)):
        weight = every_byte(n_out, n_in)
        scales = torch.ones(n_out)
        packed, same, none = INT8_CPU.pack(weight, scales, None)
        assert packed.dtype == FP32 and packed.shape == (n_out, n_in // 4) and packed.isnan().any()
        assert same is scales and none is None
        assert torch.equal(INT8_CPU.rows(packed, torch.arange(n_out)), weight)
        ids = torch.randint(0, n_out, (2, 5))
        for moved in (packed, torch.stack([packed])[0], packed.clone(), torch.nn.Parameter(packed, requires_grad=False).data):
            assert torch.equal(INT8_CPU.rows(moved, ids), weight[ids])
        x = torch.eye(n_in)                                # each column by itself
        for many in (x[:7], x):
            y = INT8_CPU.product(many, packed, torch.ones(n_out))
            assert torch.equal(y, weight.T[:len(many)].float())


@pytest.mark.parametrize("shape", [(72, 32, 32), (64, 64, 32), (130, 512, 64), (1, 256, 256)], ids=str)
def test_unpack_gives_back_every_byte_of_int4(shape, monkeypatch):
    n_out, n_in, group = shape
    weight, scales, zeros = int4_matrix(*shape, BF16)
    if weight.numel() >= 256:
        weight.view(-1)[:256] = torch.arange(256)
    padded = math.ceil(n_out / 64) * 64
    for scratch in (kernels.SCRATCH_SIZE, 64 * n_in):           # whole, and 64 rows at a time
        monkeypatch.setattr(kernels, "SCRATCH_SIZE", scratch)
        packed, both, none = INT4_CPU.pack(weight, scales, zeros)
        assert packed.dtype == torch.uint8 and packed.shape == (padded, n_in // 2) and none is None
        assert both.shape == (n_in // group, padded, 2)
        unpacked = kernels.unpack_int4_cpu(packed)
        assert torch.equal(unpacked[:n_out], weight) and not unpacked[n_out:].any() and not both[:, n_out:].any()
        assert torch.equal(both[:, :n_out, 0], scales.T) and torch.equal(both[:, :n_out, 1], zeros.T)


def test_each_number_at_its_place():
    """One number other than the rest, anywhere: it shows in its row, from its column, and nowhere else."""
    for n_out, n_in, group in ((130, 96, 32), (64, 128, 64), (64, 512, 256)):
        for row, column in ((0, 0), (0, 1), (1, 0), (31, 33), (32, 64), (63, n_in - 1), (n_out - 1, n_in - 2)):
            q = torch.full((n_out, n_in), 8)
            q[row, column] = 15
            scales, zeros = torch.ones(n_out, n_in // group), torch.zeros(n_out, n_in // group)
            scales[row, column // group] = 2
            matrix = pack_nibbles(q), scales.bfloat16(), zeros.bfloat16()
            expected = torch.zeros(n_out, n_in, dtype=torch.float64)
            expected[row, column] = 14
            assert torch.equal(meant(*matrix), expected)
            for kernel in (PLAIN, INT4_CPU):
                for many in (torch.eye(n_in), torch.eye(n_in).repeat(3, 1)):         # few rows, and many
                    y = kernel.product(many.bfloat16(), *kernel.pack(*matrix))
                    assert torch.equal(y[-n_in:, :n_out].double(), expected.T), (kernel.name, row, column)


@pytest.mark.skipif(not kernels.AVX512, reason="the tests above ran as on such a CPU")
@pytest.mark.parametrize("capability, chosen", [("avx2", "product or place or views or experts or every_byte"), ("default", "every_byte")],
                         ids=["avx2", "default"])                          # those do not choose this one
def test_products_on_a_cpu_without_avx512(tmp_path, capability, chosen):
    env = dict(os.environ, ATEN_CPU_CAPABILITY=capability, ONEDNN_MAX_CPU_ISA="AVX2", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--all", __file__, "-k", chosen], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "[100%]" in done.stdout, done.stdout + done.stderr


def test_rows_by_their_own_experts():
    """In any order of experts, each with rows, many or one; and what the fake operator promises."""
    for kernel, make in ((INT8_CPU, lambda n: int8_matrix(n, 96, BF16)), (INT4_CPU, lambda n: int4_matrix(n, 96, 32, BF16)),
                         (PLAIN, lambda n: int4_matrix(n, 96, 32, BF16))):
        matrices = [make(70) for _ in range(4)]
        matrices = [tuple(t if t is None else t.roll(e, 0) for t in m) for e, m in enumerate(matrices)]
        packed = [None if t[0] is None else torch.stack(t) for t in zip(*(kernel.pack(*m) for m in matrices))]
        for ids in ([0, 0, 2, 3, 3, 3], [3, 0, 3, 1], [2], [1] * 110):
            x = drawn(3, len(ids), 96).bfloat16()
            args = x, torch.tensor(ids), *packed, kernel.name, 70
            y = expert_rows(*args)
            expected = torch.stack([row.double() @ meant(*matrices[e]).T for row, e in zip(x, ids)])
            assert y.shape == (len(ids), 70) and (y.double() - expected).abs().max() < 0.02 * expected.std()
        torch.library.opcheck(expert_rows, args, test_utils=("test_schema", "test_faketensor"))


def test_each_expert_is_packed_as_itself():
    """pack() of stacked experts, whose every leaf differs, against each expert's own pack()."""
    for scheme, dtype in ((Int8(), BF16), (Int4(32), BF16), (Int4(32), FP32)):
        like = ExpertLinear(4, 96, 70, bias=False)
        leaves = [scheme.quantize(drawn(e, 70, 96) * (e + 1) + e) for e in range(4)]
        stacked = PackedExpertLinear.of(QuantizedExperts(like, scheme, dtype), kernel_for(scheme, "cpu", dtype, like.weight.shape))
        for leaf in leaves[0]:
            value = torch.stack([of[leaf] for of in leaves])
            kind = getattr(stacked, leaf).dtype
            setattr(stacked, leaf, torch.nn.Parameter(value.to(kind), requires_grad=False))
        expected = [stacked.kernel.pack(*(None if t is None else t[e] for t in stacked.tensors())) for e in range(4)]
        stacked.pack()
        for packed, own in zip(stacked.tensors(), zip(*expected), strict=True):
            if own[0] is not None:                         # layouts of bytes, some of which are no numbers as floats
                assert torch.equal(packed.view(torch.uint8), torch.stack(own).view(torch.uint8)), (scheme.name, dtype)


# ---- Rounding -----------------------------------------------------------------------------------

def lazy(name, w):
    return LazyTensor(name, tuple(w.shape), w.dtype, lambda a, b: (w.flatten(0, 1) if w.dim() > 2 else w)[a:b])


def rounded(w, groupsize=None):
    """A weight [out, in] or [E, out, in] -> the tensors on disk, each read a few rows at a time."""
    t = lazy("x.weight", w)
    made = quantize_tensor(t, Int4(groupsize) if groupsize else Int8())
    for piece in made:
        assert piece.read_rows is not None and piece.name.startswith("x.")
    return {piece.name[2:]: torch.cat([rows for _, _, rows in piece.chunks()]).view(piece.shape) for piece in made}


WEIGHTS = {
    "normal": drawn(1, 48, 256), "small": drawn(2, 48, 256) * 1e-12, "large": drawn(3, 48, 256) * 1e30,
    "uneven rows": drawn(4, 48, 256) * 10.0 ** torch.arange(-24, 24)[:, None],
    "offset": drawn(5, 48, 256) + 3, "outliers": drawn(6, 48, 256) * (drawn(7, 48, 256).abs() > 2.5).float() * 50,
    "signs": torch.where(drawn(8, 48, 256) > 0, 1.0, -1.0), "experts": drawn(9, 3, 16, 256), "bf16": drawn(10, 48, 256).bfloat16(),
    "fp16": drawn(11, 48, 256).half(), "zeros": torch.zeros(8, 256), "minus zeros": -torch.zeros(8, 256),
    "constant": torch.full((8, 256), 0.37), "negative": torch.full((8, 256), -12345.0),
    "constant groups": drawn(12, 8, 8).repeat_interleave(32, 1), "one number": torch.nn.functional.one_hot(torch.arange(8) * 3, 256).float(),
    "subnormal": torch.full((8, 256), 1e-42), "tiny and large": torch.tensor([1e-30, 1e30] * 1024).view(8, 256),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_int8_is_within_half_a_step(kind):
    w = WEIGHTS[kind]
    found = rounded(w)
    assert found["weight"].dtype == torch.int8 and found["weight"].shape == w.shape
    assert found["scales"].dtype == BF16 and found["scales"].shape == w.shape[:-1]
    assert found["weight"].min() >= -127 and found["scales"].isfinite().all() and (found["scales"] > 0).all()
    step = found["scales"].double()[..., None]
    assert ((meant(**found) - w.double()).abs() <= step / 2 * (1 + 1e-6)).all()
    assert (step[..., 0] <= (w.double().abs().amax(-1) / 127).clamp(min=1e-20) * (1 + 2**-8)).all()
    mirrored = rounded(-w)
    assert torch.equal(mirrored["scales"], found["scales"]) and torch.equal(mirrored["weight"], -found["weight"])
    again = rounded(meant(**found).float())                # what it says is said again, but for the scale's last bit
    assert ((again["scales"] / found["scales"] - 1).abs() <= 2**-7).all() or not w.any() or kind == "subnormal"


@pytest.mark.parametrize("groupsize", [32, 64, 256])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_int4_is_off_by_no_more_than_from_min_to_max(kind, groupsize):
    w = WEIGHTS[kind]
    found = rounded(w, groupsize)
    n_group = w.shape[-1] // groupsize
    assert found["weight"].dtype == torch.uint8 and found["weight"].shape == (*w.shape[:-1], 128)
    for leaf in ("scales", "zeros"):
        assert found[leaf].dtype == BF16 and found[leaf].shape == (*w.shape[:-1], n_group) and found[leaf].isfinite().all()
    assert (found["scales"] > 0).all()
    groups = w.double().unflatten(-1, (n_group, groupsize))
    low, high = groups.amin(-1), groups.amax(-1)
    span = (high - low).clamp(min=1e-20)
    scale = found["scales"].double()
    assert (scale <= (span / 15).clamp(min=1e-20) * (1 + 2**-8) * 1.2).all()
    grid = 15 * span / 15 * 2**-8 + 2**-8 * (groups.abs().amax(-1) + span)             # of scale and zero
    off = (meant(**found).unflatten(-1, (n_group, groupsize)) - groups).square().mean(-1).sqrt()
    usual = (span > 1e-15) & (span < 1e15)                 # whose squares are numbers of fp32
    assert (off <= (span / 30 + grid) * (1 + 1e-6))[usual].all()
    if not w.any():
        assert not meant(**found).abs().max() > 1e-18


def test_int4_uses_all_sixteen_numbers_and_prefers_none():
    found = rounded(drawn(1, 64, 256), 32)
    counts = torch.cat((found["weight"] % 16, found["weight"] // 16)).flatten().bincount(minlength=16)
    assert len(counts) == 16 and (counts > 0).all()
    groups = drawn(1, 64, 256).unflatten(-1, (8, 32))      # the ends of a group are the grid's ends
    q = Int4(32).codes(groups, *Int4(32).grid(groups))
    assert (q.amin(-1) == 0).all() and (q.amax(-1) == 15).all()
    assert meant(**found).mean() == pytest.approx(drawn(1, 64, 256).mean().item(), abs=0.005)


def test_a_tensor_in_many_pieces_is_the_same(monkeypatch):
    """Read, rounded and written a few rows at a time, experts' borders inside."""
    for w in (drawn(1, 130, 96), drawn(2, 5, 26, 96)):
        whole = rounded(w), rounded(w, 32)
        with monkeypatch.context() as m:
            m.setattr(core, "CHUNK", 96 * 7)
            for a, b in zip(whole, (rounded(w), rounded(w, 32))):
                assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_int8_functions_alone():
    w = torch.tensor([[127.0, -127.0, 63.6, -0.4], [0, 0, 0, 0]])
    scales = Int8().scales(w)
    assert scales.dtype == BF16 and scales[0] == 1
    assert Int8().codes(w, scales).tolist() == [[127, -127, 64, 0], [0, 0, 0, 0]]


# ---- Whole models -------------------------------------------------------------------------------

HEADS = [("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("int4", "none"), ("int8", "none"), ("int8", "int4")]
EVERY = [(name, *mode) for name in tiny.FAMILIES for mode in HEADS[:2]]
EVERY += [(name, *mode) for name in ("llama2", "llama3", "qwen2_moe", "gemma3_text", "gpt2") for mode in HEADS[2:]]
QUANTIZED = re.compile(r"layers\.\d+\.(attn\.((mamba|shared)\.)?(wq|wk|wv|[qkv]|wo|gate|wq_a|wq_b|wkv_a|wk_b|wv_b|wb|wc|wx)|(ffn\.|attn\.)(shared\.)?(gate|up|down)"
                       r"|end\.(gate|down))$")


def quantized_source(families, name, mode, head="int8", groupsize=32, **more):
    return quantized(read_checkpoint(families(name)[0]), mode, groupsize, head, **more)


def meant_checkpoint(source):
    """The same numbers as a Checkpoint of plain weights."""
    tensors = {}
    for name, t in source.tensors.items():
        x, _, leaf = name.rpartition(".")
        if f"{x}.scales" not in source.tensors or leaf == "bias":
            tensors[name] = t
        elif leaf == "weight":
            leaves = [source.tensors[f"{x}.{n}"].whole() for n in ("weight", "scales", "zeros") if f"{x}.{n}" in source.tensors]
            tensors[name] = lazy(name, meant(*leaves).float())
    return replace(source, tensors=tensors, cfg=replace(source.cfg, tied="head.weight" not in tensors), quantization=None)


def held(source):
    """The same, rounded once: as a source is, its tensors are rounded anew at each reading."""
    return replace(source, tensors={n: lazy(n, t.whole()) for n, t in source.tensors.items()})    # in the order of the file


def lengths_of(model, lengths=(1, 2, 7, 24, 64)):
    model.setup_cache(0, 64)
    return [model(tokens(n), torch.arange(n), logits_to_keep=n) for n in lengths]


@pytest.mark.parametrize("name, mode, head", EVERY, ids=["-".join(case) for case in EVERY])
def test_what_is_quantized(families, name, mode, head):
    """All linears but the routers, the head, and nothing else; every other tensor is the source's own."""
    plain, source = read_checkpoint(families(name)[0]), quantized_source(families, name, mode, head)
    tied = plain.cfg.tied
    heads = {"none": set(), "int4": {"head"}, "int8": {"embed" if tied else "head"}}[head]
    expected = {n.removesuffix(".weight") for n in plain.tensors if QUANTIZED.match(n.removesuffix(".weight"))}
    least = 3 if name.startswith(("mamba", "falcon_mamba", "zamba")) else 6        # without feed-forward layers
    assert len(expected) >= least * plain.cfg.n_layer or plain.cfg.ffn and not plain.cfg.ffn.gated
    assert {n.removesuffix(".scales") for n in source.tensors if n.endswith(".scales")} == expected | heads
    zeros = (expected if mode == "int4" else set()) | (heads if head == "int4" else set())
    assert {n.removesuffix(".zeros") for n in source.tensors if n.endswith(".zeros")} == zeros
    values = {n: t.whole() for n, t in source.tensors.items()}
    for n, t in source.tensors.items():
        x, _, leaf = n.rpartition(".")
        assert t.name == n and tuple(values[n].shape) == tuple(t.shape) and values[n].dtype == t.dtype
        if f"{x}.scales" not in source.tensors or leaf == "bias":
            old = plain.tensors[n if n in plain.tensors else "embed.weight"]
            assert torch.equal(values[n], old.whole())
        elif leaf == "weight":
            old = plain.tensors[n if n in plain.tensors else "embed.weight"].whole()
            found = rounded(old, 32 if x in zeros else None)
            for leaf, value in found.items():
                assert torch.equal(values[f"{x}.{leaf}"], value)
    assert source.quantization == dict(mode=mode, head=head, gptq=False)
    linears = {"int8": "int8", "int4": "int4-g32"}
    assert schemes(source) == (linears[mode], linears.get(head, "none"))
    assert describe(source) == f"{linears[mode]}, head {linears.get(head, 'none')}" and describe(plain) == ""


@pytest.mark.parametrize("name, mode, head", EVERY, ids=["-".join(case) for case in EVERY])
def test_logits_are_those_of_the_numbers(families, name, mode, head):
    """In fp32 the same as a plain model of these weights; in bf16 as near to that as a plain model in bf16."""
    source = quantized_source(families, name, mode, head)
    in_memory = held(source)
    plain = meant_checkpoint(in_memory)
    expected = lengths_of(load_model(plain, FP32, "cpu"))
    for actual, wanted in zip(lengths_of(load_model(source, FP32, "cpu")), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4 * wanted.std().item())
    low = load_model(in_memory, BF16, "cpu")
    used = {m.kernel.name for m in low.modules() if isinstance(m, PackedLinear)}
    cpu = {"int8": {INT8_CPU.name}, "int4": {INT4_CPU.name}}
    others = {PLAIN.name} if plain.cfg.moe and not getattr(plain.cfg.moe, "gated", True) else set()    # experts without a gate
    assert all(used & cpu[kind] for kind in {mode, head} - {"none"}) and used <= cpu["int8"] | cpu["int4"] | others
    off = [torch.cat([((a - b).norm(dim=-1) / b.norm(dim=-1)).flatten() for a, b in zip(logits, expected)]).median()
           for logits in (lengths_of(low), lengths_of(load_model(plain, BF16, "cpu")))]    # a router may flip
    assert off[0] < (2.5 if others else 1.5) * off[1] < 0.3, off       # plain formulas round the dequantized weights too


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_int8_is_near_transformers(families, name):
    """Against the original, which shares no code with ours: nothing is at another's place."""
    expected = tiny.logits(families(name)[1], tokens())
    model = load_model(quantized_source(families, name, "int8"), FP32, "cpu")
    model.setup_cache(0, 24)
    off = (model(tokens(), torch.arange(24), logits_to_keep=24) - expected).norm(dim=-1) / expected.norm(dim=-1)
    most = 0.2 if name.startswith("zamba2") else 0.05      # no residual beside its shared block: bf16 is as far off
    assert 0 < off.median() < most, off.median()


@pytest.mark.parametrize("name, mode, head", EVERY, ids=["-".join(case) for case in EVERY])
def test_file_round_trip(families, name, mode, head, tmp_path):
    """Made while loading, read from a file, written again from that file: bit for bit the same."""
    source = quantized_source(families, name, mode, head)
    in_memory, read = held(source), [source]
    for directory in (tmp_path / "a", tmp_path / "b"):
        quantizing.write(replace(read[-1], tokenizer=directory), directory / "model.pth", quiet=True)
        assert [p.name for p in directory.iterdir()] == ["model.pth"]
        read.append(read_checkpoint(directory))
        assert read[-1].cfg == source.cfg and read[-1].quantization == source.quantization
        assert schemes(read[-1]) == schemes(source)
        for n, t in in_memory.tensors.items():
            found = read[-1].tensors[n].whole()
            assert torch.equal(found.view(torch.uint8), t.whole().to(found.dtype).view(torch.uint8))
    assert (tmp_path / "a/model.pth").read_bytes() == (tmp_path / "b/model.pth").read_bytes()
    for dtype, made in ((FP32, source), (BF16, in_memory)):
        first, *others = (dict(load_model(s, dtype, "cpu").named_parameters()) for s in (made, *read[1:]))
        for other in others:
            assert first.keys() == other.keys()
            for n, p in first.items():
                assert p.dtype == other[n].dtype and torch.equal(p.view(torch.uint8), other[n].view(torch.uint8)), n


def test_tied_matrices_are_one(families):
    for name in ("llama3", "qwen2", "granite", "gpt2", "gemma3_text"):
        for mode, head in HEADS:
            for dtype in (FP32, BF16):
                model = load_model(quantized_source(families, name, mode, head), dtype, "cpu")
                embed, output = model.embed, model.head
                if head == "int4":                         # a copy for the output, the embedding as it was
                    assert type(embed) is torch.nn.Embedding and embed.weight.dtype == dtype and output.zeros is not None or \
                        output.kernel is INT4_CPU
                    continue
                assert embed.weight is output.weight and embed.weight.data_ptr() == output.weight.data_ptr()
                if head == "int8":
                    assert embed.scales is output.scales and output.weight.numel() * output.weight.element_size() == 160 * 64
                    total, read = weight_bytes(model)
                    assert total == read == sum(p.numel() * p.element_size() for p in set(model.parameters()))


def test_biases_and_kept_modules(families):
    for name in ("llama-biased", "gpt_oss", "qwen2", "gpt2"):
        source = read_checkpoint(families(name)[0])
        plain, model = (load(s, BF16, "cpu") for load, s in ((load_model, source), (load_model, quantized_source(families, name, "int4"))))
        biases = {n: p for n, p in plain.named_parameters() if n.endswith("bias") or "norm" in n or "sinks" in n or "router" in n}
        found = dict(model.named_parameters())
        assert any(n.endswith("bias") for n in biases)
        for n, p in biases.items():
            assert found[n].dtype == p.dtype and torch.equal(found[n], p), n
    for name in ("mixtral", "qwen2_moe", "gpt_oss"):
        model = load_model(quantized_source(families, name, "int8"), BF16, "cpu")
        moes = [layer.ffn for layer in model.layers if hasattr(layer.ffn, "router")]
        assert moes and all(type(moe.router) is torch.nn.Linear for moe in moes)
        assert all(type(m) is PackedExpertLinear for moe in moes for m in (moe.gate, moe.up, moe.down))
        assert not any(isinstance(m, ExpertLinear) for m in model.modules())
        if name == "qwen2_moe":
            assert type(moes[0].shared_expert_gate) is torch.nn.Linear and type(moes[0].shared.gate_up) is PackedLinear


@pytest.mark.parametrize("mode, head", HEADS[:3])
def test_float16(families, mode, head):
    """Scales stay in fp32, where float16 would lose the small ones."""
    source = quantized_source(families, "llama3", mode, head)
    expected = lengths_of(load_model(meant_checkpoint(source), FP32, "cpu"))
    model = load_model(source, torch.float16, "cpu")
    assert all(p.dtype == FP32 for n, p in model.named_parameters() if n.endswith(("scales", "zeros")))
    for actual, wanted in zip(lengths_of(model), expected):
        torch.testing.assert_close(actual, wanted, rtol=0.02, atol=0.02 * wanted.std().item())


def test_group_sizes(families):
    """Each size that divides, and of a file also those that no kernel has."""
    source = read_checkpoint(families("gpt2")[0])         # 64 and 256 inputs
    for groupsize in (16, 32, 64):
        new = quantized(source, "int4", groupsize)
        assert schemes(new)[0] == f"int4-g{groupsize}"
        expected = lengths_of(load_model(meant_checkpoint(new), FP32, "cpu"), (7,))[0]
        for dtype, near in ((FP32, 1e-4), (BF16, 0.1)):
            model = load_model(new, dtype, "cpu")
            torch.testing.assert_close(lengths_of(model, (7,))[0], expected, rtol=near, atol=near * expected.std().item())
        assert (model.layers[0].attn.wo.kernel is INT4_CPU) == (groupsize >= 32)


def test_inputs_that_no_kernel_takes():
    """Widths that 32 does not divide: int8 goes the plain way, int4 is refused."""
    from model import ModelConfig
    cfg = ModelConfig(36, 2, 3, 3, 12, 52, 99, 128)
    weights = {n: lazy(n, drawn(len(n), *shape) / 6) for n, shape in tensor_shapes(cfg).items()}
    source = Checkpoint(Path("odd"), cfg, weights)
    new = quantized(source, "int8")
    model, plain = load_model(new, FP32, "cpu"), load_model(meant_checkpoint(new), FP32, "cpu")
    prompt = tokens(7) % 99
    expected = plain(prompt, torch.arange(7), logits_to_keep=7)
    torch.testing.assert_close(model(prompt, torch.arange(7), logits_to_keep=7), expected, rtol=1e-4, atol=1e-4)
    assert {m.kernel.name for m in model.modules() if isinstance(m, PackedLinear)} == {"plain"}
    with pytest.raises(ValueError, match="--groupsize 32 does not divide the 36 inputs of layers.*: use int8"):
        quantized(source, "int4")


@pytest.mark.parametrize("name", quantize.SCHEMES)
def test_random_weights_have_no_mean(name):
    """A mean would be one direction far above all others, and logits whose sign hangs on a bit."""
    scheme, leaves = quantize.SCHEMES[name], {}
    for leaf, (shape, dtype) in scheme.leaves((256, 1024)).items():
        leaves[leaf] = torch.empty(shape, dtype=dtype)
        fill(scheme, leaf, leaves[leaf])
    weight = scheme.dequantize(leaves["weight"], leaves["scales"], leaves.get("zeros"), torch.float32)
    assert weight.mean().abs() < 0.01 * weight.std() and 0.015 < weight.std() < 0.025


def test_random_weights_quantized():
    source = random_checkpoint("stories15M")
    for mode, head in HEADS[:3]:
        model = load_model(quantized(source, mode, 32, head), BF16, "cpu")
        model.setup_cache(0, 8)
        logits = model(tokens(8), torch.arange(8), logits_to_keep=8)
        assert logits.isfinite().all() and logits.std() > 0.01
    assert describe(quantized(source, "int8")) == "int8, head int8"


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "mixtral", "gpt_oss", "gemma4", "gemma4-26b"])
def test_cache_and_batches_change_nothing(families, name):
    """The kernels differ by the number of rows: steps, chunks and rows side by side are the same model."""
    for mode in ("int8", "int4"):
        source, prompt = quantized_source(families, name, mode), tokens(20, 3)
        model = load_model(source, FP32, "cpu")
        model.setup_cache(0, 40)
        whole = model(prompt, torch.arange(20), logits_to_keep=20)
        model.setup_cache(3, 40)
        steps = [model(prompt[:, a:b], torch.arange(a, b), logits_to_keep=b - a) for a, b in ((0, 7), (7, 8), (8, 9), (9, 20))]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=2e-4)


# ---- GPTQ: the solver ---------------------------------------------------------------------------

def textbook(w, hessian, groupsize, percdamp=0.01, act_order=True):
    """Optimal brain quantization with GPTQ's order, in float64: invert, round a column, let the columns
    that are left make up for it, and take that column out of the inverse."""
    w, h = w.double().clone(), hessian.double().clone()
    n_in = w.shape[1]
    for i in range(n_in):
        if h[i, i] == 0:
            h[i, i] = 1
    size, order = h.diagonal().tolist(), list(range(n_in))
    if act_order:                                          # the largest group first, and in it the largest column
        starts = sorted(range(0, n_in, groupsize), key=lambda a: -sum(size[a:a + groupsize]))
        order = [i for a in starts for i in sorted(range(a, a + groupsize), key=lambda i: -size[i])]
    h += percdamp * h.diagonal().mean() * torch.eye(n_in)
    q, left, grids = torch.empty_like(w), torch.linalg.inv(h), [None] * (n_in // groupsize)
    upper = torch.linalg.cholesky(left[order][:, order], upper=True).diagonal()
    for at, i in enumerate(order):
        g = i // groupsize
        if at % groupsize == 0:
            columns = order[at:at + groupsize]
            grids[g] = Int4(groupsize).grid(w[:, columns].float(), (upper[at:at + groupsize] ** -2).float())
        scale, zero = (t.double() for t in grids[g])
        q[:, i] = Int4(groupsize).codes(w[:, i:i + 1], scale, zero)[:, 0]
        change = ((q[:, i] - 8) * scale + zero - w[:, i]) / left[i, i]
        later = order[order.index(i) + 1:]
        w[:, later] += change[:, None] * left[i, later]
        left = left - torch.outer(left[:, i], left[i]) / left[i, i]
    return q, *(torch.stack(t, 1) for t in zip(*grids))


def problem(seed, n_out, n_in, n=None):
    """Weights, and the Hessian of n inputs that go together and differ in size."""
    mix = drawn(seed, n_in, n_in) / n_in**0.5 + 0.3 * drawn(seed + 1, 1, n_in)
    x = drawn(seed + 2, n or 4 * n_in, n_in) @ mix * (drawn(seed + 3, n_in) * 0.7).exp()
    return drawn(seed + 4, n_out, n_in), x.T @ x


def inputs_like(hessian, seed):
    """Others of the same correlations, in float64. In fp32 a Hessian may have eigenvalues just below zero."""
    size, direction = torch.linalg.eigh(hessian.double())
    return drawn(seed, 100, len(hessian)).double() @ (direction * size.clamp(min=0).sqrt()).T


def solved(w, hessian, groupsize, **how):
    q, scales, zeros = gptq.solve(w, hessian, Int4(groupsize), **how)
    n_group = w.shape[1] // groupsize
    assert q.shape == w.shape and scales.shape == zeros.shape == (w.shape[0], n_group)
    assert torch.equal(q, q.round().clamp(0, 15)) and scales.isfinite().all() and (scales > 0).all() and zeros.isfinite().all()
    assert torch.equal(scales, scales.bfloat16().float()) and torch.equal(zeros, zeros.bfloat16().float())
    return q, scales, zeros


def worth(q, scales, zeros):
    return meant(pack_nibbles(q), scales, zeros)


def nearest(w, groupsize):
    groups = w.unflatten(-1, (-1, groupsize))
    grid = Int4(groupsize).grid(groups)
    return Int4(groupsize).codes(groups, *grid).flatten(-2), *grid


def error(w, found, hessian):
    change = worth(*found) - w.double()
    return (change @ hessian.double() * change).sum().item()


@pytest.mark.parametrize("act_order", [False, True])
def test_solve_without_correlations_is_rounding(act_order):
    """Inputs that say nothing of each other: no column can make up for another, whatever their sizes."""
    w = drawn(1, 24, 128)
    for hessian in (torch.eye(128), 100 * torch.eye(128), torch.zeros(128, 128)):
        for blocksize in (1, 32, 1000):
            found = solved(w, hessian, 32, blocksize=blocksize, act_order=act_order)
            assert all(torch.equal(a, b) for a, b in zip(found, nearest(w, 32)))
    assert torch.equal(w, drawn(1, 24, 128))               # and what went in was left alone


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("blocksize", [1, 32, 48, 100, 128, 1000])
@pytest.mark.parametrize("groupsize", [32, 64, 128])
def test_solve_is_the_textbooks(groupsize, blocksize, act_order):
    """In all but a few rows, where fp32 rounds the other way and the rest of the row follows."""
    for seed, n in ((10, None), (20, 40)):                 # the second singular: 40 inputs, 128 columns
        w, hessian = problem(seed, 40, 128, n)
        hessian[:, 5] = hessian[5] = 0                     # an input that never is
        q, scales, zeros = solved(w, hessian, groupsize, blocksize=blocksize, act_order=act_order)
        expected = textbook(w, hessian, groupsize, act_order=act_order)
        same = (q == expected[0]).all(1) & (scales == expected[1]).all(1) & (zeros == expected[2]).all(1)
        assert same.float().mean() >= 0.9, (seed, same.float().mean())


def test_solve_damps_by_percdamp():
    w, hessian = problem(30, 40, 64)
    few, many = (solved(w, hessian, 32, percdamp=p)[0] for p in (0.001, 1.0))
    assert not torch.equal(few, many)
    for percdamp, q in ((0.001, few), (1.0, many)):
        assert (q == textbook(w, hessian, 32, percdamp)[0]).all(1).float().mean() >= 0.9
    assert all(torch.equal(a, b) for a, b in zip(solved(w, hessian, 32, percdamp=1e6), nearest(w, 32)))


@pytest.mark.parametrize("act_order", [False, True])
def test_solve_is_better_than_rounding(act_order):
    """On correlated inputs nearly always, and much; with inputs that it has not seen too."""
    ratios, unseen = [], []
    for seed in range(0, 200, 10):
        w, hessian = problem(seed, 16, 96)
        found, plain = solved(w, hessian, 32, act_order=act_order), nearest(w, 32)
        ratios.append(error(w, found, hessian) / error(w, plain, hessian))
        x = inputs_like(hessian, seed + 7)
        unseen.append(error(w, found, x.T @ x) / error(w, plain, x.T @ x))
        assert gptq.output_error((worth(*found) - w).float(), hessian) == pytest.approx(error(w, found, hessian), rel=1e-3)
    assert sum(r < 1 for r in ratios) >= 19 and sorted(ratios)[10] < 0.7
    assert sum(r < 1 for r in unseen) >= 18 and sorted(unseen)[10] < 0.8


def test_solve_dead_and_singular():
    """Inputs that are always zero are rounded, and change nothing; fewer samples than inputs are enough."""
    w, hessian = problem(1, 24, 96)
    dead = torch.tensor([0, 7, 33, 95])
    hessian[dead], hessian[:, dead] = 0, 0
    before = hessian.clone()
    q, scales, zeros = solved(w, hessian, 32)
    assert torch.equal(hessian, before)
    near = Int4(32).codes(w.unflatten(-1, (-1, 32)), scales, zeros).flatten(-2)
    assert torch.equal(q[:, dead], near[:, dead])
    for n in (1, 5, 50):
        w, hessian = problem(2, 24, 96, n)
        found = solved(w, hessian, 32)
        assert error(w, found, hessian) < error(w, nearest(w, 32), hessian)
    constant = torch.full((8, 64), 0.5)                    # every group one number
    assert worth(*solved(constant, problem(3, 8, 64)[1], 32)) == pytest.approx(0.5 * torch.ones(8, 64).numpy(), abs=2e-3)


def test_corrected_is_least_squares():
    """With share 1 and next to no damping: the weights that give the original's outputs from the inputs there are."""
    w, _ = problem(1, 8, 64)
    original, x = drawn(2, 500, 64), drawn(2, 500, 64) + 0.3 * drawn(3, 500, 64)
    found = gptq.correct_weight(w, x.T @ x, (original - x).T @ x, 1.0, 1e-6)
    expected = torch.linalg.lstsq(x, original @ w.T).solution.T
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    half = gptq.correct_weight(w, x.T @ x, (original - x).T @ x, 0.5, 1e-6)
    torch.testing.assert_close(half, (w + found) / 2)


def test_grids_are_least_squares_for_all_codes_of_a_row():
    """Beside lstsq on one row's unknowns, inputs' root and codes in float64."""
    w, hessian = problem(40, 6, 96)
    q, scales, zeros = solved(w, hessian, 32)
    root = torch.linalg.cholesky(hessian.double()).T       # H = R' R
    off = (w - worth(q, scales, zeros)).float() @ hessian
    found = refine.fit_grids(off, hessian, q, scales, zeros, 32)
    member = torch.eye(3, dtype=torch.float64).repeat_interleave(32, 0)
    for row in range(6):
        design = torch.cat(((q[row].double() - 8)[:, None] * member, member), 1)
        expected = torch.linalg.lstsq(root @ design, root @ w[row].double()).solution
        torch.testing.assert_close(torch.cat((found[0][row], found[1][row])).double(), expected, rtol=5e-3, atol=2e-3)
    few = torch.full_like(q, 3.0)                          # one code only: a scale says nothing there
    same = refine.fit_grids((w - worth(few, scales, zeros)).float() @ hessian, hessian, few, scales, zeros, 32)
    assert all(t.isfinite().all() for t in same) and (same[0] > 0).all()


@pytest.mark.parametrize("blocksize", [1, 40, 1000])
def test_settled_codes_are_each_the_best_where_all_others_stay(blocksize):
    """One column after another, by trying all sixteen in float64."""
    w, hessian = problem(50, 6, 64)
    q, scales, zeros = solved(w, hessian, 32)
    expected = q.clone()
    for i in range(64):
        tried = torch.stack([expected.clone() for _ in range(16)])
        tried[..., i] = torch.arange(16.0)[:, None]
        change = torch.stack([worth(t, scales, zeros) - w.double() for t in tried])
        costs = (change @ hessian.double() * change).sum(-1)
        expected[:, i] = costs.argmin(0).float()
    value = worth(q, scales, zeros).float()
    found = refine.update_codes(value - w, hessian, value, scales, zeros, Int4(32), blocksize)
    assert (found == expected).float().mean() > 0.99       # two as good: fp32 decides


def test_refined_is_better_than_solved():
    """On inputs that it saw and on such that it did not; singular ones too."""
    ratios, unseen = [], []
    for seed in range(0, 200, 10):
        w, hessian = problem(seed, 16, 96)
        first = solved(w, hessian, 32)
        found = refine.refine(w, hessian, *first, Int4(32))
        assert torch.equal(found[1], found[1].bfloat16().float()) and torch.equal(found[0], found[0].round().clamp(0, 15))
        ratios.append(error(w, found, hessian) / error(w, first, hessian))
        x = inputs_like(hessian, seed + 7)
        unseen.append(error(w, found, x.T @ x) / error(w, first, x.T @ x))
    assert max(ratios) < 1 and sorted(ratios)[10] < 0.93 and sorted(unseen)[10] < 0.97
    for hessian in (torch.zeros(96, 96), problem(2, 24, 96, 5)[1]):
        found = refine.refine(w, hessian, *solved(w, hessian, 32), Int4(32))
        assert all(t.isfinite().all() for t in found) and (found[1] > 0).all()


def test_shrunk_keeps_the_sizes():
    """Of one Hessian or of each expert's; with all correlations left out GPTQ is rounding again."""
    w, hessian = problem(1, 8, 64)
    both = torch.stack((hessian, 3 * hessian))
    for share in (0.0, 0.3, 1.0):
        found = gptq.shrink_correlations(both, share)
        expected = torch.where(torch.eye(64) > 0, both, (1 - share) * both)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gptq.shrink_correlations(hessian, share), expected[0])
    d = hessian.diagonal().rsqrt()
    alone = gptq.shrink_correlations(d[:, None] * hessian * d, 1.0)     # of inputs that are equally large
    assert all(torch.equal(a, b) for a, b in zip(solved(w, alone, 32), nearest(w, 32)))
    less = solved(w, gptq.shrink_correlations(hessian, 0.3), 32)
    assert error(w, solved(w, hessian, 32), hessian) < error(w, less, hessian) < error(w, nearest(w, 32), hessian)


def test_grid_is_the_best_of_what_was_tried():
    """Never worse than from the smallest to the largest weight; exact where sixteen values are exact; weighted."""
    w = drawn(1, 50, 32) * drawn(2, 50, 1).exp()
    low, high = w.aminmax(dim=-1)
    scale = ((high - low) / 15).bfloat16().float()
    plain = scale, (low + 8 * scale).bfloat16().float()

    def off(grid, count):
        return (((Int4(32).values(Int4(32).codes(w, *grid), *grid) - w) ** 2) * count).sum(-1)
    for count in (torch.ones(32), drawn(3, 32).exp()):
        found = Int4(32).grid(w, count)
        assert (off(found, count) <= off(plain, count) * (1 + 1e-5)).all() and off(found, count).sum() < 0.95 * off(plain, count).sum()
        assert all(torch.equal(t, t.bfloat16().float()) for t in found)
    exact = torch.randint(0, 16, (50, 32)).sort(1).values
    exact[:, 0], exact[:, -1] = 0, 15
    w = (exact - 8) * 0.25 + 1.5
    assert off(Int4(32).grid(w), torch.ones(32)).max() < 1e-9


def test_solve_refuses_what_is_not_finite():
    w, hessian = problem(1, 8, 64)
    for bad in (math.inf, math.nan):
        hessian[3, 3] = bad
        with pytest.raises(ValueError, match="infinite activations"):
            solved(w, hessian, 32)


def test_damping_ends(monkeypatch):
    """Whatever the Hessian: factored after a few rounds, or refused."""
    original, count = torch.linalg.cholesky_ex, [0]

    def counted(*args, **more):
        count[0] += 1
        assert count[0] < 500, "it would go on for ever"
        return original(*args, **more)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    w, x = drawn(1, 8, 32), drawn(2, 100, 32)
    for hessian, percdamp in ((1e-36 * x.T @ x, 0.01), (torch.ones(32, 32), 1e-9), (1e30 * x.T @ x, 0.01), (1e36 * x.T @ x, 0.01),
                              (torch.ones(32, 32), 0.0)):
        count[0] = 0
        try:
            solved(w, hessian, 32, percdamp=percdamp)
        except ValueError:
            assert hessian.max() > 1e35 or percdamp == 0


def test_inverse_factor():
    _, hessian = problem(5, 1, 64)
    upper = gptq.inverse_factor(hessian, 0.01)
    damped = hessian.double() + 0.01 * hessian.diagonal().mean() * torch.eye(64)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.double().T @ upper.double() @ damped, torch.eye(64).double(), atol=1e-3, rtol=0)
    sick = hessian - 3 * hessian.diagonal().mean() * torch.eye(64)         # rounding may make one: damped until it is none
    upper = gptq.inverse_factor(sick + torch.diag(sick.diagonal().abs() * 4), 0.01)
    assert upper.isfinite().all() and (upper.diagonal() > 0).all()


# ---- GPTQ: layer by layer -----------------------------------------------------------------------

def windows_of(n=20, length=32):
    """Text that repeats itself, so that inputs go together."""
    g = torch.Generator().manual_seed(5)
    few = torch.randint(0, 160, (6, 8), generator=g)
    return few[torch.randint(0, 6, (n, length // 8), generator=g)].flatten(1)


class Watched(calibrate.Solver):
    """Keeps every Hessian with what it was for, and looks at which layers have weights meanwhile."""

    def _hessians(self, layer, module, kept):
        found = super()._hessians(layer, module, kept)
        with_weights = [i for i, block in enumerate(self.model.layers) if any(not p.is_meta for p in block.parameters())]
        assert with_weights == [self.layer] and self.model.layers[self.layer] is layer
        assert all(not p.is_meta for p in layer.parameters()) and self.model.head.weight.is_meta
        self.__dict__.setdefault("seen", {})[self.layer, next(n for n, m in layer.named_modules() if m is module)] = found
        return found


def gptq_source(families, name, act_order=True, dtype=FP32, **more):
    source = read_checkpoint(families(name)[0])
    solver = Watched(source, windows_of(), "cpu", dtype, Int4(32), 0.01, 128, act_order)
    new = quantized(source, "int4", 32, **more, solver=solver)
    return held(new), solver


@pytest.mark.parametrize("name", ["llama-biased", "qwen2_moe", "gpt_oss", "gemma3_text", "gpt2", "muse_glimmer", "youtu",
                                  "gemma4", "gemma4-26b", "lfm2", "qwen3_5_text", "bamba", "falcon_h1-norm", "nemotron_h-latent",
                                  "falcon_mamba", "jamba"])
def test_gptq_of_a_model(families, name):
    """Every linear solved for the inputs that the quantized model gives it, an expert for its own."""
    source, solver = gptq_source(families, name, head="none")              # int8 would round the embedding too
    plain = read_checkpoint(families(name)[0])
    assert source.quantization["gptq"] and "by GPTQ" in describe(source)
    assert solver.held_out == {8, 17} and not solver.solved and all(p.is_meta for block in solver.model.layers for p in block.parameters())
    linears = {n for n in source.tensors if n.endswith(".zeros")}
    assert {n.replace(".zeros", ".weight") for n in linears} == {n for n in plain.tensors if QUANTIZED.match(n.removesuffix(".weight"))}

    model = load_model(meant_checkpoint(source), FP32, "cpu")
    inputs, moe = {}, plain.cfg.moe
    for (i, module) in solver.seen:
        def see(_, args, key=(i, module)):
            x = args[0]
            if len(args) > 1:                              # to an expert: which, the router says
                x = [x[args[1] == e] for e in range(moe.n_expert)]
            inputs.setdefault(key, []).append(x)
        model.layers[i].get_submodule(module).register_forward_pre_hook(see)
    routed = {}
    for i, layer in enumerate(model.layers):
        if hasattr(layer.ffn, "router"):
            def choose(m, args, i=i):
                x = args[0].flatten(0, 1)
                seen, judged = (m.norm(x), m.router_norm(x)) if hasattr(m, "norm") else (x, x)
                routed.setdefault(i, []).append((seen, m.router(judged).topk(m.n_active).indices))
            layer.ffn.register_forward_pre_hook(choose)
    model.setup_cache(0, 32)
    for row in windows_of():
        model(row[None], torch.arange(32))
    for key, (hessian, held, _) in solver.seen.items():
        for found, own in ((hessian, [i for i in range(20) if i not in (8, 17)]), (held, [8, 17])):
            if isinstance(inputs[key][0], list):
                xs = [torch.cat([inputs[key][i][e] for i in own]) for e in range(moe.n_expert)]
                expected = torch.stack([x.T @ x for x in xs])
                if key[1] == "ffn.gate":                   # the rows of one expert, picked by hand
                    for e in range(moe.n_expert):
                        mine = torch.cat([x[(ids == e).any(-1)] for x, ids in (routed[key[0]][i] for i in own)])
                        assert sorted(mine.sum(-1).tolist()) == pytest.approx(sorted(xs[e].sum(-1).tolist()), abs=1e-4)
            else:
                x = torch.cat([inputs[key][i].flatten(0, -2) for i in own])
                expected = x.T @ x
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())

    for (i, module), (hessian, _, cross) in solver.seen.items():   # and solved for just these
        pieces = [f"layers.{i}.{p}" for p in disk_names(f"{module}.weight")]
        w, h = torch.cat([plain.tensors[p].whole() for p in pieces], -2), hessian
        if h.dim() > 2:
            w, h = w[1], h[1]
        h = gptq.shrink_correlations(h, calibrate.SHRINKAGE)
        aim = w.float() if cross is None else gptq.correct_weight(w.float(), h, cross, calibrate.CORRECTION)
        found = refine.refine(aim, h, *gptq.solve(aim, h, Int4(32)), Int4(32))
        leaves = [torch.cat([source.tensors[p.replace("weight", leaf)].whole() for p in pieces], -2) for leaf in ("weight", "scales", "zeros")]
        leaves = [t[1] if t.dim() > 2 else t for t in leaves]
        assert torch.equal(leaves[0], pack_nibbles(found[0])) and torch.equal(leaves[1].float(), found[1]) and torch.equal(leaves[2].float(), found[2])

    ratios = solver.ratios
    assert len(ratios) == sum(1 for name, m in blank_model(plain.cfg, FP32).layers.named_modules()
                              if isinstance(m, torch.nn.Linear | ExpertLinear) and not isinstance(m, HeadLinear)
                              and not name.endswith(("rates", "decay", "select", "step", "latent"))) - len(routed) * (
                                  1 + bool(getattr(moe, "shared_dim", 0) and moe.shared_gate))
    middle = sorted(ratios)[len(ratios) // 2]              # a random model's deviations, which are made up for, are large
    assert middle < (1.05 if name == "muse_glimmer" else 1) and "median ratio" in solver.summary()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen2_moe", "gemma3_text", "deepseek_v2", "gemma4", "qwen3_5_text", "muse_glimmer", "bamba",
                                  "falcon_h1", "nemotron_h-experts", "mamba", "jamba"])
def test_gptq_is_nearer_than_rounding(families, name, act_order):
    """What counts in the end: the whole model's logits, on text that it did not see."""
    source, _ = gptq_source(families, name, act_order, head="none")
    rounded_only = quantized_source(families, name, "int4", "none")
    unseen, off = windows_of(60)[30:], []
    for s in (read_checkpoint(families(name)[0]), source, rounded_only):
        model = load_model(meant_checkpoint(s), FP32, "cpu")
        model.setup_cache(0, 32)
        off.append(model(unseen, torch.arange(32), logits_to_keep=32))
    off = [((x - off[0]).norm(dim=-1) / off[0].norm(dim=-1)).median() for x in off[1:]]
    assert off[0] < 0.95 * off[1], off


def test_solver_in_low_precision(families):
    """Forward passes in bf16, the solving in fp32; what was dequantized goes on in bf16."""
    source, solver = gptq_source(families, "llama3", dtype=BF16)
    assert all(h.dtype == FP32 for h, *_ in solver.seen.values()) and all(x.dtype == BF16 for x in solver.x)
    assert sum(r < 1 for r in solver.ratios) > len(solver.ratios) / 2


def test_solver_wants_its_order(families):
    source = read_checkpoint(families("llama3")[0])
    solver = calibrate.Solver(source, windows_of(), "cpu", FP32, Int4(32))
    name = "layers.1.attn.wq.weight"
    with pytest.raises(AssertionError, match=f"{name} was requested before layers.0"):
        solver(name)


def test_solver_refuses_infinite_activations(families, tmp_path):
    source = read_checkpoint(families("llama3")[0])
    huge = {**source.tensors, "embed.weight": lazy("embed.weight", source.tensors["embed.weight"].whole() / 0)}
    solver = calibrate.Solver(replace(source, tensors=huge), windows_of(), "cpu", FP32, Int4(32))
    with pytest.raises(ValueError, match="infinite activations in this dtype"):
        solver("layers.0.attn.wq.weight")


def test_calibration_windows():
    ids = list(range(1, 11))
    assert calibrate.split_windows(ids, 4, 9, False).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert calibrate.split_windows(ids, 4, 9, True).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert calibrate.split_windows(ids, 4, 2, True).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert calibrate.split_windows(ids, 5, 9, True).tolist() == [ids[:5], ids[5:]]
    for n, pad in ((7, False), (4, True), (0, True)):
        with pytest.raises(ValueError, match=f"has {n} tokens, less than two windows of 4"):
            calibrate.split_windows(ids[:n], 4, 9, pad)
    assert english_text()[-1000:] not in english_text(held_out=True) and len(english_text()) > 3e5


# ---- The command line ---------------------------------------------------------------------------

@pytest.mark.parametrize("has_bf16, found", [(True, BF16), (False, FP32)])
def test_many_rows_are_in_what_the_cpu_multiplies(families, monkeypatch, has_bf16, found):
    cfg, cpu = read_checkpoint(families("llama3")[0]).cfg, torch.device("cpu")
    monkeypatch.setattr(devices, "has_bf16", lambda: has_bf16)
    assert devices.pick_dtype("auto", cpu, cfg, many_rows=True) == found
    assert devices.pick_dtype("auto", cpu, cfg) == devices.pick_dtype("bfloat16", cpu, cfg, many_rows=True) == BF16


def run(capsys, *argv, command=quantizing.run):
    """-> exit status, stdout, stderr."""
    try:
        status = cli.guarded(command, [str(a) for a in argv])
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *argv, command=quantizing.run):
    """-> the one line that says why."""
    status, out, err = run(capsys, *argv, command=command)
    lines = err.strip().splitlines()
    assert status == 2 and out == "" and len(lines) == 1, (status, out, err)
    assert "error: " in lines[0] and "Traceback" not in err
    return lines[0].split("error: ", 1)[1]


def greedy(capsys, *argv, n=20):
    """What generate.py says after nine random tokens."""
    status, out, err = run(capsys, *argv, "--device", "cpu", "--temperature", 0, "--prompt", 9, "--max_new_tokens", n,
                           "--ignore_eos", "--json", command=session.run)
    assert status == 0, err
    return json.loads(out)


@pytest.fixture
def model(families, tmp_path):
    """A copy of a tiny Llama with a tokenizer of 160 words and a chat template."""
    directory = tmp_path / "tiny"
    shutil.copytree(families("llama3")[0], directory)
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "calibration.txt"
    path.write_text(" ".join(f"w{i}" for i in windows_of(40).flatten().tolist()))
    return path


def left(directory):
    return {str(p.relative_to(directory)) for p in directory.rglob("*")}


@pytest.mark.parametrize("argv, name, describes", [
    (["--mode", "int8"], "model_int8.pth", "int8, head int8"), ([], "model_int8.pth", "int8, head int8"),
    (["--mode", "int4"], "model_int4.g32.pth", "int4-g32, head int8"),
    (["--mode", "int4", "--quantize-head", "int4", "--label", "mine-"], "model_mine-int4.g32.pth", "int4-g32, head int4-g32"),
    (["--mode", "int8", "--quantize_head", "none"], "model_int8.pth", "int8, head none"),
    (["--mode", "int4-gptq"], "model_int4-gptq.g32.pth", "int4-g32 by GPTQ, head int8"),
    (["--mode", "int4-gptq", "--no_act_order", "--percdamp", "0.1", "--blocksize", "64", "--pad_calibration_inputs", "--dtype", "float32"],
     "model_int4-gptq.g32.pth", "int4-g32 by GPTQ, head int8")], ids=lambda v: "".join(v)[:40])
def test_command_writes_beside_the_source(capsys, model, text, argv, name, describes):
    before, n_key = left(model.parent), ["--calibration_file", text, "--calibration_seq_length", 32, "--calibration_limit", 12]
    status, out, err = run(capsys, "-m", model, *argv, *(n_key if "int4-gptq" in argv else []))
    assert status == 0 and out == f"{model / name}\n", err
    assert left(model.parent) == before | {f"tiny/{name}"}
    source = read_checkpoint(model / name)
    assert describe(source) == describes and source.tokenizer == model
    if "gptq" in name:
        assert "calibrating on 12 windows of 32 tokens" in err and "layer 4 of 4: output error" in err
        assert re.search(r"of 16 linears have a smaller output error on held-out text than rounding to nearest", err)
        assert len(err.splitlines()) == 6
    said = greedy(capsys, "-m", model / name)
    assert len(said["new_ids"]) == 20 and f"{said['quantization']}, head {said['quantized_head']}" == describes.replace(" by GPTQ", "")
    if "gptq" not in name:                                 # the flags say the same without a file
        flags = [x for x in (["--quantize", "int8"] if not argv else argv)]
        flags = ["--quantize" if f == "--mode" else f for f in flags if f not in ("--label", "mine-")]
        assert greedy(capsys, "-m", model, *flags)["new_ids"] == said["new_ids"]


@pytest.mark.parametrize("name", ["granitemoehybrid-mamba", "falcon_h1", "nemotron_h", "mamba2", "jamba"])
def test_gptq_of_a_hybrid_by_the_command(capsys, families, model, text, name):
    """Its convolutions, decays, skips and step sizes stay; what the file says is what is generated."""
    for path in families(name)[0].iterdir():
        shutil.copy(path, model)
    status, out, err = run(capsys, "-m", model, "--mode", "int4-gptq", "--calibration_file", text, "--calibration_seq_length", 32,
                           "--calibration_limit", 12)
    assert status == 0 and out == f"{model / 'model_int4-gptq.g32.pth'}\n", err
    plain, source = read_checkpoint(model), read_checkpoint(model / "model_int4-gptq.g32.pth")
    for key, t in plain.tensors.items():
        if re.search(r"\.(conv\w*|taps\w*|decay\w*|skip|norm\w*|select|step)(\.|$)", key):
            assert torch.equal(source.tensors[key].whole().float(), t.whole().to(source.tensors[key].dtype).float()), key
    n, of = map(int, re.search(r"(\d+) of (\d+) linears have a smaller output error", err).groups())
    assert n >= 0.7 * of and len(greedy(capsys, "-m", model / "model_int4-gptq.g32.pth")["new_ids"]) == 20


def test_gptq_of_a_shared_block_is_refused(capsys, families, model, text):
    for path in families("zamba2")[0].iterdir():
        shutil.copy(path, model)
    message = refused_late(capsys, "-m", model, "--mode", "int4-gptq", "--calibration_file", text, "--calibration_seq_length", 32)
    assert "GPTQ of a transformer block that several layers share is not supported: use --mode int4" in message


def test_file_works_alone(capsys, model, tmp_path):
    """Elsewhere, the tokenizer and its template go into the file; beside their files, they do not."""
    from gpt_faster.text import tokenizer_files
    elsewhere = tmp_path / "new/directory/small.pth"
    status, out, _ = run(capsys, "-m", model, "--output", elsewhere)
    assert status == 0 and out == f"{elsewhere}\n"
    (tmp_path / "alone").mkdir()
    shutil.move(elsewhere, tmp_path / "alone/x.pth")
    source = read_checkpoint(tmp_path / "alone/x.pth")
    tokenizer = tokenizer_files.load(source.tokenizer)
    assert tokenizer.encode("w7 w159") == [7, 159] and tokenizer.chat_template == "{{ messages[0].content }}"
    run(capsys, "-m", model)
    assert greedy(capsys, "-m", tmp_path / "alone/x.pth")["new_ids"] == greedy(capsys, "-m", model / "model_int8.pth")["new_ids"]
    shutil.move(model / "model_int8.pth", tmp_path / "alone/y.pth")
    assert "no tokenizer: expected tokenizer.json" in refused(capsys, "-m", tmp_path / "alone/y.pth", "--prompt", "9", command=session.run)


def test_default_output_of_gguf_and_hub(capsys, model, families, tmp_path, monkeypatch):
    """Not into the hub's cache, nor beside a GGUF, whose directory's one model it is."""
    from test_formats import write_gguf
    monkeypatch.chdir(tmp_path)
    path = write_gguf(families("qwen2")[1], "qwen2", tmp_path / "small.gguf", vocabulary=[f"w{i}" for i in range(160)])
    snapshot = tmp_path / "hub/models--org--name/snapshots/0123"
    shutil.copytree(model, snapshot)
    for source, name in ((path, "checkpoints/small/model_int8.pth"), (snapshot, "checkpoints/org/name/model_int8.pth")):
        status, out, _ = run(capsys, "-m", source)
        assert status == 0 and out == f"{name}\n" and (tmp_path / name).exists()
        assert greedy(capsys, "-m", name)["new_ids"] == greedy(capsys, "-m", source, "--quantize", "int8")["new_ids"]
        assert isinstance(read_checkpoint(Path(name)).tokenizer, dict)


def test_quantizing_over_its_own_source(capsys, model):
    """--output may name the very file that is read."""
    save_checkpoint(read_checkpoint(model), model / "model.pth", None)
    run(capsys, "-m", model / "model.pth")
    expected = read_checkpoint(model / "model_int8.pth")
    status, _, err = run(capsys, "-m", model / "model.pth", "--output", model / "model.pth")
    assert status == 0, err
    found = read_checkpoint(model / "model.pth")
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[n].whole(), t.whole()) for n, t in expected.tensors.items())


def test_load_model_from_python(model):
    """The layout is the engine's: packed once, by who multiplies."""
    quantized, source, _ = loading.load_model(str(model), scheme="int4-g32", head="none", engine="kv_cache")
    assert schemes(source) == ("int4-g32", "none") and quantized.layers[0].attn.wo.kernel is INT4_CPU
    as_on_disk, *_ = loading.load_model(str(model), scheme="int4-g32", head="none")
    assert type(as_on_disk.layers[0].attn.wo) is QuantizedLinear


@torch.no_grad()
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("mode, head", [("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("int4", "none")])
@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_compiled_from_the_layout_on_disk(families, name, mode, head, dtype):
    """As from the uncompiled kernels' layout; what the operations do not take has that one afterwards."""
    source = quantized_source(families, name, mode, head)
    models = [loading.load(source, dtype, "cpu", engine) for engine in ("compile", "kv_cache")]
    for model in models:
        compile_model(model)
    one, other = (lengths_of(model) for model in models)
    assert all(map(torch.equal, one, other))
    kinds = [{n: type(m) for n, m in model.named_modules()} for model in models]
    assert kinds[0] == kinds[1] and QuantizedLinear not in kinds[0].values()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "subclass"])
@pytest.mark.parametrize("name, part", [("llama3", "layers.0.ffn.down"), ("llama3", "layers.0.attn.wqkv"), ("llama3", "head"),
                                        ("gemma2", "embed"), ("gemma2", "head"), ("qwen3_moe", "layers.1.ffn.up")])
def test_an_edited_linear_is_packed_by_nobody(families, name, part, how, dtype):
    """A hook, a forward or a class of one's own on what lies as on disk: it runs at each of several calls."""
    model = loading.load(quantized_source(families, name, "int8", "int8"), dtype, "cpu", "compile")
    module, seen = model.get_submodule(part), []
    kind = type(module)

    class Mine(kind):
        def forward(self, *args):
            seen.append(1)
            return super().forward(*args)

    def forward(*args):
        seen.append(1)
        return kind.forward(module, *args)
    if how == "hook":
        module.register_forward_hook(lambda *args: seen.append(1))
    elif how == "pre-hook":
        module.register_forward_pre_hook(lambda *args: seen.append(1))
    elif how == "forward":
        module.forward = forward
    else:
        module.__class__ = Mine
    compile_model(model)
    for n in range(1, 4):
        lengths_of(model, (7,))
        assert len(seen) == n and model.get_submodule(part) is module


def test_quantized_prefill_and_padding_compiled_away(capsys, model):
    """Engines and batches of the command line."""
    for mode in ("int8", "int4"):
        said = greedy(capsys, "-m", model, "--quantize", mode, "--dtype", "float32")["new_ids"]
        assert greedy(capsys, "-m", model, "--quantize", mode, "--dtype", "float32", "--engine", "recompute")["new_ids"] == said
        status, out, _ = run(capsys, "-m", model, "--quantize", mode, "--dtype", "float32", "--device", "cpu", "--temperature", 0,
                             "--prompt", 9, "--max_new_tokens", 20, "--ignore_eos", "--json", "--batch_size", 3, command=session.run)
        assert [json.loads(line)["new_ids"] for line in out.splitlines()] == [said] * 3


# ---- Bad input ----------------------------------------------------------------------------------

def test_what_cannot_be_quantized(capsys, model, text):
    run(capsys, "-m", model)
    before = left(model)
    assert "is already quantized (int8, head int8): use the original model" in refused(capsys, "-m", model / "model_int8.pth")
    message = refused(capsys, "-m", model / "model_int8.pth", "--quantize", "int4", "--prompt", "9", "--max_new_tokens", 2, command=session.run)
    assert "is already quantized (int8, head int8): use the original model" in message
    assert "invalid choice: 'int3'" in refused(capsys, "-m", model, "--mode", "int3")
    assert "invalid choice: 'int4-gptq'" in refused(capsys, "-m", model, "--quantize", "int4-gptq", command=session.run)
    assert "no such file or directory" in refused(capsys, "-m", "/nowhere/x.pth")
    assert "device 'abacus' not found" in refused(capsys, "-m", model, "--device", "abacus")
    for command, flag in ((quantizing.run, ["--mode"]), (session.run, ["--prompt", "9", "--max_new_tokens", 2, "--quantize"])):
        message = refused(capsys, "-m", model, *flag, "int4", "--groupsize", "64", command=command)
        assert re.search(r"--groupsize 64 does not divide the 96 inputs of layers.\d.ffn.down.weight: use 32", message)
        assert "invalid choice: 48" in refused(capsys, "-m", model, *flag, "int4", "--groupsize", "48", command=command)
    assert left(model) == before


@pytest.mark.parametrize("argv, message", [
    (["--calibration_file", "none.txt"], "none.txt"), (["--calibration_file", "empty.txt"], "empty.txt: no text to calibrate on"),
    (["--calibration_file", "blank.txt"], "blank.txt: no text to calibrate on"),
    (["--calibration_file", "short.txt"], "the calibration text has 3 tokens, less than two windows of 32"),
    (["--calibration_file", "latin1.txt"], "latin1.txt: not UTF-8 text"), (["--calibration_file", "."], "Is a directory"),
    (["--calibration_tasks", "no_such_task", "nor_this"], "lm-eval has no task no_such_task, nor_this"),
    (["--calibration_file", "short.txt", "--calibration_tasks", "x"], "--calibration_file and --calibration_tasks are mutually exclusive"),
    (["--calibration_seq_length", "500"], "--calibration_seq_length 500 exceeds the model's context of 128"),
    (["--calibration_limit", "1"], "must be at least 2, got 1"), (["--calibration_seq_length", "1"], "must be at least 2, got 1"),
    (["--percdamp", "0"], "must be above 0, got 0"), (["--percdamp", "nan"], "must be above 0"),
    (["--blocksize", "0"], "must be at least 1, got 0"), (["--groupsize", "128"], "--groupsize 128 does not divide the 64 inputs"),
    (["--dtype", "int4"], "invalid choice: 'int4'"), (["--output", "."], "."), (["--output", "/proc/x/y.pth"], "/proc/x"),
], ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_calibration_arguments(capsys, model, text, tmp_path, monkeypatch, argv, message):
    if "--calibration_tasks" in argv:
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    for name, data in (("empty", b""), ("blank", b" \n\t"), ("short", b"w1 w2 w3"), ("latin1", "Café".encode("latin1"))):
        Path(name + ".txt").write_bytes(data)
    before = left(tmp_path)
    more = [] if "--calibration_file" in argv or "--calibration_tasks" in argv else ["--calibration_file", text]
    more += [] if "--calibration_seq_length" in argv else ["--calibration_seq_length", "32"]
    assert message in refused_late(capsys, "-m", model, "--mode", "int4-gptq", *more, *argv)
    assert left(tmp_path) == before


def refused_late(capsys, *argv):
    """As refused; lines that say how far it is may come before."""
    status, out, err = run(capsys, *argv)
    *said, last = err.strip().splitlines()
    assert status == 2 and out == "" and "error: " in last and not any("error" in line.split("output error")[0] for line in said), err
    return last


def test_tokenizer_of_another_model(capsys, model, tmp_path):
    from tokenizers import Tokenizer, models
    Tokenizer(models.WordLevel({"a": 500}, unk_token="a")).save(str(model / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a" * 400)
    before = left(model)
    Tokenizer(models.BPE({"a": 500}, [])).save(str(model / "tokenizer.json"))
    message = refused_late(capsys, "-m", model, "--mode", "int4-gptq", "--calibration_file", tmp_path / "a.txt", "--calibration_seq_length", 32)
    assert "token id 500 is out of range: the model has 160 tokens" in message and left(model) == before


def test_no_tokenizer(capsys, model, tmp_path, text):
    """int8 beside the source needs none; where one is needed, it says so before it begins."""
    (model / "tokenizer.json").unlink()
    assert run(capsys, "-m", model)[0] == 0
    before = left(tmp_path)
    assert "no tokenizer: expected" in refused(capsys, "-m", model, "--mode", "int4-gptq", "--calibration_file", text, "--calibration_seq_length", 32)
    assert "no tokenizer: expected" in refused(capsys, "-m", model, "--output", tmp_path / "x.pth")
    assert "no tokenizer: expected" in refused(capsys, "-m", model, "--output", tmp_path / "new/x.pth")
    assert left(tmp_path) == before


@pytest.mark.parametrize("mode", ["int8", "int4-gptq"])
@pytest.mark.parametrize("trouble", ["full", "interrupted", "interrupted while solving", "killed by a bad read"])
def test_trouble_leaves_nothing(capsys, model, text, monkeypatch, mode, trouble):
    before, count = left(model), [0]

    def later(n, error):
        def step(*args, **more):
            count[0] += 1
            if count[0] > n:
                raise error
            return original(*args, **more)
        return step
    if trouble == "full":
        def full(*_):
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(os, "posix_fallocate", full)
    elif trouble == "interrupted":
        original = core.raw_bytes
        monkeypatch.setattr(core, "raw_bytes", later(9, KeyboardInterrupt()))
    elif trouble == "interrupted while solving":
        original = calibrate.solve if "gptq" in mode else Int8.codes
        monkeypatch.setattr(*((calibrate, "solve") if "gptq" in mode else (Int8, "codes")), later(9, KeyboardInterrupt()))
    else:
        original = Int8.scales
        monkeypatch.setattr(Int8, "scales", later(0, OSError(5, "Input/output error")))
    status, out, err = run(capsys, "-m", model, "--mode", mode, "--calibration_file", text, "--calibration_seq_length", 32)
    assert out == "" and "Traceback" not in err and left(model) == before
    assert status == (130 if "interrupted" in trouble else 2)
    if "interrupted" in trouble:
        assert count[0] == 10 and err.strip().splitlines()[-1] == "interrupted"


def damaged(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path.with_name("damaged.pth"))
    return path.with_name("damaged.pth")


def without(name):
    return lambda c: c["model"].pop(name)


def other(name, change):
    return lambda c: c["model"].update({name: change(c["model"][name])})


GATE = "layers.1.ffn.gate"
DAMAGES = {
    "newer": ("int8", lambda c: c.update(version=99), "its format is version 99, this program reads up to 2"),
    "no scales int8": ("int8", without(f"{GATE}.scales"), "gate"),
    "no scales int4": ("int4", without(f"{GATE}.scales"), "gate"),
    "no zeros": ("int4", without(f"{GATE}.zeros"), "are one matrix in memory, but not quantized the same way"),
    "no weight": ("int4", without(f"{GATE}.weight"), "1 tensors are missing: layers.1.ffn.gate.weight"),
    "zeros alone": ("int8", lambda c: c["model"].update({"layers.1.ffn.router.zeros": torch.ones(1)}), "1 unexpected tensors"),
    "other groups": ("int4", other(f"{GATE}.zeros", lambda t: t[:, :1]), "gate.zeros is [96, 1], but the config asks for [96, 2]"),
    "groups that do not divide": ("int4", other(f"{GATE}.scales", lambda t: t.repeat(1, 3)[:, :5]), "gate.scales has 5 groups, which do not divide the 64 inputs"),
    "no groups": ("int4", other(f"{GATE}.scales", lambda t: t[:, :0]), "gate.scales has 0 groups"),
    "a scale": ("int4", other(f"{GATE}.scales", lambda t: t[0, 0]), "gate.scales"),
    "scales of int8 as columns": ("int8", other(f"{GATE}.scales", lambda t: t[:, None]), "gate.scales is [96, 1], but the config asks for [96]"),
    "fewer scales": ("int8", other(f"{GATE}.scales", lambda t: t[1:]), "gate.scales is [95], but the config asks for [96]"),
    "int8 as uint8": ("int8", other(f"{GATE}.weight", lambda t: t.view(torch.uint8)), "gate.weight has dtype torch.uint8, expected torch.int8 with layers.1.ffn.gate.scales"),
    "int4 as int8": ("int4", other(f"{GATE}.weight", lambda t: t.view(torch.int8)), "has dtype torch.int8, expected torch.uint8 with"),
    "plain with scales": ("int8", other(f"{GATE}.weight", lambda t: t.float()), "gate.weight has dtype torch.float32"),
    "whole scales": ("int8", other(f"{GATE}.scales", lambda t: t.to(torch.int32)), "gate.scales has dtype torch.int32"),
    "transposed": ("int4", other(f"{GATE}.weight", lambda t: t.T.contiguous()), "gate.weight is [32, 96]"),
    "q without scales": ("int8", without("layers.1.attn.wq.scales"), "wq"),
    "q of another kind": ("int8", lambda c: c["model"].update({
        "layers.1.attn.wq.weight": torch.zeros(64, 32, dtype=torch.uint8), "layers.1.attn.wq.scales": torch.ones(64, 2, dtype=BF16),
        "layers.1.attn.wq.zeros": torch.ones(64, 2, dtype=BF16)}), "layers.1.attn.w"),
    "q with other groups": ("int4", lambda c: c["model"].update({
        f"layers.1.attn.wq.{leaf}": torch.ones(64, 1, dtype=BF16) for leaf in ("scales", "zeros")}), "layers.1.attn.w"),
    "q plain": ("int8", lambda c: (c["model"].update({"layers.1.attn.wq.weight": torch.ones(64, 64)}), c["model"].pop("layers.1.attn.wq.scales")), "wq"),
    "a norm": ("int8", lambda c: c["model"].update({"layers.1.attn_norm.weight": torch.ones(64, dtype=torch.int8),
                                                    "layers.1.attn_norm.scales": torch.ones((), dtype=BF16)}), "attn_norm"),
    "the embedding in int4": ("int4", lambda c: c["model"].update({
        "embed.weight": torch.zeros(160, 32, dtype=torch.uint8), **{f"embed.{leaf}": torch.ones(160, 2, dtype=BF16) for leaf in ("scales", "zeros")}}), "embed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file(capsys, model, damage):
    mode, change, message = DAMAGES[damage]
    assert run(capsys, "-m", model, "--mode", mode)[0] == 0
    path = damaged(model / f"model_{mode}{'.g32' if mode == 'int4' else ''}.pth", change)
    assert message in refused(capsys, "-m", path, "--prompt", "9", "--max_new_tokens", "2", command=session.run)


def test_truncated_file(capsys, model):
    run(capsys, "-m", model, "--mode", "int4")
    path = model / "model_int4.g32.pth"
    data = path.read_bytes()
    for keep in (0, 100, len(data) // 2, len(data) - 500):
        path.write_bytes(data[:keep])
        assert "not a readable PyTorch file (truncated?)" in refused(capsys, "-m", path, "--prompt", "9", command=session.run)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_numbers(capsys, model, text, bad):
    """Refused, or, if a file is written, still no numbers there: never a finite one in their place."""
    from safetensors.torch import load_file, save_file
    state = load_file(model / "model.safetensors")
    state["model.layers.2.mlp.up_proj.weight"][3, 5] = bad
    save_file(state, model / "model.safetensors", metadata=dict(format="pt"))
    before = left(model)
    assert "error: " in refused_late(capsys, "-m", model, "--mode", "int4-gptq", "--calibration_file", text, "--calibration_seq_length", 32)
    assert left(model) == before
    for mode in ("int8", "int4"):
        status, out, err = run(capsys, "-m", model, "--mode", mode)
        assert status in (0, 2) and "Traceback" not in err
        if status == 0:
            tensors = read_checkpoint(Path(out.strip())).tensors
            w = meant(*(tensors[f"layers.2.ffn.up.{leaf}"].whole() for leaf in ("weight", "scales", "zeros")
                        if f"layers.2.ffn.up.{leaf}" in tensors))
            assert not w[3, 5].isfinite() and w[:3].isfinite().all() and w[4:].isfinite().all()


# ---- Compiled -----------------------------------------------------------------------------------

def teacher_forced(model, prompt, ids):
    """The logits that a compiled model gives along a known text, prompt and steps."""
    model.setup_cache(1, 64)
    n = prompt.shape[1]
    with torch.inference_mode():
        model(prompt, torch.arange(n))
        return torch.cat([model(torch.tensor([[token]]), torch.tensor([n + i]), 1, 64) for i, token in enumerate(ids)], 1)


@pytest.mark.parametrize("name, mode, head", [("llama-biased", "int8", "int8"), ("gemma3_text", "int4", "int4"), ("mixtral", "int4", "int8")])
def test_compiled(families, name, mode, head, two_threads):
    """By the operations in C++: the same tokens, or nearly the same logits along them."""
    torch._dynamo.reset()
    model, prompt = load_model(quantized_source(families, name, mode, head), BF16, "cpu"), tokens(9, batch=1)
    eager = [t.item() for t in generated(model, prompt, 20, GREEDY)]
    expected = teacher_forced(model, prompt, eager)
    steps = engines.build_steps(model, "compile")
    actual = teacher_forced(model, prompt, eager)
    off = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1))
    assert 0 < off.max() and off.median() < 0.03 and not torch.equal(actual, expected), off
    compiled = [t.item() for t in generated(model, prompt, 20, GREEDY, steps=steps)]
    first = next((i for i in range(20) if compiled[i] != eager[i]), None)
    if first:
        logits = expected[0, first - 1]
        assert logits[eager[first]] - logits[compiled[first]] < 0.1 * logits.std(), (first, eager, compiled)
    torch._dynamo.reset()


PRIVATE = ["aten._weight_int8pack_mm", "aten._convert_weight_to_int4pack_for_cpu", "aten._weight_int4pack_mm_for_cpu"]


@pytest.mark.parametrize("name", PRIVATE)
def test_without_a_private_operator_the_products_stay(monkeypatch, name):
    """Another layout or a slower way, and one line on stderr."""
    def absent(*_):
        raise AttributeError("not in this torch")
    space, leaf = name.split(".")
    kernels.int4_block()                                   # asked of the packing once
    with monkeypatch.context() as m:
        m.setattr(getattr(torch.ops, space), leaf, absent)
        check_product(INT8_CPU.product, INT8_CPU, int8_matrix(72, 96, BF16), BF16, [1, 7, 64])
        check_product(INT4_CPU.product, INT4_CPU, int4_matrix(72, 96, 32, BF16), BF16, [1, 7])
