"""config.json -> ModelConfig: the math that a Hugging Face config states, its gaps filled.

Reads the spelling of transformers 4 and 5. What a family leaves unsaid stands in families.py; GGUF
and Meta's files are put into config.json's words first. Reads no file and no weight:

    cfg, c = config_from_hf(json.loads(text))      # c: config.json with its gaps filled
"""

import math
from dataclasses import replace

from formats.families import ALIASES, FAMILIES, OTHER_KINDS, TEXT_PARTS, Family
from formats.schema import brief, check_config, check_keys
from layers.block import Widths
from layers.feed_forward import GATED, UNGATED
from layers.flat_config import FlatConfig, LayerEnd, Scores
from layers.latent import Latent
from layers.moe import MoEVariant
from layers.rope import RopeVariant
from layers.shared_kv import SharedKV
from layers.short_conv import ShortConv
from model import ModelConfig

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
               "gelu": "gelu", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}
KINDS_OF_ATTENTION = ("full_attention", "sliding_attention")   # as `rope_parameters` names them
NOT_READ = ("use_bidirectional_attention", "scale_attn_by_inverse_layer_idx", "qk_layernorm",
            "apply_residual_connection_post_layernorm", "prefix_lm", "qk_ln",
            "add_cross_attention", "clip_qkv")


class Stated(dict):
    """What a config.json states."""

    def __missing__(self, key):
        raise ValueError(f"config.json has no '{key}'")


def config_from_hf(c: dict) -> tuple[ModelConfig, dict]:
    """config.json as math. ValueError names a problem.

    -> the config, and config.json with what it leaves out filled in, for the folds.
    """
    family, c = _complete(c)
    _check(c, family)
    n_layer = count(c, "num_hidden_layers")
    facts = {"n_layer": n_layer, **_widths(c), **_biases(c), **_scales(c, family),
             "activation": _activation(c, family), "norm_eps": float(c["rms_norm_eps"]),
             "vocab_size": count(c, "vocab_size"),
             "tied": bool(c.get("tie_word_embeddings", False)),
             "parallel": bool(c.get("use_parallel_residual", False)),
             "post_norm": bool(c.get("use_post_norm", False)),
             "post_norm_eps": c.get("post_norm_eps"), "clip_qkv": c.get("clip_qkv") or None}
    if c.get("use_qk_norm") or c.get("qk_layernorm"):
        facts["qk_norm"] = "layer" if c.get("qk_layernorm") else "head"
    if c.get("conv_layers"):
        facts["mixer"] = _short_convolutions(c, facts)
    if c.get("kv_lora_rank"):
        facts.update(_latent(c, facts))
    facts.update(_layers(c, family, n_layer))
    facts.update(_own_parts(c, n_layer))
    if family.scores.get("gains") and any(r.amplitude != 1 for r in facts["rope"]):
        raise ValueError("RoPE that makes queries longer is not supported before their norms")
    if any(facts["sparse"]):
        facts["moe"] = MoEVariant(**{**_experts(c), **family.moe})
    cfg = FlatConfig(**{**facts, **family.overrides}).with_parts()
    check_config(cfg)
    return cfg, c


def _complete(c: dict) -> tuple[Family, dict]:
    """The family, and config.json in one spelling with the family's defaults filled in."""
    check_keys({key: c.get(key) for key in ("model_type", "text_config")})
    _refuse_other_kinds(c)
    c = _text_part(c)
    check_keys({"model_type": c.get("model_type")})
    _refuse_other_kinds(c)
    kind = ALIASES.get(c.get("model_type"), c.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"model_type '{kind}' is not supported (supported: "
                         f"{', '.join(FAMILIES)})")
    family = FAMILIES[kind]
    aliases = {"num_local_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
               "n_routed_experts": "num_experts", "num_shared_experts": "n_shared_experts",
               **family.key_aliases}
    c = {aliases.get(key, key): value for key, value in c.items()}
    if c.get("rope_parameters") is None:           # null: not stated
        c.pop("rope_parameters", None)
    c = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **family.defaults, **c}
    c["model_type"] = kind
    check_keys(c)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings"):
        count(c, key)
    if c["num_attention_heads"] > c["hidden_size"]:
        raise ValueError(f"{c['num_attention_heads']} attention heads for a width of "
                         f"{c['hidden_size']}")
    for key in ("mlp_layer_types", "no_rope_layers"):
        if c.get(key) and len(c[key]) < c["num_hidden_layers"]:
            raise ValueError(f"'{key}' has {len(c[key])} entries for {c['num_hidden_layers']} "
                             "layers")
    return family, Stated(family.respell(Stated(c)))


def _refuse_other_kinds(c: dict) -> None:
    kind = c.get("model_type")
    for what, kinds in OTHER_KINDS.items():
        if kind in kinds.split():
            raise ValueError(f"model_type '{kind}' is not supported: it has {what}, "
                             "another kind of model")


