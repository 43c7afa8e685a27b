"""Meta's, llama2.c's and GGUF files, written here from a transformers model, give its logits."""

import json
import sys

import gguf
import numpy as np
import pytest
import tiny
import torch
from test_families import close, our_logits, tokens

from checkpoint import save_checkpoint
from gpt_faster.formats.gguf_mamba import mamba_config
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.text import tokenizer_files
from gpt_faster.text.byte_level import bytes_to_unicode


def interleave(w, head_dim):
    """transformers' row order -> Meta's and llama.cpp's: (i, i + H/2) -> (2i, 2i + 1)."""
    return w.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(w.shape)


# ---- Meta and llama2.c ---------------------------------------------------------------------------

META = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "model.layers": "layers"}
PARAMS = dict(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=-1, norm_eps=1e-5, multiple_of=32)


def meta_state(model, config):
    state = {}
    for name, w in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            w = interleave(w, config.head_dim)
        for theirs, metas in META.items():
            name = name.replace(theirs, metas)
        state[name] = w.clone()
    return state


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_meta(families, name, shards, tmp_path):
    _, model = families(name)
    state = meta_state(model, model.config)
    state["rope.freqs"] = torch.ones(8)
    params = {**PARAMS, "n_kv_heads": model.config.num_key_value_heads}
    if name == "llama3":
        params.update(rope_theta=5e5, use_scaled_rope=True)
        model.config.rope_parameters["original_max_position_embeddings"] = 8192
        state.setdefault("output.weight", state["tok_embeddings.weight"].clone())
    columns = ("wo.weight", "w2.weight", "tok_embeddings.weight")
    for i in range(shards):
        torch.save({k: w if w.dim() == 1 else w.chunk(shards, dim=1 if k.endswith(columns) else 0)[i].clone()
                    for k, w in state.items()}, tmp_path / f"consolidated.{i:02d}.pth")
    (tmp_path / "params.json").write_text(json.dumps(params))
    source = read_checkpoint(tmp_path)
    if name == "llama3":
        assert source.cfg.rope[0].original_context == 8192 and source.cfg.context == 131072
        assert source.cfg.rope[0].factor == 8
        from transformers import AutoModelForCausalLM
        again = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
        again.load_state_dict(model.state_dict())
        model.config.rope_parameters["original_max_position_embeddings"] = 32
        model = again
    close(our_logits(tmp_path, tokens()), tiny.logits(model, tokens()))


def test_llama2c(families, tmp_path):
    _, model = families("llama2")
    state = meta_state(model, model.config)
    state["output.weight"] = state["tok_embeddings.weight"]           # llama2.c ties them
    state = {f"_orig_mod.{k}": v for k, v in state.items()}
    args = dict(dim=64, n_layers=4, n_heads=4, n_kv_heads=4, vocab_size=160, multiple_of=32,
                norm_eps=1e-5, max_seq_len=128, dropout=0.0)
    torch.save(dict(model=state, model_args=args, iter_num=7, best_val_loss=1.5), tmp_path / "stories.pt")
    source = read_checkpoint(tmp_path / "stories.pt")
    assert source.cfg.tied and source.cfg.context == 128 and source.eos_ids == [1, 2]
    model = tiny.make("llama2")
    model.lm_head.weight = model.model.embed_tokens.weight
    close(our_logits(tmp_path / "stories.pt", tokens()), tiny.logits(model, tokens()))


def test_a_pth_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("executed",)
    torch.save(dict(model=Evil()), tmp_path / "model.pth")
    with pytest.raises(ValueError, match="refused, it contains more than weights"):
        read_checkpoint(tmp_path / "model.pth")


# ---- GGUF ----------------------------------------------------------------------------------------

