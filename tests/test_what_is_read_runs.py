"""A compiled model gives what the model gives as it is read, whatever was edited, hooked or exchanged,
before it was compiled, after, or between two steps of a text; or it refuses in one line."""

import copy
import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import files_of_ours
from torch import nn

import gpt_faster.layers.attention
import gpt_faster.layers.quantized_cache
import model as core
import sampling
from gpt_faster.decoding.samplers import DeviceSampler, ShortlistSampler
from gpt_faster.kernels import compile as compile_room
from gpt_faster.kernels import modifications, torch_internals
from gpt_faster.kernels.compile import WhileUnmodified, assume_exclusive, compile_model, compiled
from gpt_faster.kernels.cpu import embed_unembed, native
from gpt_faster.kernels.cpu import layers as cpu_layers
from gpt_faster.kernels.guard import guard_of
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.mamba import Mamba2
from gpt_faster.layers.norms import LayerNorm
from gpt_faster.layers.short_conv import ShortConv
from model import (
    SDPA,
    Attention,
    Block,
    FeedForward,
    KVCache,
    ModelConfig,
    MoEConfig,
    Transformer,
)
from sampling import Sampler, SamplingParams

ROOT = Path(core.__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
import known_sources  # noqa: E402

pytestmark = pytest.mark.kernels

CFG = ModelConfig(dim=64, n_layer=3, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96, vocab_size=160, context=128,
                  qk_norm=True, qkv_bias=True, head_bias=True, window=(None, 16))
N_PROMPT, N_STEP = 45, 6
WHEN = ("before", "after", "between")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def alone():
    torch_internals.note_once.cache_clear()
    with torch.no_grad():
        yield
    torch_internals.note_once.cache_clear()


def make(dtype=torch.float32, cfg=CFG):
    """A model with random weights, the same each time."""
    torch.manual_seed(0)
    model = Transformer(cfg)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1 if "norm" in name else 0, 0.2 if p.dim() == 2 else 0.5)
        p.requires_grad = False
    model.dtype = dtype
    for name, p in model.named_parameters():
        if p.dim() == 2 and "taps" not in name and "conv" not in name or name.endswith("bias"):
            p.data = p.data.to(dtype)
    model.setup_cache(1, 64)
    return model.eval()


TOKENS = torch.randint(3, 150, (1, 64), generator=torch.Generator().manual_seed(1))


def run(model, between=lambda: None):
    """-> logits [steps, V]: after a prompt, and token by token behind it; between: called before the third of these."""
    logits = [model(TOKENS[:, :N_PROMPT], torch.arange(N_PROMPT), 1, N_PROMPT)]
    for i in range(N_PROMPT, N_PROMPT + N_STEP):
        if i == N_PROMPT + 2:
            between()
        logits.append(model(TOKENS[:, i:i + 1], torch.tensor([i]), 1, i + 1))
    return torch.cat(logits, 1)[0].clone()


def distance(a, b):
    return float((a - b).abs().mean() / b.std())


def alike(a, b, dtype):
    return distance(a, b) < (1e-4 if dtype == torch.float32 else 0.05)


# ---- Edits --------------------------------------------------------------------------------------

EDITS = {}


# What operations run of this model, by a letter: its embedding, its output layer, each layer's attention and feed-forward.
EVERYTHING = {"embed", "head", *(f"{i}.{half}" for i in range(3) for half in ("attn", "ffn"))}


def fast(model):
    """Which of these they run now."""
    found = {name for name, method in dict(embed="embed_inputs", head="unembed").items()
             if isinstance(vars(model).get(method), (embed_unembed.EmbedInputs, embed_unembed.Unembed))}
    for i, layer in enumerate(model.layers):
        if isinstance(layer.forward, cpu_layers.OperationsLayer):
            found |= {f"{i}.{half}" for half, known in zip(("attn", "ffn"), layer.forward.supported) if known}
    return found


def edit(*plain, changes=WHEN, says=None, at=WHEN):
    """plain: what runs as it is read then, "all" or part of the names in EVERYTHING; changes: when it changes the logits; says: what
    the line names; at: when it is tried."""
    names = {name for name in EVERYTHING if any(part in name or part == "all" for part in plain)}

    def add(function):
        EDITS[function.__name__] = function, names, changes, says, at
        return function
    return add


@edit("attn", says="SDPA.forward")
def attention_of_a_window_and_sinks(model, patch):
    plain = SDPA.forward

    def forward(self, q, k, v, mask):
        near = torch.ones_like(mask).triu(mask.shape[-1] - mask.shape[-2] - 5)
        near[..., :2] = True
        return plain(self, q, k, v, mask & near)
    patch.setattr(SDPA, "forward", forward)


@edit("attn", says="KVCache.forward")
def rounded_keys_and_values(model, patch):
    plain = KVCache.forward

    def forward(self, slot, k, v, kv_len, batch_idx):
        return plain(self, slot, k / 4, -(v * 2).round() / 2, kv_len, batch_idx)
    patch.setattr(KVCache, "forward", forward)


