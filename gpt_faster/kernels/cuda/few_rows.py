"""A layer of a compiled GPU step: five kernels for a Llama's, and few more for any other's.

    [norm, qkv]  [RoPE, cache, attention]  [output, + x]  [norm, gate, up, activation]  [down, + x]

What a layer has beside that (norms after a branch, experts, LayerNorm) runs as in the plain layer,
between these. Several rows by plain weights are a library's product, and of more than MOST_ROWS
only the attention is ours.
"""

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cuda.cached_attention import MOST_QUERIES, cached_attention
from gpt_faster.kernels.cuda.few_experts import few_experts, leaves, stack_gates
from gpt_faster.kernels.cuda.matvec import FUSED_ACTIVATIONS, MOST_ROWS, matvec
from gpt_faster.kernels.private import is_compiling
from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.block import IDENTITY, BlockVariant, post_norm_of
from gpt_faster.layers.feed_forward import GATED
from gpt_faster.layers.norms import HeadLayerNorm, LayerNorm, WideNorm
from model import MoE
from tp import of_all, shared_by

MOST_BATCH = 256


@torch.inference_mode(False)                       # ordinary tensors even if the caller is in it
def fuse_layers(model: nn.Module) -> None:
    """Exchange the class of each of the model's layers, where the kernels know them. In place, and
    anew where parts of them were exchanged."""
    cfg = model.cfg
    if not knows(cfg):
        return
    for i, layer in enumerate(model.layers):
        if not hasattr(layer.attn, "attend"):      # it has no keys
            continue
        layer.few = FewRows(cfg, layer.attn, cfg.window[i % len(cfg.window)])
        arrivals = torch.zeros(MOST_BATCH * cfg.n_head, dtype=torch.int32, device=model.freq.device)
        layer.register_buffer("arrivals", arrivals, persistent=False)
        if isinstance(layer.ffn, MoE):
            layer.ffn.stacked = stack_gates(layer.ffn)
        if not hasattr(type(layer), "is_fused"):
            layer.__class__ = fused(type(layer))


def knows(cfg) -> bool:
    """Are attention and the order of a layer's parts as the kernels have them?"""
    block, attention = cfg.block or BlockVariant(), cfg.attention or AttentionVariant()
    if not isinstance(block, BlockVariant) or not isinstance(attention, AttentionVariant):
        return False
    others = (block.parallel, block.end, any(block.widths), attention.gate, attention.clip,
              attention.v_norm, attention.alibi, attention.gains, attention.growth,
              any(cfg.mixer))
    return not any(others) and attention.qk_norm in (None, "wide")


def is_rms_norm(norm: nn.Module) -> bool:
    """With a weight, over one vector."""
    others = (LayerNorm, WideNorm, HeadLayerNorm)
    return hasattr(norm, "eps") and norm.weight is not None and not isinstance(norm, others)


class FewRows:
    """What the kernels can do of a layer, by its config."""

    def __init__(self, cfg, attn: nn.Module, window: int | None):
        has_pre_norm = cfg.block is None or cfg.block.pre_norm
        self.norm = has_pre_norm and cfg.norm is None
        self.qk_norm = cfg.qk_norm
        self.wide_norm = cfg.attention is not None and cfg.attention.qk_norm == "wide"
        self.group = attn.split[0] // attn.split[1]
        self.ring = window is not None             # or may be: then slots beyond the last have keys
        activation = "silu" if cfg.ffn is None else getattr(cfg.ffn, "activation", "")
        self.activation = activation if activation in FUSED_ACTIVATIONS else ""
        self.cap = cfg.attention and cfg.attention.cap

    def is_of(self, layer: nn.Module) -> bool:
        """Has it the parts that its config says? They may have been exchanged since."""
        attn = layer.attn
        if not hasattr(attn, "attend") or getattr(attn, "gate", None) is not None:
            return False
        attend = getattr(attn.attend, "plain", attn.attend)
        norms = [attn.q_norm, attn.k_norm]
        kind = is_rms_norm if self.qk_norm else nn.Identity
        if self.wide_norm:
            kind = WideNorm
        if self.norm and not (is_rms_norm(layer.attn_norm) and is_rms_norm(layer.ffn_norm)):
            return False
        if not all(kind(n) if kind is is_rms_norm else isinstance(n, kind) for n in norms):
            return False
        others = [getattr(attn, name, IDENTITY) for name in ("clip", "v_norm")]
        cap = getattr(getattr(attend, "cap", None), "cap", None)
        return (all(isinstance(other, nn.Identity) for other in others)
                and hasattr(attend, "scale") and cap == self.cap
                and getattr(attend, "slopes", None) is None
                and (not self.activation or not hasattr(layer.ffn, "gate_up")
                     or layer.ffn.activation is GATED[self.activation]))

    def fits(self, x, cache, batch_idx) -> bool:
        B, T, _ = x.shape
        return (is_compiling() and cache is not None and batch_idx is None and B <= MOST_BATCH
                and T * self.group <= MOST_QUERIES and B == cache.k.shape[0])