ARCHITECTURES = {"llama2": "llama", "llama3": "llama", "llama-biased": "llama", "mistral-nemo": "llama",
                 "mistral-window": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2-yarn": "qwen2", "qwen3": "qwen3",
                 "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2",
                 "gemma3_text": "gemma3", "phi3": "phi3", "phi3-longrope": "phi3", "gpt2": "gpt2",
                 "smollm3": "smollm3", "olmo2": "olmo2", "olmoe": "olmoe", "granite": "granite",
                 "granitemoe": "granitemoe", "gpt_oss": "gpt-oss", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl",
                 "qwen3_vl_moe": "qwen3vlmoe", "mistral3": "llama", "mellum": "mellum", "granitemoehybrid": "granite",
                 "seed_oss": "seed_oss", "exaone": "exaone", "exaone4": "exaone4", "exaone4-full": "exaone4", "internlm3": "llama",
                 "iquestcoder": "llama", "ernie4_5": "ernie4_5", "glm4": "glm4", "glm4v": "glm4", "glm4v_moe": "glm4moe", "arcee": "arcee", "starcoder2": "starcoder2",
                 "gpt_neox": "gptneox", "gpt_neox-sequential": "gptneox", "phi": "phi2", "cohere": "command-r", "cohere-plus": "command-r", "stablelm-norms": "stablelm",
                 "cohere2": "cohere2", "falcon": "falcon", "falcon-new": "falcon", "falcon-one_norm": "falcon", "stablelm": "stablelm",
                 "stablelm-parallel": "stablelm", "nemotron": "nemotron", "apertus": "apertus", "olmo": "olmo",
                 "ministral3-long": "mistral3", "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
                 "afmoe": "afmoe", "ernie4_5_moe": "ernie4_5-moe", "granitemoeshared": "granitemoe", "bloom": "bloom",
                 "mpt": "mpt", "gpt_bigcode": "starcoder", "jais2": "jais2", "glm4_moe": "glm4moe", "solar_open": "glm4moe",
                 "dots1": "dots1", "exaone_moe": "exaone-moe", "minimax_m2": "minimax-m2", "muse_glimmer": "muse-glimmer",
                 "deepseek_v2": "deepseek2", "deepseek_v2-lite": "deepseek2", "deepseek_v3": "deepseek2", "kimi_k25": "deepseek2",
                 "glm4_moe_lite": "deepseek2", "youtu": "deepseek2", "minicpm3": "minicpm3", "mistral4": "mistral4",
                 "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
ARCHITECTURES |= {"lfm2-plain": "lfm2", "lfm2_moe": "lfm2moe"}
ARCHITECTURES |= {"granitemoehybrid-mamba": "granitehybrid", "bamba": "granitehybrid", "falcon_h1": "falcon-h1", "falcon_h1-norm": "falcon-h1",
                  "nemotron_h": "nemotron_h", "nemotron_h-experts": "nemotron_h_moe", "nemotron_h-latent": "nemotron_h_moe",
                  "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "jamba": "jamba", "jamba-dense": "jamba"}
# tokenizer.ggml.pre as the converter writes it: by its get_vocab_base_pre(), or as the families' published GGUFs have it.
PRE = {pre: names.split() for pre, names in {
    "llama-bpe": "llama3 arcee bamba", "default": "falcon_mamba", "smaug-bpe": "smollm3", "lfm2": "lfm2-plain lfm2_moe", "dbrx": "olmo2 granitemoehybrid granitemoehybrid-mamba",
    "falcon-h1": "falcon_h1 falcon_h1-norm", "pixtral": "nemotron_h nemotron_h-experts nemotron_h-latent",
    "qwen2": "qwen2 qwen2-yarn qwen3 qwen2_moe qwen3_moe qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_next dots1",
    "qwen35": "qwen3_5_text qwen3_5 qwen3_5_moe", "tekken": "mistral-nemo mistral3 ministral3-long mistral4 apertus",
    "gpt-4o": "gpt_oss", "minimax-m2": "minimax_m2", "solar-open": "solar_open", "seed-coder": "seed_oss", "glm4": "glm4 glm4v glm4v_moe glm4_moe glm4_moe_lite",
    "hunyuan": "hunyuan_v1_moe", "hunyuan-dense": "hunyuan_v1_dense", "deepseek-llm": "deepseek_v2 deepseek_v2-lite",
    "deepseek-v3": "deepseek_v3", "kimi-k2": "kimi_k25", "youtu": "youtu", "exaone4": "exaone4 exaone4-full", "exaone-moe": "exaone_moe",
    "mellum2": "mellum", "starcoder": "starcoder2", "refact": "gpt_bigcode granite granitemoe granitemoeshared", "command-r": "cohere cohere-plus cohere2",
    "olmo": "mamba mamba2 olmo olmoe gpt_neox gpt_neox-sequential stablelm stablelm-parallel", "stablelm2": "stablelm-norms", "mpt": "mpt", "gpt-2": "gpt2",
    "phi-2": "phi", "falcon": "falcon falcon-new falcon-one_norm", "bloom": "bloom", "jais-2": "jais2", "afmoe": "afmoe"}.items()}
SENTENCEPIECE = ("llama2 llama-biased mistral-window mixtral gemma gemma2 gemma3_text phi3 phi3-longrope internlm3 ernie4_5 ernie4_5_moe nemotron "
                 "minicpm3 jamba jamba-dense").split()
NO_TOKENIZER = ["iquestcoder", "muse_glimmer"]             # what a converter writes for them is not known here
LATENT = ("deepseek2", "minicpm3", "mistral4")
DELTA = ("qwen3next", "qwen35", "qwen35moe")
MAMBA = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2")
MAMBA_ALONE = ("mamba", "mamba2")
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "arcee", "olmo", "mistral3", "muse-glimmer", "granitehybrid")
BY_GROUP = ("gptneox", "bloom", "falcon")                  # which the converter undoes
KEYS = {                                                   # after the architecture's name: config attribute
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "use_parallel_residual": "use_parallel_residual", "attention.clamp_kqv": "clip_qkv", "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}


def latent_keys(c):
    """As DeepseekV2Model.set_gguf_parameters: one key head of the latent's width, and what a head's is once it is made."""
    yarn = (c.rope_parameters or {}).get("mscale_all_dim")
    return {"attention.head_count_kv": 1, "attention.q_lora_rank": c.q_lora_rank, "attention.kv_lora_rank": c.kv_lora_rank,
            "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim, "attention.value_length": c.kv_lora_rank,
            "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim, "attention.value_length_mla": c.v_head_dim,
            "expert_gating_func": {"deepseek_v2": 1, "mistral4": 1, "youtu": None}.get(c.model_type, 2),
            "rope.scaling.yarn_log_multiplier": yarn and 0.1 * yarn,
            "expert_weights_norm": None if c.model_type == "deepseek_v2" else getattr(c, "norm_topk_prob", None)}


def lfm2_keys(c):
    return {"attention.head_count_kv": [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types],
            "attention.layer_norm_rms_epsilon": c.norm_eps, "shortconv.l_cache": c.conv_L_cache}


def old_latent_keys(c):
    """Before there was a key_length_mla, and in MiniCPM3's files still."""
    return {"attention.q_lora_rank": c.q_lora_rank, "attention.kv_lora_rank": c.kv_lora_rank,
            "attention.key_length": c.qk_nope_head_dim + c.qk_rope_head_dim}


def mamba1_keys(c):
    return {"ssm.inner_size": 2 * c.hidden_size, "ssm.conv_kernel": getattr(c, "mamba_d_conv", None) or c.conv_kernel,
            "ssm.state_size": getattr(c, "mamba_d_state", None) or c.state_size,
            "ssm.time_step_rank": getattr(c, "mamba_dt_rank", None) or c.time_step_rank}


def alone_keys(c):
    """Zeros for what they have not, and any length."""
    keys = mamba1_keys(c) if "falcon" in c.model_type or c.model_type == "mamba" else {
        "ssm.inner_size": 2 * c.hidden_size, "ssm.conv_kernel": c.conv_kernel, "ssm.state_size": c.state_size,
        "ssm.time_step_rank": c.num_heads, "ssm.group_count": c.n_groups}
    return keys | {"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0,
                   "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon, "attention.layer_norm_epsilon": None,
                   "ssm.dt_b_c_rms": c.model_type == "falcon_mamba"}


def jamba_keys(c):
    return mamba1_keys(c) | {"attention.head_count_kv": [
        c.num_key_value_heads if kind == "attention" else 0 for kind in c.layers_block_type]}


def mamba_keys(c):
    if c.model_type == "mamba2":
        return alone_keys(c)
    n_head = getattr(c, "mamba_n_heads", None) or c.mamba_num_heads
    inner = getattr(c, "mamba_d_ssm", None) or n_head * (getattr(c, "mamba_d_head", None) or c.mamba_head_dim)
    return {"ssm.inner_size": inner, "ssm.time_step_rank": n_head, "ssm.conv_kernel": getattr(c, "mamba_d_conv", None) or c.conv_kernel,
            "ssm.state_size": getattr(c, "mamba_d_state", None) or c.ssm_state_size,
            "ssm.group_count": getattr(c, "mamba_n_groups", None) or c.n_groups}


def granite_hybrid_keys(c):
    """A switch of llama.cpp for RoPE, which Bamba has and Granite 4.0 H has not."""
    return mamba_keys(c) | {
        "attention.head_count_kv": [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types],
        "rope.scaling.finetuned": c.model_type == "bamba", "expert_shared_feed_forward_length": getattr(c, "shared_intermediate_size", None)}


def nemotron_h_keys(c):
    """Layers of one branch each: those with Mamba have neither heads nor a feed-forward width."""
    width = c.moe_intermediate_size if "moe" in c.layers_block_type else c.intermediate_size
    return mamba_keys(c) | {
        "attention.head_count_kv": [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layers_block_type],
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in c.layers_block_type],
        "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon, "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        "expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size, "moe_latent_size": c.moe_latent_size,
        "expert_group_used_count": None}


OTHER_KEYS = {                                             # what a converter writes on its own account
    "gptneox": lambda c: {"attention.layer_norm_epsilon": c.layer_norm_eps},
    "phi2": lambda c: {"attention.layer_norm_epsilon": c.layer_norm_eps},
    "command-r": lambda c: {"attention.layer_norm_epsilon": c.layer_norm_eps, "logit_scale": c.logit_scale},
    "cohere2": lambda c: {"attention.layer_norm_epsilon": c.layer_norm_eps, "logit_scale": c.logit_scale},
    "falcon": lambda c: {"feed_forward_length": 4 * c.hidden_size, "tensor_data_layout": "jploski",
                         "attention.head_count_kv": c.num_kv_heads if c.new_decoder_architecture else 1},
    "stablelm": lambda c: {"attention.layer_norm_epsilon": c.layer_norm_eps},
    "nemotron": lambda c: {"attention.layer_norm_epsilon": c.norm_eps},
    "apertus": lambda c: {}, "olmo": lambda c: {"attention.layer_norm_epsilon": 1e-5},
    "mistral3": lambda c: {"attention.temperature_scale": c.rope_parameters["llama_4_scaling_beta"]},
    "hunyuan-moe": lambda c: {"expert_used_count": c.moe_topk, "expert_feed_forward_length": c.intermediate_size,
                              "expert_shared_feed_forward_length": c.intermediate_size},
    "afmoe": lambda c: {"expert_shared_count": c.num_shared_experts, "leading_dense_block_count": c.num_dense_layers,
                        "expert_weights_scale": c.route_scale},
    "ernie4_5-moe": lambda c: {"expert_used_count": c.moe_k, "interleave_moe_layer_step": c.moe_layer_interval,
                               "leading_dense_block_count": c.moe_layer_start_index, "expert_shared_count": c.moe_num_shared_experts,
                               "expert_shared_feed_forward_length": c.intermediate_size // c.num_key_value_heads},     # as it is there
    "granitemoe": lambda c: {"expert_shared_feed_forward_length": getattr(c, "shared_intermediate_size", 0)},
    "bloom": lambda c: {"feed_forward_length": 4 * c.hidden_size, "attention.head_count_kv": c.n_head},
    "mpt": lambda c: {"feed_forward_length": 4 * c.hidden_size, "context_length": c.max_seq_len, "attention.layer_norm_epsilon": 1e-5,
                      "attention.clamp_kqv": c.attn_config.clip_qkv, "attention.max_alibi_bias": float(c.attn_config.alibi_bias_max)},
    "starcoder": lambda c: {"feed_forward_length": 4 * c.hidden_size},
    "lfm2": lfm2_keys, "lfm2moe": lambda c: lfm2_keys(c) | {"leading_dense_block_count": c.num_dense_layers},
    "deepseek2": latent_keys, "mistral4": latent_keys, "minicpm3": old_latent_keys,
    "jais2": lambda c: {"attention.layer_norm_epsilon": c.layer_norm_eps},
    "minimax-m2": lambda c: {"expert_feed_forward_length": c.intermediate_size},
    "muse-glimmer": lambda c: {"logit_scale": c.output_multiplier},
    "glm4moe": lambda c: {"nextn_predict_layers": 1, "block_count": 5} if getattr(c, "num_mtp_layers", 0) else {},
    **dict.fromkeys(DELTA, lambda c: {
        "ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim, "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads, "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "full_attention_interval": 4, **({"nextn_predict_layers": 1, "block_count": 5} if getattr(c, "num_mtp_layers", 0) else {})}),
    "mamba": alone_keys, "mamba2": alone_keys, "jamba": jamba_keys,
    "granitehybrid": granite_hybrid_keys, "falcon-h1": lambda c: mamba_keys(c) | {"embedding_scale": None},
    "nemotron_h_moe": nemotron_h_keys, "nemotron_h": lambda c: nemotron_h_keys(c) | dict.fromkeys((
        "expert_used_count", "expert_feed_forward_length", "expert_shared_count", "expert_weights_scale", "expert_weights_norm",
        "expert_group_count", "expert_shared_feed_forward_length")),
    "exaone-moe": lambda c: {"expert_shared_count": c.num_shared_experts, "nextn_predict_layers": 1, "block_count": 5},
}
INSTEAD = {                                                # HF's name where gguf's own table has none
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "block_sparse_moe.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",), "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    "block_sparse_moe.experts.down_proj": ("ffn_down_exps.weight",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",), "self_attn.sinks": ("attn_sinks.weight",),
    "shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down.weight",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",), "mlp.e_score_correction_bias": ("exp_probs_b.bias",),
    "mlp.gate.moe_statics.e_score_correction_bias": ("exp_probs_b.bias",), "mlp.expert_bias": ("exp_probs_b.bias",),
    "mlp.router.gate.weight": ("ffn_gate_inp.weight",), "mlp.gate.wg.weight": ("ffn_gate_inp.weight",),
    "self_attn.gate_proj.weight": ("attn_gate.weight",), "self_attn.query_layernorm.weight": ("attn_q_norm.weight",),
    "feed_forward.router.weight": ("ffn_gate_inp.weight",),
    "feed_forward.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "feed_forward.experts.down_proj": ("ffn_down_exps.weight",), "feed_forward.expert_bias": ("exp_probs_b.bias",),
    "mixer.experts.up_proj": ("ffn_up_exps.weight",), "mixer.experts.down_proj": ("ffn_down_exps.weight",),
    "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "self_attn.key_layernorm.weight": ("attn_k_norm.weight",), "block_sparse_moe.gate.weight": ("ffn_gate_inp.weight",),
    **{f"mlp.{part}.{kind}_proj.weight": (f"ffn_{kind}_shexp.weight",) for part in ("shared_experts", "shared_mlp")
       for kind in ("gate", "up", "down")},
}


def is_tied(model):
    config = model.config
    return (config if hasattr(config, "tie_word_embeddings") else config.text_config).tie_word_embeddings


def delta_as_llama_cpp(name, t, arch, c):
    """What the converter makes of Qwen3-Next's and Qwen3.5's layers: names that gguf knows, heads tiled, decays worked out."""
    K, V, dv = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_value_head_dim
    keys = c.linear_key_head_dim * K

    def tiled(t, width, dim=0):
        if arch == "qwen3next":
            return t
        return t.unflatten(dim, (K, V // K, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith("norm.weight") and "linear_attn" not in name:
        t = t + 1
    if "conv1d" in name:
        t = t.squeeze()
    if "in_proj_qkv." in name or "conv1d" in name:
        t = torch.cat((t[:2 * keys], tiled(t[2 * keys:], dv)))
    if name.endswith("A_log"):
        t = -t.exp()
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        t = tiled(t, 1)
    if "in_proj_z" in name:
        t = tiled(t, dv)
    if "linear_attn.out_proj" in name:
        t = tiled(t, dv, 1)
    name = name.replace("dt_bias", "dt_proj.bias")
    if "in_proj_qkvz" in name:                             # split there: q, k and v of all heads, and z
        n = V // K * dv
        q, k, v, z = t.unflatten(0, (K, -1)).split((c.linear_key_head_dim, c.linear_key_head_dim, n, n), dim=1)
        return [(name.replace("qkvz", "qkv"), torch.cat([p.flatten(0, 1) for p in (q, k, v)])), (name.replace("qkvz", "z"), z.flatten(0, 1))]
    return [(name, t)]


def mamba_as_llama_cpp(name, t, arch, c):
    """What the converter makes of Mamba-2's tensors: decays worked out, vectors as matrices, Falcon-H1's multipliers multiplied in."""
    keys = mamba_keys(c)
    inner, n_group, n_state = (keys[f"ssm.{key}"] for key in ("inner_size", "group_count", "state_size"))
    if arch.startswith("nemotron"):
        name = name.replace("model.", "backbone.")
    if arch == "falcon-h1":
        parts = [inner, inner, n_group * n_state, n_group * n_state, keys["ssm.time_step_rank"]]
        by_part = torch.cat([torch.full((n,), float(by)) for n, by in zip(parts, c.ssm_multipliers)])[:, None]
        factors = {"down_proj": c.mlp_multipliers[1], "gate_proj": c.mlp_multipliers[0], "k_proj": c.key_multiplier * c.attention_in_multiplier,
                   "q_proj": c.attention_in_multiplier, "v_proj": c.attention_in_multiplier, "o_proj": c.attention_out_multiplier,
                   "out_proj": c.ssm_out_multiplier, "in_proj": c.ssm_in_multiplier * by_part, "lm_head": c.lm_head_multiplier,
                   "embed_tokens": c.embedding_multiplier}
        module = name.split(".")[-2]
        t = t * factors.get(module, 1)
    if "conv1d.weight" in name:
        t = t.squeeze()
    if name.endswith("A_log"):
        t = -t.exp()
    if name.endswith((".A_log", ".D")):
        t = t[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        t = t.view(n_group, -1)
    return name.replace("dt_bias", "dt_proj.bias"), t


def mamba1_as_llama_cpp(name, t):
    return name, -t.exp() if name.endswith("A_log") else t.squeeze() if "conv1d.weight" in name else t


DELTA_INSTEAD = {f"linear_attn.{theirs}": (ours,) for theirs, ours in {
    "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight", "in_proj_ba.weight": "ssm_ba.weight", "conv1d.weight": "ssm_conv1d.weight", "A_log": "ssm_a",
    "dt_proj.bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight"}.items()}


def as_llama_cpp(model, arch, split_kv_b=True):
    """(name, tensor) as llama.cpp's converter writes them: split, permuted, transposed, norms of 1 + w."""
    c = getattr(model.config, "text_config", model.config)
    n_head = getattr(c, "num_attention_heads", 1)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // n_head
    known = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
    younger = {"mistral4": known["deepseek2"], "mellum": known["dots1"], "muse-glimmer": known["gemma3"]}                      # than the package
    names = gguf.get_tensor_name_map(known.get(arch, younger.get(arch)), c.num_hidden_layers)
    tensors = model.state_dict().items()
    if arch in DELTA:
        tensors = [pair for name, t in tensors for pair in delta_as_llama_cpp(name, t, arch, c)]
    if arch in MAMBA:
        tensors = [mamba_as_llama_cpp(name, t, arch, c) for name, t in tensors]
    if arch in ("mamba", "jamba"):
        tensors = [mamba1_as_llama_cpp(name, t) for name, t in tensors]
    for name, t in tensors:
        if name == "lm_head.weight" and is_tied(model) or "vis" in name or "projector" in name:
            continue
        name = name.replace("language_model.", "")
        name = name.removeprefix("transformer.") if arch == "bloom" else name
        if arch in PERMUTED and ("q_proj" in name or "k_proj" in name):
            t = interleave(t, head_dim)
        if arch == "glm4" and hasattr(model.config, "text_config") and ("q_proj" in name or "k_proj" in name):
            n = int(head_dim * c.rope_parameters["partial_rotary_factor"])             # for axes halves turn, not neighbours
            order = torch.cat((torch.arange(0, n, 2), torch.arange(1, n, 2), torch.arange(n, head_dim)))
            t = t.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
        if arch.startswith("gemma") and "norm" in name:
            t = t + 1
        if arch == "nemotron" and name.endswith("norm.weight") or arch == "muse-glimmer" and name.endswith("layernorm.weight"):
            t = t + 1
        if arch in BY_GROUP and "query_key_value" in name:
            K = c.num_kv_heads if getattr(c, "new_decoder_architecture", False) else 1 if arch == "falcon" else c.num_attention_heads
            q, k, v = t.unflatten(0, (K, -1, head_dim)).split((c.num_attention_heads // K, 1, 1), dim=1)
            t = torch.cat([part.flatten(0, 2) for part in (q, k, v)])
        if arch == "gpt2" and t.ndim == 2 and ".h." in name:
            t = t.T
        if arch == "gpt-oss" and t.ndim == 3:
            t = t.transpose(1, 2)                          # [E, in, out] in the checkpoint
        *prefix, inner = name.split(".", 3)
        into = (INSTEAD | DELTA_INSTEAD).get(inner, ())
        if "act_fn" in name:                               # lists, not tensors
            continue
        if inner.endswith("e_score_correction_bias"):
            t = t.flatten()
        if inner == "conv.conv.weight":
            t = t.squeeze(1)
        if inner == "self_attn.kv_b_proj.weight" and split_kv_b and arch != "minicpm3":
            k, v = t.unflatten(0, (c.num_attention_heads, -1)).split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
            yield f"blk.{prefix[2]}.attn_k_b.weight", k.transpose(1, 2).contiguous().numpy()
            yield f"blk.{prefix[2]}.attn_v_b.weight", v.contiguous().numpy()
            continue
        if arch == "stablelm" and "layernorm.norms." in inner:         # all heads' in one
            if ".0." in inner:
                head = dict(model.state_dict())
                heads = [head[name.replace(".0.weight", f".{i}.weight")] for i in range(c.num_attention_heads) if name.replace(
                    ".0.weight", f".{i}.weight") in head]
                yield f"blk.{prefix[2]}.attn_{inner[10]}_norm.weight", torch.stack(heads).numpy()
            continue
        if "shared_mlp" in inner and (arch == "granitemoe" or arch == "granitehybrid" and c.num_local_experts):
            into = tuple(n.replace(".weight", "_shexp.weight") for n in into)
        if arch == "muse-glimmer" and inner == "self_attn.q_proj.weight":
            for kind, factor in (("q", c.qk_scale_factor), ("k", 1.0)):
                yield f"blk.{prefix[2]}.attn_{kind}_norm.weight", np.full(head_dim, factor, np.float32)
        if arch == "gpt-oss" and len(into) == 2:
            pieces = (t[:, ::2], t[:, 1::2])               # gate and up take turns
        else:
            pieces = t.chunk(max(len(into), 1), dim=-2) if into and t.ndim > 1 else (t,)
        theirs = [f"blk.{prefix[2]}.{n}" for n in into] or [names.get_name(name, (".weight", ".bias"))]
        yield from zip(theirs, (p.contiguous().numpy() for p in pieces))


def is_quantized(name, t):
    """What llama.cpp quantizes: matrices, but no convolutions, decays, skips and norms of Mamba layers."""
    return t.ndim >= 2 and t.shape[-1] % 32 == 0 and "ssm_norm" not in name


def write_gguf(model, arch, path, kind="F32", more=(), vocabulary=(), split_kv_b=True, tokenizer_of=None):
    c, w = getattr(model.config, "text_config", model.config), gguf.GGUFWriter(str(path), arch)
    n_head = getattr(c, "num_attention_heads", 1)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // n_head
    if arch in LATENT:
        head_dim = c.qk_rope_head_dim
    values = {key: getattr(c, attribute, None) for key, attribute in KEYS.items()} | OTHER_KEYS.get(arch, lambda c: {})(c)
    if arch == "deepseek2" and not split_kv_b:
        values |= latent_keys(c) | {"attention.head_count_kv": c.num_attention_heads, "attention.key_length_mla": None,
                                    "attention.value_length_mla": None, "attention.value_length": c.v_head_dim, **old_latent_keys(c)}
    for key, value in values.items():
        if value is not None:
            add = {bool: w.add_bool, float: w.add_float32, str: w.add_string, list: w.add_array}.get(type(value), w.add_uint32)
            add(f"{arch}.{key}", value)
    if "mrope_section" in (getattr(c, "rope_parameters", None) or {}) and arch.startswith("glm4"):
        w.add_rope_dimension_sections([*c.rope_parameters["mrope_section"], 0])
    if arch == "apertus":
        for alpha, add in (("alpha_p", w.add_xielu_alpha_p), ("alpha_n", w.add_xielu_alpha_n)):
            add([getattr(layer.mlp.act_fn, alpha).item() for layer in model.model.layers])
    if arch == "exaone-moe":                               # its head that drafts, as a layer more
        w.add_tensor("blk.4.nextn.eh_proj.weight", np.ones((4, 4), np.float32))
    if head_dim != c.hidden_size // n_head and arch not in (*LATENT, *MAMBA_ALONE) and "attention.key_length" not in values:
        w.add_key_length(head_dim)
    n_expert = getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None)
    if n_expert and arch != "nemotron_h":
        w.add_expert_count(n_expert)
    if arch == "gpt-oss":
        w.add_expert_feed_forward_length(c.intermediate_size)
    if arch == "starcoder2":
        w.add_layer_norm_eps(c.norm_epsilon)
    if getattr(c, "sliding_window", None) and not arch.startswith(("qwen", "smollm", "dots1")):
        w.add_sliding_window(c.sliding_window)
        if arch in ("exaone4", "mellum", "exaone-moe", "muse-glimmer"):
            w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    rope = getattr(c, "rope_parameters", None) or dict(rope_type="default", rope_theta=1e4)
    if arch in ("gemma3", "mellum"):
        w.add_float64(f"{arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if rope.get("alpha"):                                  # the base that it makes
        rope = dict(rope_type="default", rope_theta=rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
    if arch not in ("gpt2", "bloom", "mpt", "starcoder", "jamba", *MAMBA_ALONE):
        w.add_rope_freq_base(rope["rope_theta"])
        w.add_rope_dimension_count(int(head_dim * (arch not in LATENT and rope.get("partial_rotary_factor") or 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        w.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        w.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
        original = rope["original_max_position_embeddings"]
        scale = np.log(c.max_position_embeddings / original) / np.log(original)
        w.add_rope_scaling_attn_factors(rope.get("attention_factor") or float(np.sqrt(1 + scale)))
    w.add_uint32("tokenizer.ggml.eos_token_id", 3)
    w.add_uint32("tokenizer.ggml.eot_token_id", 5)
    kind = gguf.GGMLQuantizationType[kind]
    for name, t in as_llama_cpp(model, arch, split_kv_b):
        quantize = kind.name != "F32" and is_quantized(name, t)
        w.add_tensor(name, gguf.quantize(t, kind) if quantize else t,
                     raw_dtype=kind if quantize else gguf.GGMLQuantizationType.F32)
    if vocabulary:
        w.add_tokenizer_model("gpt2")
        w.add_token_list(list(vocabulary))
    if tokenizer_of:
        write_tokenizer(w, tokenizer_of, c.vocab_size)
    for name in more:
        w.add_tensor(name, more[name])
    if rope["rope_type"] == "llama3":
        from model import Rope
        scaled = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 32).frequencies(head_dim)
        w.add_tensor("rope_freqs.weight", (Rope(5e5).frequencies(head_dim) / scaled).numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_tokenizer(w, name, n):
    """The tokenizer that the converter writes for this variant: its kind and its `pre`, with few merges."""
    pre = next((pre for pre, names in PRE.items() if name in names), "default")
    if name in SENTENCEPIECE:
        w.add_tokenizer_model("llama")
        tokens = ["<unk>", "<s>", "<p>", "<e>", "\u2581", "<t>", "a", "b", "ab", *(f"<{i}>" for i in range(n - 9))]
        w.add_token_types([2, 3, 3, 3, 1, 3, *[1] * (n - 6)])
        w.add_token_scores([0.0] * n)
    else:
        w.add_tokenizer_model("gpt2")
        letters = list(bytes_to_unicode().values())[:n - 3]
        tokens = [*letters, "ab", *(f"<|{i}|>" for i in range(n - 1 - len(letters)))]
        w.add_token_types([1] * (len(letters) + 1) + [3] * (n - 1 - len(letters)))
        w.add_token_merges(["a b"])
        w.add_bos_token_id(n - 1)
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)


def replace_in(config, **changes):
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def variant(name, **changes):
    """A tiny model of a family with some config values changed."""
    config = tiny.FAMILIES[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    tiny.FAMILIES["variant"] = lambda: config
    try:
        return tiny.make("variant")
    finally:
        del tiny.FAMILIES["variant"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf(families, name, tmp_path):
    _, model = families(name)
    if name == "gemma3_text":                              # a GGUF knows only "every n-th is full" …
        model = variant(name, layer_types=["sliding_attention"] * 5 + ["full_attention"], num_hidden_layers=6,
                        query_pre_attn_scalar=24)          # … and scales by the head's width, but in the 27B
    if name == "gemma2":
        model = variant(name, query_pre_attn_scalar=24)
    if name == "smollm3":                                  # every fourth layer has no RoPE
        model = variant(name, no_rope_layers=[1, 1, 1, 0])
    if name == "qwen2_5_vl":                               # no key of its window
        model = tiny.make("qwen2_vl")
    if name == "cohere2":                                  # every fourth is full, and zero biases are left out
        model = variant(name, attention_bias=False, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    if name == "afmoe":
        model = variant(name, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    if name == "dots1":                                    # no key of its window
        model = variant(name, layer_types=["full_attention"] * 4)
    if name in ("deepseek_v3", "deepseek_v2-lite"):        # no bias, and one of YaRN's scales
        model = variant(name, attention_bias=False, rope_parameters=dict(tiny.YARN, mscale=0.9, mscale_all_dim=0.9))
    if name == "lfm2_moe":                                 # no key of this
        model = variant(name, routed_scaling_factor=1.0)
    if name == "minicpm3":                                 # no keys of these
        model = variant(name, scale_emb=12, dim_model_base=256, original_max_position_embeddings=128)
    if name == "mistral4":                                 # nor of this
        model = variant(name)
        model.config.text_config.rope_parameters["llama_4_scaling_beta"] = 0.0
    if name in ("falcon-new", "falcon-one_norm"):          # no key of another width, no bias
        model = variant(name, ffn_hidden_size=256, bias=False)
    if name in ("bamba", "jamba-dense"):                   # llama.cpp has no bias there
        model = variant(name, mamba_proj_bias=False)
    if name == "falcon_mamba":                             # no key of this
        model = variant(name, mixer_rms_eps=1e-6)
    if name in ("qwen2_moe", "qwen3_moe"):                 # every layer is a mixture
        model = variant(name, mlp_only_layers=[], decoder_sparse_step=1)
    if ARCHITECTURES[name] in DELTA:                       # every fourth layer has full attention
        kinds = dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
        nested = name in ("qwen3_5", "qwen3_5_moe")
        if nested:
            kinds = dict(text_config=replace_in(tiny.FAMILIES[name]().text_config, **kinds))
        model = variant(name, **kinds) if nested else variant(name, **kinds, mlp_only_layers=[])
    path = write_gguf(model, ARCHITECTURES[name], tmp_path / "model.gguf", tokenizer_of=None if name in NO_TOKENIZER else name)
    source = read_checkpoint(tmp_path)                    # the directory's only GGUF
    assert source.eos_ids == [3, 5] and source.path == path
    if name not in NO_TOKENIZER:
        tokenizer = tokenizer_files.load_for(source)
        ids = tokenizer.encode("ab", bos=False)
        assert [tokenizer.piece(i) for i in ids][-1] == "ab" and tokenizer.decode(ids) == "ab"
        assert tokenizer.n_vocab == source.cfg.vocab_size
    assert source.cfg.tied == is_tied(model)
    close(our_logits(path, tokens()), tiny.logits(model, tokens()))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["granitemoehybrid-mamba", "falcon_h1", "nemotron_h-latent", "mamba", "mamba2", "jamba"])
def test_quantized_gguf_with_mamba_layers(families, name, kind, tmp_path, monkeypatch):
    """The logits of the numbers in it, and of its four bits kept."""
    (_, model), arch, q = families(name), ARCHITECTURES[name], gguf.GGMLQuantizationType[kind]
    path = write_gguf(model, arch, tmp_path / "quantized.gguf", kind)
    numbers = [(n, gguf.dequantize(gguf.quantize(t, q), q) if is_quantized(n, t) else t) for n, t in as_llama_cpp(model, arch)]
    monkeypatch.setattr(sys.modules[__name__], "as_llama_cpp", lambda *_: numbers)
    expected = our_logits(write_gguf(model, arch, tmp_path / "plain.gguf"), tokens())
    close(our_logits(path, tokens()), expected)
    if kind == "Q4_0":
        low = load_model(quantized(read_checkpoint(path), "int4", 32, "none"), torch.float32, "cpu")
        low.setup_cache(0, 24)
        found = low(tokens(), torch.arange(24), logits_to_keep=24)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.std().item())


def test_what_a_gguf_with_mamba_layers_may_not_say():
    sizes = {f"nemotron_h.ssm.{key}": 8 for key in ("inner_size", "time_step_rank", "conv_kernel", "state_size", "group_count")}
    tensors = dict.fromkeys(("blk.0.ssm_in.weight", "blk.1.attn_q.weight", "blk.1.ffn_gate_inp.weight"))
    for change, message in ((dict(), "layer 1 has attention and moe, expected one of mamba, attention, moe, mlp"),
                            ({"nemotron_h.ssm.state_size": 0}, "'nemotron_h.ssm.state_size' is 0, expected a whole number above 0"),
                            ({"nemotron_h.ssm.group_count": None}, "'nemotron_h.ssm.group_count' is None"),
                            ({"nemotron_h.ssm.inner_size": 9}, "ssm.inner_size .9. is not a multiple of ssm.time_step_rank .8.")):
        with pytest.raises(ValueError, match=message):
            mamba_config("nemotron_h", dict(num_hidden_layers=3), sizes | change, tensors)
    with pytest.raises(ValueError, match="layer 1 has nothing"):
        mamba_config("nemotron_h", dict(num_hidden_layers=2), sizes, {"blk.0.ssm_in.weight": None})


def test_gguf_before_kv_b_was_split(families, tmp_path):
    model = variant("deepseek_v3", attention_bias=False)
    path = write_gguf(model, "deepseek2", tmp_path / "model.gguf", split_kv_b=False)
    close(our_logits(path, tokens()), tiny.logits(model, tokens()))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_quantization_types(families, kind, tmp_path):
    _, model = families("llama2")
    source = read_checkpoint(write_gguf(model, "llama", tmp_path / "model.gguf", kind))
    kind = gguf.GGMLQuantizationType[kind]
    w = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    expected = gguf.dequantize(gguf.quantize(w, kind), kind)
    lazy = source.tensors["layers.1.ffn.down.weight"]
    assert np.array_equal(lazy.read_rows(0, 64).float().numpy(), expected)
    assert np.array_equal(lazy.read_rows(7, 9).float().numpy(), expected[7:9])
    loaded = load_model(source, torch.bfloat16, "cpu")
    assert torch.equal(loaded.layers[1].ffn.down.weight, torch.from_numpy(expected).bfloat16())


def test_split_gguf(families, tmp_path):
    from test_errors import split_gguf
    _, model = families("qwen2")
    whole = write_gguf(model, "qwen2", tmp_path / "whole.gguf")
    first, second = split_gguf(whole, tmp_path)
    assert torch.equal(our_logits(first, tokens()), our_logits(whole, tokens()))
    second.unlink()
    with pytest.raises(FileNotFoundError, match="part 2 of 2 is missing"):
        read_checkpoint(first)


def test_gguf_becomes_a_pth_that_works_alone(tmp_path):
    from conftest import SMOLLM2

    from gpt_faster.text import tokenizer_files
    source = read_checkpoint(SMOLLM2)
    tokenizer = tokenizer_files.load(source.tokenizer)
    save_checkpoint(source, tmp_path / "model.pth", tokenizer.state())
    again = read_checkpoint(tmp_path / "model.pth")
    other = tokenizer_files.load(again.tokenizer)
    assert other.encode("Hello 123") == tokenizer.encode("Hello 123")
    assert other.chat_template == tokenizer.chat_template and "im_start" in other.chat_template
    assert again.cfg == source.cfg and again.eos_ids == source.eos_ids == [2, 0, 4]
    a, b = (load_model(s, torch.bfloat16, "cpu") for s in (source, again))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_gguf_with_vision_tensors(families, tmp_path):
    """Ollama keeps Gemma's vision tower in the same file, under names that end alike."""
    _, model = families("qwen2")
    path = write_gguf(model, "qwen2", tmp_path / "model.gguf",
                      more={"v.blk.0.attn_q.weight": np.ones((4, 4), np.float32), "mm.input": np.ones(3, np.float32)})
    close(our_logits(path, tokens()), tiny.logits(model, tokens()))


def test_gguf_end_of_turn(families, tmp_path):
    _, model = families("qwen2")
    path = write_gguf(model, "qwen2", tmp_path / "model.gguf", vocabulary=["a", "<|im_end|>", *"bcdef"])
    assert read_checkpoint(path).eos_ids == [3, 5, 1]


def test_generation_config(families, tmp_path):
    """Its EOS ids join config.json's; its sampling values count where it says that it samples."""
    model = tiny.make("llama2")
    model.config.eos_token_id = 7
    model.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(dict(eos_token_id=[7, 9], do_sample=True, temperature=0.6, top_p=0.9)))
    source = read_checkpoint(tmp_path)
    assert source.eos_ids == [7, 9] and source.defaults == dict(temperature=0.6, top_p=0.9)
    path.write_text(json.dumps(dict(temperature=0.6)))
    assert read_checkpoint(tmp_path).defaults == {}
    path.write_text('{"eos_token_id": [7, 9],, }')         # as some on the Hub
    assert read_checkpoint(tmp_path).eos_ids == [7]
