"""Each stored layout against a packer written here from its definition: exact, whole and in parts.

Packers write one number at a time into Python integers, so that they share nothing with the code.
"""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_families import close, our_logits

from checkpoint import LazyTensor
from gpt_faster.formats.awq_gptq_fp8 import ALTERNATIVES_HINT, dequantized, unpacked_int4
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from quantize import dequantize, describe, schemes

N_OUT, N_IN, G = 64, 96, 32
READS = []                                         # names of tensors that were read


def lazy(name, t):
    def rows(a, b):
        READS.append(name)
        flat = t.flatten(0, 1) if t.dim() >= 3 else t.reshape(1) if t.dim() == 0 else t
        assert 0 <= a < b <= flat.shape[0]
        return flat[a:b]
    return LazyTensor(name, tuple(t.shape), t.dtype, rows)


def run(tensors, quantization):
    READS.clear()
    done = dequantized([lazy(n, t) for n, t in tensors.items()], quantization)
    assert all(n.endswith(("weight_shape", "g_idx")) for n in READS)
    done = {t.name: t for t in done}
    for name in [n for n in done if n.endswith(".scales")]:            # int4 that stays int4
        x = name.removesuffix(".scales")
        half = done[name].dtype if done[name].dtype.itemsize == 2 else torch.bfloat16
        plain = unpacked_int4(*(done.pop(f"{x}.{leaf}") for leaf in ("weight", "scales", "zeros")))
        done[f"{x}.weight"] = replace(plain, dtype=half)
    return done