def _text_part(c: dict) -> dict:
    """Of a multimodal model's config.json."""
    kind = c.get("model_type")
    if c.get("text_config") is not None:
        return {"model_type": TEXT_PARTS.get(kind, f"{kind}_text"), **c["text_config"]}
    if "vision_config" in c:                       # Qwen2-VL as released: one level for all
        return {**c, "model_type": f"{kind}_text"}
    return c


def _check(c: dict, family: Family) -> None:
    """ValueError names what asks for something that the model does not have."""
    for key in NOT_READ:
        if c.get(key) and key not in family.defaults:
            raise ValueError(f"'{key}' is not supported")
    if (c.get("swiglu_limit", 7), c.get("swiglu_alpha", 1.702)) != (7, 1.702):
        raise ValueError("'swiglu_limit' and 'swiglu_alpha' are supported as 7 and 1.702 only")


def count(c: dict, key: str, default: int | None = None) -> int:
    value = default if c.get(key) is None else c[key]
    if value is None:
        raise ValueError(f"config.json has no '{key}'")
    if type(value) is not int or value < 1:
        raise ValueError(f"'{key}' is {brief(value)}, expected a positive integer")
    return value


def _activation(c: dict, family: Family) -> str | None:
    name = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    possible = GATED if family.overrides.get("gated", True) else UNGATED
    known = {theirs: ours for theirs, ours in ACTIVATIONS.items() if ours in possible}
    if name not in known and "activation" not in family.overrides:
        raise ValueError(f"activation '{name}' is not supported (supported: {', '.join(known)})")
    return known.get(name)


def _widths(c: dict) -> dict:
    dim, n_head = count(c, "hidden_size"), count(c, "num_attention_heads")
    n_kv_head = count(c, "num_key_value_heads", n_head)
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads cannot share {n_kv_head} key/value heads "
                         "evenly")
    return dict(dim=dim, n_head=n_head, n_kv_head=n_kv_head,
                head_dim=count(c, "head_dim", dim // n_head),
                ffn_dim=count(c, "intermediate_size"))


def _latent(c: dict, facts: dict) -> dict:
    """Latent attention, whose head_dim is that of the part that RoPE turns."""
    q_rank, rope_dim = c.get("q_lora_rank"), count(c, "qk_rope_head_dim")
    nope_dim = count(c, "qk_nope_head_dim")
    latent = Latent(q_rank=q_rank and count(c, "q_lora_rank"), kv_rank=count(c, "kv_lora_rank"),
                    nope_dim=nope_dim, v_dim=count(c, "v_head_dim", facts["head_dim"]))
    if rope_dim % 2:
        raise ValueError(f"'qk_rope_head_dim' is {rope_dim}, expected an even number")
    rope = stated_rope(c)
    scale = (nope_dim + rope_dim)**-0.5
    if rope_kind(rope) != "default" and rope.get("mscale_all_dim"):    # YaRN's, of the scores
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"])**2
    return dict(mixer=(latent,), head_dim=rope_dim, n_kv_head=facts["n_head"], attn_scale=scale)


def _short_convolutions(c: dict, facts: dict) -> tuple:
    """conv_layers: which layers are some."""
    conv = ShortConv(facts["dim"], count(c, "conv_L_cache"), bool(c.get("conv_bias")))
    return _tile([conv if is_conv else None for is_conv in c["conv_layers"]])


def _biases(c: dict) -> dict:
    bias = bool(c.get("attention_bias", False))
    return dict(qkv_bias=bool(c.get("qkv_bias", bias)),
                o_bias=bool(c.get("attention_out_bias", bias)),
                mlp_bias=bool(c.get("mlp_bias", False)))


def _scales(c: dict, family: Family) -> dict:
    """What embeddings, branches, scores and logits are multiplied or capped by."""
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
                scores=Scores(**{"cap": c.get("attn_logit_softcapping"), **_growth(c),
                                 "alibi": bool(c.get("alibi")), **family.scores}),
                logit_cap=c.get("final_logit_softcapping"))


def _growth(c: dict) -> dict:
    """How queries are scaled by position (Ministral 3), which counts the keys that they see."""
    rope = stated_rope(c)
    growth = rope.get("llama_4_scaling_beta") or 0.0
    if not growth:
        return {}
    if c.get("sliding_window"):
        raise ValueError("'llama_4_scaling_beta' is not supported beside 'sliding_window'")
    original = count({**c, **rope}, "original_max_position_embeddings",
                      count(c, "max_position_embeddings"))
    return dict(growth=float(growth), growth_from=original)


