"""RoPE, cache update and attention for a few queries, as one operator of a compiled GPU step.

Runs by triton_attention.py on a GPU, by the PyTorch reference on a CPU, for tests.

    y = cached_attention(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, …)
"""

import os

import torch
from torch import Tensor

from gpt_faster.layers.attention import ScoredAttention

MAX_QUERIES = 128                                  # per key head


@torch.library.custom_op("gpt_faster::cached_attention",
                         mutates_args=("k_cache", "v_cache", "arrivals"),
                         tags=(torch.Tag.flexible_layout,))    # else each layer copies the mask
def cached_attention(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor,
                     sin: Tensor, mask: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor,
                     sinks: Tensor | None, arrivals: Tensor, scale: float, cap: float | None,
                     eps: float, ring: bool) -> Tensor:
    """qkv [B, T, (N + 2K) H], cos sin [(B, 1,) T, H/2], mask [(B, 1,) T, S], slot [(B,) T] ->
    [B, T, N H]. Writes the new keys and values to the caches [B, K, S', H].

    q_norm, k_norm [H]: RMSNorm each head before RoPE. sinks [N], cap: see layers/attention.py.
    arrivals [>= B K] int32: the kernel's counters, initialized to zero and not changed by others.
    ring: slots after the highest new one are in use too.
    """
    weight_args = (qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, sinks, arrivals,
                 scale, cap, eps, ring)
    if qkv.is_cuda or os.environ.get("TRITON_INTERPRET"):
        from gpt_faster.kernels.cuda.triton_attention import launch
        return launch(*(t.contiguous() if t is qkv or t is cos or t is sin else t
                        for t in weight_args))
    return plain_attention(*weight_args)


@cached_attention.register_fake
def _(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, *rest):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width - 2 * k_cache.shape[1] * k_cache.shape[3])


def plain_attention(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, sinks, arrivals,
                    scale, cap, eps, ring) -> Tensor:
    B, T, width = qkv.shape
    K, H = k_cache.shape[1], k_cache.shape[3]
    N = width // H - 2 * K
    q, k, v = (t.transpose(1, 2) for t in qkv.view(B, T, -1, H).split((N, K, K), dim=2))
    q = _apply_rope(q, q_norm, eps, cos, sin)
    k = _apply_rope(k, k_norm, eps, cos, sin)
    rows = torch.arange(B, device=slot.device)[:, None]
    slots = slot.expand(B, T)
    k_cache[rows, :, slots] = k.transpose(1, 2)
    v_cache[rows, :, slots] = v.transpose(1, 2)
    attend = ScoredAttention(scale, N, cap)
    attend.sinks = sinks if sinks is None else torch.nn.Parameter(sinks, requires_grad=False)
    n = mask.shape[-1]
    y = attend(q, k_cache[:B, :, :n], v_cache[:B, :, :n], mask)
    return y.transpose(1, 2).reshape(B, T, N * H)


def _apply_rope(x, norm, eps, cos, sin):
    h = x.float()
    if norm is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        h = (h * norm).type_as(x).float()
    a, b = h.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
