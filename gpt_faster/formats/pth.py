"""Our own .pth files, beyond what checkpoint.py reads: parts of layers/ in the config, an MTP head,
and the configs and names of older versions.
"""

import dataclasses
from pathlib import Path

import torch

import checkpoint
from checkpoint import LazyTensor, brief, lazy_tensors, tensor_shapes
from gpt_faster.formats.flat_config import FlatConfig, LayerEnd, Scores
from gpt_faster.formats.mtp import MTP_HEAD_NAMES, split_mtp_head
from gpt_faster.formats.names import OUR_NAMES
from gpt_faster.formats.raw_checkpoint import RawCheckpoint
from gpt_faster.formats.schema import build, check_config
from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.block import BlockVariant, Widths
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.embedding import EmbedNorm, EmbedScale, LearnedPositions
from gpt_faster.layers.feed_forward import FeedForwardVariant
from gpt_faster.layers.fp4 import scheme_of_width
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.mamba import AttentionAndMamba, Mamba2
from gpt_faster.layers.mamba1 import Mamba1
from gpt_faster.layers.moe import MoEVariant, moe_from_fields
from gpt_faster.layers.mtp_head import MTPConfig, MTPHead
from gpt_faster.layers.norms import LogitCap, NormVariant
from gpt_faster.layers.per_layer import PerLayer
from gpt_faster.layers.rope import RopeVariant, rope_from_fields
from gpt_faster.layers.shared_kv import SharedKV
from gpt_faster.layers.short_conv import ShortConv
from gpt_faster.layers.zamba import SharedTransformer, TokenEmbedding, ZambaBlocks
from model import ModelConfig

PARTS = {kind.kind: kind for kind in (
    AttentionAndMamba, AttentionVariant, BlockVariant, EmbedNorm, EmbedScale, FeedForwardVariant,
    GatedDelta, Latent, LearnedPositions, LogitCap, Mamba1, Mamba2, NormVariant, PerLayer,
    SharedKV, SharedTransformer, ShortConv, TokenEmbedding, ZambaBlocks)}


def read_ours(path: Path, content: dict) -> RawCheckpoint:
    """content: from torch_file.read_torch()."""
    raw = RawCheckpoint(**vars(checkpoint.read_pth(path, content, config_from_dict)))
    raw.names = OUR_NAMES
    tensors = lazy_tensors(content["model"], path)
    name_fp4(tensors, raw.cfg)
    raw.tensors, head = split_mtp_head(tensors, None)
    if content.get("mtp"):
        cfg = MTPConfig(**vars(config_from_dict(content["mtp"])))
        raw.mtp = dataclasses.replace(raw, cfg=cfg, tensors=head, names=OUR_NAMES | MTP_HEAD_NAMES,
                                      kind=MTPHead)
    return raw


def name_fp4(tensors: list[LazyTensor], cfg: ModelConfig) -> None:
    """Give the weights in fp4 their scheme: bytes with scales and no zeros, whose number fits."""
    names = {t.name for t in tensors}
    in_bytes = [t for t in tensors if t.name.endswith(".weight") and t.dtype == torch.uint8
                and t.name.replace(".weight", ".zeros") not in names]
    shapes = tensor_shapes(cfg) if in_bytes else {}
    for t in in_bytes:
        shape = shapes.get(t.name) or (cfg.dim,)   # the head of a tied model
        t.scheme = scheme_of_width(t.shape[-1], shape[-1]) if t.shape else None


def config_from_dict(d: dict) -> ModelConfig:
    """Parse the config of a .pth. ValueError names a wrong value."""
    cfg = config_of_parts(d) if "after_embed" in d else config_of_version_1(d)
    check_config(cfg)
    return cfg


def config_of_parts(d: dict) -> ModelConfig:
    parts = {name: part_from_dict(d.get(name))
             for name in ("norm", "attention", "ffn", "block", "per_layer", "logit_cap")}
    for name in ("mixer", "after_embed"):
        parts[name] = tuple(part_from_dict(part) for part in _list_of(d, name))
    return build(ModelConfig, d, **parts, rope=_ropes(d), moe=_moe(d))


def config_of_version_1(d: dict) -> ModelConfig:
    """Configs before ModelConfig had parts, with or without nested `moe` and `scores`."""
    d = _nest_moe_and_scores(d)
    if isinstance(d.get("qk_norm"), bool):         # old files: a bool
        d = {**d, "qk_norm": "head" if d["qk_norm"] else None}
    end = d.get("layer_end")
    parts = {"mixer": tuple(part_from_dict(part) for part in _list_of(d, "mixer", [None])),
             "widths": _widths(d), "scores": build(Scores, d.get("scores")),
             "layer_end": end if end is None else build(LayerEnd, end)}
    flat = build(FlatConfig, d, **parts, rope=_ropes(d), moe=_moe(d))
    return flat.with_parts()


def _ropes(d: dict) -> tuple:
    return tuple(rope_from_fields(vars(build(RopeVariant, r))) for r in _list_of(d, "rope"))


def _moe(d: dict):
    moe = d.get("moe")
    return moe if moe is None else moe_from_fields(vars(build(MoEVariant, moe)))


def _widths(d: dict) -> tuple:
    return tuple(w if w is None else build(Widths, w) for w in _list_of(d, "widths", [None]))


def _list_of(d: dict, name: str, default=None) -> list | tuple:
    value = d.get(name, default)
    if not isinstance(value, list | tuple):
        raise ValueError(f"config: '{name}' is {brief(value)}, expected a list with one entry per "
                         "layer")
    return value


def part_from_dict(d: dict | None):
    """Build a part from its dict; None: the model's default."""
    if d is None:
        return None
    kind = d.get("kind") if isinstance(d, dict) else d
    if not isinstance(kind, str) or kind not in PARTS:
        raise ValueError(f"unknown layer {brief(kind)}: written by a newer gpt-faster?")
    nested = {}
    if kind in (BlockVariant.kind, ZambaBlocks.kind):
        nested["widths"] = _widths(d)
    if kind in (AttentionAndMamba.kind, SharedTransformer.kind):
        nested["mamba"] = part_from_dict(d.get("mamba"))
    return build(PARTS[kind], d, **nested)


def _nest_moe_and_scores(d: dict) -> dict:
    """Move the flat fields of experts and scores in old files into `moe` and `scores`."""
    if "moe" in d:
        return d
    d = dict(d)
    if "renormalize" in d:                         # its name in the first releases
        d["norm_topk_prob"] = d.pop("renormalize")
    names = {f.name for f in dataclasses.fields(MoEVariant)} - {"activation"}
    experts = {name: d.pop(name) for name in names if name in d}
    scores = dict(cap=d.pop("attn_cap", None), sinks=d.pop("sinks", False))
    return {**d, "moe": experts if experts.get("n_expert") else None, "scores": scores}
