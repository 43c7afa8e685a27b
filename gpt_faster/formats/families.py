"""What a config.json leaves out, for each model family: one row of FAMILIES.

A Llama-like family is one row. Data only: config.py reads config.json with it, names.py renames
tensors by `names`, fold.py applies `folds` to the weights.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import checkpoint
from checkpoint import always, qwen_is_sliding, qwen_is_sparse
from gpt_faster.formats.names import (
    AFMOE_NAMES,
    APERTUS_NAMES,
    BAMBA_NAMES,
    DELTA_NAMES,
    ERNIE_MOE_NAMES,
    EXAONE_NAMES,
    FALCON_H1_NAMES,
    FALCON_NAMES,
    GEMMA4_MOE_NAMES,
    GEMMA4_NAMES,
    GPT2_NAMES,
    GPT_BIGCODE_NAMES,
    GPT_NEO_NAMES,
    GPT_NEOX_NAMES,
    GPT_OSS_NAMES,
    GPTJ_NAMES,
    GRANITE_MOE_NAMES,
    HUNYUAN_MOE_NAMES,
    HUNYUAN_NAMES,
    JAMBA_NAMES,
    KOLIBRI_NAMES,
    LAGUNA_NAMES,
    LATENT_NAMES,
    LFM2_NAMES,
    MAMBA1_NAMES,
    MAMBA2_NAMES,
    MIMO_NAMES,
    MINIMAX_NAMES,
    MOE_NAMES,
    MPT_NAMES,
    NEMOTRON_H_NAMES,
    OLMO_HYBRID_NAMES,
    OPT_NAMES,
    PHI_NAMES,
    QWEN3_VL_MOE_NAMES,
    SANDWICH_NAMES,
    SARVAM_NAMES,
    SIGMOID_NAMES,
    ZAMBA2_NAMES,
    Fused,
    mamba_names,
)
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.mamba import AttentionAndMamba, Mamba2
from gpt_faster.layers.mamba1 import Mamba1


@dataclass(frozen=True)
class Family(checkpoint.Family):
    """How a model_type differs from Llama. `overrides` are fields of FlatConfig."""

    moe: dict = field(default_factory=dict)        # MoEVariant's fields that config.json omits
    scores: dict = field(default_factory=dict)     # Scores' fields, likewise
    names_with_experts: dict | None = None         # instead of `names` in MoE models
    folds: dict = field(default_factory=dict)      # Folds' fields
    scaled_embed: bool = False                     # embeddings are multiplied by sqrt(dim)
    has_rope: Callable[[dict, int], bool] = lambda c, i: True      # does layer i use RoPE?
    mixers: dict[str, Callable[[dict], object]] = field(default_factory=dict)  # ModelConfig.mixer
    plain_local_rope: bool = False                 # sliding layers: RoPE without scaling
    key_aliases: dict = field(default_factory=dict)    # its config.json keys: the usual ones
    respell: Callable[[dict], dict] = lambda c: c  # rewrite config.json in usual keys
    # a tensor's name, before `names`; None: a copy of another
    rename: Callable[[str, dict], str | None] | None = None

    def names_of(self, c: dict) -> dict:
        """Names of the checkpoint's tensors -> our names, for this config.json."""
        has_other = self.names_with_experts is not None and c.get("num_experts")
        return self.names_with_experts if has_other else self.names


NO_SINK = -1e30                                    # exp(NO_SINK) is 0


def stated_folds(c: dict) -> dict:
    """Folds' fields that config.json sets."""
    stated = {}
    if c.get("kv_lora_rank"):
        stated["interleaved_rope"] = bool(c.get("rope_interleave", True))
    if layers := c.get("layers_without_sinks"):
        pattern = rf"^layers\.({'|'.join(map(str, layers))})\.attn\.attend\.sinks$"
        stated["constants"] = {pattern: NO_SINK}
    return dict(stated, logits_divisor=c.get("logits_scaling") or 1,
                one_norm=bool(c.get("one_norm")),
                slopes_base=float(c.get("alibi_bias_max") or 8),
                k_is_v=bool(c.get("attention_k_eq_v")), v_dim=c.get("narrow_v_head_dim") or 0,
                gate_per_head=bool(c.get("gate_per_head")),
                v_scale=float(c.get("attention_value_scale") or 1),
                shared_scale=float(c.get("shared_expert_scale") or 1),
                slopes_scale=float(c.get("alibi_scale") or 1),
                post_norm_scale=float(c.get("post_norm_scale") or 1),
                factors=c.get("factors") or {})


def _smollm3_has_rope(c, i):
    stated = c.get("no_rope_layers")               # 1: RoPE
    return bool(stated[i] if stated else (i + 1) % c.get("no_rope_layer_interval", 4))


def _exaone4_is_sliding(c, i):
    every = c.get("sliding_window_pattern") or 0   # "LLLG", or 4, which means the same
    if isinstance(every, str):
        return every[i % len(every)] == "L" and i < c["num_hidden_layers"] - 1
    return bool(c.get("sliding_window")) and every > 0 and (i + 1) % every != 0


def _exaone4_has_rope(c, i):                       # full attention: only if no layer slides
    kinds = c.get("layer_types")
    is_sliding = kinds[i] == "sliding_attention" if kinds else _exaone4_is_sliding(c, i)
    return is_sliding or not c.get("sliding_window")


def _all_but_every_fourth(c, i):
    return i % 4 != 0


def _is_sparse_after_first(c, i):
    stated = c.get("mlp_layer_types")
    return stated[i] == "sparse" if stated else i >= c.get("first_k_dense_replace", 0)


def _never(c, i):
    return False


def _slides(c, i):
    """By layer_types or sliding_window_pattern; default: all but every fourth layer."""
    kinds = c.get("layer_types")
    if kinds:
        return kinds[i] == "sliding_attention"
    return (i + 1) % c.get("sliding_window_pattern", 4) != 0


def _muse_slides(c, i):
    return (c["num_hidden_layers"] - 1 - i) % 4 != 0


def _ernie_is_sparse(c, i):
    last = c["moe_layer_end_index"] if c["moe_layer_end_index"] >= 0 else c["num_hidden_layers"] - 1
    on_time = (i + 1) % c["moe_layer_interval"] == 0
    return on_time and c["moe_layer_start_index"] <= i <= last


def _gated_delta(c):
    counts = {key: c.get(f"linear_{key}") for key in (
        "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")}
    for key, n in counts.items():
        if type(n) is not int or n < 1:
            raise ValueError(f"'linear_{key}' is {n!r}, expected a positive integer")
    shape = GatedDelta(*counts.values())
    if shape.n_v_head % shape.n_k_head or shape.n_tap < 2:
        raise ValueError(f"{shape.n_v_head} value heads cannot share {shape.n_k_head} key heads "
                         f"evenly, or a convolution of {shape.n_tap} is too short")
    return shape


def _mamba2(c):
    """Mamba-2 by Bamba's keys; a respelling translates others to them."""
    sizes = {key: checkpoint.count(c, f"mamba_{key}") for key in (
        "n_heads", "d_head", "n_groups", "d_state", "d_conv")}
    activation = c.get("mamba_hidden_act") or c.get("hidden_act") or "silu"
    if activation != "silu":
        raise ValueError(f"Mamba layers with the activation {activation!r} are not supported, only "
                         "silu")
    least, most = _step_limits(c)
    return Mamba2(*sizes.values(), bias=checkpoint.flag(c, "mamba_proj_bias"),
                  conv_bias=checkpoint.flag(c, "mamba_conv_bias", True), min_step=least,
                  max_step=most, norm=checkpoint.flag(c, "mamba_rms_norm", True),
                  norm_first=checkpoint.flag(c, "mamba_norm_before_gate"))


def _mamba1(c, norm=False, norm_eps=None):
    """Mamba 1 by Jamba's keys."""
    if c.get("hidden_act", "silu") != "silu":
        raise ValueError(f"Mamba layers with the activation {c['hidden_act']!r} are not supported, "
                         "only silu")
    rank = c.get("mamba_dt_rank")
    rank = math.ceil(c["hidden_size"] / 16) if rank in (None, "auto") else rank
    counts = dict(c, mamba_dt_rank=rank, mamba_d_inner=c.get("mamba_d_ssm")
                  or int(checkpoint.count(c, "mamba_expand") * c["hidden_size"]))
    sizes = (checkpoint.count(counts, f"mamba_{key}")
             for key in ("d_inner", "d_state", "dt_rank", "d_conv"))
    return Mamba1(*sizes, bias=checkpoint.flag(c, "mamba_proj_bias"),
                  conv_bias=checkpoint.flag(c, "mamba_conv_bias", True), norm=norm,
                  norm_eps=norm_eps)


def _falcon_mamba(c):
    return _mamba1(c, norm=True, norm_eps=checkpoint.number(c, "mixer_rms_eps", least=0))


def _jamba_mamba(c):
    return _mamba1(c, norm=True)


def _step_limits(c):
    """time_step_limit: the least and the largest step. transformers writes an infinity as an object
    {"__float__": "Infinity"}."""
    stated = c.get("time_step_limit") or (0.0, math.inf)
    if isinstance(stated, list | tuple):
        stated = [math.inf if n == {"__float__": "Infinity"} else n for n in stated]
    numbers = isinstance(stated, list) and len(stated) == 2 and all(
        type(n) in (int, float) for n in stated)
    if not numbers or not 0 <= stated[0] < stated[1]:
        raise ValueError(f"'time_step_limit' is {stated!r}, expected two increasing numbers")
    return float(stated[0]), float(stated[1])