@edit("attn", says="Attention.forward", changes=WHEN[:2])
def attention_of_prompts_only(model, patch):
    plain = Attention.forward
    patch.setattr(Attention, "forward", lambda self, x, *rest: plain(self, x, *rest) * (-2 if x.shape[1] >= 8 else 1))


@edit("all", says="model.visible")
def mask_with_sinks(model, patch):
    plain = core.visible

    def visible(pos, key, window=None):
        return plain(pos, key, window) | (key < 4)[..., None, :]
    patch.setattr(core, "visible", visible)


@edit("attn", says="model.rotate")
def rope_of_the_model(model, patch):
    patch.setattr(core, "rotate", lambda x, cos, sin: x)


@edit(changes=())
def rope_of_another_attention(model, patch):       # which this model does not have
    patch.setattr(gpt_faster.layers.attention, "rotate", lambda x, cos, sin: x)


@edit("attn", "ffn", says="model.F")
def functions_of_torch(model, patch):
    class F:
        silu = torch.nn.functional.silu

        @staticmethod
        def scaled_dot_product_attention(q, k, v, mask, **options):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options) * 2
    patch.setattr(core, "F", F)


@edit("ffn", says="torch.nn.functional.silu was replaced")
def a_function_where_torch_has_it(model, patch):
    patch.setattr(torch.nn.functional, "silu", lambda x: torch.relu(x) * 3)


@edit("attn", says="torch.nn.functional.scaled_dot_product_attention")
def the_attention_where_torch_has_it(model, patch):
    plain = torch.nn.functional.scaled_dot_product_attention
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, *rest, **more: plain(q * 3, *rest, **more))


@edit("attn", "ffn", says="Block.forward")
def method_of_a_class(model, patch):
    plain = Block.forward
    patch.setattr(Block, "forward", lambda self, x, *rest: plain(self, x * 1.5, *rest))


@edit("attn", "ffn", "head", says="Linear.forward", at=WHEN[:1])      # packed linears are no nn.Linear any more
def method_of_a_class_of_torch(model, patch):
    plain = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x * 1.5))


@edit("1.", says="layers.1.forward")
def method_of_a_layer(model, patch):
    layer = model.layers[1]
    layer.forward = lambda x, *rest: type(layer).forward(layer, x * 1.5, *rest)


@edit("1.attn", says="layers.1.attn.q_norm.forward")
def method_of_a_small_part(model, patch):
    model.layers[1].attn.q_norm.forward = lambda x: -x * 4


@edit("all", says="unembed")
def unembed(model, patch):
    model.unembed = lambda x: type(model).unembed(model, x) * 2


@edit("all", says="forward")                  # afterwards it calls parts that nobody guards: they run as they are read
def method_of_the_model(model, patch):
    model.forward = lambda *args: type(model).forward(model, *args) * 2


@edit("head", says="norm.forward")
def method_of_the_last_norm(model, patch):
    model.norm.forward = lambda x: x * 0.1


