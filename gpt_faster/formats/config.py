"""config.json -> ModelConfig, for all families. checkpoint.py parses the keys common to all.

families.py has each family's defaults. GGUF metadata and Meta's params.json are translated to
config.json keys before they come here. Reads no file and no weight:

    cfg, c = config_from_hf(json.loads(text))      # c: config.json with defaults filled in
"""

import math
from dataclasses import replace
from pathlib import Path

from checkpoint import (
    KEY_ALIASES,
    ROPE_KINDS,
    Stated,
    activation,
    biases,
    count,
    experts,
    filled,
    flag,
    is_by_kind,
    layer_kinds,
    layers,
    name_unknown,
    rope_facts,
    rope_kind,
    ropes,
    sizes,
    stated_rope,
    tile,
    yarn_mscale,
)
from gpt_faster.formats.families import ALIASES, FAMILIES, TEXT_PARTS, Family
from gpt_faster.formats.flat_config import FlatConfig, LayerEnd, Scores
from gpt_faster.formats.known_keys import (
    CONFIG,
    ROPE,
    UNSUPPORTED_CONFIG_KEYS,
    of_model_type,
)
from gpt_faster.formats.other_kinds import missing_feature
from gpt_faster.formats.schema import check_config, check_keys
from gpt_faster.formats.state_spaces import as_transformers
from gpt_faster.layers.block import Widths
from gpt_faster.layers.feed_forward import GATED, UNGATED
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.moe import MoEVariant
from gpt_faster.layers.rope import RopeVariant
from gpt_faster.layers.shared_kv import SharedKV
from gpt_faster.layers.short_conv import ShortConv
from gpt_faster.layers.zamba import SharedTransformer, TokenEmbedding, ZambaBlocks
from model import ModelConfig, of_layer

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
               "gelu": "gelu", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}


def config_from_hf(c: dict, path: Path | None = None) -> tuple[ModelConfig, dict]:
    """Translate config.json. ValueError names the key that is wrong or not supported.

    path: of the file, to name its unknown keys and to leave out keys that its model type does not
    have. None: the keys come from another format.
    -> the ModelConfig, and config.json with the family's defaults filled in (fold.py needs it).
    """
    family, c = _resolve_family(as_transformers(c), path)
    _check_supported(c, family)
    facts = {**sizes(c), **biases(c), **_scales(c, family),
             "layer_norm": bool(c.get("has_layer_norm", False)),
             "activation": _activation(c, family),
             "parallel": bool(c.get("use_parallel_residual", False)),
             "post_norm": bool(c.get("use_post_norm", False)),
             "post_norm_eps": c.get("post_norm_eps"), "clip_qkv": c.get("clip_qkv") or None}
    if c.get("use_qk_norm") or c.get("qk_layernorm"):
        facts["qk_norm"] = "layer" if c.get("qk_layernorm") else "head"
    if c.get("conv_layers"):
        facts["mixer"] = _short_convolutions(c, facts)
    if c.get("kv_lora_rank"):
        facts.update(_latent(c, facts))
    facts.update(_layers(c, family, facts["n_layer"]))
    facts.update(_widths(c))
    if c.get("branches"):                          # from a respelling (Nemotron-H)
        facts["branches"] = tile(c["branches"])
    if c.get("norm_placement"):                    # from a respelling (OLMo Hybrid)
        facts["norm_placement"] = tile(c["norm_placement"])
    facts.update(_gemma4_layers(c))
    if family.scores.get("gains") and any(r.amplitude != 1 for r in facts["rope"]):
        raise ValueError("RoPE with an attention factor is not supported before query and key "
                         "norms")
    if any(facts["sparse"]):
        facts["moe"] = MoEVariant(**{**_experts(c), **family.moe})
    cfg = FlatConfig(**{**facts, **family.overrides}).with_parts()
    if c.get("block_sources"):
        cfg = _with_shared_blocks(cfg, c)
    check_config(cfg)
    return cfg, c


