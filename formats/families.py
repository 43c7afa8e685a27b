"""What every model family leaves unsaid: config.json -> ModelConfig, and parameter names -> ours.

A Llama-like family is one row of FAMILIES. It reads no file and no weight; `checkpoint.py` hands it
a config (GGUF and Meta files are put into config.json's words first) and the tensors' names:

    cfg, c = config_from_hf(json.loads(text))      # c: config.json with its gaps filled
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

from formats.files import Lazy, offset, pick, scaled, some, stack, transpose
from layers.feed_forward import GATED, UNGATED
from layers.rope import Rope
from model import ModelConfig


@dataclass(frozen=True)
class Fused:
    """One tensor on disk that holds several parameters, or holds one transposed."""

    into: tuple[str, ...]                          # query, key and value, or equal shares
    transposed: bool = False                       # [in, out] (of each expert)
    interleaved: bool = False                      # shares take turns row by row


@dataclass(frozen=True)
class Family:
    """How a model_type differs from Llama."""

    fixed: dict = field(default_factory=dict)      # ModelConfig fields it never states
    absent: dict = field(default_factory=dict)     # config.json keys it may leave out
    names: dict = field(default_factory=dict)      # parameter names that it adds or means otherwise
    norm_offset: float = 0.0                       # norms multiply by offset + weight
    scaled_embed: bool = False                     # embeddings are multiplied by sqrt(dim)
    slides: Callable[[dict, int], bool] = lambda c, i: False   # is layer i's attention windowed?
    turns: Callable[[dict, int], bool] = lambda c, i: True     # does layer i have RoPE at all?
    sparse: Callable[[dict, int], bool] = lambda c, i: False   # is layer i a mixture of experts?
    plain_local_rope: bool = False                 # windowed layers keep RoPE unstretched
    respell: dict = field(default_factory=dict)    # config.json keys: what the others call them


# ---- Parameter names ----------------------------------------------------------------------------

# their name: ours. A parameter is layers.{i}.{name}.weight or, outside the layers, {name}.weight;
# a name that ends in neither weight nor bias stands whole. Experts' numbers are written as *.
HF_NAMES = {
    "embed_tokens": "embed", "norm": "norm", "lm_head": "head",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk", "self_attn.v_proj": "attn.wv",
    "self_attn.o_proj": "attn.wo",
    "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down",
}
MOE_NAMES = {
    "mlp.gate": "ffn.router", "mlp.experts.*.gate_proj": "ffn.gate",
    "mlp.experts.*.up_proj": "ffn.up", "mlp.experts.*.down_proj": "ffn.down",
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "mlp.experts.down_proj": "ffn.down.weight",
    "mlp.shared_expert.gate_proj": "ffn.shared.gate", "mlp.shared_expert.up_proj": "ffn.shared.up",
    "mlp.shared_expert.down_proj": "ffn.shared.down",
    "mlp.shared_expert_gate": "ffn.shared_expert_gate",
}
SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
GPT2_NAMES = {
    "wte": "embed", "wpe": "pos_embed", "ln_f": "norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": Fused(("attn.wq", "attn.wk", "attn.wv"), transposed=True),
    "attn.c_proj": Fused(("attn.wo",), transposed=True),
    "mlp.c_fc": Fused(("ffn.up",), transposed=True),
    "mlp.c_proj": Fused(("ffn.down",), transposed=True),
}
GPT_OSS_NAMES = {
    "self_attn.sinks": "attn.attend.sinks", "mlp.router": "ffn.router",
    "mlp.experts.gate_up_proj.weight": Fused(("ffn.gate.weight", "ffn.up.weight"),
                                             interleaved=True),        # from MXFP4
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight"), True, True),
    "mlp.experts.gate_up_proj_bias": Fused(("ffn.gate.bias", "ffn.up.bias"), interleaved=True),
    "mlp.experts.down_proj.weight": "ffn.down.weight",
    "mlp.experts.down_proj": Fused(("ffn.down.weight",), transposed=True),
    "mlp.experts.down_proj_bias": "ffn.down.bias",
}
GGUF_NAMES = {
    "token_embd": "embed", "position_embd": "pos_embed", "output_norm": "norm", "output": "head",
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "post_attention_norm": "post_attn_norm", "post_ffw_norm": "post_ffn_norm",
    "attn_q": "attn.wq", "attn_k": "attn.wk", "attn_v": "attn.wv", "attn_output": "attn.wo",
    "attn_qkv": Fused(("attn.wq", "attn.wk", "attn.wv")),
    "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm",
    "attn_sinks.weight": "attn.attend.sinks",
    "ffn_gate": "ffn.gate", "ffn_up": "ffn.up", "ffn_down": "ffn.down",
    "ffn_gate_inp": "ffn.router", "ffn_gate_exps": "ffn.gate", "ffn_up_exps": "ffn.up",
    "ffn_down_exps": "ffn.down", "ffn_gate_up_exps": Fused(("ffn.gate", "ffn.up")),
    "ffn_gate.*": "ffn.gate", "ffn_up.*": "ffn.up",
    "ffn_down.*": "ffn.down", "ffn_gate_shexp": "ffn.shared.gate", "ffn_up_shexp": "ffn.shared.up",
    "ffn_down_shexp": "ffn.shared.down", "ffn_gate_inp_shexp": "ffn.shared_expert_gate",
}
META_NAMES = {
    "tok_embeddings": "embed", "norm": "norm", "output": "head",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "attention.wq": "attn.wq", "attention.wk": "attn.wk", "attention.wv": "attn.wv",
    "attention.wo": "attn.wo",
    "feed_forward.w1": "ffn.gate", "feed_forward.w3": "ffn.up", "feed_forward.w2": "ffn.down",
}
OLD_NAMES = {                                      # as files of the first releases have them
    "attn.softmax.sinks": "attn.attend.sinks", "ffn.shared.degree": "ffn.shared_expert_gate"}
OUR_NAMES = OLD_NAMES | {name: name for name in (
    *HF_NAMES.values(), "pos_embed", "post_attn_norm", "post_ffn_norm", "attn.attend.sinks",
    "ffn.router", "ffn.shared.gate", "ffn.shared.up", "ffn.shared.down", "ffn.shared_expert_gate")}
NOT_WEIGHTS = re.compile(
    r"rotary_emb\.inv_freq$|rope\.freqs$|freqs_(cos|sin)$|^rope_(freqs|factors_(long|short))\."
    r"|(^|\.)(vision_tower|vision_model|multi_modal_projector)\.|^(v|mm)\.|\.attn\.(masked_)?bias$")


def look_up(name: str, table: dict) -> tuple[str, int, Fused] | None:
    """Their parameter name -> the layer's prefix, the expert's number, and what it holds.

    None where the table has no such parameter. layers.3.mlp.experts.7.up_proj.weight ->
    "layers.3.", 7, Fused(("ffn.up.weight",)).
    """
    name = re.sub(r"^((model|language_model|transformer|_orig_mod)\.)+", "", name)
    match = re.fullmatch(r"(?:layers|blk|h)\.(\d+)\.(.+)", name)
    prefix, inner = (f"layers.{match[1]}.", match[2]) if match else ("", name)
    expert = re.search(r"(?<=\.)(\d+)(?=\.)", inner)
    if expert:
        inner = f"{inner[:expert.start()]}*{inner[expert.end():]}"
    stem, _, kind = inner.rpartition(".")          # kind: weight | bias
    entry, end = (table[inner], "") if inner in table else (table.get(stem), f".{kind}")
    if entry is None:
        return None
    entry = entry if isinstance(entry, Fused) else Fused((entry,))
    entry = replace(entry, into=tuple(n + end for n in entry.into))
    return prefix, int(expert[1]) if expert else -1, entry


def named(lazies: list[Lazy], table: dict, cfg: ModelConfig) -> dict[str, Lazy]:
    """By our names, fused ones apart, experts together. ValueError names what we do not know."""
    found, unknown, twice = {}, [], []
    for t in lazies:
        if NOT_WEIGHTS.search(t.name):
            continue
        entry = look_up(t.name, table)
        if entry is None:
            unknown.append(t.name)
            continue
        prefix, expert, fused = entry
        for name, piece in zip(fused.into, _pieces(t, fused, cfg)):
            experts = found.setdefault(prefix + name, {})
            twice += [t.name] if expert in experts else []
            experts[expert] = piece
    if unknown:
        raise ValueError(f"{len(unknown)} tensors that this architecture does not have: "
                         f"{some(unknown)}")
    if twice:
        raise ValueError(f"{len(twice)} tensors are there twice: {some(twice)}")
    return {name: _together(name, experts) for name, experts in found.items()}


def _together(name: str, experts: dict[int, Lazy]) -> Lazy:
    """The tensor itself, under -1, or one of all experts' tensors."""
    if -1 in experts:
        return experts[-1]
    if set(experts) != set(range(max(experts) + 1)):
        raise ValueError(f"{name}: experts {', '.join(map(str, sorted(experts)))}, "
                         f"expected 0 to {max(experts)}")
    pieces = [experts[i] for i in sorted(experts)]
    for piece in pieces:
        if piece.shape != pieces[0].shape:
            raise ValueError(f"{piece.name} is {list(piece.shape)}, unlike the others' "
                             f"{list(pieces[0].shape)}")
    return stack(pieces)