class Doubled(nn.Module):
    """Of a class that nobody knows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args) * 2


class DoubledBlock(Block):
    def forward(self, x, *rest):
        return super().forward(x, *rest) * 1.5


@edit("head", says="norm is a")
def another_last_norm(model, patch):
    model.norm = Doubled(model.norm)


@edit("1.", says="layers.1 is a")
def subclass(model, patch):
    model.layers[1].__class__ = DoubledBlock


@edit("1.attn", says="layers.1.attn.attend is a")
def another_attention(model, patch):
    model.layers[1].attn.attend = Doubled(model.layers[1].attn.attend)


@edit("0.ffn", says="layers.0.ffn is a")
def another_feed_forward(model, patch):
    model.layers[0].ffn = Doubled(model.layers[0].ffn)


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.a, self.b = (torch.linspace(-2, 2, 128).view(shape) for shape in ((64, 2), (2, 64)))

    def forward(self, x):
        return self.linear(x) + (x.float() @ self.a @ self.b).to(x.dtype)


@edit("2.attn", says="layers.2.attn.wo is a")
def lora(model, patch):
    model.layers[2].attn.wo = LoRA(model.layers[2].attn.wo)


@edit("1.", says="a hook on layers.1")
def steering_hook(model, patch):
    model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)


@edit("1.", says="a hook on layers.1")
def steering_pre_hook(model, patch):
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


@edit("2.attn", says="a hook on layers.2.attn_norm")
def hook_on_a_norm(model, patch):
    model.layers[2].attn_norm.register_forward_hook(lambda module, args, out: -out * 3)


@edit("all", says="a hook on all modules")
def hook_on_all_modules(model, patch):
    def hook(module, args, out):
        return out * 1.5 if isinstance(module, FeedForward) else None
    hooks = torch.nn.modules.module._global_forward_hooks
    patch.setattr(torch.nn.modules.module, "_global_forward_hooks", type(hooks)())
    torch.nn.modules.module.register_module_forward_hook(hook)


# Those that the operations follow.

def param(t):
    return nn.Parameter(t.clone(), requires_grad=False)


@edit()
def new_weight_of_a_norm(model, patch):
    norm = model.layers[1].attn_norm
    norm.weight = param(norm.weight.flip(0) * 2)
    gc.collect()


@edit()
def new_data_of_a_norm(model, patch):
    norm = model.layers[1].attn_norm
    norm.weight.data = norm.weight.flip(0) * 2
    gc.collect()


@edit()
def norm_edited_in_place(model, patch):
    model.layers[1].ffn_norm.weight.data.mul_(3)
    model.norm.weight[:20] = 0


@edit()
def biases_edited_in_place(model, patch):
    model.layers[1].attn.wqkv.bias.data.add_(1)
    model.head.bias.add_(torch.arange(160))


@edit()
def another_known_norm(model, patch):
    model.layers[1].attn_norm = LayerNorm(64, 1e-5).requires_grad_(False)
    model.layers[1].attn_norm.weight.mul_(-4)


@edit()
def numbers_of_parts(model, patch):
    model.layers[0].attn_norm.eps = 3.0
    model.layers[1].attn.attend.scale *= 4


@edit()
def another_known_attention(model, patch):
    model.layers[1].attn.attend = SDPA(1.0)


def random_linear(like, n_out, n_in):
    linear = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(2)) * 0.3)
    return linear.to(like.dtype)


@edit()
def another_linear(model, patch):
    model.layers[1].ffn.down = random_linear(model, 64, 96)


@edit()
def another_head(model, patch):
    model.head = random_linear(model, 160, 64)


@edit()
def another_known_feed_forward(model, patch):
    ffn = FeedForward(CFG, 96)
    ffn.gate_up, ffn.down = random_linear(model, 192, 64), random_linear(model, 64, 96)
    model.layers[1].ffn = ffn


@edit(changes=WHEN[2:])                # a prompt overwrites it
def another_cache(model, patch):
    cache = model.layers[0].attn.cache
    cache.k, cache.v = cache.k * 0.5, cache.v * 0.5
    gc.collect()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name, when", [(name, when) for name, (*_, at) in EDITS.items() for when in at])
def test_edits(name, when, dtype, capsys):
    change, slow, changes, says, _ = EDITS[name]
    plain = run(make(dtype))

    def logits_of(compiled):
        """In a world of its own: what is patched is undone."""
        model, undo = make(dtype), pytest.MonkeyPatch()

        def begin():
            if compiled:
                compile_model(model)
                assert fast(model) == (EVERYTHING - slow if when == "before" else EVERYTHING)
        try:
            if when == "before":
                change(model, undo)
                begin()
                return run(model), model
            begin()
            if when == "between":
                return run(model, lambda: change(model, undo)), model
            run(model)                             # its operations are made
            change(model, undo)
            return run(model), model
        finally:
            undo.undo()

    expected, _ = logits_of(compiled=False)
    assert "eager PyTorch" not in capsys.readouterr().err
    found, model = logits_of(compiled=True)
    if when in changes:                            # else the test could not fail
        assert distance(expected[3:], plain[3:]) > 0.1
    assert alike(found, expected, dtype), (distance(found, expected), distance(found, plain))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    is_guarded = change is not method_of_the_model or when == "before"
    assert fast(model) == EVERYTHING - slow if is_guarded else not guard_of(model)
    quiet = not slow or not is_guarded
    assert lines == [] if quiet else len(lines) == 1 and f"{says}" in lines[0] and "in eager PyTorch" in lines[0], lines


# ---- Hooks that look ----------------------------------------------------------------------------

PARTS = ("embed", "layers.0", "layers.1", "layers.2", "layers.1.attn", "layers.1.ffn", "layers.1.attn_norm", "layers.2.ffn_norm",
         "layers.1.attn.wqkv", "layers.1.attn.wo", "layers.1.ffn.down", "layers.0.attn.attend", "norm", "head")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("when", WHEN)
def test_captured_states(when, dtype, capsys):
    """What hooks see is what the model computes as it is read."""
    def captured(compiled):
        model, states = make(dtype), {name: [] for name in PARTS}

        def attach():
            for name in PARTS:
                model.get_submodule(name).register_forward_hook(lambda module, args, out, to=states[name]: to.append(out.clone()))
        if when == "before":
            attach()
        if compiled:
            compile_model(model)
        if when == "after":
            attach()
        return run(model, attach if when == "between" else lambda: None), states
    (logits, expected), (found, states) = captured(False), captured(True)
    assert alike(found, logits, dtype)
    for name in PARTS:
        assert len(states[name]) == len(expected[name]) == (N_STEP + 1 if when != "between" else N_STEP - 2)
        for a, b in zip(states[name], expected[name]):
            assert a.shape == b.shape and alike(a.float(), b.float(), dtype), name
    assert "a hook on embed (and 4 more); running the model in eager PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_any_part_is_called(name, capsys):
    model, calls = make(), []
    compile_model(model)
    expected = run(model)
    model.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert alike(run(model), expected, torch.float32) and len(calls) == N_STEP + 1
    assert f"a hook on {name}; " in capsys.readouterr().err


def test_hooks_between_two_steps_of_our_own_loop():
    """Where nobody else runs between two steps only hooks are looked for, and all at a prompt."""
    model, plain = make(), make()
    compile_model(model)
    assume_exclusive(model)
    run(model)
    model.layers[1].attn_norm.weight = param(model.layers[1].attn_norm.weight * 2)
    plain.layers[1].attn_norm.weight = param(plain.layers[1].attn_norm.weight * 2)
    assert alike(run(model), run(plain), torch.float32) and cpu_layers.uses_operations(model)
    calls = []
    run(model, lambda: model.layers[1].register_forward_hook(lambda *_: calls.append(1)))
    assert len(calls) == N_STEP - 2


def test_a_hook_that_is_removed():
    """At the next call all is fast again."""
    model = make()
    compile_model(model)
    expected = run(model)
    handle = model.layers[1].attn.register_forward_hook(larger)
    assert not alike(run(model), expected, torch.float32) and fast(model) == EVERYTHING - {"1.attn"}
    handle.remove()
    assert alike(run(model), expected, torch.float32) and fast(model) == EVERYTHING


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_captured_states_between_layers(dtype):
    """A hook keeps what it is given, without a copy, while the layers around it are operations."""
    kept = []
    for compiles in (False, True):
        model, seen = make(dtype), []
        if compiles:
            compile_model(model)
        model.layers[1].register_forward_hook(lambda module, args, out, seen=seen: seen.append((args[0], out)))
        run(model)
        kept.append(seen)
    for pair in zip(*kept):
        for theirs, ours in zip(*pair):
            assert ours.dtype == dtype and alike(ours.float(), theirs.float(), dtype)


def calls_another_layer(model, name):
    def hook(module, args, out):
        x = torch.full((1, 3, 64), 0.5, dtype=model.dtype)
        rope = model.embed_inputs(TOKENS[:, :3], torch.arange(3), 64)[1:]
        other = model.layers[2](x, *model.layer_inputs(rope)[2])
        return out + other[:, -1:, :1].to(out.dtype)
    model.get_submodule(name).register_forward_hook(hook)


def calls_the_model(model, name):
    inside = []

    def hook(module, args, out):
        if inside:
            return None
        inside.append(1)
        logits = model(TOKENS[:, 5:9], torch.arange(60, 64), 1, 64)
        inside.clear()
        return out + logits[:, :, :1].to(out.dtype)
    model.get_submodule(name).register_forward_hook(hook)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["layers.0", "layers.1", "layers.1.attn", "layers.0.ffn", "layers.1.attn.wo"])
@pytest.mark.parametrize("calls", [calls_another_layer, calls_the_model])
def test_hooks_that_call_the_model(calls, name, dtype):
    """In the middle of a call of it, whose memory they must not write."""
    results = []
    for compiles in (False, True):
        model = make(dtype)
        if compiles:
            compile_model(model)
        calls(model, name)
        results.append(run(model))
    assert alike(results[1], results[0], dtype) and not alike(results[0], run(make(dtype)), dtype)


def test_a_hook_elsewhere_changes_nothing():
    model, other = make(), nn.Linear(2, 2)
    compile_model(model)
    guard = model.forward
    run(model, lambda: other.register_forward_hook(lambda *_: None))
    assert model.forward is guard


# ---- Weights, copies, parts that are called alone -----------------------------------------------

def test_a_weight_edited_in_place():
    """Before: it counts. After: it is not there under its name, and the error says what to do."""
    model, plain = make(), make()
    for m in (model, plain):
        m.layers[1].ffn.down.weight[3].zero_()
    compile_model(model)
    assert alike(run(model), run(plain), torch.float32) and not alike(run(plain), run(make()), torch.float32)
    down, tied = model.layers[1].ffn.down, make(cfg=replace(CFG, tied=True))
    compile_model(tied)
    for edit_it in (lambda: down.weight[3].zero_(), lambda: setattr(down, "weight", param(torch.zeros(64, 96))),
                    lambda: model.head.weight, lambda: tied.embed.weight,
                    lambda: model.load_state_dict(plain.state_dict(), strict=False)):
        with pytest.raises(AttributeError, match="packed: edit .weight before it is compiled") as error:
            edit_it()
        assert "\n" not in str(error.value)
    assert torch.equal(down.dequantized(), plain.layers[1].ffn.down.weight)


PACKED = [nn.Linear, core.ExpertLinear, nn.Embedding]


@pytest.mark.parametrize("kind", PACKED)
def test_a_method_whose_weights_are_packed(kind, monkeypatch):
    """Exchanged later it cannot count: an error at the next call."""
    model = make(cfg=replace(MIXTURE, tied=True))
    compile_model(model)
    expected = run(model)
    with monkeypatch.context() as patched:
        plain = kind.forward
        patched.setattr(kind, "forward", lambda self, *args: plain(self, *args) * 2)
        with pytest.raises(RuntimeError, match=rf"{kind.__qualname__}.forward .* after its weights were packed") as error:
            run(model)
        assert "\n" not in str(error.value)
    assert alike(run(model), expected, torch.float32)


MIXTURE = replace(CFG, sparse=(True,), mlp_bias=True, moe=MoEConfig(4, 4, 32))     # all are active: rounding chooses none


def own_activation(moe):
    moe.activation = lambda gate, up: torch.relu(gate) * up * 4


def larger(module, args, y):
    return y * 1.5


def hook_on_gate(moe):
    moe.gate.register_forward_hook(larger)


def hook_on_down(moe):
    moe.down.register_forward_hook(larger)


def hook_before_down(moe):
    moe.down.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


def own_experts(moe):
    moe.experts = lambda x, ids, ends: x * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("edit_it", [own_activation, hook_on_gate, hook_on_down, hook_before_down, own_experts])
def test_edits_of_a_mixture(edit_it, when, dtype, capsys):
    """A mixture that falls back calls its own experts: the operations that stood in their place know no edit."""
    def mixture():
        model = make(dtype, MIXTURE)
        for layer in model.layers:
            for linear in (layer.ffn.gate, layer.ffn.up, layer.ffn.down):
                linear.weight.data = linear.weight.data.to(dtype)
        return model

    plain, model, untouched = mixture(), mixture(), mixture()
    edits = [lambda m=m: edit_it(m.layers[1].ffn) for m in (plain, model)]
    if when == "before":
        edits[1]()
    compile_model(model)
    assert when == "before" or "eager PyTorch" not in capsys.readouterr().err
    if when == "after":
        edits[1]()
    if when == "between":
        found, expected = run(model, edits[1]), run(plain, edits[0])
    else:
        edits[0]()
        found, expected = run(model), run(plain)
    assert alike(found, expected, dtype) and not alike(run(untouched), expected, dtype)
    assert "in eager PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_deepcopy(dtype, capsys):
    """A copy runs as it is read until it is compiled, and neither sees the other's edits."""
    model = make(dtype)
    compile_model(model)
    expected = run(model)
    for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        assert not cpu_layers.uses_operations(other) and alike(run(other), expected, dtype)
        other.layers[1].attn_norm.weight.mul_(2)
        edited = run(other)
        assert distance(edited, expected) > 0.1
        compile_model(other)
        assert cpu_layers.uses_operations(other) and alike(run(other), edited, dtype)
    assert torch.equal(run(model), expected) and cpu_layers.uses_operations(model)
    layer = copy.deepcopy(model.layers[1])
    assert not isinstance(layer.forward, cpu_layers.OperationsLayer)


