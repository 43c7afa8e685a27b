"""The MTP head of a checkpoint (multi-token prediction, arXiv 2412.19437, section 2.2).

Owns which tensors of a file belong to it, and its config. The math is in layers/mtp_head.py,
drafting in decoding/mtp.py.

    body, head = split_mtp_head(tensors, cfg.n_layer)
    model = MTPHead(mtp_head_config(cfg, has_experts(head)))
"""

import re
from dataclasses import fields

from checkpoint import LazyTensor, bare
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.mtp_head import MTPConfig
from model import ModelConfig, of_layer

# Parts of an MTP head outside its layer, by their names in files; None: a copy of the model's.
HEAD_PARTS = {"enorm": "token_norm", "hnorm": "hidden_norm", "eh_proj": "eh_proj",
       "shared_head.norm": "norm", "pre_fc_norm_embedding": "token_norm",
       "pre_fc_norm_hidden": "hidden_norm", "fc": "eh_proj",
       "token_norm": "token_norm", "hidden_norm": "hidden_norm", "norm": "norm",
       "nextn.enorm": "token_norm", "nextn.hnorm": "hidden_norm",
       "nextn.eh_proj": "eh_proj", "nextn.shared_head_norm": "norm",
       "embed_tokens": None, "shared_head.head": None, "nextn.embed_tokens": None,
       "nextn.shared_head_head": None}
MTP_HEAD_NAMES = {name: name for name in HEAD_PARTS.values() if name}


def split_mtp_head(tensors: list[LazyTensor], n_layer: int | None) -> tuple[list, list]:
    """-> tensors of the model; tensors of the MTP head, named as in a model of one layer.

    An MTP head is mtp.*, or the layers from n_layer on (None: no such layers). Of several heads,
    one per draft position, only the first is used, for all positions.
    """
    body, head = [], []
    for t in tensors:
        match = re.match(r"mtp\.layers\.(\d+)\.|mtp\.|(?:layers|blk)\.(\d+)\.", bare(t.name))
        number = int(match[1] or match[2] or 0) if match else 0
        first = n_layer if match and match[2] else 0
        if match is None or first is None or number < first:
            body.append(t)
        elif number == first:
            head += _renamed(t, bare(t.name)[match.end():])
    return body, head


def _renamed(t: LazyTensor, name: str) -> list[LazyTensor]:
    stem, _, parameter = name.rpartition(".")
    if stem not in HEAD_PARTS:
        return [t.derived(t.read_rows, name=f"layers.0.{name}")]
    if HEAD_PARTS[stem] is None:
        return []
    return [t.derived(t.read_rows, name=f"{HEAD_PARTS[stem]}.{parameter}")]


def has_experts(head: list[LazyTensor]) -> bool:
    return any(re.search(r"\.experts\.|_exps\.", t.name) for t in head)


def mtp_head_config(cfg: ModelConfig, sparse: bool, sliding: bool = False) -> MTPConfig:
    """Config of the head's layer: as the model's last layer of its kind. It has no embedding.

    sparse: the layer has experts; sliding: it has sliding-window attention.
    """
    facts = {field.name: getattr(cfg, field.name) for field in fields(ModelConfig)}
    alike = [i for i in range(cfg.n_layer)
             if isinstance(of_layer(i, cfg.mixer), Latent | None)
             and (of_layer(i, cfg.window) is not None) == sliding]
    i = alike[-1] if alike else cfg.n_layer - 1
    return MTPConfig(**facts | dict(
        n_layer=1, vocab_size=1, tied=False, head_bias=False, mixer=(of_layer(i, cfg.mixer),),
        sparse=(sparse,), rope=(of_layer(i, cfg.rope),), window=(of_layer(i, cfg.window),)))