def same(got, want, dtype=torch.bfloat16):
    """The Lazy is `want`, in one piece, from the middle, and in uneven steps."""
    assert got.shape == tuple(want.shape) and got.dtype == dtype
    torch.testing.assert_close(got.whole(), want, rtol=0, atol=0, equal_nan=True)
    flat, n = want.flatten(0, -2), got.n_row
    for a, b in [(n // 3, n // 2 + 1), (n - 1, n), *((i, min(i + 7, n)) for i in range(0, n, 7))]:
        part = got.read_rows(a, b)
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, flat[a:b], rtol=0, atol=0, equal_nan=True)


def stream(numbers, bits):
    """Numbers -> int32 words: number i is at bit i * bits of one long little-endian integer."""
    whole = sum(int(n) << i * bits for i, n in enumerate(numbers))
    words = [whole >> 32 * i & 0xFFFFFFFF for i in range(-(-len(numbers) * bits // 32))]
    return [w - (1 << 32) if w >> 31 else w for w in words]


def packed(numbers, bits):
    return torch.tensor([stream(row, bits) for row in numbers.tolist()], dtype=torch.int32)


def fp8(*shape):
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def group_of(n_in=N_IN, g=G):
    return torch.arange(n_in) // g


# ---- fp8 ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(64, 96), (70, 100), (3, 70, 100)])
def test_fp8_blocks(shape):
    q = fp8(*shape)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 16))
    want = q.float()
    for i in range(shape[-2]):
        for j in range(shape[-1]):
            want[..., i, j] *= scale[..., i // 32, j // 16]
    name = "mlp.experts.gate_up_proj" if len(shape) == 3 else "x.weight"
    norm = torch.ones(4)
    got = run({name: q, name + "_scale_inv": scale, "norm.weight": norm, "k_proj.k_scale": norm,
               "x.activation_scale": norm, "x.input_scale": norm},
              dict(quant_method="fp8", weight_block_size=[32, 16]))
    assert set(got) == {name, "norm.weight"}
    same(got[name], want)
    assert got["norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("method", [dict(quant_method="fp8"), dict(quant_method="fbgemm_fp8"),
                                    dict(quant_method="modelopt", quant_algo="FP8")])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (N_OUT,), (N_OUT, 1)])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_fp8_one_scale_per_tensor_or_row(method, shape, suffix):
    q, scale = fp8(N_OUT, N_IN), torch.rand(shape).to(torch.float16)
    column = scale.reshape(-1, 1)
    got = run({"x.weight": q, "x.weight" + suffix: scale}, method)
    same(got["x.weight"], q.float() * column.float(), torch.float16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_fp8_ue8m0_scales(dtype):
    q, byte = fp8(N_OUT, N_IN), torch.randint(100, 150, (2, 3), dtype=torch.uint8)
    byte[0, 0], byte[1, 2] = 0, 254                # the smallest is subnormal in fp32
    scale = torch.tensor([[2.0 ** (int(b) - 127) for b in row] for row in byte])
    got = run({"x.weight": q, "x.weight_scale_inv": byte.view(dtype)},
              dict(quant_method="fp8", weight_block_size=[32, 32]))
    want = q.float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    same(got["x.weight"], want)


def test_fp8_agrees_with_transformers():
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    q, scale = fp8(70, 100), torch.rand(3, 7)
    got = run({"x.weight": q, "x.weight_scale_inv": scale},
              dict(quant_method="fp8", weight_block_size=[32, 16]))
    same(got["x.weight"], finegrained._dequantize_fp8_weight(q, scale, [32, 16], torch.float32))


# ---- AWQ and GPTQ -------------------------------------------------------------------------------

def awq_tensors(q, z, scales):
    """q [in, out], z [groups, out]: word n holds outputs 8n + 0 2 4 6 1 3 5 7, lowest bits first."""
    order = [8 * n + i for n in range(q.shape[1] // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {"x.qweight": packed(q[:, order], 4), "x.qzeros": packed(z[:, order], 4),
            "x.scales": scales}


@pytest.mark.parametrize("config", [dict(group_size=G, version="gemm"), dict(group_size=-1),
                                    dict(q_group_size=G, w_bit=4, version="GEMM")])
def test_awq(config):
    g = N_IN if config.get("group_size") == -1 else G
    q = torch.randint(0, 16, (N_IN, N_OUT))
    z = torch.randint(0, 16, (N_IN // g, N_OUT))
    scales = torch.rand(N_IN // g, N_OUT).half()
    group = group_of(g=g)
    got = run({**awq_tensors(q, z, scales), "x.bias": scales[0]},
              dict(quant_method="awq", bits=4) | config)
    assert set(got) == {"x.weight", "x.bias"}
    same(got["x.weight"], ((q - z[group]) * scales.float()[group]).T, torch.float16)


def less_one(z, bits):
    """v1's zero points: 1 taken from each number of a 32-bit word at once, borrows included."""
    words = packed(z, bits).long()
    return (words - sum(1 << i for i in range(0, 32, bits))).to(torch.int32)


@pytest.mark.parametrize("order", ["absent", "plain", "desc_act", "all zero"])
@pytest.mark.parametrize("version", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, version, order):
    q = torch.randint(0, 1 << bits, (N_IN, N_OUT))
    z = torch.randint(0, 1 << bits, (N_IN // G, N_OUT))   # 0 borrows; for symmetric ones 2^(bits-1)
    scales = torch.rand(N_IN // G, N_OUT).half()
    group = group_of()
    if order == "desc_act":
        group = group[torch.randperm(N_IN)]
    if version == "gptq_v2":
        zeros = packed(z, bits)
    else:
        zeros = packed((z - 1) % 8, 3) if bits == 3 else less_one(z, bits)
    tensors = {"x.qweight": packed(q.T, bits).T, "x.qzeros": zeros, "x.scales": scales}
    if order != "absent":
        tensors["x.g_idx"] = (group if order != "all zero" else group * 0).to(torch.int32)
    config = dict(quant_method="gptq", bits=bits, group_size=G)
    got = run(tensors, config | (dict(checkpoint_format=version) if version else {}))
    assert set(got) == {"x.weight"}
    same(got["x.weight"], ((q - z[group]) * scales.float()[group]).T, torch.float16)


def test_gptq_bits_of_each_linear():
    tensors, want = {}, {}
    for x, bits in dict(a=4, b=8).items():         # GPTQModel's `dynamic`
        q, z = (torch.randint(1, 1 << bits, (n, N_OUT)) for n in (N_IN, 3))
        scales = torch.rand(3, N_OUT).half()
        tensors |= {x + ".qweight": packed(q.T, bits).T, x + ".qzeros": packed(z - 1, bits),
                    x + ".scales": scales}
        want[x] = ((q - z[group_of()]) * scales.float()[group_of()]).T
    got = run(tensors, dict(quant_method="gptq", bits=4, group_size=G))
    for x in want:
        same(got[x + ".weight"], want[x], torch.float16)


# ---- compressed-tensors -------------------------------------------------------------------------

def ct(format, *weights, **more):
    groups = {f"group_{i}": dict(targets=["Linear"], weights=w) for i, w in enumerate(weights)}
    return dict(quant_method="compressed-tensors", format=format, config_groups=groups) | more


@pytest.mark.parametrize("n_out, n_in", [(64, 96), (61, 100)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ["symmetric", "packed", "int8"])
@pytest.mark.parametrize("strategy", ["group", "g_idx", "channel", "tensor"])
def test_pack_quantized(strategy, zero, bits, n_out, n_in):
    half, g = 1 << bits - 1, n_in // 4
    q = torch.randint(-half, half, (n_out, n_in))
    group = torch.arange(n_in) // g if strategy in ("group", "g_idx") else torch.zeros(n_in).long()
    if strategy == "g_idx":
        group = group[torch.randperm(n_in)]
    scale = torch.rand(1 if strategy == "tensor" else n_out, int(group.max()) + 1).bfloat16()
    z = torch.randint(-half, half, scale.shape) if zero != "symmetric" else scale.long() * 0
    tensors = {"x.weight_packed": packed(q + half, bits), "x.weight_scale": scale,
               "x.weight_shape": torch.tensor([n_out, n_in])}
    if strategy == "tensor":
        tensors["x.weight_scale"] = scale[0]
    if zero == "packed" and strategy != "tensor":
        tensors["x.weight_zero_point"] = packed((z + half).T, bits).T
    elif zero != "symmetric":
        tensors["x.weight_zero_point"] = z.to(torch.int8).reshape(tensors["x.weight_scale"].shape)
    if strategy == "g_idx":
        tensors["x.weight_g_idx"] = group.to(torch.int32)
    other = dict(num_bits=8, group_size=None, strategy="channel")
    got = run({**tensors, "x.k_scale": scale},
              ct("pack-quantized", other, dict(num_bits=bits, group_size=g)))
    assert set(got) == {"x.weight"}
    same(got["x.weight"], (q - z[:, group]) * scale.float()[:, group])


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("shape", [(1,), (N_OUT, 1), (N_OUT, N_IN // G)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(format, shape, symmetric):
    q = torch.randint(-128, 128, (N_OUT, N_IN), dtype=torch.int8)
    scale, z = torch.rand(shape).bfloat16(), torch.randint(-128, 128, shape, dtype=torch.int8)
    wide = lambda t: t.float().reshape(-1, shape[-1]).repeat_interleave(N_IN // shape[-1], 1)
    tensors = {"x.weight": q, "x.weight_scale": scale}
    if not symmetric:
        tensors["x.weight_zero_point"] = z
    got = run({**tensors, "x.input_zero_point": z}, ct(format, dict(num_bits=8, group_size=G)))
    assert set(got) == {"x.weight"}
    same(got["x.weight"], (q.float() - (0 if symmetric else wide(z))) * wide(scale))


@pytest.mark.parametrize("block", ["16x32", [16, 32], None])
def test_float_quantized(block):
    q, shape = fp8(70, 100), (5, 4) if block else (70, 1)
    scale = torch.rand(shape).bfloat16()
    got = run({"x.weight": q, "x.weight_scale": scale}, ct("float-quantized", dict(
        num_bits=8, type="float", block_structure=block)))
    wide = scale.float().repeat_interleave(16, 0).repeat_interleave(32, 1)[:70, :100]
    same(got["x.weight"], q.float() * (wide if block else scale.float()))


def test_mixed_precision_and_dense():
    q, scale = fp8(N_OUT, N_IN), torch.rand(N_OUT, 1).bfloat16()
    small = torch.randint(-8, 8, (N_OUT, N_IN))
    config = ct("mixed-precision", dict(num_bits=8), dict(num_bits=4, group_size=None))
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    config["config_groups"]["group_1"]["format"] = "pack-quantized"
    got = run({"x.weight": q, "x.weight_scale": scale, "y.weight_packed": packed(small + 8, 4),
               "y.weight_scale": scale, "y.weight_shape": torch.tensor([N_OUT, N_IN])}, config)
    same(got["x.weight"], q.float() * scale.float())
    same(got["y.weight"], small * scale.float())
    plain = run({"x.weight": scale, "x.weight_scale": scale}, ct("dense", {}))
    assert list(plain) == ["x.weight"]


def test_what_is_dropped():
    """Scales of activations and of the cache; not Gemma 3n's parameter of a similar name."""
    keep = ["altup.correct_output_scale", "logit_scale", "norm.weight", "x.bias"]
    drop = ["x.input_scale", "x.k_scale", "x.v_scale", "k_proj.output_scale", "x.activation_scale", "self_attn.kv_scale",
            "experts.gate_up_proj_activation_scale", "x.input_scale_ub", "x.input_zero_point"]
    assert list(run({n: torch.ones(1) for n in keep + drop}, FP8_CONFIG)) == keep


# ---- mxfp4 --------------------------------------------------------------------------------------

def e2m1(n):
    """Sign, two bits of exponent (bias 1), one of mantissa."""
    sign, exponent, mantissa = n >> 3, n >> 1 & 3, n & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2))


def test_mxfp4():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    x, E, n_out, n_block = "layers.0.mlp.experts.gate_up_proj", 2, 10, 3
    blocks = torch.randint(0, 256, (E, n_out, n_block, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (E, n_out, n_block), dtype=torch.uint8)
    want = torch.zeros(E, n_out, n_block * 32)
    for e, o, j, byte in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        n, scale = int(blocks[e, o, j, byte]), 2.0 ** (int(scales[e, o, j]) - 127)
        want[e, o, j * 32 + byte * 2] = e2m1(n & 15) * scale
        want[e, o, j * 32 + byte * 2 + 1] = e2m1(n >> 4) * scale
    got = run({x + "_blocks": blocks, x + "_scales": scales, x + "_bias": want[:, :, 0]},
              dict(quant_method="mxfp4"))
    assert set(got) == {x + ".weight", x + "_bias"}
    same(got[x + ".weight"], want)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    same(got[x + ".weight"], theirs.transpose(1, 2))


# ---- Whole models, from files ---------------------------------------------------------------------

def as_fp8(w, scale_shape):
    scale = torch.rand(scale_shape) * 0.01 + 0.002
    wide = scale
    if len(scale_shape) == 2:
        wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[:w.shape[0], :w.shape[1]]
    q = (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale_inv": scale}, q.float() * wide


def as_awq(w):
    scales = (torch.rand(w.shape[1] // G, w.shape[0]) * 0.05 + 0.03).half()
    z = torch.randint(6, 10, scales.shape)
    wide, zero = scales.float()[group_of(w.shape[1])], z[group_of(w.shape[1])]
    q = (w.T / wide + zero).round().clamp(0, 15).long()
    parts = {n.removeprefix("x."): t for n, t in awq_tensors(q, z, scales).items()}
    return parts, ((q - zero) * wide).T


def as_gptq(w, act_order=True):
    group = group_of(w.shape[1])
    if act_order:
        group = group[torch.randperm(w.shape[1])]
    scales = (torch.rand(w.shape[1] // G, w.shape[0]) * 0.05 + 0.03).half()
    q = (w.T / scales.float()[group] + 8).round().clamp(0, 15).long()
    parts = dict(qweight=packed(q.T, 4).T, scales=scales, g_idx=group.to(torch.int32),
                 qzeros=packed(torch.full_like(scales, 7).long(), 4))
    return parts, ((q - 8) * scales.float()[group]).T


def as_packed(w):
    scale = (torch.rand(w.shape[0], w.shape[1] // G) * 0.05 + 0.03).bfloat16()
    wide = scale.float().repeat_interleave(G, 1)
    q = (w / wide).round().clamp(-8, 7).long()
    parts = dict(weight_packed=packed(q + 8, 4), weight_scale=scale, weight_shape=torch.tensor(w.shape))
    return parts, q * wide


WHOLE_FAMILIES = ["qwen3", "phi3-longrope", "mixtral"]
PACKED_FAMILIES = [*WHOLE_FAMILIES, "gpt_oss"]
WHOLE = {"fp8-block": (lambda w: as_fp8(w, (-(-w.shape[0] // 32), -(-w.shape[1] // 32))),
                       dict(quant_method="fp8", weight_block_size=[32, 32])),
         "fp8-tensor": (lambda w: as_fp8(w, ()), dict(quant_method="fp8")),
         "awq": (as_awq, dict(quant_method="awq", bits=4, group_size=G, version="gemm")),
         "gptq": (partial(as_gptq, act_order=False), dict(quant_method="gptq", bits=4, group_size=G)),
         "gptq-ordered": (as_gptq, dict(quant_method="gptq", bits=4, group_size=G, desc_act=True)),
         "pack-quantized": (as_packed, ct("pack-quantized", dict(num_bits=4, group_size=G)))}


def whole_model(families, family, method, tmp_path, which=r"(proj|w[123])\.weight$"):
    """Its linears packed in the Hub's layout, fused ones and experts too; transformers gets the numbers.

    -> what is quantized once it is read.
    """
    directory, model = families(family)
    quantize, quantization = WHOLE[method]
    config, packed_, plain = json.loads((directory / "config.json").read_text()), {}, {}
    for name, w in load_file(directory / "model.safetensors").items():
        if re.search(which, name):
            parts, w = quantize(w)
            packed_ |= {name.removesuffix("weight") + n: t.contiguous() for n, t in parts.items()}
        else:
            packed_[name] = w
        plain[name] = w.contiguous()
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    shutil.copy(directory / "config.json", tmp_path / "plain")
    save_file(packed_, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    reference = type(model).from_pretrained(tmp_path / "plain", dtype=torch.float32)
    prompt = torch.randint(0, 160, (2, 24))
    close(our_logits(tmp_path, prompt), tiny.logits(reference, prompt))
    return read_checkpoint(tmp_path)


@pytest.mark.parametrize("method", WHOLE)
@pytest.mark.parametrize("family", WHOLE_FAMILIES)
def test_a_whole_model(families, family, method, tmp_path):
    found = schemes(whole_model(families, family, method, tmp_path))
    assert found == (f"int4-g{G}" if method in ("awq", "gptq", "pack-quantized") else "none", "none")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_four_bits_of_a_file_in_the_kernels(families, method, tmp_path):
    """--quantize int4 adds a head and leaves the rest: as near to its numbers as the same, dequantized, in bfloat16."""
    source = whole_model(families, "qwen3", method, tmp_path, r"proj\.weight$")
    new = quantized(source, "int4", G)
    assert describe(new) == f"int4-g{G}, head int8"
    kept = {n: t for n, t in new.tensors.items() if n.rpartition(".")[0] in {x.rpartition(".")[0] for x in source.tensors}}
    assert all(torch.equal(t.whole(), source.tensors[n].whole()) for n, t in kept.items() if n in source.tensors and "layers" in n)
    plain = {}
    for n, t in new.tensors.items():
        x = n.rpartition(".")[0]
        if f"{x}.scales" not in new.tensors:
            plain[n] = t
        elif n == f"{x}.weight":
            leaves = [new.tensors.get(f"{x}.{leaf}") for leaf in ("weight", "scales", "zeros")]
            plain[n] = LazyTensor(n, *kind_of(w := dequantize(*(t and t.whole() for t in leaves), torch.float32)), lambda a, b, w=w: w[a:b])
    plain = replace(new, tensors=plain, quantization=None)
    prompt = torch.randint(0, 160, (2, 24))
    exact, rounded, packed = (logits(of, dtype, prompt) for of, dtype in ((plain, torch.float32), (plain, torch.bfloat16), (new, torch.bfloat16)))
    assert (packed - exact).norm() < 1.5 * (rounded - exact).norm() < 0.1 * exact.norm()
    close(logits(new, torch.float32, prompt), exact)


def kind_of(w):
    return tuple(w.shape), w.dtype


def logits(source, dtype, prompt):
    model = load_model(source, dtype, "cpu")
    model.setup_cache(2, prompt.shape[1])
    return model(prompt, torch.arange(prompt.shape[1]), logits_to_keep=prompt.shape[1]).float()


@pytest.mark.parametrize("which", [r"k_proj\.weight$", r"(q|v|o)_proj\.weight$"])
def test_what_is_fused_is_quantized_alike(families, tmp_path, which):
    """One of q, k and v is plain: all are, in memory; wo keeps its four bits."""
    source = whole_model(families, "qwen3", "awq", tmp_path, which)
    assert schemes(source)[0] == ("none" if "k_" in which else f"int4-g{G}")
    assert not {f"layers.0.attn.w{x}.scales" for x in "qkv"} & set(source.tensors)


def test_biases_that_autogptq_invents(families, tmp_path):
    """Zeros for every layer of a model that has none. Others are still refused; real ones stay."""
    directory, model = families("qwen2")
    disk = load_file(directory / "model.safetensors")
    zeros = {n.removesuffix("weight") + "bias": torch.zeros(w.shape[0]) for n, w in disk.items() if "proj.weight" in n}
    shutil.copy(directory / "config.json", tmp_path)
    save_file({**zeros, **disk}, tmp_path / "model.safetensors")
    prompt = torch.randint(0, 160, (2, 24))
    close(our_logits(tmp_path, prompt), tiny.logits(model, prompt))
    zeros["model.layers.1.mlp.up_proj.bias"][3] = 0.1
    save_file({**zeros, **disk}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1 unexpected tensors: model.layers.1.mlp.up_proj.bias"):
        our_logits(tmp_path, prompt)


def test_a_whole_gpt_oss(families, tmp_path):
    """Experts in MXFP4, as OpenAI released it; biases and attention plain."""
    shutil.copy(families("gpt_oss")[0] / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    pytest.importorskip("transformers.integrations.mxfp4")
    model, disk = tiny.make_mxfp4_gpt_oss()
    save_file(disk, tmp_path / "model.safetensors")
    prompt = torch.randint(0, 160, (2, 24))
    close(our_logits(tmp_path, prompt), tiny.logits(model, prompt))


# ---- Refusals -----------------------------------------------------------------------------------

INT = torch.zeros(N_IN, N_OUT // 8, dtype=torch.int32)
AWQ = {"x.qweight": INT, "x.qzeros": INT[:3], "x.scales": torch.zeros(3, N_OUT)}
GPTQ = {"x.qweight": INT.reshape(N_IN // 8, N_OUT), "x.qzeros": INT[:3],
        "x.scales": torch.zeros(3, N_OUT)}
PACK = {"x.weight_packed": INT.reshape(N_OUT, N_IN // 8), "x.weight_scale": torch.zeros(N_OUT, 3),
        "x.weight_shape": torch.tensor([N_OUT, N_IN])}
FP8 = {"x.weight": fp8(N_OUT, N_IN), "x.weight_scale_inv": torch.zeros(2, 3)}
MX = {"a_proj_blocks": torch.zeros(2, 8, 3, 16, dtype=torch.uint8),
      "a_proj_scales": torch.zeros(2, 8, 3, dtype=torch.uint8)}
AWQ_CONFIG = dict(quant_method="awq", bits=4, group_size=G)
GPTQ_CONFIG = dict(quant_method="gptq", bits=4, group_size=G)
PACK_CONFIG = ct("pack-quantized", dict(num_bits=4, group_size=G))
FP8_CONFIG = dict(quant_method="fp8", weight_block_size=[32, 32])
MX_CONFIG = dict(quant_method="mxfp4")


CASES = [(AWQ, AWQ_CONFIG), (GPTQ, GPTQ_CONFIG), (PACK, PACK_CONFIG), (FP8, FP8_CONFIG),
         (MX, MX_CONFIG)]


@pytest.mark.parametrize("tensors, config", CASES)
def test_the_refusals_start_from_what_is_read(tensors, config):
    (got,) = run(tensors, config).values()
    assert got.whole().shape == got.shape


@pytest.mark.parametrize("tensors, config, found", [
    *(({}, dict(quant_method=m), f"quant_method '{m}'") for m in (
        "bitsandbytes", "hqq", "aqlm", "quanto", "eetq", "torchao", "bitnet", "nvfp4", "quark",
        "vptq", "higgs", "auto-round")),
    ({}, {}, "quant_method None"),
    ({}, dict(quant_method="modelopt", quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ'"),
    *((AWQ, AWQ_CONFIG | dict(version=v), f"AWQ version '{v}'") for v in (
        "gemv", "gemv_fast", "llm-awq", "marlin")),
    (AWQ, AWQ_CONFIG | dict(backend="llm-awq"), "backend 'llm-awq'"),
    (AWQ, AWQ_CONFIG | dict(bits=8), "AWQ in 8 bits"),
    *((GPTQ, GPTQ_CONFIG | dict(checkpoint_format=v), f"checkpoint_format '{v}'") for v in (
        "marlin", "bitblas", "gptq_p", "qqq")),
    (GPTQ, GPTQ_CONFIG | dict(is_marlin_format=True), "checkpoint_format 'marlin'"),
    (GPTQ, GPTQ_CONFIG | dict(bits=5), "GPTQ in 5 bits"),
    (GPTQ, GPTQ_CONFIG | dict(bits=3, meta=dict(quantizer=["gptqmodel:1.0"])), "3 bits by GPTQM"),
    *((PACK, ct(f), f"format '{f}'") for f in (
        "mxfp8-quantized", "marlin-24",
        "sparse-bitmask", "sparse-24-bitmask")),
    (PACK, ct("pack-quantized", sparsity_config=dict(format="sparse-24-bitmask")), "sparse-24"),
    (PACK, ct("pack-quantized", transform_config=dict(config_groups=dict(R1={}))), "transform"),
    (PACK | {"x.weight_packed": INT[:N_OUT, :6]}, PACK_CONFIG, "4 and 8 bits"),
    ({"x.weight": fp8(N_OUT, N_IN).view(torch.int8)}, FP8_CONFIG, "x.weight of int8"),
    (AWQ | {"x.qweight": INT.long()}, AWQ_CONFIG, "x.qweight of torch.int64"),
])
def test_not_supported(tensors, config, found):
    with pytest.raises(ValueError) as error:
        run(tensors, config)
    message = str(error.value)
    assert found in message and ALTERNATIVES_HINT in message and "only" in message and "\n" not in message


@pytest.mark.parametrize("tensors, config, name", [(t, c, n) for t, c in CASES for n in t])
def test_missing_partner(tensors, config, name):
    with pytest.raises(ValueError, match="is missing$"):
        run({n: t for n, t in tensors.items() if n != name}, config)


@pytest.mark.parametrize("tensors, config, name, shape", [
    (AWQ, AWQ_CONFIG, "x.qweight", (N_IN, 7)), (AWQ, AWQ_CONFIG, "x.qzeros", (2, 8)),
    (AWQ, AWQ_CONFIG, "x.scales", (3, 56)), (AWQ, AWQ_CONFIG | dict(group_size=64), "x.bias", ()),
    (GPTQ, GPTQ_CONFIG, "x.qweight", (12, 56)), (GPTQ, GPTQ_CONFIG, "x.qweight", (8, N_OUT)),
    (GPTQ, GPTQ_CONFIG, "x.qzeros", (3, 7)), (GPTQ, GPTQ_CONFIG, "x.scales", (2, N_OUT)),
    (GPTQ, GPTQ_CONFIG, "x.scales", (N_OUT,)), (GPTQ, GPTQ_CONFIG, "x.g_idx", (95,)),
    (PACK, PACK_CONFIG, "x.weight_scale", (N_OUT, 2)), (PACK, PACK_CONFIG, "x.weight_scale", (63,)),
    (PACK, PACK_CONFIG, "x.weight_zero_point", (N_OUT, 2)),
    (FP8, FP8_CONFIG, "x.weight_scale_inv", (2, 2)), (FP8, FP8_CONFIG, "x.weight_scale_inv", (3, 3)),
    (FP8, FP8_CONFIG, "x.weight_scale_inv", (2, 2, 3)), (FP8, {"quant_method": "fp8"}, "y", ()),
    (MX, MX_CONFIG, "a_proj_scales", (2, 8, 2)), (MX, MX_CONFIG, "a_proj_blocks", (2, 8, 3, 8)),
])
def test_shapes_that_do_not_fit(tensors, config, name, shape):
    other = torch.zeros(shape, dtype=tensors.get(name, torch.zeros(1)).dtype)
    with pytest.raises(ValueError, match="shapes .* do not match$"):
        run(tensors | {name: other}, config)
