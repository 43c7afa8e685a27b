"""GGUF models: llama.cpp's metadata and tensor names -> a RawCheckpoint.

Translates metadata keys to config.json keys, for config.py. gguf_file.py reads the file, which
holds config, tensors and tokenizer.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

from checkpoint import LazyTensor, brief, look_up, name_unknown, reading, sampling_values
from gpt_faster.formats.config import Stated, config_from_hf, head_dim
from gpt_faster.formats.families import FAMILIES, stated_folds
from gpt_faster.formats.fold import Folds
from gpt_faster.formats.fp4 import with_gguf_factors
from gpt_faster.formats.gguf_file import read_gguf_parts, what_instead
from gpt_faster.formats.gguf_mamba import (
    ALONE,
    FALCON_H1_NAMES,
    MAMBA1_NAMES,
    MAMBA2_NAMES,
    NEMOTRON_H_NAMES,
    mamba_config,
    renumbered,
)
from gpt_faster.formats.known_keys import GGUF
from gpt_faster.formats.lazy import constant
from gpt_faster.formats.mtp import MTP_HEAD_NAMES, has_experts, mtp_head_config, split_mtp_head
from gpt_faster.formats.names import GGUF_DELTA_NAMES, Fused
from gpt_faster.formats.raw_checkpoint import RawCheckpoint
from gpt_faster.formats.schema import check_keys, is_number
from gpt_faster.layers.mtp_head import MTPHead
from gpt_faster.text.end_tokens import gguf_end_ids

GGUF_NAMES = {
    "token_embd": "embed", "position_embd": "pos_embed", "output_norm": "norm", "output": "head",
    "token_embd_norm": "embed_norm", "attn_gate": "attn.gate", "exp_probs_b": "ffn.choice_bias",
    "exp_probs_b.bias": "ffn.choice_bias",
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "post_attention_norm": "post_attn_norm", "post_ffw_norm": "post_ffn_norm",
    "attn_q": "attn.wq", "attn_k": "attn.wk", "attn_v": "attn.wv", "attn_output": "attn.wo",
    "attn_qkv": Fused(("attn.wq", "attn.wk", "attn.wv")),
    "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm",
    "attn_q_a": "attn.wq_a", "attn_q_a_norm": "attn.q_a_norm", "attn_q_b": "attn.wq_b",
    "attn_kv_a_mqa": "attn.wkv_a", "attn_kv_a_norm": "attn.kv_a_norm", "attn_kv_b": "attn.wkv_b",
    "attn_k_b": "attn.wk_b", "attn_v_b": "attn.wv_b",
    "attn_sinks.weight": "attn.attend.sinks", "ffn.activation.alpha_p": "ffn.activation.alpha_p",
    "ffn.activation.alpha_n": "ffn.activation.alpha_n",
    "ffn_gate": "ffn.gate", "ffn_up": "ffn.up", "ffn_down": "ffn.down",
    "ffn_gate_inp": "ffn.router", "ffn_gate_exps": "ffn.gate", "ffn_up_exps": "ffn.up",
    "ffn_down_exps": "ffn.down", "ffn_gate_up_exps": Fused(("ffn.gate", "ffn.up")),
    "ffn_gate.*": "ffn.gate", "ffn_up.*": "ffn.up",
    "ffn_down.*": "ffn.down", "ffn_gate_shexp": "ffn.shared.gate", "ffn_up_shexp": "ffn.shared.up",
    "ffn_down_shexp": "ffn.shared.down", "ffn_gate_inp_shexp": "ffn.shared_expert_gate",
}
GGUF_KEYS = {                                      # config.json key: metadata key after "llama."
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base", "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window", "clip_qkv": "attention.clamp_kqv",
    "alibi_bias_max": "attention.max_alibi_bias", "use_parallel_residual": "use_parallel_residual",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "routed_scaling_factor": "expert_weights_scale",
    "moe_latent_size": "moe_latent_size", "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank",
    "full_attention_interval": "full_attention_interval",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size", "linear_conv_kernel_dim": "ssm.conv_kernel",
}
GGUF_ROPE_KEYS = {                                 # rope_parameters: after "llama.rope.scaling."
    "rope_type": "type", "factor": "factor", "attention_factor": "attn_factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}
GGUF_FAMILIES = {                                  # architecture: model_type
    "llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "phi3": "phi3", "smollm3": "smollm3", "olmo2": "olmo2", "olmoe": "olmoe", "granite": "granite",
    "granitemoe": "granitemoe", "gpt-oss": "gpt_oss", "gpt2": "gpt2", "qwen2vl": "qwen2_vl_text",
    "qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text", "mellum": "mellum",
    "seed_oss": "seed_oss", "exaone": "exaone", "exaone4": "exaone4", "starcoder2": "starcoder2",
    "arcee": "arcee", "ernie4_5": "ernie4_5", "glm4": "glm4", "gptneox": "gpt_neox", "phi2": "phi",
    "command-r": "cohere", "cohere2": "cohere2", "falcon": "falcon", "stablelm": "stablelm",
    "nemotron": "nemotron", "apertus": "apertus", "olmo": "olmo", "mistral3": "ministral3",
    "hunyuan-dense": "hunyuan_v1_dense", "hunyuan-moe": "hunyuan_v1_moe", "afmoe": "afmoe",
    "ernie4_5-moe": "ernie4_5_moe", "bloom": "bloom", "mpt": "mpt", "starcoder": "gpt_bigcode",
    "jais2": "jais2", "glm4moe": "glm4_moe", "dots1": "dots1", "exaone-moe": "exaone_moe",
    "minimax-m2": "minimax_m2", "muse-glimmer": "muse_glimmer_text", "deepseek2": "deepseek_v3",
    "minicpm3": "minicpm3", "mistral4": "mistral4", "gemma4": "gemma4_text", "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next", "granitehybrid": "granitemoehybrid", "falcon-h1": "falcon_h1",
    "nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h", "mamba": "mamba",
    "mamba2": "mamba2", "jamba": "jamba",
}
GGUF_INTERLEAVED = (                               # RoPE rotates adjacent pairs
    "llama", "smollm3", "granite", "granitemoe", "arcee", "ernie4_5", "glm4", "command-r",
    "cohere2", "olmo", "mistral3", "ernie4_5-moe", "muse-glimmer", "deepseek2", "mistral4",
    "granitehybrid")
GGUF_MAMBA = (*ALONE, "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "jamba")
GGUF_TILED_V_HEADS = ("qwen35", "qwen35moe")       # tiled DeltaNet value heads
GGUF_LFM2_NAMES = {
    "token_embd_norm": "norm", "shortconv.out_proj": "attn.wo",
    "shortconv.conv.weight": "attn.taps", "shortconv.conv.bias": "attn.taps_bias",
    "shortconv.in_proj": Fused(("attn.wb", "attn.wc", "attn.wx"), equal=True),
}
GGUF_ARCH_NAMES = {                                 # names that differ by architecture
    "phi3": {"ffn_up": Fused(("ffn.gate", "ffn.up"))},
    "gpt-oss": {"post_attention_norm": "ffn_norm"},
    "seed_oss": {"post_attention_norm": "ffn_norm"},
    "glm4": {"ffn_up": Fused(("ffn.gate", "ffn.up"))},
    "glm4moe": {"post_attention_norm": "ffn_norm"},
    "lfm2": GGUF_LFM2_NAMES, "lfm2moe": GGUF_LFM2_NAMES,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), GGUF_DELTA_NAMES),
    "mamba": MAMBA1_NAMES, "jamba": MAMBA1_NAMES, "mamba2": MAMBA2_NAMES,
    "granitehybrid": MAMBA2_NAMES, "falcon-h1": FALCON_H1_NAMES, "nemotron_h": NEMOTRON_H_NAMES,
    "nemotron_h_moe": NEMOTRON_H_NAMES,
}
GEMMA4_NAMES = {
    "layer_output_scale.weight": "end.scale", "inp_gate": "end.gate", "proj": "end.down",
    "post_norm": "end.norm", "per_layer_token_embd": "per_layer.embed",
    "per_layer_model_proj": "per_layer.project", "per_layer_proj_norm": "per_layer.norm",
}
GEMMA4_MOE_NAMES = GEMMA4_NAMES | {                # the dense layer is the shared expert
    "ffn_gate": "ffn.shared.gate", "ffn_up": "ffn.shared.up", "ffn_down": "ffn.shared.down",
    "ffn_norm": "ffn.shared_norm", "ffn_gate_inp.scale": "ffn.router_norm.weight",
    "ffn_down_exps.scale": "ffn.expert_scale", "pre_ffw_norm_2": "ffn.norm",
    "post_ffw_norm_1": "ffn.post_shared_norm", "post_ffw_norm_2": "ffn.post_norm",
}
NOT_ALONE = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
PER_LAYER_KEYS = ("num_key_value_heads", "intermediate_size")
METADATA_TYPES = (                                 # keys without an equivalent in config.json
    ("a whole number", lambda v: type(v) is int and 0 <= v < 1 << 22,
     "nextn_predict_layers rope.dimension_count attention.key_length_mla expert_gating_func "
     "attention.value_length_mla attention.value_length attention.key_length_swa "
     "attention.shared_kv_layers ssm.inner_size embedding_length_per_layer_input "
     "shortconv.l_cache"),
    ("true or false", lambda v: type(v) is bool, "rope.scaling.finetuned ssm.dt_b_c_rms"),
    ("a number", is_number, "attention.temperature_scale rope.scaling.yarn_log_multiplier"),
    ("whole numbers", lambda v: type(v) is int or isinstance(v, list) and all(
        type(one) in (int, bool) for one in v), "attention.sliding_window_pattern"),
    ("a list of truth values", lambda v: isinstance(v, list) and all(
        type(one) is bool for one in v), "attention.recurrent_layers"),
)
FALCON_NORMS = {"attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"}   # if it has two norms


class Tensors(dict):
    """The file's tensors by name."""

    def __missing__(self, name):
        raise ValueError(f"tensor {name} is missing")

    def vector(self, name: str) -> list[float]:
        if len(self[name].shape) != 1:
            raise ValueError(f"{name} has shape {list(self[name].shape)}, expected a vector")
        return self[name].whole().tolist()