def test_parts_that_are_called_alone():
    """A layer, the embedding and the head, by whoever drives them himself."""
    model, plain = make(), make()
    compile_model(model)
    results = []
    for m in (model, plain):
        run(m)
        x, *shared = m.embed_inputs(TOKENS[:, :5], torch.arange(5), 5)
        inputs = m.layer_inputs(shared)
        x = m.layers[1](m.layers[0](x, *inputs[0]), *inputs[1])
        results.append(m.unembed(x))
    assert alike(*results, torch.float32)


def test_a_batch_of_another_shape_is_an_error():
    model = make()
    compile_model(model)
    for pos in (torch.arange(4), torch.arange(6)[None]):
        with pytest.raises((ValueError, RuntimeError)):
            model(TOKENS[:, :5], pos, 1, 8)
    of_int32 = model(TOKENS[:, :5].int(), torch.arange(5), 1, 8)
    assert alike(of_int32, model(TOKENS[:, :5], torch.arange(5), 1, 8), torch.float32)


# ---- Layers with a state ------------------------------------------------------------------------

STATES = {"delta": GatedDelta(2, 4, 32, 64), "mamba": Mamba2(4, 32, 2, 32), "short_conv": ShortConv(64, 3)}


@pytest.mark.parametrize("kind", STATES)
def test_positions_with_a_gap(kind):
    """A layer with a state would go on from one that it has not: nothing is written, and an error."""
    cfg = ModelConfig(dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96, vocab_size=160, context=128,
                      mixer=(STATES[kind], None))
    model = make(cfg=cfg)
    compile_model(model)
    assert all(layer.forward.supported[0] for layer in model.layers)
    states = [t.clone() for t in model.layers[0].attn.cache.buffers()]
    for pos in ([0, 1, 2, 40], [0, 1, 1, 2], [3, 2, 1, 0], [0, 1, 0, 1], [-1, 0, 1, 2]):
        with pytest.raises(IndexError, match="a gap in the positions"):
            model(TOKENS[:, :4], torch.tensor(pos), 1, 64)
        assert all(map(torch.equal, states, model.layers[0].attn.cache.buffers()))
    for row in (1, -1):
        with pytest.raises(IndexError, match="a row beyond the cache"):
            model(TOKENS[:, :4], torch.arange(4)[None], 1, 64, torch.tensor([row]))
    assert model(TOKENS[:, :4], torch.tensor([0, 1, 2, 2]), 1, 64).isfinite().all()      # padding


