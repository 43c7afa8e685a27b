"""Every family and every way to store it gives transformers' logits, in fp32."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as FROM_IMAGES,
)

from checkpoint import save_checkpoint, tensor_shapes
from gpt_faster.formats import load
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.families import FAMILIES, TEXT_PARTS
from gpt_faster.formats.load import count_parameters, load_model, read_checkpoint
from gpt_faster.formats.names import Fused
from gpt_faster.formats.other_kinds import OTHER_KINDS
from gpt_faster.formats.pth import config_from_dict
from gpt_faster.layers.rope import RopeVariant
from model import Rope


def tokens(n=24, batch=2, vocab=160):
    return torch.randint(0, vocab, (batch, n), generator=torch.Generator().manual_seed(1))


def our_logits(path, prompt):
    model = load_model(read_checkpoint(path), torch.float32, "cpu")
    n = prompt.shape[1]
    model.setup_cache(0, n)                                # RoPE for sequences of this length
    return model(prompt, torch.arange(n), logits_to_keep=n)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_equal_transformers(families, name):
    directory, model = families(name)
    prompt = tokens()
    expected = tiny.logits(model, prompt)
    assert expected.std() > 0.5                            # weights large enough to show an error
    close(our_logits(directory, prompt), expected)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_old_config_spelling(families, name, tmp_path):
    directory, model = families(name)
    shutil.copytree(directory, tmp_path / name)
    tiny.old_spelling(tmp_path / name)
    assert read_checkpoint(tmp_path / name).cfg == read_checkpoint(directory).cfg
    close(our_logits(tmp_path / name, tokens()), tiny.logits(model, tokens()))


@pytest.mark.parametrize("name", ["llama3", "qwen2-window", "gemma3"])
def test_sharded_and_bin(families, name, tmp_path):
    directory, model = families(name)
    expected = tiny.logits(model, tokens())
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    close(our_logits(tmp_path / "sharded", tokens()), expected)
    (tmp_path / "bin").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "bin")
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or name == "qwen2-window"}
    for zipped in (True, False):                           # the format of today, and of torch < 1.6
        torch.save(state, tmp_path / "bin/pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        close(our_logits(tmp_path / "bin", tokens()), expected)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_pth_round_trip(families, name, tmp_path):
    directory, model = families(name)
    source = read_checkpoint(directory)
    save_checkpoint(source, tmp_path / "model.pth", None)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pth"]
    again = read_checkpoint(tmp_path / "model.pth")
    assert again.cfg == source.cfg and again.eos_ids == source.eos_ids
    a, b = our_logits(directory, tokens()), our_logits(tmp_path, tokens())
    assert torch.equal(a, b)


def test_index_left_over_from_shards(families, tmp_path):
    """A merged model.safetensors counts, as with transformers, whatever an old index says."""
    directory, model = families("llama3")
    shutil.copytree(directory, tmp_path / "merged")
    (tmp_path / "merged/model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')
    close(our_logits(tmp_path / "merged", tokens()), tiny.logits(model, tokens()))


NEW_PARTS = ("norm", "attention", "ffn", "block", "after_embed", "per_layer")      # of a config, since version 2


@pytest.mark.parametrize("name", ["gpt_oss", "glm4_moe", "gemma2"])
def test_pth_with_experts_and_scores_among_the_rest(families, name, tmp_path):
    """As it was before they had dataclasses of their own."""
    source = read_checkpoint(families(name)[0])
    save_checkpoint(source, tmp_path / "model.pth", None)
    content = torch.load(tmp_path / "model.pth")
    config = asdict(tiny.flat(source.cfg))
    for part in NEW_PARTS:
        del config[part]
    scores, moe = config.pop("scores"), config.pop("moe")
    (moe or {}).pop("activation", None)
    flat = dict(attn_cap=scores["cap"], sinks=scores["sinks"], **(moe or dict(n_expert=0, n_active=0, expert_dim=0)))
    torch.save({**content, "version": 1, "config": config | flat}, tmp_path / "model.pth")
    assert read_checkpoint(tmp_path / "model.pth").cfg == source.cfg


def test_pth_of_version_1(families):
    """Configs as they were written before they had parts."""
    stored = json.loads((Path(__file__).parent / "expected/configs_of_version_1.json").read_text())
    newer = {"kolibri1", "laguna", "olmo_hybrid", "bamba", "falcon_h1", "nemotron_h-latent", "falcon_mamba", "jamba", "zamba2"}          # than the parts
    assert set(tiny.COVER) - newer < set(stored)
    for name, config in stored.items():
        assert config_from_dict(config) == read_checkpoint(families(name)[0]).cfg, name


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_pth_of_the_first_release(families, name, tmp_path):
    """Its config had fewer fields, and qk_norm was a bool."""
    source = read_checkpoint(families(name)[0])
    save_checkpoint(source, tmp_path / "model.pth", None)
    content = torch.load(tmp_path / "model.pth")
    old = ("dim n_layer n_head n_kv_head head_dim ffn_dim vocab_size context norm_eps activation tied qkv_bias o_bias "
           "mlp_bias qk_norm post_norm embed_scale attn_scale rope window").split()
    flat = asdict(tiny.flat(source.cfg))
    config = {key: flat[key] for key in old}
    config["qk_norm"] = bool(config["qk_norm"])
    keys = "theta kind factor low_freq_factor high_freq_factor original_context divisors".split()
    config["rope"] = tuple({key: rope[key] for key in keys} for rope in config["rope"])
    torch.save({**content, "version": 1, "config": config}, tmp_path / "model.pth")
    assert read_checkpoint(tmp_path / "model.pth").cfg == source.cfg


def test_bare_pth_with_config_beside(families, tmp_path):
    directory, model = families("llama3")
    shutil.copy(directory / "config.json", tmp_path)
    source = read_checkpoint(directory)
    bare = {name: t.read_rows(0, t.shape[0]) for name, t in source.tensors.items()}
    torch.save(bare, tmp_path / "model.pth")
    assert torch.equal(our_logits(directory, tokens()), our_logits(tmp_path / "model.pth", tokens()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_low_precision_is_near(families, name, dtype):
    """As near to fp32 as transformers' own model is in that dtype, give or take a half."""
    directory, model = families(name)
    expected = tiny.logits(model, tokens())
    low = load_model(read_checkpoint(directory), dtype, "cpu")
    low.setup_cache(0, 24)
    got = low(tokens(), torch.arange(24), logits_to_keep=24)
    assert got.dtype == torch.float32 and low.norm.weight.dtype == torch.float32
    theirs = tiny.logits(type(model).from_pretrained(directory, dtype=dtype), tokens())
    ours, theirs = (((x - expected).norm(dim=-1) / expected.norm(dim=-1)).median()     # a router may flip
                    for x in (got, theirs))
    assert ours < 1.5 * theirs and theirs < 0.2, (ours, theirs)


