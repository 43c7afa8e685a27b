"""Our own .pth: a PyTorch file that holds config, weights and tokenizer; read, and written.

A zip archive as torch.save writes it: data.pkl, which names the tensors, and a stored entry for the
bytes of each. torch.load reads it, memory-mapped too, and every zip program finds it whole.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import checkpoint
from checkpoint import VERSION, Checkpoint, brief, lazy_tensors, sampling_values
from formats.mtp import HEAD_NAMES, HeadConfig, MTPHead, split_head
from formats.names import OUR_NAMES
from formats.raw import RawCheckpoint
from formats.schema import build, check_config
from layers.attention import Scores
from layers.delta import GatedDelta
from layers.latent import Latent
from layers.moe import MoEConfig
from layers.per_layer import LayerEnd
from layers.rope import Rope
from layers.shared_kv import SharedKV
from layers.short_conv import ShortConv
from layers.widths import Widths
from model import ModelConfig

MIXERS = {"gated_delta": GatedDelta, "latent": Latent, "shared_kv": SharedKV,
          "short_conv": ShortConv}                 # by their `kind`


# ---- Reading ------------------------------------------------------------------------------------

def read_ours(path: Path, content: dict) -> RawCheckpoint:
    """content: what torch_file.read_torch() gives."""
    if content.get("version", 1) not in range(1, VERSION + 1):
        raise ValueError(f"{path}: its format is version {brief(content['version'])}, this program "
                         f"reads up to {VERSION}: update it, or convert the original again")
    _check_content(content)
    tensors, head = split_head(lazy_tensors(content["model"]), None)
    tokenizer = content.get("tokenizer")
    tokenizer = {**tokenizer, "path": path} if tokenizer else path.parent
    raw = RawCheckpoint(path, config_from_dict(content["config"]), tensors, OUR_NAMES,
                        content["eos_ids"], sampling_values(content["defaults"]), tokenizer,
                        content.get("quantization"))
    if content.get("mtp"):
        cfg = HeadConfig(**vars(config_from_dict(content["mtp"])))
        raw.mtp = dataclasses.replace(raw, cfg=cfg, tensors=head, names=OUR_NAMES | HEAD_NAMES,
                                      kind=MTPHead)
    return raw


def _check_content(content: dict) -> None:
    """ValueError names a part of the file that is missing, or of another kind."""
    def whole_numbers(value):
        return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)

    expected = {"config": dict, "model": dict, "eos_ids": whole_numbers, "defaults": dict,
                "tokenizer": dict | None, "quantization": dict | None, "mtp": dict | None}
    for name, kind in expected.items():
        value = content.get(name)
        fits = kind(value) if kind is whole_numbers else isinstance(value, kind)
        if not fits:
            raise ValueError(f"its '{name}' is {brief(value)}, which is not as we write it")


def config_from_dict(d: dict) -> ModelConfig:
    """The config as a .pth stores it. ValueError names what cannot be."""
    d = _with_parts(d)
    if isinstance(d.get("qk_norm"), bool):         # before there were two ways to do it
        d = {**d, "qk_norm": "head" if d["qk_norm"] else None}
    end, moe = d.get("layer_end"), d.get("moe")
    mixers, widths = _several(d, "mixer", [None]), _several(d, "widths", [None])
    parts = {"rope": tuple(build(Rope, _as_tuples(r)) for r in _several(d, "rope")),
             "mixer": tuple(m if m is None else mixer_from_dict(m) for m in mixers),
             "widths": tuple(w if w is None else build(Widths, w) for w in widths),
             "layer_end": end if end is None else build(LayerEnd, end),
             "scores": build(Scores, d.get("scores")),
             "moe": moe if moe is None else build(MoEConfig, moe)}
    cfg = build(ModelConfig, _as_tuples(d), **parts)
    check_config(cfg)
    return cfg


def _as_tuples(d: dict) -> dict:
    if not isinstance(d, dict):
        return d                                   # build() refuses it
    return {k: tuple(v) if isinstance(v, list) else v for k, v in d.items()}


def _several(d: dict, name: str, default=None) -> list | tuple:
    value = d.get(name, default)
    if not isinstance(value, list | tuple):
        raise ValueError(f"its config's '{name}' is {brief(value)}, expected one for each layer")
    return value


def mixer_from_dict(d: dict):
    kind = d.get("kind") if isinstance(d, dict) else d
    if not isinstance(kind, str) or kind not in MIXERS:
        raise ValueError(f"written by a newer gpt-faster: unknown layer {brief(kind)}")
    return build(MIXERS[kind], _as_tuples(d))


def _with_parts(d: dict) -> dict:
    """What is said of experts and scores in dictionaries of their own: it was among the rest."""
    if "moe" in d:
        return d
    d = dict(d)
    if "renormalize" in d:                         # its name in the first releases
        d["norm_topk_prob"] = d.pop("renormalize")
    names = [f.name for f in dataclasses.fields(MoEConfig)]
    experts = {name: d.pop(name) for name in names if name in d}
    scores = dict(cap=d.pop("attn_cap", None), sinks=d.pop("sinks", False))
    return {**d, "moe": experts if experts.get("n_expert") else None, "scores": scores}


# ---- Writing ------------------------------------------------------------------------------------

def save_checkpoint(source: Checkpoint, path: Path, tokenizer: dict | None,
                    dtype: torch.dtype | None = None,
                    progress: Callable[[int, int], None] = lambda i, n: None) -> None:
    """As checkpoint.save_checkpoint(), with the head that drafts, where the model has one."""
    checkpoint.save_checkpoint(source, path, tokenizer, dtype, progress, head_to_keep(source))


def head_to_keep(source: Checkpoint) -> Checkpoint | None:
    """The head that drafts; a line says where it is not as we know them."""
    try:
        return source.mtp() if source.mtp else None
    except ValueError as e:
        print(f"note: left out: {e}", file=sys.stderr)
        return None