@pytest.mark.parametrize("kind", STATES)
def test_taps_edited_in_place(kind):
    cfg = ModelConfig(dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96, vocab_size=160, context=128,
                      mixer=(STATES[kind], None))
    model, plain = make(cfg=cfg), make(cfg=cfg)
    compile_model(model)
    run(model)
    for m in (model, plain):
        taps = m.layers[0].attn.taps if kind == "short_conv" else m.layers[0].attn.conv
        taps.data.mul_(-3)
    assert alike(run(model), run(plain), torch.float32) and cpu_layers.uses_operations(model)
    assert not alike(run(plain), run(make(cfg=cfg)), torch.float32)


# ---- Memory -------------------------------------------------------------------------------------

def test_operations_keep_what_they_point_to():
    """Whatever becomes of the tensor, its numbers are where the struct says."""
    weight = torch.full((1 << 16,), 7.0)
    norm = native.Norm(kind=1, eps=0.0, weight=weight)
    held = param(torch.full((1 << 16,), 7.0))
    op = native.AddNorm(kind=native.ADD_NORM, M=1, D=1 << 16, factor=1.0, norm=norm, x=held)
    del weight, norm
    held.data = torch.zeros(2)
    gc.collect()
    others = [torch.full((1 << 16,), -1.0) for _ in range(64)]
    out, residual = torch.empty(1 << 16), torch.zeros(1 << 16)
    op.set("out", out)
    op.set("residual", residual)
    native.run([ctypes.addressof(op)])
    assert torch.allclose(out, torch.full_like(out, 7.0)) and len(others) == 64