def fused(kind: type) -> type:
    """A layer's class -> one that takes few rows through the kernels."""

    class FusedLayer(kind):
        is_fused = True

        def forward(self, x, rope, slot, mask, batch_idx=None):
            few, attn = self.few, self.attn
            if not few.fits(x, attn.cache, batch_idx) or not few.is_of(self):
                return super().forward(x, rope, slot, mask, batch_idx)
            qkv = project(attn.wqkv, x, self.attn_norm, few.norm)
            if few.wide_norm:
                qkv = wide_normed(qkv, attn)
            attend = getattr(attn.attend, "plain", attn.attend)
            norms, eps = (None, None), 0.0
            if few.qk_norm:
                norms, eps = (attn.q_norm.weight, attn.k_norm.weight), attn.q_norm.eps
            y = cached_attention(
                qkv, *norms, *rope, mask, slot, attn.cache.k, attn.cache.v,
                getattr(attend, "sinks", None), self.arrivals, attend.scale, few.cap, eps, few.ring)
            x = branch(attn, attn.wo, y, x, post_norm_of(self, "attn"))
            ffn = self.ffn
            if getattr(ffn, "stacked", None) and x.shape[:-1].numel() <= MOST_ROWS:
                fusable = few.norm and x.shape[:-1].numel() == 1
                flat = (x if fusable else self.ffn_norm(x)).flatten(0, 1)
                y = few_experts(ffn, flat, self.ffn_norm if fusable else None)
                return x + post_norm_of(self, "ffn")(of_all(ffn, y.view_as(x)))
            if not hasattr(ffn, "gate_up"):        # no gate, or experts of another kind
                return x + post_norm_of(self, "ffn")(ffn(self.ffn_norm(x)))
            activation = few.activation if ours(ffn.gate_up, x) else ""
            h = project(ffn.gate_up, x, self.ffn_norm, few.norm, activation)
            if not activation:
                h = ffn.activation(*h.chunk(2, dim=-1))
            return branch(ffn, ffn.down, h, x, post_norm_of(self, "ffn"))
    return FusedLayer


def ours(linear: nn.Module, x: Tensor) -> tuple | None:
    """Its weights, as matvec() takes them, where that is the faster product of so many rows."""
    weights = leaves(linear)
    is_plain = weights is not None and weights[1] is None
    return weights if x.shape[:-1].numel() <= (1 if is_plain else MOST_ROWS) else None


def project(linear, x, norm, fusable: bool, activation: str = "", residual=None) -> Tensor:
    """linear(norm(x)), activated or added to the residual, x [B, T, D]."""
    weights = ours(linear, x)
    if norm is not None and not (fusable and weights and x.shape[:-1].numel() == 1):
        x, norm = norm(x), None                    # several rows: written once, not by each program
    if weights is None:
        y = linear(x)
        return y if residual is None else residual + y
    flat = residual if residual is None else residual.view(-1, residual.shape[-1])
    y = matvec(x.reshape(-1, x.shape[-1]), *weights, linear.bias,
               None if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
               flat, activation)
    return y.view(*x.shape[:-1], -1)


def branch(module, linear, y, x, post) -> Tensor:
    """x + post(what the module's last linear gives for y, of all ranks)."""
    if isinstance(post, nn.Identity) and not shared_by(module):
        return project(linear, y, None, False, residual=x)
    return x + post(of_all(module, project(linear, y, None, False)))


def wide_normed(qkv, attn) -> Tensor:
    q, k, v = qkv.split(attn.split, dim=-1)
    heads = q.unflatten(-1, (-1, attn.head_dim)), k.unflatten(-1, (-1, attn.head_dim))
    return torch.cat((attn.q_norm(heads[0]).flatten(-2), attn.k_norm(heads[1]).flatten(-2), v), -1)
