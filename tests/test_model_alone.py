"""model.py alone: copied into an empty folder, where nothing else of ours can be imported, it is a Llama, Mistral, Mixtral or Qwen."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import tp
from gpt_faster.formats.schema import check_config
from gpt_faster.kernels.compile import compile_model
from gpt_faster.kernels.cuda import fused_layer
from gpt_faster.layers.part import Part
from model import Attention, ModelConfig, Transformer

TESTS = Path(__file__).parent
ROOT = TESTS.parent

ALONE = """
import importlib.abc, math, sys
OURS, TESTS = {ours!r}, {tests!r}

class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in OURS:
            raise ImportError(name + " is a room of ours")

sys.meta_path.insert(0, Alone())
import torch
from model import ModelConfig, MoEConfig, Rope, Transformer
del sys.meta_path[0]                               # transformers looks for a package that is called kernels, too
sys.path.append(TESTS)                             # where the models of transformers are made
import tiny

def config(c):
    said = c.rope_parameters
    theta, kind, factor = said["rope_theta"], said["rope_type"], said.get("factor", 1.0)
    original = said.get("original_max_position_embeddings", 8192)
    if kind == "yarn":
        rope = Rope(theta, kind, factor, 1, 32, original, amplitude=1 + 0.1 * math.log(factor))
    else:
        rope = Rope(theta, kind, factor, said.get("low_freq_factor", 1), said.get("high_freq_factor", 4), original)
    n_expert = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    step = getattr(c, "decoder_sparse_step", 1)
    kind = c.model_type
    moe = n_expert and MoEConfig(n_expert, c.num_experts_per_tok, getattr(c, "moe_intermediate_size", c.intermediate_size))
    return ModelConfig(
        c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
        getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, c.intermediate_size, c.vocab_size,
        c.max_position_embeddings, c.rms_norm_eps, qk_norm=kind.startswith("qwen3"), tied=c.tie_word_embeddings,
        qkv_bias=kind == "qwen2", rope=(rope,), window=(c.sliding_window if kind == "mistral" else None,),
        sparse=tuple(bool(n_expert) and (i + 1) % step == 0 for i in range(c.num_hidden_layers)), moe=moe)

def weights(model, theirs):
    theirs = {{name.removeprefix("model."): p for name, p in theirs.state_dict().items()}}
    def fill(ours, *names):
        ours.data.copy_(torch.cat([theirs[name] for name in names]))
    fill(model.embed.weight, "embed_tokens.weight")
    fill(model.norm.weight, "norm.weight")
    fill(model.head.weight, "lm_head.weight")
    for i, layer in enumerate(model.layers):
        x = f"layers.{{i}}."
        for leaf in ("weight", "bias") if layer.attn.wqkv.bias is not None else ("weight",):
            fill(getattr(layer.attn.wqkv, leaf), *(f"{{x}}self_attn.{{q}}_proj.{{leaf}}" for q in "qkv"))
        fill(layer.attn.wo.weight, x + "self_attn.o_proj.weight")
        fill(layer.attn_norm.weight, x + "input_layernorm.weight")
        fill(layer.ffn_norm.weight, x + "post_attention_layernorm.weight")
        if model.cfg.qk_norm:
            fill(layer.attn.q_norm.weight, x + "self_attn.q_norm.weight")
            fill(layer.attn.k_norm.weight, x + "self_attn.k_norm.weight")
        if hasattr(layer.ffn, "router"):
            gate, up = theirs[x + "mlp.experts.gate_up_proj"].chunk(2, 1)
            layer.ffn.gate.weight.data.copy_(gate)
            layer.ffn.up.weight.data.copy_(up)
            fill(layer.ffn.down.weight, x + "mlp.experts.down_proj")
            fill(layer.ffn.router.weight, x + "mlp.gate.weight")
        else:
            fill(layer.ffn.gate_up.weight, x + "mlp.gate_proj.weight", x + "mlp.up_proj.weight")
            fill(layer.ffn.down.weight, x + "mlp.down_proj.weight")

for name in {names!r}:
    theirs = tiny.make(name)
    model = Transformer(config(theirs.config)).eval()
    weights(model, theirs)
    tokens = torch.randint(3, 150, (1, 12), generator=torch.Generator().manual_seed(1))
    model.setup_cache(1, 64, longest_call=12)
    with torch.no_grad():
        logits, found = model(tokens, torch.arange(12)), []
        for i in range(32):
            found.append(logits)
            tokens = torch.cat((tokens, logits.argmax(-1)), 1)
            logits = model(tokens[:, -1:], torch.tensor([12 + i]))
        expected = theirs(input_ids=tokens).logits[:, 11:-1]
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    assert expected.argmax(-1).tolist() == tokens[:, 12:].tolist()
    assert len(model.rings) == (name == "mistral-window")
    print(name)
"""
KINDS = ("llama2", "llama3", "mistral-window", "mixtral", "qwen2", "qwen2-yarn", "qwen3", "qwen3_moe")


@pytest.mark.slow
def test_it_is_a_llama_without_anything_else_of_ours(tmp_path):
    shutil.copy(ROOT / "model.py", tmp_path)
    ours = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/*.py")}
    script = ALONE.format(ours=sorted(ours - {"model", "tests"}), tests=str(TESTS), names=KINDS)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(KINDS)


@dataclass(frozen=True)
class Doubled(Part):
    """What a fork writes for an attention of its own."""

    gain: float = 2.0

    def make(self, cfg, earlier=()):
        return DoubledAttention(cfg, self.gain)


class DoubledAttention(Attention):
    def __init__(self, cfg, gain):
        super().__init__(cfg)
        self.gain = gain

    def forward(self, *args):
        return super().forward(*args) * self.gain


@pytest.mark.kernels
def test_a_part_of_a_forks_own(capsys):
    """The config names it: it is made, checked, shared by ranks, and no kernel stands in its place."""
    cfg = ModelConfig(64, 3, 4, 2, 16, 96, 160, 128, mixer=(None, Doubled()))
    check_config(cfg)
    torch.manual_seed(0)
    model = Transformer(cfg).eval().requires_grad_(False)
    model.embed.weight.normal_()                           # else it is whatever was in memory
    assert [type(layer.attn) for layer in model.layers] == [Attention, DoubledAttention, Attention]
    tokens, pos = torch.arange(9)[None], torch.arange(9)
    plain = model(tokens, pos, 9)
    model.layers[1].attn.gain = 1.0
    assert not torch.allclose(model(tokens, pos, 9), plain)
    model.layers[1].attn.gain = 2.0
    for other in (cfg, replace(cfg, mixer=(None,), attention=Doubled())):
        assert tp.shard_config(other, 2).n_head == 2 and tp.split_of(other) == tp.SPLIT
        assert not fused_layer.supports_config(other)
    compile_model(model)
    torch.testing.assert_close(model(tokens, pos, 9), plain, rtol=1e-4, atol=1e-4)
    assert [layer.forward.supported[:2] for layer in model.layers] == [(True, True), (False, True), (True, True)]
    assert "layers.1.attn is a" in capsys.readouterr().err
