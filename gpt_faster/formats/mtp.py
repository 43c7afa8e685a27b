"""The head of a checkpoint that drafts tokens (multi-token prediction, arXiv 2412.19437, 2.2).

One layer more, whose input is the next token's embedding and the model's last hidden state; the
embedding and the output layer are the model's. Owns how the head is built and which of a file's
tensors are its. Knows nothing of drafting: that is decoding/mtp.py's.

    body, head = split_head(tensors, cfg.n_layer)
    model = MTPHead(head_config(cfg, has_experts(head)))
"""

import re
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from checkpoint import LazyTensor, bare
from gpt_faster.layers.latent import Latent
from model import ModelConfig, RMSNorm, Transformer, at, made

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


@dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """The math of a head's one layer, in the words of a model's."""


class MTPHead(Transformer):
    """The next token and the hidden state of the position before -> logits of the token after."""

    def __init__(self, cfg: HeadConfig):
        super().__init__(cfg)
        self.embed = self.head = None              # join() brings them
        self.token_norm = made(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.hidden_norm = made(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.eh_proj = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)

    def join(self, model: Transformer) -> None:
        """Take the model's embedding and output layer, as they are now: after it was compiled."""
        self.embed, self.head, self.cap = model.embed, model.head, model.cap
        self.cfg = replace(self.cfg, vocab_size=model.cfg.vocab_size)

    def forward(self, tokens: Tensor, hidden: Tensor, pos: Tensor, logits_to_keep: int = 1,
                kv_len: int | None = None) -> tuple[Tensor, Tensor]:
        """tokens [1, T], hidden [1, T, D] behind the last norm, of the positions before them.

        pos [T]: the slots of the cache, any that count with the tokens; logits_to_keep, kv_len: as
        in a model. -> of the last n tokens the logits [1, n, V] in fp32, and the hidden states
        [1, n, D] that stand for the model's own where a draft follows a draft.
        """
        kv_len = kv_len or (self.max_seq_length if self.max_batch_size else tokens.shape[1])
        x, *shared = self.embed_inputs(tokens, pos, kv_len)
        x = self.eh_proj(torch.cat((self.token_norm(x), self.hidden_norm(hidden)), dim=-1))
        for layer, inputs in zip(self.layers, self.layer_inputs(shared)):
            x = layer(x, *inputs)
        x = x[:, -logits_to_keep:]
        return self.unembed(x), self.norm(x).to(self.dtype)


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


def head_config(cfg: ModelConfig, sparse: bool, sliding: bool = False) -> HeadConfig:
    """The layer of a head, by what the model's layers are. It has no vocabulary of its own.

    sparse: it has experts; sliding: its attention has the model's window.
    """
    facts = {field.name: getattr(cfg, field.name) for field in fields(ModelConfig)}
    alike = [i for i in range(cfg.n_layer)
             if isinstance(at(i, cfg.mixer), Latent | None)
             and (at(i, cfg.window) is not None) == sliding]
    i = alike[-1] if alike else cfg.n_layer - 1
    return HeadConfig(**facts | dict(
        n_layer=1, vocab_size=1, tied=False, head_bias=False, mixer=(at(i, cfg.mixer),),
        sparse=(sparse,), rope=(at(i, cfg.rope),), window=(at(i, cfg.window),)))
