"""What every model family leaves unsaid in its config.json, one row each.

A Llama-like family is one row of FAMILIES. Facts only: config.py reads a config.json with them,
names.py renames with `names`, fold.py folds `norm_offset` into the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from formats.names import GPT2_NAMES, GPT_OSS_NAMES, MOE_NAMES, SANDWICH_NAMES, Fused


@dataclass(frozen=True)
class Family:
    """How a model_type differs from Llama."""

    overrides: dict = field(default_factory=dict)      # ModelConfig fields it never states
    defaults: dict = field(default_factory=dict)     # config.json keys it may leave out
    names: dict = field(default_factory=dict)      # parameter names that it adds or means otherwise
    norm_offset: float = 0.0                       # norms multiply by offset + weight
    scaled_embed: bool = False                     # embeddings are multiplied by sqrt(dim)
    is_sliding: Callable[[dict, int], bool] = lambda c, i: False   # layer i's attention windowed?
    has_rope: Callable[[dict, int], bool] = lambda c, i: True      # has layer i RoPE at all?
    is_sparse: Callable[[dict, int], bool] = lambda c, i: False    # layer i a mixture of experts?
    plain_local_rope: bool = False                 # windowed layers keep RoPE unstretched
    key_aliases: dict = field(default_factory=dict)    # config.json keys: what the others call them


def _qwen_is_sliding(c, i):
    return bool(c.get("use_sliding_window")) and i >= c.get("max_window_layers", 28)


def _qwen_is_sparse(c, i):
    step = c.get("decoder_sparse_step", 1)
    return i not in (c.get("mlp_only_layers") or []) and (i + 1) % step == 0


def _smollm3_has_rope(c, i):
    stated = c.get("no_rope_layers")               # 1 where there is RoPE
    return bool(stated[i] if stated else (i + 1) % c.get("no_rope_layer_interval", 4))


def _always(c, i):
    return True


_QWEN = dict(sliding_window=4096)
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192)
_OLMO = dict(pre_norm=False, post_norm=True, qk_norm="wide")

FAMILIES = {
    "llama": Family(),
    "mistral": Family(defaults=dict(sliding_window=4096), is_sliding=_always),
    "mixtral": Family(
        defaults=dict(rope_theta=1e6, num_key_value_heads=8, num_experts=8,
                      num_experts_per_tok=2, max_position_embeddings=131072, rms_norm_eps=1e-5),
        names={"block_sparse_moe.gate": "ffn.router", "block_sparse_moe.experts.*.w1": "ffn.gate",
               "block_sparse_moe.experts.*.w3": "ffn.up",
               "block_sparse_moe.experts.*.w2": "ffn.down"},
        is_sliding=_always, is_sparse=_always),
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
    "granite": Family(defaults=dict(attention_multiplier=1.0)),
    "granitemoe": Family(
        defaults=dict(num_experts=8, num_experts_per_tok=2, attention_multiplier=1.0),
        names={"block_sparse_moe.router.layer": "ffn.router",
               "block_sparse_moe.input_linear": Fused(("ffn.gate", "ffn.up")),
               "block_sparse_moe.output_linear": "ffn.down"},
        is_sparse=_always),
    "gpt_oss": Family(
        overrides=dict(activation="clamped_silu", sinks=True, mlp_bias=True, router_bias=True),
        defaults=dict(attention_bias=True, head_dim=64, num_key_value_heads=8, sliding_window=128,
                      num_experts=128, num_experts_per_tok=4, rms_norm_eps=1e-5,
                      max_position_embeddings=131072, rope_theta=150000.0,
                    rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0,
                                        truncate=False, original_max_position_embeddings=4096)),
        names=GPT_OSS_NAMES, is_sparse=_always, is_sliding=lambda c, i: i % 2 == 0),
    "gpt2": Family(
        overrides=dict(layer_norm=True, learned_pos=True, gated=False, qkv_bias=True, o_bias=True,
                       mlp_bias=True),
        defaults=dict(hidden_act="gelu_new", max_position_embeddings=1024, rms_norm_eps=1e-5,
                      tie_word_embeddings=True),
        names=GPT2_NAMES, has_rope=lambda c, i: False,
        key_aliases=dict(n_embd="hidden_size", n_layer="num_hidden_layers",
                         n_head="num_attention_heads", n_positions="max_position_embeddings",
                         n_inner="intermediate_size", layer_norm_epsilon="rms_norm_eps",
                         activation_function="hidden_act")),
}

OTHER_KINDS = {                                    # another block than this Transformer's
    "state-space layers (Mamba, RWKV)":
        "mamba mamba2 falcon_mamba rwkv jamba bamba zamba zamba2 nemotron_h granitemoehybrid "
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
