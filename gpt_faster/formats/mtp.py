"""The head of a checkpoint that drafts tokens (multi-token prediction, arXiv 2412.19437, 2.2).

Owns which of a file's tensors are the head's, and its config. Its math is layers/mtp_head.py's, and
drafting with it decoding/mtp.py's.

    body, head = split_head(tensors, cfg.n_layer)
    model = MTPHead(head_config(cfg, has_experts(head)))
"""

import re
from dataclasses import fields

from checkpoint import LazyTensor, bare
from gpt_faster.layers.latent import Latent
from gpt_faster.layers.mtp_head import MTPConfig
from model import ModelConfig, at

# What a head has beside its layer, by every name in use; None: the model's own, once more.
OWN = {"enorm": "token_norm", "hnorm": "hidden_norm", "eh_proj": "eh_proj",
       "shared_head.norm": "norm", "pre_fc_norm_embedding": "token_norm",
       "pre_fc_norm_hidden": "hidden_norm", "fc": "eh_proj",
       "token_norm": "token_norm", "hidden_norm": "hidden_norm", "norm": "norm",
       "nextn.enorm": "token_norm", "nextn.hnorm": "hidden_norm",
       "nextn.eh_proj": "eh_proj", "nextn.shared_head_norm": "norm",
       "embed_tokens": None, "shared_head.head": None, "nextn.embed_tokens": None,
       "nextn.shared_head_head": None}
HEAD_NAMES = {name: name for name in OWN.values() if name}


def split_head(tensors: list[LazyTensor], n_layer: int | None) -> tuple[list, list]:
    """-> the tensors of the model's layers; those of a head, by the names of a model of one layer.

    A head is mtp.*, or the layers from n_layer on (None: there are none). Of several, each for the
    drafts one further on, the first is taken, which goes on by itself.
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
    stem, _, leaf = name.rpartition(".")
    if stem not in OWN:
        return [t.derived(t.read_rows, name=f"layers.0.{name}")]
    if OWN[stem] is None:
        return []
    return [t.derived(t.read_rows, name=f"{OWN[stem]}.{leaf}")]


def has_experts(head: list[LazyTensor]) -> bool:
    return any(re.search(r"\.experts\.|_exps\.", t.name) for t in head)


def head_config(cfg: ModelConfig, sparse: bool, sliding: bool = False) -> MTPConfig:
    """The layer of a head, by what the model's layers are. It has no vocabulary of its own.

    sparse: it has experts; sliding: its attention has the model's window.
    """
    facts = {field.name: getattr(cfg, field.name) for field in fields(ModelConfig)}
    alike = [i for i in range(cfg.n_layer)
             if isinstance(at(i, cfg.mixer), Latent | None)
             and (at(i, cfg.window) is not None) == sliding]
    i = alike[-1] if alike else cfg.n_layer - 1
    return MTPConfig(**facts | dict(
        n_layer=1, vocab_size=1, tied=False, head_bias=False, mixer=(at(i, cfg.mixer),),
        sparse=(sparse,), rope=(at(i, cfg.rope),), window=(at(i, cfg.window),)))
