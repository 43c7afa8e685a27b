"""EAGLE-3's drafter (arXiv 2503.01840; 3.1: 2605.09992): one layer over a target's hidden states.

Its first layer's attention reads the next token's embedding beside a state: first the target's
hidden states of a few layers, fused into one vector, then its own output. Draft tokens may be a
part of the target's vocabulary.

    eagle = Eagle3(cfg); eagle.join(model)
    x = eagle.features([model.hidden[k] for k in eagle.target_layers])
    logits, x = eagle(tokens, x, pos)              # tokens: those after x's positions
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gpt_faster.layers.part import Part
from model import Block, ModelConfig, RMSNorm, Transformer


@dataclass(frozen=True)
class FirstLayerReadsBoth(Part):
    """ModelConfig.block of a drafter: its first layer is an Eagle3Block."""

    norm_before_residual: bool = False
    kind: str = "eagle3"

    def make(self, cfg, layer: int, earlier: nn.ModuleList) -> nn.Module:
        return (Block if layer else Eagle3Block)(cfg, layer, earlier)


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """The layers, described as a model's config, and what surrounds them."""

    target_dim: int = 0                            # width of the target's hidden states
    target_layers: tuple[int, ...] | None = None   # whose inputs are read; None: by join()
    n_state: int = 3                               # hidden states that fc joins; 0: no fc, it reads
                                                   # the target's last one after the final norm
    draft_vocab: int = 0                           # tokens of its own output layer; 0: the target's
    own_embed: bool = False                        # else the target's embedding
    norm_before_fc: bool = False                   # one norm over all states
    fc_norm: bool = False                          # a norm for each state
    norm_output: bool = False                      # the final norm applies to the next state too


class Eagle3Block(Block):
    """A block whose attention reads the normalized embedding beside the normalized state."""

    def __init__(self, cfg: Eagle3Config, layer: int, earlier: nn.ModuleList):
        super().__init__(cfg, layer, earlier)
        self.norm_before_residual = cfg.block.norm_before_residual
        self.hidden_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.attn.wqkv = nn.Linear(2 * cfg.dim, sum(self.attn.split), bias=cfg.qkv_bias)

    def forward(self, x, rope, slot, mask, batch_idx, embedding):
        h = self.hidden_norm(x)
        both = torch.cat((self.attn_norm(embedding), h), dim=-1)           # [B, T, 2 D]
        x = h if self.norm_before_residual else x
        x = x + self.attn(both, rope, slot, mask, batch_idx)
        return x + self.ffn(self.ffn_norm(x))


class Eagle3(Transformer):
    """The next token and a state -> logits of the token after it, and the next state."""

    def __init__(self, cfg: Eagle3Config):
        super().__init__(cfg)
        if not cfg.own_embed:
            self.embed = None                      # set by join()
        self.head = nn.Linear(cfg.dim, cfg.draft_vocab, bias=False) if cfg.draft_vocab else None
        self.fc, self.input_norm, self.fc_norm = None, nn.Identity(), None
        n_in = cfg.n_state * cfg.target_dim
        if cfg.n_state:
            self.fc = nn.Linear(n_in, cfg.dim, bias=False)
        if cfg.norm_before_fc:
            self.input_norm = RMSNorm(n_in, cfg.norm_eps)
        if cfg.fc_norm:
            norms = [RMSNorm(cfg.target_dim, cfg.norm_eps) for _ in range(cfg.n_state)]
            self.fc_norm = nn.ModuleList(norms)
        self.target_ids = None                     # [draft_vocab] ids in the target's vocabulary;
                                                   # None: the same
        self.target_layers = cfg.target_layers
        self.n_vocab = cfg.vocab_size              # the target's
        self.path = None                           # for error messages

    def join(self, model: Transformer) -> None:
        """Attach to the target: its embedding and output layer, where there is no own one.

        Call it after the target was compiled. ValueError if it does not fit.
        """
        check_fit(self.cfg, model.cfg, self.path)
        self.target_layers = target_layers(self.cfg, model.cfg.n_layer)
        if not self.cfg.own_embed:
            self.embed = model.embed
        if not self.cfg.draft_vocab:
            self.head = model.head
        self.cfg = replace(self.cfg, vocab_size=model.cfg.vocab_size)

    def features(self, states: list[Tensor]) -> Tensor:
        """The target's hidden states, [B, T, target_dim] each -> the first state [B, T, D]."""
        if self.fc is None:
            return states[0]
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states)]
        return self.fc(self.input_norm(torch.cat(states, dim=-1)))

    def forward(self, tokens: Tensor, x: Tensor, pos: Tensor, logits_to_keep: int | Tensor = 1,
                kv_len: int | None = None, batch_idx: Tensor | None = None
                ) -> tuple[Tensor, Tensor]:
        """tokens [B, T], and the states x [B, T, D] of the positions before them.

        pos [T] or [B, T]: consecutive cache slots; logits_to_keep, kv_len, batch_idx: as in a
        model. -> logits [B, n, V] in fp32 over the target's vocabulary (-inf: tokens that cannot be
        drafted), and states [B, n, D] to use when drafting further.
        """
        kv_len = kv_len or (self.max_seq_length if self.max_batch_size else tokens.shape[1])
        if batch_idx is not None:
            pos = pos.expand(len(batch_idx), -1)
        embedding, *shared = self.embed_inputs(tokens, pos, kv_len, batch_idx)
        first, *others = self.layer_inputs(shared)
        x = self.layers[0](x, *first, batch_idx, embedding)
        for layer, inputs in zip(self.layers[1:], others):
            x = layer(x, *inputs, batch_idx)
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:]
        else:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.shape[-1]))
        logits = self.unembed(x)
        if self.target_ids is not None:
            every = logits.new_full((*logits.shape[:2], self.n_vocab), -torch.inf)
            logits = every.index_copy(2, self.target_ids, logits)
        x = self.norm(x) if self.cfg.norm_output else x
        return logits, x.to(self.dtype)


def target_layers(cfg: Eagle3Config, n_layer: int) -> tuple[int, ...]:
    """The layers of a target of n_layer whose inputs the drafter reads."""
    if not cfg.n_state:
        return n_layer,
    return cfg.target_layers or (2, n_layer // 2, n_layer - 3)


def check_fit(cfg: Eagle3Config, target: ModelConfig, path) -> None:
    """ValueError says why the drafter was not made for this target."""
    def no_match(what, expected, found):
        raise ValueError(f"{path} drafts for models with {what} {expected}, but this model has "
                         f"{found}")

    if cfg.target_dim != target.dim:
        no_match("width", cfg.target_dim, target.dim)
    if cfg.vocab_size != target.vocab_size:
        no_match("a vocabulary of", cfg.vocab_size, target.vocab_size)
    if not cfg.own_embed and cfg.dim != target.dim:
        no_match("an embedding of width", cfg.dim, target.dim)
    layers = target_layers(cfg, target.n_layer)
    if min(layers) < 0 or max(layers) > target.n_layer:
        raise ValueError(f"{path} reads the inputs of layers {', '.join(map(str, layers))}, but "
                         f"this model has {target.n_layer} layers")