def test_context():
    """RoPE scaling may promise more than max_position_embeddings says (Qwen2.5's model card), or not."""
    base = dict(model_type="qwen2", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                vocab_size=99, max_position_embeddings=32768, num_key_value_heads=2)
    for scaling, context in ((None, 32768), (dict(type="linear", factor=4.0), 32768),
                             (dict(type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
                             (dict(type="yarn", factor=4.0, original_max_position_embeddings=8192), 32768),
                             (dict(type="dynamic", factor=2.0), 65536)):
        assert config_from_hf({**base, "rope_scaling": scaling})[0].context == context


def test_gpt2_as_openai_stored_it(families, tmp_path):
    """No prefix in the names, the causal mask among the weights, a config with its own words."""
    from safetensors.torch import load_file, save_file
    directory, model = families("gpt2")
    disk = {k.removeprefix("transformer."): w for k, w in load_file(directory / "model.safetensors").items()}
    for i in range(3):
        disk[f"h.{i}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
        disk[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(disk, tmp_path / "model.safetensors")
    few = dict(model_type="gpt2", n_embd=64, n_layer=3, n_head=4, n_ctx=128, n_positions=128, vocab_size=160,
               activation_function="gelu_new", layer_norm_epsilon=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(few))
    close(our_logits(tmp_path, tokens()), tiny.logits(model, tokens()))


@pytest.mark.parametrize("name, changes", [
    ("gemma", dict(hidden_act="gelu", hidden_activation=None)),         # gemma-2b's: tanh all the same
    ("gpt_oss", dict(experts_per_token=2, initial_context_length=4096, swiglu_limit=7.0)),
    ("qwen3_moe", dict(num_experts=8, num_local_experts=None)),         # as before transformers 5
])
def test_spellings_of_the_hub(families, name, changes, tmp_path):
    directory, model = families(name)
    shutil.copytree(directory, tmp_path / name)
    path = tmp_path / name / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    close(our_logits(tmp_path / name, tokens()), tiny.logits(model, tokens()))


def test_experts_either_way_round(families, tmp_path):
    """Qwen3-VL's lie [E, in, out] on the Hub, transformers 5 writes [E, out, in]."""
    from safetensors.torch import load_file, save_file
    directory, model = families("qwen3_vl_moe")
    shutil.copytree(directory, tmp_path / "hub")
    disk = load_file(directory / "model.safetensors")
    disk = {k: w.mT.contiguous() if ".experts." in k else w for k, w in disk.items()}
    assert disk["model.language_model.layers.0.mlp.experts.down_proj"].shape == (4, 96, 64)
    save_file(disk, tmp_path / "hub/model.safetensors")
    close(our_logits(tmp_path / "hub", tokens()), tiny.logits(model, tokens()))


def test_the_head_that_drafts_is_left_out(families, tmp_path):
    """GLM-4.5 has it as a layer after the last, with matrices of its own."""
    from safetensors.torch import load_file, save_file
    directory, model = families("glm4_moe")
    shutil.copytree(directory, tmp_path / "glm")
    disk = load_file(directory / "model.safetensors")
    disk |= {k.replace("layers.3.", "layers.4."): w.clone() for k, w in disk.items() if "layers.3." in k}
    disk |= {"model.layers.4.eh_proj.weight": torch.ones(64, 128), "model.layers.4.enorm.weight": torch.ones(64)}
    save_file(disk, tmp_path / "glm/model.safetensors")
    with pytest.raises(ValueError, match="tensors that"):
        read_checkpoint(tmp_path / "glm")
    config = json.loads((tmp_path / "glm/config.json").read_text())
    (tmp_path / "glm/config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    close(our_logits(tmp_path / "glm", tokens()), tiny.logits(model, tokens()))


def test_only_the_text_part_and_a_line_that_says_so(families, capsys):
    read_checkpoint(families("qwen3_vl")[0])
    assert capsys.readouterr().err == "note: multimodal model: loading the text part only\n"


def with_changes(cfg, changes):
    """A config with other values of FlatConfig's fields; "moe.n_group": of a field within a field."""
    cfg = tiny.flat(cfg)
    for key, value in changes.items():
        field, _, inner = key.partition(".")
        cfg = replace(cfg, **{field: replace(getattr(cfg, field), **{inner: value}) if inner else value})
    return cfg.with_parts()


@pytest.mark.parametrize("family, changes", [
    ("glm4_moe", {"moe.scores": "softmax"}), ("glm4_moe", {"moe.routed_scale": 1.0}),
    ("glm4_moe", {"moe.n_group": 1, "moe.topk_group": 1}), ("glm4_moe", {"moe.topk_group": 3}),
    ("glm4_moe", {"moe.norm_topk_prob": False}), ("glm4_moe", {"qk_norm": None}),
    ("gpt_neox", {"parallel": False}), ("gpt_neox-sequential", {"parallel": True}), ("falcon", {"parallel": False}),
    ("phi", {"head_bias": False}), ("gptj", {"head_bias": False}), ("cohere", {"layer_norm": False}),
    ("cohere2", {"rope": (Rope(),)}), ("cohere2", {"window": (8,)}), ("nemotron", {"activation": "gelu"}),
    ("apertus", {"activation": "relu2"}), ("apertus", {"qk_norm": None}), ("olmo", {"clip_qkv": None}),
    ("olmo", {"clip_qkv": 0.5}), ("olmo", {"layer_norm": False}), ("mpt", {"clip_qkv": None}),
    ("hunyuan_v1_dense", {"scores.gains": False}), ("hunyuan_v1_dense", {"rope": (Rope(),)}),
    ("gemma4", {"v_norm": False}), ("gemma4", {"layer_end": None}), ("gemma4-31b", {"attn_scale": None}),
    ("gemma4-31b", {"rope": (Rope(), RopeVariant(1e6, head_dim=32))}), ("gemma4-26b", {"moe.n_active": 1}),
    ("gemma4_unified", {"v_norm": False}), ("gemma4_unified", {"window": (None,)}),
    ("afmoe", {"attn_gate": False}), ("afmoe", {"embed_scale": 1.0}), ("afmoe", {"moe.routed_scale": 1.0}),
    ("muse_glimmer", {"attn_gate": False}), ("muse_glimmer", {"embed_norm": False}), ("muse_glimmer", {"attn_scale": None}),
    ("muse_glimmer", {"post_norm_eps": 1.0}), ("muse_glimmer", {"logit_cap": None}),
    ("ministral3-long", {"scores.growth": 0.0}), ("ministral3-long", {"scores.growth_from": 7}),
    ("bloom", {"scores.alibi": False}), ("bloom", {"embed_norm": False}), ("mpt", {"scores.alibi": False}),
    ("gpt_neo", {"attn_scale": None}), ("gpt_neo", {"window": (None,)}), ("gpt_bigcode", {"learned_pos": False}),
    ("ernie4_5_moe", {"moe.choice_bias": False}), ("ernie4_5_moe", {"moe.shared_dim": 0}),
    ("ernie4_5_moe", {"moe.scores": "sigmoid"}), ("granitemoeshared", {"moe.shared_dim": 0}),
    ("granitemoe_swa", {"scores.sinks": False}), ("granitemoehybrid-experts", {"moe.norm_topk_prob": False}),
    ("qwen3_5_text", {"attn_gate": False}), ("qwen3_5_text", {"qk_norm": None}), ("qwen3_5_text", {"rope": (Rope(),)}),
    ("qwen3_5_moe", {"moe.shared_gate": False}), ("qwen3_next", {"moe.shared_dim": 0}), ("qwen3_5_moe_text", {"moe.norm_topk_prob": False}),
    ("opt", {"activation": "gelu"}), ("opt", {"learned_pos": False}), ("nanochat", {"embed_norm": False}),
    ("hyperclovax", {"post_norm": False}), ("cohere-plus", {"qk_norm": None}), ("cohere-plus", {"qk_norm": "wide"}), ("jais2", {"activation": "gelu"}), ("jais2", {"layer_norm": False}),
])
def test_planted_errors(families, family, changes):
    """Each part of what a family has shows in the logits."""
    directory, model = families(family)
    source = read_checkpoint(directory)
    source.cfg = with_changes(source.cfg, changes)
    needed = tensor_shapes(source.cfg)                     # no more: a quirk left out leaves its weights out
    source.tensors = {k: t for k, t in source.tensors.items() if k in needed}
    wrong = load_model(source, torch.float32, "cpu")(tokens(), torch.arange(24), logits_to_keep=24)
    expected = tiny.logits(model, tokens())
    assert (wrong - expected).norm() > 0.01 * expected.norm()


def shape(kind, dim, ffn, n_layer, n_head, n_kv_head, vocab, **more):
    return dict(model_type=kind, hidden_size=dim, intermediate_size=ffn, num_hidden_layers=n_layer, num_attention_heads=n_head,
                num_key_value_heads=n_kv_head, vocab_size=vocab, **more)


PUBLIC = {                                                 # config.json as its authors wrote it -> parameters, as they say
    "pythia-410m": (shape("gpt_neox", 1024, 4096, 24, 16, None, 50304, layer_norm_eps=1e-5, rotary_pct=0.25, rotary_emb_base=10000,
                          use_parallel_residual=True, hidden_act="gelu", max_position_embeddings=2048), 405_334_016),
    "Qwen3.5-0.8B": (dict(model_type="qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
                          num_key_value_heads=2, head_dim=256, vocab_size=248320, tie_word_embeddings=True, full_attention_interval=4,
                          linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
                          linear_conv_kernel_dim=4, rms_norm_eps=1e-6, max_position_embeddings=262144, rope_parameters=dict(
                              rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25, mrope_interleaved=True,
                              mrope_section=[11, 11, 10])), 752_393_024),
    "Qwen3.5-27B": (shape("qwen3_5_text", 5120, 17408, 64, 24, 4, 248320, head_dim=256, linear_num_value_heads=48, rope_parameters=dict(
        rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25), max_position_embeddings=262144), 26.9e9),
    "Qwen3.5-35B-A3B": (dict(model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
                             num_key_value_heads=2, linear_num_value_heads=32, vocab_size=248320, num_experts=256, num_experts_per_tok=8,
                             moe_intermediate_size=512, shared_expert_intermediate_size=512), 34.66e9),
    "Qwen3-Next-80B-A3B": (shape("qwen3_next", 2048, 5120, 48, 16, 2, 151936, head_dim=256, num_experts=512, num_experts_per_tok=10,
                                 moe_intermediate_size=512, shared_expert_intermediate_size=512, partial_rotary_factor=0.25,
                                 rope_theta=10000000, max_position_embeddings=262144, linear_num_value_heads=32), 79.67e9),
    "gpt-j-6b": (dict(model_type="gptj", n_embd=4096, n_layer=28, n_head=16, rotary_dim=64, n_inner=None, n_positions=2048, vocab_size=50400,
                      activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=False), 6_050_882_784),
    "phi-2": (shape("phi", 2560, 10240, 32, 32, 32, 51200, layer_norm_eps=1e-5, partial_rotary_factor=0.4, rope_theta=10000.0,
                    rope_scaling=None, hidden_act="gelu_new", qk_layernorm=False, max_position_embeddings=2048), 2_779_683_840),
    "c4ai-command-r-v01": (shape("cohere", 8192, 22528, 40, 64, 64, 256000, layer_norm_eps=1e-5, rope_theta=8000000.0, logit_scale=0.0625,
                                 use_qk_norm=False, max_position_embeddings=8192), 34_980_831_232),
    "c4ai-command-r7b": (shape("cohere2", 4096, 14336, 32, 32, 8, 256000, layer_norm_eps=1e-5, rope_theta=50000, logit_scale=0.25,
                               sliding_window=4096, sliding_window_pattern=4, rotary_pct=1.0, max_position_embeddings=8192), 8.03e9),
    "falcon-7b": (dict(model_type="falcon", hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, vocab_size=65024, alibi=False,
                       bias=False, multi_query=True, new_decoder_architecture=False, parallel_attn=True, layer_norm_epsilon=1e-5), 6_921_720_704),
    "falcon-40b": (dict(model_type="falcon", hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8, vocab_size=65024,
                        alibi=False, bias=False, new_decoder_architecture=True, parallel_attn=True, layer_norm_epsilon=1e-5), 41.3e9),
    "stablelm-3b-4e1t": (shape("stablelm", 2560, 6912, 32, 32, 32, 50304, layer_norm_eps=1e-5, partial_rotary_factor=0.25, rope_theta=10000,
                               use_qkv_bias=False, hidden_act="silu", max_position_embeddings=4096), 2_795_443_200),
    "stablelm-2-1_6b": (shape("stablelm", 2048, 5632, 24, 32, 32, 100352, layer_norm_eps=1e-5, partial_rotary_factor=0.25, rope_theta=10000,
                              use_qkv_bias=True, hidden_act="silu", max_position_embeddings=4096), 1_644_515_328),
    "Minitron-4B": (shape("nemotron", 3072, 9216, 32, 24, 8, 256000, head_dim=128, norm_eps=1e-5, partial_rotary_factor=0.5, hidden_act="relu2",
                          rope_theta=10000, max_position_embeddings=4096), 4.19e9),
    "Apertus-8B": (shape("apertus", 4096, 21504, 32, 32, 8, 131072, rms_norm_eps=1e-5, hidden_act="xielu", qk_norm=True, rope_theta=12000000,
                         max_position_embeddings=65536, rope_scaling=dict(
                             rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=8192)), 8.05e9),
    "OLMo-7B-hf": (shape("olmo", 4096, 11008, 32, 32, 32, 50304, clip_qkv=None, rope_theta=10000.0, max_position_embeddings=2048), 6.89e9),
    "Hunyuan-A13B": (shape("hunyuan_v1_moe", 4096, 3072, 32, 32, 8, 128167, head_dim=128, num_experts=64, moe_topk=[8] * 32, rms_norm_eps=1e-5,
                           moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, rope_theta=10000.0, tie_word_embeddings=True,
                           rope_scaling=dict(type="dynamic", alpha=1000.0, factor=1.0), max_position_embeddings=32768), 80.4e9),
    "ERNIE-4.5-21B-A3B": (shape("ernie4_5_moe", 2560, 12288, 28, 20, 4, 103424, rope_theta=500000.0, rms_norm_eps=1e-5, use_bias=False,
                                moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_interval=1,
                                moe_layer_start_index=1, moe_layer_end_index=-1, tie_word_embeddings=True,
                                max_position_embeddings=131072), 21.8e9),
    "GLM-4.5-Air": (shape("glm4_moe", 4096, 10944, 46, 96, 8, 151552, head_dim=128, partial_rotary_factor=0.5, rope_theta=1000000,
                          n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1, n_group=1, topk_group=1,
                          first_k_dense_replace=1, routed_scaling_factor=1.0, norm_topk_prob=True, use_qk_norm=False, attention_bias=True,
                          rms_norm_eps=1e-5, max_position_embeddings=131072), 106.8e9),
    "DeepSeek-V3": (shape("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
                          qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
                          n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5, norm_topk_prob=True,
                          scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, num_nextn_predict_layers=1, rope_theta=10000,
                          max_position_embeddings=163840, rms_norm_eps=1e-6, rope_scaling=dict(
                              type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
                              mscale_all_dim=1.0)), 671.03e9),
    "DeepSeek-V2": (shape("deepseek_v2", 5120, 12288, 60, 128, 128, 102400, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
                          qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=160, num_experts_per_tok=6, moe_intermediate_size=1536,
                          n_shared_experts=2, n_group=8, topk_group=3, first_k_dense_replace=1, routed_scaling_factor=16.0,
                          norm_topk_prob=False, topk_method="group_limited_greedy", rope_theta=10000, max_position_embeddings=163840,
                          rms_norm_eps=1e-6, rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32,
                                                               beta_slow=1, mscale=0.707, mscale_all_dim=0.707)), 235.74e9),
    "DeepSeek-V2-Lite": (shape("deepseek_v2", 2048, 10944, 27, 16, 16, 102400, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
                               qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408,
                               n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.0,
                               norm_topk_prob=False, topk_method="greedy", rope_theta=10000, max_position_embeddings=163840,
                               rms_norm_eps=1e-6, rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096,
                                                                    beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707)), 15.71e9),
    "LFM2-1.2B": (dict(model_type="lfm2", hidden_size=2048, block_ff_dim=12288, num_hidden_layers=16, num_attention_heads=32, vocab_size=65536,
                       num_key_value_heads=8, norm_eps=1e-5, rope_theta=1000000.0, conv_L_cache=3, conv_bias=False, block_multiple_of=256,
                       block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, max_position_embeddings=128000, tie_embedding=True,
                       full_attn_idxs=[2, 5, 8, 10, 12, 14]), 1_170_340_608),
    "MiniCPM3-4B": (shape("minicpm3", 2560, 6400, 62, 40, 40, 73448, kv_lora_rank=256, q_lora_rank=768, qk_rope_head_dim=32,
                          qk_nope_head_dim=64, scale_emb=12, scale_depth=1.4, dim_model_base=256, rms_norm_eps=1e-5,
                          tie_word_embeddings=True, max_position_embeddings=32768), 4.07e9),
    "opt-125m": (dict(model_type="opt", hidden_size=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12, vocab_size=50272,
                      word_embed_proj_dim=768, do_layer_norm_before=True, activation_function="relu", max_position_embeddings=2048), 125_239_296),
    "bloom-560m": (dict(model_type="bloom", hidden_size=1024, n_layer=24, num_attention_heads=16, vocab_size=250880, layer_norm_epsilon=1e-5,
                        apply_residual_connection_post_layernorm=False), 559_214_592),
    "mpt-7b": (dict(model_type="mpt", d_model=4096, n_heads=32, n_layers=32, expansion_ratio=4, max_seq_len=2048, vocab_size=50432, no_bias=True,
                    learned_pos_emb=True, logit_scale=None, attn_config=dict(alibi=True, alibi_bias_max=8, clip_qkv=None, qk_ln=False,
                                                                             prefix_lm=False)), 6_649_286_656),
    "gpt-neo-125m": (dict(model_type="gpt_neo", hidden_size=768, num_layers=12, num_heads=12, vocab_size=50257, window_size=256,
                          attention_types=[[["global", "local"], 6]], intermediate_size=None, max_position_embeddings=2048,
                          activation_function="gelu_new", layer_norm_epsilon=1e-5), 125_198_592),
    "starcoder": (dict(model_type="gpt_bigcode", n_embd=6144, n_layer=40, n_head=48, n_inner=24576, n_positions=8192, vocab_size=49152,
                       multi_query=True, activation_function="gelu_pytorch_tanh", layer_norm_epsilon=1e-5), 15_517_456_384),
}


@pytest.mark.parametrize("public", PUBLIC)
def test_public_configs(public):
    """As transformers reads them, and of the size that is published."""
    from transformers import AutoConfig
    config, n_parameter = PUBLIC[public]
    ours = config_from_hf(config)[0]
    theirs = AutoConfig.for_model(**config).to_dict()
    assert ours == config_from_hf(theirs)[0]
    assert count_parameters(ours) == pytest.approx(n_parameter, rel=0.005)


WITHOUT_DEFAULTS = ("vision-encoder-decoder", "gemma4_assistant", "gemma4_unified_assistant", "dots1")     # transformers' class has no default config of these


def swapped(names, a, b):
    other = {a: b, b: a}
    return {theirs: other.get(ours, ours) if isinstance(ours, str) else ours for theirs, ours in names.items()}


def not_by_group(names):
    return {theirs: replace(ours, by_group=False) if isinstance(ours, Fused) else ours for theirs, ours in names.items()}


@pytest.mark.parametrize("family, folds, names", [
    ("gpt_neox", {}, not_by_group), ("falcon-new", {}, not_by_group), ("bloom", {}, not_by_group),
    ("gpt_bigcode-heads", {}, not_by_group),
    ("gpt_neox", {}, lambda names: swapped(names, "attn_norm", "ffn_norm")),
    ("apertus", {}, lambda names: swapped(names, "ffn.activation.alpha_p", "ffn.activation.alpha_n")),
    ("apertus", {}, lambda names: swapped(names, "attn_norm", "ffn_norm")),
    ("gemma4-26b", {}, lambda names: swapped(names, "ffn.norm", "ffn.shared_norm")),
    ("gemma4-26b", {}, lambda names: swapped(names, "ffn.post_norm", "ffn.post_shared_norm")),
    ("gptj", dict(interleaved_rope=False), dict), ("cohere", dict(interleaved_rope=False), dict),
    ("ernie4_5_moe", dict(interleaved_rope=False), dict), ("cohere", dict(logits_divisor=1.0), dict),
    ("cohere2", dict(constants={r"norm\.bias$": 0.1}), dict), ("olmo", dict(constants={r"norm\.bias$": 0.0, r"norm\.weight$": 1.1}), dict),
    ("nemotron", dict(norm_offset=0.0), dict), ("nemotron", dict(norm_offset=0.9), dict),
    ("muse_glimmer", dict(norm_offset_of="norm"), dict), ("muse_glimmer", dict(norm_offset=0.0), dict),
    ("nanochat", dict(reversed_rope=False), dict), ("hyperclovax", dict(post_norm_scale=1.0), dict),
    ("falcon-alibi", dict(slopes_scale=1.0), dict), ("bloom", dict(slopes_base=7.0), dict), ("mpt", dict(slopes_base=7.0), dict),
])
def test_planted_errors_while_loading(families, family, folds, names, monkeypatch):
    """Each thing that is folded into weights, or said of their order, shows in the logits."""
    directory, model = families(family)
    raw = load.read(directory)
    wrong = replace(raw, folds=replace(raw.folds, **folds), names=names(raw.names))
    monkeypatch.setattr(load, "read", lambda path: wrong)
    found, expected = our_logits(directory, tokens()), tiny.logits(model, tokens())
    assert (found - expected).norm() > 0.01 * expected.norm()


def test_norms_after_rope_are_not_before_it(families, monkeypatch):
    directory, model = families("hunyuan_v1_dense")
    raw = load.read(directory)
    cfg = with_changes(raw.cfg, {"scores.gains": False})
    monkeypatch.setattr(load, "read", lambda path: replace(raw, cfg=cfg, folds=replace(raw.folds, norm_after_rope=False)))
    found, expected = our_logits(directory, tokens()), tiny.logits(model, tokens())
    assert (found - expected).norm() > 0.01 * expected.norm()


@pytest.mark.parametrize("kind", sorted({*CAUSAL, *FROM_IMAGES}))
def test_every_kind_that_transformers_lists(kind):
    """Is read, or refused by name with the kind of model that it is."""
    from transformers import CONFIG_MAPPING
    if kind in WITHOUT_DEFAULTS:
        config = dict(model_type=kind)
    else:
        config = CONFIG_MAPPING[kind]().to_dict()
    try:
        cfg = config_from_hf(config)[0]
        assert cfg.n_layer > 0
    except ValueError as e:
        assert re.search("is not supported: it has|only without state-space layers", str(e)) or kind in ("dots1", "deepseek_v2", "qwen3_omni_moe", "qwen3_omni_moe_thinker")      # whose default no model has


def test_no_kind_is_both_read_and_refused():
    refused = " ".join(OTHER_KINDS.values()).split()
    assert len(refused) == len(set(refused)) and not set(refused) & (set(FAMILIES) | set(TEXT_PARTS.values()))


GPT2_WORDS = dict(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head", intermediate_size=None)
OTHER_WORDS = {
    "gpt2": GPT2_WORDS, "gptj": GPT2_WORDS, "gpt_bigcode": GPT2_WORDS, "bloom": GPT2_WORDS | dict(hidden_size="hidden_size"),
    "opt": dict(intermediate_size="ffn_dim"),
    "mpt": dict(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads", intermediate_size=None),
    "gpt_neo": dict(num_hidden_layers="num_layers", num_attention_heads="num_heads"),
    "falcon": dict(intermediate_size=None)}


def skip_without_reference(kinds):
    """Of rows that somebody added without a variant in tests/tiny.py: nothing here to compare them with."""
    missing = sorted(set(kinds) - set(tiny.MODELS))
    if missing:
        pytest.skip(f"no reference for {', '.join(missing)}: no variant in tests/tiny.py, made by transformers' class of that name")


def test_every_family_has_a_variant():
    kinds = {getattr(config, "text_config", config).model_type for config in (make() for make in tiny.FAMILIES.values())}
    assert kinds == set(tiny.MODELS) and kinds <= set(FAMILIES)
    skip_without_reference(FAMILIES)


def test_an_invented_row(families, tmp_path, monkeypatch):
    """As a fork adds one: it loads and runs, and what has no reference for it is skipped and says so."""
    monkeypatch.setitem(FAMILIES, "my_llama", FAMILIES["llama"])
    directory, model = families("llama3")
    shutil.copytree(directory, tmp_path / "mine")
    path = tmp_path / "mine/config.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), model_type="my_llama", architectures=["MyLlamaForCausalLM"])))
    close(our_logits(tmp_path / "mine", tokens()), tiny.logits(model, tokens()))
    with pytest.raises(pytest.skip.Exception, match="no reference for my_llama: no variant in tests/tiny.py"):
        test_every_family_has_a_variant()
    with pytest.raises(pytest.skip.Exception, match="no reference for my_llama: no variant in tests/tiny.py"):
        test_keys_that_config_json_leaves_out("my_llama")
    test_no_kind_is_both_read_and_refused()


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_that_config_json_leaves_out(kind):
    """Gemma 3 4B's names seven keys. The others mean what transformers' class says."""
    skip_without_reference([kind])
    from transformers import CONFIG_MAPPING
    few = dict(hidden_size=256, intermediate_size=96, num_hidden_layers=8, num_attention_heads=16, vocab_size=99,
               model_type=kind)
    words = OTHER_WORDS.get(kind, {})
    few = {words.get(key, key): value for key, value in few.items() if words.get(key, key)}
    if kind == "granitemoehybrid":                         # its default has state-space layers and experts
        few.update(layer_types=["attention"] * 8, num_local_experts=0)
    if kind == "mamba2":                                   # its class checks their product
        few.update(num_heads=8)
    if kind == "zamba2":                                   # its default is of 54 layers
        few.update(num_hidden_layers=54)
    if kind == "deepseek_v2":                              # nor has this key
        few.update(num_experts_per_tok=2)
    if kind == "dots1":                                    # has no default
        few.update(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1)
    if kind == "gpt_neo":                                  # the default is of 24 layers
        few.update(attention_types=[[["global", "local"], 4]])
    full = CONFIG_MAPPING[kind](**{k: v for k, v in few.items() if k != "model_type"}).to_dict()
    if kind in ("mistral", "qwen2", "qwen3") or (full.get("num_key_value_heads") or 16) > 16:      # these state both always
        few["num_key_value_heads"] = full["num_key_value_heads"] = 2
    if "max_position_embeddings" in full:
        few["max_position_embeddings"] = full["max_position_embeddings"]
    ours, theirs = config_from_hf(few)[0], config_from_hf(full)[0]
    assert ours == theirs