def config_from_gguf(metadata: dict, tensors: Tensors) -> dict:
    """GGUF metadata -> a config.json. ValueError names the key or tensor that is wrong."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in GGUF_FAMILIES:
        raise ValueError(f"architecture {brief(arch)} is not supported "
                         f"(supported: {', '.join(GGUF_FAMILIES)})")
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise ValueError("token_embd.weight is missing or not a matrix")
    c = {hf: metadata[f"{arch}.{key}"] for hf, key in GGUF_KEYS.items()
         if f"{arch}.{key}" in metadata}
    if arch in ALONE:                              # they state 0 of these
        c = {key: value for key, value in c.items() if key not in NOT_ALONE}
    check_keys({key: value for key, value in c.items()     # some may be per-layer lists
                if not (key in PER_LAYER_KEYS and isinstance(value, list))})
    check_metadata(arch, metadata)
    check_supported(arch, metadata)
    c = Stated(c)
    c.setdefault("rms_norm_eps", metadata.get(f"{arch}.attention.layer_norm_epsilon", 1e-5))
    dim, n_head = c.get("hidden_size"), c.get("num_attention_heads")
    if type(dim) is int and type(n_head) is int and n_head:            # before the family's default
        c.setdefault("head_dim", dim // n_head)
    c["model_type"] = GGUF_FAMILIES[arch]
    c["vocab_size"] = tensors["token_embd.weight"].shape[0]
    c["tie_word_embeddings"] = "output.weight" not in tensors
    c["attention_bias"] = any(f"blk.0.{q}.bias" in tensors for q in ("attn_q", "attn_qkv"))
    c["use_bias"] = c["attention_bias"]
    c["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if shared := [t.shape[0] for name, t in tensors.items() if "ffn_up_shexp" in name]:
        c["shared_expert_intermediate_size"] = shared[0]   # some converters write another
    if arch == "llama" and c.get("num_experts"):
        c["model_type"] = "mixtral"
    elif arch == "llama" and c.get("sliding_window"):
        c["model_type"] = "mistral"
    elif arch == "granitemoe" and c.get("shared_expert_intermediate_size"):
        c["model_type"] = "granitemoeshared"
    c["shared_intermediate_size"] = c.get("shared_expert_intermediate_size", 0)
    c["num_hidden_layers"] = c.get("num_hidden_layers", 0) - metadata.get(
        f"{arch}.nextn_predict_layers", 0)         # block_count includes the MTP head
    c.update(_arch_overrides(arch, c, metadata, tensors))
    if arch == "olmo2" and c.get("sliding_window"):
        raise ValueError("Olmo 3 GGUF files are not supported: use the original model")
    c["norm_topk_prob"] = metadata.get(f"{arch}.expert_weights_norm",
                                       arch not in ("qwen2moe", "olmoe", "deepseek2",
                                                    "mistral4", "jamba"))
    if arch in ("gemma2", "gemma3"):               # as llama.cpp: only the 27B differs
        large = c.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[arch]
        c["query_pre_attn_scalar"] = (c["hidden_size"] // c["num_attention_heads"] if large
                                      else c.get("head_dim", 256))
        c["sliding_window_pattern"] = metadata.get(f"{arch}.attention.sliding_window_pattern", 6)

    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list):                  # True: sliding
        c["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    if arch == "exaone4":
        c.setdefault("sliding_window", None)
    if c.get("num_experts"):
        c["mlp_layer_types"] = ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "dense"
                                for i in range(c["num_hidden_layers"])]

    scaling = {hf: metadata[f"{arch}.rope.scaling.{key}"] for hf, key in GGUF_ROPE_KEYS.items()
               if f"{arch}.rope.scaling.{key}" in metadata}
    scaling.setdefault("factor", metadata.get(f"{arch}.rope.scale_linear"))    # its old name
    is_scaled = scaling["factor"] not in (None, 0)
    if scaling.get("rope_type", "linear" if is_scaled else "none") == "none":
        scaling["rope_type"] = "default"
    elif is_scaled:                                # without a type linear, as in llama.cpp
        scaling.setdefault("rope_type", "linear")
    factors = {name: tensors.vector(f"rope_{name}.weight")
               for name in ("freqs", "factors_short", "factors_long")
               if f"rope_{name}.weight" in tensors}
    if "freqs" in factors:                         # Llama 3.1's scaling, one factor per frequency
        scaling["divisors"] = factors["freqs"]
    if ("factors_long" in factors) != ("factors_short" in factors):
        raise ValueError("rope_factors_long and rope_factors_short: one of the two is missing")
    if "factors_long" in factors:
        scaling.update(rope_type="longrope", short_factor=factors["factors_short"],
                       long_factor=factors["factors_long"])
    if growth := metadata.get(f"{arch}.attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = growth
    multiplier = metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier")
    if multiplier is not None and c.get("kv_lora_rank"):   # divided by 10 on disk; no mscale
        scaling.update(mscale=10 * multiplier, mscale_all_dim=10 * multiplier)
    elif multiplier is not None:
        scaling.update(mscale=1.0, mscale_all_dim=multiplier)
    if arch == "gpt-oss":                          # gpt-oss's ramp is not rounded; GGUF has no key
        scaling["truncate"] = False
    c.setdefault("rope_parameters", scaling)
    rope_dim = metadata.get(f"{arch}.rope.dimension_count")
    # latent attention has its own keys for this; Gemma 4 has two head sizes
    if rope_dim and arch != "gemma4" and not c.get("kv_lora_rank"):
        c["partial_rotary_factor"] = rope_dim / max(1, head_dim(c))
    return c


def check_metadata(arch: str, metadata: dict) -> None:
    """Check the keys that check_keys() does not cover. ValueError names one of a wrong type."""
    for what, is_one, keys in METADATA_TYPES:
        for key in keys.split():
            value = metadata.get(f"{arch}.{key}")
            if value is not None and not is_one(value):
                raise ValueError(f"'{arch}.{key}' is {brief(value)}, expected {what}")


def check_supported(arch: str, metadata: dict) -> None:
    """ValueError names a key that asks for something that this model does not implement."""
    own = {key.replace(f"{arch}.", "{arch}.", 1): value for key, value in metadata.items()}
    try:
        GGUF.check(own)
    except ValueError as e:
        raise ValueError(str(e).replace("{arch}", arch)) from None
    latent = own.get("{arch}.moe_latent_size")
    if latent and arch != "nemotron_h_moe":
        raise ValueError(f"'{arch}.moe_latent_size' is {brief(latent)}, which is not supported")
    if own.get("{arch}.attention.causal") is False:
        raise ValueError(f"'{arch}.attention.causal' is false: a bidirectional model cannot "
                         "generate text")
    length = own.get("{arch}.attention.temperature_length")
    original = own.get("{arch}.rope.scaling.original_context_length")
    if own.get("{arch}.attention.temperature_scale") and length not in (None, 0, original):
        raise ValueError(f"'{arch}.attention.temperature_length' is {brief(length)}, only the "
                         "original context length is supported")


def name_unknown_keys(path: Path, arch: str, metadata: dict) -> None:
    own = {key.replace(f"{arch}.", "{arch}.", 1): key for key in metadata}
    name_unknown(path, [own[key] for key in GGUF.unknown(own)])


GGUF_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
                 "penalty_repeat": "repetition_penalty"}       # after "general.sampling."


def gguf_defaults(path: Path, metadata: dict) -> dict:
    """The sampling parameters that the file recommends, as llama.cpp applies them."""
    prefix = "general.sampling."
    stated = {key.removeprefix(prefix): value for key, value in metadata.items()
              if key.startswith(prefix)}
    parameters = {ours: stated[key] for key, ours in GGUF_SAMPLING.items() if key in stated}
    defaults = sampling_values(parameters)
    neutral = dict(xtc_probability=0, mirostat=0)          # the others matter only with these
    left_out = [prefix + key for key, value in neutral.items() if stated.get(key, value) != value]
    left_out += [prefix + key for key, ours in GGUF_SAMPLING.items()
                 if ours in parameters and ours not in defaults]
    if left_out:
        print(f"note: ignored in {path}: {', '.join(left_out)}", file=sys.stderr)
    return defaults


def _arch_overrides(arch: str, c: dict, metadata: dict, tensors: dict) -> dict:
    """config.json keys that an architecture's converter omits or stores under another name."""
    scale, n_head = c.get("logits_scaling"), c.get("num_attention_heads")
    has_head_norms = "blk.0.attn_q_norm.weight" in tensors
    if arch in ("command-r", "cohere2"):
        return dict(logit_scale=scale, use_qk_norm=has_head_norms)
    if arch == "muse-glimmer":                     # the converter folds the factor into norms
        return dict(output_multiplier=scale, qk_scale_factor=1.0)
    if arch == "glm4moe":
        width = c.get("intermediate_size", c.get("moe_intermediate_size"))
        return dict(use_qk_norm=has_head_norms, intermediate_size=width)
    if arch == "stablelm":
        return dict(qk_layernorm=has_head_norms)
    if arch == "falcon":
        two = "blk.0.attn_norm_2.weight" in tensors
        n_kv_head = c.get("num_key_value_heads", 1)
        return dict(new_decoder_architecture=two or n_kv_head > 1, num_kv_heads=n_kv_head,
                    num_ln_in_parallel_attn=2 if two else 1)
    if arch == "mpt":
        attention = dict(clip_qkv=c.get("clip_qkv"), alibi_bias_max=c.get("alibi_bias_max"),
                         alibi=bool(c.get("alibi_bias_max")))
        return dict(attn_config=attention, no_bias=not c["mlp_bias"])
    if arch == "starcoder":
        return dict(multi_query=c.get("num_key_value_heads") != n_head)
    if arch in ("lfm2", "lfm2moe"):                # 0 heads: a convolution
        n_kv_head = c.get("num_key_value_heads")
        if not isinstance(n_kv_head, list) or not any(n_kv_head):
            raise ValueError(f"'attention.head_count_kv' is {n_kv_head!r}, expected one number "
                             "per layer")
        return dict(num_key_value_heads=max(n_kv_head), block_auto_adjust_ff_dim=False,
                    conv_L_cache=metadata.get(f"{arch}.shortconv.l_cache"),
                    conv_bias=any("shortconv.in_proj.bias" in name for name in tensors),
                    layer_types=["full_attention" if n else "conv" for n in n_kv_head])
    if arch in ("deepseek2", "minicpm3", "mistral4"):
        return _latent(arch, c, metadata, tensors)
    if arch == "gemma4":
        return _gemma4(c, metadata, tensors)
    if arch in GGUF_MAMBA:
        return mamba_config(arch, c, metadata, tensors)
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        n_value, inner = (metadata.get(f"{arch}.ssm.{key}") for key in (
            "time_step_rank", "inner_size"))
        if not n_value or not inner or inner % n_value:
            raise ValueError(f"ssm.inner_size ({inner}) is not a multiple of ssm.time_step_rank "
                             f"({n_value})")
        is_recurrent = metadata.get(f"{arch}.attention.recurrent_layers")
        kinds = is_recurrent and ["linear_attention" if one else "full_attention"
                                  for one in is_recurrent[:c["num_hidden_layers"]]]
        return dict(linear_value_head_dim=inner // n_value, layer_types=kinds or None)
    if arch == "afmoe":                            # as llama.cpp: always scales embeddings
        return dict(mup_enabled=True)
    return {}


def _latent(arch: str, c: dict, metadata: dict, tensors: dict) -> dict:
    """Latent attention (MLA): *_length_mla keys in files with k_b and v_b, else *_length."""
    def width(kind):
        key = f"{arch}.attention.{kind}_length"
        return metadata.get(f"{key}_mla", metadata.get(key, 0))

    rope_dim = metadata.get(f"{arch}.rope.dimension_count", 0)
    v_dim, n_head = width("value"), c.get("num_attention_heads", 1)
    if arch == "minicpm3":                         # its metadata has no v_head_dim
        v_dim = tensors["blk.0.attn_output.weight"].shape[-1] // n_head
    widths = dict(q_lora_rank=c.get("q_lora_rank"), qk_rope_head_dim=rope_dim, v_head_dim=v_dim,
                  qk_nope_head_dim=width("key") - rope_dim, num_key_value_heads=n_head)
    if arch == "minicpm3":
        return dict(widths, rope_interleave=False)
    kind = {}
    if arch == "deepseek2":                        # expert_gating_func 2: sigmoid router
        is_sigmoid = metadata.get(f"{arch}.expert_gating_func") == 2
        kind = dict(model_type="deepseek_v3" if is_sigmoid else "deepseek_v2")
        if not c.get("num_experts"):
            kind = dict(model_type="youtu")
        elif metadata.get(f"{arch}.expert_weights_norm") and not is_sigmoid:
            kind = dict(model_type="mistral4")     # converted from Mistral's own format
    grouped = (c.get("n_group") or 1) > 1 and kind.get("model_type") == "deepseek_v2"
    return dict(widths, **kind, n_group=c.get("n_group", 1), topk_group=c.get("topk_group", 1),
                topk_method="group_limited_greedy" if grouped else "greedy")


def _gemma4(c: dict, metadata: dict, tensors: dict) -> dict:
    """Head sizes, key/value heads and FFN widths by layer; RoPE of both attention types."""
    n, get = c["num_hidden_layers"], lambda key: metadata.get(f"gemma4.{key}")
    slides = get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) < n or True not in slides[:n]:
        raise ValueError("'gemma4.attention.sliding_window_pattern' is not a list with one entry "
                         "per layer, at least one true")
    stated = (c.get("num_key_value_heads"), c.get("intermediate_size"))
    if any(isinstance(value, list) and len(value) < n for value in stated):
        raise ValueError("'attention.head_count_kv' or 'feed_forward_length' has fewer than "
                         f"{n} entries, one per layer")
    kv, ffn = ([value[i] if isinstance(value, list) else value for i in range(n)]
               for value in stated)
    widths = [get("attention.key_length_swa") if one else get("attention.key_length")
              for one in slides]
    has_keys = range(n - (get("attention.shared_kv_layers") or 0))
    table = tensors.get("per_layer_token_embd.weight")
    divisors = tensors.vector("rope_freqs.weight")
    divisors = [math.inf if d > 1e29 else d for d in divisors]         # not rotated
    return dict(
        head_dim=get("attention.key_length_swa"), num_key_value_heads=kv[slides.index(True)],
        intermediate_size=ffn[0], layer_types=None,
        per_layer_config={str(i): dict(head_dim=widths[i], num_key_value_heads=kv[i],
                                       intermediate_size=ffn[i]) for i in range(n)},
        attention_k_eq_v=any(f"blk.{i}.attn_v.weight" not in tensors for i in has_keys),
        num_kv_shared_layers=n - len(has_keys), enable_moe_block=bool(c.get("num_experts")),
        hidden_size_per_layer_input=get("embedding_length_per_layer_input") or 0,
        vocab_size_per_layer_input=table.shape[0] if table else 0,
        rope_parameters=dict(
            full_attention=dict(rope_theta=get("rope.freq_base"), divisors=divisors),
            sliding_attention=dict(rope_theta=get("rope.freq_base_swa"))))