def _mamba_respelled(c, inner=None):
    """Fill in the head width. inner: channels of all heads, default mamba_expand * hidden_size."""
    inner = inner or int(c["mamba_expand"] * c["hidden_size"])
    n_head = checkpoint.count(c, "mamba_n_heads")
    stated = c.get("mamba_d_head")
    if stated in (None, "auto") and inner % n_head == 0:
        stated = inner // n_head
    if type(stated) is not int or stated * n_head != inner:
        raise ValueError(f"{n_head} Mamba heads of {stated} channels, expected {inner} channels")
    return {**c, "mamba_d_head": stated}


def _bamba_respelled(c):
    attends = c.get("attn_layer_indices") or []
    kinds = ["full_attention" if i in attends else "linear_attention"
             for i in range(c["num_hidden_layers"])]
    return _mamba_respelled({**c, "layer_types": kinds, "partial_rotary_factor": 0.5})


def _mamba_alone_respelled(c):
    """No attention and no feed-forward layers; their sizes in a ModelConfig are not used."""
    if "mamba_n_heads" in c:                       # Mamba 2
        c = _mamba_respelled(c, c.get("mamba_d_ssm"))
    n_layer, n_head = c["num_hidden_layers"], c.get("mamba_n_heads", 1)
    return {**c, "num_attention_heads": n_head, "num_key_value_heads": n_head, "head_dim": 2,
            "intermediate_size": n_head, "layer_types": ["linear_attention"] * n_layer,
            "branches": ["attn_only"] * n_layer}


def _without_backbone(name, c):
    return re.sub(r"^(model\.)?backbone\.", "", name)


ZAMBA2_KINDS = {"mamba": "linear_attention", "linear_attention": "linear_attention",
                "hybrid": "hybrid"}
ZAMBA2_LAYERS = "m" + "mmmmmh" * 7 + "mmmmhmmmhmm"


def _zamba2_respelled(c):
    """Layers with a transformer block take turns with num_mem_blocks of them, each held by the
    first layer that reads it. transformers ties these weights only if it ties the embeddings'."""
    if c["use_long_context"]:
        raise ValueError("'use_long_context' is not supported")
    if c["hidden_act"] != "gelu":
        raise ValueError(f"Zamba 2 with the activation {c['hidden_act']!r} is not supported, only "
                         "gelu")
    stated = c.get("layers_block_type") or c.get("layer_types") or [
        {"m": "mamba", "h": "hybrid"}[letter] for letter in ZAMBA2_LAYERS]
    kinds = [ZAMBA2_KINDS.get(kind) for kind in stated]
    if None in kinds:
        raise ValueError(f"'layers_block_type' is {stated!r}, expected mamba or hybrid for each "
                         "layer")
    hybrids = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    is_tied = checkpoint.flag(c, "tie_word_embeddings")
    n_block = checkpoint.count(c, "num_mem_blocks") if is_tied else len(hybrids)
    sources = {i: hybrids[n % n_block] if n >= n_block else None for n, i in enumerate(hybrids)}
    return _mamba_respelled({
        **c, "layer_types": kinds, "block_sources": sources, "mamba_hidden_act": "silu",
        "head_dim": 2 * c["hidden_size"] // c["num_attention_heads"],
        "intermediate_size": c.get("intermediate_size") or 4 * c["hidden_size"],
        "mamba_proj_bias": c["add_bias_linear"], "mlp_bias": c["add_bias_linear"]})


def _zamba2_mamba(c):
    return replace(_mamba2(c), norm_eps=1e-5)


def _zamba2_name(name, c):
    """A block has the adapters of all layers in lists: [n] is of the n-th that reads a block.
    Copies of a block in layers that do not hold it, and their adapters, are left out."""
    part = re.match(r"model\.layers\.(\d+)\.shared_transformer\.(.+)", name)
    if not part:
        return name
    layer, sources, hybrids = int(part[1]), c["block_sources"], list(c["block_sources"])
    adapter = re.fullmatch(r"\w+\.(?:linear_)?(\w+?)_(?:proj_)?adapter_list\.(\d+)\.([01])\.weight",
                           part[2])
    if not adapter or int(adapter[2]) >= len(hybrids):
        return name if sources.get(layer) is None else None
    reader = hybrids[int(adapter[2])]
    holder = reader if sources[reader] is None else sources[reader]
    if layer != holder:
        return None
    of = {"gate_up": "ffn"}.get(adapter[1], adapter[1])
    return f"layers.{reader}.adapt_{of}.{('low', 'high')[int(adapter[3])]}.weight"


def _jamba_respelled(c):
    """Attention in every n-th layer, experts in every m-th."""
    n_layer, n_expert = range(c["num_hidden_layers"]), c["num_experts"]
    attends, is_sparse = (
        [i % checkpoint.count(c, f"{what}_layer_period") == c[f"{what}_layer_offset"]
         for i in n_layer] for what in ("attn", "expert"))
    kinds = ["full_attention" if one else "linear_attention" for one in attends]
    ffns = ["sparse" if one and n_expert > 1 else "dense" for one in is_sparse]
    return {"layer_types": kinds, "mlp_layer_types": ffns, **c}        # a GGUF's tensors say it


def _falcon_h1_respelled(c):
    """Its multipliers, which are folded into the weights."""
    c = _mamba_respelled(c, c.get("mamba_d_ssm"))
    gate, down = c.get("mlp_multipliers") or (1.0, 1.0)
    z, x, b, cc, dt = c.get("ssm_multipliers") or (1.0,) * 5
    m, weight = r"\.attn\.mamba\.", r"\.(weight|scales|zeros)$"
    factors = {
        rf"\.attn\.w[qkv]{weight}": c.get("attention_in_multiplier"),
        r"\.attn\.wk\.": c.get("key_multiplier"),
        r"\.attn\.wo\.": c.get("attention_out_multiplier"),
        rf"{m}(gate|q|k|v|decay){weight}": c.get("ssm_in_multiplier"),
        rf"{m}gate\.": z, rf"{m}v\.": x, rf"{m}k\.": b, rf"{m}q\.": cc, rf"{m}decay\.": dt,
        rf"{m}wo\.": c.get("ssm_out_multiplier"),
        r"\.ffn\.gate\.": gate, r"\.ffn\.down\.": down}
    return {**c, "logits_scaling": 1 / (c.get("lm_head_multiplier") or 1),
            "factors": {of: float(by) for of, by in factors.items() if by not in (None, 1)}}


NEMOTRON_KINDS = {"M": "M", "mamba": "M", "linear_attention": "M", "*": "*", "attention": "*",
                  "full_attention": "*", "-": "-", "mlp": "-", "E": "E", "moe": "E"}
NEMOTRON_MIXERS = {"M": "linear_attention", "*": "full_attention"}


def _nemotron_h_respelled(c):
    """Its layers have one branch each: Mamba or attention, and a feed-forward layer if one follows
    it, become a layer of ours."""
    stated = (c.get("layers_block_type") or c.get("layer_types")
              or c.get("hybrid_override_pattern") or "ME*-")
    kinds = [NEMOTRON_KINDS.get(kind) for kind in stated]
    if not kinds or None in kinds:
        raise ValueError(f"'layers_block_type' is {stated!r}, expected mamba, attention, mlp or "
                         "moe for each layer, or 'hybrid_override_pattern' of M, *, - and E")
    ours, places = [], []                          # (mixer, feed-forward) of our layers; of theirs:
    for kind in kinds:                             # (our layer, module)
        if kind in NEMOTRON_MIXERS:
            ours.append([kind, None])
        elif ours and ours[-1][1] is None:
            ours[-1][1] = kind
        else:
            ours.append([None, kind])
        places.append((len(ours) - 1, {"M": "mamba", "*": "self_attn"}.get(kind, "mlp")))
    branches = {(True, False): "attn_only", (False, True): "ffn_only", (True, True): None}
    return _mamba_respelled({
        **c, "mamba_hidden_act": c.get("mamba_hidden_act") or "silu",
        "num_hidden_layers": len(ours), "nemotron_places": places,
        "layer_types": [NEMOTRON_MIXERS.get(mixer, "full_attention") for mixer, _ in ours],
        "mlp_layer_types": ["sparse" if ffn == "E" else "dense" for _, ffn in ours],
        "branches": [branches[mixer is not None, ffn is not None] for mixer, ffn in ours],
        "shared_expert_intermediate_size": c["moe_shared_expert_intermediate_size"],
    }, c["mamba_n_heads"] * c["mamba_d_head"])


def _nemotron_h_name(name, c):
    """backbone.layers.7.mixer.up_proj.weight -> layers.3.mlp.up_proj.weight"""
    layer = re.fullmatch(r"(?:backbone|model)\.layers\.(\d+)\.(norm|mixer)\.(.+)", name)
    if not layer or int(layer[1]) >= len(c["nemotron_places"]):
        return {"backbone.embeddings.weight": "embed_tokens.weight",
                "model.embeddings.weight": "embed_tokens.weight",
                "backbone.norm_f.weight": "norm.weight",
                "model.norm_f.weight": "norm.weight"}.get(name, name)
    i, module = c["nemotron_places"][int(layer[1])]
    if layer[2] == "norm":
        module = "post_attention_layernorm" if module == "mlp" else "input_layernorm"
    return f"layers.{i}.{module}.{layer[3]}"


def _falcon_h1(c):
    if checkpoint.flag(c, "projectors_bias") != checkpoint.flag(c, "mamba_proj_bias"):
        raise ValueError("'projectors_bias' and 'mamba_proj_bias' differ, which is not supported")
    return AttentionAndMamba(_mamba2(c))


