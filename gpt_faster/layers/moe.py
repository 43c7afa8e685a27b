"""Mixtures of experts with other routers than Mixtral's, and with a shared expert.

    cfg = replace(cfg, moe=MoEVariant(8, 2, 1024, scores="sigmoid", shared_dim=2048))
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from gpt_faster.layers.feed_forward import GATED, UNGATED, FeedForwardVariant
from gpt_faster.layers.norms import VectorNorm, soft_cap
from gpt_faster.layers.part import IN, OUT
from model import MoE, MoEConfig


@dataclass(frozen=True)
class MoEVariant(MoEConfig):
    """Options of the router, and of the shared expert that every token uses."""

    router_bias: bool = False
    scores: str = "softmax"                        # a key of SCORES
    choice_bias: bool = False                      # bias for choosing experts, not for weighting
    choice_of_logits: bool = False                 # choice_bias is added to logits, not to scores
    router_cap: float | None = None                # logits: cap * tanh(logit / cap) (Laguna)
    n_group: int = 1                               # expert groups; topk_group of them are eligible
    topk_group: int = 1
    group_top: int = 2                             # ranked by the sum of this many best scores
    routed_scale: float = 1.0                      # factor of the routed experts' output
    shared_dim: int = 0                            # width of the shared expert; 0: none
    shared_gate: bool = True                       # a learned sigmoid gate on the shared expert
    beside: bool = False                           # MoEWithParallelDense instead of RoutedMoE
    activation: str = "silu"                       # a key of feed_forward.GATED
    gated: bool = True                             # False: down(act(up(x))), a key of UNGATED
    latent_dim: int = 0                            # width of the experts' input and output; 0: the
                                                   # model's (Nemotron 3 Super)

    split = {"shared.gate": OUT, "shared.up": OUT, "shared.down": IN}

    def make(self, cfg) -> nn.Module:
        shared = None
        if self.shared_dim:
            variant = FeedForwardVariant(self.activation, self.gated)
            shared = variant.make(cfg, self.shared_dim)
        if not self.gated:
            return UngatedMoE(cfg, shared)
        return MoEWithParallelDense(cfg, shared) if self.beside else RoutedMoE(cfg, shared)

    def shard(self, n: int) -> "MoEVariant":
        """The mixture of one of n ranks, each with a slice of every expert."""
        return replace(self, expert_dim=self.expert_dim // n, shared_dim=self.shared_dim // n)

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide."""
        return {"experts' width": self.expert_dim, "shared expert's width": self.shared_dim}


def moe_from_fields(values: dict) -> MoEConfig:
    """A MoEConfig with these fields, or a MoEVariant if one of its own fields is not the default.
    """
    plain = {field.name for field in fields(MoEConfig)}
    defaults = {f.name: f.default for f in fields(MoEVariant) if f.name not in plain}
    if not values.get("shared_dim"):               # without a shared expert its gate is irrelevant
        values = {name: value for name, value in values.items() if name != "shared_gate"}
    if any(defaults[name] != value for name, value in values.items() if name in defaults):
        return MoEVariant(**values)
    return MoEConfig(**{name: value for name, value in values.items() if name in plain})


def softmax(logits):
    return logits.softmax(-1)


SCORES = {"softmax": softmax, "sigmoid": torch.sigmoid}


def best_groups(choice, n_group: int, n_chosen: int, n_top: int):
    """Mask scores choice [n, E] to the n_chosen groups with the largest sums of their n_top best
    scores; -inf elsewhere."""
    groups = choice.unflatten(-1, (n_group, -1))                           # [n, G, E / G]
    worth = groups.topk(n_top).values.sum(-1)
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen = chosen.scatter(-1, worth.topk(n_chosen).indices, True)
    return torch.where(chosen[..., None], groups, -torch.inf).flatten(-2)