def _activations(metadata: dict) -> list[LazyTensor]:
    """xIELU's parameters: per-layer lists in the metadata, not tensors."""
    tensors = []
    for name in ("alpha_p", "alpha_n"):
        values = metadata.get(f"xielu.{name}") or []
        if not isinstance(values, list) or not all(map(is_number, values)):
            raise ValueError(f"'xielu.{name}' is {brief(values)}, expected one number per layer")
        for i, value in enumerate(values):
            tensors.append(constant(f"blk.{i}.ffn.activation.{name}", (1,), float(value)))
    return tensors


def read_gguf(path: Path) -> RawCheckpoint:
    """Read a GGUF file; of a split one, any part."""
    path, metadata, tensors = read_gguf_parts(path)
    if what := what_instead(metadata):
        raise ValueError(f"{path}: {what}")
    arch = metadata.get("general.architecture")
    with reading(path):
        tensors += _activations(metadata)
        cfg, c = config_from_hf(config_from_gguf(metadata, Tensors((t.name, t) for t in tensors)))
    name_unknown_keys(path, arch, metadata)
    with_axes = f"{arch}.rope.dimension_sections" in metadata          # GLM-4.1V: not interleaved
    folds = Folds(**{**FAMILIES[c["model_type"]].folds, **stated_folds(c),
                     "norm_offset": 0.0,           # the converter has added it
                     "log_decay": False, "tiled_heads": arch in GGUF_TILED_V_HEADS,
                     "interleaved_rope": arch in GGUF_INTERLEAVED and not with_axes,
                     "interleaved_heads": arch == "granitehybrid"})
    names = {**GGUF_NAMES, **GGUF_ARCH_NAMES.get(arch, {})}
    if arch == "gemma4":
        names |= GEMMA4_MOE_NAMES if c["num_experts"] else GEMMA4_NAMES
    if arch == "falcon" and c["num_ln_in_parallel_attn"] == 2:
        names |= FALCON_NORMS
    with reading(path):
        tensors = with_gguf_factors(tensors, lambda name: look_up(name, names) is not None)
    if c["model_type"] == "nemotron_h":
        tensors = renumbered(tensors, c["nemotron_places"])
    n_mtp = metadata.get(f"{arch}.nextn_predict_layers")
    tensors, head = split_mtp_head(tensors, cfg.n_layer if n_mtp else None)
    tokenizer = {k: v for k, v in metadata.items()
                 if k.startswith("tokenizer.") or k == "general.name"}
    tokenizer["path"] = path                       # for error messages
    raw = RawCheckpoint(path, cfg, tensors, names, eos_ids=gguf_end_ids(metadata),
                        defaults=gguf_defaults(path, metadata), tokenizer=tokenizer, folds=folds)
    if head:
        if not any(t.name == "norm.weight" for t in head):             # shared with the model
            head += [t.derived(t.read_rows, name="norm.weight") for t in tensors
                     if t.name == "output_norm.weight"]
        raw.mtp = replace(raw, cfg=mtp_head_config(cfg, has_experts(head)), tensors=head,
                          names=names | MTP_HEAD_NAMES, kind=MTPHead)
    return raw