def _resolve_family(c: dict, path: Path | None) -> tuple[Family, dict]:
    """The family, and config.json with canonical keys and the family's defaults filled in."""
    check_keys({key: c.get(key) for key in ("model_type", "text_config", "thinker_config")})
    c = thinker_part(c)
    check_keys({"text_config": c.get("text_config")})
    _refuse_other_kinds(c)
    whole = c
    c = _text_part(c)
    check_keys({"model_type": c.get("model_type")})
    _refuse_other_kinds(c)
    kind = ALIASES.get(c.get("model_type"), c.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"model_type '{kind}' is not supported (supported: "
                         f"{', '.join(FAMILIES)})")
    family = FAMILIES[kind]
    if path is not None:
        c = _own_keys(c, whole, kind, path)
    c = filled(c, family.defaults, {**KEY_ALIASES, **family.key_aliases})
    c["model_type"] = kind
    check_keys(c)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings"):
        count(c, key)
    if c["num_attention_heads"] > c["hidden_size"]:
        raise ValueError(f"'num_attention_heads' ({c['num_attention_heads']}) is larger than "
                         f"'hidden_size' ({c['hidden_size']})")
    for key in ("mlp_layer_types", "no_rope_layers"):
        if c.get(key) and len(c[key]) < c["num_hidden_layers"]:
            raise ValueError(f"'{key}' has {len(c[key])} entries, but the model has "
                             f"{c['num_hidden_layers']} layers")
    return family, Stated(family.respell(Stated(c)))


def _own_keys(c: dict, whole: dict, kind: str, path: Path) -> dict:
    """config.json without keys that this model type does not have. Names these and unknown keys.

    whole: with the parts for other modalities.
    """
    own = of_model_type(c, kind)
    foreign = [key for key, value in c.items()
               if key not in own and value not in (None, False, 0, [])]
    stated = {key for part in (whole, c) for key, value in part.items() if value is not None}
    ropes = [part for part in (c.get("rope_parameters"), c.get("rope_scaling"))
             if isinstance(part, dict)]
    inner = [key for rope in ropes for part in (rope, *rope.values()) if isinstance(part, dict)
             for key in part]
    if any(own.get(key) != c.get(key) for key in ("rope_parameters", "rope_scaling")):
        foreign.append("partial_rotary_factor")
    names = [*foreign, *CONFIG.unknown(sorted(stated)), *ROPE.unknown(inner)]
    name_unknown(path, list(dict.fromkeys(names)))
    return own


def _refuse_other_kinds(c: dict) -> None:
    kind = c.get("model_type") or ""
    if kind not in FAMILIES and (what := missing_feature(kind)):
        raise ValueError(f"model_type '{kind}' is not supported: it has {what}")


def thinker_part(c: dict) -> dict:
    """Qwen's omni models: the part that writes text, next to one that speaks."""
    return {**c, **(c.get("thinker_config") or {})}


def _text_part(c: dict) -> dict:
    """The language model's part of a multimodal config.json."""
    kind = c.get("model_type")
    if c.get("text_config") is not None:
        return {"model_type": TEXT_PARTS.get(kind, f"{kind}_text"), **c["text_config"]}
    if "vision_config" in c:                       # Qwen2-VL as released: no text_config
        return {**c, "model_type": f"{kind}_text"}
    return c


def _check_supported(c: dict, family: Family) -> None:
    """ValueError names a key that asks for something this model does not implement."""
    if not flag(c, "is_causal", True):
        raise ValueError("'is_causal' is false: a bidirectional model cannot generate text")
    for key in UNSUPPORTED_CONFIG_KEYS:
        if c.get(key) and key not in family.defaults:
            raise ValueError(f"'{key}' is not supported")
    if (c.get("swiglu_limit", 7), c.get("swiglu_alpha", 1.702)) != (7, 1.702):
        raise ValueError("only 'swiglu_limit' 7 and 'swiglu_alpha' 1.702 are supported")


def _activation(c: dict, family: Family) -> str | None:
    possible = GATED if family.overrides.get("gated", True) else UNGATED
    known = {theirs: ours for theirs, ours in ACTIVATIONS.items() if ours in possible}
    return None if "activation" in family.overrides else activation(c, known)


def _latent(c: dict, facts: dict) -> dict:
    """Latent attention (MLA). head_dim is the rotated part of a head, qk_rope_head_dim."""
    q_rank, rope_dim = c.get("q_lora_rank"), count(c, "qk_rope_head_dim")
    nope_dim = count(c, "qk_nope_head_dim")
    latent = Latent(q_rank=q_rank and count(c, "q_lora_rank"), kv_rank=count(c, "kv_lora_rank"),
                    nope_dim=nope_dim, v_dim=count(c, "v_head_dim", facts["head_dim"]))
    if rope_dim % 2:
        raise ValueError(f"'qk_rope_head_dim' is {rope_dim}, expected an even number")
    rope = stated_rope(c)
    scale = (nope_dim + rope_dim)**-0.5
    if rope_kind(rope) != "default" and rope.get("mscale_all_dim"):    # YaRN scales the scores
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"])**2
    return dict(mixer=(latent,), head_dim=rope_dim, n_kv_head=facts["n_head"], attn_scale=scale)


