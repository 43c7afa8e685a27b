"""Gemma 4's drafter (gemma4_assistant): a few layers that read the keys of the model drafted for.

Its layers have queries only. Its input is the model's embedding of the last token beside the
model's hidden state before it; all tokens of a draft stand at one position. Owns what is in its
files and its math. Knows nothing of drafting: that is decoding/assistant.py's.

    source = open_assistant(path); assistant = source.load(dtype, device)
    assistant.join(model); logits, hidden = assistant(token, hidden, assistant.inputs(pos, kv_len))
"""

from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from gpt_faster.layers.shared_kv import SharedKV
from model import ModelConfig, Transformer, at, visible

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
OWN = {"pre_projection": "enter", "post_projection": "leave",          # beside its layers
       "masked_embedding.centroids": "centroids"}
ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True)
class AssistantConfig(ModelConfig):
    """The math of its layers, and what joins them to a model's."""

    backbone_dim: int = 0                          # the model's width
    n_centroid: int = 0                            # clusters of the vocabulary; 0: none
    n_active: int = 0                              # of which a token's logits are worked out


class Assistant(Transformer):
    """A token and the hidden state before it -> the next token's logits, and a hidden state."""

    def __init__(self, cfg: AssistantConfig):
        super().__init__(cfg)
        self.enter = nn.Linear(2 * cfg.backbone_dim, cfg.dim, bias=False)
        self.leave = nn.Linear(cfg.dim, cfg.backbone_dim, bias=False)
        self.centroids = self.clusters = None
        self.path = None                           # for what does not fit; load() says it
        if cfg.n_centroid:
            self.centroids = nn.Linear(cfg.dim, cfg.n_centroid, bias=False)

    def join(self, model: Transformer) -> None:
        """Draft for this model: each layer reads its last layer of the same kind that has keys.

        ValueError where they do not fit.
        """
        self.model, theirs = [model], model.cfg    # in a list: no part of the drafter
        if theirs.dim != self.cfg.backbone_dim or theirs.vocab_size != self.cfg.vocab_size:
            raise ValueError(f"{self.path}: it drafts for a width of {self.cfg.backbone_dim} and "
                             f"{self.cfg.vocab_size} tokens, not {theirs.dim} and "
                             f"{theirs.vocab_size}")
        for i, layer in enumerate(self.layers):
            window = at(i, self.cfg.window)
            alike = [other.attn for j, other in enumerate(model.layers)
                     if at(j, theirs.window) == window and hasattr(other.attn, "wqkv")]
            if not alike or alike[-1].head_dim != layer.attn.head_dim:
                raise ValueError(f"{self.path}: its layer {i} has heads of {layer.attn.head_dim} "
                                 f"and a window of {window}, which no layer of the model has")
            layer.attn.share(alike[-1])

    def inputs(self, pos: Tensor, kv_len: int) -> list[tuple]:
        """pos [1], of the last token, not read by the model yet -> each layer's rope, slot, mask.

        The keys before pos; of slots beyond it any may hold what was rejected.
        """
        angles = (pos[..., None, None].float() * self.freq).unbind(-2)
        ropes = {rope: (a.cos() * m, a.sin() * m)
                 for rope, a, m in zip(self.ropes, angles, self.amplitude)}
        masks = {}
        for window in self.windows:
            key = torch.arange(kv_len, device=pos.device)
            if str(window) in self.model[0].rings:
                key = self.model[0].rings[str(window)].slot_positions[0, :kv_len]
            reach = window and window + 2          # as transformers: `window` away from pos - 1
            masks[window] = visible(pos, key, reach) & (key < pos)
        return [(ropes[at(i, self.cfg.rope)], pos, masks[at(i, self.cfg.window)])
                for i in range(self.cfg.n_layer)]

    def forward(self, token: Tensor, hidden: Tensor, inputs: list[tuple]) -> tuple[Tensor, Tensor]:
        """token [1, 1], hidden [1, 1, D] of the model, behind its last norm -> logits [1, 1, V], in
        fp32, and what stands for the next hidden state."""
        model, = self.model
        x = model.embed_tokens(token, inputs[0][1])
        x = self.enter(torch.cat((x, hidden), dim=-1))
        for layer, given in zip(self.layers, inputs):
            x = layer(x, *given)
        x = self.norm(x)
        return self.logits(x), self.leave(x)

    def logits(self, x: Tensor) -> Tensor:
        """Of the tokens in the likeliest clusters; all others have less than the least of these."""
        if self.centroids is None:
            return self.head(x).float()
        best = self.centroids(x).topk(self.cfg.n_active, dim=-1).indices
        ids = self.clusters[best].flatten(-2)                              # [1, 1, C]
        some = (F.embedding(ids, self.head.weight) @ x[..., None]).squeeze(-1).float()
        least = some.amin(-1, keepdim=True) - 1
        return least.expand(*x.shape[:-1], self.cfg.vocab_size).scatter(-1, ids, some)


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
