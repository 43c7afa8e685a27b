"""RoPE, cache update and attention for a few queries, as one operator of a compiled GPU step.

Takes model.KVCache's tensors or the codes and scales of layers/quantized_cache.py. Runs by
triton_attention.py on a GPU, by the PyTorch reference on a CPU, for tests.

    y = cached_attention(qkv, q_norm, k_norm, cos, sin, mask, slot, cache.k, cache.v, …)
"""

import os

import torch
from torch import Tensor, nn

from gpt_faster.layers.attention import ScoredAttention
from gpt_faster.layers.quantized_cache import DTYPES, QuantizedCache
from model import KVCache

MAX_QUERIES = 128                                  # per key head
PRECISION_OF = {dtype: name for name, dtype in DTYPES.items()}


@torch.library.custom_op("gpt_faster::cached_attention",
                         mutates_args=("k_cache", "v_cache", "arrivals", "k_scale", "v_scale"),
                         tags=(torch.Tag.flexible_layout,))    # else each layer copies the mask
def cached_attention(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor,
                     sin: Tensor, mask: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor,
                     sinks: Tensor | None, arrivals: Tensor, scale: float, cap: float | None,
                     eps: float, ring: bool, k_scale: Tensor | None = None,
                     v_scale: Tensor | None = None, k_turn: int = 1, v_turn: int = 1) -> Tensor:
    """qkv [B, T, (N + 2K) H], cos sin [(B, 1,) T, H/2], mask [(B, 1,) T, S], slot [(B,) T] ->
    [B, T, N H]. Writes the new keys and values to the caches [B, K, S', H].

    q_norm, k_norm [H]: RMSNorm each head before RoPE. sinks [N], cap: see layers/attention.py.
    arrivals [>= B K] int32: the kernel's counters, initialized to zero and not changed by others.
    ring: slots after the highest new one are in use too. k_scale, v_scale, k_turn, v_turn: those
    of a QuantizedCache, whose k and v are the caches.
    """
    args = (qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, sinks, arrivals, scale,
            cap, eps, ring, k_scale, v_scale, k_turn, v_turn)
    if qkv.is_cuda or os.environ.get("TRITON_INTERPRET"):
        from gpt_faster.kernels.cuda.triton_attention import launch
        return launch(*(t.contiguous() if t is qkv or t is cos or t is sin else t for t in args))
    return plain_attention(*args)


@cached_attention.register_fake
def _(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, *rest):
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width - 2 * k_cache.shape[1] * 2 * cos.shape[-1])


def scales_and_turns(cache: nn.Module) -> tuple:
    """The last arguments of cached_attention(), of a KVCache none."""
    if type(cache) is KVCache:
        return ()
    return cache.k_scale, cache.v_scale, cache.k_turn, cache.v_turn


def cache_of(k, v, k_scale, v_scale, k_turn, v_turn, head_dim: int, dtype) -> nn.Module:
    """A cache of these tensors."""
    empty = (0, 0, 0, head_dim)
    if k_scale is None:
        cache = KVCache(empty, dtype, k.device)
    else:
        precisions = PRECISION_OF[k.dtype], PRECISION_OF[v.dtype]
        cache = QuantizedCache(empty, dtype, k.device, precisions)
        cache.k_scale, cache.v_scale = k_scale, v_scale
        cache.k_turn, cache.v_turn = k_turn, v_turn
    cache.k, cache.v = k, v
    return cache


def plain_attention(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, sinks, arrivals,
                    scale, cap, eps, ring, *scales_and_turns) -> Tensor:
    B, T, width = qkv.shape
    K, H = k_cache.shape[1], 2 * cos.shape[-1]
    N = width // H - 2 * K
    q, k, v = (t.transpose(1, 2) for t in qkv.view(B, T, -1, H).split((N, K, K), dim=2))
    q = _apply_rope(q, q_norm, eps, cos, sin)
    k = _apply_rope(k, k_norm, eps, cos, sin)
    cache = cache_of(k_cache, v_cache, *(scales_and_turns or (None, None, 1, 1)), H, qkv.dtype)
    k, v = cache(slot, k, v, mask.shape[-1], None)
    attend = ScoredAttention(scale, N, cap)
    attend.sinks = sinks if sinks is None else torch.nn.Parameter(sinks, requires_grad=False)
    return attend(q, k, v, mask).transpose(1, 2).reshape(B, T, N * H)


def _apply_rope(x, norm, eps, cos, sin):
    h = x.float()
    if norm is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        h = (h * norm).type_as(x).float()
    a, b = h.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