def _olmo_hybrid_respelled(c):
    """DeltaNet layers have norms before their branches, attention layers after them."""
    n_layer, n_head = c["num_hidden_layers"], c["num_attention_heads"]
    kinds = c.get("layer_types") or [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layer)]
    if "full_attention" not in kinds:
        kinds = [*kinds[:-1], "full_attention"]
    n_key = c.get("linear_num_key_heads") or n_head
    key_dim = c.get("linear_key_head_dim") or int(0.75 * c["hidden_size"] / n_key)
    return {**c, "layer_types": kinds, "linear_num_key_heads": n_key,
            "linear_num_value_heads": c.get("linear_num_value_heads") or n_head,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": c.get("linear_value_head_dim") or 2 * key_dim,
            "norm_placement": ["pre" if kind == "linear_attention" else "post" for kind in kinds]}


def _olmo_hybrid_has_rope(c, i):                   # the released models have none: theta is null
    rope = checkpoint.stated_rope(c)
    stated = rope if "rope_theta" in rope else c
    return stated.get("rope_theta", 10000.0) is not None


def _olmo_hybrid_delta(c):
    scale = 2.0 if c["linear_allow_neg_eigval"] else 1.0
    return replace(_gated_delta(c), beta_scale=scale, norm_eps=1e-5)


def _qwen_next_respelled(c):
    if c.get("layer_types"):
        return c
    every = c.get("full_attention_interval") or 4
    kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention"
             for i in range(c["num_hidden_layers"])]
    return {**c, "layer_types": kinds}


def _gpt2_respelled(c):
    return c if c.get("intermediate_size") else {**c, "intermediate_size": 4 * c["hidden_size"]}


def _granite_hybrid_respelled(c):
    """Granite 4.0: attention or Mamba in each layer, dense or with experts."""
    spelled = {"attention": "full_attention", "mamba": "linear_attention"}
    kinds = (c.get("layer_types") or c.get("layers_block_type")
             or ["linear_attention"] * c["num_hidden_layers"])
    kinds = [spelled.get(kind, kind) for kind in kinds]
    if "linear_attention" in kinds:
        c = _mamba_respelled(c, c.get("mamba_d_ssm"))      # stated in GGUF files
    if not c.get("num_experts"):
        c = {**c, "intermediate_size": c["shared_intermediate_size"]}
    return _granite_shared({**c, "layer_types": kinds})


def _granite_shared(c):
    return {**c, "shared_expert_intermediate_size": c["shared_intermediate_size"]}


def _one_number(c, *keys):
    """Replace a per-layer list by its number. ValueError where layers differ."""
    for key in keys:
        value = c.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"'{key}' differs from layer to layer, which is not supported")
            c = {**c, key: value[0]}
    return c


def _hunyuan_moe_respelled(c):
    c = _one_number(c, "num_experts", "num_experts_per_tok", "moe_intermediate_size",
                    "num_shared_expert")
    return {**c, "shared_expert_intermediate_size": c["intermediate_size"]}


def _cohere_respelled(c):
    return {**c, "logits_scaling": 1 / c["logit_scale"], "one_norm": True,
            "qk_layernorm": c.get("use_qk_norm"), "use_qk_norm": None}


def _cohere2_moe_respelled(c):
    """RMSNorm if 'rms_norm_eps' is set, else LayerNorm; dense layers first, of another width."""
    n_layer, n_dense = c["num_hidden_layers"], c.get("first_k_dense_replace") or 0
    every, every_dense = c["sliding_window_pattern"], c["prefix_dense_sliding_window_pattern"]
    if not all(type(n) is int and n > 0 for n in (every, every_dense)):
        raise ValueError(f"'sliding_window_pattern' is {every!r} and "
                         f"'prefix_dense_sliding_window_pattern' {every_dense!r}, expected "
                         "positive integers")
    is_full = [(i + 1) % every_dense == 0 for i in range(n_dense)]
    is_full += [(i + 1) % every == 0 for i in range(n_layer - n_dense)]
    kinds = c.get("layer_types") or [
        "full_attention" if full else "sliding_attention" for full in is_full]
    mlps = c.get("mlp_layer_types") or ["dense"] * n_dense + ["sparse"] * (n_layer - n_dense)
    for key, known in (("expert_selection_fn", ("softmax", "sigmoid")),
                       ("shared_expert_combination_strategy", ("sum", "average"))):
        if c[key] not in known:
            raise ValueError(f"'{key}' is {c[key]!r}, expected {' or '.join(known)}")
    is_average = c["shared_expert_combination_strategy"] == "average" and c.get("n_shared_experts")
    scale = 0.5 if is_average else 1.0
    eps = c.get("eps_of_rms_norm")
    return {**_cohere_respelled(c), "layer_types": kinds, "mlp_layer_types": mlps,
            "has_layer_norm": eps is None,
            "rms_norm_eps": c["rms_norm_eps"] if eps is None else eps,
            "norm_topk_prob": c["expert_selection_fn"] == "softmax" or c["norm_topk_prob"],
            "moe_intermediate_size": c["intermediate_size"],
            "intermediate_size": c.get("prefix_dense_intermediate_size") or c["intermediate_size"],
            "routed_scaling_factor": scale, "shared_expert_scale": scale}


def _cohere2_moe_has_rope(c, i):
    is_dense = c["mlp_layer_types"][i] == "dense"
    forced = is_dense and c["prefix_dense_sliding_window_pattern"] == 1
    return c["layer_types"][i] == "sliding_attention" or forced


def _kolibri_respelled(c):
    kinds = c.get("layer_types") or [
        "full_attention" if (i + 1) % 5 == 0 else "sliding_attention"
        for i in range(c["num_hidden_layers"])]
    return {**c, "layer_types": kinds, "intermediate_size": c["moe_intermediate_size"]}


def _mimo_respelled(c):
    """Twice as many key/value heads and attention sinks in sliding layers; narrow values.

    The Hub's config.json has hybrid_layer_pattern and moe_layer_freq, a number for each layer.
    """
    n_layer = c["num_hidden_layers"]
    slides = c.get("hybrid_layer_pattern") or [i > 0 and (i + 1) % 6 != 0 for i in range(n_layer)]
    kinds = c.get("layer_types") or [
        "sliding_attention" if one else "full_attention" for one in slides]
    is_sparse = c.get("moe_layer_freq") or [0] + [1] * (n_layer - 1)
    mlps = c.get("mlp_layer_types") or ["sparse" if one else "dense" for one in is_sparse]
    if len(mlps) != n_layer:
        raise ValueError(f"'mlp_layer_types' or 'moe_layer_freq' has {len(mlps)} entries, but the "
                         f"model has {n_layer} layers")
    thetas = dict(full_attention=c.get("rope_theta") or 5e6,
                  sliding_attention=c.get("swa_rope_theta") or 1e4)
    partial, stated = c.get("partial_rotary_factor") or 0.334, c.get("rope_parameters") or {}
    ropes = {kind: dict(rope_theta=theta, partial_rotary_factor=partial) | (stated.get(kind) or {})
             for kind, theta in thetas.items()}
    n_kv_head, v_dim = c["num_key_value_heads"], c["v_head_dim"]
    for key, expected in (("swa_num_key_value_heads", 2 * n_kv_head), ("swa_v_head_dim", v_dim),
                          ("swa_head_dim", c["head_dim"]),
                          ("swa_num_attention_heads", c["num_attention_heads"])):
        if c.get(key) not in (None, expected):
            raise ValueError(f"'{key}' is {c[key]}, only {expected} is supported")
    if not 0 < v_dim <= c["head_dim"]:
        raise ValueError(f"'v_head_dim' is {v_dim}, expected 1 to 'head_dim', {c['head_dim']}")
    widths = [dict(head_dim=c["head_dim"], intermediate_size=c["intermediate_size"],
                   num_key_value_heads=n_kv_head * (2 if kind == "sliding_attention" else 1))
              for kind in kinds]
    window = c["sliding_window"]
    if c.get("sliding_window_size"):               # without the query itself
        window = c["sliding_window_size"] + 1
    return {**c, "layer_types": kinds, "mlp_layer_types": mlps, "layer_widths": widths,
            "rope_parameters": ropes, "partial_rotary_factor": None, "sliding_window": window,
            "narrow_v_head_dim": v_dim if v_dim < c["head_dim"] else 0,
            "layers_without_sinks": [i for i, kind in enumerate(kinds)
                                     if kind != "sliding_attention"]}


def _laguna_respelled(c):
    """Numbers of heads by layer; a gate for each head, or for each channel of all heads."""
    if c.get("moe_apply_router_weight_on_input"):
        raise ValueError("'moe_apply_router_weight_on_input' is not supported")
    if c["gating"] not in (True, "per-head", "per-element"):
        raise ValueError(f"'gating' is {c['gating']!r}, expected true, per-head or per-element")
    n_layer, n_head = c["num_hidden_layers"], c["num_attention_heads"]
    heads = c.get("num_attention_heads_per_layer") or [n_head] * n_layer
    if len(heads) != n_layer:
        raise ValueError(f"'num_attention_heads_per_layer' has {len(heads)} entries, but the model "
                         f"has {n_layer} layers")
    widths = [dict(head_dim=c["head_dim"], num_key_value_heads=c["num_key_value_heads"],
                   intermediate_size=c["intermediate_size"], num_attention_heads=n) for n in heads]
    ropes = c.get("rope_parameters") or dict(
        full_attention=dict(rope_theta=5e5, partial_rotary_factor=0.5),
        sliding_attention=dict(rope_theta=1e4, partial_rotary_factor=1.0))
    return {**c, "layer_widths": widths, "rope_parameters": ropes, "rope_scaling": None,
            "partial_rotary_factor": None, "gate_per_head": c["gating"] != "per-element"}