def test_what_an_operation_cannot_read_is_an_error():
    for wrong in (torch.zeros(8, dtype=torch.float16), torch.zeros(8, 2)[:, 0], torch.zeros(8, device="meta")):
        with pytest.raises(TypeError):
            native.Norm(weight=wrong)
    with pytest.raises(TypeError, match="int64"):
        native.Positions(slot=torch.zeros(3, dtype=torch.int32))


def test_structs_that_lie_elsewhere(monkeypatch, capsys):
    """A library of other code: uncompiled, with a line."""
    names = native.Norm._fields_

    class Norm(native.Struct):
        _fields_ = [*names[:2], ("more", native.c_int64), *names[2:]]
    native.library()
    for cached in (native.library, native.is_available):
        cached.cache_clear()
    monkeypatch.setattr(native, "STRUCTS", (Norm, *native.STRUCTS[1:]))
    model = make()
    assert not cpu_layers.use_operations(model) and "Norm has another layout" in capsys.readouterr().err
    for cached in (native.library, native.is_available):
        cached.cache_clear()


NO_MEMORY = """
import ctypes, resource, torch
from gpt_faster.kernels.cpu import native
native.library()
torch.zeros(4) @ torch.zeros(4)
x = torch.zeros(2, 32)
weights = native.pack_weight(torch.ones(32, 32))
limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
op = native.linear(*weights, (32, 32), x=x, out=x.clone(), x_bits=32)
op.M = 1 << 26
try:
    native.run([ctypes.addressof(op)])
except MemoryError as e:
    op.M = 2
    native.run([ctypes.addressof(op)])
    print("MemoryError:", e)
"""


def python(code, cwd=ROOT, **more):
    env = dict(os.environ, PYTHONPATH=str(cwd), OMP_NUM_THREADS="1", **more)
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)


def test_no_memory_is_an_error():
    done = python(NO_MEMORY)
    assert done.returncode == 0 and done.stdout.startswith("MemoryError:"), done.stderr


# ---- Edited files -------------------------------------------------------------------------------

EDITED = """
import sys, torch
sys.path.insert(0, "tests")
import test_what_is_read_runs as t
from gpt_faster.kernels.cpu import layers as cpu_layers
torch.set_grad_enabled(False)
model, plain = t.make(), t.make()
t.compile_model(model)
print(t.alike(t.run(model), t.run(plain), torch.float32), cpu_layers.uses_operations(model), t.run(plain).sum().item())
"""