def _pieces(t: Lazy, fused: Fused, cfg: ModelConfig) -> list[Lazy]:
    t, n = transpose(t) if fused.transposed else t, len(fused.into)
    if n == 1:
        return [t]
    size = t.shape[0] if len(t.shape) == 1 else t.shape[-1 if t.name.endswith("bias") else -2]
    if fused.interleaved:
        return [pick(t, torch.arange(i, size, n)) for i in range(n)]
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    sizes = (q, kv, kv) if n == 3 else [size // n] * n
    if sum(sizes) != size:
        raise ValueError(f"{t.name} is {list(t.shape)}, but the config asks for {sum(sizes)} rows")
    return [pick(t, index) for index in torch.arange(size).split(list(sizes))]


def reorder_heads(tensors: dict[str, Lazy], order: torch.Tensor) -> None:
    """Put each query and key head's rows in another order, in place."""
    for name, t in tensors.items():
        if re.search(r"\.(w[qk]|[qk]_norm)\.", name):
            heads = torch.arange(t.shape[0]).view(-1, len(order))
            tensors[name] = pick(t, heads[:, order].flatten())


def fold(tensors: dict[str, Lazy], c: dict, cfg: ModelConfig, norm_offset: float) -> None:
    """What the config says of weights goes into them, in place; c: as config_from_hf gives it.

    The output's divisor goes into the last norm. Where RoPE turns only part of a head, its pairs
    (i, i + R/2) move to (i, i + H/2), where the model has them: scores do not mind the order.
    """
    for name, t in tensors.items():
        if norm_offset and "norm" in name:
            tensors[name] = offset(t, norm_offset)
    n = int(cfg.head_dim * cfg.rope[0].partial)
    if n < cfg.head_dim:
        turning, still = torch.arange(n).chunk(2), torch.arange(n, cfg.head_dim).chunk(2)
        reorder_heads(tensors, torch.cat((turning[0], still[0], turning[1], still[1])))
    if (divisor := c.get("logits_scaling") or 1) != 1:
        for name in ("norm.weight", "norm.bias"):
            if name in tensors:
                tensors[name] = scaled(tensors[name], 1 / divisor)


# ---- Families: what config.json does not say ----------------------------------------------------

def _qwen_slides(c, i):
    return bool(c.get("use_sliding_window")) and i >= c.get("max_window_layers", 28)


def _qwen_sparse(c, i):
    step = c.get("decoder_sparse_step", 1)
    return i not in (c.get("mlp_only_layers") or []) and (i + 1) % step == 0


def _smollm3_turns(c, i):
    stated = c.get("no_rope_layers")               # 1 where there is RoPE
    return bool(stated[i] if stated else (i + 1) % c.get("no_rope_layer_interval", 4))


def _always(c, i):
    return True


_QWEN = dict(sliding_window=4096)
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192)
_OLMO = dict(pre_norm=False, post_norm=True, qk_norm="wide")