class RoutedMoE(MoE):
    """shared: a feed-forward layer that every token uses, optionally scaled by a learned gate."""

    def __init__(self, cfg, shared: nn.Module | None = None):
        super().__init__(cfg)
        moe = cfg.moe
        self.scores = SCORES[moe.scores]
        self.n_group, self.topk_group = moe.n_group, moe.topk_group
        self.group_top = moe.group_top
        self.routed_scale = moe.routed_scale
        self.choice_of_logits = moe.choice_of_logits
        self.router_cap = soft_cap(moe.router_cap)
        if moe.router_bias:
            self.router = nn.Linear(cfg.dim, moe.n_expert, bias=True)
        self.choice_bias = None
        if moe.choice_bias:
            self.choice_bias = nn.Parameter(torch.zeros(moe.n_expert, dtype=torch.float32))
        self.activation = (GATED if moe.gated else UNGATED)[moe.activation]
        self.shared = shared
        gated = shared and moe.shared_gate
        self.shared_expert_gate = nn.Linear(cfg.dim, 1, bias=False) if gated else None

    def route(self, x):
        logits = self.router_cap(self.router(x).float())
        scores = self.scores(logits)
        choice = logits if self.choice_of_logits else scores
        if self.choice_bias is not None:
            choice = choice + self.choice_bias
        if self.n_group > 1:
            choice = best_groups(choice, self.n_group, self.topk_group, self.group_top)
        ids = choice.topk(self.n_active).indices
        prob = scores.gather(-1, ids)
        if self.norm_topk_prob:
            prob = prob / prob.sum(-1, keepdim=True)
        return prob * self.routed_scale, ids

    def forward(self, x):
        flat = x.flatten(0, 1)                                             # [n, D]
        y = self.routed(x, *self.route(flat))
        if self.shared is not None:
            y = y + self.shared_output(flat)
        return y.view_as(x)

    def shared_output(self, x):
        y = self.shared(x)
        if self.shared_expert_gate is None:
            return y
        return y * torch.sigmoid(self.shared_expert_gate(x))


class UngatedMoE(RoutedMoE):
    """Nemotron 3: experts without a gate, optionally in a narrower space that all of them share."""

    def __init__(self, cfg, shared: nn.Module | None):
        dim = cfg.moe.latent_dim or cfg.dim
        super().__init__(replace(cfg, dim=dim), shared)
        del self.gate
        self.router = nn.Linear(cfg.dim, cfg.moe.n_expert, bias=cfg.moe.router_bias)
        self.to_latent, self.from_latent = nn.Identity(), nn.Identity()
        if cfg.moe.latent_dim:
            self.to_latent = nn.Linear(cfg.dim, dim, bias=False)
            self.from_latent = nn.Linear(dim, cfg.dim, bias=False)

    def routed(self, x, prob, ids):
        return self.from_latent(super().routed(self.to_latent(x), prob, ids))

    def experts(self, x, ids, ends):
        return self.down(self.activation(self.up(x, ids, ends)), ids, ends)


class MoEWithParallelDense(RoutedMoE):
    """Gemma 4: a dense feed-forward layer parallel to the experts, both with pre- and post-norms.

    Its input is the residual stream before any norm; the router has a norm of its own.
    """

    def __init__(self, cfg, shared: nn.Module):
        super().__init__(cfg, shared)
        norms = "norm", "shared_norm", "router_norm", "post_norm", "post_shared_norm"
        for name in norms:
            setattr(self, name, VectorNorm(cfg.dim, cfg.norm_eps))
        self.expert_scale = nn.Parameter(torch.ones(self.n_expert, dtype=torch.float32))
        self.summed = nn.Identity()                # tp.py puts the all-reduce here

    def route(self, x):
        prob, ids = super().route(self.router_norm(x))
        return prob * self.expert_scale[ids], ids

    def forward(self, x):
        y = self.routed(self.norm(x), *self.route(x.flatten(0, 1))).view_as(x)
        dense, y = self.summed(torch.stack((self.shared(self.shared_norm(x)), y))).unbind()
        return self.post_shared_norm(dense) + self.post_norm(y)
