"""Hugging Face directories: config.json, weights and generation_config.json -> a RawCheckpoint."""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from formats.checkpoint import RawCheckpoint
from formats.config import config_from_hf
from formats.families import FAMILIES, stated_folds
from formats.fold import Folds
from formats.hub_quantized import dequantized
from formats.json_file import read_json
from formats.lazy import LazyTensor
from formats.messages import reading
from formats.mtp import HEAD_NAMES, has_experts, head_config, split_head
from formats.names import HF_NAMES, OUR_NAMES, look_up
from formats.safetensors_file import read_safetensors
from formats.schema import brief
from formats.torch_file import lazy_tensors, read_torch
from sampling import RANGES

SAMPLING = {name: allowed for name, allowed in RANGES.items()
            if name not in ("seed", "top_n_sigma")}        # what transformers reads


def read_hf(directory: Path, weights: str) -> RawCheckpoint:
    """config.json and what lies beside it; weights: the file, or the index of its shards."""
    path = directory / "config.json"
    config = read_json(path)
    with reading(path):
        cfg, c = config_from_hf(config)
    if "vision_config" in config:
        print("note: of this multimodal model only the text part is read", file=sys.stderr)
    tensors = hub_weights(directory, weights)
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
        shards = _shards(directory / name)
    else:
        shards = [name]
    tensors = []
    for shard in shards:
        path = directory / shard
        if not path.is_file():
            raise FileNotFoundError(f"{path}: listed in {name} but not there: download it again")
        tensors += (read_safetensors(path) if shard.endswith(".safetensors")
                   else lazy_tensors(read_torch(path)))
    return tensors


def _shards(index: Path) -> list[str]:
    """The files that an index lists, which lie where it lies. Links among them are followed, as the
    hub's cache consists of such.
    """
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: 'weight_map' is {brief(listed)}, expected tensors and files")
    for shard in listed.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise ValueError(f"{index}: {brief(shard)} is no name of a file beside it")
    return sorted(set(listed.values()))


def _ids(value) -> list[int]:
    value = value if isinstance(value, list) else [value]
    return [i for i in value if type(i) is int and 0 <= i < 1 << 31]


def sampling_values(stated: dict) -> dict:
    """Those of a model's sampling values that are in their range."""
    values = {}
    for name, value in stated.items():
        if name not in SAMPLING or type(value) not in (int, float):
            continue
        kind = SAMPLING[name].kind
        with suppress(ValueError):
            if SAMPLING[name].check(value) == kind(value):     # not 40.5 of the likeliest tokens
                values[name] = kind(value)
    return values


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
    for c in (generation, config.get("text_config") or {}, config):
        ids += _ids(c.get("eos_token_id"))
    stated = {k: generation[k] for k in SAMPLING
              if generation.get("do_sample") and generation.get(k) is not None}
    defaults = sampling_values(stated)
    if bad := set(stated) - set(defaults):
        print(f"note: ignored in {path}: {', '.join(sorted(bad))}", file=sys.stderr)
    return list(dict.fromkeys(ids)), defaults
