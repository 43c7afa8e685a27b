"""Which tensors a config asks for: the blank model, their names on disk and their shapes.

Fused parameters lie apart on disk: layers.0.attn.wqkv is layers.0.attn.wq, .wk and .wv there. Their
shares are equal, or what a layer's mixer says in `split`.
"""

import re

import torch

from formats.mtp import HeadConfig, MTPHead
from model import ModelConfig, Transformer

# in memory: on disk
FUSED = {"wqkv": ("wq", "wk", "wv"), "gate_up": ("gate", "up"), "qkv": ("q", "k", "v"),
         "conv": ("conv_q", "conv_k", "conv_v"), "rates": ("beta", "decay"),
         "wbcx": ("wb", "wc", "wx"), "wqkv_a": ("wq_a", "wkv_a"), "wq_kv_a": ("wq", "wkv_a")}


def disk_names(name: str) -> list[str]:
    """The parameters on disk that make up one in memory: ….wqkv.weight -> ….wq.weight, …"""
    for fused, pieces in FUSED.items():
        if f".{fused}." in f"{name}.":
            return [name.replace(f".{fused}", f".{piece}") for piece in pieces]
    return [name]


def blank_model(cfg: ModelConfig, dtype: torch.dtype, kind: type | None = None) -> Transformer:
    """The model without memory, of this class or of the one that the config is for.

    What it keeps in fp32 whatever the dtype (norms) is fp32 here.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return (kind or (MTPHead if isinstance(cfg, HeadConfig) else Transformer))(cfg)
    finally:
        torch.set_default_dtype(default)


def tensor_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names that tensors have on disk -> the shapes that the config asks for."""
    model, shapes = blank_model(cfg, torch.float32), {}
    for name, p in model.named_parameters():
        names = disk_names(name)
        rows = [p.shape[0] // len(names)] * len(names)
        if layer := re.match(r"layers\.(\d+)\.attn\.", name):
            split = getattr(model.layers[int(layer[1])].attn, "split", ())
            if len(split) == len(names):           # queries, keys, values; latents
                rows = split
        shapes.update({part: (n, *p.shape[1:]) for part, n in zip(names, rows)})
    return shapes


def count_parameters(cfg: ModelConfig) -> int:
    """Of the model, however its weights are stored."""
    return sum(p.numel() for p in blank_model(cfg, torch.bfloat16).parameters())
