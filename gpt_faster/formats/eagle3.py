"""EAGLE-3 drafters: the layouts of SafeAILab, SpecForge, NVIDIA, vLLM's speculators, and GGUF.

Owns the reading of their files. The math is in layers/eagle3.py, drafting in decoding/eagle3.py.

    source = open_eagle3(path); eagle = source.load(dtype, device)
"""

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import (
    HF_NAMES,
    Checkpoint,
    LazyTensor,
    bare,
    brief,
    check,
    count,
    flag,
    hub_tensors,
    name_unknown,
    read_json,
    reading,
    rename,
)
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.file_kinds import is_eagle3_config
from gpt_faster.formats.fold import Folds, fold
from gpt_faster.formats.gguf_file import read_gguf_parts
from gpt_faster.formats.gguf_model import (
    GGUF_KEYS,
    GGUF_NAMES,
    GGUF_ROPE_KEYS,
    Tensors,
    name_unknown_keys,
)
from gpt_faster.formats.huggingface import read_weights
from gpt_faster.formats.known_keys import CONFIG
from gpt_faster.formats.load import load_model, weights_in
from gpt_faster.layers.eagle3 import Eagle3, Eagle3Config, FirstLayerReadsBoth
from model import ModelConfig

NAMES = HF_NAMES | {"fc": "fc", "input_norm": "input_norm", "hidden_norm": "hidden_norm",
                    **{f"fc_norm_{i}": f"fc_norm.{i}" for i in range(16)}}
GGUF_EAGLE3_NAMES = GGUF_NAMES | {"fc": "fc", "attn_norm_2": "hidden_norm"}
MODEL_TYPES = "llama", "qwen3"                     # of the layers
OWN_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual",
            "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids",
            "transformer_layer_config")
# Keys of training and provenance. speculators_config: who the target was, how many tokens to draft.
WITHOUT_EFFECT = ("speculators_model_type", "speculators_version", "speculators_config",
                  "embed_requires_grad", "has_no_defaults_at_init", "target_model_type",
                  "torch_dtype", "architectures")
# Keys of eagle_config (NVIDIA's Model Optimizer writes more than SpecForge), with the only values
# that EAGLE-3 has
EAGLE_CONFIG = dict(
    use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False,
    next_layer_regular=True, parallel_draft_step=1)
GGUF_OWN_KEYS = ("extract_layers", "target_hidden_size", "target_layers", "norm_before_residual")


@dataclass
class Eagle3Checkpoint(Checkpoint):
    target_ids: Tensor | None = None               # [draft_vocab] ids in the target's vocabulary

    def load(self, dtype: torch.dtype, device) -> Eagle3:
        return self.finish(load_model(self, dtype, device, packed=False))

    def finish(self, model: Eagle3) -> Eagle3:
        """The model with what is not a weight."""
        model.path = self.path
        if self.target_ids is not None:
            model.target_ids = self.target_ids.to(model.freq.device)
        return model


def is_eagle3(path: Path) -> bool:
    """Does this directory or GGUF hold an EAGLE-3 drafter?"""
    if path.is_dir():
        config = path / "config.json"
        return config.exists() and is_eagle3_config(read_json(config))
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf_parts(path)[1].get("general.architecture") == "eagle3"
    return (path.parent / "config.json").exists() and path.is_file() and is_eagle3(path.parent)


def open_eagle3(path: Path) -> Eagle3Checkpoint:
    """Read a drafter's files; names and shapes are checked. ValueError: it does not fit."""
    if path.suffix == ".gguf":
        return _open_gguf(path)
    directory = path if path.is_dir() else path.parent
    config = read_json(directory / "config.json")
    weights = weights_in(path) if path.is_dir() else path
    tensors = [t.derived(t.read_rows, name=_canonical(t.name))
               for t in hub_tensors(directory, weights.name, read_weights)]
    with reading(directory / "config.json"):
        layers, own = split_config(config, directory / "config.json")
        cfg, _ = config_from_hf(layers, directory / "config.json")
        facts = own_facts(own, cfg)
    with reading(weights):
        body, offsets = _split_ids(tensors)
        ids = None
        if offsets is not None:                    # target id - draft id
            ids = offsets + torch.arange(len(offsets))
        return _checked(weights, cfg, facts, rename(body, NAMES, cfg), ids, Folds())


def _canonical(name: str) -> str:
    """midlayer.x -> layers.0.x; fc_norm.0 -> fc_norm_0, whose number is no expert's."""
    name = re.sub(r"^midlayer\.", "layers.0.", bare(name))
    return re.sub(r"^fc_norm\.(\d+)\.", r"fc_norm_\1.", name)


