"""What every model family leaves unsaid in its config.json, one row each.

A Llama-like family is one row of FAMILIES. Facts only: config.py reads a config.json with them,
names.py renames with `names`, fold.py folds `norm_offset` into the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from formats.names import (
    GPT2_NAMES,
    GPT_OSS_NAMES,
    MINIMAX_NAMES,
    MIXTRAL_NAMES,
    MOE_NAMES,
    QWEN3_VL_MOE_NAMES,
    SANDWICH_NAMES,
    SIGMOID_NAMES,
    Fused,
)


@dataclass(frozen=True)
class Family:
    """How a model_type differs from Llama."""

    overrides: dict = field(default_factory=dict)      # ModelConfig fields it never states
    moe: dict = field(default_factory=dict)        # and MoEConfig's
    scores: dict = field(default_factory=dict)     # and Scores'
    defaults: dict = field(default_factory=dict)     # config.json keys it may leave out
    names: dict = field(default_factory=dict)      # parameter names that it adds or means otherwise
    norm_offset: float = 0.0                       # norms multiply by offset + weight
    scaled_embed: bool = False                     # embeddings are multiplied by sqrt(dim)
    is_sliding: Callable[[dict, int], bool] = lambda c, i: False   # layer i's attention windowed?
    has_rope: Callable[[dict, int], bool] = lambda c, i: True      # has layer i RoPE at all?
    is_sparse: Callable[[dict, int], bool] = lambda c, i: False    # layer i a mixture of experts?
    plain_local_rope: bool = False                 # windowed layers keep RoPE unstretched
    interleaved_rope: bool = False                 # which turns neighbours, not halves
    key_aliases: dict = field(default_factory=dict)    # config.json keys: what the others call them
    respell: Callable[[dict], dict] = lambda c: c  # what a key alone does not say, in these words


def _qwen_is_sliding(c, i):
    return bool(c.get("use_sliding_window")) and i >= c.get("max_window_layers", 28)


def _qwen_is_sparse(c, i):
    step = c.get("decoder_sparse_step", 1)
    return i not in (c.get("mlp_only_layers") or []) and (i + 1) % step == 0


def _smollm3_has_rope(c, i):
    stated = c.get("no_rope_layers")               # 1 where there is RoPE
    return bool(stated[i] if stated else (i + 1) % c.get("no_rope_layer_interval", 4))


def _exaone4_is_sliding(c, i):
    every = c.get("sliding_window_pattern") or 0   # "LLLG", or the 4 that this means
    if isinstance(every, str):
        return every[i % len(every)] == "L" and i < c["num_hidden_layers"] - 1
    return bool(c.get("sliding_window")) and every > 0 and (i + 1) % every != 0


def _exaone4_has_rope(c, i):                       # beside full attention only where all have that
    kinds = c.get("layer_types")
    is_sliding = kinds[i] == "sliding_attention" if kinds else _exaone4_is_sliding(c, i)
    return is_sliding or not c.get("sliding_window")


def _all_but_every_fourth(c, i):
    return i % 4 != 0


def _is_sparse_after_first(c, i):
    stated = c.get("mlp_layer_types")
    return stated[i] == "sparse" if stated else i >= c.get("first_k_dense_replace", 0)


def _always(c, i):
    return True


def _gpt2_respelled(c):
    return c if c.get("intermediate_size") else {**c, "intermediate_size": 4 * c["hidden_size"]}


def _granite_hybrid_respelled(c):
    """Granite 4.0 without its state-space layers: a Granite."""
    kinds = [{"attention": "full_attention"}.get(kind, kind) for kind in c.get("layer_types") or []]
    if set(kinds) != {"full_attention"}:
        raise ValueError("model_type 'granitemoehybrid' is supported without state-space layers "
                         "(Mamba) only: with them it is another kind of model")
    if c.get("num_experts"):
        raise ValueError("model_type 'granitemoehybrid' is supported without experts only")
    return {**c, "layer_types": kinds, "intermediate_size": c["shared_intermediate_size"]}


def _minimax_respelled(c):
    if "rotary_dim" in c:
        c = {**c, "partial_rotary_factor": c["rotary_dim"] / c["head_dim"]}
    return c


def _biased_respelled(c):
    return {**c, "attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]}


_QWEN = dict(sliding_window=4096)
_QWEN2_VL = Family(
    overrides=dict(qkv_bias=True, o_bias=False),
    defaults=dict(_QWEN, num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5,
                  max_position_embeddings=32768, max_window_layers=80),
    is_sliding=_qwen_is_sliding)
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192)
_GLM = dict(attention_bias=True, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7,
            max_position_embeddings=131072, partial_rotary_factor=0.5)
_SIGMOID = dict(scores="sigmoid", choice_bias=True, shared_gate=False)
_OLMO = dict(pre_norm=False, post_norm=True, qk_norm="wide")

FAMILIES = {
    "llama": Family(),
    "mistral": Family(defaults=dict(sliding_window=4096), is_sliding=_always),
    "mixtral": Family(
        defaults=dict(rope_theta=1e6, num_key_value_heads=8, num_experts=8,
                      num_experts_per_tok=2, max_position_embeddings=131072, rms_norm_eps=1e-5),
        names=MIXTRAL_NAMES, is_sliding=_always, is_sparse=_always),
    "qwen2": Family(overrides=dict(qkv_bias=True, o_bias=False), defaults=_QWEN,
                    is_sliding=_qwen_is_sliding),
    "qwen2_moe": Family(
        overrides=dict(o_bias=False),
        defaults=dict(_QWEN, qkv_bias=True, num_experts=60, num_experts_per_tok=4,
                      moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                      norm_topk_prob=False),
        names=MOE_NAMES, is_sparse=_qwen_is_sparse,
        is_sliding=lambda c, i: (bool(c.get("use_sliding_window")) and i % 2 == 0
                                 and i < c.get("max_window_layers", 28))),
    "qwen3": Family(overrides=dict(qk_norm="head"), defaults=dict(_QWEN, head_dim=128),
                    is_sliding=_qwen_is_sliding),
    "qwen3_moe": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(_QWEN, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
                      moe_intermediate_size=768, norm_topk_prob=False),
        names=MOE_NAMES, is_sparse=_qwen_is_sparse,
        is_sliding=lambda c, i: bool(c.get("use_sliding_window"))),
    "qwen2_vl_text": _QWEN2_VL, "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(num_key_value_heads=32, head_dim=128, rope_theta=5e5,
                      max_position_embeddings=128000)),
    "qwen3_vl_moe_text": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(num_key_value_heads=16, rope_theta=5e5, max_position_embeddings=128000,
                      num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                      tie_word_embeddings=True),
        names=QWEN3_VL_MOE_NAMES, is_sparse=_qwen_is_sparse),
    "mellum": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(num_key_value_heads=4, head_dim=128, sliding_window=1024, num_experts=64,
                      num_experts_per_tok=8, moe_intermediate_size=896,
                      max_position_embeddings=131072, rope_theta=5e5, rope_local_base_freq=1e4),
        names=MOE_NAMES, is_sparse=_is_sparse_after_first),
    "glm4_moe": Family(
        overrides=dict(o_bias=False), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072,
                      partial_rotary_factor=0.5, num_experts=128, num_experts_per_tok=8,
                      moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1),
        names=SIGMOID_NAMES, is_sparse=_is_sparse_after_first),
    "dots1": Family(
        overrides=dict(qk_norm="head"), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=62,
                      moe_intermediate_size=1408, norm_topk_prob=False),
        names=SIGMOID_NAMES, is_sparse=_is_sparse_after_first,
        is_sliding=lambda c, i: i >= c["max_window_layers"]),
    "solar_open": Family(
        moe=_SIGMOID,
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, num_experts=128,
                      max_position_embeddings=131072, num_experts_per_tok=8, n_shared_experts=1,
                      intermediate_size=1280, moe_intermediate_size=1280, rope_theta=1e6),
        names=SIGMOID_NAMES, is_sparse=_always),
    "exaone_moe": Family(
        overrides=dict(qk_norm="head"), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4,
                      rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8,
                      moe_intermediate_size=1024, n_shared_experts=1, routed_scaling_factor=2.5,
                      first_k_dense_replace=1),
        names=SIGMOID_NAMES, is_sparse=_is_sparse_after_first, is_sliding=_exaone4_is_sliding,
        has_rope=_exaone4_has_rope),
    "hy_v3": Family(
        overrides=dict(qk_norm="head"), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, num_experts=192,
                      max_position_embeddings=131072, num_experts_per_tok=8, n_shared_experts=1,
                      moe_intermediate_size=1536, routed_scaling_factor=2.826,
                      first_k_dense_replace=1, rope_theta=11158840.0),
        names=SIGMOID_NAMES, is_sparse=_is_sparse_after_first,
        key_aliases=dict(router_scaling_factor="routed_scaling_factor")),
    "minimax_m2": Family(
        overrides=dict(qk_norm="wide"), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=8, head_dim=128, num_experts=256, num_experts_per_tok=8,
                      max_position_embeddings=196608, rope_theta=5e6),
        names=MINIMAX_NAMES, is_sparse=_always, respell=_minimax_respelled),
    "gemma": Family(
        overrides=dict(activation="gelu_tanh"),        # "gelu" in config.json means this too
        defaults=dict(_GEMMA, num_key_value_heads=16), norm_offset=1.0, scaled_embed=True),
    "gemma2": Family(
        overrides=dict(post_norm=True),
        defaults=dict(_GEMMA, num_attention_heads=8, num_key_value_heads=4, sliding_window=4096,
                      query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                      final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh"),
        names=SANDWICH_NAMES, norm_offset=1.0, scaled_embed=True,
        is_sliding=lambda c, i: i % 2 == 0),
    "gemma3_text": Family(
        overrides=dict(qk_norm="head", post_norm=True),
        defaults=dict(_GEMMA, vocab_size=262208, num_attention_heads=8, num_key_value_heads=4,
                      max_position_embeddings=131072, rope_theta=1e6, rope_local_base_freq=1e4,
                      sliding_window=4096, query_pre_attn_scalar=256,
                      hidden_activation="gelu_pytorch_tanh"),
        names=SANDWICH_NAMES, norm_offset=1.0, scaled_embed=True,
        is_sliding=lambda c, i: (i + 1) % c.get("sliding_window_pattern", 6) != 0),
    "vaultgemma": Family(
        defaults=dict(_GEMMA, num_attention_heads=8, num_key_value_heads=4, sliding_window=4096,
                      query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                      final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh"),
        names={"pre_feedforward_layernorm": "ffn_norm"}, norm_offset=1.0, scaled_embed=True,
        is_sliding=lambda c, i: i % 2 == 0),
    "phi3": Family(
        defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=4096),
        names={"self_attn.qkv_proj": Fused(("attn.wq", "attn.wk", "attn.wv")),
               "mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up"))},
        is_sliding=_always),
    "smollm3": Family(
        defaults=dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True,
                      max_position_embeddings=32768),
        has_rope=_smollm3_has_rope,
        is_sliding=lambda c, i: bool(c.get("use_sliding_window")) and not _smollm3_has_rope(c, i)),
    "olmo2": Family(overrides=_OLMO, defaults=dict(rms_norm_eps=1e-5), names=SANDWICH_NAMES),
    "olmo3": Family(overrides=_OLMO, defaults=dict(rms_norm_eps=1e-5, sliding_window=4096,
                                               rope_theta=5e5),
                    names=SANDWICH_NAMES, plain_local_rope=True,
                    is_sliding=lambda c, i: (i + 1) % 4 != 0),
    "olmoe": Family(
        overrides=dict(qk_norm="wide"),
        defaults=dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
                        rms_norm_eps=1e-5),
        names=MOE_NAMES, is_sparse=_always),
    "flex_olmo": Family(
        overrides=_OLMO,
        defaults=dict(num_experts=7, num_experts_per_tok=5, norm_topk_prob=False, rope_theta=5e5,
                      max_position_embeddings=4096),
        names=SANDWICH_NAMES | MOE_NAMES, is_sparse=_always),
    "granite": Family(defaults=dict(attention_multiplier=1.0)),
    "granitemoehybrid": Family(
        defaults=dict(attention_multiplier=1.0, shared_intermediate_size=1024, num_experts=8),
        names={"shared_mlp.input_linear": Fused(("ffn.gate", "ffn.up")),
               "shared_mlp.output_linear": "ffn.down"},
        has_rope=lambda c, i: c.get("position_embedding_type") == "rope",
        respell=_granite_hybrid_respelled),
    "granite_swa": Family(
        scores=dict(sinks=True),
        defaults=dict(attention_multiplier=1.0, num_key_value_heads=4, sliding_window=128,
                      rms_norm_eps=1e-5, max_position_embeddings=8192, tie_word_embeddings=True),
        names={"self_attn.sinks": "attn.attend.sinks"}, is_sliding=_all_but_every_fourth),
    "granitemoe": Family(
        defaults=dict(num_experts=8, num_experts_per_tok=2, attention_multiplier=1.0),
        names={"block_sparse_moe.router.layer": "ffn.router",
               "block_sparse_moe.input_linear": Fused(("ffn.gate", "ffn.up")),
               "block_sparse_moe.output_linear": "ffn.down"},
        is_sparse=_always),
    "gpt_oss": Family(
        overrides=dict(activation="clamped_silu", mlp_bias=True),
        moe=dict(router_bias=True), scores=dict(sinks=True),
        defaults=dict(attention_bias=True, head_dim=64, num_key_value_heads=8, sliding_window=128,
                      num_experts=128, num_experts_per_tok=4, rms_norm_eps=1e-5,
                      max_position_embeddings=131072, rope_theta=150000.0,
                    rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0,
                                        truncate=False, original_max_position_embeddings=4096)),
        names=GPT_OSS_NAMES, is_sparse=_always, is_sliding=lambda c, i: i % 2 == 0),
    "ernie4_5": Family(
        defaults=dict(num_key_value_heads=2, head_dim=128, use_bias=False, rope_theta=5e5,
                      rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True),
        interleaved_rope=True, respell=_biased_respelled),
    "glm": Family(
        overrides=dict(o_bias=False), defaults=_GLM, interleaved_rope=True,
        names={"mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up"))}),
    "glm4": Family(
        overrides=dict(o_bias=False, post_norm=True), defaults=_GLM, interleaved_rope=True,
        names={"mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up")),
               "post_self_attn_layernorm": "post_attn_norm",
               "post_mlp_layernorm": "post_ffn_norm"}),
    "helium": Family(
        overrides=dict(o_bias=False),
        defaults=dict(num_key_value_heads=20, head_dim=128, rope_theta=1e5, rms_norm_eps=1e-8,
                      max_position_embeddings=4096),
        interleaved_rope=True),
    "arcee": Family(
        overrides=dict(gated=False),
        defaults=dict(hidden_act="relu2", rms_norm_eps=1e-5, max_position_embeddings=4096)),
    "seed_oss": Family(
        defaults=dict(attention_bias=True, attention_out_bias=False, head_dim=128,
                      num_key_value_heads=8, max_position_embeddings=524288)),
    "exaone4": Family(
        overrides=dict(pre_norm=False, post_norm=True, qk_norm="head"),
        defaults=dict(num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4,
                      rms_norm_eps=1e-5),
        names=SANDWICH_NAMES, is_sliding=_exaone4_is_sliding, has_rope=_exaone4_has_rope),
    "ministral": Family(
        defaults=dict(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131072),
        is_sliding=_always),
    "ministral3": Family(                          # to the length where it scales its queries
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6,
                      max_position_embeddings=262144,
                      rope_scaling=dict(rope_type="yarn", factor=16.0, beta_fast=32.0,
                                        beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                                        original_max_position_embeddings=16384,
                                        llama_4_scaling_beta=0.1)),
        is_sliding=_always),
    "cwm": Family(
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6,
                      sliding_window=8192, max_position_embeddings=131072,
                      rope_scaling=dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0,
                                        high_freq_factor=4.0,
                                        original_max_position_embeddings=8192)),
        is_sliding=_all_but_every_fourth),
    "internlm3": Family(
        defaults=dict(num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5,
                      max_position_embeddings=32768),
        key_aliases=dict(qkv_bias="attention_bias", bias="mlp_bias")),
    "iquestcoder": Family(
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
                      max_position_embeddings=131072)),
    "starcoder2": Family(
        overrides=dict(layer_norm=True, gated=False),
        defaults=dict(hidden_act="gelu_pytorch_tanh", num_key_value_heads=2, use_bias=True,
                      rms_norm_eps=1e-5, max_position_embeddings=4096, tie_word_embeddings=True),
        names={"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}, is_sliding=_always,
        key_aliases=dict(norm_epsilon="rms_norm_eps"), respell=_biased_respelled),
    "gpt2": Family(
        overrides=dict(layer_norm=True, learned_pos=True, gated=False, qkv_bias=True, o_bias=True,
                       mlp_bias=True),
        defaults=dict(hidden_act="gelu_new", max_position_embeddings=1024, rms_norm_eps=1e-5,
                      tie_word_embeddings=True),
        names=GPT2_NAMES, has_rope=lambda c, i: False,
        key_aliases=dict(n_embd="hidden_size", n_layer="num_hidden_layers",
                         n_head="num_attention_heads", n_positions="max_position_embeddings",
                         n_inner="intermediate_size", layer_norm_epsilon="rms_norm_eps",
                         activation_function="hidden_act"),
        respell=_gpt2_respelled),
}

TEXT_PARTS = {                                     # of a multimodal model whose config.json is mute
    "mistral3": "mistral", "llava": "llama", "idefics3": "llama", "smolvlm": "llama",
    "internvl": "qwen2",
}

OTHER_KINDS = {                                    # another block than this Transformer's
    "state-space layers (Mamba, RWKV)":
        "mamba mamba2 falcon_mamba rwkv jamba bamba zamba zamba2 nemotron_h "
        "falcon_h1 plamo2 recurrent_gemma xlstm",
    "gated DeltaNet or other linear attention":
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp olmo_hybrid "
        "kimi_linear minimax bailing_hybrid",
    "multi-head latent attention (MLA)":
        "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite mistral4 minicpm3 "
        "kimi_k2 kimi_k25 longcat_flash",
    "convolution layers": "lfm2 lfm2_moe lfm3",
    "an encoder and a decoder":
        "t5 t5gemma t5gemma2 mt5 umt5 bart mbart pegasus marian m2m_100 led whisper",
    "an encoder, which does not generate": "bert roberta xlm-roberta deberta-v2 modernbert electra",
    "per-layer embeddings and shared key/value layers":
        "gemma3n gemma3n_text gemma4 gemma4_text",
}
