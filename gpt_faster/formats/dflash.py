"""DFlash drafters: a Hugging Face directory (z-lab's or speculators' layout) or a GGUF (llama.cpp's
or ik_llama.cpp's) -> a Checkpoint.

Owns which keys and tensors such a drafter has, and which target models it fits. The math is in
layers/dflash.py, drafting in decoding/dflash.py. DSpark and DFlash 2 are refused by name.

    source = open_dflash(path); check_target(source, target); draft = load_model(source, …)
"""

import re
from dataclasses import fields, replace
from pathlib import Path

import torch

from checkpoint import (
    HF_NAMES,
    Checkpoint,
    LazyTensor,
    brief,
    check,
    count,
    flag,
    hub_tensors,
    name_unknown,
    number,
    read_json,
    reading,
    tile,
)
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.gguf_file import gguf_in, header_of, open_mapped, read_gguf_parts
from gpt_faster.formats.gguf_model import GGUF_KEYS, GGUF_NAMES, check_supported, name_unknown_keys
from gpt_faster.formats.huggingface import read_weights
from gpt_faster.formats.known_keys import CONFIG
from gpt_faster.formats.lazy import cached
from gpt_faster.formats.load import weights_in
from gpt_faster.formats.names import rename
from gpt_faster.formats.other_kinds import is_dflash
from gpt_faster.formats.schema import check_config, check_keys
from gpt_faster.formats.torch_file import read_torch
from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.dflash import DFlash, DFlashConfig
from gpt_faster.layers.embedding import EmbedScale
from gpt_faster.layers.norms import LogitCap
from gpt_faster.text.known_keys import Table
from model import ModelConfig

NAMES = HF_NAMES | {
    "fc": "context.wc", "hidden_norm": "context.norm",
    "self_attn.attention_sink_bias": "attn.attend.sinks", "self_attn.sinks": "attn.attend.sinks",
}
GGUF_ARCHS = ("dflash", "dflash-draft")            # llama.cpp's, ik_llama.cpp's
DFLASH_GGUF_NAMES = GGUF_NAMES | {
    "fc": "context.wc", "enc.output_norm": "context.norm",
    "dflash_fc": "context.wc", "dflash_hidden_norm": "context.norm",   # dflash-draft
    "post_attention_norm": "ffn_norm",
}
NOT_USED = re.compile(r"(^|\.)t2d$|^verifier_")    # the inverse of d2t; of training
OTHER_METHODS = (                                  # tensors or keys that only these have
    ("DSpark (DFlash with a Markov head)",
     r"markov_|confidence_head|conf_proj|sample_from_anchor|dspark"),
    ("DFlash 2 (DFlash with convolutions and a candidate selector)",
     r"attention_conv|mlp_conv|attn_conv_|ffn_conv_|candidate_selector|selector_|conv_kernel_size"
     r"|dflash2"),
)
KEYS = Table(                                      # beyond those of a model's config.json
    "config.json of a DFlash drafter",
    acted_on="block_size mask_token_id target_layer_ids aux_hidden_state_layer_ids dflash_config "
             "num_target_layers causal sliding_window_non_causal use_swa swa_window_size "
             "draft_vocab_size target_hidden_size transformer_layer_config "
             "speculators_model_type input_embedding_scale final_logit_softcapping "
             "use_sliding_window layer_types sliding_window max_window_layers is_causal",
    refused={"fc_layernorm": (), "fc_norm": (), "norm_before_fc": (), "shift_label": (),
             "output_multiplier": (1,), "pure_draft_prefix_len": (1,), "g_proj": ()},
    without_effect={
        "training only": "max_anchors loss_* num_anchors",
        "provenance": "speculators_version speculators_config",
    })


# ---- Which files are drafters -------------------------------------------------------------------

def dflash_file(path: Path) -> Path | None:
    """The config.json or the .gguf of a DFlash drafter at this path; None: it is something else."""
    config = path / "config.json"
    if config.is_file():
        return config if is_dflash(read_json(config)) else None
    file = gguf_in(path) if path.is_dir() else path
    if file is None or file.suffix != ".gguf" or not file.is_file():
        return None
    metadata = header_of(file, open_mapped(file))[0]
    return file if metadata.get("general.architecture") in GGUF_ARCHS else None


def open_dflash(path: Path) -> Checkpoint:
    """A drafter's config.json or .gguf -> its checkpoint; names and shapes are checked.

    ValueError: it is damaged, or of a kind that is not supported.
    """
    is_gguf = path.suffix == ".gguf"
    with reading(path if is_gguf else path.parent):
        return _open_gguf(path) if is_gguf else _open_hub(path)