FAMILIES = {
    "llama": Family(),
    "mistral": Family(absent=dict(sliding_window=4096), slides=_always),
    "mixtral": Family(
        absent=dict(rope_theta=1e6, num_key_value_heads=8, num_experts=8,
                    num_experts_per_tok=2, max_position_embeddings=131072, rms_norm_eps=1e-5),
        names={"block_sparse_moe.gate": "ffn.router", "block_sparse_moe.experts.*.w1": "ffn.gate",
               "block_sparse_moe.experts.*.w3": "ffn.up",
               "block_sparse_moe.experts.*.w2": "ffn.down"},
        slides=_always, sparse=_always),
    "qwen2": Family(fixed=dict(qkv_bias=True, o_bias=False), absent=_QWEN, slides=_qwen_slides),
    "qwen2_moe": Family(
        fixed=dict(o_bias=False),
        absent=dict(_QWEN, qkv_bias=True, num_experts=60, num_experts_per_tok=4,
                    moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                    norm_topk_prob=False),
        names=MOE_NAMES, sparse=_qwen_sparse,
        slides=lambda c, i: (bool(c.get("use_sliding_window")) and i % 2 == 0
                             and i < c.get("max_window_layers", 28))),
    "qwen3": Family(fixed=dict(qk_norm="head"), absent=dict(_QWEN, head_dim=128),
                    slides=_qwen_slides),
    "qwen3_moe": Family(
        fixed=dict(qk_norm="head"),
        absent=dict(_QWEN, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
                    moe_intermediate_size=768, norm_topk_prob=False),
        names=MOE_NAMES, sparse=_qwen_sparse,
        slides=lambda c, i: bool(c.get("use_sliding_window"))),
    "gemma": Family(
        fixed=dict(activation="gelu_tanh"),        # "gelu" in config.json means this too
        absent=dict(_GEMMA, num_key_value_heads=16), norm_offset=1.0, scaled_embed=True),
    "gemma2": Family(
        fixed=dict(post_norm=True),
        absent=dict(_GEMMA, num_attention_heads=8, num_key_value_heads=4, sliding_window=4096,
                    query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                    final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh"),
        names=SANDWICH_NAMES, norm_offset=1.0, scaled_embed=True,
        slides=lambda c, i: i % 2 == 0),
    "gemma3_text": Family(
        fixed=dict(qk_norm="head", post_norm=True),
        absent=dict(_GEMMA, vocab_size=262208, num_attention_heads=8, num_key_value_heads=4,
                    max_position_embeddings=131072, rope_theta=1e6, rope_local_base_freq=1e4,
                    sliding_window=4096, query_pre_attn_scalar=256,
                    hidden_activation="gelu_pytorch_tanh"),
        names=SANDWICH_NAMES, norm_offset=1.0, scaled_embed=True,
        slides=lambda c, i: (i + 1) % c.get("sliding_window_pattern", 6) != 0),
    "phi3": Family(
        absent=dict(rms_norm_eps=1e-5, max_position_embeddings=4096),
        names={"self_attn.qkv_proj": Fused(("attn.wq", "attn.wk", "attn.wv")),
               "mlp.gate_up_proj": Fused(("ffn.gate", "ffn.up"))},
        slides=_always),
    "smollm3": Family(
        absent=dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True,
                    max_position_embeddings=32768),
        turns=_smollm3_turns,
        slides=lambda c, i: bool(c.get("use_sliding_window")) and not _smollm3_turns(c, i)),
    "olmo2": Family(fixed=_OLMO, absent=dict(rms_norm_eps=1e-5), names=SANDWICH_NAMES),
    "olmo3": Family(fixed=_OLMO, absent=dict(rms_norm_eps=1e-5, sliding_window=4096,
                                             rope_theta=5e5),
                    names=SANDWICH_NAMES, plain_local_rope=True,
                    slides=lambda c, i: (i + 1) % 4 != 0),
    "olmoe": Family(
        fixed=dict(qk_norm="wide"),
        absent=dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, rms_norm_eps=1e-5),
        names=MOE_NAMES, sparse=_always),
    "granite": Family(absent=dict(attention_multiplier=1.0)),
    "granitemoe": Family(
        absent=dict(num_experts=8, num_experts_per_tok=2, attention_multiplier=1.0),
        names={"block_sparse_moe.router.layer": "ffn.router",
               "block_sparse_moe.input_linear": Fused(("ffn.gate", "ffn.up")),
               "block_sparse_moe.output_linear": "ffn.down"},
        sparse=_always),
    "gpt_oss": Family(
        fixed=dict(activation="clamped_silu", sinks=True, mlp_bias=True, router_bias=True),
        absent=dict(attention_bias=True, head_dim=64, num_key_value_heads=8, sliding_window=128,
                    num_experts=128, num_experts_per_tok=4, rms_norm_eps=1e-5,
                    max_position_embeddings=131072, rope_theta=150000.0,
                    rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0,
                                      truncate=False, original_max_position_embeddings=4096)),
        names=GPT_OSS_NAMES, sparse=_always, slides=lambda c, i: i % 2 == 0),
    "gpt2": Family(
        fixed=dict(layer_norm=True, learned_pos=True, gated=False, qkv_bias=True, o_bias=True,
                   mlp_bias=True),
        absent=dict(hidden_act="gelu_new", max_position_embeddings=1024, rms_norm_eps=1e-5,
                    tie_word_embeddings=True),
        names=GPT2_NAMES, turns=lambda c, i: False,
        respell=dict(n_embd="hidden_size", n_layer="num_hidden_layers",
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


# ---- config.json -> ModelConfig -----------------------------------------------------------------

def _rope(c: dict, rope: dict, theta) -> Rope:
    """One RoPE, from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta") or theta)
    if not theta > 1:
        raise ValueError(f"'rope_theta' is {theta}, expected a number above 1")
    partial = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    longest = c["max_position_embeddings"]
    original = (c.get("original_max_position_embeddings")
                or rope.get("original_max_position_embeddings") or longest)
    original = longest if kind == "dynamic" else original
    factor = float(rope.get("factor") or longest / original)
    stated = dict(theta=theta, partial=float(partial), original_context=int(original))
    divisors = rope.get("divisors")                # only from a GGUF
    if divisors:
        stated.update(divisors=tuple(divisors))
    if kind == "default":
        return Rope(**stated)
    if kind in ("linear", "dynamic"):
        return Rope(**stated, kind=kind, factor=factor)
    if kind == "llama3":
        return Rope(**stated, kind=kind, factor=factor,
                    low_freq_factor=float(rope.get("low_freq_factor", 1)),
                    high_freq_factor=float(rope.get("high_freq_factor", 4)))
    amplitude = rope.get("attention_factor")
    if kind in ("longrope", "su") or "long_factor" in rope:            # Phi-3 said su, and yarn
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1
        short, long = (tuple(map(float, rope[key])) for key in ("short_factor", "long_factor"))
        if {len(short), len(long)} != {int(_head_dim(c) * partial) // 2}:
            raise ValueError(f"{len(short)} short and {len(long)} long RoPE factors for "
                             f"{int(_head_dim(c) * partial) // 2} frequencies")
        return Rope(**stated, divisors=short, long_divisors=long, amplitude=float(amplitude))
    if kind == "yarn":
        def mscale(weight):
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        one, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if amplitude is None:
            amplitude = mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)
        return Rope(**stated, kind=kind, factor=factor, amplitude=float(amplitude),
                    low_freq_factor=float(rope.get("beta_slow") or 1),
                    high_freq_factor=float(rope.get("beta_fast") or 32),
                    truncate=bool(rope.get("truncate", True)))
    raise ValueError(f"RoPE scaling '{kind}' is not supported (supported: default, linear, "
                     "dynamic, llama3, yarn, longrope)")


def _ropes(c: dict, family: Family) -> dict[str, Rope]:
    """RoPE by layer type: one for all, or one each for full and sliding attention."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta, kinds = c.get("rope_theta", 10000.0), ("full_attention", "sliding_attention")
    if any(kind in rope for kind in kinds):
        return {kind: _rope(c, rope.get(kind) or {}, theta) for kind in kinds}
    ropes = dict.fromkeys(kinds, _rope(c, rope, theta))
    if family.plain_local_rope or "rope_local_base_freq" in c:         # before transformers 5
        local = c.get("rope_local_base_freq") or rope.get("rope_theta") or theta
        ropes["sliding_attention"] = _rope(c, {}, local)
    return ropes


def _head_dim(c: dict) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


NUMBERS = ("sliding_window", "attention_multiplier", "embedding_multiplier", "residual_multiplier",
           "logits_scaling", "query_pre_attn_scalar", "attn_logit_softcapping",
           "final_logit_softcapping", "partial_rotary_factor", "decoder_sparse_step",
           "shared_expert_intermediate_size", "rms_norm_eps")


def config_from_hf(c: dict) -> tuple[ModelConfig, dict]:
    """config.json, in the spelling of transformers 4 or 5, as math. ValueError names a problem.

    -> the config, and config.json with what it leaves out filled in, for `fold`.
    """
    if "text_config" in c:                         # multimodal wrappers: the text part
        c = {"model_type": c.get("model_type", "").split("_")[0] + "_text", **c["text_config"]}
    kind = c.get("model_type")
    for what, kinds in OTHER_KINDS.items():
        if kind in kinds.split():
            raise ValueError(f"model_type '{kind}' is not supported: it has {what}, "
                             "another kind of model")
    if kind not in FAMILIES:
        raise ValueError(f"model_type '{kind}' is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[kind]
    respell = {"num_local_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
               **family.respell}
    c = {respell.get(key, key): value for key, value in c.items()}
    c = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **family.absent, **c}

    def count(key, default=None):
        value = default if c.get(key) is None else c[key]
        if value is None:
            raise ValueError(f"config.json has no '{key}'")
        if type(value) is not int or value < 1:
            raise ValueError(f"'{key}' is {value!r}, expected a positive integer")
        return value

    for key in NUMBERS:
        value = c.get(key) or 0
        if type(value) not in (int, float) or value < 0:
            raise ValueError(f"'{key}' is {value!r}, expected a positive number")
    activation = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
             "gelu": "gelu"}
    known = {theirs: ours for theirs, ours in known.items()
             if ours in (GATED if family.fixed.get("gated", True) else UNGATED)}
    if activation not in known and "activation" not in family.fixed:
        raise ValueError(f"activation '{activation}' is not supported "
                         f"(supported: {', '.join(known)})")
    for key in ("use_bidirectional_attention", "clip_qkv", "scale_attn_by_inverse_layer_idx"):
        if c.get(key):
            raise ValueError(f"'{key}' is not supported")
    if (c.get("swiglu_limit", 7), c.get("swiglu_alpha", 1.702)) != (7, 1.702):
        raise ValueError("'swiglu_limit' and 'swiglu_alpha' are supported as 7 and 1.702 only")

    dim, n_layer, n_head = (
        count(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    if n_layer > 1000:                             # the model is built before it is compared
        raise ValueError(f"'num_hidden_layers' is {n_layer}, expected at most 1000")
    n_kv_head, context = (count("num_key_value_heads", n_head),
                          count("max_position_embeddings"))
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads cannot share {n_kv_head} key/value heads "
                         "evenly")
    types = c.get("layer_types") or [
        "sliding_attention" if family.slides(c, i) else "full_attention" for i in range(n_layer)]
    ropes = _ropes(c, family)
    if not isinstance(types, list) or set(types) - set(ropes) or len(types) != n_layer:
        raise ValueError(f"'layer_types' is not {n_layer} times one of {', '.join(ropes)}")
    window = [(c.get("sliding_window") or None) if t == "sliding_attention" else None
              for t in types]
    rope = [ropes[t] if family.turns(c, i) else Rope(kind="none") for i, t in enumerate(types)]
    context = max([context] + [int(r.factor * r.original_context) for r in rope
                               if r.kind in ("dynamic", "yarn")])
    sparse = [family.sparse(c, i) for i in range(n_layer)]
    bias, scale = bool(c.get("attention_bias", False)), c.get("attention_multiplier") or None
    if scalar := c.get("query_pre_attn_scalar"):
        scale = scalar**-0.5
    if c.get("scale_attn_weights") is False:
        scale = 1.0
    ffn_dim = count("intermediate_size", 4 * dim if kind == "gpt2" else None)
    facts = dict(
        dim=dim, n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head,
        head_dim=count("head_dim", dim // n_head), ffn_dim=ffn_dim,
        vocab_size=count("vocab_size"), context=context, norm_eps=float(c["rms_norm_eps"]),
        activation=known.get(activation), tied=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=bool(c.get("qkv_bias", bias)), o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
        embed_scale=dim**0.5 if family.scaled_embed else float(c.get("embedding_multiplier") or 1),
        residual_scale=float(c.get("residual_multiplier") or 1),
        attn_scale=scale,
        attn_cap=c.get("attn_logit_softcapping"), logit_cap=c.get("final_logit_softcapping"),
        rope=_tile(rope), window=_tile(window), sparse=_tile(sparse))
    if any(sparse):
        facts.update(
            n_expert=count("num_experts"),
            n_active=count("num_experts_per_tok"),
            expert_dim=count("moe_intermediate_size", ffn_dim),
            norm_topk_prob=bool(c.get("norm_topk_prob", True)),
            shared_dim=int(c.get("shared_expert_intermediate_size") or 0))
        if facts["n_active"] > facts["n_expert"]:
            raise ValueError(f"{facts['n_active']} active of {facts['n_expert']} experts")
    return ModelConfig(**{**facts, **family.fixed}), c


def _tile(values: list) -> tuple:
    """The shortest tuple that, repeated, gives these: one where all layers are alike."""
    return tuple(values[:1] if len(set(values)) == 1 else values)


def config_from_dict(d: dict) -> ModelConfig:
    """The config stored in our own .pth."""
    if "renormalize" in d:                         # its name in the first releases
        d = {**d, "norm_topk_prob": d["renormalize"]}
        del d["renormalize"]
    unknown = set(d) - {f.name for f in fields(ModelConfig)}
    if unknown:
        raise ValueError(f"written by a newer gpt-faster: unknown config fields {sorted(unknown)}")
    if isinstance(d["qk_norm"], bool):             # before there were two ways to do it
        d = {**d, "qk_norm": "head" if d["qk_norm"] else None}
    as_tuples = lambda r: {k: tuple(v) if isinstance(v, list) else v for k, v in r.items()}
    return ModelConfig(**{**as_tuples(d), "rope": tuple(Rope(**as_tuples(r)) for r in d["rope"])})


# ---- GGUF metadata -> config.json ---------------------------------------------------------------

GGUF_KEYS = {                                      # config.json: the metadata key after "llama."
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base", "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
GGUF_ROPE_KEYS = {                                 # rope_scaling: after "llama.rope.scaling."
    "rope_type": "type", "factor": "factor", "attention_factor": "attn_factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}
GGUF_FAMILIES = {                                  # architecture: model_type
    "llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "phi3": "phi3", "smollm3": "smollm3", "olmo2": "olmo2", "olmoe": "olmoe", "granite": "granite",
    "granitemoe": "granitemoe", "gpt-oss": "gpt_oss", "gpt2": "gpt2",
}
GGUF_PERMUTED = ("llama", "smollm3", "granite", "granitemoe")          # q and k: RoPE interleaved
GGUF_DIFFERENT = {                                 # names that mean something else there
    "phi3": {"ffn_up": Fused(("ffn.gate", "ffn.up"))},
    "gpt-oss": {"post_attention_norm": "ffn_norm"},
}


def config_from_gguf(metadata: dict, tensors: dict[str, Lazy]) -> dict:
    """What a GGUF says of its model, in config.json's words. ValueError names a problem."""
    arch = metadata.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise ValueError(f"architecture '{arch}' is not supported "
                         f"(supported: {', '.join(GGUF_FAMILIES)})")
    if "token_embd.weight" not in tensors:
        raise ValueError("no token_embd.weight")
    c = {hf: metadata[f"{arch}.{key}"] for hf, key in GGUF_KEYS.items()
         if f"{arch}.{key}" in metadata}
    c.setdefault("rms_norm_eps", metadata.get(f"{arch}.attention.layer_norm_epsilon", 1e-5))
    c["model_type"] = GGUF_FAMILIES[arch]
    c["vocab_size"] = tensors["token_embd.weight"].shape[0]
    c["tie_word_embeddings"] = "output.weight" not in tensors
    c["attention_bias"] = "blk.0.attn_q.bias" in tensors
    c["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if arch == "llama" and c.get("num_experts"):
        c["model_type"] = "mixtral"
    elif arch == "llama" and c.get("sliding_window"):
        c["model_type"] = "mistral"
    if arch == "olmo2" and c.get("sliding_window"):
        raise ValueError("an Olmo 3 GGUF is not supported: use the original model")
    c["norm_topk_prob"] = metadata.get(f"{arch}.expert_weights_norm",
                                       arch not in ("qwen2moe", "olmoe"))
    if arch in ("gemma2", "gemma3"):               # as llama.cpp: only the 27B scales otherwise
        large = c.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[arch]
        c["query_pre_attn_scalar"] = (c["hidden_size"] // c["num_attention_heads"] if large
                                      else c.get("head_dim", 256))
        c["sliding_window_pattern"] = metadata.get(f"{arch}.attention.sliding_window_pattern", 6)

    scaling = {hf: metadata[f"{arch}.rope.scaling.{key}"] for hf, key in GGUF_ROPE_KEYS.items()
               if f"{arch}.rope.scaling.{key}" in metadata}
    if scaling.get("rope_type", "none") == "none":
        scaling["rope_type"] = "default"
    factors = {name: tensors[f"rope_{name}.weight"].whole().tolist()
               for name in ("freqs", "factors_short", "factors_long")
               if f"rope_{name}.weight" in tensors}
    if "freqs" in factors:                         # Llama 3.1's scaling, worked out per frequency
        scaling["divisors"] = factors["freqs"]
    if "factors_long" in factors:
        scaling.update(rope_type="longrope", short_factor=factors["factors_short"],
                       long_factor=factors["factors_long"])
    if arch == "gpt-oss":                          # the ramp is not rounded, and no key says so
        scaling["truncate"] = False
    c["rope_scaling"] = scaling
    if turning := metadata.get(f"{arch}.rope.dimension_count"):
        c["partial_rotary_factor"] = turning / _head_dim(c)
    return c
