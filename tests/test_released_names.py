"""Checkpoints as publishers name tensors and config keys, where transformers' own writing differs from it."""

import json

import pytest
import tiny
from safetensors.torch import load_file, save_file
from test_families import close, our_logits, tokens

from gpt_faster.formats.load import read_checkpoint


def released(families, name, path, rename, **config):
    """A copy of a tiny checkpoint with other names of tensors and other config keys (None: without the key)."""
    directory, model = families(name)
    path.mkdir()
    save_file({k: t.clone() for k, t in rename(load_file(directory / "model.safetensors"))}, path / "model.safetensors")
    config = {**json.loads((directory / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return path, tiny.logits(model, tokens())


def replaced(*pairs):
    def rename(disk):
        for name, t in disk.items():
            for old, new in pairs:
                name = name.replace(old, new)
            yield name, t
    return rename


def test_exaone(families, tmp_path):
    path, expected = released(families, "exaone", tmp_path / "exaone", replaced(
        ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"), ("model.layers", "transformer.h"),
        ("self_attn.o_proj", "attn.attention.out_proj"), ("self_attn", "attn.attention"), ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"), ("mlp.gate_proj", "mlp.c_fc_0"), ("mlp.up_proj", "mlp.c_fc_1"), ("mlp.down_proj", "mlp.c_proj")),
        num_hidden_layers=None, num_layers=4, rms_norm_eps=None, layer_norm_epsilon=1e-5, hidden_act=None, activation_function="silu",
        rope_parameters=None, rope_theta=5e5, rope_scaling={k: v for k, v in tiny.LLAMA3.items() if k != "rope_theta"})
    close(our_logits(path, tokens()), expected)


def test_sarvam_moe(families, tmp_path):
    """Queries, keys and values are one matrix, and each expert has its own."""
    import torch

    def rename(disk):
        for name, t in disk.items():
            if "k_proj" in name or "v_proj" in name:
                continue
            if "q_proj" in name:
                t = torch.cat([disk[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
            yield from tiny.experts_apart(name, t)
    rename_all = replaced(
        ("embed_tokens", "word_embeddings"), ("self_attn.o_proj", "attention.dense"), ("self_attn.q_proj", "attention.query_key_value"),
        ("self_attn.q_norm", "attention.query_layernorm"), ("self_attn.k_norm", "attention.key_layernorm"),
        ("gate.e_score_correction_bias", "gate.expert_bias"))
    path, expected = released(families, "sarvam_moe", tmp_path / "sarvam", lambda disk: rename_all(dict(rename(disk))),
                              n_routed_experts=None, num_experts=8, n_shared_experts=None, num_shared_experts=1, attention_bias=None, use_qkv_bias=False)
    close(our_logits(path, tokens()), expected)


def test_sarvam_mla(families, tmp_path):
    """YaRN by another name, and a head_dim of vLLM's."""
    rope = {k: v for k, v in tiny.YARN.items() if k not in ("rope_type", "rope_theta")}
    path, expected = released(
        families, "sarvam_mla", tmp_path / "sarvam", replaced(), head_dim=104, rope_parameters=None, rope_theta=1e4, q_head_dim=40,
        rope_scaling=dict(rope, type="deepseek_yarn", mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1), num_experts=8, n_routed_experts=None)
    close(our_logits(path, tokens()), expected)


def test_kolibri(families, tmp_path):
    path, expected = released(families, "kolibri1", tmp_path / "kolibri", replaced(
        ("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"), ("post_self_attn_layernorm", "post_attn_norm"),
        ("post_mlp_layernorm", "post_ffn_norm")))
    close(our_logits(path, tokens()), expected)


def test_mimo(families, tmp_path):
    """Patterns of numbers instead of names, windows without the query itself, and two thetas."""
    path, expected = released(
        families, "mimo_v2_flash", tmp_path / "mimo", replaced(("self_attn.sinks", "self_attn.attention_sink_bias")),
        layer_types=None, mlp_layer_types=None, hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1], sliding_window=7,
        sliding_window_size=7, rope_parameters=None, rope_theta=5000000, swa_rope_theta=10000, partial_rotary_factor=0.334,
        rms_norm_eps=None, layernorm_epsilon=1e-5, routed_scaling_factor=None, swa_num_key_value_heads=2, swa_head_dim=24, swa_v_head_dim=16)
    close(our_logits(path, tokens()), expected)


def test_laguna(families, tmp_path):
    path, expected = released(families, "laguna", tmp_path / "laguna", replaced(
        ("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"), ("mlp.shared_experts.", "mlp.shared_expert.")),
        gating="per-head")
    close(our_logits(path, tokens()), expected)


@pytest.mark.parametrize("as_saved", [False, True])
def test_olmo_hybrid(families, tmp_path, as_saved):
    """Convolutions apart, of each width, as released; as transformers saves them, three equal parts of one."""
    import torch

    def rename(disk):
        for name, t in disk.items():
            if "conv1d" not in name or as_saved:
                attends = ".1." in name or ".3." in name
                yield name.replace("feedforward_layer_norm", "post_attention_layernorm") if attends else name, t
            elif "q_conv1d" in name:
                names = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
                whole = torch.cat([disk[one] for one in names])
                yield from zip(names, whole.split([64, 64, 96]))
    path, expected = released(families, "olmo_hybrid", tmp_path / "olmo", rename)
    shapes = [t.shape[0] for name, t in load_file(path / "model.safetensors").items() if "0.linear_attn.q_conv1d" in name]
    assert shapes == [75 if as_saved else 64]
    close(our_logits(path, tokens()), expected)


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_omni_models(families, tmp_path, kind):
    """The part that writes text is one of three, with its own config."""
    import torch

    def rename(disk):
        for name, t in disk.items():
            for apart, one in tiny.experts_apart(name, t):
                yield f"thinker.{apart.replace('model.language_model', 'model')}", one
        yield "talker.model.layers.0.mlp.gate_proj.weight", torch.ones(8, 8)
        yield "token2wav.code2wav_bigvgan_model.conv_pre.bias", torch.ones(8)
    thinker = json.loads((families(f"{kind}_thinker")[0] / "config.json").read_text())
    path, expected = released(families, f"{kind}_thinker", tmp_path / "omni", rename)
    (path / "config.json").write_text(json.dumps(dict(model_type=kind, thinker_config=thinker, talker_config={})))
    close(our_logits(path, tokens()), expected)


@pytest.mark.parametrize("name, changes, message", [
    ("cohere2_moe", dict(expert_selection_fn="relu"), "'expert_selection_fn' is 'relu', expected softmax or sigmoid"),
    ("cohere2_moe", dict(shared_expert_combination_strategy="max"), "'shared_expert_combination_strategy' is 'max'"),
    ("cohere2_moe", dict(mlp_layer_types=["dense"]), "'mlp_layer_types' has 1 entries"),
    ("mimo_v2_flash", dict(v_head_dim=48), "'v_head_dim' is 48, expected 1 to 'head_dim', 24"),
    ("mimo_v2_flash", dict(mlp_layer_types=None, moe_layer_freq=[1]), "'moe_layer_freq' has 1 entries"),
    ("mimo_v2_flash", dict(layer_types=["full_attention"]), "'layer_types' is not 4 times"),
    ("mimo_v2_flash", dict(swa_num_key_value_heads=4), "'swa_num_key_value_heads' is 4, only 2"),
    ("laguna", dict(gating=False), "'gating' is False, expected true, per-head or per-element"),
    ("laguna", dict(num_attention_heads_per_layer=[4, 4]), "'num_attention_heads_per_layer' has 2 entries"),
    ("laguna", dict(num_attention_heads_per_layer=[4, 5, 4, 4]), "5 attention heads cannot share 2 key/value heads"),
    ("laguna", dict(moe_apply_router_weight_on_input=True), "'moe_apply_router_weight_on_input' is not supported"),
])
def test_what_is_not_supported_is_named(families, tmp_path, name, changes, message):
    path, _ = released(families, name, tmp_path / "model", replaced(), **changes)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


def test_values_narrower_than_keys_read_in_parts(families):
    """Padded rows and columns, whichever rows are asked for."""
    source = read_checkpoint(families("mimo_v2_flash")[0])
    for i, n_kv_head in ((0, 1), (1, 2)):
        for name, axis in ((f"layers.{i}.attn.wv.weight", 0), (f"layers.{i}.attn.wv.bias", 0), (f"layers.{i}.attn.wo.weight", 1)):
            t = source.tensors[name]
            whole = t.whole()
            heads = whole.unflatten(axis, (-1, 24))
            assert not heads.narrow(axis + 1, 16, 8).any() and heads.narrow(axis + 1, 0, 16).any()
            assert heads.shape[axis] == (4 if axis else n_kv_head)
            parts = [t.read_rows(a, a + 1) for a in range(t.shape[0])]
            assert all((part.flatten() == row.flatten()).all() for part, row in zip(parts, whole))
