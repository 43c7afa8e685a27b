"""llama.cpp's equivalent of a random model: architecture, metadata and tensor shapes.

bench/exports.py creates the weights and writes the file.

    twin = twin_of(cfg)                            # ValueError: no equivalent architecture
"""

from typing import NamedTuple

from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.mamba import AttentionAndMamba, Mamba2
from gpt_faster.layers.rope import n_rotated
from gpt_faster.layers.shared_kv import SharedKV
from gpt_faster.layers.short_conv import ShortConv
from model import layer_config, of_layer

LOOKUP_ONLY = "per_layer_token_embd"                    # embedding table: zeros suffice
# Tensor names without .weight
NO_SUFFIX = "ssm_a", "ssm_d", "ssm_dt.bias", "ssm_conv1d.bias", "exp_probs_b.bias"


class Twin(NamedTuple):
    architecture: str
    metadata: dict[str, int | float | list[int]]   # keys without the architecture
    shapes: dict[str, tuple[int, ...]]             # of tensors


def twin_of(cfg) -> Twin:
    """Supports Llama, Qwen3.5, GLM-4.7-Flash, LFM2, Gemma 4 without experts, Granite 4 H,
    Falcon-H1, and Nemotron-H without experts.

    Llama 3's RoPE scaling is omitted: it does not affect speed.
    """
    if is_plain_llama(cfg):
        return Twin("llama", _metadata(cfg), _shapes(cfg, [_attention(cfg)] * cfg.n_layer))
    if is_plain_qwen35(cfg):
        return _qwen35(cfg)
    if is_latent(cfg):
        return _deepseek2(cfg)
    if any(isinstance(mixer, ShortConv) for mixer in cfg.mixer) and cfg.moe is None:
        return _lfm2(cfg)
    if cfg.block is not None and cfg.block.end and cfg.moe is None:
        return _gemma4(cfg)
    kinds = {type(mixer) for mixer in cfg.mixer if mixer}
    if kinds == {AttentionAndMamba}:
        return _falcon_h1(cfg)
    if kinds == {Mamba2}:
        return _nemotron_h(cfg) if cfg.ffn and cfg.moe is None else _granite_hybrid(cfg)
    raise ValueError("llama.cpp: --random supports only plain Llama, dense Qwen3.5, LFM2 or "
                     "Gemma 4, Granite 4 H, Falcon-H1, dense Nemotron-H, and MoE with latent "
                     "attention")


def is_plain_llama(cfg) -> bool:
    plain = type(cfg)(
        dim=cfg.dim, n_layer=cfg.n_layer, n_head=cfg.n_head, n_kv_head=cfg.n_kv_head,
        head_dim=cfg.head_dim, ffn_dim=cfg.ffn_dim, vocab_size=cfg.vocab_size, context=cfg.context,
        norm_eps=cfg.norm_eps, tied=cfg.tied, rope=cfg.rope)
    return cfg == plain and len(cfg.rope) == 1 and cfg.rope[0].kind in ("default", "llama3")


