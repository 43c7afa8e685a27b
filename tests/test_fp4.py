"""NVFP4 and MXFP4, from each layout of a file to the product: against numbers written here from the formats' definitions, in float64."""

import json
import re
import shutil

import gguf
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_cpu_ops import any_cpu, finer, logits_of, no_grad, other_library  # noqa: F401
from test_dequantize import e2m1, lazy
from test_errors import refused, run
from test_families import close

from checkpoint import LazyTensor, save_checkpoint
from gpt_faster.formats.awq_gptq_fp8 import dequantized
from gpt_faster.formats.fp4 import fp4_leaves, fp4_linears, gguf_leaves, with_gguf_factors
from gpt_faster.formats.lazy import index_select
from gpt_faster.formats.load import load_model, n_bytes, read_checkpoint
from gpt_faster.formats.quantize_on_load import (
    multiplies_fp4,
    note,
    quantize_as_requested,
    quantized,
    with_fp4,
)
from gpt_faster.kernels.cpu import layers as cpu_layers
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.experts import FusedExperts
from gpt_faster.kernels.linear import use_packed_linears
from gpt_faster.layers import fp4
from gpt_faster.layers.fp4 import MXFP4, NVFP4
from quantize import QuantizedExperts, QuantizedLinear, describe
from tp import shard

VALUES = torch.tensor([e2m1(n) for n in range(16)], dtype=torch.float64)
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"], kv_cache_scheme=dict(num_bits=8))
GROUPS = dict(group_0=dict(weights=dict(num_bits=4, type="float", group_size=16), targets=["Linear"], format="nvfp4-pack-quantized"))
COMPRESSED = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups=GROUPS, ignore=["lm_head"])
COMPRESSED_MX = dict(quant_method="compressed-tensors", format="mxfp4-pack-quantized", config_groups={})
LAYOUTS = {"modelopt": MODELOPT, "compressed-tensors": COMPRESSED, "mxfp4": COMPRESSED_MX}


def random_fp4(*shape, scheme=NVFP4, size=0.05):
    """codes [..., in], scale bytes [..., in/G], the matrix's factor, and the weights in float64."""
    n_group = shape[-1] // scheme.groupsize
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    low, high = (0, 127) if scheme is NVFP4 else (118, 124)                  # NVFP4: zero and subnormal scales too
    scales = torch.randint(low, high, (*shape[:-1], n_group), dtype=torch.uint8).view(scheme.scale_dtype)
    factor = torch.tensor(size / 150 + 1e-9) if scheme is NVFP4 else torch.tensor(1.0)
    groups = VALUES[codes.long()].unflatten(-1, (n_group, -1))
    return codes, scales, factor, (groups * scales.double()[..., None]).flatten(-2) * factor.double()


def pairs(codes):
    """The first of two neighbours in the low nibble."""
    return torch.tensor([[low + 16 * high for low, high in zip(row[::2], row[1::2])] for row in codes.flatten(0, -2).tolist()],
                        dtype=torch.uint8).view(*codes.shape[:-1], -1)


def stored(layout, x, codes, scales, factor):
    """The tensors of a linear x, by the names and dtypes of the layout."""
    if layout == "modelopt":
        return {f"{x}.weight": pairs(codes), f"{x}.weight_scale": scales, f"{x}.weight_scale_2": factor,
                f"{x}.input_scale": torch.tensor(0.01)}
    if layout == "compressed-tensors":
        return {f"{x}.weight_packed": pairs(codes), f"{x}.weight_scale": scales, f"{x}.weight_global_scale": 1 / factor[None],
                f"{x}.input_global_scale": torch.ones(1)}
    return {f"{x}.weight_packed": pairs(codes), f"{x}.weight_scale": scales.view(torch.uint8)}


def read(tensors, quantization):
    return {t.name: t for t in dequantized([lazy(n, t) for n, t in tensors.items()], quantization)}


