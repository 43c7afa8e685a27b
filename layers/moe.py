"""Mixture of experts: the router, the experts, and the expert that serves every token.

A call with many tokens sorts them by expert and multiplies each expert's rows at once. Owns no way
of its own to be quick with few tokens: kernels/moe.py exchanges the classes for that.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.feed_forward import GATED
from layers.norms import VectorNorm


@dataclass(frozen=True)
class MoEConfig:
    """How many experts, of what width, and how the router chooses and weighs them."""

    n_expert: int
    n_active: int                                  # experts per token
    expert_dim: int                                # width of each
    norm_topk_prob: bool = True                    # the active experts' probabilities sum to 1
    router_bias: bool = False
    scores: str = "softmax"                        # of SCORES
    choice_bias: bool = False                      # added for the choice of experts only
    n_group: int = 1                               # of experts, of which topk_group may be chosen
    topk_group: int = 1
    group_top: int = 2                             # by the sum of so many of their best scores
    routed_scale: float = 1.0                      # of what the chosen experts give
    shared_dim: int = 0                            # width of the expert that serves every token
    shared_gate: bool = True                       # which weighs that one
    beside: bool = False                           # that one has norms of its own (BesideMoE)


@torch.library.custom_op("gpt_faster::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [ends[e-1], ends[e]) of x [M, in] by weight[e] [out, in] -> [M, out], on the device.

    An operator of our own only because torch traces F.grouped_mm in bfloat16 and no other dtype.
    """
    return F.grouped_mm(x, weight.mT, offs=ends)


@grouped_mm.register_fake
def _(x, weight, ends):
    return x.new_empty(x.shape[0], weight.shape[1])


class ExpertLinear(nn.Module):
    """One Linear per expert: weight [E, out, in], bias [E, out]."""

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_expert, n_out)) if bias else None

    def forward(self, x, ids, ends):
        """x [M, in], each row for the expert in ids [M] -> [M, out].

        ends [E]: the rows are sorted by expert, those of e end there. None: they are few, and each
        reads its own expert's weights.
        """
        if ends is None:
            y = self.each_row(x, ids)
        else:
            y = grouped_mm(x, self.weight, ends)
        return y if self.bias is None else y + self.bias[ids]

    def each_row(self, x, ids):
        return (self.weight[ids] @ x[..., None]).squeeze(-1)


def softmax(logits):
    return logits.softmax(-1)


SCORES = {"softmax": softmax, "sigmoid": torch.sigmoid}


def best_groups(choice, n_group: int, n_chosen: int, n_top: int):
    """choice [n, E], -inf outside of the groups whose n_top best experts have the largest sums."""
    groups = choice.unflatten(-1, (n_group, -1))                           # [n, G, E / G]
    worth = groups.topk(n_top).values.sum(-1)
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen = chosen.scatter(-1, worth.topk(n_chosen).indices, True)
    return torch.where(chosen[..., None], groups, -torch.inf).flatten(-2)


