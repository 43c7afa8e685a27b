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
from cli import engines, ngram
from formats.load import load_model, read_checkpoint
from kernels import cuda as kernels
from kernels.plain import Kernel, plain
from sampling import SamplingParams

sys.path.insert(0, str(Path(generate.__file__).parent / "scripts"))
import gpu_check  # noqa: E402

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
        return (quantize.Int4(groupsize) if int4 else quantize.Int8()).kernel(CUDA, dtype, shape).name
    for capability in ((8, 0), (8, 9), (9, 0)):
        gpu(capability)
        assert picked() == picked(groupsize=128) == "int4 cuda"
        assert picked(int4=False) == "plain"                           # Inductor fuses int8
        assert picked(dtype=torch.float16) == picked(dtype=torch.float32) == "plain"
        assert picked(shape=(8, 4096, 4096)) == "plain"                # experts
        assert picked(shape=(4100, 4096)) == picked(groupsize=16) == "plain"
    gpu((7, 5))
    assert picked() == "plain"
    gpu((9, 4), hip="6.4")                                             # an AMD GPU
    assert picked() == "plain"


@pytest.mark.parametrize("n_out, n_in, tiles", [(64, 1024, (8, 8, 32, 4)), (72, 576, (9, 9, 32, 2)), (8, 96, (1, 3, 32, 1))])
def test_layout_of_the_cuda_kernel(n_out, n_in, tiles):
    """The shapes that torch states, for widths that divide by 128, 64 and 32."""
    q, scales = torch.empty(n_out, n_in // 2, dtype=torch.uint8, device="meta"), torch.empty(n_out, n_in // 32, device="meta")
    weight, both, _ = kernels.INT4_CUDA.pack(q, scales.to(BF16), scales.to(BF16))
    assert weight.shape == tiles and both.shape == (n_in // 32, n_out, 2)


def test_without_its_product_the_cuda_kernel_stays_right(capsys):
    """A CPU has no tinygemm, as another torch might not."""
    scheme, x = quantize.Int4(32), torch.randn(5, 96).bfloat16()
    leaves = scheme.quantize(torch.randn(64, 96)).values()
    kernel = kernels.INT4_CUDA
    assert torch.equal(kernel.product(x, *kernel.pack(*leaves)), plain(x, *leaves))
    assert "_convert_weight_to_int4pack" in capsys.readouterr().err


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


def test_the_checks_pass_here(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "engine_names", lambda device: ["kv_cache"])
    assert gpu_check.run(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{check.__name__}:" for check in gpu_check.CHECKS]
    assert all(line.startswith("ok ") for line in lines)


def test_the_checks_see_what_is_wrong(capsys, monkeypatch):
    def fails(name):
        assert gpu_check.run(["--device", "cpu", "--only", name]) == 1
        return capsys.readouterr().out

    monkeypatch.setattr(gpu_check, "engine_names", lambda device: ["kv_cache"])
    with monkeypatch.context() as m:
        wrong = Kernel("wrong", lambda *args: plain(*args) * 1.05)
        m.setattr(quantize.Int8, "kernel", lambda *args: wrong)
        m.setattr(quantize.Int4, "kernel", lambda *args: wrong)
        assert "times the rounding allowed" in fails("products")
    with monkeypatch.context() as m:
        steps = generate.Steps(decode=lambda *args: generate.decode_one_token(*args) ^ 1)
        m.setattr(gpu_check, "build_steps", lambda *args: steps)
        assert "not what recomputing everything gives" in fails("engines")
    with monkeypatch.context() as m:
        m.setattr(gpu_check, "build_steps", lambda *args: generate.Steps(
            decode=lambda model, token, *rest: (token.item(), generate.decode_one_token(model, token, *rest))[1]))
        assert "aten.item" in fails("no_waiting")
    with monkeypatch.context() as m:
        m.setattr(ngram.NgramDrafter, "find", lambda self, history, n: n * 0 + 3)
        m.setattr(speculate, "verify", lambda *a: (torch.zeros(1, 5, dtype=torch.int64), torch.tensor(4)))
        assert "other tokens than without drafts" in fails("drafting")
    with pytest.raises(ValueError, match="--only nothing: the checks are products, families"):
        gpu_check.run(["--device", "cpu", "--only", "nothing"])