def _sarvam_mla_respelled(c):
    rope = c.get("rope_scaling") or {}
    if "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")):   # is YaRN
        c = {**c, "rope_scaling": {**rope, "type": "yarn", "rope_type": "yarn"}}
    return {**c, "head_dim": None}                 # vLLM's, in the Hub's config.json


def _gptj_respelled(c):
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    return _gpt2_respelled({**c, "partial_rotary_factor": c["rotary_dim"] / head_dim,
                            "one_norm": True})


def _gpt_neo_respelled(c):
    """attention_types [[["global", "local"], 12]]: the two alternate, 12 times."""
    kinds = c.get("attention_layers") or [
        kind for pattern, n in c["attention_types"] for kind in pattern * n]
    spelled = {"global": "full_attention", "local": "sliding_attention"}
    return _gpt2_respelled({**c, "layer_types": [spelled.get(kind, kind) for kind in kinds]})


def _gpt_bigcode_respelled(c):
    n_kv_head = 1 if c["multi_query"] else c["num_attention_heads"]
    return _gpt2_respelled({**c, "num_key_value_heads": n_kv_head})


def _falcon_respelled(c):
    """7B: one key/value head, one shared norm. 40B: neither. RW: sequential blocks, ALiBi."""
    new, n_head = c["new_decoder_architecture"], c["num_attention_heads"]
    shared = 1 if c["multi_query"] else n_head
    parallel = bool(new or c["parallel_attn"])
    n_norm = c.get("num_ln_in_parallel_attn") or (2 if new else 1)
    return _gpt2_respelled({
        **c, "num_key_value_heads": c.get("num_kv_heads") or n_head if new else shared,
        "use_parallel_residual": parallel, "one_norm": parallel and n_norm == 1,
        "attention_bias": c["bias"], "mlp_bias": c["bias"],
        "alibi_scale": (c["hidden_size"] // n_head) ** -0.5})


def _mpt_respelled(c):
    attention = c.get("attn_config") or {}
    if not attention.get("alibi", True) or not c.get("no_bias", True) or c.get("logit_scale"):
        raise ValueError("model_type 'mpt' is supported only with ALiBi, without biases and "
                         "without 'logit_scale'")
    known = ("clip_qkv", "qk_ln", "prefix_lm", "alibi_bias_max")
    return _gpt2_respelled({**c, **{key: attention.get(key) for key in known}})


def _hyperclovax_respelled(c):
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    c = {**c, "logits_scaling": 1 / (c.get("logits_scaling") or 1),
         "attention_multiplier": c.get("attention_multiplier") or head_dim ** -0.5}
    if not c["use_post_norm"]:
        return c
    return {**c, "post_norm_scale": c.get("residual_multiplier"), "residual_multiplier": None}


def _opt_respelled(c):
    usual = (c.get("do_layer_norm_before", True), c.get("layer_norm_elementwise_affine", True),
             c.get("word_embed_proj_dim") in (None, c["hidden_size"]),
             not c.get("_remove_final_layer_norm"))
    if not all(usual):
        raise ValueError("model_type 'opt' is supported only with pre-norm and with "
                         "'word_embed_proj_dim' equal to 'hidden_size' (not OPT-350M)")
    return {**c, "attention_bias": c["enable_bias"], "mlp_bias": c["enable_bias"]}


def _stablelm_respelled(c):
    return {**c, "one_norm": c["use_parallel_residual"]}


def _muse_respelled(c):
    scale = c["head_dim"] ** -0.5 * c["qk_scale_factor"]
    return {**c, "attention_multiplier": scale, "logits_scaling": 1 / c["output_multiplier"]}


def _afmoe_respelled(c):
    scale = c["hidden_size"] ** 0.5 if c.get("mup_enabled") else 1.0
    return {**c, "embedding_multiplier": scale}


def _minimax_respelled(c):
    if "rotary_dim" in c:
        c = {**c, "partial_rotary_factor": c["rotary_dim"] / c["head_dim"]}
    return c


def _deepseek_v2_respelled(c):
    """Expert groups apply only with topk_method "group_limited_greedy"."""
    method = c.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"'topk_method' is {method!r}, expected greedy or group_limited_greedy")
    return c if method == "group_limited_greedy" else {**c, "n_group": 1, "topk_group": 1}


def _minicpm3_respelled(c):
    n_layer, dim = c["num_hidden_layers"], c["hidden_size"]
    depth = n_layer**0.5 if c.get("scale_depth") is None else c["scale_depth"]
    return {**c, "residual_multiplier": depth / n_layer**0.5,
            "embedding_multiplier": c["scale_emb"],
            "logits_scaling": dim / (c.get("dim_model_base") or dim),
            "v_head_dim": c.get("v_head_dim") or dim // c["num_attention_heads"]}


def _mistral4_respelled(c):
    """Its partial_rotary_factor refers to a whole head; our head_dim is the rotated part."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or _MISTRAL4_ROPE
    return {**c, "rope_parameters": {**rope, "partial_rotary_factor": None}, "rope_scaling": None,
            "partial_rotary_factor": None}


def _gemma4_respelled(c):
    """Full-attention layers have other head sizes; the last layers may share earlier KV."""
    if c.get("use_bidirectional_attention") == "vision":               # of images, not of text
        c = {**c, "use_bidirectional_attention": None}
    n = c["num_hidden_layers"]
    kinds = c.get("layer_types") or [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n)]
    kinds = [*kinds[:-1], "full_attention"]
    n_shared = c.get("num_kv_shared_layers") or 0
    widths, sources = [], []
    for i, kind in enumerate(kinds):
        is_shared = i >= n - n_shared
        keys = ("head_dim", "num_key_value_heads", "intermediate_size")
        sizes = {key: c.get(key) for key in keys}
        sizes |= _gemma4_heads(c, i, kind)
        if missing := [key for key in sizes if type(sizes[key]) is not int]:
            raise ValueError(f"layer {i}: '{missing[0]}' is missing")
        if is_shared and c.get("use_double_wide_mlp"):
            sizes["intermediate_size"] *= 2
        widths.append(sizes)
        earlier = [j for j in range(n - n_shared) if kinds[j] == kind]
        if is_shared and not earlier:
            raise ValueError(f"layer {i} shares the keys and values of an earlier layer, but none "
                             f"has '{kind}'")
        sources.append(earlier[-1] if is_shared else None)
    experts = {}
    if c.get("enable_moe_block"):
        experts = dict(shared_expert_intermediate_size=c["intermediate_size"])
    return {**c, "num_experts": None, **({} if not experts else {"num_experts": c["num_experts"]}),
            **experts, "layer_types": kinds, "layer_widths": widths, "kv_sources": sources,
            "rope_parameters": _gemma4_ropes(c, kinds, widths)}


def _gemma4_heads(c: dict, i: int, kind: str) -> dict:
    """Sizes that differ in layer i: per layer (transformers 5), or for full attention."""
    if "per_layer_config" in c:
        return c["per_layer_config"].get(str(i), {})
    if kind != "full_attention":
        return {}
    sizes = {"head_dim": c.get("global_head_dim") or 512}
    if c.get("attention_k_eq_v") and c.get("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = c["num_global_key_value_heads"]
    return sizes


def _gemma4_ropes(c: dict, kinds: list, widths: list) -> dict:
    """RoPE by layer type. "proportional": plain RoPE whose slowest frequencies are set to 0."""
    stated = c.get("rope_parameters") or dict(
        sliding_attention=dict(rope_theta=1e4),
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6))
    ropes = {}
    for kind in ("sliding_attention", "full_attention"):
        rope = stated.get(kind) or {}
        width = next((sizes["head_dim"] for k, sizes in zip(kinds, widths) if k == kind),
                     c["head_dim"])
        if rope.get("rope_type") == "proportional":
            turning = int(rope.get("partial_rotary_factor", 1.0) * width // 2)
            divisors = [float(rope.get("factor", 1))] * turning
            divisors += [float("inf")] * (width // 2 - turning)
            rope = dict(rope_theta=rope.get("rope_theta"), divisors=divisors)
        ropes[kind] = {**rope, "head_dim": None if width == c["head_dim"] else width}
    return ropes


def _lfm2_respelled(c):
    """Compute the feed-forward width; layer_types or full_attn_idxs name the conv layers."""
    width = c.get("block_ff_dim") or c.get("intermediate_size")
    times, multiple = c.get("block_ffn_dim_multiplier"), c.get("block_multiple_of")
    if c.get("block_auto_adjust_ff_dim") and type(width) is int:
        width = int(2 * width / 3)
        if times is not None:
            width = -(-int(times * width) // multiple) * multiple
    n_layer, attending = c["num_hidden_layers"], c.get("full_attn_idxs")
    kinds = c.get("layer_types") or [
        "full_attention" if attending is None or i in attending else "conv"
        for i in range(n_layer)]
    return {**c, "intermediate_size": width, "conv_layers": [kind == "conv" for kind in kinds],
            "layer_types": ["full_attention" if kind == "conv" else kind for kind in kinds],
            "tie_word_embeddings": c.get("tie_embedding", c.get("tie_word_embeddings"))}


def _biased_respelled(c):
    return {**c, "attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]}


_QWEN = dict(sliding_window=4096)
_QWEN2_VL = Family(
    overrides=dict(qkv_bias=True, o_bias=False),
    defaults=dict(_QWEN, num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5,
                  max_position_embeddings=32768, max_window_layers=80),
    is_sliding=qwen_is_sliding)
_QWEN35 = Family(
    overrides=dict(qk_norm="head", attn_gate=True),
    defaults=dict(num_attention_heads=16, num_key_value_heads=4, head_dim=256,
                  partial_rotary_factor=0.25, max_position_embeddings=32768,
                  linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
                  linear_value_head_dim=128, linear_conv_kernel_dim=4),
    mixers=dict(linear_attention=_gated_delta), respell=_qwen_next_respelled, names=DELTA_NAMES,
    folds=dict(norm_offset=1.0, norm_offset_of=r"(^|_)norm", log_decay=True))
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192)
_GEMMA4 = Family(
    overrides=dict(qk_norm="head", v_norm=True, post_norm=True, attn_scale=1.0),
    moe=dict(beside=True, shared_gate=False),
    defaults=dict(_GEMMA, vocab_size=262144, num_attention_heads=8, num_key_value_heads=4,
                  max_position_embeddings=131072, sliding_window=512,
                  hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=256,
                  vocab_size_per_layer_input=262144),
    names=GEMMA4_NAMES, names_with_experts=GEMMA4_MOE_NAMES, scaled_embed=True,
    is_sparse=lambda c, i: bool(c["num_experts"]),
    key_aliases=dict(top_k_experts="num_experts_per_tok"), respell=_gemma4_respelled)
_GLM = dict(attention_bias=True, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7,
            max_position_embeddings=131072, partial_rotary_factor=0.5)
_OFFSET, _INTERLEAVED = dict(norm_offset=1.0), dict(interleaved_rope=True)
_GPT2_KEYS = dict(n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
                  n_positions="max_position_embeddings", n_inner="intermediate_size",
                  layer_norm_epsilon="rms_norm_eps", activation_function="hidden_act")
_NO_BIAS = {r"norm\.bias$": 0.0}                   # of a LayerNorm
_BIASED = dict(qkv_bias=True, o_bias=True, mlp_bias=True)
_COHERE = dict(logit_scale=0.0625, qk_layernorm=False, rope_theta=5e5, max_position_embeddings=8192,
               rms_norm_eps=1e-5, tie_word_embeddings=True)
_SIGMOID = dict(scores="sigmoid", choice_bias=True, shared_gate=False)
_GLM4_NAMES = {"mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up")),
               "post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm"}
_GLM4_MOE = Family(
    overrides=dict(o_bias=False), moe=_SIGMOID,
    defaults=dict(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072,
                  partial_rotary_factor=0.5, num_experts=128, num_experts_per_tok=8,
                  moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1),
    names=SIGMOID_NAMES, is_sparse=_is_sparse_after_first)
_LATENT = dict(kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128,
               v_head_dim=128)
_MISTRAL4_ROPE = dict(rope_type="yarn", rope_theta=1e4, factor=128.0, beta_fast=32.0, beta_slow=1.0,
                      original_max_position_embeddings=8192, mscale_all_dim=1.0, mscale=1.0,
                      llama_4_scaling_beta=0.1)
_LFM2 = dict(rope_theta=1e6, num_key_value_heads=8, max_position_embeddings=128000,
             rms_norm_eps=1e-5, tie_word_embeddings=True, conv_L_cache=3)
_OLMO = dict(pre_norm=False, post_norm=True, qk_norm="wide")
_MAMBA = dict(mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256,
              mamba_d_conv=4, mamba_expand=2)


_MAMBA_ALONE = Family(
    defaults=dict(num_attention_heads=1, max_position_embeddings=1 << 20, rms_norm_eps=1e-5,
                  mamba_d_conv=4, mamba_expand=2, mamba_d_state=16, tie_word_embeddings=True),
    names=MAMBA1_NAMES, folds=dict(log_decay=True), has_rope=_never, rename=_without_backbone,
    mixers=dict(linear_attention=_mamba1), respell=_mamba_alone_respelled,
    key_aliases=dict(state_size="mamba_d_state", conv_kernel="mamba_d_conv", expand="mamba_expand",
                     use_bias="mamba_proj_bias", use_conv_bias="mamba_conv_bias",
                     time_step_rank="mamba_dt_rank", layer_norm_epsilon="rms_norm_eps",
                     num_heads="mamba_n_heads", head_dim="mamba_d_head",
                     n_groups="mamba_n_groups"))


def _of_core(row: checkpoint.Family) -> Family:
    """qk_norm is a bool in the core's ModelConfig, a string in FlatConfig."""
    overrides = {key: "head" if key == "qk_norm" else value for key, value in row.overrides.items()}
    return Family(**{**vars(row), "overrides": overrides})


FAMILIES = {
    **{kind: _of_core(row) for kind, row in checkpoint.FAMILIES.items()},
    "qwen2_moe": Family(
        overrides=dict(o_bias=False),
        defaults=dict(_QWEN, qkv_bias=True, num_experts=60, num_experts_per_tok=4,
                      moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                      norm_topk_prob=False),
        names=MOE_NAMES, is_sparse=qwen_is_sparse,
        is_sliding=lambda c, i: (bool(c.get("use_sliding_window")) and i % 2 == 0
                                 and i < c.get("max_window_layers", 28))),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": replace(
        _QWEN35, moe=dict(norm_topk_prob=True), names=MOE_NAMES | DELTA_NAMES, is_sparse=always,
        defaults=dict(_QWEN35.defaults, num_key_value_heads=2, num_experts=256,
                      num_experts_per_tok=8, moe_intermediate_size=512, intermediate_size=512,
                      shared_expert_intermediate_size=512)),
    "qwen3_next": replace(
        _QWEN35, names=MOE_NAMES | DELTA_NAMES, is_sparse=qwen_is_sparse,
        defaults=dict(_QWEN35.defaults, num_key_value_heads=2, num_experts=512,
                      num_experts_per_tok=10, moe_intermediate_size=512,
                      shared_expert_intermediate_size=512)),
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
        names=QWEN3_VL_MOE_NAMES, is_sparse=qwen_is_sparse),
    "qwen2_5_omni_text": replace(_QWEN2_VL, defaults=dict(
        _QWEN2_VL.defaults, num_key_value_heads=4, rms_norm_eps=1e-6, sliding_window=32768,
        max_window_layers=28, tie_word_embeddings=True)),
    "qwen3_omni_moe_text": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(num_key_value_heads=4, rope_theta=1e6, max_position_embeddings=32768,
                      num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
        names=MOE_NAMES, is_sparse=qwen_is_sparse),
    "mellum": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(num_key_value_heads=4, head_dim=128, sliding_window=1024, num_experts=64,
                      num_experts_per_tok=8, moe_intermediate_size=896,
                      max_position_embeddings=131072, rope_theta=5e5, rope_local_base_freq=1e4,
                      mtp_layer_types=["sliding_attention"]),
        names=MOE_NAMES, is_sparse=_is_sparse_after_first),
    "glm4_moe": _GLM4_MOE,
    "glm4v_moe_text": replace(_GLM4_MOE,
                              defaults=dict(_GLM4_MOE.defaults, attention_bias=True)),
    "deepseek_v2": Family(
        moe=dict(shared_gate=False, norm_topk_prob=False),
        defaults=dict(_LATENT, num_experts=64, n_shared_experts=2, moe_intermediate_size=1407),
        names=SIGMOID_NAMES | LATENT_NAMES, is_sparse=_is_sparse_after_first,
        respell=_deepseek_v2_respelled),
    "deepseek_v3": Family(
        moe=_SIGMOID,
        defaults=dict(_LATENT, num_experts=256, num_experts_per_tok=8, n_shared_experts=1,
                      n_group=8, topk_group=4, routed_scaling_factor=2.5,
                      moe_intermediate_size=2048, first_k_dense_replace=3,
                      max_position_embeddings=4096),
        names=SIGMOID_NAMES | LATENT_NAMES, is_sparse=_is_sparse_after_first),
    "glm4_moe_lite": Family(
        moe=_SIGMOID,
        defaults=dict(_LATENT, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256,
                      num_experts=64, num_experts_per_tok=4, n_shared_experts=1,
                      moe_intermediate_size=1536, routed_scaling_factor=1.8,
                      first_k_dense_replace=1, rms_norm_eps=1e-5, max_position_embeddings=202752),
        names=SIGMOID_NAMES | LATENT_NAMES, is_sparse=_is_sparse_after_first),
    "mistral4": Family(
        moe=dict(shared_gate=False),
        defaults=dict(_LATENT, q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64,
                      num_experts=128, num_experts_per_tok=4, n_shared_experts=1,
                      moe_intermediate_size=2048, max_position_embeddings=1048576),
        names=SIGMOID_NAMES | LATENT_NAMES, is_sparse=_is_sparse_after_first,
        respell=_mistral4_respelled),
    "sarvam_mla": Family(
        moe=_SIGMOID,
        defaults=dict(_LATENT, q_lora_rank=None, num_experts=128, num_experts_per_tok=8,
                      n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5,
                      moe_intermediate_size=2048, first_k_dense_replace=1,
                      max_position_embeddings=4096),
        names=SIGMOID_NAMES | LATENT_NAMES, is_sparse=_is_sparse_after_first,
        respell=_sarvam_mla_respelled),
    "youtu": Family(
        defaults=dict(_LATENT, tie_word_embeddings=True, max_position_embeddings=131072),
        names=LATENT_NAMES),
    "minicpm3": Family(
        defaults=dict(_LATENT, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64,
                      qk_rope_head_dim=32, v_head_dim=None, rope_interleave=False, scale_emb=12,
                      scale_depth=1.4, dim_model_base=256, rms_norm_eps=1e-5,
                      tie_word_embeddings=True, max_position_embeddings=32768),
        names=LATENT_NAMES, respell=_minicpm3_respelled),
    "lfm2": Family(
        overrides=dict(qk_norm="head"),
        defaults=dict(_LFM2, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
                      block_auto_adjust_ff_dim=True),
        names=LFM2_NAMES, key_aliases=dict(norm_eps="rms_norm_eps"), respell=_lfm2_respelled),
    "lfm2_moe": Family(
        overrides=dict(qk_norm="head"), moe=dict(scores="sigmoid"),
        defaults=dict(_LFM2, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792,
                      first_k_dense_replace=2, use_expert_bias=True),
        names=LFM2_NAMES, is_sparse=_is_sparse_after_first, respell=_lfm2_respelled,
        key_aliases=dict(norm_eps="rms_norm_eps", num_dense_layers="first_k_dense_replace")),
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
        names=SIGMOID_NAMES, is_sparse=always),
    "exaone_moe": Family(
        overrides=dict(qk_norm="head"), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4,
                      rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8,
                      moe_intermediate_size=1024, n_shared_experts=1, routed_scaling_factor=2.5,
                      first_k_dense_replace=1),
        names=SIGMOID_NAMES, is_sparse=_is_sparse_after_first, is_sliding=_exaone4_is_sliding,
        has_rope=_exaone4_has_rope),
    "sarvam_moe": replace(
        _GLM4_MOE, names=SARVAM_NAMES, key_aliases=dict(use_qkv_bias="attention_bias"),
        defaults=dict(num_key_value_heads=4, head_dim=64, num_experts=128, num_experts_per_tok=6,
                      moe_intermediate_size=1024, n_shared_experts=1, first_k_dense_replace=1,
                      routed_scaling_factor=2.5, use_qk_norm=True, rope_theta=8e6,
                      max_position_embeddings=131072)),
    "kolibri1": Family(
        overrides=dict(post_norm=True, qk_norm="head"), moe=dict(_SIGMOID, choice_of_logits=True),
        defaults=dict(num_key_value_heads=4, head_dim=128, sliding_window=513, num_experts=384,
                      num_experts_per_tok=6, moe_intermediate_size=512, norm_topk_prob=False,
                      shared_expert_intermediate_size=512, max_position_embeddings=262144),
        names=KOLIBRI_NAMES, is_sparse=always, has_rope=_exaone4_has_rope,
        respell=_kolibri_respelled),
    "mimo_v2_flash": Family(
        overrides=dict(o_bias=False), moe=_SIGMOID, scores=dict(sinks=True),
        defaults=dict(num_key_value_heads=4, head_dim=192, v_head_dim=128, sliding_window=129,
                      num_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
                      rms_norm_eps=1e-5, attention_value_scale=0.707,
                      max_position_embeddings=131072),
        names=MIMO_NAMES, is_sparse=_is_sparse_after_first, respell=_mimo_respelled,
        key_aliases=dict(layernorm_epsilon="rms_norm_eps")),
    "laguna": Family(
        overrides=dict(qk_norm="head", attn_gate=True), moe=_SIGMOID,
        scores=dict(softplus_gate=True),
        defaults=dict(num_key_value_heads=8, head_dim=128, sliding_window=512, num_experts=256,
                      num_experts_per_tok=8, moe_intermediate_size=512, gating=True,
                      shared_expert_intermediate_size=512, first_k_dense_replace=1,
                      max_position_embeddings=131072),
        names=LAGUNA_NAMES, is_sparse=_is_sparse_after_first, respell=_laguna_respelled,
        key_aliases=dict(moe_routed_scaling_factor="routed_scaling_factor",
                         moe_router_logit_softcapping="router_logit_cap")),
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
        names=MINIMAX_NAMES, is_sparse=always, respell=_minimax_respelled),
    "gemma": Family(
        overrides=dict(activation="gelu_tanh"),        # "gelu" in config.json means this too
        defaults=dict(_GEMMA, num_key_value_heads=16), folds=_OFFSET, scaled_embed=True),
    "gemma2": Family(
        overrides=dict(post_norm=True),
        defaults=dict(_GEMMA, num_attention_heads=8, num_key_value_heads=4, sliding_window=4096,
                      query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                      final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh"),
        names=SANDWICH_NAMES, folds=_OFFSET, scaled_embed=True,
        is_sliding=lambda c, i: i % 2 == 0),
    "gemma3_text": Family(
        overrides=dict(qk_norm="head", post_norm=True),
        defaults=dict(_GEMMA, vocab_size=262208, num_attention_heads=8, num_key_value_heads=4,
                      max_position_embeddings=131072, rope_theta=1e6, rope_local_base_freq=1e4,
                      sliding_window=4096, query_pre_attn_scalar=256,
                      hidden_activation="gelu_pytorch_tanh"),
        names=SANDWICH_NAMES, folds=_OFFSET, scaled_embed=True,
        is_sliding=lambda c, i: (i + 1) % c.get("sliding_window_pattern", 6) != 0),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, defaults=dict(
        _GEMMA4.defaults, hidden_size_per_layer_input=0, sliding_window=1024,
        max_position_embeddings=262144)),
    "vaultgemma": Family(
        defaults=dict(_GEMMA, num_attention_heads=8, num_key_value_heads=4, sliding_window=4096,
                      query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                      final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh"),
        names={"pre_feedforward_layernorm": "ffn_norm"}, folds=_OFFSET, scaled_embed=True,
        is_sliding=lambda c, i: i % 2 == 0),
    "phi3": Family(
        defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=4096),
        names={"self_attn.qkv_proj": Fused(("attn.wq", "attn.wk", "attn.wv")),
               "mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up"))},
        is_sliding=always),
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
    "olmo_hybrid": Family(
        overrides=dict(qk_norm="wide"),
        defaults=dict(max_position_embeddings=65536, linear_conv_kernel_dim=4,
                      linear_allow_neg_eigval=True),
        names=OLMO_HYBRID_NAMES, folds=dict(log_decay=True), has_rope=_olmo_hybrid_has_rope,
        mixers=dict(linear_attention=_olmo_hybrid_delta), respell=_olmo_hybrid_respelled),
    "olmoe": Family(
        overrides=dict(qk_norm="wide"),
        defaults=dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
                        rms_norm_eps=1e-5),
        names=MOE_NAMES, is_sparse=always),
    "flex_olmo": Family(
        overrides=_OLMO,
        defaults=dict(num_experts=7, num_experts_per_tok=5, norm_topk_prob=False, rope_theta=5e5,
                      max_position_embeddings=4096),
        names=SANDWICH_NAMES | MOE_NAMES, is_sparse=always),
    "granite": Family(defaults=dict(attention_multiplier=1.0)),
    "granitemoehybrid": Family(
        defaults=dict(_MAMBA, attention_multiplier=1.0, shared_intermediate_size=1024,
                      num_experts=8, num_experts_per_tok=2),
        names={**mamba_names("mamba"), "shared_mlp.input_linear": Fused(("ffn.gate", "ffn.up")),
               "shared_mlp.output_linear": "ffn.down"},
        names_with_experts=GRANITE_MOE_NAMES | mamba_names("mamba"), moe=dict(shared_gate=False),
        folds=dict(log_decay=True), mixers=dict(linear_attention=_mamba2),
        is_sparse=lambda c, i: bool(c["num_experts"]),
        has_rope=lambda c, i: c.get("position_embedding_type") == "rope",
        respell=_granite_hybrid_respelled),
    "bamba": Family(
        defaults=dict(_MAMBA, num_key_value_heads=8, max_position_embeddings=262144,
                      rms_norm_eps=1e-5),
        names=BAMBA_NAMES, folds=dict(log_decay=True), mixers=dict(linear_attention=_mamba2),
        respell=_bamba_respelled),
    "nemotron_h": Family(
        overrides=dict(gated=False), moe=_SIGMOID,
        defaults=dict(num_key_value_heads=8, head_dim=128, intermediate_size=21504,
                      max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="relu2",
                      mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=8, mamba_d_state=128,
                      mamba_d_conv=4, num_experts=8, num_experts_per_tok=2,
                      moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688,
                      routed_scaling_factor=1.0, num_attention_heads=32, num_hidden_layers=4),
        names=NEMOTRON_H_NAMES, folds=dict(log_decay=True), has_rope=_never,
        mixers=dict(linear_attention=_mamba2), respell=_nemotron_h_respelled,
        rename=_nemotron_h_name, is_sparse=_is_sparse_after_first,
        key_aliases=dict(ssm_state_size="mamba_d_state", mamba_num_heads="mamba_n_heads",
                         mamba_head_dim="mamba_d_head", n_groups="mamba_n_groups",
                         conv_kernel="mamba_d_conv", use_conv_bias="mamba_conv_bias",
                         use_bias="mamba_proj_bias", mlp_hidden_act="hidden_act",
                         layer_norm_epsilon="rms_norm_eps")),
    "mamba": _MAMBA_ALONE,
    "falcon_mamba": replace(
        _MAMBA_ALONE, defaults=dict(_MAMBA_ALONE.defaults, mixer_rms_eps=1e-6),
        mixers=dict(linear_attention=_falcon_mamba),
        folds=dict(log_decay=True, constants={r"attn\.norm_(low|k|q)\.weight$": 1.0})),
    "mamba2": replace(
        _MAMBA_ALONE, names=MAMBA2_NAMES, mixers=dict(linear_attention=_mamba2),
        defaults=dict(_MAMBA_ALONE.defaults, mamba_d_state=128, mamba_n_heads=128, mamba_d_head=64,
                      mamba_n_groups=8, tie_word_embeddings=False)),
    "zamba2": Family(
        overrides=dict(activation="silu"),         # of no part: the shared block has gelu
        defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=4096, tie_word_embeddings=True,
                      hidden_act="gelu", use_mem_rope=False, use_long_context=False,
                      add_bias_linear=False, num_mem_blocks=1, adapter_rank=128,
                      use_shared_attention_adapter=False, mamba_n_heads=8, mamba_n_groups=1,
                      mamba_d_state=64, mamba_d_conv=4, mamba_expand=2, num_attention_heads=32,
                      num_hidden_layers=54),
        names=ZAMBA2_NAMES, folds=dict(log_decay=True), respell=_zamba2_respelled,
        mixers=dict(linear_attention=_zamba2_mamba, hybrid=_zamba2_mamba), rename=_zamba2_name,
        has_rope=lambda c, i: bool(c["use_mem_rope"]),
        key_aliases=dict(mamba_ngroups="mamba_n_groups", n_mamba_heads="mamba_n_heads",
                         mamba_headdim="mamba_d_head")),
    "jamba": Family(
        defaults=dict(num_key_value_heads=8, max_position_embeddings=262144, num_experts=16,
                      num_experts_per_tok=2, norm_topk_prob=False, expert_layer_period=2,
                      expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4,
                      mamba_d_state=16, mamba_d_conv=4, mamba_expand=2),
        names=JAMBA_NAMES, folds=dict(log_decay=True), has_rope=_never, respell=_jamba_respelled,
        mixers=dict(linear_attention=_jamba_mamba), is_sparse=_is_sparse_after_first),
    "falcon_h1": Family(
        defaults=dict(_MAMBA, num_key_value_heads=8, max_position_embeddings=8192,
                      rms_norm_eps=1e-5, mamba_d_ssm=1024, mamba_rms_norm=False,
                      mamba_norm_before_gate=True, projectors_bias=False),
        names=FALCON_H1_NAMES, folds=dict(log_decay=True), mixers=dict(full_attention=_falcon_h1),
        respell=_falcon_h1_respelled),
    "granitemoeshared": Family(
        defaults=dict(attention_multiplier=1.0, shared_intermediate_size=0, num_experts=8,
                      num_experts_per_tok=2),
        moe=dict(shared_gate=False), names=GRANITE_MOE_NAMES, is_sparse=always,
        respell=_granite_shared),
    "granitemoe_swa": Family(
        defaults=dict(attention_multiplier=1.0, shared_intermediate_size=0, num_experts=8,
                      num_experts_per_tok=2, sliding_window=128),
        scores=dict(sinks=True), moe=dict(shared_gate=False),
        names=GRANITE_MOE_NAMES | {"self_attn.sinks": "attn.attend.sinks"},
        is_sparse=always, is_sliding=_all_but_every_fourth, respell=_granite_shared),
    "granite_swa": Family(
        scores=dict(sinks=True),
        defaults=dict(attention_multiplier=1.0, num_key_value_heads=4, sliding_window=128,
                      rms_norm_eps=1e-5, max_position_embeddings=8192, tie_word_embeddings=True),
        names={"self_attn.sinks": "attn.attend.sinks"}, is_sliding=_all_but_every_fourth),
    "granitemoe": Family(
        defaults=dict(num_experts=8, num_experts_per_tok=2, attention_multiplier=1.0),
        names=GRANITE_MOE_NAMES, is_sparse=always),
    "gpt_oss": Family(
        overrides=dict(activation="clamped_silu", mlp_bias=True),
        moe=dict(router_bias=True), scores=dict(sinks=True),
        defaults=dict(attention_bias=True, head_dim=64, num_key_value_heads=8, sliding_window=128,
                      num_experts=128, num_experts_per_tok=4, rms_norm_eps=1e-5,
                      max_position_embeddings=131072, rope_theta=150000.0,
                      rope_parameters=dict(rope_type="yarn", factor=32.0, beta_fast=32.0,
                                           beta_slow=1.0, truncate=False,
                                           original_max_position_embeddings=4096)),
        names=GPT_OSS_NAMES, is_sparse=always, is_sliding=lambda c, i: i % 2 == 0),
    "ernie4_5": Family(
        defaults=dict(num_key_value_heads=2, head_dim=128, use_bias=False, rope_theta=5e5,
                      rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True),
        folds=_INTERLEAVED, respell=_biased_respelled),
    "glm": Family(
        overrides=dict(o_bias=False), defaults=_GLM, folds=_INTERLEAVED,
        names={"mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up"))}),
    "glm4": Family(
        overrides=dict(o_bias=False, post_norm=True), defaults=_GLM, folds=_INTERLEAVED,
        names=_GLM4_NAMES),
    "glm4v_text": Family(
        overrides=dict(qkv_bias=True, o_bias=False, post_norm=True), folds=_INTERLEAVED,
        defaults=dict(num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=32768),
        names=_GLM4_NAMES),
    "helium": Family(
        overrides=dict(o_bias=False),
        defaults=dict(num_key_value_heads=20, head_dim=128, rope_theta=1e5, rms_norm_eps=1e-8,
                      max_position_embeddings=4096),
        folds=_INTERLEAVED),
    "arcee": Family(
        overrides=dict(gated=False),
        defaults=dict(hidden_act="relu2", rms_norm_eps=1e-5, max_position_embeddings=4096)),
    "seed_oss": Family(
        defaults=dict(attention_bias=True, attention_out_bias=False, head_dim=128,
                      num_key_value_heads=8, max_position_embeddings=524288)),
    "exaone": Family(
        defaults=dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=5e5,
                      max_position_embeddings=4096),
        names=EXAONE_NAMES,
        key_aliases=dict(num_layers="num_hidden_layers", layer_norm_epsilon="rms_norm_eps",
                         activation_function="hidden_act")),
    "exaone4": Family(
        overrides=dict(pre_norm=False, post_norm=True, qk_norm="head"),
        defaults=dict(num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4,
                      rms_norm_eps=1e-5),
        names=SANDWICH_NAMES, is_sliding=_exaone4_is_sliding, has_rope=_exaone4_has_rope),
    "ministral": Family(
        defaults=dict(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131072),
        is_sliding=always),
    "ministral3": Family(
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6,
                      max_position_embeddings=262144,
                      rope_parameters=dict(rope_type="yarn", factor=16.0, beta_fast=32.0,
                                           beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                                           original_max_position_embeddings=16384,
                                           llama_4_scaling_beta=0.1)),
        is_sliding=always),
    "cwm": Family(
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6,
                      sliding_window=8192, max_position_embeddings=131072,
                      rope_parameters=dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0,
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
        names={"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}, is_sliding=always,
        key_aliases=dict(norm_epsilon="rms_norm_eps"), respell=_biased_respelled),
    "gpt_neox": Family(
        overrides=dict(layer_norm=True, gated=False, mlp_bias=True),
        defaults=dict(hidden_act="gelu", attention_bias=True, partial_rotary_factor=0.25,
                      rms_norm_eps=1e-5, use_parallel_residual=True),
        names=GPT_NEOX_NAMES,
        key_aliases=dict(layer_norm_eps="rms_norm_eps", rotary_pct="partial_rotary_factor",
                         rotary_emb_base="rope_theta")),
    "gptj": Family(
        overrides=dict(layer_norm=True, gated=False, mlp_bias=True, head_bias=True, parallel=True),
        defaults=dict(hidden_act="gelu_new", rotary_dim=64, rms_norm_eps=1e-5),
        names=GPTJ_NAMES, folds=_INTERLEAVED, key_aliases=_GPT2_KEYS, respell=_gptj_respelled),
    "phi": Family(
        overrides=dict(_BIASED, layer_norm=True, gated=False, head_bias=True, parallel=True),
        defaults=dict(hidden_act="gelu_new", partial_rotary_factor=0.5, rms_norm_eps=1e-5),
        names=PHI_NAMES, key_aliases=dict(layer_norm_eps="rms_norm_eps"),
        respell=lambda c: {**c, "one_norm": True}),
    "cohere": Family(
        overrides=dict(layer_norm=True, parallel=True), defaults=_COHERE,
        folds=dict(_INTERLEAVED, constants=_NO_BIAS),
        key_aliases=dict(layer_norm_eps="rms_norm_eps"), respell=_cohere_respelled),
    "cohere2": Family(
        overrides=dict(layer_norm=True, parallel=True),
        defaults=dict(_COHERE, rope_theta=1e4, sliding_window=4096),
        folds=dict(_INTERLEAVED, constants=_NO_BIAS), is_sliding=_slides, has_rope=_slides,
        key_aliases=dict(layer_norm_eps="rms_norm_eps"), respell=_cohere_respelled),
    "cohere2_moe": Family(
        overrides=dict(parallel=True), moe=dict(shared_gate=False),
        defaults=dict(_COHERE, rope_theta=1e4, sliding_window=4096, head_dim=128, num_experts=8,
                      num_experts_per_tok=2,
                      sliding_window_pattern=4, prefix_dense_sliding_window_pattern=1,
                      expert_selection_fn="softmax", norm_topk_prob=True,
                      shared_expert_combination_strategy="average"),
        folds=dict(_INTERLEAVED, constants=_NO_BIAS), names=SIGMOID_NAMES,
        is_sparse=_is_sparse_after_first, has_rope=_cohere2_moe_has_rope,
        key_aliases=dict(layer_norm_eps="rms_norm_eps", rms_norm_eps="eps_of_rms_norm"),
        respell=_cohere2_moe_respelled),
    "falcon": Family(
        overrides=dict(layer_norm=True, gated=False),
        defaults=dict(hidden_act="gelu", rms_norm_eps=1e-5, tie_word_embeddings=True, alibi=False,
                      multi_query=True, parallel_attn=True, new_decoder_architecture=False,
                      bias=False),
        names=FALCON_NAMES, has_rope=lambda c, i: not c["alibi"],
        key_aliases=dict(n_embed="hidden_size", n_layer="num_hidden_layers",
                         n_head="num_attention_heads", ffn_hidden_size="intermediate_size",
                         activation="hidden_act", layer_norm_epsilon="rms_norm_eps"),
        respell=_falcon_respelled),
    "stablelm": Family(
        overrides=dict(layer_norm=True, o_bias=False),
        defaults=dict(num_key_value_heads=32, partial_rotary_factor=0.25, rms_norm_eps=1e-5,
                      max_position_embeddings=4096, use_parallel_residual=False,
                      qk_layernorm=False),
        names={"self_attn.q_layernorm.norms.*": "attn.q_norm",
               "self_attn.k_layernorm.norms.*": "attn.k_norm"},
        key_aliases=dict(layer_norm_eps="rms_norm_eps", use_qkv_bias="qkv_bias",
                         rope_pct="partial_rotary_factor"),
        respell=_stablelm_respelled),
    "nemotron": Family(
        overrides=dict(layer_norm=True, gated=False),
        defaults=dict(hidden_act="relu2", partial_rotary_factor=0.5, rms_norm_eps=1e-5,
                      max_position_embeddings=4096),
        folds=_OFFSET, key_aliases=dict(norm_eps="rms_norm_eps")),
    "apertus": Family(
        overrides=dict(gated=False, qk_norm="head"),
        defaults=dict(hidden_act="xielu", rms_norm_eps=1e-5, max_position_embeddings=65536,
                      rope_theta=12e6,
                      rope_parameters=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                           high_freq_factor=4.0,
                                           original_max_position_embeddings=8192)),
        names=APERTUS_NAMES),
    "olmo": Family(
        overrides=dict(layer_norm=True, norm_eps=1e-5), defaults=dict(clip_qkv=None),
        folds=dict(constants=_NO_BIAS | {r"norm\.weight$": 1.0})),
    "hunyuan_v1_dense": Family(
        overrides=dict(qk_norm="head"), scores=dict(gains=True), defaults=dict(rms_norm_eps=1e-5),
        folds=dict(norm_after_rope=True), names=HUNYUAN_NAMES),
    "hunyuan_v1_moe": Family(
        overrides=dict(qk_norm="head"), scores=dict(gains=True), moe=dict(shared_gate=False),
        defaults=dict(rms_norm_eps=1e-5, num_experts=1, num_experts_per_tok=1),
        folds=dict(norm_after_rope=True), names=HUNYUAN_MOE_NAMES, is_sparse=always,
        key_aliases=dict(moe_topk="num_experts_per_tok"), respell=_hunyuan_moe_respelled),
    "afmoe": Family(
        overrides=dict(post_norm=True, qk_norm="head", attn_gate=True), moe=_SIGMOID,
        defaults=dict(head_dim=128, sliding_window=1024, rms_norm_eps=1e-5, num_experts=64,
                      num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
                      first_k_dense_replace=1, max_position_embeddings=16384),
        names=AFMOE_NAMES, is_sparse=_is_sparse_after_first, is_sliding=_slides, has_rope=_slides,
        key_aliases=dict(route_scale="routed_scaling_factor",
                         num_dense_layers="first_k_dense_replace",
                         global_attn_every_n_layers="sliding_window_pattern"),
        respell=_afmoe_respelled),
    "ernie4_5_moe": Family(
        moe=dict(choice_bias=True, shared_gate=False),
        defaults=dict(num_key_value_heads=4, use_bias=False, rope_theta=5e5, rms_norm_eps=1e-5,
                      max_position_embeddings=131072, tie_word_embeddings=True, num_experts=64,
                      num_experts_per_tok=6, moe_intermediate_size=1536, n_shared_experts=2,
                      moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1),
        names=ERNIE_MOE_NAMES, folds=_INTERLEAVED, is_sparse=_ernie_is_sparse,
        key_aliases=dict(moe_num_experts="num_experts", moe_k="num_experts_per_tok",
                         moe_num_shared_experts="n_shared_experts"),
        respell=_biased_respelled),
    "muse_glimmer_text": Family(
        overrides=dict(post_norm=True, qk_norm="head", attn_gate=True, embed_norm=True),
        defaults=dict(num_key_value_heads=2, head_dim=128, sliding_window=2048, rms_norm_eps=1e-5,
                      post_norm_eps=1e-8, final_logit_softcapping=20.0, qk_scale_factor=3.87,
                      output_multiplier=0.19611613513818404, max_position_embeddings=131072),
        folds=dict(norm_offset=1.0, norm_offset_of=r"layers\..*norm",
                   constants={r"[qk]_norm\.weight$": 1.0, "embed_norm": 1.0}),
        names=SANDWICH_NAMES | {"self_attn.gate_proj": "attn.gate"},
        is_sliding=_muse_slides, has_rope=_muse_slides, respell=_muse_respelled),
    "bloom": Family(
        overrides=dict(_BIASED, layer_norm=True, gated=False, embed_norm=True),
        scores=dict(alibi=True),
        defaults=dict(hidden_act="gelu_new", rms_norm_eps=1e-5, tie_word_embeddings=True),
        names=FALCON_NAMES, has_rope=_never,
        key_aliases=dict(n_embed="hidden_size", n_layer="num_hidden_layers",
                         n_head="num_attention_heads", layer_norm_epsilon="rms_norm_eps",
                         seq_length="max_position_embeddings"),
        respell=_gpt2_respelled),
    "mpt": Family(
        overrides=dict(layer_norm=True, gated=False), scores=dict(alibi=True),
        defaults=dict(hidden_act="gelu", rms_norm_eps=1e-5, tie_word_embeddings=True,
                      clip_qkv=None),
        names=MPT_NAMES, folds=dict(constants=_NO_BIAS), has_rope=_never,
        key_aliases=dict(d_model="hidden_size", n_layers="num_hidden_layers",
                         n_heads="num_attention_heads", max_seq_len="max_position_embeddings",
                         layer_norm_epsilon="rms_norm_eps"),
        respell=_mpt_respelled),
    "gpt_neo": Family(
        overrides=dict(layer_norm=True, learned_pos=True, gated=False, o_bias=True, mlp_bias=True,
                       attn_scale=1.0),
        defaults=dict(hidden_act="gelu_new", rms_norm_eps=1e-5, tie_word_embeddings=True,
                      sliding_window=256, attention_types=[[["global", "local"], 12]]),
        names=GPT_NEO_NAMES, has_rope=_never,
        key_aliases=dict(num_layers="num_hidden_layers", num_heads="num_attention_heads",
                         window_size="sliding_window", layer_norm_epsilon="rms_norm_eps",
                         activation_function="hidden_act"),
        respell=_gpt_neo_respelled),
    "gpt_bigcode": Family(
        overrides=dict(_BIASED, layer_norm=True, learned_pos=True, gated=False),
        defaults=dict(hidden_act="gelu_pytorch_tanh", max_position_embeddings=1024,
                      rms_norm_eps=1e-5, tie_word_embeddings=True, multi_query=True),
        names=GPT_BIGCODE_NAMES, has_rope=_never, key_aliases=_GPT2_KEYS,
        respell=_gpt_bigcode_respelled),
    "nanochat": Family(
        overrides=dict(gated=False, qk_norm="head", embed_norm=True),
        defaults=dict(hidden_act="relu2", final_logit_softcapping=15.0),
        names=PHI_NAMES,
        folds=dict(reversed_rope=True, constants={r"norm\.weight$": 1.0})),
    "hyperclovax": Family(
        defaults=dict(use_post_norm=True),
        names={"post_norm1": "post_attn_norm", "post_norm2": "post_ffn_norm"},
        respell=_hyperclovax_respelled),
    "opt": Family(
        overrides=dict(layer_norm=True, learned_pos=True, gated=False),
        defaults=dict(hidden_act="relu", rms_norm_eps=1e-5, tie_word_embeddings=True,
                      enable_bias=True),
        names=OPT_NAMES, folds=dict(first_pos=2), has_rope=_never,
        key_aliases=dict(ffn_dim="intermediate_size", activation_function="hidden_act"),
        respell=_opt_respelled),
    "jais2": Family(
        overrides=dict(layer_norm=True, gated=False),
        defaults=dict(hidden_act="relu2", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5,
                      max_position_embeddings=8192),
        key_aliases=dict(layer_norm_eps="rms_norm_eps")),
    "gpt2": Family(
        overrides=dict(_BIASED, layer_norm=True, learned_pos=True, gated=False),
        defaults=dict(hidden_act="gelu_new", max_position_embeddings=1024, rms_norm_eps=1e-5,
                      tie_word_embeddings=True),
        names=GPT2_NAMES, has_rope=_never, key_aliases=_GPT2_KEYS, respell=_gpt2_respelled),
}

TEXT_PARTS = {                                     # model_type: its language model's
    "mistral3": "mistral", "llava": "llama", "idefics3": "llama", "smolvlm": "llama",
    "internvl": "qwen2",
}

ALIASES = {"kimi_k2": "deepseek_v3", "gpt-sw3": "gpt2"}    # other model_types of the same model