def _layers(c: dict, family: Family, n_layer: int) -> dict:
    """What may differ by layer: window, RoPE, experts; and the context that RoPE reaches."""
    kinds = c.get("layer_types") or [
        "sliding_attention" if family.is_sliding(c, i) else "full_attention"
        for i in range(n_layer)]
    ropes = _ropes(c, family)
    ropes |= dict.fromkeys(family.mixers, ropes["full_attention"])     # which those do not have
    if not isinstance(kinds, list) or set(kinds) - set(ropes) or len(kinds) != n_layer:
        raise ValueError(f"'layer_types' is not {n_layer} times one of {', '.join(ropes)}")
    sliding_window = c.get("sliding_window") or None
    window = [sliding_window if kind == "sliding_attention" else None for kind in kinds]
    rope = [ropes[kind] if family.has_rope(c, i) else RopeVariant(kind="none")
            for i, kind in enumerate(kinds)]
    if thetas := c.get("layer_rope_theta"):        # 0: none there
        if not isinstance(thetas, list) or len(thetas) != n_layer:
            raise ValueError(f"'layer_rope_theta' is {thetas!r}, expected {n_layer} numbers")
        rope = [replace(r, theta=float(t)) if t else RopeVariant(kind="none")
                for r, t in zip(rope, thetas)]
    stretched = [int(r.factor * r.original_context) for r in rope if r.kind in ("dynamic", "yarn")]
    context = max([count(c, "max_position_embeddings"), *stretched])
    sparse = [family.is_sparse(c, i) for i in range(n_layer)]
    mixers = {kind: make(c) for kind, make in family.mixers.items() if kind in kinds}
    more = dict(mixer=_tile([mixers.get(kind) for kind in kinds])) if mixers else {}
    return dict(context=context, rope=_tile(rope), window=_tile(window), sparse=_tile(sparse),
                **more)


def _own_parts(c: dict, n_layer: int) -> dict:
    """Widths of layers, whose keys they take, what follows them: Gemma 4's respelling says it."""
    if "layer_widths" not in c:
        return {}
    widths, n_head = [], c["num_attention_heads"]
    for own in c["layer_widths"]:
        width = Widths(count(own, "head_dim"), count(own, "num_key_value_heads"),
                       count(own, "intermediate_size"))
        if n_head % width.n_kv_head:
            raise ValueError(f"{n_head} attention heads cannot share {width.n_kv_head} key/value "
                             "heads evenly")
        widths.append(None if width == Widths(*(
            c[key] for key in ("head_dim", "num_key_value_heads", "intermediate_size"))) else width)
    mixer = [None if source is None else SharedKV(source) for source in c["kv_sources"]]
    dim = c.get("hidden_size_per_layer_input") or 0
    end = LayerEnd(dim, count(c, "vocab_size_per_layer_input") if dim else 0)
    return dict(widths=_tile(widths), mixer=_tile(mixer), layer_end=end)


def _tile(values: list) -> tuple:
    """The shortest tuple that, repeated, gives these: one where all layers are alike."""
    return tuple(values[:1] if len(set(values)) == 1 else values)


def _experts(c: dict) -> dict:
    n_expert, n_active = count(c, "num_experts"), count(c, "num_experts_per_tok")
    if n_active > n_expert:
        raise ValueError(f"{n_active} active of {n_expert} experts")
    expert_dim = count(c, "moe_intermediate_size", count(c, "intermediate_size"))
    shared_dim = (c.get("n_shared_experts") or 0) * expert_dim
    n_group, topk_group = count(c, "n_group", 1), count(c, "topk_group", 1)
    size = n_expert // n_group
    group_top = 1 if c.get("topk_method") == "group_limited_greedy" else 2
    if (n_expert % n_group or topk_group > n_group or n_active > size * topk_group
            or n_group > 1 and size < group_top):
        raise ValueError(f"{n_active} of {n_expert} experts in {topk_group} of {n_group} groups")
    return dict(n_expert=n_expert, n_active=n_active, expert_dim=expert_dim,
                norm_topk_prob=bool(c.get("norm_topk_prob", True)),
                choice_bias=bool(c.get("use_expert_bias")),
                n_group=n_group, topk_group=topk_group, group_top=group_top,
                routed_scale=float(c.get("routed_scaling_factor") or 1),
                shared_dim=int(c.get("shared_expert_intermediate_size") or shared_dim))


# ---- RoPE ---------------------------------------------------------------------------------------

def stated_rope(c: dict) -> dict:
    """`rope_scaling` (before transformers 5), else `rope_parameters`: as transformers reads them.

    Where both are there, of which the first was added by hand, it stands in for the second; beside
    `rope_parameters` by layer type it is part of those of full attention. ValueError where
    transformers would lose what the second one says of RoPE's base.
    """
    scaling, parameters = c.get("rope_scaling") or {}, c.get("rope_parameters") or {}
    if not scaling or not parameters:
        return scaling or parameters
    if is_by_kind(parameters) and not is_by_kind(scaling):
        full = parameters.get("full_attention") or {}
        return {**parameters, "full_attention": {**full, **scaling}}
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        inner, outer = parameters.get(key), c.get(key) or default
        if inner is not None and scaling.get(key) is None and inner != outer:
            raise ValueError(f"'rope_scaling' stands in for 'rope_parameters' and has no '{key}', "
                             f"which is {brief(inner)} there: add it to 'rope_scaling'")
    return scaling


