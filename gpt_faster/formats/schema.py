"""Types and ranges of config.json's keys and of ModelConfig's fields.

Files are untrusted. Wrong types, infinities, and sizes beyond any model are refused here by name,
before anything is computed from them or allocated. Knows no file and no family.

    check_keys(c); check_config(cfg)               # ValueError: "'head_dim' is -1, expected …"
"""

import math
from functools import cache
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import checkpoint
from checkpoint import brief
from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.block import BlockVariant
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.feed_forward import GATED, UNGATED, FeedForwardVariant
from gpt_faster.layers.mamba import AttentionAndMamba, Mamba2
from gpt_faster.layers.mamba1 import Mamba1
from gpt_faster.layers.moe import SCORES, MoEVariant
from gpt_faster.layers.norms import HEAD_NORMS
from gpt_faster.layers.rope import RopeVariant, n_rotated
from gpt_faster.layers.shared_kv import SharedKV
from gpt_faster.layers.zamba import SharedTransformer
from model import ModelConfig, Rope, layer_config, of_layer

MAX_WIDTH, MAX_HEADS, MAX_EXPERTS = 1 << 22, 1 << 16, 1 << 14         # no product overflows 64 bits
MAX_LAYERS, MAX_CONTEXT, MAX_NUMBER = 1000, 1 << 31, 1e30


# ---- config.json --------------------------------------------------------------------------------

def _is_count(v, most=MAX_WIDTH):
    return type(v) is int and 0 <= v <= most


def is_number(v):
    return type(v) in (int, float) and -MAX_NUMBER <= v <= MAX_NUMBER


def _is_positive(v):
    return is_number(v) and v > 0


def _list_of(is_one):
    return lambda v: isinstance(v, list) and all(map(is_one, v))


def _is_text(v):
    return isinstance(v, str)


def _is_object(v):
    return isinstance(v, dict)


# (expected value for the message, predicate, keys); a value may also be null
KINDS = (
    (f"a positive integer of at most {MAX_LAYERS}", lambda v: v != 0 and _is_count(v, MAX_LAYERS),
     "num_hidden_layers"),
    (f"a positive integer of at most {MAX_WIDTH}", lambda v: v != 0 and _is_count(v),
     "hidden_size vocab_size"),
    (f"a positive integer of at most {MAX_HEADS}", lambda v: v != 0 and _is_count(v, MAX_HEADS),
     "num_attention_heads"),
    (f"an integer from 0 to {MAX_WIDTH}", _is_count,
     "intermediate_size n_shared_experts q_lora_rank kv_lora_rank "
     "conv_L_cache num_kv_heads word_embed_proj_dim dim_model_base block_ff_dim block_multiple_of "
     "num_kv_shared_layers num_global_key_value_heads hidden_size_per_layer_input rotary_dim "
     "vocab_size_per_layer_input num_nextn_predict_layers num_mtp_layers num_ln_in_parallel_attn "
     "shared_expert_intermediate_size shared_intermediate_size full_attention_interval n_group "
     "topk_group prefix_dense_intermediate_size sliding_window_size "
     "backbone_hidden_size num_centroids centroid_intermediate_top_k"),
    (f"an integer from 0 to {MAX_WIDTH}, or one for each layer",
     lambda v: _is_count(v) or v != [] and _list_of(_is_count)(v),
     "moe_intermediate_size num_experts num_experts_per_tok num_shared_expert"),
    (f"an integer from 0 to {MAX_HEADS}", lambda v: _is_count(v, MAX_HEADS),
     "num_key_value_heads head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim "
     "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
     "linear_conv_kernel_dim"),
    (f"an integer from 0 to {MAX_CONTEXT}", lambda v: _is_count(v, MAX_CONTEXT),
     "max_position_embeddings original_max_position_embeddings sliding_window"),
    ("a number", is_number,
     "rope_theta rope_local_base_freq scale_emb scale_depth "
     "block_ffn_dim_multiplier alibi_scale softmax_scale post_norm_scale factor attention_factor "
     "beta_fast beta_slow low_freq_factor high_freq_factor mscale mscale_all_dim alpha "
     "llama_4_scaling_beta swa_rope_theta attention_value_scale eps_of_rms_norm swiglu_limit "
     "swiglu_alpha"),
    ("a positive number", lambda v: is_number(v) and v >= 0,
     "attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
     "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping partial_rotary_factor "
     "routed_scaling_factor router_logit_cap logit_scale clip_qkv post_norm_eps "
     "alibi_bias_max"),
    ("a list of names", _list_of(_is_text),
     "layer_types mlp_layer_types mtp_layer_types attention_layers"),
    ("a list of whole numbers", _list_of(lambda v: type(v) in (int, bool)),
     "hybrid_layer_pattern num_attention_heads_per_layer mlp_only_layers no_rope_layers "
     "full_attn_idxs"),
    ("a list of numbers", _list_of(is_number), "layer_rope_theta"),
    ("a list of positive numbers", _list_of(lambda v: type(v) in (int, float) and v > 0),
     "short_factor long_factor divisors"),
    ("a name", _is_text, "hidden_act hidden_activation model_type topk_method rope_type type "
     "position_embedding_type"),
    ("an object", _is_object,
     "text_config thinker_config rope_parameters rope_scaling attn_config full_attention "
     "sliding_attention quantization_config compression_config"),
)
NEEDED = (                                         # keys that must not be null
    ("a whole number above 0", lambda v: _is_count(v) and v > 0,
     "decoder_sparse_step moe_layer_interval no_rope_layer_interval"),
    ("a whole number", lambda v: type(v) is int and abs(v) <= MAX_WIDTH,
     "max_window_layers first_k_dense_replace moe_layer_start_index moe_layer_end_index"),
    ("a number above 0", _is_positive, "qk_scale_factor output_multiplier"),
    ("a positive number", lambda v: is_number(v) and v >= 0, "rms_norm_eps"),
    ("an object of objects", lambda v: _is_object(v) and all(map(_is_object, v.values())),
     "per_layer_config"),
)
INNER = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "attn_config")


