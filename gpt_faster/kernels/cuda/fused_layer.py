"""A layer of a compiled GPU step: five kernels for a Llama, a few more for other models.

    [norm, qkv]  [RoPE, cache, attention]  [output, + x]  [norm, gate, up, activation]  [down, + x]

Other parts of a layer (post-norms, experts, LayerNorm) run between these as in the original layer.
Several rows with unquantized weights use the BLAS matmul. With more than MAX_ROWS rows only the
attention kernel is ours.
"""

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cuda.cached_attention import (
    MAX_QUERIES,
    cached_attention,
    scales_and_turns,
)
from gpt_faster.kernels.cuda.fused_moe import fused_moe, matvec_weights, stack_gates
from gpt_faster.kernels.cuda.matvec import FUSED_ACTIVATIONS, MAX_ROWS, matvec
from gpt_faster.kernels.torch_internals import is_compiling
from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.block import IDENTITY, BlockVariant, post_norm_of
from gpt_faster.layers.feed_forward import GATED
from gpt_faster.layers.norms import HeadLayerNorm, LayerNorm, WideNorm
from gpt_faster.layers.quantized_cache import QuantizedCache
from model import KVCache, MoE
from tp import of_all, shared_by

MAX_BATCH = 256


@torch.inference_mode(False)                       # normal tensors even if called in inference mode
def fuse_layers(model: nn.Module) -> None:
    """Replace the class of each supported layer, in place. Call it again after modules were
    replaced.
    """
    cfg = model.cfg
    if not supports_config(cfg):
        return
    for i, layer in enumerate(model.layers):
        if not hasattr(layer.attn, "attend"):      # no attention
            continue
        layer.fusion = FusionPlan(cfg, layer.attn, cfg.window[i % len(cfg.window)])
        arrivals = torch.zeros(MAX_BATCH * cfg.n_head, dtype=torch.int32, device=model.freq.device)
        layer.register_buffer("arrivals", arrivals, persistent=False)
        if isinstance(layer.ffn, MoE):
            layer.ffn.stacked = stack_gates(layer.ffn)
        if not hasattr(type(layer), "is_fused"):
            layer.__class__ = fused_layer_class(type(layer))


def supports_config(cfg) -> bool:
    """Do the kernels support this attention and order of a layer's modules?"""
    block, attention = cfg.block or BlockVariant(), cfg.attention or AttentionVariant()
    if not isinstance(block, BlockVariant) or not isinstance(attention, AttentionVariant):
        return False
    others = (block.parallel, block.end, any(block.widths), attention.gate, attention.clip,
              attention.v_norm, attention.alibi, attention.gains, attention.growth,
              any(cfg.mixer))
    return not any(others) and attention.qk_norm in (None, "wide")


def is_rms_norm(norm: nn.Module) -> bool:
    """An RMSNorm with a weight, over one vector."""
    others = (LayerNorm, WideNorm, HeadLayerNorm)
    return hasattr(norm, "eps") and norm.weight is not None and not isinstance(norm, others)


class FusionPlan:
    """The parts of a layer that the kernels run, from its config."""

    def __init__(self, cfg, attn: nn.Module, window: int | None):
        has_pre_norm = cfg.block is None or cfg.block.pre_norm
        self.norm = has_pre_norm and cfg.norm is None
        self.qk_norm = cfg.qk_norm
        self.wide_norm = cfg.attention is not None and cfg.attention.qk_norm == "wide"
        self.group = attn.split[0] // attn.split[1]
        self.ring = window is not None             # may be a ring cache, with keys in all slots
        activation = "silu" if cfg.ffn is None else getattr(cfg.ffn, "activation", "")
        self.activation = activation if activation in FUSED_ACTIVATIONS else ""
        self.cap = cfg.attention and cfg.attention.cap

    def matches(self, layer: nn.Module) -> bool:
        """Does the layer still have the modules of its config? They may have been replaced."""
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

    def applies_to(self, x, cache, batch_idx) -> bool:
        B, T, _ = x.shape
        return (is_compiling() and type(cache) in (KVCache, QuantizedCache) and batch_idx is None
                and B <= MAX_BATCH and T * self.group <= MAX_QUERIES and B == cache.k.shape[0])