def refuse_other_methods(names) -> None:
    """names: of tensors and keys. ValueError names the method that they belong to."""
    for what, pattern in OTHER_METHODS:
        if found := [name for name in names if re.search(pattern, str(name).lower())]:
            raise ValueError(f"{found[0]!r} belongs to {what}, which is not supported: give a "
                             "DFlash drafter")


# ---- Hugging Face directories -------------------------------------------------------------------

def _open_hub(path: Path) -> Checkpoint:
    config, directory = read_json(path), path.parent
    own = _object(config, "dflash_config")
    stated = [key for part in (config, own) for key, value in part.items()
              if value not in (None, False)]
    refuse_other_methods([*stated, *(config.get("architectures") or ()),
                          config.get("speculators_model_type")])
    for part in (config, own):
        KEYS.check(part)
    if config.get("quantization_config") or config.get("compression_config"):
        raise ValueError("a quantized DFlash drafter is not supported: use the original, and "
                         "--quantize")
    layers = _object(config, "transformer_layer_config")
    keys = [*config, *own, *layers]
    name_unknown(path, [key for key in CONFIG.unknown(keys) if KEYS.kind_of(key) is None])
    tensors = hub_tensors(directory, weights_in(directory).name, read_weights)
    refuse_other_methods([t.name for t in tensors])
    tensors, d2t = _split(tensors)
    cfg = _config({**config, **own}, layers, tensors, d2t)
    tensors = rename(tensors, NAMES, cfg)
    if d2t is not None:
        tensors["tokens.ids"] = _draft_ids(d2t, cfg, is_offset=True)
    if (directory / "mask_embedding.pt").exists():
        cfg = replace(cfg, own_mask=True)
        tensors["tokens.mask"] = _mask_embedding(directory / "mask_embedding.pt", cfg)
    return _checkpoint(directory, cfg, tensors)


def _object(config: dict, key: str) -> dict:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"'{key}' is {brief(value)}, expected an object")
    return value or {}


def _split(tensors: list[LazyTensor]) -> tuple[list[LazyTensor], LazyTensor | None]:
    """-> the model's tensors, and d2t."""
    d2t = [t for t in tensors if t.name.split(".")[-1] == "d2t"]
    return ([t for t in tensors if t not in d2t and not NOT_USED.search(t.name)],
            d2t[0] if d2t else None)


def _mask_embedding(path: Path, cfg: DFlashConfig) -> LazyTensor:
    """mask_embedding.pt: a vector, or an object that holds it, beside the id of its token."""
    content = read_torch(path, (dict, torch.Tensor))
    if isinstance(content, dict):
        stated = content.get("mask_token_id", cfg.mask_id)
        if stated != cfg.mask_id:
            raise ValueError(f"{path}: 'mask_token_id' is {brief(stated)}, but config.json has "
                             f"{cfg.mask_id}")
        vectors = [t for t in content.values() if isinstance(t, torch.Tensor) and t.dim()]
        content = vectors[0] if len(vectors) == 1 else None
    if not isinstance(content, torch.Tensor) or content.numel() != cfg.dim:
        raise ValueError(f"{path}: expected a vector of {cfg.dim} numbers")
    vector = content.flatten()
    return cached("tokens.mask", vector.shape, vector.dtype, lambda: vector)


# ---- The config ---------------------------------------------------------------------------------