def from_leaves(t):
    """Dequantized from what is kept in memory, in float64."""
    weight, scales = fp4_leaves(t)
    codes, scale_bytes = t.packed.scheme.split(weight.whole())
    values = VALUES[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    w = (values * scale_bytes.view(t.packed.scheme.scale_dtype).double()[..., None]).flatten(-2)
    return w * scales.whole().double()[..., None]


# ---- Formats ------------------------------------------------------------------------------------

def test_every_byte():
    every = torch.arange(256, dtype=torch.uint8)
    for scheme in (NVFP4, MXFP4):
        exact = every.view(scheme.scale_dtype).float()
        finite = exact.isfinite()
        assert torch.equal(scheme.block_scales(every)[finite], exact[finite]) and finite.sum() > 250
    assert torch.equal(fp4.e2m1(every[:16]).double(), VALUES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_linears(layout):
    scheme = MXFP4 if layout == "mxfp4" else NVFP4
    *parts, exact = random_fp4(24, 96, scheme=scheme)
    found = read(stored(layout, "a", *parts) | {"a.bias": torch.ones(24)}, LAYOUTS[layout])
    assert set(found) == {"a.weight", "a.bias"}
    t = found["a.weight"]
    assert t.shape == (24, 96) and t.packed.scheme is scheme
    near = dict(rtol=1e-6, atol=0)
    torch.testing.assert_close(t.whole().double(), exact, **near)
    torch.testing.assert_close(t.read_rows(5, 9).double(), exact[5:9], **near)
    torch.testing.assert_close(from_leaves(t), exact, **near)
    some = index_select(t, torch.tensor([7, 3, 20]))
    torch.testing.assert_close(from_leaves(some), exact[[7, 3, 20]], **near)
    size = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in fp4_leaves(t))
    assert size == exact.numel() * (4.5 if scheme is NVFP4 else 4.25) / 8 + 4 * 24


def test_experts_in_one_tensor():
    """As one tensor with a factor for each expert, or for all; gate and up are its halves."""
    x = "layers.0.mlp.experts.gate_up_proj"
    for factors in (torch.tensor([0.5, 1, 2]), torch.tensor(0.25)):
        codes, scales, _, exact = random_fp4(3, 8, 32)
        exact = exact / float(random_fp4(1, 16)[2]) * factors.double().reshape(-1, 1, 1)
        t = read({x: pairs(codes), f"{x}_weight_scale": scales, f"{x}_weight_scale_2": factors}, MODELOPT)[x]
        torch.testing.assert_close(from_leaves(t), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(from_leaves(index_select(t, torch.arange(1, 8, 2))), exact[:, 1::2], rtol=1e-6, atol=0)
        torch.testing.assert_close(t.read_rows(7, 17).double(), exact.flatten(0, 1)[7:17], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_gguf(kind):
    """Any bytes, against the gguf package; in llama.cpp a scale of 127 is 0, and there is no sign."""
    kind = gguf.GGMLQuantizationType[kind]
    n_block, n_byte = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (6, 512 // n_block, n_byte), dtype=np.uint8)
    blocks[..., 0] = np.minimum(blocks[..., 0], 200 if kind.name == "MXFP4" else 127)
    blocks = blocks.reshape(6, -1)
    if kind.name == "NVFP4":
        blocks.reshape(6, -1, 36)[..., :4] &= 127                             # what the package makes of a sign is no one's matter
        blocks.reshape(6, -1, 36)[0, 0, :4] = 0, 127, 1, 126
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    t = LazyTensor("x.weight", (6, 512), torch.float32, lambda a, b: expected[a:b])
    scheme, leaves = gguf_leaves(t, kind.name, lambda a, b: torch.from_numpy(blocks[a:b].copy()))
    assert scheme.name == kind.name.lower()
    weight, scales = (leaf.read_rows(1, 6) for leaf in leaves)
    torch.testing.assert_close(scheme.dequantize(weight, scales[:, 0], None, torch.float32), expected[1:], rtol=0, atol=0)
    weight, scales = (leaf.whole() for leaf in leaves)
    torch.testing.assert_close(scheme.dequantize(weight, scales[:, 0], None, torch.float32), expected, rtol=0, atol=0)
    assert gguf_leaves(t, "Q5_0", None) == ()


def test_factors_of_a_gguf():
    """llama.cpp's converter writes ModelOpt's weight_scale_2 as X.scale, of experts one each."""
    def tensor(name, *shape):
        *parts, exact = random_fp4(*shape)
        t = read(stored("modelopt", "a", *parts) if len(shape) == 2 else
                 {"a_proj": pairs(parts[0]), "a_proj_weight_scale": parts[1], "a_proj_weight_scale_2": parts[2]}, MODELOPT)
        return next(iter(t.values())).renamed(name), exact

    one, exact_one = tensor("blk.0.attn_q.weight", 8, 32)
    experts, exact = tensor("blk.0.ffn_up_exps.weight", 3, 8, 32)
    factors = torch.tensor([0.5, 1, 4])
    more = [lazy("blk.0.attn_q.scale", torch.tensor([0.25])), lazy("blk.0.attn_q.input_scale", torch.ones(1)),
            lazy("blk.0.ffn_up_exps.scale", factors), lazy("blk.1.ffn_up.scale", factors)]
    found = {t.name: t for t in with_gguf_factors([one, experts, *more], lambda name: False)}
    assert set(found) == {one.name, experts.name, "blk.1.ffn_up.scale"}       # that one is told as unknown
    torch.testing.assert_close(from_leaves(found[one.name]), exact_one * 0.25, rtol=1e-6, atol=0)
    torch.testing.assert_close(from_leaves(found[experts.name]), exact * factors[:, None, None].double(), rtol=1e-6, atol=0)
    assert len(with_gguf_factors([experts, *more[2:3]], lambda name: True)) == 2
    with pytest.raises(ValueError, match="do not match"):
        with_gguf_factors([one, lazy("blk.0.attn_q.scale", factors)], lambda name: False)


def swapped(codes):
    return codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@pytest.mark.parametrize("fault", [
    lambda codes, scales, factor: (swapped(codes), scales, factor),
    lambda codes, scales, factor: (codes, scales.view(torch.uint8).roll(1, -1).view(scales.dtype), factor),
    lambda codes, scales, factor: (codes, scales, 1 / factor),
    lambda codes, scales, factor: (codes ^ 8, scales, factor)])
def test_faults_would_be_seen(fault):
    """Nibbles in the other order, scales of the neighbouring group, a global scale upside down, a sign."""
    *parts, exact = random_fp4(24, 96)
    t = read(stored("modelopt", "a", *fault(*parts)), MODELOPT)["a.weight"]
    assert (t.whole() - exact).norm() > 0.1 * exact.norm()


# ---- Whole models -------------------------------------------------------------------------------

@pytest.fixture
def fp4_model(families, tmp_path):
    def make(family, layout, which=r"(proj|w[123])\.weight$", dtype=torch.float32):
        """A directory whose linears are in fp4, and transformers' model with the numbers that these stand for."""
        directory, model = families(family)
        scheme = MXFP4 if layout == "mxfp4" else NVFP4
        config, in_fp4, plain = json.loads((directory / "config.json").read_text()), {}, {}
        for name, w in load_file(directory / "model.safetensors").items():
            if re.search(which, name) and w.shape[-1] % scheme.groupsize == 0 and w.dim() == 2:
                *parts, exact = random_fp4(*w.shape, scheme=scheme, size=float(w.std()) / 3)
                in_fp4 |= stored(layout, name.removesuffix(".weight"), *parts)
                w = exact.float()
            else:
                in_fp4[name] = w
            plain[name] = w.contiguous()
        (tmp_path / "plain").mkdir()
        save_file(plain, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
        shutil.copy(directory / "config.json", tmp_path / "plain")
        save_file(in_fp4, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": LAYOUTS[layout]}))
        return tmp_path, type(model).from_pretrained(tmp_path / "plain", dtype=dtype)
    return make


def logits(source, prompt, dtype=torch.float32):
    model = load_model(source, dtype, "cpu")
    n = prompt.shape[1]
    model.setup_cache(2, n)
    return model(prompt, torch.arange(n), logits_to_keep=n)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "phi3-longrope", "mixtral", "qwen3_moe"])
def test_a_whole_model(fp4_model, family, layout):
    """Dequantized and in its own four bits; fused linears, experts one by one; its bytes."""
    directory, reference = fp4_model(family, layout)
    source, prompt = read_checkpoint(directory), torch.randint(0, 160, (2, 24))
    expected = tiny.logits(reference, prompt)
    assert describe(source) == ""
    close(logits(source, prompt), expected)
    kept = with_fp4(source)
    scheme = MXFP4 if layout == "mxfp4" else NVFP4
    assert describe(kept) == f"{scheme.name}, head none"
    close(logits(kept, prompt), expected)
    linears = fp4_linears(source)
    assert len(linears) > 6 and all(f"{n.removesuffix('.weight')}.scales" in kept.tensors for n in linears)
    in_linears = sum(np.prod(source.tensors[n].shape) for n in linears)
    rows = sum(np.prod(source.tensors[n].shape[:-1]) for n in linears)
    saved = n_bytes(source, torch.bfloat16, "cpu") - n_bytes(kept, torch.bfloat16, "cpu")
    assert saved == in_linears * (16 - 8 * scheme.block_bytes / scheme.groupsize) / 8 - 2 * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, layout", [("qwen3", "modelopt"), ("qwen3", "mxfp4"), ("mixtral", "compressed-tensors"), ("qwen3_moe", "mxfp4")])
def test_by_operations(fp4_model, finer, family, layout, dtype):  # noqa: F811
    """The C++ product in a whole model, and without it again."""
    directory, reference = fp4_model(family, layout)
    model = load_model(with_fp4(read_checkpoint(directory)), dtype, "cpu")
    in_fp4 = [m for m in model.modules() if type(m) in (QuantizedLinear, QuantizedExperts)]
    assert len(in_fp4) >= 4 and all(m.scales.dtype == torch.float32 for m in in_fp4)
    tokens = torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(0))
    expected = tiny.logits(reference, tokens)
    plain = logits_of(model, tokens, 7)
    assert cpu_layers.use_operations(model)
    found = logits_of(model, tokens, 7)
    if family != "qwen3":
        assert any(isinstance(getattr(layer.ffn, "experts", None), FusedExperts) for layer in model.layers)
    assert (found - expected).abs().mean() < (1e-3 if dtype == torch.float32 else 0.05) * expected.std()
    assert (plain - expected).abs().mean() < (1e-4 if dtype == torch.float32 else 0.05) * expected.std()


def test_a_whole_gpt_oss(families, finer, tmp_path):  # noqa: F811
    """Interleaved gate and up, biases of experts: four bits of the file at decode."""
    pytest.importorskip("transformers.integrations.mxfp4")
    config = json.loads((families("gpt_oss")[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(quant_method="mxfp4"))))
    model, disk = tiny.make_mxfp4_gpt_oss()
    save_file(disk, tmp_path / "model.safetensors")
    prompt, source = torch.randint(0, 160, (2, 24)), read_checkpoint(tmp_path)
    expected, kept = tiny.logits(model, prompt), with_fp4(source)
    assert describe(kept) == "mxfp4, head none"
    close(logits(kept, prompt), expected)
    ours = load_model(kept, torch.bfloat16, "cpu")
    assert cpu_layers.use_operations(ours)
    assert ours.layers[0].ffn.experts.gate_up.packed.dtype == torch.uint8
    found = logits_of(ours, prompt[:1], 7)
    assert (found - expected[:1]).abs().mean() < 0.05 * expected.std()
    assert note(source, "int8", 32).endswith("without --quantize they stay as they are")
    both = quantized(source, "int4", 32)
    assert describe(both) in ("int4-g32/mxfp4, head int8", "mxfp4/int4-g32, head int8")
    assert describe(quantized(source, "int8")) == "int8, head int8"


def test_compiled_by_inductor(fp4_model):
    """What a GPU runs, on a CPU: one row is one fused pass."""
    directory, reference = fp4_model("qwen3", "modelopt")
    model = load_model(with_fp4(read_checkpoint(directory)), torch.float32, "cpu")
    linear = model.layers[1].ffn.down
    exact = linear.scheme.dequantize(*linear.leaves(), torch.float32).double()
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    for n_row in (1, 3):
        x = torch.randn(n_row, exact.shape[1])
        torch.testing.assert_close(compiled(x).double(), x.double() @ exact.T, rtol=1e-4, atol=1e-5)


def test_one_matrix_in_two_precisions(fp4_model):
    """q in fp4 and k, v not: the three are one matrix in memory, so all are plain; the others stay in fp4."""
    directory, reference = fp4_model("qwen3", "modelopt", r"(q|o|up|gate)_proj\.weight$")
    source, prompt = read_checkpoint(directory), torch.randint(0, 160, (2, 24))
    kept = with_fp4(source)
    assert "layers.0.attn.wo.scales" in kept.tensors and "layers.0.attn.wq.scales" not in kept.tensors
    close(logits(kept, prompt), tiny.logits(reference, prompt))


@pytest.mark.parametrize("layout", ["modelopt", "mxfp4"])
def test_pth(fp4_model, layout):
    directory, reference = fp4_model("mixtral", layout)
    kept, prompt = with_fp4(read_checkpoint(directory)), torch.randint(0, 160, (2, 24))
    save_checkpoint(kept, directory / "model.pth", None)
    back = read_checkpoint(directory / "model.pth")
    assert describe(back) == describe(kept)
    for name, t in kept.tensors.items():
        assert back.tensors[name].dtype == t.dtype and torch.equal(back.tensors[name].whole(), t.whole())
    close(logits(back, prompt), tiny.logits(reference, prompt))
    with pytest.raises(ValueError, match=r"is already quantized \(\w+fp4, head none\): use the original"):
        quantized(back, "int8")


@pytest.mark.parametrize("layout", ["modelopt", "mxfp4"])
def test_ranks(fp4_model, layout):
    """Each rank's rows and columns are a slice of the whole's, by whole blocks."""
    directory, _ = fp4_model("mixtral", layout)
    kept = with_fp4(read_checkpoint(directory))
    plain = {name: read_checkpoint(directory).tensors[name].whole() for name in fp4_linears(read_checkpoint(directory))}
    for me in range(2):
        try:
            mine = shard(kept, 2, me)
        except ValueError as e:                            # a block would be split
            assert layout == "mxfp4" and "cannot be split" in str(e)
            return
        for name, whole in plain.items():
            weight, scales = mine.tensors[name], mine.tensors[name.replace(".weight", ".scales")]
            found = weight.scheme.dequantize(weight.whole(), scales.whole(), None, torch.float32)
            axis = -1 if name.endswith(("wo.weight", "down.weight")) else -2
            assert torch.equal(found, whole.chunk(2, axis)[me]), name


def test_what_int8_and_int4_make_of_it(fp4_model):
    directory, reference = fp4_model("qwen3", "modelopt")
    source, prompt = read_checkpoint(directory), torch.randint(0, 160, (2, 24))
    four, eight = quantized(source, "int4", 32), quantized(source, "int8")
    n = len(fp4_linears(source))
    assert describe(four) == "nvfp4, head int8" and describe(eight) == "int8, head int8"
    assert note(source, "int4", 32) == f"note: {n} of {n} linears keep the fp4 weights of the file"
    assert note(source, "int8", 32).startswith(f"note: {n} linears in nvfp4 are quantized again, to int8")
    close(logits(quantized(source, "int4", 32, "none"), prompt), tiny.logits(reference, prompt))


def test_uncompiled_on_a_cpu(fp4_model):
    """Each product would dequantize its matrix: weights are plain, as before."""
    directory, reference = fp4_model("qwen3", "modelopt")
    source, prompt = read_checkpoint(directory), torch.randint(0, 160, (2, 24))
    assert [multiplies_fp4(*of) for of in (("kv_cache", "cpu"), ("compile", "cpu"), ("kv_cache", "cuda"))] == [False, True, True]
    plain = quantize_as_requested(source, None, 32, "int8", "cpu", keep_fp4=False)
    assert describe(plain) == "" and describe(quantize_as_requested(source, None, 32, "int8", "cpu")) == "nvfp4, head none"
    close(logits(plain, prompt), tiny.logits(reference, prompt))
    assert describe(quantize_as_requested(source, "int4", 32, "int8", "cpu", keep_fp4=False)) == "int4-g32, head int8"


def test_mixed_precision(fp4_model, capsys):
    """ModelOpt's own file instead of a quantization_config, and a method for each layer."""
    directory, reference = fp4_model("qwen3", "modelopt", r"mlp.*proj\.weight$")
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    layers = {"model.layers.0.mlp.up_proj": dict(quant_algo="NVFP4", group_size=16), "model.layers.0.self_attn.q_proj": dict(quant_algo="FP8")}
    stated = dict(quant_algo="MIXED_PRECISION", kv_cache_quant_algo="FP8", quantized_layers=layers)
    path, prompt = directory / "hf_quant_config.json", torch.randint(0, 160, (2, 24))
    path.write_text(json.dumps(dict(producer=dict(name="modelopt"), quantization=stated)))
    disk = load_file(directory / "model.safetensors")
    x = "model.layers.0.self_attn.q_proj.weight"
    disk |= {x: disk[x].to(torch.float8_e4m3fn), f"{x}_scale": torch.tensor(0.5)}
    reference.model.layers[0].self_attn.q_proj.weight.data = disk[x].float() * 0.5
    save_file(disk, directory / "model.safetensors")
    close(logits(with_fp4(read_checkpoint(directory)), prompt), tiny.logits(reference, prompt))
    layers["model.layers.0.mlp.up_proj"]["quant_algo"] = "W4A8_AWQ"
    path.write_text(json.dumps(dict(quantization=stated)))
    assert "quant_algo 'W4A8_AWQ' is not supported, only 'FP8', 'NVFP4'" in refused(capsys, "-m", directory)
    path.write_text(json.dumps(dict(quantization=[1])))
    assert refused(capsys, "-m", directory).endswith("'quantization' is [1], expected an object")


@pytest.mark.parametrize("edit, line", [
    (lambda t, x: t.pop(f"{x}_scale_2"), "weight_scale_2 is missing"),
    (lambda t, x: t.pop(f"{x}_scale"), "weight_scale is missing"),
    (lambda t, x: t.pop(x), "its quantized weight is missing"),
    (lambda t, x: t.update({f"{x}_scale": t[f"{x}_scale"][:, :-1].contiguous()}), "do not match"),
    (lambda t, x: t.update({f"{x}_scale_2": torch.ones(2)}), "do not match"),
    (lambda t, x: t.update({x: t[x][:, :-8].contiguous()}), "do not match"),
    (lambda t, x: t.update({x: t[x][:-1].contiguous()}), "do not match"),
    (lambda t, x: t.update({f"{x}_scale": t[f"{x}_scale"].float()}), "of torch.float32 is not supported, only torch.float8_e4m3fn"),
    (lambda t, x: t.update({x: t[x].view(torch.int8)}), "of int8 is not supported"),
    (lambda t, x: t[f"{x}_scale"].view(torch.uint8).fill_(0x7f), "has NaN or infinite weights"),
    (lambda t, x: t[f"{x}_scale_2"].fill_(torch.inf), "has NaN or infinite weights"),
    (lambda t, x: t.update({x.replace("weight", "pre_quant_scale"): torch.ones(64)}), "unexpected tensors: model.layers.1.mlp.up_proj.pre_quant_scale")])
def test_bad_files(fp4_model, capsys, edit, line):
    directory, _ = fp4_model("qwen3", "modelopt", r"up_proj\.weight$")
    shutil.copy(tokenizer_of(directory), directory)
    disk, x = load_file(directory / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    edit(disk, x)
    save_file(disk, directory / "model.safetensors")
    assert line in refused_quietly(capsys, directory)


def tokenizer_of(directory):
    from tokenizers import Tokenizer, models
    path = directory / "plain/tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1, **{f"w{i}": i for i in range(2, 160)}}, unk_token="b")).save(str(path))
    return path


def refused_quietly(capsys, directory):
    """The error's line, behind the notes of a start."""
    status, out, err = run(capsys, "-m", directory, "--prompt", "a", "--max_new_tokens", 2, "--device", "cpu")
    lines = [line for line in err.splitlines() if "error: " in line]
    assert status == 2 and out == "" and len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


# ---- The C++ product ----------------------------------------------------------------------------

def packed_fp4(scheme, n_out, n_in, sign=False):
    codes, scales, _, exact = random_fp4(n_out, n_in, scheme=scheme)
    if scheme is NVFP4:
        exact = exact / float(random_fp4(1, 16)[2])
        if sign:
            flips = torch.randint(0, 2, scales.shape, dtype=torch.uint8)
            scales = (scales.view(torch.uint8) ^ flips * 128).view(scales.dtype)
            exact = (exact.unflatten(-1, (-1, 16)) * (1.0 - 2 * flips)[..., None]).flatten(-2)
    row_scales = torch.rand(n_out) + 0.5
    blocks = torch.cat((pairs(codes).unflatten(-1, (scales.shape[-1], -1)), scales.view(torch.uint8)[..., None]), -1)
    packed = native.pack_weight(blocks.flatten(1), row_scales, None, scheme.groupsize)
    return packed, exact * row_scales.double()[:, None]


def error_of(scheme, n_out, n_in, n_row, dtype=torch.float32, sign=False):
    packed, exact = packed_fp4(scheme, n_out, n_in, sign)
    x = (torch.randn(n_row, n_in) * torch.rand(n_in).exp()).to(dtype)
    bias = torch.randn(n_out) if n_row % 2 else None
    y = native.product(x, *packed, (n_out, n_in), bias)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    return float((y - expected).abs().max() / (x.double().norm(dim=1).max() * exact.norm(dim=1).max()))


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", [NVFP4, MXFP4], ids=lambda scheme: scheme.name)
def test_products(scheme):
    for n_out, n_in in ((64, 64), (96, 128), (40, 384), (1, 256), (576, 1536), (48, 96), (32, 32)):
        for n_row in (1, 2, 3, 5, 6, 7, 12, 13, 33, 70) if n_in < 200 else (1, 2, 65):
            assert error_of(scheme, n_out, n_in, n_row) < 2e-4, (n_out, n_in, n_row)
    assert error_of(scheme, 64, 128, 513) < 2e-4
    for n_row in (1, 3, 8, 13, 25, 70):
        assert error_of(scheme, 64, 640, n_row, torch.bfloat16, sign=True) < 5e-3, n_row


@pytest.mark.kernels
def test_other_cpus(any_cpu):  # noqa: F811
    for scheme in (NVFP4, MXFP4):
        for n_row in (1, 2, 5, 9, 13, 17, 33, 40, 49, 70):
            assert error_of(scheme, 96, 128, n_row) < 2e-4, (scheme.name, n_row)
            assert error_of(scheme, 96, 640, n_row, torch.bfloat16, sign=True) < 5e-3, (scheme.name, n_row)


@pytest.mark.kernels
def test_the_largest_sums(any_cpu):  # noqa: F811
    """Codes of 6 by x of one size: what 32 inputs can give fits."""
    for scheme, scale in ((NVFP4, 0x7e), (MXFP4, 127)):
        block = torch.tensor([0x77] * (scheme.groupsize // 2) + [scale], dtype=torch.uint8)
        weight = block.repeat(32, 128 // scheme.groupsize)
        packed = native.pack_weight(weight, torch.ones(32), None, scheme.groupsize)
        for n_row in (1, 4, 40):
            for sign in (1, -1):
                y = native.product(sign * torch.ones(n_row, 128), *packed, (32, 128))
                expected = torch.full((n_row, 32), sign * 128 * 6.0 * (448 if scheme is NVFP4 else 1))
                torch.testing.assert_close(y, expected, rtol=1e-3, atol=0)


def test_what_stands_in_for_nothing(families):
    """On a GPU, or eagerly, a linear in fp4 stays as it is read."""
    linear = QuantizedLinear(torch.nn.Linear(64, 32, device="meta"), NVFP4, torch.bfloat16)
    model = torch.nn.Sequential(linear)
    use_packed_linears(model, torch.bfloat16, "cpu")
    assert model[0] is linear