def fused_layer_class(kind: type) -> type:
    """A layer's class -> a subclass that uses the kernels for few rows."""

    class FusedLayer(kind):
        is_fused = True

        def forward(self, x, rope, slot, mask, batch_idx=None):
            fusion, attn = self.fusion, self.attn
            if not fusion.applies_to(x, attn.cache, batch_idx) or not fusion.matches(self):
                return super().forward(x, rope, slot, mask, batch_idx)
            qkv = project(attn.wqkv, x, self.attn_norm, fusion.norm)
            if fusion.wide_norm:
                qkv = apply_wide_norm(qkv, attn)
            attend = getattr(attn.attend, "plain", attn.attend)
            norms, eps = (None, None), 0.0
            if fusion.qk_norm:
                norms, eps = (attn.q_norm.weight, attn.k_norm.weight), attn.q_norm.eps
            cache = attn.cache
            y = cached_attention(
                qkv, *norms, *rope, mask, slot, cache.k, cache.v, getattr(attend, "sinks", None),
                self.arrivals, attend.scale, fusion.cap, eps, fusion.ring,
                *scales_and_turns(cache))
            x = branch(attn, attn.wo, y, x, post_norm_of(self, "attn"))
            ffn = self.ffn
            if getattr(ffn, "stacked", None) and x.shape[:-1].numel() <= MAX_ROWS:
                fusable = fusion.norm and x.shape[:-1].numel() == 1
                flat = (x if fusable else self.ffn_norm(x)).flatten(0, 1)
                y = fused_moe(ffn, flat, self.ffn_norm if fusable else None)
                return x + post_norm_of(self, "ffn")(of_all(ffn, y.view_as(x)))
            if not hasattr(ffn, "gate_up"):        # no gate, or experts of another kind
                return x + post_norm_of(self, "ffn")(ffn(self.ffn_norm(x)))
            activation = fusion.activation if matvec_weights_if_faster(ffn.gate_up, x) else ""
            h = project(ffn.gate_up, x, self.ffn_norm, fusion.norm, activation)
            if not activation:
                h = ffn.activation(*h.chunk(2, dim=-1))
            return branch(ffn, ffn.down, h, x, post_norm_of(self, "ffn"))
    return FusedLayer


def matvec_weights_if_faster(linear: nn.Module, x: Tensor) -> tuple | None:
    """matvec_weights() if matvec() is the fastest kernel for the rows of x; else None."""
    weights = matvec_weights(linear)
    is_plain = weights is not None and weights[1] is None
    return weights if x.shape[:-1].numel() <= (1 if is_plain else MAX_ROWS) else None


def project(linear, x, norm, fusable: bool, activation: str = "", residual=None) -> Tensor:
    """linear(norm(x)), x [B, T, D], with an activation or a residual to add."""
    weights = matvec_weights_if_faster(linear, x)
    once = x.shape[:-1].numel() == 1 or weights and weights[1] is not None
    if norm is not None and not (fusable and weights and once):
        x, norm = norm(x), None                    # several rows: not once per program
    if weights is None:
        y = linear(x)
        return y if residual is None else residual + y
    flat = residual if residual is None else residual.view(-1, residual.shape[-1])
    y = matvec(x.reshape(-1, x.shape[-1]), *weights, linear.bias,
               None if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
               flat, activation)
    return y.view(*x.shape[:-1], -1)


def branch(module, linear, y, x, post) -> Tensor:
    """x + post(linear(y)), linear's output summed over ranks."""
    if isinstance(post, nn.Identity) and not shared_by(module):
        return project(linear, y, None, False, residual=x)
    return x + post(of_all(module, project(linear, y, None, False)))


def apply_wide_norm(qkv, attn) -> Tensor:
    q, k, v = qkv.split(attn.split, dim=-1)
    heads = q.unflatten(-1, (-1, attn.head_dim)), k.unflatten(-1, (-1, attn.head_dim))
    return torch.cat((attn.q_norm(heads[0]).flatten(-2), attn.k_norm(heads[1]).flatten(-2), v), -1)