def _short_convolutions(c: dict, facts: dict) -> tuple:
    """A ShortConv in each layer that conv_layers marks, else None."""
    conv = ShortConv(facts["dim"], count(c, "conv_L_cache"), bool(c.get("conv_bias")))
    return tile([conv if is_conv else None for is_conv in c["conv_layers"]])


def _scales(c: dict, family: Family) -> dict:
    """Multipliers and soft caps of embeddings, residual branches, scores and logits."""
    attn_scale = c.get("attention_multiplier") or None
    if scalar := c.get("query_pre_attn_scalar"):
        attn_scale = scalar**-0.5
    if c.get("scale_attn_weights") is False:
        attn_scale = 1.0
    embed_scale = float(c.get("embedding_multiplier") or 1)
    if family.scaled_embed:
        embed_scale = c["hidden_size"]**0.5
    return dict(attn_scale=attn_scale, embed_scale=embed_scale,
                residual_scale=float(c.get("residual_multiplier") or 1),
                scores=Scores(**{"cap": c.get("attn_logit_softcapping"), **_query_scaling(c),
                                 "alibi": bool(c.get("alibi")), **family.scores}),
                logit_cap=c.get("final_logit_softcapping"))


def _query_scaling(c: dict) -> dict:
    """Scaling of queries by position (Ministral 3, Llama 4)."""
    rope = stated_rope(c)
    growth = rope.get("llama_4_scaling_beta") or 0.0
    if not growth:
        return {}
    if c.get("sliding_window"):
        raise ValueError("'llama_4_scaling_beta' is not supported together with 'sliding_window'")
    original = count({**c, **rope}, "original_max_position_embeddings",
                      count(c, "max_position_embeddings"))
    return dict(growth=float(growth), growth_from=original)


def _layers(c: dict, family: Family, n_layer: int) -> dict:
    """checkpoint.layers(), plus mixers other than attention, and layers without RoPE."""
    by_kind = _ropes(c, family)
    by_kind |= dict.fromkeys(family.mixers, by_kind["full_attention"])     # unused: no RoPE
    facts = layers(c, family, by_kind)
    rope = [of_layer(i, facts["rope"]) if family.has_rope(c, i) else RopeVariant(kind="none")
            for i in range(n_layer)]
    if thetas := c.get("layer_rope_theta"):        # 0: no RoPE
        if not isinstance(thetas, list) or len(thetas) != n_layer:
            raise ValueError(f"'layer_rope_theta' is {thetas!r}, expected {n_layer} numbers")
        rope = [replace(r, theta=float(t)) if t else RopeVariant(kind="none")
                for r, t in zip(rope, thetas)]
    kinds = layer_kinds(c, family)
    mixers = {kind: make(c) for kind, make in family.mixers.items() if kind in kinds}
    more = dict(mixer=tile([mixers.get(kind) for kind in kinds])) if mixers else {}
    return facts | dict(rope=tile(rope)) | more


def _with_shared_blocks(cfg: ModelConfig, c: dict) -> ModelConfig:
    """Zamba 2: Mamba layers that read a transformer block. block_sources: from its respelling."""
    mixer = [of_layer(i, cfg.mixer) for i in range(cfg.n_layer)]
    for i, source in c["block_sources"].items():
        mixer[i] = SharedTransformer(mixer[i], source, count(c, "adapter_rank"),
                                     flag(c, "use_shared_attention_adapter"))
    return replace(cfg, mixer=tile(mixer), block=ZambaBlocks(), per_layer=TokenEmbedding())


def _widths(c: dict) -> dict:
    """Sizes by layer, from a respelling (Gemma 4, MiMo)."""
    if "layer_widths" not in c:
        return {}
    widths, n_head = [], c["num_attention_heads"]
    for layer in c["layer_widths"]:
        n_own = layer.get("num_attention_heads")
        width = Widths(count(layer, "head_dim"), count(layer, "num_key_value_heads"),
                       count(layer, "intermediate_size"), None if n_own == n_head else n_own)
        if (n_own or n_head) % width.n_kv_head:
            raise ValueError(f"{n_own or n_head} attention heads cannot share {width.n_kv_head} "
                             "key/value heads evenly")
        widths.append(None if width == Widths(*(
            c[key] for key in ("head_dim", "num_key_value_heads", "intermediate_size"))) else width)
    return dict(widths=tile(widths))


