"""Hidden states that a model records for drafters: by position, the same under every engine, and as current as the cache."""

import re

import pytest
import torch
from conftest import ROOT

from generate import CompiledStep
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels import compile as compile_module
from gpt_faster.kernels.cpu.hidden_states import RecordHidden
from gpt_faster.kernels.cpu.layers import uses_operations
from model import Transformer

LAYERS = 0, 1, 3, 4                                        # of 4: first, middle, last, its output
FAMILIES = "llama3", "gemma3", "qwen3_moe", "qwen3_5_text", "cohere", "lfm2"


def load(families, family, dtype=torch.float32):
    return load_model(read_checkpoint(families(family)[0]), dtype, "cpu")


def inputs_of_layers(model, tokens):
    """The reference: what the uncompiled layers are called with, for whole sequences [B, T]."""
    seen, handles = [], []
    for layer in model.layers:
        handles.append(layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone())))
    handles.append(model.layers[-1].register_forward_hook(lambda module, args, y: seen.append(y.clone())))
    model.setup_cache(len(tokens), 32)
    with torch.inference_mode():
        model(tokens, torch.arange(tokens.shape[1]))
    for handle in handles:
        handle.remove()
    return seen


def some_tokens(B=1, T=24, seed=3):
    return torch.randint(0, 160, (B, T), generator=torch.Generator().manual_seed(seed))


def close(model, states, expected):
    if model.dtype == torch.float32:
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    else:                                                  # kernels keep the residual stream in fp32
        error = (states.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert error.median() < 0.02, error                # a router may choose another expert at a near-tie


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["kv_cache", "compile"])
def test_states_are_the_layers_inputs(families, engine, family, dtype):
    """In chunks, then token by token, then after rejected tokens at the same positions."""
    model, tokens = load(families, family, dtype), some_tokens()
    expected = inputs_of_layers(model, tokens)
    model.setup_cache(1, 32, 8, max_rejected=4)
    model.record_hidden(*LAYERS)
    if engine == "compile":
        compile_module.compile_steps(model)
        assert uses_operations(model) and isinstance(model.record, RecordHidden)
    pos = torch.arange(24)
    with torch.inference_mode():
        for a, b in ((0, 8), (8, 13), (13, 14), (14, 15)):
            model(tokens[:, a:b], pos[a:b])
        model((tokens[:, 15:19] + 7) % 160, pos[15:19])    # rejected
        for a, b in ((15, 20), *((i, i + 1) for i in range(20, 24))):
            model(tokens[:, a:b], pos[a:b])
    for k in LAYERS:
        assert model.hidden[k].dtype == dtype and model.hidden[k].shape == (1, 32, 64)
        close(model, model.hidden[k][:, :24], expected[k])