def split_config(config: dict, path: Path) -> tuple[dict, dict]:
    """A config.json -> the keys of the layers' config, and those of EAGLE-3."""
    if config.get("quantization_config"):
        raise ValueError("quantized EAGLE-3 drafters are not supported: use the original one, with "
                         "--quantize if you like")
    own = {key: config[key] for key in OWN_KEYS if key in config}
    layers = {key: value for key, value in config.items()
              if key not in own and key not in WITHOUT_EFFECT}
    inner = own.pop("transformer_layer_config", None)
    if inner is not None:                          # speculators
        if not isinstance(inner, dict):
            raise ValueError(f"'transformer_layer_config' is {brief(inner)}, expected an object")
        name_unknown(path, CONFIG.unknown([key for key in layers if layers[key] is not None]))
        layers = inner
        if "norm_before_residual" not in own:
            own["norm_before_residual"] = True
            print(f"note: {path}: no 'norm_before_residual': taken as true, as vLLM does",
                  file=sys.stderr)
    kind = layers.get("model_type", "llama")
    if kind not in MODEL_TYPES:
        raise ValueError(f"an EAGLE-3 drafter with layers of model_type {brief(kind)} is not "
                         f"supported (supported: {', '.join(MODEL_TYPES)})")
    return {**layers, "model_type": kind, "tie_word_embeddings": False}, own


def own_facts(own: dict, cfg: ModelConfig) -> dict:
    """Eagle3Config's fields of a config.json's keys. The tensors say the rest."""
    nested = own.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"'eagle_config' is {brief(nested)}, expected an object")
    for key, value in nested.items():
        if key not in EAGLE_CONFIG and key not in ("eagle_aux_hidden_state_layer_ids",
                                                   "use_aux_hidden_state"):
            raise ValueError(f"'eagle_config' has the key {brief(key)}, which is not supported")
        if key in EAGLE_CONFIG and value not in (EAGLE_CONFIG[key], None):
            raise ValueError(f"'{key}' in 'eagle_config' is {brief(value)}: only "
                             f"{EAGLE_CONFIG[key]} is supported")
    layers = _layer_ids(own, 0) or _layer_ids(nested, 1)
    return dict(
        target_dim=count(own, "target_hidden_size", cfg.dim), target_layers=layers,
        has_states=flag(nested, "use_aux_hidden_state", True),
        norm_before_residual=flag(own, "norm_before_residual"),
        norm_before_fc=flag(own, "norm_before_fc"), fc_norm=flag(own, "fc_norm"),
        norm_output=flag(own, "norm_output"), draft_vocab=own.get("draft_vocab_size"))


def _layer_ids(own: dict, offset: int) -> tuple[int, ...] | None:
    """The layers whose inputs are read. offset: 1 if the file names those whose outputs are."""
    ids = own.get("eagle_aux_hidden_state_layer_ids")
    if ids in (None, []):
        return None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 16 for i in ids):
        raise ValueError(f"'eagle_aux_hidden_state_layer_ids' is {brief(ids)}, expected layer "
                         "numbers")
    return tuple(i + offset for i in ids)


def _split_ids(tensors: list[LazyTensor]) -> tuple[list[LazyTensor], Tensor | None]:
    """-> the other tensors; d2t, whole. t2d is its inverse, for training."""
    body, ids = [], None
    for t in tensors:
        name = bare(t.name).removesuffix(".weight")
        if name == "d2t":
            if len(t.shape) != 1 or t.dtype.is_floating_point:
                raise ValueError(f"{t.name} is {t.dtype} {list(t.shape)}, expected a list of ids")
            ids = t.whole().long()
        elif name != "t2d":
            body.append(t)
    return body, ids


