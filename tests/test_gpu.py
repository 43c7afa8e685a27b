"""What is for a GPU, as far as a machine without one can hold it: the rest is scripts/gpu_check.sh's."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import make_batch

import generate
import quantize
import speculate
from gpt_faster.decoding import engines, ngram
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels import linear
from gpt_faster.kernels.cuda import fused_layer, matvec
from gpt_faster.kernels.cuda import products as kernels
from gpt_faster.kernels.plain import Kernel
from gpt_faster.layers.delta import GatedDelta
from sampling import SamplingParams

sys.path.insert(0, str(Path(generate.__file__).parent / "scripts"))
import gpu_check  # noqa: E402
from dry_run import numbers  # noqa: E402

pytestmark = pytest.mark.kernels

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of this compute capability, as torch would describe it."""
    def set_up(capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
    return set_up


def test_kernels_are_those_that_the_gpu_has(gpu):
    def picked(int4=True, dtype=BF16, shape=(4096, 4096), groupsize=32):
        return linear.kernel_for(quantize.Int4(groupsize) if int4 else quantize.Int8(), CUDA, dtype, shape).name
    for capability, hip in (((8, 0), None), ((8, 9), None), ((9, 0), None), ((9, 4), "6.4")):
        gpu(capability, hip)                                           # the last is an AMD GPU
        for dtype in (BF16, torch.float16, torch.float32):
            assert picked(dtype=dtype) == picked(dtype=dtype, groupsize=128) == "int4 cuda"
            assert picked(dtype=dtype, int4=False) == "int8 cuda"
        assert picked(shape=(8, 4096, 4096)) == "int4 cuda"            # experts
        assert picked(groupsize=16) == picked(int4=False, shape=(64, 72)) == "plain"
    gpu((7, 5))
    assert picked() == picked(int4=False) == "plain"


@pytest.mark.parametrize("scheme", [quantize.Int8(), quantize.Int4(32)])
def test_codes_lie_as_on_disk(scheme):
    """The kernels read the codes of the file, and so do prompts; int4's scales and zeros interleaved."""
    parts = scheme.quantize(torch.randn(24, 96))
    leaves = [parts.get(leaf) for leaf in quantize.LEAVES]
    kernel = kernels.INT8_CUDA if leaves[2] is None else kernels.INT4_CUDA
    packed = kernel.pack(*leaves)
    assert packed[0] is leaves[0] and packed[2] is None
    x = torch.randn(5, 96)
    for tensors in (leaves, packed):
        assert torch.equal(kernel.product(x, *tensors), quantize.product(x, *leaves))
        assert torch.equal(matvec.matvec(x, *tensors), quantize.product(x, *leaves))
        assert torch.equal(kernel.dequantize(*tensors, torch.float32), quantize.dequantize(*leaves, torch.float32))
    if leaves[2] is None:
        ids = torch.tensor([[3, 0], [23, 3]])
        assert torch.equal(kernel.rows(leaves[0], ids), leaves[0][ids])


def test_few_rows_are_computed_as_the_plain_layers_do():
    """Decoding, verifying and batches of every kind of model; the operators' references run here,
    the kernels themselves in scripts/dev/gpu_dryrun.py."""
    with numbers.on_a_gpu():
        results = {name: numbers.judge(most, **arguments) for name, arguments, most in numbers.cases()}
    assert len(results) > 30
    assert not {name: text for name, (ok, text) in results.items() if not ok}


def test_layers_that_the_kernels_do_not_know_run_as_they_are():
    """Parallel blocks, gates, DeltaNet, clipped projections, scores that differ by more than a cap and sinks."""
    others = {"parallel": dict(parallel=True, head_bias=True), "gate": dict(attn_gate=True, qk_norm="head"),
              "clip": dict(clip_qkv=0.5), "ALiBi": dict(alibi=True), "gains": dict(gains=True, qk_norm="head"),
              "DeltaNet": dict(attn_gate=True, mixer=(GatedDelta(2, 4, 32, 32), None)),
              "growth": dict(growth=0.5, growth_from=7), "embeddings": dict(embed_norm=True, post_norm=True, post_norm_eps=0.1)}
    with numbers.on_a_gpu():
        gpu_check.MODELS.update(others)
        for family in others:
            cfg = gpu_check.config(gpu_check.SMALL | others[family])
            assert fused_layer.supports_config(cfg) == (family == "embeddings")
            for case in ("decode", *numbers.ALWAYS):
                ok, text = numbers.judge(numbers.MOST, family=family, case=case)
                assert ok, (family, case, text)


def test_heads_that_share_keys_whatever_strides_attention_returns(monkeypatch, families):
    """Efficient attention, a GPU's choice, returns its result with positions outside of heads."""
    model = load_model(read_checkpoint(families("llama3")[0]), torch.float32, "cpu")
    tokens, plain = torch.arange(5)[None], F.scaled_dot_product_attention

    def last():
        model.setup_cache(1, 5)
        model(tokens[:, :4], torch.arange(4))
        return model(tokens[:, 4:], torch.tensor([4]))

    def efficient(*args, **more):
        return plain(*args, **more).transpose(1, 2).contiguous().transpose(1, 2)
    expected = last()
    monkeypatch.setattr(F, "scaled_dot_product_attention", efficient)
    assert torch.equal(last(), expected)


def test_a_warm_steps_token_lies_as_real_ones_do(families):
    """A compiled step depends on strides: one that differed would be compiled again in the first sample."""
    model = load_model(read_checkpoint(families("llama3")[0]), torch.float32, "cpu")
    strides = set()

    def decode(*args):
        strides.add(args[1].stride())
        return generate.decode_one_token(*args)
    steps = generate.Steps(decode=decode)
    for prompts in ([list(range(1, 8))], [list(range(1, 8))] * 3):
        strides.clear()
        model.setup_cache(len(prompts), 16)
        batch = make_batch(model, [SamplingParams()] * len(prompts), steps=steps)
        engines.warm_up(batch, prompts, range(8, 10))
        list(generate.generate(batch, prompts, 3))
        assert strides == {(1, 1)}


@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes_here(capsys, monkeypatch, check):
    monkeypatch.setattr(gpu_check, "engine_names", lambda device: ["kv_cache"])
    assert gpu_check.run(["--device", "cpu", "--only", check.__name__]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", f"{check.__name__}:"]]


def test_the_checks_see_what_is_wrong(capsys, monkeypatch):
    def fails(name):
        assert gpu_check.run(["--device", "cpu", "--only", name]) == 1
        return capsys.readouterr().out

    monkeypatch.setattr(gpu_check, "engine_names", lambda device: ["kv_cache"])
    with monkeypatch.context() as m:
        wrong = Kernel("wrong", lambda *args: quantize.product(*args) * 1.05)
        m.setattr(linear, "kernel_for", lambda *args: wrong)
        assert "times the rounding allowed" in fails("products")
    with monkeypatch.context() as m:
        steps = generate.Steps(decode=lambda *args: generate.decode_one_token(*args) ^ 1)
        m.setattr(gpu_check, "build_steps", lambda *args: steps)
        assert "differs from engine recompute" in fails("engines")
    with monkeypatch.context() as m:
        m.setattr(gpu_check, "build_steps", lambda *args: generate.Steps(
            decode=lambda model, token, *rest: (token.item(), generate.decode_one_token(model, token, *rest))[1]))
        assert "aten.item" in fails("no_waiting")
    with monkeypatch.context() as m:
        m.setattr(ngram.NgramDrafter, "find", lambda self, history, n: n * 0 + 3)
        m.setattr(speculate, "verify", lambda *a: (torch.zeros(1, 5, dtype=torch.int64), torch.tensor([4])))
        assert "other tokens than without drafts" in fails("drafting")
    with pytest.raises(ValueError, match="--only nothing: the checks are products, families"):
        gpu_check.run(["--device", "cpu", "--only", "nothing"])
