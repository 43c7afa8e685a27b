"""The head that drafts tokens (multi-token prediction, arXiv 2412.19437, 2.2).

One layer more, whose input is the next token's embedding and the model's last hidden state; the
embedding and the output layer are the model's.

    head = MTPHead(cfg); head.join(model)
    logits, hidden = head(tokens, hidden, pos)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from model import ModelConfig, RMSNorm, Transformer, made


@dataclass(frozen=True)
class MTPConfig(ModelConfig):
    """The math of a head's one layer, in the words of a model's."""


class MTPHead(Transformer):
    """The next token and the hidden state of the position before -> logits of the token after."""

    def __init__(self, cfg: MTPConfig):
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
