"""quantize.py alone: its plain formulas, without kernels; and which of its linears these stand for."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import checkpoint
import quantize
from checkpoint import LazyTensor, save_checkpoint
from gpt_faster.formats import load as loading
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized as quantized_by_room
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.compile import compile_model
from gpt_faster.kernels.cpu import layers as cpu_layers
from gpt_faster.kernels.linear import PackedEmbedding, PackedExpertLinear, PackedLinear
from model import ExpertLinear
from quantize import (
    Int4,
    Int8,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    describe,
    put_quantized_linears,
    quantized,
    scheme_named,
)

ROOT = Path(quantize.__file__).parent
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
SCHEMES = [Int8(), Int4(32), Int4(64)]
HINDER = """
import importlib.abc, sys

class OnlyTheCore(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {rooms}:
            raise ImportError("the core imports " + name)

sys.meta_path.insert(0, OnlyTheCore())
"""
ALONE = """
import torch, quantize
from torch import nn
w = torch.randn(48, 64)
linear = nn.Linear(64, 48, bias=False, device="meta")
for scheme in quantize.SCHEMES.values():
    if scheme.fits(64):
        new = quantize.QuantizedLinear(linear, scheme, torch.float32)
        for leaf, t in scheme.quantize(w).items():
            t = t.float() if t.is_floating_point() else t
            setattr(new, leaf, nn.Parameter(t, requires_grad=False))
        assert (new(torch.eye(64)).T - w).abs().max() < 0.5, scheme
        print(scheme.name)
"""


@pytest.fixture(autouse=True)
def inference():
    torch_internals.note_once.cache_clear()
    with torch.inference_mode():
        yield
    torch_internals.note_once.cache_clear()


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(kind, like, scheme, dtype, w):
    """A module with the leaves of w, and the numbers that they stand for, in float64."""
    module = kind(like, scheme, dtype)
    leaves = {leaf: t.unflatten(0, w.shape[:-1]) for leaf, t in scheme.quantize(w.flatten(0, -2)).items()}
    for leaf, t in leaves.items():
        assert getattr(module, leaf).shape == t.shape
        setattr(module, leaf, nn.Parameter(t.to(getattr(module, leaf).dtype), requires_grad=False))
    scales, zeros = leaves["scales"].double()[..., None], leaves.get("zeros")
    if zeros is None:
        return module, leaves["weight"].double() * scales
    low, high = leaves["weight"] & 15, leaves["weight"] >> 4
    codes = torch.stack((low, high), -1).flatten(-2).double().unflatten(-1, (zeros.shape[-1], -1))
    return module, ((codes - 8) * scales + zeros.double()[..., None]).flatten(-2)


def off(y, x, w, bias):
    """The largest error of x w + bias, as a share of the sum of sizes: w [M, out, in] or [out, in]."""
    def product(x, w, bias):
        return (w @ x[..., None]).squeeze(-1) + bias
    x, bias = x.double(), bias.double()
    return ((y.double() - product(x, w, bias)).abs() / product(x.abs(), w.abs(), bias.abs())).max().item()


MOST = {BF16: 2**-7, FP32: 1e-5 / 4, FP16: 2**-10}     # the weights or the sum are rounded, then the sum with the bias


def compiled(f):
    return torch.compile(f, fullgraph=True, dynamic=False)


def linears(dtype):
    linear = nn.Linear(64, 72, dtype=dtype)
    return [filled(QuantizedLinear, linear, scheme, dtype, drawn(1, 72, 64)) for scheme in SCHEMES]


def check_linear(module, w, x, y):
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], 72)
    assert off(y.flatten(0, -2), x.flatten(0, -2), w, module.bias) < MOST[x.dtype], (module.scheme, x.shape)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_linear_is_its_numbers(dtype):
    for module, w in linears(dtype):
        for shape in ((1,), (1, 1), (2, 1), (3, 7), (130,)):
            x = drawn(2, *shape, 64).to(dtype)
            check_linear(module, w, x, module(x))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_compiled_linear_is_its_numbers(dtype):
    """One row, which is a pass over the codes, and many."""
    pairs, xs = linears(dtype)[:2], [drawn(2, *shape, 64).to(dtype) for shape in ((1, 1), (3, 7))]

    def products(*xs):
        return [[module(x) for x in xs] for module, _ in pairs]
    for ys, (module, w) in zip(compiled(products)(*xs), pairs):
        for x, y in zip(xs, ys):
            check_linear(module, w, x, y)


@pytest.mark.parametrize("dtype, is_compiled", [(FP32, False), (BF16, False), (BF16, True)], ids=str)
def test_experts_are_their_numbers(dtype, is_compiled):
    """Sorted rows, one expert having none; and few rows, each with its own expert."""
    like = ExpertLinear(4, 64, 48, bias=True).to(dtype)
    nn.init.normal_(like.bias)
    nn.init.zeros_(like.weight)
    pairs = [filled(QuantizedExperts, like, scheme, dtype, drawn(1, 4, 48, 64) + torch.arange(4)[:, None, None]) for scheme in SCHEMES[:2]]
    ids = torch.tensor([0, 0, 1, 3, 3, 3, 3])
    ends = torch.tensor([2, 3, 3, 7], dtype=torch.int32)
    few = torch.tensor([3, 0, 1])
    x = drawn(2, 7, 64).to(dtype)

    def both(x):
        return [(module(x, ids, ends), module(x[:3], few, None)) for module, _ in pairs]
    for ys, (module, w) in zip((compiled(both) if is_compiled else both)(x), pairs):
        for y, which in zip(ys, (ids, few)):
            assert y.dtype == dtype and off(y, x[:len(y)], w[which], like.bias[which]) < MOST[dtype], module.scheme


def test_an_embedding_gives_the_heads_rows():
    for dtype in (FP32, BF16):
        head, w = filled(QuantizedLinear, nn.Linear(64, 72, bias=False), Int8(), dtype, drawn(1, 72, 64))
        embed = QuantizedEmbedding(head, dtype)
        ids = torch.tensor([[3, 0, 71], [5, 3, 3]])
        assert embed.weight is head.weight and embed(ids).dtype == dtype and torch.equal(embed(ids), w[ids].to(dtype))


def test_it_imports_none_of_the_rooms():
    rooms = ("gpt_faster",)
    done = subprocess.run([sys.executable, "-c", HINDER.replace("{rooms}", repr(rooms)) + ALONE],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["int8", "int4-g32", "int4-g64"], done.stderr


# ---- A checkpoint -------------------------------------------------------------------------------

def tokens(n=12):
    return torch.randint(0, 160, (1, n), generator=torch.Generator().manual_seed(1))


def logits(model, n=12):
    model.setup_cache(1, 16)
    many = model(tokens(n), torch.arange(n), logits_to_keep=n)
    return torch.cat((many, model(tokens(n)[:, -1:], torch.tensor([n]))), 1)


@pytest.fixture
def core_only(monkeypatch):
    """load_model() as the core has it: nothing is exchanged."""
    monkeypatch.setattr(loading, "use_packed_linears", lambda *args: None)


CASES = [("llama3", "int8", "int8"), ("llama3", "int4", "int4"), ("qwen2", "int4", "none"), ("mixtral", "int8", "int8"),
         ("mixtral", "int4", "int4")]


@pytest.mark.parametrize("name, mode, head", CASES, ids=["-".join(case) for case in CASES])
def test_the_core_alone_gives_the_same_logits(families, name, mode, head, monkeypatch):
    source = quantized(read_checkpoint(families(name)[0]), mode, 32, head)
    full = {dtype: load_model(source, dtype, "cpu") for dtype in (FP32, BF16)}
    monkeypatch.setattr(loading, "use_packed_linears", lambda *args: None)
    for dtype, most in ((FP32, 1e-4), (BF16, 0.06)):
        alone = load_model(source, dtype, "cpu")
        kinds = {type(module) for module in alone.modules()}
        assert QuantizedLinear in kinds and not kinds & {PackedLinear, PackedExpertLinear, PackedEmbedding}
        assert (QuantizedExperts in kinds) == (name == "mixtral")
        expected, found = logits(full[dtype]), logits(alone)
        distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert distance.median() < most and (dtype == BF16 or distance.max() < most), distance


def test_the_core_alone_compiled(families, core_only):
    """A step by torch.compile: int4, and an int8 head that is the embedding."""
    model = load_model(quantized(read_checkpoint(families("qwen2")[0]), "int4"), FP32, "cpu")
    assert type(model.head) is QuantizedLinear
    model.setup_cache(1, 16)
    step = tokens(1), torch.tensor([5])
    torch.testing.assert_close(compiled(model.forward)(*step), model(*step), rtol=1e-4, atol=1e-4)


def test_an_int8_head_is_one_matrix_with_the_embedding(families, core_only):
    for name in ("llama3", "qwen2"):
        source = read_checkpoint(families(name)[0])
        model = load_model(quantized(source, "int8"), FP32, "cpu")
        assert (type(model.embed) is QuantizedEmbedding) == source.cfg.tied
        if source.cfg.tied:
            assert model.embed.weight is model.head.weight and model.embed.scales is model.head.scales


def test_a_checkpoint_is_rounded_as_by_the_full_command(families, tmp_path):
    """The same tensors in the same order: the same file."""
    for name, *how in (("mixtral", "int8"), ("llama3", "int4", 32, "int4"), ("qwen2", "int4", 32, "none"), ("qwen2", "int4-g32")):
        source = read_checkpoint(families(name)[0])
        content = []
        for make in (quantized, quantized_by_room):
            save_checkpoint(make(source, *how), tmp_path / "model.pth", None)
            content.append((tmp_path / "model.pth").read_bytes())
        assert content[0] == content[1]


def test_what_is_quantized_is_refused(families):
    source = quantized(read_checkpoint(families("llama3")[0]), "int8")
    assert describe(source) == "int8, head int8"
    for mode in ("int8", "int4"):
        with pytest.raises(ValueError, match=r"is already quantized \(int8, head int8\): use the original model"):
            quantized(source, mode)
    with pytest.raises(ValueError, match="--groupsize 256 does not divide the 64 inputs of layers.*: use 32"):
        quantized(read_checkpoint(families("llama3")[0]), "int4", 256)


def test_rows_are_rounded_once(families):
    """A block's codes, scales and zeros by one rounding, whatever the blocks of the later reads."""
    w, n_read = drawn(1, 64, 64), []

    def read_rows(a, b):
        n_read.append(b - a)
        return w[a:b]
    leaves = quantize.rounded_leaves(LazyTensor("x.weight", (64, 64), FP32, read_rows), Int4(32))
    pieces = [torch.cat([leaf.read_rows(a, a + step) for a in range(0, 64, step)]) for leaf, step in zip(leaves, (16, 32, 64))]
    assert sum(n_read) == 64 and [leaf.name for leaf in leaves] == ["x.weight", "x.scales", "x.zeros"]
    for piece, whole in zip(pieces, Int4(32).quantize(w).values()):
        assert torch.equal(piece, whole)


# ---- What is read is what runs ------------------------------------------------------------------

def doubled(of):
    return lambda *args: of(*args) * 2


EDITS = {"linear": (QuantizedLinear, "forward"), "embedding": (QuantizedEmbedding, "forward"), "scheme": (Int8, "product"),
         "scheme's numbers": (Int8, "dequantize"), "product": (quantize, "product"), "dequantize": (quantize, "dequantize")}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_quantize_run(families, monkeypatch, capsys, edit):
    """Nothing packed stands for what was edited, and a line says what; compiled or not."""
    source = quantized(read_checkpoint(families("qwen2")[0]), "int8")
    plain = logits(load_model(source, FP32, "cpu"))
    assert not capsys.readouterr().err
    place, name = EDITS[edit]
    monkeypatch.setattr(place, name, doubled(getattr(place, name)))
    model = load_model(source, FP32, "cpu")
    assert "running quantized linears in eager PyTorch" in capsys.readouterr().err
    assert type(model.layers[0].attn.wo) is QuantizedLinear and type(model.embed) is QuantizedEmbedding
    edited = logits(model)
    assert not torch.allclose(edited, plain, rtol=1e-3, atol=1e-3)
    compile_model(model)
    assert not cpu_layers.uses_operations(model) and "eager PyTorch" in capsys.readouterr().err
    assert torch.equal(logits(model), edited)


def test_edits_of_experts_run(families, monkeypatch, capsys):
    source = quantized(read_checkpoint(families("mixtral")[0]), "int8")
    monkeypatch.setattr(QuantizedExperts, "forward", doubled(QuantizedExperts.forward))
    model = load_model(source, FP32, "cpu")
    assert "quantize" in capsys.readouterr().err and type(model.layers[0].ffn.down) is QuantizedExperts


def test_a_scheme_of_ones_own_runs(families, capsys):
    """Its linears stay, the others' are packed; a compiled layer runs them as they are read."""
    class Halved(Int4):
        def dequantize(self, *args):
            return super().dequantize(*args) / 2

        def product(self, x, *leaves):
            return nn.functional.linear(x, self.dequantize(*leaves, x.dtype))

    source = quantized(read_checkpoint(families("qwen2")[0]), "int4")
    scheme_at = quantize.scheme_at

    def halved(model, scheme_for, dtype):
        put_quantized_linears(model, lambda name: Halved(32) if name.endswith("1.ffn.down") else scheme_for(name), dtype)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(checkpoint, "put_quantized_linears", halved)
        model = load_model(source, FP32, "cpu")
    assert scheme_at is quantize.scheme_at and not capsys.readouterr().err
    assert type(model.layers[1].ffn.down) is QuantizedLinear and type(model.layers[0].ffn.down) is PackedLinear
    plain, edited = logits(load_model(source, FP32, "cpu")), logits(model)
    assert not torch.allclose(edited, plain, rtol=1e-2, atol=1e-2)
    compile_model(model)
    torch.testing.assert_close(logits(model), edited, rtol=1e-3, atol=1e-3 * edited.std().item())
    assert scheme_named("int4") == Int4(32) and replace(Int4(32), groupsize=64) == Int4(64)