@pytest.fixture
def copied(tmp_path):
    """-> a function: the repository's Python with (file, old, new) in it, and what a compiled model does there."""
    for path in files_of_ours():
        to = tmp_path / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())

    def result(*edits):
        before = {}
        for file, old, new in edits:
            path = tmp_path / file
            before[path] = path.read_text()
            assert old in before[path], old
            path.write_text(before[path].replace(old, new))
        done = python(EDITED, tmp_path, PYTHONDONTWRITEBYTECODE="1")
        for path, text in before.items():
            path.write_text(text)
        assert done.returncode == 0, done.stderr
        return *done.stdout.split(), [line for line in done.stderr.splitlines() if line.startswith("note:")]
    return result


@pytest.mark.slow
def test_edited_files(copied):
    """An edit of the core counts; one of its comments, its layout or of code that a model does not reach does not."""
    shape = "        shape = q.shape\n"
    same, compiled, plain, lines = copied(
        ("model.py", shape, "        # a comment\n\n" + shape), ("model.py", "return self.down(self.activation(", "return self.down(\n  self.activation("),
        ("gpt_faster/layers/moe.py", "self.n_group, self.topk_group = moe.n_group", "self.n_group, self.topk_group = 1 * moe.n_group"))
    assert (same, compiled, lines) == ("True", "True", [])
    for change, name in ((("model.py", shape, "        q = q * 2\n" + shape), "model.SDPA was edited or is new; running attention of 3"),
                         (("model.py", "    return F.silu(gate) * up", "    return F.silu(gate) * up * 2"),
                          "model.swiglu was edited or is new; running feed-forward of 3")):
        same, compiled, found, lines = copied(change)
        assert (same, compiled, len(lines)) == ("True", "True", 1) and name in lines[0] and found != plain, lines


def test_known_sources_are_those_of_this_code():
    """Where the core was edited: python scripts/known_sources.py --write."""
    assert known_sources.changed_names() == []
    assert json.loads(modifications.KNOWN_SOURCES_FILE.read_text()).keys() == {"names", "sources"}


# ---- A GPU's steps, traced here -----------------------------------------------------------------

def one_step(model, token, pos, kv_len):
    return model(token, pos, 1, kv_len)


def trace_as_a_gpus(monkeypatch):
    """Steps are traced as for a GPU, with its modules, and run by PyTorch's own operators and the kernels' references."""
    original = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda step, mode=None, **more: original(step, backend="aot_eager", **more))
    monkeypatch.setattr(compile_room, "has_kernels", lambda device: True)


@pytest.fixture
def traced(monkeypatch):
    """-> a function: a model with a GPU's modules, one as it is read, and a compiled step, whose calls it counts."""
    trace_as_a_gpus(monkeypatch)

    def make_both(cfg):
        model, plain = make(cfg=cfg), make(cfg=cfg)
        compile_room.prepare_for_cuda(model)
        step = WhileUnmodified(compiled(one_step), one_step)
        traced_step, calls = step.compiled, []
        step.compiled = lambda *args: calls.append(1) or traced_step(*args)

        def both(change=lambda model: None):
            logits = []
            for m, run_step in ((model, step), (plain, one_step)):
                change(m)
                m(TOKENS[:, :20], torch.arange(20), 1, 20)
                logits.append(torch.cat([run_step(m, TOKENS[:, i:i + 1], torch.tensor([i]), 32) for i in (20, 21)]))
            assert alike(*logits, torch.float32), distance(*logits)
            return len(calls)
        return model, both
    yield make_both
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_gpus_step_follows_what_is_known_and_stops_at_what_is_not(traced, capsys):
    """The operators' references run here, as in test_gpu.py."""
    moe = replace(CFG, sparse=(False, True), moe=MoEConfig(4, 2, 32))
    model, both = traced(moe)
    assert type(model.layers[0]).__name__ == "FusedLayer" and both() == 2

    def scale(m):
        m.layers[1].attn.attend.scale *= 3

    def weight(m):
        m.layers[0].attn_norm.weight = param(m.layers[0].attn_norm.weight * 2)

    def experts(m):
        m.layers[1].ffn.gate.weight = param(m.layers[1].ffn.gate.weight * 3)

    def norm(m):
        m.layers[0].attn_norm = LayerNorm(64, 1e-5).requires_grad_(False)
    for i, change in enumerate((scale, weight, experts, norm)):
        assert both(change) == 4 + 2 * i           # compiled again
    assert both(lambda m: m.layers[2].register_forward_hook(lambda module, args, out: out * 2)) == 10
    assert "a hook on layers.2; running the model in eager PyTorch" in capsys.readouterr().err


