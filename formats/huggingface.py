"""Hugging Face directories: config.json, weights and generation_config.json -> a RawCheckpoint."""

import sys
from dataclasses import replace
from pathlib import Path

from formats.checkpoint import RawCheckpoint
from formats.config import BAD_CONFIG, config_from_hf
from formats.families import FAMILIES, stated_folds
from formats.fold import Folds
from formats.hub_quantized import dequantized
from formats.json_file import read_json
from formats.lazy import LazyTensor
from formats.messages import first_line
from formats.mtp import HEAD_NAMES, has_experts, head_config, split_head
from formats.names import HF_NAMES, OUR_NAMES, look_up
from formats.safetensors_file import read_safetensors
from formats.torch_file import lazy_tensors, read_torch


def read_hf(directory: Path, weights: str) -> RawCheckpoint:
    """config.json and what lies beside it; weights: the file, or the index of its shards."""
    path = directory / "config.json"
    config = read_json(path)
    try:
        cfg, c = config_from_hf(config)
    except BAD_CONFIG as e:
        raise ValueError(f"{path}: {e}") from None
    if "vision_config" in config:
        print("note: of this multimodal model only the text part is read", file=sys.stderr)
    tensors = hub_weights(directory, weights)
    if "text_config" in config:                    # both levels say whether it is tied
        cfg = replace(cfg, tied=not any(t.name.endswith("lm_head.weight") for t in tensors))
    quantization = (config.get("quantization_config") or config.get("compression_config")
                    or c.get("quantization_config"))
    if quantization and c["model_type"] == "gpt2":
        raise ValueError(f"{path}: a quantized GPT-2 is not supported: use the original model")
    if quantization:
        try:
            tensors = dequantized(tensors, quantization)
        except BAD_CONFIG as e:
            raise ValueError(f"{path}: quantization_config: {first_line(e)}") from None
    behind = c.get("num_nextn_predict_layers") or c.get("num_mtp_layers")
    tensors, head = split_head(tensors, cfg.n_layer if behind else None)
    family = FAMILIES[c["model_type"]]
    names = {**HF_NAMES, **family.names_of(c)}
    folds = Folds(**{**family.folds, **stated_folds(c)})
    if tensors and all(look_up(t.name, OUR_NAMES) for t in tensors):
        names, folds = OUR_NAMES, None             # our .pth with its config beside it
    eos_ids, defaults = generation_defaults(directory, config)
    raw = RawCheckpoint(directory / weights, cfg, tensors, names, folds, eos_ids, defaults,
                        tokenizer=directory, hub_quantized=bool(quantization))
    if head:
        slides = "sliding_attention" in (c.get("mtp_layer_types") or ())
        raw.mtp = replace(raw, cfg=head_config(cfg, has_experts(head), slides),
                          tensors=head, names=names | HEAD_NAMES)
    return raw


def hub_weights(directory: Path, name: str) -> list[LazyTensor]:
    """Every tensor of model.safetensors, pytorch_model.bin, or the shards that an index lists."""
    if name.endswith(".index.json"):
        shards = sorted(set(read_json(directory / name).get("weight_map", {}).values()))
    else:
        shards = [name]
    tensors = []
    for shard in shards:
        path = directory / shard
        if not path.exists():
            raise FileNotFoundError(f"{path}: listed in {name} but not there: download it again")
        tensors += (read_safetensors(path) if shard.endswith(".safetensors")
                   else lazy_tensors(read_torch(path)))
    return tensors


def _ids(value) -> list[int]:
    value = value if isinstance(value, list) else [value]
    return [i for i in value if type(i) is int]


def generation_defaults(directory: Path, config: dict) -> tuple[list[int], dict]:
    """End-of-sequence ids of both config files, and how the model's authors sample from it."""
    path = directory / "generation_config.json"
    generation = {}
    if path.exists():
        try:
            generation = read_json(path)
        except ValueError as e:                    # some on the Hub are broken; they are optional
            print(f"note: ignored: {e}", file=sys.stderr)
    ids = []
    for c in (generation, config.get("text_config", {}), config):
        ids += _ids(c.get("eos_token_id"))
    valid = dict(temperature=lambda v: v >= 0, top_k=lambda v: v == int(v) >= 0,
                 top_p=lambda v: 0 < v <= 1, min_p=lambda v: 0 <= v <= 1,
                 repetition_penalty=lambda v: v > 0)
    stated = {k: generation[k] for k in valid
              if generation.get("do_sample") and generation.get(k) is not None}
    defaults = {k: int(v) if k == "top_k" else float(v) for k, v in stated.items()
                if isinstance(v, (int, float)) and valid[k](v)}
    if bad := set(stated) - set(defaults):
        print(f"note: ignored in {path}: {', '.join(sorted(bad))}", file=sys.stderr)
    return list(dict.fromkeys(ids)), defaults
