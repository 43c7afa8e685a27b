"""The operations of kernels/cpu/ against float64 and against the layers in plain PyTorch; and what becomes of it where it cannot be."""

import copy
import ctypes
import gc
import math
import os
import platform
import shutil
import subprocess
from dataclasses import replace

import pytest
import test_cpu_cache
import tiny
import torch
from helpers import GREEDY, generated, make_batch

from generate import generate
from gpt_faster.decoding import engines
from gpt_faster.decoding.engines import build_steps
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu import layers as cpu_layers
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.experts import FusedExperts
from gpt_faster.layers.attention import AttentionVariant, ScoredAttention
from gpt_faster.layers.block import BlockVariant, NoBranch
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.feed_forward import GATED, UNGATED, FeedForwardVariant
from gpt_faster.layers.mamba import AttentionAndMamba, Mamba2
from gpt_faster.layers.mamba1 import Mamba1
from gpt_faster.layers.moe import MoEVariant, RoutedMoE
from gpt_faster.layers.zamba import ZambaBlock
from model import ModelConfig, MoE, Transformer, visible
from quantize import Int4, Int8, dequantize

pytestmark = pytest.mark.kernels

FORMATS = ("fp32", "bf16", "int8", "int4-g32", "int4-g64", "int4-g128")
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-5, "int8": 2e-4, "int4-g32": 2e-4, "int4-g64": 2e-4, "int4-g128": 2e-4}
SHAPES = ((64, 64), (96, 128), (40, 384), (1, 256), (576, 1536))         # outputs, inputs


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def leaves(w, kind):
    """-> as on disk, and what they stand for."""
    if kind in ("fp32", "bf16"):
        w = w if kind == "fp32" else w.bfloat16()
        return (w,), w.double()
    scheme = Int8() if kind == "int8" else Int4(int(kind[6:]))
    stored = tuple(scheme.quantize(w).values())
    return stored, dequantize(*stored, *[None] * (3 - len(stored)), torch.float32).double()