def _config(c: dict, layers: dict, tensors: list[LazyTensor], d2t: LazyTensor | None,
            taps_are_inputs: bool = False) -> DFlashConfig:
    """c: config.json with dflash_config's keys. layers: speculators' transformer_layer_config, else
    {}. taps_are_inputs: target_layer_ids has been increased by one (GGUF)."""
    is_speculators = bool(layers)
    names = {re.sub(r"^model\.", "", t.name): t for t in tensors}
    base = layer_config({**c, **layers}, names)
    n_layer = base.n_layer
    windows = _windows(c, layers, n_layer)
    if is_speculators:
        causal = not flag(c, "sliding_window_non_causal", True)
        causal = dict(causal_window=causal)
    elif c.get("is_causal") is not None:           # of all layers
        causal = dict(causal=flag(c, "is_causal"), causal_window=flag(c, "is_causal"))
    else:
        causal = dict(causal_window=flag(c, "causal", True))
        if c.get("causal") and not any(windows):
            raise ValueError("'causal' is true, but no layer has a window: 'is_causal' makes all "
                             "layers causal")
    n_target = count(c, "num_target_layers", 0) if c.get("num_target_layers") else 0
    taps = _taps(c, n_layer, n_target, taps_are_inputs)
    fc = next((t for name, t in names.items() if name in (
        "fc.weight", "dflash_fc.weight") and len(t.shape) == 2), None)
    if fc is None or fc.shape[1] % len(taps):
        shape = "is missing" if fc is None else f"is {list(fc.shape)}"
        raise ValueError(f"fc.weight {shape}, expected [{base.dim}, {len(taps)} times the target's "
                         "width]")
    head = names.get("lm_head.weight") or names.get("output.weight")
    after_embed, logit_cap = (), None
    if c.get("input_embedding_scale") is not None:
        after_embed = EmbedScale(number(c, "input_embedding_scale", least=0)),
    if c.get("final_logit_softcapping"):
        logit_cap = LogitCap(number(c, "final_logit_softcapping", least=0))
    draft_vocab = 0 if d2t is None else d2t.shape[0]
    stated = c.get("draft_vocab_size")
    if stated not in (None, draft_vocab or base.vocab_size):
        has = f"d2t has {draft_vocab} entries" if draft_vocab else (
            f"there is no d2t, which says which of {base.vocab_size} tokens these are")
        raise ValueError(f"'draft_vocab_size' is {brief(stated)}, but {has}")
    if draft_vocab and head is None:
        raise ValueError("d2t needs an output layer of its own (lm_head.weight)")
    facts = {field.name: getattr(base, field.name) for field in fields(ModelConfig)}
    facts.update(window=tile(windows), after_embed=after_embed, logit_cap=logit_cap)
    cfg = DFlashConfig(
        **facts, **causal, block_size=count(c, "block_size", 16), mask_id=_mask_id(c, base),
        taps=taps, target_dim=fc.shape[1] // len(taps), n_target_layer=n_target,
        own_embed=any(name in names for name in ("embed_tokens.weight", "token_embd.weight")),
        own_head=head is not None, draft_vocab=draft_vocab)
    if cfg.block_size < 2:
        raise ValueError(f"'block_size' is {cfg.block_size}, expected at least 2")
    check_config(cfg)
    return cfg