class MoE(nn.Module):
    """The router picks n_active experts for each token, whose outputs are summed by probability.

    Softmax over the router's top k equals softmax over all, top k, normalized: one form for both.
    shared: a feed-forward layer that serves every token, perhaps weighted by a gate of its own.
    """

    def __init__(self, cfg, shared: nn.Module | None = None):
        super().__init__()
        moe = cfg.moe
        E, D, width = moe.n_expert, cfg.dim, moe.expert_dim
        self.n_expert = E
        self.n_active = moe.n_active
        self.norm_topk_prob = moe.norm_topk_prob
        self.scores = SCORES[moe.scores]
        self.n_group, self.topk_group = moe.n_group, moe.topk_group
        self.group_top = moe.group_top
        self.routed_scale = moe.routed_scale
        self.router = nn.Linear(D, E, bias=moe.router_bias)
        self.choice_bias = None
        if moe.choice_bias:
            self.choice_bias = nn.Parameter(torch.zeros(E, dtype=torch.float32))
        self.gate = ExpertLinear(E, D, width, cfg.mlp_bias)
        self.up = ExpertLinear(E, D, width, cfg.mlp_bias)
        self.down = ExpertLinear(E, width, D, cfg.mlp_bias)
        self.activation = GATED[cfg.activation]
        self.shared = shared
        gated = shared and moe.shared_gate
        self.shared_expert_gate = nn.Linear(D, 1, bias=False) if gated else None

    def route(self, x):
        """x [n, D] -> each token's experts' weights, fp32, and ids [n, n_active]."""
        scores = self.scores(self.router(x).float())
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        if self.n_group > 1:
            choice = best_groups(choice, self.n_group, self.topk_group, self.group_top)
        ids = choice.topk(self.n_active).indices
        prob = scores.gather(-1, ids)
        if self.norm_topk_prob:
            prob = prob / prob.sum(-1, keepdim=True)
        return prob * self.routed_scale, ids

    def takes_rows_one_by_one(self, x, n_row: int) -> bool:
        """Whether n_row rows each read their own expert; x [B, T, D].

        On a GPU a decode step does: grouped_mm may wait for it, which no CUDA graph can record.
        """
        return x.device.type != "cpu" and x.shape[1] == 1

    def forward(self, x):
        flat = x.flatten(0, 1)                                             # [n, D]
        y = self.routed(x, *self.route(flat))
        if self.shared is not None:
            y = y + self.share(flat)
        return y.view_as(x)

    def routed(self, x, prob, ids):
        """x [B, T, D], route()'s -> what the experts give, [n, D]."""
        flat = x.flatten(0, 1)
        prob, ids = prob.flatten(), ids.flatten()                          # [M], M = n * n_active
        if self.takes_rows_one_by_one(x, len(ids)):
            order = torch.arange(len(ids), device=x.device)
            y = self.experts(flat[order // self.n_active], ids, None)
        else:
            ids, order = ids.sort(stable=True)     # each expert once, over all of its tokens
            expert = torch.arange(self.n_expert, device=x.device)
            ends = torch.searchsorted(ids, expert, right=True, out_int32=True)
            y = self.experts(flat[order // self.n_active], ids, ends)
            y = torch.empty_like(y).index_copy(0, order, y)
        return (y.float() * prob[:, None]).unflatten(0, (-1, self.n_active)).sum(1).type_as(x)

    def share(self, x):
        y = self.shared(x)
        if self.shared_expert_gate is None:
            return y
        return y * torch.sigmoid(self.shared_expert_gate(x))

    def experts(self, x, ids, ends):
        """x [M, D], a row for each pair of a token and its expert -> [M, D]; see ExpertLinear."""
        hidden = self.activation(self.gate(x, ids, ends), self.up(x, ids, ends))
        return self.down(hidden, ids, ends)


class BesideMoE(MoE):
    """A dense layer and experts side by side, each between norms of its own (Gemma 4).

    So it takes the residual, not normalized yet, which the router normalizes for itself.
    """

    def __init__(self, cfg, shared: nn.Module):
        super().__init__(cfg, shared)
        norms = "norm", "shared_norm", "router_norm", "post_norm", "post_shared_norm"
        for name in norms:
            setattr(self, name, VectorNorm(cfg.dim, cfg.norm_eps))
        self.expert_scale = nn.Parameter(torch.ones(self.n_expert, dtype=torch.float32))
        self.summed = nn.Identity()                # where ranks sum what each has a part of

    def route(self, x):
        prob, ids = super().route(self.router_norm(x))
        return prob * self.expert_scale[ids], ids

    def forward(self, x):
        y = self.routed(self.norm(x), *self.route(x.flatten(0, 1))).view_as(x)
        dense, y = self.summed(torch.stack((self.shared(self.shared_norm(x)), y))).unbind()
        return self.post_shared_norm(dense) + self.post_norm(y)


def mixture(cfg, shared: nn.Module | None) -> MoE:
    return BesideMoE(cfg, shared) if cfg.moe.beside else MoE(cfg, shared)
