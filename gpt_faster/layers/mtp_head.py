"""The multi-token prediction head, which drafts tokens (arXiv 2412.19437, 2.2).

One layer whose input is the next token's embedding and the model's last hidden state. It uses the
model's embedding and output layer.

    head = MTPHead(cfg); head.join(model)
    logits, hidden = head(tokens, hidden, pos)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from model import ModelConfig, RMSNorm, Transformer, build_part


@dataclass(frozen=True)
class MTPConfig(ModelConfig):
    """The head's single layer, described as a model's config."""


class MTPHead(Transformer):
    """The next token and the previous position's hidden state -> logits of the token after it."""

    def __init__(self, cfg: MTPConfig):
        super().__init__(cfg)
        self.embed = self.head = None              # set by join()
        self.token_norm = build_part(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.hidden_norm = build_part(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.eh_proj = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)

    def join(self, model: Transformer) -> None:
        """Use the model's embedding and output layer. Call it after the model was compiled."""
        self.embed, self.head, self.cap = model.embed, model.head, model.cap
        self.cfg = replace(self.cfg, vocab_size=model.cfg.vocab_size)

    def forward(self, tokens: Tensor, hidden: Tensor, pos: Tensor, logits_to_keep: int | Tensor = 1,
                kv_len: int | None = None, batch_idx: Tensor | None = None
                ) -> tuple[Tensor, Tensor]:
        """tokens [B, T], and normalized hidden states [B, T, D] of the positions before them.

        pos [T] or [B, T]: consecutive cache slots; logits_to_keep, kv_len, batch_idx: as in a
        model. -> logits [B, n, V] in fp32 of the n tokens to keep, and hidden states [B, n, D] to
        use instead of the model's when drafting further.
        """
        kv_len = kv_len or (self.max_seq_length if self.max_batch_size else tokens.shape[1])
        if batch_idx is not None:
            pos = pos.expand(len(batch_idx), -1)
        x, *shared = self.embed_inputs(tokens, pos, kv_len, batch_idx)
        x = self.eh_proj(torch.cat((self.token_norm(x), self.hidden_norm(hidden)), dim=-1))
        for layer, inputs in zip(self.layers, self.layer_inputs(shared)):
            x = layer(x, *inputs[:3], batch_idx, *inputs[3:])
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:]
        else:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.shape[-1]))
        return self.unembed(x), self.norm(x).to(self.dtype)