def is_plain_qwen35(cfg) -> bool:
    *deltas, attention = cfg.mixer[:interval(cfg)]
    is_gated = cfg.attention == AttentionVariant(gate=True)
    return (attention is None and deltas and is_gated and cfg.moe is None
            and all(isinstance(mixer, GatedDelta) for mixer in deltas)
            and cfg.mixer == (*deltas, None) * (len(cfg.mixer) // interval(cfg)))


def interval(cfg) -> int:
    """Every interval-th layer has full attention."""
    return [*cfg.mixer, None].index(None) + 1


def is_latent(cfg) -> bool:
    """Whether it is MoE with latent attention and DeepSeek-V3's router (GLM-4.7-Flash)."""
    return (isinstance(cfg.mixer[0], Latent) and cfg.moe is not None
            and getattr(cfg.moe, "scores", None) == "sigmoid")


def _metadata(cfg) -> dict:
    return {
        "block_count": cfg.n_layer, "context_length": cfg.context, "embedding_length": cfg.dim,
        "feed_forward_length": cfg.ffn_dim, "vocab_size": cfg.vocab_size,
        "attention.head_count": cfg.n_head, "attention.head_count_kv": cfg.n_kv_head,
        "attention.key_length": cfg.head_dim, "attention.value_length": cfg.head_dim,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps, "rope.freq_base": cfg.rope[0].theta,
        "rope.dimension_count": n_rotated(cfg.rope[0], cfg.head_dim)}


def _attention(cfg) -> dict:
    n, k = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    return {"attn_norm": (cfg.dim,), "attn_q": (n, cfg.dim), "attn_k": (k, cfg.dim),
            "attn_v": (k, cfg.dim), "attn_output": (cfg.dim, n), "ffn_norm": (cfg.dim,)}


def _shapes(cfg, layers: list[dict]) -> dict:
    """layers: tensors of each layer; a dense feed-forward is added unless it has a router."""
    shapes = {"token_embd.weight": (cfg.vocab_size, cfg.dim), "output_norm.weight": (cfg.dim,)}
    if not cfg.tied:
        shapes["output.weight"] = (cfg.vocab_size, cfg.dim)
    ffn = {"ffn_gate": (cfg.ffn_dim, cfg.dim), "ffn_up": (cfg.ffn_dim, cfg.dim),
           "ffn_down": (cfg.dim, cfg.ffn_dim)}
    for i, layer in enumerate(layers):
        parts = layer if "ffn_gate_inp" in layer else ffn | layer
        shapes |= {f"blk.{i}.{name if name in NO_SUFFIX else name + '.weight'}": shape
                   for name, shape in parts.items()}
    return shapes


def _qwen35(cfg) -> Twin:
    delta = cfg.mixer[0]
    keys, values = delta.n_k_head * delta.k_dim, delta.n_v_head * delta.v_dim
    metadata = _metadata(cfg) | {
        "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": interval(cfg),
        "ssm.conv_kernel": delta.n_tap, "ssm.state_size": delta.k_dim,
        "ssm.group_count": delta.n_k_head, "ssm.time_step_rank": delta.n_v_head,
        "ssm.inner_size": values}
    attention = _attention(cfg)
    attention["attn_q"] = (2 * cfg.n_head * cfg.head_dim, cfg.dim)     # with the gate
    attention |= {"attn_q_norm": (cfg.head_dim,), "attn_k_norm": (cfg.head_dim,)}
    recurrent = {
        "attn_norm": (cfg.dim,), "attn_qkv": (2 * keys + values, cfg.dim),
        "attn_gate": (values, cfg.dim), "ssm_conv1d": (2 * keys + values, delta.n_tap),
        "ssm_a": (delta.n_v_head,), "ssm_dt.bias": (delta.n_v_head,), "ssm_norm": (delta.v_dim,),
        "ssm_alpha": (delta.n_v_head, cfg.dim), "ssm_beta": (delta.n_v_head, cfg.dim),
        "ssm_out": (cfg.dim, values)}
    layers = [attention if cfg.mixer[i % len(cfg.mixer)] is None else recurrent
              for i in range(cfg.n_layer)]
    for layer in layers:
        layer["post_attention_norm"] = (cfg.dim,)
        layer.pop("ffn_norm", None)
    return Twin("qwen35", metadata, _shapes(cfg, layers))


def _deepseek2(cfg) -> Twin:
    """Multi-head latent attention: one KV head."""
    latent, moe, D, N = cfg.mixer[0], cfg.moe, cfg.dim, cfg.n_head
    width, E, F = latent.nope_dim + cfg.head_dim, moe.n_expert, moe.expert_dim
    metadata = _metadata(cfg) | {
        "attention.head_count_kv": 1, "attention.key_length": latent.kv_rank + cfg.head_dim,
        "attention.value_length": latent.kv_rank, "attention.kv_lora_rank": latent.kv_rank,
        "attention.q_lora_rank": latent.q_rank, "attention.value_length_mla": latent.v_dim,
        "attention.key_length_mla": width,
        "leading_dense_block_count": [*cfg.sparse, True].index(True),
        "expert_count": E, "expert_used_count": moe.n_active, "expert_gating_func": 2,
        "expert_feed_forward_length": F, "expert_shared_count": moe.shared_dim // F,
        "expert_weights_scale": float(moe.routed_scale), "expert_weights_norm": moe.norm_topk_prob}
    attention = {
        "attn_norm": (D,), "ffn_norm": (D,), "attn_q_a": (latent.q_rank, D),
        "attn_q_a_norm": (latent.q_rank,), "attn_q_b": (N * width, latent.q_rank),
        "attn_kv_a_mqa": (latent.kv_rank + cfg.head_dim, D), "attn_kv_a_norm": (latent.kv_rank,),
        "attn_k_b": (N, latent.kv_rank, latent.nope_dim),
        "attn_v_b": (N, latent.v_dim, latent.kv_rank), "attn_output": (D, N * latent.v_dim)}
    experts = {
        "ffn_gate_inp": (E, D), "exp_probs_b.bias": (E,), "ffn_gate_exps": (E, F, D),
        "ffn_up_exps": (E, F, D), "ffn_down_exps": (E, D, F), "ffn_gate_shexp": (moe.shared_dim, D),
        "ffn_up_shexp": (moe.shared_dim, D), "ffn_down_shexp": (D, moe.shared_dim)}
    layers = [attention | (experts if cfg.sparse[i % len(cfg.sparse)] else {})
              for i in range(cfg.n_layer)]
    return Twin("deepseek2", metadata, _shapes(cfg, layers))


def _lfm2(cfg) -> Twin:
    conv, D = next(mixer for mixer in cfg.mixer if mixer), cfg.dim
    attends = [cfg.mixer[i % len(cfg.mixer)] is None for i in range(cfg.n_layer)]
    metadata = _metadata(cfg) | {
        "shortconv.l_cache": conv.n_tap,
        "attention.head_count_kv": [one * cfg.n_kv_head for one in attends]}
    attention = _attention(cfg) | {"attn_q_norm": (cfg.head_dim,), "attn_k_norm": (cfg.head_dim,)}
    convolution = {
        "attn_norm": (D,), "ffn_norm": (D,), "shortconv.conv": (conv.width, conv.n_tap),
        "shortconv.in_proj": (3 * conv.width, D), "shortconv.out_proj": (D, conv.width)}
    shapes = _shapes(cfg, [attention if one else convolution for one in attends])
    shapes["token_embd_norm.weight"] = shapes.pop("output_norm.weight")
    return Twin("lfm2", metadata, shapes)


def _gemma4(cfg) -> Twin:
    n, D = cfg.n_layer, cfg.dim
    P = cfg.per_layer.dim if cfg.per_layer else 0
    widths = [layer_config(cfg, i) for i in range(n)]
    slides = [cfg.window[i % len(cfg.window)] is not None for i in range(n)]
    has_keys = [not isinstance(cfg.mixer[i % len(cfg.mixer)], SharedKV) for i in range(n)]
    wide, narrow = (widths[slides.index(one)].head_dim for one in (False, True))
    metadata = _metadata(cfg) | {
        "attention.key_length": wide, "attention.value_length": wide,
        "attention.key_length_swa": narrow, "attention.value_length_swa": narrow,
        "rope.dimension_count": wide, "rope.dimension_count_swa": narrow,
        "rope.freq_base": cfg.rope[slides.index(False)].theta,
        "rope.freq_base_swa": cfg.rope[slides.index(True)].theta,
        "attention.head_count_kv": [own.n_kv_head for own in widths],
        "feed_forward_length": [own.ffn_dim for own in widths],
        "attention.sliding_window": cfg.window[slides.index(True)],
        "attention.sliding_window_pattern": [int(one) for one in slides],
        "attention.shared_kv_layers": has_keys.count(False),
        "embedding_length_per_layer_input": P, "final_logit_softcapping": cfg.logit_cap.cap}
    layers = []
    for own, keys in zip(widths, has_keys):
        layer = _attention(own) | {
            "attn_q_norm": (own.head_dim,), "attn_k_norm": (own.head_dim,),
            "post_attention_norm": (D,), "post_ffw_norm": (D,), "layer_output_scale": (1,),
            "ffn_gate": (own.ffn_dim, D), "ffn_up": (own.ffn_dim, D), "ffn_down": (D, own.ffn_dim)}
        if not keys:
            layer = {k: v for k, v in layer.items() if k not in ("attn_k", "attn_v", "attn_k_norm")}
        if P:
            layer |= {"inp_gate": (P, D), "proj": (D, P), "post_norm": (D,)}
        layers.append(layer)
    shapes = _shapes(cfg, layers) | {"rope_freqs.weight": (wide // 2,)}
    if P:
        shapes |= {f"{LOOKUP_ONLY}.weight": (cfg.per_layer.vocab_size, n * P),
                   "per_layer_model_proj.weight": (n * P, D), "per_layer_proj_norm.weight": (P,)}
    return Twin("gemma4", metadata, shapes)


# ---- Models with Mamba-2 layers ------------------------------------------------------------------

def _ssm_metadata(mamba: Mamba2) -> dict:
    return {"ssm.conv_kernel": mamba.n_tap, "ssm.state_size": mamba.state_dim,
            "ssm.group_count": mamba.n_group, "ssm.time_step_rank": mamba.n_head,
            "ssm.inner_size": mamba.n_head * mamba.head_dim}


def _mamba(cfg, mamba: Mamba2) -> dict:
    keys, _, values = mamba.n_rows()
    tensors = {
        "attn_norm": (cfg.dim,), "ssm_in": (2 * values + 2 * keys + mamba.n_head, cfg.dim),
        "ssm_conv1d": (values + 2 * keys, mamba.n_tap), "ssm_dt.bias": (mamba.n_head,),
        "ssm_a": (mamba.n_head, 1), "ssm_d": (mamba.n_head, 1), "ssm_out": (cfg.dim, values)}
    if mamba.conv_bias:
        tensors["ssm_conv1d.bias"] = (values + 2 * keys,)
    if mamba.norm:
        tensors["ssm_norm"] = (mamba.n_group, values // mamba.n_group)
    return tensors


def _granite_hybrid(cfg) -> Twin:
    mixers = [of_layer(i, cfg.mixer) for i in range(cfg.n_layer)]
    mamba, moe, D = next(filter(None, mixers)), cfg.moe, cfg.dim
    metadata = _metadata(cfg) | _ssm_metadata(mamba) | {
        "attention.head_count_kv": [0 if mixer else cfg.n_kv_head for mixer in mixers],
        "rope.scaling.finetuned": False}           # its switch: no RoPE
    layers = [_mamba(cfg, mixer) | {"ffn_norm": (D,)} if mixer else _attention(cfg)
              for mixer in mixers]
    if moe:
        E, F, shared = moe.n_expert, moe.expert_dim, moe.shared_dim
        metadata |= {"expert_count": E, "expert_used_count": moe.n_active, "feed_forward_length": F,
                     "expert_feed_forward_length": F, "expert_shared_feed_forward_length": shared}
        layers = [layer | {
            "ffn_gate_inp": (E, D), "ffn_gate_exps": (E, F, D), "ffn_up_exps": (E, F, D),
            "ffn_down_exps": (E, D, F), "ffn_gate_shexp": (shared, D), "ffn_up_shexp": (shared, D),
            "ffn_down_shexp": (D, shared)} for layer in layers]
    return Twin("granitehybrid", metadata, _shapes(cfg, layers))


def _falcon_h1(cfg) -> Twin:
    mamba = cfg.mixer[0].mamba
    layer = _attention(cfg) | _mamba(cfg, mamba)
    shapes = _shapes(cfg, [layer] * cfg.n_layer)
    shapes = {name.replace("ffn_norm.weight", "ffn_norm"): shape for name, shape in shapes.items()}
    return Twin("falcon-h1", _metadata(cfg) | _ssm_metadata(mamba), shapes)


def _nemotron_h(cfg) -> Twin:
    """Its layers have one branch each; ours mostly two."""
    D, F, layers = cfg.dim, cfg.ffn_dim, []
    for i in range(cfg.n_layer):
        mixer, only = of_layer(i, cfg.mixer), of_layer(i, cfg.block.branches)
        if only != "ffn_only":
            layers.append(_mamba(cfg, mixer) if mixer else _attention(cfg))
        if only != "attn_only":
            layers.append({"attn_norm": (D,), "ffn_up": (F, D), "ffn_down": (D, F)})
    metadata = _metadata(cfg) | _ssm_metadata(next(filter(None, cfg.mixer))) | {
        "block_count": len(layers), "attention.layer_norm_epsilon": cfg.norm_eps,
        "attention.head_count_kv": [cfg.n_kv_head if "attn_k" in layer else 0 for layer in layers],
        "feed_forward_length": [F if "ffn_up" in layer else 0 for layer in layers]}
    shapes = _shapes(cfg, [])
    for i, layer in enumerate(layers):
        layer.pop("ffn_norm", None)
        shapes |= {f"blk.{i}.{name if name in NO_SUFFIX else name + '.weight'}": shape
                   for name, shape in layer.items()}
    return Twin("nemotron_h", metadata, shapes)