@pytest.mark.kernels
@pytest.mark.parametrize("engine", ["kv_cache", "compile"])
def test_rows_of_a_batch(families, engine):
    """Each row at its own positions; a call for some rows leaves the others."""
    model, tokens = load(families, "llama3"), some_tokens(3)
    expected = inputs_of_layers(model, tokens)
    model.setup_cache(3, 32, 16)
    model.record_hidden(2, 4)
    if engine == "compile":
        compile_module.compile_steps(model)
    with torch.inference_mode():
        model(tokens[:, :5], torch.arange(5))
        before = model.hidden[2][1].clone()
        model(tokens[[2, 0], 5:9], torch.arange(5, 9).expand(2, -1), batch_idx=torch.tensor([2, 0]))
        assert torch.equal(model.hidden[2][1], before)
        pos = torch.tensor([[9], [5], [9]])
        model(tokens.gather(1, pos), pos)
    for k in (2, 4):
        for row, n in enumerate((10, 6, 10)):
            torch.testing.assert_close(model.hidden[k][row, :n], expected[k][row, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
def test_beside_a_hooked_layer(families):
    """A layer that runs in PyTorch splits the operations into two lists."""
    model, tokens = load(families, "llama3"), some_tokens(1, 6)
    expected = inputs_of_layers(model, tokens)
    model.layers[2].register_forward_hook(lambda module, args, y: None)
    model.setup_cache(1, 32)
    model.record_hidden(1, 2, 3)
    compile_module.compile_steps(model)
    assert uses_operations(model)
    with torch.inference_mode():
        model(tokens, torch.arange(6))
    for k in (1, 2, 3):
        torch.testing.assert_close(model.hidden[k][:, :6], expected[k], rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
def test_recorders_come_and_caches_change(families):
    """Also within an uninterrupted loop of decode steps, which checks little."""
    model, tokens = load(families, "llama3"), some_tokens()
    expected = inputs_of_layers(model, tokens)
    model.setup_cache(1, 32)
    model.record_hidden(4)
    compile_module.compile_steps(model)
    compile_module.assume_exclusive(model)
    pos = torch.arange(24)
    with torch.inference_mode():
        model(tokens[:, :5], pos[:5])
        model(tokens[:, 5:6], pos[5:6])
        model.record_hidden(2)                             # layer 4 stays
        for i in range(6, 9):
            model(tokens[:, i:i + 1], pos[i:i + 1])
    for k in (2, 4):
        torch.testing.assert_close(model.hidden[k][:, 6:9], expected[k][:, 6:9], rtol=1e-4, atol=1e-4)
    model.setup_cache(1, 16)
    with torch.inference_mode():
        model(tokens[:, :9], pos[:9])
    for k in (2, 4):
        assert model.hidden[k].shape[1] == 16
        torch.testing.assert_close(model.hidden[k][:, :9], expected[k][:, :9], rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError), torch.inference_mode():
        model(tokens[:, :1], torch.tensor([16]))


def test_without_a_cache_nothing_is_recorded(families):
    model = load(families, "llama3")
    model.record_hidden(2)
    with torch.inference_mode():
        model(some_tokens(), torch.arange(24))
    with pytest.raises(AttributeError):
        model.hidden[2]
    with pytest.raises(AssertionError, match="no such layers"):
        model.record_hidden(5)
    model.setup_cache(1, 32)
    assert model.hidden[2].shape == (1, 32, 64)            # asked for before the cache was there


def test_a_compiled_step_records(families, monkeypatch):
    """torch.compile writes the buffers in place; another recorder compiles the step again."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda step, original=torch.compile, **more: original(
        step, backend="aot_eager", fullgraph=True))
    model, tokens = load(families, "llama3"), some_tokens()
    expected = inputs_of_layers(model, tokens)
    model.setup_cache(1, 32)
    step = CompiledStep(lambda model, tokens, pos: Transformer.forward(model, tokens, pos))
    pos = torch.arange(24)
    with torch.inference_mode():
        for layers, (a, b) in (((1,), (0, 5)), ((1,), (5, 6)), ((3, 4), (6, 7))):
            model.record_hidden(*layers)
            step(model, tokens[:, a:b], pos[a:b])
    for k, first in ((1, 6), (3, 6), (4, 6)):
        torch.testing.assert_close(model.hidden[k][:, first:7], expected[k][:, first:7], rtol=1e-4, atol=1e-4)


def test_the_example_of_the_docs(families):
    """docs/experiments.md: the block that records instead of hooking."""
    page = (ROOT / "docs/experiments.md").read_text()
    block, = re.findall(r"```python\n(model\.record_hidden.*?)```", page, re.S)
    model, ids = load(families, "llama3"), some_tokens(1, 6)[0].tolist()
    expected = inputs_of_layers(model, torch.tensor([ids]))
    model.setup_cache(1, 64)
    names = dict(model=model, ids=ids, write=lambda: model(torch.tensor([ids]), torch.arange(6)))
    with torch.inference_mode():
        exec(block, names)
    torch.testing.assert_close(names["before_layer_2"], expected[2][0], rtol=1e-4, atol=1e-4)