def check_keys(c: dict) -> None:
    """Check config.json's values. ValueError names a key with a wrong type or range."""
    kinds, needed = _kind_of()
    for key, value in c.items():
        what, is_one = kinds.get(key) or needed.get(key) or (None, None)
        if what and not is_one(value) and (value is not None or key in needed):
            raise ValueError(f"'{key}' is {brief(value)}, expected {what}")
    for inner in (*map(c.get, INNER), *(c.get("per_layer_config") or {}).values()):
        if isinstance(inner, dict):
            check_keys(inner)


@cache
def _kind_of() -> tuple[dict, dict]:
    return tuple({key: (what, is_one) for what, is_one, keys in kinds for key in keys.split()}
                 for kinds in (KINDS, NEEDED))


# ---- ModelConfig, from config.json or from a .pth -----------------------------------------------

LIMITS = dict(n_layer=MAX_LAYERS, n_head=MAX_HEADS, n_kv_head=MAX_HEADS, n_k_head=MAX_HEADS,
              n_v_head=MAX_HEADS, k_dim=MAX_HEADS, v_dim=MAX_HEADS, n_expert=MAX_EXPERTS,
              n_active=MAX_EXPERTS, context=MAX_CONTEXT, original_context=MAX_CONTEXT,
              growth_from=MAX_CONTEXT)


def build(cls: type, stated, **parts):
    """checkpoint.build(), then check the fields."""
    part = checkpoint.build(cls, stated, **parts)
    check_types(part)
    return part


def check_types(part) -> None:
    """ValueError names a field of a dataclass with a wrong type, or out of range."""
    for name, hint in _hints(type(part)).items():
        value = getattr(part, name)
        if not _is_a(value, hint):
            raise ValueError(f"{name} is {brief(value)}, expected {_spelled(hint)}")
        if isinstance(value, int) and not 0 <= value <= LIMITS.get(name, MAX_WIDTH):
            raise ValueError(f"{name} is {brief(value)}, expected 0 to "
                             f"{LIMITS.get(name, MAX_WIDTH)}")


@cache
def _hints(cls: type) -> dict:
    return get_type_hints(cls)


def _spelled(hint) -> str:
    return str(getattr(hint, "__name__", hint)) if get_origin(hint) is None else str(hint)


def _is_a(value, hint) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_is_a(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        one = get_args(hint)[0]
        return type(value) is tuple and all(_is_a(v, one) for v in value)
    if hint is float:
        return type(value) in (int, float) and not math.isnan(value) and (
            math.isinf(value) or abs(value) <= MAX_NUMBER)
    if hint is int:
        return type(value) is int
    return isinstance(value, hint)


def check_config(cfg: ModelConfig) -> None:
    """ValueError names a value that no model can have."""
    widths = cfg.block.widths if isinstance(cfg.block, BlockVariant) else (None,)
    parts = [cfg.attention, *cfg.rope, *cfg.mixer, cfg.block, *widths, cfg.moe, cfg.norm, cfg.ffn,
             *cfg.after_embed, cfg.per_layer, cfg.logit_cap]
    for part in (cfg, *parts):
        if part is not None:
            check_types(part)
    for name in ("dim", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn_dim", "vocab_size",
                 "context"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name} is {getattr(cfg, name)}, expected a positive integer")
    tiled = {name: getattr(cfg, name) for name in ("rope", "window", "sparse", "mixer")}
    if isinstance(cfg.block, BlockVariant):
        tiled |= dict(norm_placement=cfg.block.norm_placement, branches=cfg.block.branches)
        for branch in cfg.block.branches:
            _one_of("branches", branch, (None, "attn_only", "ffn_only"))
        for place in cfg.block.norm_placement:
            _one_of("norm_placement", place, (None, "pre", "post"))
    for name, values in (tiled | dict(widths=widths)).items():
        if not 1 <= len(values) <= cfg.n_layer:
            raise ValueError(f"{name} is {brief(values)}, expected 1 to {cfg.n_layer} entries, at "
                             "most one per layer")
    if isinstance(cfg.ffn, FeedForwardVariant):
        _one_of("activation", cfg.ffn.activation, GATED if cfg.ffn.gated else UNGATED)
    if isinstance(cfg.moe, MoEVariant):
        _one_of("activation", cfg.moe.activation, GATED if cfg.moe.gated else UNGATED)
        _one_of("scores", cfg.moe.scores, SCORES)
    if isinstance(cfg.attention, AttentionVariant):
        _one_of("qk_norm", cfg.attention.qk_norm, (None, "head", *HEAD_NORMS))
    if any(cfg.sparse) and cfg.moe is None:
        raise ValueError("MoE layers, but no MoE config")
    if any(window == 0 for window in cfg.window):
        raise ValueError("a sliding window of 0 positions")
    for i in range(min(cfg.n_layer, max(map(len, (cfg.rope, cfg.mixer, widths))) * 2)):
        layer = layer_config(cfg, i)
        _check_heads(layer.n_head, layer.n_kv_head, layer.head_dim)
        _check_rope(of_layer(i, cfg.rope), cfg.head_dim)
        _check_mixer(of_layer(i, cfg.mixer), i)


def _one_of(name: str, value, known) -> None:
    if value not in known:
        raise ValueError(f"{name} is {brief(value)}, expected one of "
                         f"{', '.join(map(str, known))}")


def _check_heads(n_head: int, n_kv_head: int, head_dim: int) -> None:
    if n_kv_head < 1 or n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads cannot share {n_kv_head} key/value heads "
                         "evenly")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}, expected an even number")


