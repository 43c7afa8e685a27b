"""Gemma 4's assistant: a few layers that draft tokens and attend to the target model's KV cache.

Its layers compute queries only. Its input concatenates the target's embedding of the last token and
the hidden state of the token before it. All tokens of a draft use the same position.

    assistant = Assistant(cfg); assistant.join(model)
    logits, hidden = assistant(token, hidden, assistant.inputs(pos, kv_len))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import ModelConfig, Transformer, cos_sin, of_layer, visible


@dataclass(frozen=True)
class AssistantConfig(ModelConfig):
    """Its layers' config, the target's width and the clusters of the output layer."""

    backbone_dim: int = 0                          # the target model's width
    n_centroid: int = 0                            # clusters of the vocabulary; 0: none
    n_active: int = 0                              # clusters per token whose logits are computed


class Assistant(Transformer):
    """A token and the previous hidden state -> the next token's logits and a hidden state."""

    def __init__(self, cfg: AssistantConfig):
        super().__init__(cfg)
        self.enter = nn.Linear(2 * cfg.backbone_dim, cfg.dim, bias=False)
        self.leave = nn.Linear(cfg.dim, cfg.backbone_dim, bias=False)
        self.centroids = self.clusters = None
        self.path = None                           # for error messages, set by load()
        if cfg.n_centroid:
            self.centroids = nn.Linear(cfg.dim, cfg.n_centroid, bias=False)

    def join(self, model: Transformer) -> None:
        """Attach to the target model: each layer reads the target's last KV layer with its window.

        ValueError if the shapes do not match.
        """
        self.model, cfg = [model], model.cfg       # in a list, so that it is not a submodule
        if cfg.dim != self.cfg.backbone_dim or cfg.vocab_size != self.cfg.vocab_size:
            raise ValueError(f"{self.path}: expected a target model of width "
                             f"{self.cfg.backbone_dim} with {self.cfg.vocab_size} tokens, got "
                             f"{cfg.dim} with {cfg.vocab_size}")
        for i, layer in enumerate(self.layers):
            window = of_layer(i, self.cfg.window)
            sources = [other.attn for j, other in enumerate(model.layers)
                       if of_layer(j, cfg.window) == window and hasattr(other.attn, "wqkv")]
            if not sources or sources[-1].head_dim != layer.attn.head_dim:
                raise ValueError(f"{self.path}: layer {i} needs a target layer with head_dim "
                                 f"{layer.attn.head_dim} and window {window}, and there is none")
            layer.attn.use_kv_of(sources[-1])

    def inputs(self, pos: Tensor, kv_len: int, batch_idx: Tensor | None = None) -> list[tuple]:
        """pos [B, 1] of each row's last token, which the target has not run yet -> each layer's
        rope, slot and mask. batch_idx [B]: the target's cache rows; None: all.

        Only keys before pos are visible: later slots may hold rejected drafts.
        """
        pairs = cos_sin(pos, self.freq, self.amplitude)
        ropes = dict(zip(self.ropes, zip(pairs[::2], pairs[1::2])))
        masks = {}
        for window in self.windows:
            key = torch.arange(kv_len, device=pos.device)
            if str(window) in self.model[0].rings:
                key = self.model[0].rings[str(window)].slot_positions[:, :kv_len]
                key = key if batch_idx is None else key[batch_idx]
            size = window and window + 2           # as transformers: `window` keys before pos - 1
            masks[window] = visible(pos, key, size) & (key < pos)[:, None, None]
        return [(ropes[of_layer(i, self.cfg.rope)], pos, masks[of_layer(i, self.cfg.window)])
                for i in range(self.cfg.n_layer)]

    def forward(self, token: Tensor, hidden: Tensor, inputs: list[tuple],
                batch_idx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """token [B, 1], the target's normalized hidden state [B, 1, D] -> logits [B, 1, V] in fp32,
        and the hidden state for the next draft."""
        model, = self.model
        x = model.embed_tokens(token, inputs[0][1])
        x = self.enter(torch.cat((x, hidden), dim=-1))
        for layer, layer_inputs in zip(self.layers, inputs):
            x = layer(x, *layer_inputs, batch_idx)
        x = self.norm(x)
        return self.logits(x), self.leave(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the tokens in the best clusters; all others get a value below their minimum."""
        if self.centroids is None:
            return self.head(x).float()
        best = self.centroids(x).topk(self.cfg.n_active, dim=-1).indices
        ids = self.clusters[best].flatten(-2)                              # [B, 1, C]
        logits = (F.embedding(ids, self.head.weight) @ x[..., None]).squeeze(-1).float()
        floor = logits.amin(-1, keepdim=True) - 1
        return floor.expand(*x.shape[:-1], self.cfg.vocab_size).scatter(-1, ids, logits)