def is_by_kind(rope: dict) -> bool:
    return any(kind in rope for kind in KINDS_OF_ATTENTION)


def rope_kind(rope: dict) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _ropes(c: dict, family: Family) -> dict[str, RopeVariant]:
    """RoPE by layer type: one for all, or one each for full and sliding attention."""
    rope, theta = stated_rope(c), c.get("rope_theta", 10000.0)
    if is_by_kind(rope):
        return {kind: _rope(c, rope.get(kind) or {}, theta) for kind in KINDS_OF_ATTENTION}
    ropes = dict.fromkeys(KINDS_OF_ATTENTION, _rope(c, rope, theta))
    if family.plain_local_rope or "rope_local_base_freq" in c:         # before transformers 5
        local = c.get("rope_local_base_freq") or rope.get("rope_theta") or theta
        ropes["sliding_attention"] = _rope(c, {}, local)
    return ropes


def _rope(c: dict, rope: dict, theta) -> RopeVariant:
    """One RoPE, from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    kind = rope_kind(rope)
    kind = "default" if kind == "mrope" else kind  # axes of an image, which are one in text
    theta = float(rope.get("rope_theta") or theta)
    if not theta > 1:
        raise ValueError(f"'rope_theta' is {theta}, expected a number above 1")
    partial = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    longest = c["max_position_embeddings"]
    original = (c.get("original_max_position_embeddings")
                or rope.get("original_max_position_embeddings") or longest)
    original = longest if kind == "dynamic" else original
    factor = float(rope.get("factor") or longest / original)
    if kind == "dynamic" and rope.get("alpha"):    # Hunyuan's: the base alone, whatever the length
        n = int(head_dim(c) * partial)
        kind, theta = "default", theta * float(rope["alpha"]) ** (n / (n - 2))
    facts = dict(theta=theta, partial=float(partial), original_context=int(original))
    divisors = rope.get("divisors")                # only from a GGUF
    if divisors:
        facts["divisors"] = tuple(divisors)
    if rope.get("head_dim"):                       # only from what respells it
        facts["head_dim"] = rope["head_dim"]
    if kind == "default":
        return RopeVariant(**facts)
    if kind in ("longrope", "su") or "long_factor" in rope:            # Phi-3 wrote su, and yarn
        n_freq = int(head_dim(c) * partial) // 2
        return RopeVariant(**facts | _longrope(rope, factor, original, n_freq))
    if kind in ("linear", "dynamic", "llama3") and not rope.get("factor"):
        raise ValueError(f"RoPE scaling '{kind}' has no 'factor'")
    facts.update(kind=kind, factor=factor)
    if kind in ("linear", "dynamic"):
        return RopeVariant(**facts)
    if kind == "llama3":
        return RopeVariant(**facts, low_freq_factor=float(rope.get("low_freq_factor", 1)),
                    high_freq_factor=float(rope.get("high_freq_factor", 4)))
    if kind == "yarn":
        return RopeVariant(**facts, amplitude=_yarn_amplitude(rope, factor),
                    low_freq_factor=float(rope.get("beta_slow") or 1),
                    high_freq_factor=float(rope.get("beta_fast") or 32),
                    truncate=bool(rope.get("truncate", True)))
    raise ValueError(f"RoPE scaling '{kind}' is not supported (supported: default, linear, "
                     "dynamic, llama3, yarn, longrope)")


def _longrope(rope: dict, factor: float, original: int, n_freq: int) -> dict:
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1
    short, long = (tuple(map(float, rope.get(key) or ()))
                   for key in ("short_factor", "long_factor"))
    if {len(short), len(long)} != {n_freq}:
        raise ValueError(f"{len(short)} short and {len(long)} long RoPE factors for "
                         f"{n_freq} frequencies")
    return dict(divisors=short, long_divisors=long, amplitude=float(amplitude))


def yarn_mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn_amplitude(rope: dict, factor: float) -> float:
    def mscale(weight):
        return yarn_mscale(factor, weight)

    amplitude, one, all_dim = (
        rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if amplitude is None:
        amplitude = mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)
    return float(amplitude)


def head_dim(c: dict) -> int:
    """Of queries and keys; of latent attention, of the part that RoPE turns."""
    stated = c.get("qk_rope_head_dim") or c.get("head_dim")
    return stated or c["hidden_size"] // c["num_attention_heads"]