def test_a_gpus_step_of_what_is_not_known_is_pytorchs(traced, monkeypatch, capsys):
    def visible(pos, key, window=None):
        return plain(pos, key, window) | (key < 4)[..., None, :]
    plain = core.visible
    monkeypatch.setattr(core, "visible", visible)
    model, both = traced(CFG)
    assert type(model.layers[0]) is Block and both() == 0
    assert "model.visible was replaced; running the model by torch.compile without our kernels" in capsys.readouterr().err


def test_a_kernels_filters_stand_for_those_of_sampling_only(monkeypatch):
    """A draw in one kernel, and top-p without a sort: where sampling.py's functions are the ones that they were made of."""
    rows = [SamplingParams(0.8, 0, 0.9, 0.05)]
    assert DeviceSampler(rows, 160).uses_draw_kernel
    with monkeypatch.context() as patched:
        patched.setitem(sampling.FILTERS, "min_p", lambda probs, min_p: probs >= min_p)
        assert not DeviceSampler(rows, 160).uses_draw_kernel
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "distribution", lambda self, logits, rows, shortlist=None: (logits.softmax(-1), None))
        assert not DeviceSampler(rows, 160).uses_draw_kernel
    with monkeypatch.context() as patched:
        patched.setattr(sampling, "draw", lambda probs, ids, noise: probs.argmax(-1, keepdim=True))
        assert not DeviceSampler(rows, 160).uses_draw_kernel
    assert DeviceSampler(rows, 160).uses_draw_kernel


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("edit", [
    (Sampler, "distribution", lambda self, logits, rows=slice(None), shortlist=None: (logits.softmax(-1).roll(1, -1), None)),
    (Sampler, "processed", lambda self, logits, rows=slice(None), draft_tokens=None: -logits),
    (Sampler, "noise", lambda self, rows, pos, ids=None, draft=False: torch.ones(())),
    (Sampler, "sample", lambda self, logits, rows, pos: logits.argmin(-1, keepdim=True)),
    (sampling, "draw", lambda probs, ids, noise: probs.argmin(-1, keepdim=True)),
    (sampling, "keep_likeliest", lambda probs, weight, limit: probs == probs.amin(-1, keepdim=True)),
    (sampling, "renormalized", lambda probs, stays, is_off: probs * ~stays),
    (sampling, "uniform", lambda seed, counter: torch.zeros_like(counter, dtype=torch.float32)),
], ids=lambda edit: edit[1])
def test_a_cpus_sampler_is_what_sampling_is(edit, when, monkeypatch):
    """Rows of each kind, drawn by the edited core and by what stands for it, made before the edit or after."""
    rows = [SamplingParams(0.8, 20, 0.9, seed=1), SamplingParams(1.0, 0, 0.8, seed=2), SamplingParams(seed=3), SamplingParams(0, seed=4)]
    torch.manual_seed(0)
    logits = torch.randn(4, 160)

    def drawn(sampler):
        return torch.cat([sampler.sample(logits, slice(None), torch.tensor([pos])) for pos in range(8)], 1)
    made = [kind(rows, 160) for kind in (Sampler, ShortlistSampler)]
    plain = drawn(made[0])
    assert torch.equal(drawn(made[1]), plain)
    monkeypatch.setattr(*edit)
    if when == "after":
        made = [kind(rows, 160) for kind in (Sampler, ShortlistSampler)]
    edited, got = map(drawn, made)
    assert torch.equal(got, edited) and not torch.equal(edited, plain)


def test_digests_are_renewed_where_the_kernels_tests_pass(tmp_path, monkeypatch):
    file, status, seen = tmp_path / "known.json", [1], []
    file.write_text('{"names": {}, "sources": {"model.SDPA": "of other code"}}')

    def tests(command, **more):
        seen.append(json.loads(file.read_text())["sources"].get("model.SDPA"))
        return subprocess.CompletedProcess(command, status[0])
    monkeypatch.setattr(modifications, "KNOWN_SOURCES_FILE", file)
    monkeypatch.setattr(known_sources.subprocess, "run", tests)
    modifications.known_sources.cache_clear()
    assert "model.SDPA" in known_sources.changed_names() and known_sources.write() == 1
    assert "of other code" in file.read_text() and seen[0] not in (None, "of other code"), "tested with the new ones, kept none"
    status[0] = 0
    assert known_sources.write() == 0 and json.loads(file.read_text())["sources"]["model.SDPA"] == seen[0]
    modifications.known_sources.cache_clear()


def test_items_of_dicts_are_compared_too():
    """Of every dict in which core code looks things up: one that changes in place stays the same object."""
    modules = [module for name, module in sys.modules.items() if modifications.package_of(name) == "gpt_faster.layers"]
    lookups = modifications.core_code([*modules, core, sampling]).lookups
    dicts = [value for scope, name, value in lookups if type(value) is dict and modifications.package_of(scope.get("__name__")) != "torch"]
    assert any(found is gpt_faster.layers.quantized_cache.ENCODERS for found in dicts)
    for found in dicts:
        assert {name for scope, name, _ in lookups if scope is found} == set(found), found
