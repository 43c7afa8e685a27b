"""Gemma 4's drafter: a few layers that read the keys of the model drafted for.

Its layers have queries only. Its input is the model's embedding of the last token beside the
model's hidden state before it; all tokens of a draft stand at one position.

    assistant = Assistant(cfg); assistant.join(model)
    logits, hidden = assistant(token, hidden, assistant.inputs(pos, kv_len))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import ModelConfig, Transformer, at, visible


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
