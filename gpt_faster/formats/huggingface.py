"""Hugging Face directories: config.json, weights and generation_config.json -> a RawCheckpoint."""

import sys
from dataclasses import replace
from pathlib import Path

from checkpoint import (
    HF_NAMES,
    LazyTensor,
    brief,
    generation_defaults,
    hub_tensors,
    lazy_tensors,
    look_up,
    name_unknown,
    read_json,
    read_safetensors,
    reading,
)
from gpt_faster.formats.awq_gptq_fp8 import ALTERNATIVES_HINT, dequantized
from gpt_faster.formats.config import config_from_hf, thinker_part
from gpt_faster.formats.families import FAMILIES, stated_folds
from gpt_faster.formats.file_kinds import foreign_quantization, kind_of, refuse_others
from gpt_faster.formats.fold import Folds
from gpt_faster.formats.known_keys import GENERATION, QUANTIZATION
from gpt_faster.formats.mtp import MTP_HEAD_NAMES, has_experts, mtp_head_config, split_mtp_head
from gpt_faster.formats.names import OUR_NAMES
from gpt_faster.formats.other_kinds import DFLASH_INSTEAD, is_dflash
from gpt_faster.formats.raw_checkpoint import RawCheckpoint
from gpt_faster.formats.torch_file import read_torch, state_dict
from gpt_faster.layers.mtp_head import MTPHead


def read_hf(directory: Path, weights: str) -> RawCheckpoint:
    """Read a directory. weights: the name of the weights file, or of the shards' index."""
    path = directory / "config.json"
    config = read_json(path)
    if is_mlx(config):
        raise ValueError(f"{path}: a quantized MLX model (Apple's mlx-lm): {ALTERNATIVES_HINT}")
    if is_dflash(config):
        raise ValueError(f"{directory}: {DFLASH_INSTEAD}")
    with reading(path):
        cfg, c = config_from_hf(config, path)
    is_omni = "thinker_config" in config
    config = thinker_part(config)
    if "vision_config" in config:
        print("note: multimodal model: loading the text part only", file=sys.stderr)
    family = FAMILIES[c["model_type"]]
    tensors = hub_tensors(directory, weights, read_weights)
    if is_omni:                                    # without the part that speaks
        tensors = [t.renamed(t.name.removeprefix("thinker."))
                   for t in tensors if t.name.startswith("thinker.")]
    if "text_config" in config and not any(t.name.endswith("lm_head.weight") for t in tensors):
        levels = config, config["text_config"] or {}
        stated = [part["tie_word_embeddings"] for part in levels if "tie_word_embeddings" in part]
        cfg = replace(cfg, tied=cfg.tied or not stated or any(stated))
    quantization = (config.get("quantization_config") or config.get("compression_config")
                    or c.get("quantization_config") or modelopt_config(directory))
    whose = not quantization and foreign_quantization([t.name for t in tensors])
    if whose:
        raise ValueError(f"{directory / weights}: {whose}: {ALTERNATIVES_HINT}")
    if any(".lora_A." in t.name for t in tensors):
        raise ValueError(f"{directory / weights}: weights and a LoRA adapter in one: PEFT's "
                         "merge_and_unload() before saving makes a model of it")
    if quantization and c["model_type"] == "gpt2":
        raise ValueError(f"{path}: quantized GPT-2 is not supported: use the original model")
    if quantization:
        with reading(f"{path}: quantization_config"):
            name_unknown(path, QUANTIZATION.unknown(quantization))
            tensors = dequantized(tensors, quantization)
    if family.rename:
        new_names = [(t, family.rename(t.name, c)) for t in tensors]
        tensors = [t.renamed(name) for t, name in new_names if name is not None]
    n_mtp = c.get("num_nextn_predict_layers") or c.get("num_mtp_layers")
    tensors, head = split_mtp_head(tensors, cfg.n_layer if n_mtp else None)
    names = {**HF_NAMES, **family.names_of(c)}
    folds = Folds(**{**family.folds, **stated_folds(c)})
    if tensors and all(look_up(t.name, OUR_NAMES) for t in tensors):
        names, folds = OUR_NAMES, None             # a .pth of ours next to config.json
    eos_ids, defaults = generation_defaults(directory, config.get("text_config") or {}, config,
                                            unknown=GENERATION.unknown)
    raw = RawCheckpoint(directory / weights, cfg, tensors, names, eos_ids, defaults,
                        tokenizer=directory, folds=folds, prequantized=bool(quantization))
    if head:
        slides = "sliding_attention" in (c.get("mtp_layer_types") or ())
        raw.mtp = replace(raw, cfg=mtp_head_config(cfg, has_experts(head), slides),
                          tensors=head, names=names | MTP_HEAD_NAMES, kind=MTPHead)
    return raw


def modelopt_config(directory: Path) -> dict | None:
    """ModelOpt's own file, which its older versions write instead of a quantization_config."""
    path = directory / "hf_quant_config.json"
    if not path.exists():
        return None
    stated = read_json(path).get("quantization")
    if not isinstance(stated, dict):
        raise ValueError(f"{path}: 'quantization' is {brief(stated)}, expected an object")
    return {"quant_method": "modelopt", **stated} if stated.get("quant_algo") else None


def is_mlx(config: dict) -> bool:
    """mlx-lm writes `quantization`, and a copy as quantization_config, without a method."""
    mlx, theirs = config.get("quantization"), config.get("quantization_config")
    states_method = isinstance(theirs, dict) and "quant_method" in theirs
    return isinstance(mlx, dict) and "bits" in mlx and not states_method


def read_weights(path: Path) -> list[LazyTensor]:
    """The tensors of one weights file."""
    refuse_others(path)
    if (kind_of(path) or path.suffix.removeprefix(".")) == "safetensors":
        return read_safetensors(path)
    return lazy_tensors(state_dict(read_torch(path)), path)