def _checked(path: Path, cfg: ModelConfig, facts: dict, tensors: dict[str, LazyTensor],
             ids: Tensor | None, folds: Folds) -> Eagle3Checkpoint:
    """The config completed by what the tensors say; their names and shapes are checked."""
    head, fc = tensors.get("head.weight"), tensors.get("fc.weight")
    stated, has_states = facts.pop("draft_vocab"), facts.pop("has_states")
    draft_vocab = head.shape[0] if head else 0
    if (fc is None) == has_states:
        raise ValueError("fc.weight is missing" if has_states else
                         "fc.weight, but 'use_aux_hidden_state' is false")
    if head and stated not in (None, draft_vocab):
        print(f"note: {path.name}: 'draft_vocab_size' is {brief(stated)}, but lm_head.weight has "
              f"{draft_vocab} rows: using these", file=sys.stderr)
    if ids is None and draft_vocab not in (0, cfg.vocab_size):
        raise ValueError(f"lm_head.weight has {draft_vocab} rows and the target's vocabulary "
                         f"{cfg.vocab_size} tokens, but there is no d2t")
    if ids is not None and (len(ids) != (draft_vocab or cfg.vocab_size) or int(ids.min()) < 0
                            or int(ids.max()) >= cfg.vocab_size
                            or len(ids.unique()) != len(ids)):
        raise ValueError(f"d2t has {len(ids)} entries for target ids {int(ids.min())} to "
                         f"{int(ids.max())}, expected one for each of {draft_vocab} draft tokens, "
                         f"all different and below {cfg.vocab_size}")
    if not has_states and facts["target_dim"] != cfg.dim:
        raise ValueError(f"without fc.weight the target's width must be {cfg.dim}, not "
                         f"{facts['target_dim']}")
    n_state = fc.shape[-1] // facts["target_dim"] if fc else 0
    if fc and facts["target_layers"] and n_state != len(facts["target_layers"]):
        raise ValueError(f"{len(facts['target_layers'])} layers are named, but fc.weight joins "
                         f"{n_state} hidden states")
    if fc and not facts["target_layers"] and n_state != 3:
        raise ValueError(f"fc.weight joins {n_state} hidden states, and no layers are named")
    values = {f.name: getattr(cfg, f.name) for f in fields(ModelConfig)}
    values.update(
        tied=False, logit_cap=None, block=FirstLayerReadsBoth(facts.pop("norm_before_residual")),
        qk_norm="layers.0.attn.q_norm.weight" in tensors,
        qkv_bias="layers.0.attn.wq.bias" in tensors, o_bias="layers.0.attn.wo.bias" in tensors,
        mlp_bias="layers.0.ffn.down.bias" in tensors)
    cfg = Eagle3Config(**values, **facts, n_state=n_state, draft_vocab=draft_vocab,
                       own_embed="embed.weight" in tensors)
    source = Eagle3Checkpoint(path, cfg, fold(tensors, cfg, folds), kind=Eagle3, target_ids=ids)
    check(source)
    return source


# ---- GGUF ---------------------------------------------------------------------------------------

def _open_gguf(path: Path) -> Eagle3Checkpoint:
    path, metadata, tensors = read_gguf_parts(path)
    with reading(path):
        own = {key: metadata[f"eagle3.{key}"] for key in GGUF_OWN_KEYS
               if f"eagle3.{key}" in metadata}
        named = Tensors((t.name, t) for t in tensors)
        cfg, _ = config_from_hf(gguf_config(metadata, named))
        layers = own.get("extract_layers", own.get("target_layers"))
        if layers is not None:
            own["eagle_aux_hidden_state_layer_ids"] = list(layers)
        facts = own_facts(own, cfg)
        known = {f"eagle3.{key}" for key in (*GGUF_OWN_KEYS, "vocab_size")}
        name_unknown_keys(path, "eagle3", {key: value for key, value in metadata.items()
                                           if key not in known})
        body, ids = _split_ids([t for t in tensors if t.name != "rope_freqs.weight"])
        tensors = rename(body, GGUF_EAGLE3_NAMES, cfg)
        return _checked(path, cfg, facts, tensors, ids, Folds(interleaved_rope=True))


def gguf_config(metadata: dict, tensors: Tensors) -> dict:
    """The layers' config.json. The vocabulary is the target's, whose tokenizer the file has."""
    c = {hf: metadata[f"eagle3.{key}"] for hf, key in GGUF_KEYS.items()
         if f"eagle3.{key}" in metadata}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "token_embd.weight" in tensors:
        c["vocab_size"] = tensors["token_embd.weight"].shape[0]
    elif isinstance(tokens, list):
        c["vocab_size"] = len(tokens)
    else:
        c["vocab_size"] = metadata.get("eagle3.vocab_size")
    rope = {hf: metadata[f"eagle3.rope.scaling.{key}"] for hf, key in GGUF_ROPE_KEYS.items()
            if f"eagle3.rope.scaling.{key}" in metadata}
    if rope.get("rope_type", "none") == "none":
        rope["rope_type"] = "default"
    if "rope_freqs.weight" in tensors:             # Llama 3.1's scaling, one factor per frequency
        rope["divisors"] = tensors.vector("rope_freqs.weight")
    return {**c, "model_type": "llama", "tie_word_embeddings": False, "rope_parameters": rope}
