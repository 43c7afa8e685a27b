"""The engine torch_compile runs what is read: an edit of the core, a hook, an exchanged part are seen, before and after."""

import pytest
import torch
from helpers import GREEDY

import model as core
from generate import Batch, CompiledStep, Steps, compile_steps, generate
from model import Block, ModelConfig, Transformer
from sampling import Sampler

CFG = ModelConfig(dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96, vocab_size=160, context=128)


def blank(dtype=torch.float32):
    torch.manual_seed(0)
    model = Transformer(CFG).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.data = p.normal_(0, 0.3).to(dtype)           # norms stay in fp32
    model.dtype = dtype
    return model


def step(model, token, pos, kv_len):
    return model(token, pos, 1, kv_len)


def logits(model, run):
    """Of 12 steps, by the cache."""
    model.setup_cache(1, 64, 32)
    tokens = torch.tensor([[3, 141, 59, 26, 5, 99, 2, 34, 120, 8, 77, 51]])
    with torch.inference_mode():
        return torch.cat([run(model, tokens[:, i:i + 1], torch.tensor([i]), 64) for i in range(12)], dim=1)


def tokens(model, steps):
    model.setup_cache(1, 64, 32)
    batch = Batch(model, Sampler([GREEDY], CFG.vocab_size), steps)
    return [token.item() for token in generate(batch, [[3, 141, 59, 26, 5]], 24)]


def edit_block(model, monkeypatch):
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *inputs: plain(self, *inputs) * 1.5)


def edit_method(model, monkeypatch):
    plain = Transformer.embed_inputs
    monkeypatch.setattr(Transformer, "embed_inputs", lambda self, *inputs: (-plain(self, *inputs)[0], *plain(self, *inputs)[1:]))


def edit_mask(model, monkeypatch):
    plain = core.visible
    monkeypatch.setattr(core, "visible", lambda pos, key, window=None: plain(pos, key, window) & (key[..., None, :] > pos[..., None] - 4))


def hook(model, monkeypatch):
    model.layers[0].register_forward_hook(lambda module, inputs, x: x * 0.2)


def hook_before(model, monkeypatch):
    model.layers[1].ffn.down.register_forward_pre_hook(lambda module, inputs: (inputs[0] * -1,))


def exchange_activation(model, monkeypatch):
    model.layers[0].ffn.activation = lambda gate, up: -torch.relu(gate) * up


def exchange_module(model, monkeypatch):
    model.layers[0].attn.wo = torch.nn.Sequential(model.layers[0].attn.wo, torch.nn.Tanh(), core.RMSNorm(64, 1e-5))


def new_parameter(model, monkeypatch):
    model.layers[1].ffn_norm.weight = torch.nn.Parameter(torch.linspace(-2, 2, 64), requires_grad=False)


def in_place(model, monkeypatch):
    model.layers[0].ffn.down.weight.mul_(-1)


def new_number(model, monkeypatch):
    model.norm.eps = 500.0


EDITS = [edit_block, edit_method, edit_mask, hook, hook_before, exchange_activation, exchange_module, new_parameter, in_place, new_number]


@pytest.mark.parametrize("dtype, margin", [(torch.float32, 1e-3), (torch.bfloat16, 0.25)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_are_seen(edit, dtype, margin, monkeypatch):
    """After the step was compiled and had run. In bf16 a fused step rounds less often than the plain one."""
    torch._dynamo.reset()
    model = blank(dtype)
    run = CompiledStep(step)
    before = logits(model, run)
    torch.testing.assert_close(before, logits(model, step), atol=margin, rtol=margin)
    edit(model, monkeypatch)
    after = logits(model, step)
    assert (after - before).abs().max() > 4 * margin
    torch.testing.assert_close(logits(model, run), after, atol=margin, rtol=margin)


def test_an_edited_model_is_compiled_as_it_is(monkeypatch):
    torch._dynamo.reset()
    model = blank()
    for edit in (edit_mask, hook, exchange_activation, in_place):
        edit(model, monkeypatch)
    assert tokens(model, compile_steps(model)) == tokens(model, Steps())


def test_no_cuda_graph_where_a_hook_may_keep_what_it_is_given(monkeypatch):
    """Its next replay would overwrite it. A graph is asked for by the mode alone."""
    modes, original = [], torch.compile

    def compile(step, mode=None, **more):
        made = original(step, backend="eager", **more)
        return lambda *args: modes.append(mode) or made(*args)
    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    model = blank()
    run = CompiledStep(step)
    logits(model, run)
    assert set(modes) == {"reduce-overhead"}
    kept = []
    model.layers[1].register_forward_hook(lambda module, inputs, x: kept.append(x))
    modes.clear()
    logits(model, run)
    assert set(modes) == {None} and len(kept) == 12
    hooked, plain = blank(), blank()               # of which one has a hook before the step sees either
    hooked.layers[0].register_forward_hook(lambda module, inputs, x: kept.append(x))
    run = CompiledStep(step)
    for other, mode in ((plain, "reduce-overhead"), (hooked, None), (plain, "reduce-overhead")):
        modes.clear()
        logits(other, run)
        assert set(modes) == {mode}