def _gemma4_layers(c: dict) -> dict:
    """Gemma 4: shared KV layers and per-layer embeddings (from its respelling)."""
    if "kv_sources" not in c:
        return {}
    mixer = [None if source is None else SharedKV(source) for source in c["kv_sources"]]
    dim = c.get("hidden_size_per_layer_input") or 0
    end = LayerEnd(dim, count(c, "vocab_size_per_layer_input") if dim else 0)
    return dict(mixer=tile(mixer), layer_end=end)


def _experts(c: dict) -> dict:
    """checkpoint.experts(), plus expert groups and shared experts."""
    facts = experts(c)
    n_expert, n_active = facts["n_expert"], facts["n_active"]
    shared_dim = (c.get("n_shared_experts") or 0) * facts["expert_dim"]
    n_group, topk_group = count(c, "n_group", 1), count(c, "topk_group", 1)
    size = n_expert // n_group
    group_top = 1 if c.get("topk_method") == "group_limited_greedy" else 2
    if (n_expert % n_group or topk_group > n_group or n_active > size * topk_group
            or n_group > 1 and size < group_top):
        raise ValueError(f"cannot choose {n_active} of {n_expert} experts from {topk_group} of "
                         f"{n_group} groups")
    facts["router_cap"] = c.get("router_logit_cap") or None
    if c.get("expert_selection_fn"):
        facts["scores"] = c["expert_selection_fn"]
    return dict(facts, choice_bias=bool(c.get("use_expert_bias")),
                n_group=n_group, topk_group=topk_group, group_top=group_top,
                routed_scale=float(c.get("routed_scaling_factor") or 1),
                latent_dim=count(c, "moe_latent_size") if c.get("moe_latent_size") else 0,
                shared_dim=int(c.get("shared_expert_intermediate_size") or shared_dim))


# ---- RoPE ---------------------------------------------------------------------------------------

def _ropes(c: dict, family: Family) -> dict[str, RopeVariant]:
    """RoPE by layer type: the same for all, or separate for full and sliding attention."""
    by_kind = {kind: RopeVariant(**facts) for kind, facts in ropes(c, _rope_facts).items()}
    rope, theta = stated_rope(c), c.get("rope_theta", 10000.0)
    local = c.get("rope_local_base_freq") or rope.get("rope_theta") or theta
    # before transformers 5
    if (family.plain_local_rope or "rope_local_base_freq" in c) and not is_by_kind(rope):
        by_kind["sliding_attention"] = RopeVariant(**_rope_facts(c, {}, local))
    return by_kind


def _rope_facts(c: dict, rope: dict, theta) -> dict:
    """RopeVariant's fields: checkpoint.rope_facts(), plus the variants of other families."""
    kind, theta = rope_kind(rope), float(rope.get("rope_theta") or theta)
    partial = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    n = int(head_dim(c) * partial)
    is_long = kind in ("longrope", "su") or "long_factor" in rope      # early Phi-3: su or yarn
    scaled_base = kind == "dynamic" and rope.get("alpha")  # Hunyuan: at every length
    if scaled_base:
        theta *= float(rope["alpha"]) ** (n / (n - 2))
    if scaled_base or is_long or kind == "mrope":  # mrope: its three axes are equal in text
        rope = {**rope, "rope_type": "default", "rope_theta": theta}
    facts = rope_facts(c, rope, theta, (*ROPE_KINDS, "longrope"))
    facts["partial"] = float(partial)
    if rope.get("divisors"):                       # only from a GGUF
        facts["divisors"] = tuple(rope["divisors"])
    if rope.get("head_dim"):                       # only from a respelling (Gemma 4)
        facts["head_dim"] = rope["head_dim"]
    if scaled_base:
        facts["original_context"] = c["max_position_embeddings"]
    if is_long:
        original = facts["original_context"]
        factor = float(rope.get("factor") or c["max_position_embeddings"] / original)
        facts |= _longrope(rope, factor, original, n // 2)
    return facts


def _longrope(rope: dict, factor: float, original: int, n_freq: int) -> dict:
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1
    short, long = (tuple(map(float, rope.get(key) or ()))
                   for key in ("short_factor", "long_factor"))
    if {len(short), len(long)} != {n_freq}:
        raise ValueError(f"'short_factor' has {len(short)} and 'long_factor' {len(long)} entries, "
                         f"expected {n_freq} each")
    return dict(divisors=short, long_divisors=long, amplitude=float(amplitude))


def head_dim(c: dict) -> int:
    """Head width of queries and keys; for latent attention, its rotated part."""
    stated = c.get("qk_rope_head_dim") or c.get("head_dim")
    return stated or c["hidden_size"] // c["num_attention_heads"]
