"""Gemma 4's drafter (gemma4_assistant): a few layers that read the keys of the model drafted for.

Owns what is in its files. Its math is layers/gemma4_assistant.py's, and drafting with it
decoding/assistant.py's.

    source = open_assistant(path); assistant = source.load(dtype, device)
"""

from dataclasses import dataclass, field, fields
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

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
OWN = {"pre_projection": "enter", "post_projection": "leave",          # beside its layers
       "masked_embedding.centroids": "centroids"}
ORDER = "masked_embedding.token_ordering"


@dataclass
class AssistantCheckpoint(Checkpoint):
    order: LazyTensor | None = None                # the vocabulary, cluster by cluster
    own: dict[str, LazyTensor] = field(default_factory=dict)

    def load(self, dtype: torch.dtype, device) -> Assistant:
        model = blank_model(self.cfg, dtype, Assistant)
        load_part(model, "", self, device)
        model.path = self.path
        if self.order is not None:
            clusters = self.order.whole().long().view(self.cfg.n_centroid, -1)
            model.clusters = clusters.to(device)
        return model.to(device).eval()


def is_assistant(path: Path) -> bool:
    """Is this directory's model one?"""
    config = path / "config.json"
    return config.exists() and read_json(config).get("model_type") in KINDS


def open_assistant(path: Path) -> AssistantCheckpoint:
    """A directory's, checked by names and shapes. ValueError says what was found and expected."""
    config = read_json(path / "config.json")
    with reading(path / "config.json"):
        cfg = _config(config)
    weights = weights_in(path)
    body, own, order = [], {}, None
    for t in hub_tensors(path, weights.name, read_weights):
        if t.name == ORDER:
            order = t
        elif t.name.removesuffix(".weight") in OWN:
            own[f"{OWN[t.name.removesuffix('.weight')]}.weight"] = t
        else:
            body.append(t)
    with reading(path):
        tensors = fold(rename(body, HF_NAMES | GEMMA4_NAMES, cfg), cfg, Folds())
        cfg = settle_tied(path, cfg, tensors)
    source = AssistantCheckpoint(path, cfg, tensors, order=order)
    check(source)
    _check_own(source, own)
    source.tensors |= own
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
            raise ValueError(f"{cfg.vocab_size} tokens in {config['num_centroids']} clusters, of "
                             f"which {config['centroid_intermediate_top_k']} count")
    return AssistantConfig(**facts, backbone_dim=config["backbone_hidden_size"])


def _check_own(source: AssistantCheckpoint, own: dict[str, LazyTensor]) -> None:
    cfg = source.cfg
    shapes = {"enter.weight": (cfg.dim, 2 * cfg.backbone_dim),
              "leave.weight": (cfg.backbone_dim, cfg.dim)}
    if cfg.n_centroid:
        shapes["centroids.weight"] = (cfg.n_centroid, cfg.dim)
    found = {name: t.shape for name, t in own.items()}
    if found != shapes or (source.order is not None) != bool(cfg.n_centroid):
        raise ValueError(f"{source.path}: its projections are {found}, the config asks for "
                         f"{shapes}{' and ' + ORDER if cfg.n_centroid else ''}")
