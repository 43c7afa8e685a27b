"""DFlash (arXiv 2602.06036): a few layers that draft a whole block of tokens in one call.

Their keys and values of the context come from hidden states of the target model, through each
layer's ordinary projections. The block is the last known token and a mask token for each draft; the
output at a mask's position predicts the token at that position. Knows no file and no sampling.

    draft = DFlash(cfg); draft.join(model)
    draft.add_context(states, pos)                 # states of tokens that the target has read
    logits = draft(tokens, pos)                    # [1, k + 1] -> [1, k, V]
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import ModelConfig, RMSNorm, Transformer, cos_sin, rotate


@dataclass(frozen=True)
class DFlashConfig(ModelConfig):
    """The draft layers as a model's config, and what they need of the target model."""

    block_size: int = 16                           # longest block, with the last known token
    mask_id: int = 0                               # token in the place of each draft
    taps: tuple[int, ...] = ()                     # the target's layers whose inputs are read
    target_dim: int = 0
    n_target_layer: int = 0                        # 0: not stated
    causal: bool = False                           # layers without a window: causal in the block
    causal_window: bool = True                     # layers with a window
    own_embed: bool = False                        # else the target's embedding
    own_mask: bool = False                         # a vector instead of the mask token's embedding
    own_head: bool = False                         # else the target's output layer
    draft_vocab: int = 0                           # tokens that can be drafted; 0: all


class Context(nn.Module):
    """The target's hidden states of several layers [B, T, K D'] -> [B, T, D]."""

    def __init__(self, cfg: DFlashConfig):
        super().__init__()
        self.wc = nn.Linear(len(cfg.taps) * cfg.target_dim, cfg.dim, bias=False)
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)

    def forward(self, states):
        return self.norm(self.wc(states))


class Tokens(nn.Module):
    """What stands for a draft in the block, and which tokens can be drafted, if not the target's
    mask token and all tokens."""

    def __init__(self, cfg: DFlashConfig):
        super().__init__()
        self.mask = nn.Parameter(torch.empty(cfg.dim)) if cfg.own_mask else None
        self.ids = None                            # fp32 is exact up to 2^24, and loads as weights
        if cfg.draft_vocab:
            self.ids = nn.Parameter(torch.empty(cfg.draft_vocab, dtype=torch.float32))


class DFlash(Transformer):
    """The last known token -> logits of the tokens after it. The cache holds the context."""

    def __init__(self, cfg: DFlashConfig):
        super().__init__(cfg)
        self.context, self.tokens = Context(cfg), Tokens(cfg)
        if not cfg.own_embed:
            self.embed = None                      # set by join()
        n = cfg.draft_vocab or cfg.vocab_size
        self.head = nn.Linear(cfg.dim, n, bias=False) if cfg.own_head else None

    def join(self, model: Transformer) -> None:
        """Use the target's embedding and output layer where the drafter has none of its own. Call
        it after the target was compiled."""
        cfg = self.cfg
        if not cfg.own_embed:
            self.embed = model.embed
        if not (cfg.own_embed or cfg.after_embed):
            self.after_embed = model.after_embed   # Gemma's scale, for example
            for name in model.after_embed:
                self.add_module(name, getattr(model, name))
        if not cfg.own_head:
            self.head = model.head

    def add_context(self, states: Tensor, pos: Tensor, kv_len: int | None = None,
                    batch_idx: Tensor | None = None) -> None:
        """Write keys and values of states [B, T, K D'] at pos [T] or [B, T] into the cache.

        states: the inputs of the target's layers cfg.taps, concatenated.
        """
        c = self.context(states)
        B, T, _ = c.shape
        for layer, (rope, slot, mask) in zip(self.layers, self.inputs(pos, kv_len, batch_idx)):
            attn = layer.attn
            _, k, v = attn.wqkv(c).split(attn.split, -1)
            k, v = (t.view(B, T, -1, attn.head_dim) for t in (k, v))
            k, v = attn.k_norm(k).transpose(1, 2), v.transpose(1, 2)
            attn.cache(slot, rotate(k, *rope), v, mask.shape[-1], batch_idx)

    def forward(self, tokens: Tensor, pos: Tensor, kv_len: int | None = None,
                batch_idx: Tensor | None = None) -> Tensor:
        """tokens [B, 1 + k]: the last known token and k mask tokens; pos [1 + k] or [B, 1 + k].

        The block's keys are written behind the context's, where the next context replaces them.
        -> logits [B, k, V'] in fp32; V': the drafter's vocabulary (tokens.ids).
        """
        x = self.embed_block(tokens, pos)
        for layer, inputs in zip(self.layers, self.inputs(pos, kv_len, batch_idx)):
            x = layer(x, *inputs, batch_idx)
        return self.unembed(x[:, 1:])

    def embed_block(self, tokens: Tensor, pos: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.tokens.mask is not None:
            masks = self.tokens.mask.to(x.dtype).expand_as(x[:, 1:])
            x = torch.cat((x[:, :1], masks), dim=1)
        for name in self.after_embed:
            x = getattr(self, name)(x, pos)
        return x.to(self.dtype)

    def inputs(self, pos: Tensor, kv_len: int | None, batch_idx: Tensor | None) -> list[tuple]:
        """Each layer's rope, slot and mask, as embed_inputs() and layer_inputs() of a model."""
        kv_len = kv_len or self.max_seq_length
        shared = cos_sin(pos, self.freq, self.amplitude)
        for window in self.windows:
            slot, key = pos, torch.arange(kv_len, device=pos.device)
            if str(window) in self.rings:
                slot, key = self.rings[str(window)](pos, kv_len, batch_idx)
            shared += [slot, self.visible(pos, key, window)]
        return self.layer_inputs(shared)

    def visible(self, pos: Tensor, key: Tensor, window: int | None) -> Tensor:
        """The mask of a block at pos: all before it, and the block itself, both ways unless causal.

            context 0 1 2, block 3 4 5, window 3: 3 sees 1 2 3 (4 5), 4 sees 2 3 4 (5)
        """
        key, query = key[..., None, :], pos[..., None]
        causal = self.cfg.causal if window is None else self.cfg.causal_window
        mask = key <= (query if causal else query[..., -1:, :].expand_as(query))
        if window is not None:
            mask = mask & (key > query - window) & (key < query + window)
        return mask if mask.dim() == 2 else mask[:, None]
