"""Gemma 4's drafter (gemma4_assistant): a few layers that attend to the target model's KV cache.

Owns the reading of its checkpoint. The math is in layers/gemma4_assistant.py, drafting in
decoding/assistant.py.

    source = open_assistant(path); assistant = source.load(dtype, device)
"""

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from checkpoint import (
    HF_NAMES,
    Checkpoint,
    LazyTensor,
    blank_model,
    check,
    hub_tensors,
    load_part,
    read_json,
    reading,
    settle_tied,
)
from gpt_faster.formats.config import Stated, config_from_hf, count
from gpt_faster.formats.fold import Folds, fold
from gpt_faster.formats.huggingface import read_weights
from gpt_faster.formats.load import weights_in
from gpt_faster.formats.names import GEMMA4_NAMES, rename
from gpt_faster.formats.schema import check_keys
from gpt_faster.layers.gemma4_assistant import Assistant, AssistantConfig
from gpt_faster.layers.shared_kv import SharedKV
from model import ModelConfig

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
PROJECTIONS = {"pre_projection": "enter", "post_projection": "leave",      # not in a layer
       "masked_embedding.centroids": "centroids"}
TOKEN_ORDERING = "masked_embedding.token_ordering"


@dataclass
class AssistantCheckpoint(Checkpoint):
    order: LazyTensor | None = None                # token ids, sorted by cluster

    def load(self, dtype: torch.dtype, device) -> Assistant:
        model = blank_model(self.cfg, dtype, Assistant)
        load_part(model, "", self, device)
        model.path = self.path
        if self.order is not None:
            clusters = self.order.whole().long().view(self.cfg.n_centroid, -1)
            model.clusters = clusters.to(device)
        return model.to(device).eval()


def is_assistant(path: Path) -> bool:
    """Does this directory hold a Gemma 4 drafter?"""
    config = path / "config.json"
    return config.exists() and read_json(config).get("model_type") in MODEL_TYPES


def open_assistant(path: Path) -> AssistantCheckpoint:
    """Read a drafter's directory; names and shapes are checked. ValueError: it does not fit."""
    config = read_json(path / "config.json")
    with reading(path / "config.json"):
        cfg = _config(config)
    weights = weights_in(path)
    body, projections, order = [], {}, None
    for t in hub_tensors(path, weights.name, read_weights):
        if t.name == TOKEN_ORDERING:
            order = t
        elif t.name.removesuffix(".weight") in PROJECTIONS:
            name = PROJECTIONS[t.name.removesuffix(".weight")]
            projections[f"{name}.weight"] = t
        else:
            body.append(t)
    with reading(path):
        tensors = fold(rename(body, HF_NAMES | GEMMA4_NAMES, cfg), cfg, Folds())
        cfg = settle_tied(path, cfg, tensors)
    source = AssistantCheckpoint(path, cfg, tensors, order=order)
    check(source)
    _check_projections(source, projections)
    source.tensors |= projections
    return source


def _config(config: dict) -> AssistantConfig:
    config = Stated(config)
    check_keys(config)
    kind = config["model_type"].replace("assistant", "text")
    text = {**(config["text_config"] or {}), "model_type": kind, "num_kv_shared_layers": 0}
    cfg = config_from_hf({**text, "hidden_size_per_layer_input": 0})[0]
    for key in ("backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k"):
        if key.startswith("back") or config.get("use_ordered_embeddings"):
            count(config, key)
    facts = {f.name: getattr(cfg, f.name) for f in fields(ModelConfig)}
    facts.update(mixer=(SharedKV(None),), logit_cap=None)
    if config.get("use_ordered_embeddings"):
        facts.update(n_centroid=config["num_centroids"],
                     n_active=config["centroid_intermediate_top_k"])
        if (cfg.vocab_size % config["num_centroids"]
                or config["centroid_intermediate_top_k"] > config["num_centroids"]):
            raise ValueError(f"'num_centroids' is {config['num_centroids']}: it must divide the "
                             f"{cfg.vocab_size} tokens and be at least "
                             f"'centroid_intermediate_top_k' "
                             f"({config['centroid_intermediate_top_k']})")
    return AssistantConfig(**facts, backbone_dim=config["backbone_hidden_size"])


def _check_projections(source: AssistantCheckpoint,
                       projections: dict[str, LazyTensor]) -> None:
    cfg = source.cfg
    shapes = {"enter.weight": (cfg.dim, 2 * cfg.backbone_dim),
              "leave.weight": (cfg.backbone_dim, cfg.dim)}
    if cfg.n_centroid:
        shapes["centroids.weight"] = (cfg.n_centroid, cfg.dim)
    found = {name: t.shape for name, t in projections.items()}
    if found != shapes or (source.order is not None) != bool(cfg.n_centroid):
        raise ValueError(f"{source.path}: projection shapes are {found}, but config.json expects "
                         f"{shapes}{' and ' + TOKEN_ORDERING if cfg.n_centroid else ''}")