def error_of(kind, n_out, n_in, n_row, x_dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    stored, exact = leaves(torch.randn(n_out, n_in, generator=random), kind)
    x = torch.randn(n_row, n_in, generator=random) * torch.rand(n_in, generator=random).exp()
    bias = torch.randn(n_out, generator=random)
    x = x.to(x_dtype)
    y = native.product(x, *native.pack_weight(*stored), (n_out, n_in), bias if n_row % 2 else None)
    expected = x.double() @ exact.T + (bias.double() if n_row % 2 else 0)
    assert y.dtype == x_dtype and y.shape == (n_row, n_out)
    return float((y - expected).abs().max() / (x.double().norm(dim=1).max() * exact.norm(dim=1).max()))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_products(kind, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n_out, n_in in SHAPES:
            for n_row in (*range(1, 15), 31, 32, 33, 70) if n_in < 200 else (1, 2, 7, 65):
                if "-g" in kind and n_in % int(kind[6:]):
                    continue
                assert error_of(kind, n_out, n_in, n_row, seed=n_row) < TOLERANCE[kind], (n_out, n_in, n_row)
        assert error_of(kind, 64, 128, 513) < TOLERANCE[kind]              # more than stay in the L2
        for n_row in (1, 3, 8, 12, 13, 25, 33, 70):
            assert error_of(kind, 64, 640, n_row, torch.bfloat16) < 5e-3, n_row
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n_row", [1, 40])                              # few, many
@pytest.mark.parametrize("name", [*GATED, *(name for name in UNGATED if name not in ("relu", "xielu"))])     # which PyTorch does
def test_activations_of_any_number(name, n_row):
    """Real models' reach hundreds, where an exponential overflows; what is no number stays none."""
    x = torch.tensor([0, 1e-6, 0.5, 3, 10, 60, 87, 88, 89, 100, 150, 400, 1e3, 1e4, 1e6])
    x = torch.cat((x, -x, torch.linspace(-20, 20, 33), torch.tensor([torch.nan])))
    ups = [torch.linspace(-9, 9, 64)] if name in GATED else []
    bias = torch.cat((x, *ups))
    packed = native.pack_weight(torch.zeros(len(bias), 64))
    op = native.linear(*packed, (len(bias), 64), bias, M=n_row)
    out, nothing = torch.empty(n_row, 64), torch.zeros(n_row, 64)
    op.x, op.out, op.activation, op.gated = nothing.data_ptr(), out.data_ptr(), native.ACTIVATIONS[name], name in GATED
    native.run([ctypes.addressof(op)])
    expected = (GATED if ups else UNGATED)[name](x.double(), *[up.double() for up in ups]).float().expand(n_row, 64)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_inputs_that_fill_no_group():
    for n_in in (24, 40, 100):
        assert error_of("fp32", 48, n_in, 5) < 1e-5 and error_of("fp32", 48, n_in, 1) < 1e-5
        assert error_of("bf16", 48, n_in, 5) < 1e-5 and error_of("bf16", 48, n_in, 1) < 1e-5


@pytest.mark.parametrize("n_row", [33, 64, 200])
@pytest.mark.parametrize("outlier", [1, 100, 1e4])
def test_bf16_weights_of_many_rows(outlier, n_row):
    """Where x need not be exact: by bf16, or by integers that are finer, whatever sticks out of a group; zeros stay zeros."""
    random = torch.Generator().manual_seed(n_row)
    w, x = torch.randn(40, 640, generator=random), torch.randn(n_row, 640, generator=random)
    w[3, 7] *= outlier
    w[4] = 0
    w[5, :600] = 0
    x[:, 100] *= outlier
    x[1:, 256:320] = 0
    x[2] = 0
    w = w.bfloat16()
    packed, y = native.pack_weight(w), torch.empty(n_row, 40)
    op = native.linear(*packed, (40, 640), x=x.data_ptr(), out=y.data_ptr(), M=n_row, x_bits=16)
    native.run([ctypes.addressof(op)])
    expected = x.double() @ w.double().T
    of_rounding = (x.bfloat16().double() @ w.double().T - expected).norm()
    assert (y - expected).norm() <= (1.1 if native.has_bf16() else 0.2) * of_rounding
    assert not y[:, 4].any() and not y[2].any()


def test_clang_compiles_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", next(filter(shutil.which, ("clang++", *(f"clang++-{n}" for n in range(30, 13, -1)))), "none"))
    probe = [native.compiler(), "-fopenmp", "-fsyntax-only", "-include", "omp.h", "-x", "c++", os.devnull]
    if "clang" not in (native.compiler() or "") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs clang++ and its OpenMP")
    path = tmp_path / "cpu_ops.so"
    subprocess.run([native.compiler(), *native.options(), "-o", path, native.SOURCE], check=True)
    library = ctypes.CDLL(str(path))
    monkeypatch.setattr(native, "library", lambda: library)
    for kind in FORMATS:
        assert error_of(kind, 96, 128, 9) < TOLERANCE[kind], kind


def test_outputs_are_asked_for_ahead():
    """GCC drops calls of functions that only prefetch, and prompts were a tenth slower for it."""
    if platform.machine() != "x86_64" or "clang" in os.path.basename(native.compiler()) or not shutil.which("objdump"):
        pytest.skip("reads GCC's machine code for x86")
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", native.library_path()], capture_output=True, text=True, check=True)
    assert "\tprefetchw" in code.stdout


OTHER_CPUS = {                                                          # by instructions that every CPU has
    "AVX-512": "WITH_512_BITS",
    "AVX-512 with VNNI and bf16": "WITH_512_BITS WITH_INT8_DOT WITH_BF16",
    "AMX": "WITH_512_BITS WITH_INT8_DOT WITH_BF16 WITH_AMX",
    "AVX-VNNI": "WITH_INT8_DOT",
}


@pytest.fixture(scope="module", params=[None, *OTHER_CPUS])
def other_library(request, tmp_path_factory):
    if request.param is None:
        return native.library()
    path = tmp_path_factory.mktemp("other") / "cpu_ops.so"
    options = [o for o in native.options() if o != "-march=native"]
    defines = [f"-D{name}" for name in OTHER_CPUS[request.param].split()]
    subprocess.run([native.compiler(), *options, *defines, "-O1", "-o", path, native.SOURCE], check=True)
    library = ctypes.CDLL(str(path))
    assert library.panel_width() == (32 if "-DWITH_512_BITS" in defines else 16)
    return library


@pytest.fixture
def any_cpu(other_library, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: other_library)
    monkeypatch.setattr(native, "panel_width", other_library.panel_width)


def test_caches_of_codes_on_other_cpus(any_cpu):
    """By vectors of 16 lanes, by bf16 tiles, and by instructions that every CPU has."""
    for precisions in (("int8", "int8"), ("int4", "int4"), ("fp8", "fp8"), ("int4", "int8")):
        for H in (40, 64, 128):
            test_cpu_cache.check_codes(precisions, H)
            for T in (1, 3, 50):
                test_cpu_cache.check(T, 2, T, precisions, 90, H=H, is_turned=True)
                test_cpu_cache.check(T, 2, T, precisions, 290, H=H, out_dtype=torch.bfloat16)


def test_other_cpus(any_cpu):
    for kind in FORMATS:
        for n_row in (1, 2, 5, 9, 13, 17, 33, 40, 49, 70):
            assert error_of(kind, 96, 128, n_row) < TOLERANCE[kind], (kind, n_row)
            assert error_of(kind, 96, 640, n_row, torch.bfloat16) < 5e-3, (kind, n_row)    # by bf16, integers or bytes
    for case in range(12):
        dtype = torch.float32 if case < 6 else torch.bfloat16
        check_attention(case, n_row=1 + case % 2, T=(1, 5, 40)[case % 3], window=None, cap=None, sinks=False, dtype=dtype)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_experts(any_cpu, kind):
    """Few and many rows each, of one product, gated: where they lie in memory is their number's matter."""
    random, ends = torch.Generator().manual_seed(0), torch.tensor([50, 50, 67, 70, 150], dtype=torch.int32)
    stored, exact = leaves(torch.randn(5 * 2 * 96, 640, generator=random) / 25, kind)
    x, order = torch.randn(90, 640, generator=random).bfloat16(), torch.randint(90, (150,), dtype=torch.int32, generator=random)
    out = torch.empty(150, 96, dtype=torch.bfloat16)
    op = native.linear(*native.pack_weight(*stored), (192, 640), M=150, x=x, out=out, gather_rows=order, expert_ends=ends, n_expert=5,
                        gated=True, activation=native.ACTIVATIONS["silu"], x_bits=16)
    native.run([ctypes.addressof(op)])
    exact = exact.view(5, 2, 96, 640)
    for e, (begin, end) in enumerate(zip([0, *ends[:-1]], ends)):
        gate, up = torch.einsum("hoi,mi->hmo", exact[e], x[order[begin:end]].double())
        expected = torch.nn.functional.silu(gate) * up
        assert (out[begin:end] - expected).norm() <= 6e-3 * expected.norm(), e


def in_8_bits(x):
    """x in groups of 32, each with a scale of its own."""
    groups = x.unflatten(-1, (-1, 32))
    unit = groups.abs().amax(-1, keepdim=True) / 127
    return (unit * (groups * (1 / unit)).round()).flatten(-2)


def format_of(kind):
    return native.INT8 if kind == "int8" else native.INT4


@pytest.mark.parametrize("kind", ["int8", "int4-g32", "int4-g64", "int4-g128"])
def test_many_rows_as_bytes(any_cpu, monkeypatch, kind):
    if native.activation_bits(format_of(kind)) == 16:
        pytest.skip("a CPU that does not multiply these")
    monkeypatch.setattr(native, "x_bits", lambda dtype: 8)                  # though it is fp32
    torch.manual_seed(0)                                                     # a tie may be rounded either way
    stored, exact = leaves(torch.randn(96, 640), kind)
    packed = native.pack_weight(*stored)
    for n_row in (17, 24, 25, 48):                                         # more meet them as bf16 where there is AMX
        x = torch.randn(n_row, 640) * torch.rand(640).exp()
        y = native.product(x, *packed, (96, 640))
        expected, finer = in_8_bits(x).double() @ exact.T, x.double() @ exact.T
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)
        assert (y - finer).abs().max() > 5 * (y - expected).abs().max()
    stored, exact = leaves(torch.randn(1100, 128), kind)                     # few rows, of which a task takes several blocks
    x = torch.randn(6, 128)
    y, expected = native.product(x, *native.pack_weight(*stored), (1100, 128)), x.double() @ exact.T
    assert (y - expected).norm() < 0.02 * expected.norm()


def test_the_largest_sums_of_bytes(any_cpu, monkeypatch):
    """What 32 inputs can give: the codes 15 and 0 by x of one sign, and of either."""
    monkeypatch.setattr(native, "x_bits", lambda dtype: 8)
    codes = torch.tensor([0xff, 0x00, 0xf0, 0x0f], dtype=torch.uint8)[:, None].expand(4, 64).repeat(16, 1)
    scales, zeros = torch.ones(64, 4), torch.full((64, 4), 8.0)
    packed = native.pack_weight(codes, scales, zeros)
    signs = torch.tensor([1, -1])[torch.randint(2, (40, 128))].float()
    for x in (torch.ones(40, 128), -torch.ones(40, 128), signs):
        expected = x.double() @ dequantize(codes, scales, zeros, torch.float32).double().T
        torch.testing.assert_close(native.product(x, *packed, (64, 128)).double(), expected, rtol=1e-6, atol=1e-3)


def test_activation_bits(any_cpu):
    """16 for a model that asks for them; one in fp32 has finer ones always."""
    errors = {}
    kinds = [kind for kind in ("int8", "int4-g64") if native.activation_bits(format_of(kind)) == 8]
    try:
        for bits in (8, 16):
            native.set_activation_bits(bits)
            assert native.x_bits(torch.float32) == 32
            for kind in kinds:
                assert native.activation_bits(format_of(kind)) == bits
                random = torch.Generator().manual_seed(7)
                stored, exact = leaves(torch.randn(64, 640, generator=random), kind)
                x = torch.randn(40, 640, generator=random).bfloat16()
                y = native.product(x, *native.pack_weight(*stored), (64, 640))
                errors[kind, bits] = (y - x.double() @ exact.T).abs().mean()
                assert error_of(kind, 64, 640, 40) < TOLERANCE[kind]         # fp32
    finally:
        native.set_activation_bits(8)
    for kind in kinds:
        assert 0 < errors[kind, 16] < 0.7 * errors[kind, 8], errors


def check_attention(seed, n_row, T, window, cap, sinks, K=2, share=3, H=24, dtype=torch.float32, start=None):
    """RoPE, the write and the attention of T tokens that go on after `start`, by both."""
    random = torch.Generator().manual_seed(seed)
    start = seed * 7 % 90 if start is None else start
    N, S = K * share, start + T + 3
    kv_len = start + T + seed % 3
    width = (N + 2 * K) * H
    qkv = torch.randn(n_row, T, width, generator=random)
    caches = [torch.randn(n_row + 1, K, S, H, generator=random).to(dtype) for _ in range(2)]
    ours = [t.clone() for t in caches]
    rows = torch.randperm(n_row + 1, generator=random)[:n_row]
    pos = start + torch.arange(T).expand(n_row, T) - torch.arange(n_row)[:, None] * (start > n_row)
    angle = torch.randn(n_row, 1, T, H // 2, generator=random)
    cos, sin = angle.cos(), angle.sin()
    mask = visible(pos, torch.arange(kv_len), window).contiguous()
    sink = torch.randn(N, generator=random) if sinks else None
    out = torch.empty(n_row, T, N * H)
    todo = [pos.contiguous(), mask, cos, sin, rows, qkv.clone(), sink]
    at = native.Positions(
        n_key=kv_len, mask_stride_b=T * kv_len, mask_stride_t=kv_len, rope_stride_b=T * H // 2, slot_stride_b=T, cos=cos.data_ptr(),
        sin=sin.data_ptr(), mask=mask.data_ptr(), slot=todo[0].data_ptr(), rows=rows.data_ptr())
    op = native.Attention(
        kind=native.ATTENTION, has_keys=True, B=n_row, T=T, N=N, K=K, H=H, V=H, S=S, n_row=n_row + 1, scale=0.3,
        cap=cap or 0.0, positions=ctypes.addressof(at), sinks=sink.data_ptr() if sinks else None,
        qkv=todo[5].data_ptr(), k_cache=native.cache_of(ours[0]), v_cache=native.cache_of(ours[1]), out=out.data_ptr())
    native.run([ctypes.addressof(op)])

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    q, k, v = (t.transpose(1, 2) for t in qkv.view(n_row, T, -1, H).split((N, K, K), 2))
    q, k = turned(q), turned(k)
    for cache, new in zip(caches, (k, v)):
        cache[rows[:, None], :, pos] = new.transpose(1, 2).to(dtype)
    for cache, mine in zip(caches, ours):
        torch.testing.assert_close(mine, cache, atol=0.02 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    attend = ScoredAttention(0.3, N, cap, sinks)
    attend.sinks = sink if sink is None else torch.nn.Parameter(sink)
    k, v = (cache[rows, :, :kv_len].float() for cache in ours)
    expected = attend(q, k, v, mask).transpose(1, 2).reshape(n_row, T, -1)
    error = 2e-5 if dtype == torch.float32 else 1e-2               # products of bf16, where a CPU has them
    torch.testing.assert_close(out, expected, atol=error, rtol=error)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window, cap, sinks", [(None, None, False), (9, None, True), (None, 2.0, True), (40, 5.0, False)])
def test_attention(window, cap, sinks, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for T in (*range(1, 9), 16, 33, 70, 129):
            check_attention(T, 1 + T % 3, T, window, cap, sinks)
            for start in (0, 250):
                check_attention(T, 2, T, window, cap, sinks, start=start, dtype=torch.bfloat16)
        for start in (0, 1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1500):
            for share in (1, 3, 8):
                check_attention(start, 1, 1, window, cap, sinks, share=share, start=start, H=64)
                check_attention(start, 2, 4, window, cap, sinks, share=share, start=start, dtype=torch.bfloat16)
    finally:
        torch.set_num_threads(before)


# ---- Models -------------------------------------------------------------------------------------

def logits_of(model, tokens, cut):
    """In two pieces, then token by token, by the cache."""
    model.setup_cache(1, tokens.shape[1] + 3, 16)
    at, found = 0, []
    for n in (cut, 9, *[1] * (tokens.shape[1] - cut - 9)):
        found.append(model(tokens[:, at:at + n], torch.arange(at, at + n), n, at + n + 1))
        at += n
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family_by_operations(families, name):
    directory, _ = families(name)
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    tokens = torch.randint(3, 150, (1, 30))
    expected = logits_of(model, tokens, 6)
    assert cpu_layers.use_operations(model)
    cfg = tiny.flat(model.cfg)
    other_attention = (cfg.clip_qkv or cfg.scores.alibi or cfg.scores.gains
                       or cfg.scores.growth or cfg.scores.softplus_gate or cfg.qk_norm == "layer")
    other_router = cfg.moe and (cfg.moe.choice_of_logits or cfg.moe.router_cap)
    rows = native.panel_width()
    for i, layer in enumerate(model.layers):
        mixer = cfg.mixer[i % len(cfg.mixer)]
        mamba = getattr(mixer, "mamba", mixer)
        whole = isinstance(mixer, GatedDelta) and mixer.k_dim % (rows // 2) == mixer.v_dim % rows == 0
        whole = whole or isinstance(mamba, Mamba2) and mamba.state_dim % (rows // 2) == mamba.head_dim % (rows // 2) == 0
        plain = isinstance(mamba, GatedDelta | Mamba1 | Mamba2)
        has_experts = isinstance(layer.ffn, MoE)
        known = (whole or isinstance(layer.attn, NoBranch) or not other_attention and not plain,
                 cfg.activation not in ("relu", "xielu") and not (has_experts and other_router) or isinstance(layer.ffn, NoBranch),
                 getattr(getattr(layer, "end", None), "gate", None) is not None)
        known = (False,) * 3 if isinstance(layer, ZambaBlock) else known
        assert getattr(layer.forward, "supported", (False,) * 3) == known
    torch.testing.assert_close(logits_of(model, tokens, 6), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gpt_oss"])
def test_a_window_without_a_ring(families, name):
    """Where calls may be as long as the cache, the mask alone hides what is older than the window."""
    model = load_model(read_checkpoint(families(name)[0]), torch.float32, "cpu")
    tokens = torch.randint(3, 150, (1, 24), generator=torch.Generator().manual_seed(1))

    def logits():
        model.setup_cache(1, 24)
        model(tokens[:, :4], torch.arange(4), 1, 24)
        return torch.cat([model(tokens[:, i:i + 1], torch.tensor([i]), 1, 24) for i in range(4, 24)], 1)
    expected = logits()
    assert not model.rings and min(w for w in model.windows if w) < 12 and cpu_layers.use_operations(model)
    torch.testing.assert_close(logits(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family_by_operations_in_bf16(families, finer, name):
    """bf16 is the default: a tensor that fp32 need not convert, a bias, is a temporary here only.

    The margin is eager's own: operations may be 1.25 times as far from fp32's logits as eager is in
    bf16 (they are closer as a rule); twice where rounding may choose another expert, and more in layers that run plain with
    biases, where packed products are rounded before the bias is added.
    """
    directory, _ = families(name)
    tokens = torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(1))
    exact = logits_of(load_model(read_checkpoint(directory), torch.float32, "cpu"), tokens, 6)
    model = load_model(read_checkpoint(directory), torch.bfloat16, "cpu")
    eager = (logits_of(model, tokens, 6) - exact).abs().mean()
    assert cpu_layers.use_operations(model)
    margin = 2.5 if name in ("mamba2-one_group", "zamba2-one_block", "mamba-biased") else 2 if any(model.cfg.sparse) else 1.25
    assert (logits_of(model, tokens, 6) - exact).abs().mean() < margin * eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_of_a_head_is_its_own(families, dtype):
    """Kept while it is used, and followed when it is edited or replaced."""
    name = next(name for name in tiny.FAMILIES if load_config(families, name).head_bias)
    model = load_model(read_checkpoint(families(name)[0]), dtype, "cpu")
    model.setup_cache(1, 8)
    token, pos = torch.tensor([[5]]), torch.arange(1)
    assert cpu_layers.use_operations(model)
    plain = model(token, pos, 1, 8)
    gc.collect()
    scratch = [torch.full_like(model.head.bias, 1e30).float() for _ in range(8)]   # over what was freed
    torch.testing.assert_close(model(token, pos, 1, 8), plain, atol=0, rtol=0)
    del scratch
    with torch.no_grad():
        model.head.bias.data.add_(2)
        torch.testing.assert_close(model(token, pos, 1, 8), plain + 2, atol=0.05, rtol=0)
        model.head.bias = torch.nn.Parameter(model.head.bias + 2)
    torch.testing.assert_close(model(token, pos, 1, 8), plain + 4, atol=0.1, rtol=0)


def load_config(families, name):
    return read_checkpoint(families(name)[0]).cfg


@pytest.fixture
def finer():
    """Activations of 16 bits wherever a CPU has a choice: what bytes round, an expert may be chosen by."""
    bits = native.set_activation_bits(16)
    yield
    native.set_activation_bits(bits)


@pytest.mark.parametrize("scheme, head", [("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("int4", "none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama3", "bamba", "falcon_h1-norm"])
def test_quantized_models(families, finer, name, scheme, head, dtype):
    source = quantized(read_checkpoint(families(name)[0]), scheme, 32, head)
    model = load_model(source, dtype, "cpu")
    tokens = torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(0))
    expected = logits_of(model, tokens, 7)
    assert cpu_layers.use_operations(model)
    found = logits_of(model, tokens, 7)
    if dtype == torch.float32 or name == "llama3":
        assert (found - expected).abs().max() < (2e-3 if dtype == torch.float32 else 0.08) * expected.std()
    else:                                                                   # not farther from fp32 than eager is
        exact = logits_of(load_model(source, torch.float32, "cpu"), tokens, 7)
        assert (found - exact).abs().mean() < 1.25 * (expected - exact).abs().mean()


def test_rows_of_a_batch(families):
    """Prompts of other lengths, and a row that is exchanged: the tokens that each has alone."""
    directory, _ = families("llama3")
    source = read_checkpoint(directory)
    prompts = [torch.randint(3, 150, (n,)).tolist() for n in (5, 17, 9)]
    alone = []
    for prompt in prompts:
        model = load_model(source, torch.float32, "cpu")
        alone.append([t.item() for t in generated(model, [prompt], 12, GREEDY)])
    model = load_model(source, torch.float32, "cpu")
    model.setup_cache(3, 40, 16)
    batch = make_batch(model, [GREEDY] * 3, steps=build_steps(model, "compile"))
    found = torch.cat(list(generate(batch, prompts, 12)), 1).tolist()
    assert found == alone and cpu_layers.uses_operations(model)
    model.setup_cache(1, 64, 32)                           # another cache
    batch = make_batch(model, [GREEDY], steps=build_steps(model, "compile"))
    assert [t.item() for t in generate(batch, [prompts[1]], 12)] == alone[1]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("n_group, topk_group, group_top", [(1, 1, 2), (4, 2, 1), (4, 3, 2), (8, 1, 2)])
def test_choice_of_experts(scores, n_group, topk_group, group_top):
    """As MoE.route; rows sorted by expert, tokens in order among those of one."""
    E, A, n = 32, 4, 50
    cfg = ModelConfig(64, 1, 1, 1, 64, 32, 100, 64, moe=MoEVariant(
        E, A, 32, norm_topk_prob=scores == "sigmoid", scores=scores, choice_bias=True, n_group=n_group, topk_group=topk_group,
        group_top=group_top, routed_scale=1.7))
    moe = RoutedMoE(cfg)
    moe.choice_bias.data.normal_(0, 0.3)
    logits = torch.randn(n, E)
    moe.router = torch.nn.Identity()
    prob, ids = moe.route(logits)
    found, (place, order) = torch.empty(n, A), torch.empty(2, n * A, dtype=torch.int32)
    ends = torch.empty(E, dtype=torch.int32)
    op = native.Route(
        kind=native.ROUTE, M=n, E=E, A=A, n_group=n_group, topk_group=topk_group, group_top=group_top, use_sigmoid=scores == "sigmoid",
        norm_topk_prob=moe.norm_topk_prob, routed_scale=1.7, logits=logits.data_ptr(), bias=moe.choice_bias.data_ptr(), prob=found.data_ptr(),
        sorted_row=place.data_ptr(), sorted_token=order.data_ptr(), expert_ends=ends.data_ptr())
    native.run([ctypes.addressof(op)])
    torch.testing.assert_close(found, prob, atol=1e-6, rtol=1e-5)
    sorted_ids, rows = ids.flatten().sort(stable=True)
    assert ends.tolist() == torch.searchsorted(sorted_ids, torch.arange(E), right=True).tolist()
    assert order.tolist() == (rows // A).tolist() and place[rows].tolist() == list(range(n * A))


@pytest.mark.parametrize("name, scheme, head", [
    ("mixtral", "int4", "int8"), ("gpt_oss", "int8", "int8"), ("qwen2_moe", "int4", "none"), ("deepseek_v2", "int8", "int8"),
    ("gemma4-26b", "int8", "int8"), ("glm4_moe", "int4", "int8"), ("granitemoehybrid-mamba", "int8", "int8"),
    ("nemotron_h-experts", "int4", "int8"), ("nemotron_h-latent", "int8", "int8")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_experts(families, finer, name, scheme, head, dtype):
    directory, _ = families(name)
    model = load_model(quantized(read_checkpoint(directory), scheme, 32, head), dtype, "cpu")
    tokens = torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(0))
    expected = logits_of(model, tokens, 7)
    assert cpu_layers.use_operations(model) and any(isinstance(getattr(layer.ffn, "experts", None), FusedExperts) for layer in model.layers)
    found = logits_of(model, tokens, 7)
    assert (found - expected).abs().mean() < (1e-3 if dtype == torch.float32 else 0.05) * expected.std()


def test_rings_that_come_later_and_what_is_out_of_range(families):
    """A cache with rings, after the model was compiled without; what would be read or written elsewhere is an error."""
    directory, _ = families("gemma3_text")
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    tokens = torch.randint(3, 150, (1, 60))
    expected = logits_of(model, tokens, 7)
    assert model.rings
    model.setup_cache(0, 0)
    assert not model.rings and cpu_layers.use_operations(model)
    torch.testing.assert_close(logits_of(model, tokens, 7), expected, atol=2e-4, rtol=2e-4)
    model.setup_cache(1, 20)
    one, n_vocab = torch.tensor([[5]]), model.cfg.vocab_size
    for token, pos, kv_len in ((one, 20, 20), (one, -1, 20), (one, 3, 21), (one + n_vocab, 3, 20), (one - 6, 3, 20)):
        with pytest.raises(IndexError, match="beyond the"):
            model(token, torch.tensor([pos]), 1, kv_len)
    for row in (1, -1, 1 << 40):
        with pytest.raises(IndexError, match="a row beyond the cache"):
            model(one, torch.tensor([[3]]), 1, 20, torch.tensor([row]))
    assert model(one, torch.tensor([3]), 1, 20).isfinite().all()


def test_an_interrupted_call_leaves_nothing_behind(families, monkeypatch):
    directory, _ = families("llama3")
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    model.setup_cache(1, 40)
    tokens, pos = torch.randint(3, 150, (1, 4)), torch.arange(4)
    assert cpu_layers.use_operations(model)
    expected = model(tokens, pos)
    run = native.run

    def interrupted(addresses, n_thread=None):
        if n_thread is None:                                   # the layers'
            raise KeyboardInterrupt
        run(addresses, n_thread)
    with monkeypatch.context() as patched:
        patched.setattr(native, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(tokens, pos)
    assert torch.equal(model(tokens, pos), expected)


def test_without_the_library(families, monkeypatch, capsys):
    directory, _ = families("llama3")
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    model.setup_cache(1, 40)

    def fails():
        raise RuntimeError("no such instruction")
    monkeypatch.setattr(native, "library", fails)
    native.is_available.cache_clear()
    torch_internals.note_once.cache_clear()
    assert not cpu_layers.use_operations(model) and "no such instruction" in capsys.readouterr().err
    native.is_available.cache_clear()


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "kept"))
    for cached in (native._home, native.library, native.is_available):
        cached.cache_clear()
    yield tmp_path / "kept"
    for cached in (native._home, native.library, native.is_available):
        cached.cache_clear()


def fake_compiler(tmp_path, monkeypatch, script):
    """It takes every option, and runs the script where it is to compile."""
    path = tmp_path / "c++"
    path.write_text(f"#!/bin/sh\ncase \"$*\" in *-fsyntax-only*) exit 0;; esac\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_generation_begins_uncompiled_and_changes_over(families, tmp_path, monkeypatch, nothing_built):
    """The compiler is done in the middle of a text: its tokens are those of one run."""
    directory, _ = families("llama3")
    source, prompt = read_checkpoint(directory), [5, 9, 77, 31]
    expected = [t.item() for t in generated(load_model(source, torch.float32, "cpu"), [prompt], 30, GREEDY)]
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    fake_compiler(tmp_path, monkeypatch, f'read line < "{gate}"; exec g++ "$@"')
    native.start_building()
    model = load_model(source, torch.float32, "cpu")
    model.setup_cache(1, 40)
    batch = make_batch(model, [GREEDY], steps=build_steps(model, "compile", wait=False))
    found, changed = [], []
    for i, token in enumerate(generate(batch, [prompt], 30)):
        found.append(token.item())
        changed.append(cpu_layers.uses_operations(model))
        if i == 10:
            assert not any(changed)
            gate.write_text("go on\n")
            native._building[0].wait()
    assert found == expected and changed[-1] and not changed[10] and changed[12]
    assert len(list(nothing_built.glob("cpu_ops-*.so"))) == 1


def test_a_compiler_that_fails(families, tmp_path, monkeypatch, capsys, nothing_built):
    fake_compiler(tmp_path, monkeypatch, "echo bad option >&2; exit 1")
    torch_internals.note_once.cache_clear()
    assert not native.is_available() and "bad option" in capsys.readouterr().err
    assert not list(nothing_built.iterdir())


def test_an_edited_comment_builds_nothing_anew(tmp_path, monkeypatch):
    path, folder = native.library_path(), tmp_path / "cpu_ops"
    shutil.copytree(native.SOURCE.parent, folder)
    monkeypatch.setattr(native, "SOURCE", folder / native.SOURCE.name)
    linear = folder / "linear.h"
    for file in (native.SOURCE, linear):
        file.write_text("// more\n" + file.read_text().replace("\n\n", "\n\n\n"))
    assert native.library_path() == path
    linear.write_text(linear.read_text().replace("MC = 192", "MC = 96"))
    assert native.library_path() != path


def test_speculation_runs_by_operations_too(families):
    directory, _ = families("llama3")
    source, prompt = read_checkpoint(directory), [5, 9, 77, 31] * 4
    expected = [t.item() for t in generated(load_model(source, torch.float32, "cpu"), [prompt], 30, GREEDY)]
    model = load_model(source, torch.float32, "cpu")
    draft = copy.deepcopy(model)
    model.setup_cache(1, 80, 16)
    steps = build_steps(model, "compile")
    sampler = build_sampler(model, [GREEDY])
    batch = engines.build_speculative(model, sampler, steps, "compile", 4, True, draft)
    assert torch.cat(list(generate(batch, [prompt], 30)), 1)[0].tolist() == expected
    assert cpu_layers.uses_operations(draft)


# ---- Gated DeltaNet and Mamba-2 -----------------------------------------------------------------

class Recurrence:
    """One row, token by token in float64; what it has seen may be cut back to any of its positions."""

    def __init__(self, taps, rates, bias, weight, scale, Nk, N, Dk, Dv):
        self.taps, self.rates, self.bias, self.weight = (t.double() for t in (taps, rates, bias, weight))
        self.scale, self.shape = scale, (Nk, N, Dk, Dv)
        self.inputs, self.states = [], [torch.zeros(N, Dk, Dv, dtype=torch.float64)]

    def step(self, x, z, beta, time):
        (Nk, N, Dk, Dv), n = self.shape, len(self.taps)
        self.inputs.append(x.double())
        past = [torch.zeros_like(self.inputs[0])] * n + self.inputs
        y = torch.nn.functional.silu(sum(t * i for t, i in zip(self.taps, past[-n:])))
        q, k, v = y.split((Nk * Dk, Nk * Dk, N * Dv))
        q, k = (t.view(Nk, Dk) / (t.view(Nk, Dk).square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        q, k = (t.repeat_interleave(N // Nk, 0) for t in (self.scale * q, k))
        decay = torch.exp(self.rates * torch.nn.functional.softplus(time.double() + self.bias))
        S = self.states[-1] * decay[:, None, None]
        change = beta.double().sigmoid()[:, None] * (v.view(N, Dv) - torch.einsum("nkv,nk->nv", S, k))
        self.states.append(S + k[..., None] * change[:, None])
        out = torch.einsum("nkv,nk->nv", self.states[-1], q)
        out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        return (out * torch.nn.functional.silu(z.double().view(N, Dv))).flatten()

    def cut(self, n):
        del self.inputs[n:], self.states[n + 1:]


class MambaRecurrence(Recurrence):
    def __init__(self, taps, conv_bias, rates, bias, skip, weight, options, Nk, N, Dk, Dv):
        super().__init__(taps, rates, bias, weight, 1, Nk, N, Dk, Dv)
        self.conv_bias, self.skip, self.options = conv_bias, skip.double(), options

    def step(self, x, z, time):
        (Nk, N, Dk, Dv), n = self.shape, len(self.taps)
        self.inputs.append(x.double())
        past = [torch.zeros_like(self.inputs[0])] * n + self.inputs
        y = sum(t * i for t, i in zip(self.taps, past[-n:]))
        y = torch.nn.functional.silu(y if self.conv_bias is None else y + self.conv_bias)
        q, k, v = y.split((Nk * Dk, Nk * Dk, N * Dv))
        q, k = (t.view(Nk, Dk).repeat_interleave(N // Nk, 0) for t in (q, k))
        d = torch.nn.functional.softplus(time.double() + self.bias).clamp(self.options["min_step"], self.options["max_step"])
        S = self.states[-1] * torch.exp(self.rates * d)[:, None, None] + torch.einsum("nk,nv->nkv", k, d[:, None] * v.view(N, Dv))
        self.states.append(S)
        out = (torch.einsum("nkv,nk->nv", S, q) + self.skip[:, None] * v.view(N, Dv)).flatten()
        gate = torch.nn.functional.silu(z.double())
        return self.norm(out) * gate if self.options["norm_first"] else self.norm(out * gate)

    def norm(self, out):
        if not self.options["norm"]:
            return out
        groups = out.view(self.shape[0], -1)
        return (groups * (groups.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten() * self.weight


class DeltaCase:
    """Rows of a cache, by the operation and by Recurrence."""

    def __init__(self, seed, n_row, Nk=2, N=4, Dk=32, Dv=64, n_state=6):
        self.random = torch.Generator().manual_seed(seed)
        self.shape, self.channels, self.n_state = (Nk, N, Dk, Dv), 2 * Nk * Dk + N * Dv, n_state
        self.make_weights()
        self.rows = [self.recurrence() for _ in range(n_row + 1)]
        self.states = self.randn(n_row + 1, n_state, N, Dk, Dv)              # of others before: not read
        self.inputs = self.randn(n_row + 1, n_state + 2, self.channels)

    def make_weights(self):
        Nk, N, Dk, Dv = self.shape
        self.widths = dict(x=self.channels, z=N * Dv, rates=2 * N)
        self.weights = (self.randn(4, self.channels), -self.randn(N).exp(), self.randn(N), self.randn(Dv))

    def recurrence(self):
        return Recurrence(*self.weights, 0.3, *self.shape)

    def operation(self, **fields):
        taps, rate, bias, weight = self.weights
        return native.Delta(kind=native.DELTA, q_scale=0.3, norm=native.Norm(kind=1, eps=1e-6, weight=weight), taps=taps, decay_rate=rate,
                            decay_bias=bias, **fields)

    def step(self, row, x, z, rates):
        return row.step(x, z, *rates.chunk(2))

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def call(self, rows, first, T, padding=0):
        """T tokens of each of `rows` from position `first` on, the last row with some of them padding."""
        Nk, N, Dk, Dv = self.shape
        inputs = {name: self.randn(len(rows), T, width) for name, width in self.widths.items()}
        out = torch.empty(len(rows), T, N * Dv)
        pos = first + torch.arange(T).expand(len(rows), T)
        stop = torch.full((len(rows), 1), first + T)
        stop[-1] -= padding
        pos = pos.minimum(stop).contiguous()
        expected = torch.zeros(out.shape, dtype=torch.float64)
        for b, row in enumerate(rows):
            self.rows[row].cut(first)
            for t in range(int(stop[b]) - first):
                expected[b, t] = self.step(self.rows[row], *(given[b, t] for given in inputs.values()))
        at = native.Positions(slot=pos, slot_stride_b=T, rows=torch.tensor(rows))
        op = self.operation(B=len(rows), T=T, Nk=Nk, N=N, Dk=Dk, Dv=Dv, n_tap=4, n_state=self.n_state, n_input=self.inputs.shape[1],
                            n_row=len(self.inputs), positions=at, states=self.states, inputs=self.inputs, out=out, **inputs)
        native.run([ctypes.addressof(op)])
        assert out.isfinite().all()
        for b in range(len(rows)):
            n = int(stop[b]) - first
            torch.testing.assert_close(out[b, :n].double(), expected[b, :n], atol=2e-4, rtol=2e-4)


class MambaCase(DeltaCase):
    """Heads of 1 to 8 vectors; each seed has other options."""

    def __init__(self, seed, n_row, Nk=2, N=4, Dk=32, Dv=None, n_state=6):
        self.options = dict(norm=seed % 4 != 1, norm_first=seed % 3 == 1, min_step=(seed % 2) / 5, max_step=1.5 if seed % 5 == 3 else math.inf)
        super().__init__(seed, n_row, Nk, N, Dk, Dv or native.n_lane() * (1 + seed % 8), n_state)

    def make_weights(self):
        Nk, N, Dk, Dv = self.shape
        self.widths = dict(x=self.channels, z=N * Dv, steps=N)
        self.weights = (self.randn(4, self.channels), self.randn(self.channels), -self.randn(N).exp(), self.randn(N), self.randn(N),
                        self.randn(N * Dv))

    def recurrence(self):
        return MambaRecurrence(*self.weights, self.options, *self.shape)

    def operation(self, **fields):
        taps, conv_bias, rate, bias, skip, weight = self.weights
        norm = native.Norm(kind=1, eps=1e-6, weight=weight) if self.options["norm"] else native.Norm()
        return native.Mamba(kind=native.MAMBA, taps=taps, conv_bias=conv_bias, decay_rate=rate, decay_bias=bias, skip=skip,
                            **self.options | dict(norm=norm), **fields)

    def step(self, row, x, z, steps):
        return row.step(x, z, steps)


@pytest.mark.parametrize("kind", [DeltaCase, MambaCase])
@pytest.mark.parametrize("threads", [1, 2])
def test_recurrence(threads, kind):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed, T in enumerate((*range(1, 8), 63, 64, 65, 130, 200)):
            case = kind(seed, 3)
            case.call([2, 0, 3], 0, T, padding=min(T - 1, seed % 4))
            n = T - min(T - 1, seed % 4)                                     # of the last row, which goes on alone
            case.call([3], n, 1)
            case.call([3], max(0, n - 4), 1)                                 # as far back as it may go
            at = T
            for kept in range(5):                                            # of 4 drafts
                case.call([2, 0], at, 5)
                at += 1 + kept
            case.call([0], 0, 3)                                             # another text in the same row
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [DeltaCase, MambaCase])
def test_recurrence_in_plain_instructions(any_cpu, kind):
    case = kind(0, 2, Nk=1, N=3)
    case.call([0, 2], 0, 70, padding=5)
    case.call([0], 70, 1)


def test_2000_steps_of_mamba():
    """One by one, and in calls of any length: within 2e-4 of float64 at each token."""
    case = MambaCase(4, 2, n_state=3)
    for at in range(1000):
        case.call([0], at, 1)
    for at in range(0, 1000, 125):
        case.call([1], at, 125)
    case.call([1, 0], 1000, 1000)


HYBRID = ModelConfig(
    dim=64, n_layer=4, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96, vocab_size=160, context=256, norm_eps=1e-6,
    qk_norm=True, attention=AttentionVariant(gate=True), mixer=(GatedDelta(2, 4, 32, 64),) * 3 + (None,))
MAMBA = Mamba2(n_head=4, head_dim=48, n_group=2, state_dim=32)
EXPERTS = MoEVariant(8, 2, 32, scores="sigmoid", choice_bias=True, gated=False, activation="relu2", latent_dim=32, shared_dim=64, shared_gate=False,
                     routed_scale=2.0)
ONE_BRANCH = BlockVariant(branches=(None, "attn_only", "ffn_only", None, "attn_only", None))
HYBRIDS = {
    "delta": HYBRID, "mamba": replace(HYBRID, mixer=(MAMBA, replace(MAMBA, n_group=1, conv_bias=False, bias=True), None)),
    "beside": replace(HYBRID, attention=None, mixer=(AttentionAndMamba(replace(MAMBA, norm=False)), AttentionAndMamba(replace(MAMBA, norm_first=True)))),
    "scaled": replace(HYBRID, attention=None, mixer=(AttentionAndMamba(MAMBA), MAMBA), block=BlockVariant(residual_scale=0.3)),
    "post-norms": replace(HYBRID, attention=None, mixer=(AttentionAndMamba(MAMBA), MAMBA), block=BlockVariant(post_norm=True)),
    "branches": replace(HYBRID, n_layer=6, attention=None, mixer=(MAMBA, MAMBA, None), ffn=FeedForwardVariant("relu2", gated=False), block=ONE_BRANCH),
    "experts": replace(HYBRID, n_layer=6, attention=None, mixer=(MAMBA, MAMBA, None), moe=EXPERTS, sparse=(True, False, True),
                       ffn=FeedForwardVariant("relu2", gated=False), block=ONE_BRANCH),
    "wide-experts": replace(HYBRID, mixer=(MAMBA,), moe=replace(EXPERTS, latent_dim=0, n_group=2, topk_group=1), sparse=(True,)),
}


def hybrid(cfg=HYBRID, dtype=torch.float32):
    """A model of which most layers remember in a state, with random weights."""
    torch.manual_seed(0)
    model = Transformer(cfg)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1 if "norm" in name else 0, 0.1 if p.dim() >= 2 else 0.5)
        if name.endswith("decay_rate"):
            p.data = -p.abs()
    model.dtype = dtype
    for name, p in model.named_parameters():
        p.requires_grad = False
        if p.dim() >= 2 and "conv" not in name or name.endswith(".bias"):
            p.data = p.data.to(dtype)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_with_states(dtype, name):
    """Prompts of other lengths side by side, chunks, drafts of which some are rejected: as the layers themselves do it."""
    model, other, exact = (hybrid(HYBRIDS[name], dtype) for _ in range(3))
    exact = exact.float()
    exact.dtype = torch.float32
    assert cpu_layers.use_operations(other)
    assert all(layer.forward.supported == (True, True, False) for layer in other.layers)
    for m in (model, other, exact):
        m.setup_cache(2, 120, 48, max_rejected=4)
    tokens, errors = torch.randint(3, 150, (2, 120)), []

    def both(tokens, pos, n, batch_idx=None):
        given = tokens, pos, n, int(pos.max()) + 1, batch_idx
        eager, found, expected = model(*given), other(*given), exact(*given)
        error, own = ((x - expected).abs().mean() / expected.std() for x in (found, eager))
        errors.append((float(error), float(own)))
        assert error < (1e-5 if dtype == torch.float32 else 0.06), errors
    stop = torch.tensor([[70], [41]])
    for at in (0, 40):
        pos = torch.arange(at, at + 40).expand(2, 40).minimum(stop).contiguous()
        both(tokens[:, at:at + 40], pos, (stop - 1 - at).clamp(max=39))
    at = stop
    for kept in (0, 2, 4, 1):
        pos = at + torch.arange(5)
        both(tokens.gather(1, pos), pos, 5)
        at = at + 1 + kept
    both(tokens[1:, :30], torch.arange(30)[None], 30, torch.tensor([1]))     # a new text in a row
    both(tokens[1:, 30:31], torch.tensor([[30]]), 1, torch.tensor([1]))
    if dtype == torch.bfloat16:                            # of all calls: one has few logits
        total, own = map(sum, zip(*errors))
        assert total < (2 if exact.cfg.moe else 1) * own and total < 0.03 * len(errors), errors      # another expert at a near-tie