def _check_rope(rope: Rope, head_dim: int) -> None:
    _one_of("RoPE", rope.kind, ("none", "default", "linear", "dynamic", "llama3", "yarn"))
    if isinstance(rope, RopeVariant):
        _check_rope_variant(rope, rope.head_dim or head_dim)
    finite = (rope.theta, rope.factor, rope.amplitude, rope.low_freq_factor, rope.high_freq_factor)
    if not all(map(math.isfinite, finite)) or not (
            rope.theta > 1 and rope.factor > 0 and rope.original_context > 0):
        raise ValueError(f"invalid RoPE: theta {rope.theta}, factor {rope.factor}, "
                         f"original context {rope.original_context}")
    if rope.kind == "yarn" and min(rope.low_freq_factor, rope.high_freq_factor) <= 0:
        raise ValueError("RoPE 'yarn' needs beta_slow and beta_fast above 0")
    if rope.kind == "dynamic" and n_rotated(rope, head_dim) == 2:
        raise ValueError("RoPE 'dynamic' needs a rotary dimension above 2")


def _check_rope_variant(rope: RopeVariant, head_dim: int) -> None:
    if not 0 <= rope.partial <= 64:
        raise ValueError(f"partial_rotary_factor is {rope.partial}, expected 0 to 64")
    n = n_rotated(rope, head_dim)
    if rope.head_dim is not None and (rope.head_dim < 2 or rope.head_dim % 2):
        raise ValueError(f"RoPE's head_dim is {rope.head_dim}, expected an even number")
    for divisors in (rope.divisors, rope.long_divisors):
        if divisors is not None and len(divisors) != -(-n // 2):
            raise ValueError(f"{len(divisors)} RoPE factors, expected one per frequency: "
                             f"{-(-n // 2)}")


def _check_mixer(mixer, i: int) -> None:
    if isinstance(mixer, SharedKV) and mixer.source is not None and mixer.source >= i:
        raise ValueError(f"layer {i} shares the KV cache of layer {mixer.source}, which is not an "
                         "earlier layer")
    if isinstance(mixer, GatedDelta) and (
            mixer.n_k_head < 1 or mixer.n_v_head % mixer.n_k_head or mixer.n_tap < 2):
        raise ValueError(f"{mixer.n_v_head} value heads cannot share {mixer.n_k_head} key heads "
                         f"evenly, or a convolution of {mixer.n_tap} is too short")
    if isinstance(mixer, Mamba1) and (mixer.n_tap < 2 or 0 in mixer.n_rows() or not mixer.width):
        raise ValueError(f"a Mamba 1 layer of {mixer.width} channels with a state of "
                         f"{mixer.state_dim}, a step of rank {mixer.step_rank} and a convolution "
                         f"of {mixer.n_tap} is too small")
    if isinstance(mixer, SharedTransformer) and mixer.source is not None and mixer.source >= i:
        raise ValueError(f"layer {i} reads the transformer block of layer {mixer.source}, which is "
                         "not an earlier layer")
    if isinstance(mixer, AttentionAndMamba | SharedTransformer):
        check_types(mixer.mamba)
        mixer = mixer.mamba
    if isinstance(mixer, Mamba2) and (
            mixer.n_group < 1 or mixer.n_head % mixer.n_group or mixer.n_tap < 2):
        raise ValueError(f"{mixer.n_head} Mamba heads cannot share {mixer.n_group} groups evenly, "
                         f"or a convolution of {mixer.n_tap} is too short")