def layer_config(c: dict, names: dict[str, LazyTensor]) -> ModelConfig:
    """The layers as a Qwen3's. The tensors decide which have norms, biases and sinks.

    names: the file's tensors, by their names without `model.`.
    """
    def has(*parts):
        return any(f"{layer}.{part}" in names for layer in ("layers.0", "blk.0") for part in parts)
    not_ours = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
                "is_causal", "causal", "model_type", "attention_bias", "mlp_bias", "qkv_bias",
                "attention_out_bias", "final_logit_softcapping", "rope_scaling"}
    text = {key: value for key, value in c.items() if key not in not_ours}
    if c.get("rope_scaling") is not None:
        text["rope_scaling"] = c["rope_scaling"]
    if any(c.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError("a DFlash drafter with experts is not supported")
    check_keys(text)
    cfg, _ = config_from_hf(text | dict(model_type="qwen3", sliding_window=None,
                                        tie_word_embeddings=False))
    attention = None
    if has("self_attn.attention_sink_bias", "self_attn.sinks", "attn_sinks.weight"):
        attention = AttentionVariant(sinks=True)
    return replace(
        cfg, attention=attention, qk_norm=has("self_attn.q_norm.weight", "attn_q_norm.weight"),
        qkv_bias=has("self_attn.q_proj.bias", "attn_q.bias"),
        o_bias=has("self_attn.o_proj.bias", "attn_output.bias"),
        mlp_bias=has("mlp.up_proj.bias", "ffn_up.bias"))


def _windows(c: dict, layers: dict, n_layer: int) -> list[int | None]:
    """The window of each layer: layer_types says which have one; dflash_config's use_swa, which
    size, of all layers if there are no layer_types."""
    stated = {**layers, **{k: v for k, v in c.items() if v is not None}}
    size = stated.get("sliding_window")
    everywhere = False
    if flag(stated, "use_swa"):
        size, everywhere = stated.get("swa_window_size"), True
    kinds = stated.get("layer_types") or ["sliding_attention" if everywhere else "full_attention"
                                          ] * n_layer
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != n_layer or not set(map(str, kinds)) <= known:
        raise ValueError(f"'layer_types' is {brief(kinds)}, expected {n_layer} times "
                         "full_attention or sliding_attention")
    slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and (type(size) is not int or size < 1):
        raise ValueError(f"layers have a sliding window, but its size is {brief(size)}")
    return [size if one else None for one in slides]


def _mask_id(c: dict, base: ModelConfig) -> int:
    mask = c.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < base.vocab_size:
        raise ValueError(f"'mask_token_id' is {brief(mask)}, expected a token id below "
                         f"{base.vocab_size}")
    return mask


def _taps(c: dict, n_layer: int, n_target: int, are_inputs: bool) -> tuple[int, ...]:
    """The target's layers whose inputs are read. z-lab's ids name outputs, which are one less;
    speculators' name inputs."""
    key = "aux_hidden_state_layer_ids"
    ids, offset = c.get(key), 0
    if ids is None:
        key, offset = "target_layer_ids", 0 if are_inputs else 1
        ids = c.get(key)
    if ids is None and n_target:                   # evenly, from the second to the third last
        last = n_target - 3
        ids = [n_target // 2] if n_layer == 1 else [
            round(1 + i * (last - 1) / (n_layer - 1)) for i in range(n_layer)]
    if not isinstance(ids, list) or not ids or not all(
            type(i) is int and 0 <= i < 1000 for i in ids):
        raise ValueError(f"'{key}' is {brief(ids)}, expected a list of layer numbers")
    return tuple(i + offset for i in ids)


def _draft_ids(d2t: LazyTensor, cfg: DFlashConfig, is_offset: bool) -> LazyTensor:
    """d2t: the target's token of each drafted one, or its difference from the row's index."""
    ids = d2t.whole().flatten().long()
    if is_offset:
        ids = ids + torch.arange(len(ids))
    if ids.min() < 0 or ids.max() >= cfg.vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(f"d2t does not name {len(ids)} different tokens of {cfg.vocab_size}")
    return cached("tokens.ids", ids.shape, torch.float32, ids.float)


def _checkpoint(path: Path, cfg: DFlashConfig, tensors: dict[str, LazyTensor]) -> Checkpoint:
    source = Checkpoint(path, cfg, tensors, kind=DFlash)
    check(source)
    return source


# ---- GGUF ---------------------------------------------------------------------------------------

def _open_gguf(path: Path) -> Checkpoint:
    path, metadata, tensors = read_gguf_parts(path)
    arch = metadata["general.architecture"]
    refuse_other_methods([*metadata, *(t.name for t in tensors)])
    c = {hf: metadata[f"{arch}.{key}"] for hf, key in GGUF_KEYS.items()
         if f"{arch}.{key}" in metadata}
    of_ik = arch == "dflash-draft"
    prefix = f"{arch}.dflash." if of_ik else f"{arch}."
    own = {"block_size": "block_size", "mask_token_id": "mask_token_id",
           "target_layer_ids": "target_layer_ids" if of_ik else "target_layers"}
    c |= {ours: metadata[prefix + key] for ours, key in own.items() if prefix + key in metadata}
    c.setdefault("mask_token_id", metadata.get("tokenizer.ggml.mask_token_id"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    c["vocab_size"] = metadata.get(f"{arch}.vocab_size") or (
        len(tokens) if isinstance(tokens, list) else None)
    if pattern := metadata.get(f"{arch}.attention.sliding_window_pattern"):
        c["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    others = {key: value for key, value in metadata.items() if not key.startswith(prefix + "")
              or key.removeprefix(prefix) not in (*own.values(), "n_target_features")}
    check_supported(arch, {k: v for k, v in others.items() if k != f"{arch}.attention.causal"})
    name_unknown_keys(path, arch, others)
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"'{arch}.rope.scaling.type' is {brief(scaling)}: RoPE scaling is not "
                         "supported in a DFlash GGUF")
    tensors, d2t = _split(tensors)
    cfg = _config(c, {}, tensors, d2t, taps_are_inputs=not of_ik)
    tensors = rename(tensors, DFLASH_GGUF_NAMES, cfg)
    if d2t is not None:
        tensors["tokens.ids"] = _draft_ids(d2t, cfg, is_offset=False)
    return _checkpoint(path, cfg, tensors)


# ---- The target ---------------------------------------------------------------------------------

def check_target(source: Checkpoint, target: Checkpoint) -> None:
    """ValueError: the drafter is for another model."""
    cfg, its = source.cfg, target.cfg
    expected = f"models of width {cfg.target_dim} with {cfg.vocab_size} tokens"
    found = f"width {its.dim} and {its.vocab_size} tokens"
    fits = (cfg.target_dim, cfg.vocab_size) == (its.dim, its.vocab_size)
    if cfg.n_target_layer:
        expected += f" and {cfg.n_target_layer} layers"
        found += f" and {its.n_layer} layers"
        fits = fits and cfg.n_target_layer == its.n_layer
    if not fits:
        raise ValueError(f"{source.path} drafts for {expected}, but {target.path} has {found}")
    if max(cfg.taps) >= its.n_layer:
        raise ValueError(f"{source.path} reads the input of layer {max(cfg.taps)}, but "
                         f"{target.path} has {its.n_layer} layers, and what leaves the last one is "
                         "normalized in some programs, and not in others")
    if cfg.dim != its.dim and not (cfg.own_embed and cfg.own_head):
        raise ValueError(f"{source.path} is {cfg.dim} wide: it needs an embedding and an output "
                         f"layer of its own, as {target.path} has width {its.dim}")
