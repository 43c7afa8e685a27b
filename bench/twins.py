"""A known shape with random weights as llama.cpp reads it: an architecture, metadata, tensors.

It knows names and shapes; bench/exports.py has the weights and writes the file.

    twin = twin_of(cfg)                            # ValueError: no architecture has such a model
"""

from typing import NamedTuple

from layers.delta import GatedDelta

BARE = "ssm_a", "ssm_dt.bias"                      # tensors that are no weights


class Twin(NamedTuple):
    architecture: str
    metadata: dict[str, int | float | list[int]]   # keys without the architecture
    shapes: dict[str, tuple[int, ...]]             # of tensors


def twin_of(cfg) -> Twin:
    """Llama, whose stretched RoPE costs nothing and is left out, or Qwen3.5."""
    if is_plain_llama(cfg):
        return Twin("llama", _metadata(cfg), _shapes(cfg, [_attention(cfg)] * cfg.n_layer))
    if is_plain_qwen35(cfg):
        return _qwen35(cfg)
    raise ValueError("llama.cpp: --random of a plain Llama or a dense Qwen3.5 only")


def is_plain_llama(cfg) -> bool:
    plain = type(cfg)(
        dim=cfg.dim, n_layer=cfg.n_layer, n_head=cfg.n_head, n_kv_head=cfg.n_kv_head,
        head_dim=cfg.head_dim, ffn_dim=cfg.ffn_dim, vocab_size=cfg.vocab_size, context=cfg.context,
        norm_eps=cfg.norm_eps, tied=cfg.tied, rope=cfg.rope)
    return cfg == plain and len(cfg.rope) == 1 and cfg.rope[0].kind in ("default", "llama3")


def is_plain_qwen35(cfg) -> bool:
    *deltas, attention = cfg.mixer
    return (attention is None and deltas and cfg.attn_gate and cfg.moe is None
            and all(isinstance(mixer, GatedDelta) for mixer in deltas))


def _metadata(cfg) -> dict:
    return {
        "block_count": cfg.n_layer, "context_length": cfg.context, "embedding_length": cfg.dim,
        "feed_forward_length": cfg.ffn_dim, "vocab_size": cfg.vocab_size,
        "attention.head_count": cfg.n_head, "attention.head_count_kv": cfg.n_kv_head,
        "attention.key_length": cfg.head_dim, "attention.value_length": cfg.head_dim,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps, "rope.freq_base": cfg.rope[0].theta,
        "rope.dimension_count": int(cfg.head_dim * cfg.rope[0].partial)}


def _attention(cfg) -> dict:
    n, k = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    return {"attn_norm": (cfg.dim,), "attn_q": (n, cfg.dim), "attn_k": (k, cfg.dim),
            "attn_v": (k, cfg.dim), "attn_output": (cfg.dim, n), "ffn_norm": (cfg.dim,)}


def _shapes(cfg, layers: list[dict]) -> dict:
    """layers: what each has beside its feed-forward."""
    shapes = {"token_embd.weight": (cfg.vocab_size, cfg.dim), "output_norm.weight": (cfg.dim,)}
    if not cfg.tied:
        shapes["output.weight"] = (cfg.vocab_size, cfg.dim)
    ffn = {"ffn_gate": (cfg.ffn_dim, cfg.dim), "ffn_up": (cfg.ffn_dim, cfg.dim),
           "ffn_down": (cfg.dim, cfg.ffn_dim)}
    for i, layer in enumerate(layers):
        shapes |= {f"blk.{i}.{name if name in BARE else name + '.weight'}": shape
                   for name, shape in (layer | ffn).items()}
    return shapes


def _qwen35(cfg) -> Twin:
    delta = cfg.mixer[0]
    keys, values = delta.n_k_head * delta.k_dim, delta.n_v_head * delta.v_dim
    metadata = _metadata(cfg) | {
        "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": len(cfg.mixer),
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
