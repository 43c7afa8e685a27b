"""Hugging Face directories: config.json, weights and generation_config.json -> a RawCheckpoint."""

import sys
from dataclasses import replace
from pathlib import Path

from checkpoint import (
    HF_NAMES,
    LazyTensor,
    generation_defaults,
    hub_tensors,
    lazy_tensors,
    look_up,
    read_json,
    read_safetensors,
    reading,
)
from gpt_faster.formats.awq_gptq_fp8 import dequantized
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.families import FAMILIES, stated_folds
from gpt_faster.formats.fold import Folds
from gpt_faster.formats.mtp import HEAD_NAMES, has_experts, head_config, split_head
from gpt_faster.formats.names import OUR_NAMES
from gpt_faster.formats.raw_checkpoint import RawCheckpoint
from gpt_faster.formats.torch_file import read_torch
from gpt_faster.layers.mtp_head import MTPHead


def read_hf(directory: Path, weights: str) -> RawCheckpoint:
    """config.json and what lies beside it; weights: the file, or the index of its shards."""
    path = directory / "config.json"
    config = read_json(path)
    with reading(path):
        cfg, c = config_from_hf(config)
    if "vision_config" in config:
        print("note: of this multimodal model only the text part is read", file=sys.stderr)
    tensors = hub_tensors(directory, weights, read_weights)
    if "text_config" in config and not any(t.name.endswith("lm_head.weight") for t in tensors):
        cfg = replace(cfg, tied=True)              # both levels of the config may say so
    quantization = (config.get("quantization_config") or config.get("compression_config")
                    or c.get("quantization_config"))
    if quantization and c["model_type"] == "gpt2":
        raise ValueError(f"{path}: a quantized GPT-2 is not supported: use the original model")
    if quantization:
        with reading(f"{path}: quantization_config"):
            tensors = dequantized(tensors, quantization)
    behind = c.get("num_nextn_predict_layers") or c.get("num_mtp_layers")
    tensors, head = split_head(tensors, cfg.n_layer if behind else None)
    family = FAMILIES[c["model_type"]]
    names = {**HF_NAMES, **family.names_of(c)}
    folds = Folds(**{**family.folds, **stated_folds(c)})
    if tensors and all(look_up(t.name, OUR_NAMES) for t in tensors):
        names, folds = OUR_NAMES, None             # our .pth with its config beside it
    eos_ids, defaults = generation_defaults(directory, config.get("text_config") or {}, config)
    raw = RawCheckpoint(directory / weights, cfg, tensors, names, eos_ids, defaults,
                        tokenizer=directory, folds=folds, hub_quantized=bool(quantization))
    if head:
        slides = "sliding_attention" in (c.get("mtp_layer_types") or ())
        raw.mtp = replace(raw, cfg=head_config(cfg, has_experts(head), slides),
                          tensors=head, names=names | HEAD_NAMES, kind=MTPHead)
    return raw


def read_weights(path: Path) -> list[LazyTensor]:
    """One file of a directory's weights."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return lazy_tensors(read_torch(path))
