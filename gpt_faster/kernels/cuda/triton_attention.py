"""RoPE, cache update and attention of a few queries on a GPU, in Triton (flash decoding).

The keys of a row and key head are split over programs; the last program to finish combines the
partial results. Programs stop at the last key in use, read from device memory, so that one compiled
step serves every length. New keys and values are written by the program whose split contains their
slots; no other program reads these slots. Imported on a GPU only.

    y = launch(qkv, cos, sin, mask, slot, k_cache, v_cache, arrivals, head_dim=128, scale=0.09)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpt_faster.kernels.cuda.triton_matvec import launch_options

BLOCK_KEYS = 64                                    # per block, fewer for wide heads
MAX_PROGRAMS = 256                                 # about two per multiprocessor
MAX_SPLITS = 64


@triton.jit
def _norm_rope(x, offset, is_row, norm, eps, cos, sin, H: tl.constexpr, HALF: tl.constexpr):
    """Heads at x + offset [n, 1] -> both halves [n, HALF], normalized and rotated, in x's dtype."""
    kind = x.dtype.element_ty
    h = tl.arange(0, HALF)[None, :]
    is_h = is_row & (h < H // 2)
    a = tl.load(x + offset + h, is_h, 0).to(tl.float32)
    b = tl.load(x + offset + H // 2 + h, is_h, 0).to(tl.float32)
    if norm is not None:
        mean = (tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / H
        inverse = tl.rsqrt(mean + eps)
        a = a * inverse * tl.load(norm + h, h < H // 2, 0)
        b = b * inverse * tl.load(norm + H // 2 + h, h < H // 2, 0)
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    return (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)


@triton.jit
def _attention(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, sinks, arrivals,
               partials, y, scale, cap, eps, angle_stride, mask_stride, slot_stride, kv_len,
               n_slot, ring: tl.constexpr, N: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
               H: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, Q: tl.constexpr,
               S: tl.constexpr, n_split: tl.constexpr, precision: tl.constexpr,
               use_pdl: tl.constexpr):
    if use_pdl:                                    # let the next kernel load its weights
        gdc_launch_dependents()
        gdc_wait()                                 # wait for qkv
    G: tl.constexpr = N // K                       # queries per key head
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kind = qkv.dtype.element_ty
    width: tl.constexpr = (N + 2 * K) * H          # of a row of qkv
    q = tl.arange(0, Q)[:, None]                   # rows: T queries of G heads
    t = q // G
    is_q = q < T * G
    half = tl.arange(0, HALF)[None, :]
    wide = tl.arange(0, WIDE)[None, :]
    angle = b * angle_stride + t * (H // 2) + half
    is_angle = is_q & (half < H // 2)
    q_at = (b * T + t) * width + (head * G + q % G) * H
    q1, q2 = _norm_rope(qkv, q_at, is_q, q_norm, eps, tl.load(cos + angle, is_angle, 0),
                      tl.load(sin + angle, is_angle, 0), H, HALF)
    cache_at = (b * K + head).to(tl.int64) * n_slot * H
    k_cache += cache_at
    v_cache += cache_at

    end = kv_len                                   # keys from here on are unused
    if not ring:
        last = tl.load(slot + b * slot_stride)
        for i in tl.static_range(1, T):
            last = tl.maximum(last, tl.load(slot + b * slot_stride + i))
        end = tl.minimum(kv_len, last.to(tl.int32) + 1)
    row_max = tl.full([Q, 1], float("-inf"), tl.float32)
    row_sum = tl.zeros([Q, 1], tl.float32)
    acc = tl.zeros([Q, WIDE], tl.float32)
    for first in range(split * S, end, n_split * S):
        s = first + tl.arange(0, S)
        is_s = (s < kv_len)[:, None]
        is_k = is_s & (half < H // 2)
        k1 = tl.load(k_cache + s[:, None] * H + half, is_k, 0)             # [S, HALF]
        k2 = tl.load(k_cache + s[:, None] * H + H // 2 + half, is_k, 0)
        v = tl.load(v_cache + s[:, None] * H + wide, is_s & (wide < H), 0)
        for i in tl.static_range(T):               # new keys and values
            new = tl.load(slot + b * slot_stride + i).to(tl.int32)
            if (new >= first) & (new < first + S):
                is_new = (s == new)[:, None]
                zero = tl.zeros([1, 1], tl.int32)
                is_half = (zero == 0) & (half < H // 2)
                a_at = b * angle_stride + i * (H // 2) + half
                k_at = zero + (b * T + i) * width + (N + head) * H
                n1, n2 = _norm_rope(qkv, k_at, zero == 0, k_norm, eps,
                                    tl.load(cos + a_at, is_half, 0),
                                    tl.load(sin + a_at, is_half, 0), H, HALF)
                nv = tl.load(qkv + k_at + K * H + wide, wide < H, 0)
                tl.store(k_cache + new * H + half, n1, is_half)
                tl.store(k_cache + new * H + H // 2 + half, n2, is_half)
                tl.store(v_cache + new * H + wide, nv, wide < H)
                k1 = tl.where(is_new, n1, k1)
                k2 = tl.where(is_new, n2, k2)
                v = tl.where(is_new, nv, v)
        score = tl.dot(q1, k1.T, input_precision=precision)
        score = tl.dot(q2, k2.T, score, input_precision=precision) * scale             # [Q, S]
        if cap is not None:
            score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)            # tanh
        visible = tl.load(mask + b * mask_stride + t * kv_len + s[None, :],
                       is_q & (s < kv_len)[None, :], 0)
        score = tl.where(visible != 0, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1, keep_dims=True))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)            # no visible key so far
        prob = tl.exp(score - base)
        rescale = tl.exp(row_max - base)
        row_sum = row_sum * rescale + tl.sum(prob, 1, keep_dims=True)
        acc = acc * rescale + tl.dot(prob.to(kind), v, input_precision=precision)
        row_max = new_max

    # this split's result: Q rows of WIDE sums; after those of all splits, the maxima and sums
    first_split = (b * K + head) * n_split
    maxes = partials + tl.num_programs(2) * K * n_split * Q * WIDE
    sums = maxes + tl.num_programs(2) * K * n_split * Q
    tl.store(partials + (first_split + split) * Q * WIDE + q * WIDE + wide, acc)
    tl.store(maxes + (first_split + split) * Q + q, row_max)
    tl.store(sums + (first_split + split) * Q + q, row_sum)
    tl.debug_barrier()                             # all stores precede the counter
    n_before = tl.atomic_add(arrivals + b * K + head, 1, sem="acq_rel", scope="gpu")
    if (n_before + 1) % n_split == 0:
        tl.debug_barrier()
        row_max = tl.full([Q, 1], float("-inf"), tl.float32)
        for p in range(n_split):
            its_max = tl.load(maxes + (first_split + p) * Q + q, cache_modifier=".cg")
            row_max = tl.maximum(row_max, its_max)
        n_head = head * G + q % G
        if sinks is not None:
            sink = tl.load(sinks + n_head, is_q, 0)
            row_max = tl.maximum(row_max, sink)
        row_sum = tl.zeros([Q, 1], tl.float32)
        acc = tl.zeros([Q, WIDE], tl.float32)
        for p in range(n_split):
            its_max = tl.load(maxes + (first_split + p) * Q + q, cache_modifier=".cg")
            prob = tl.where(its_max == float("-inf"), 0.0, tl.exp(its_max - row_max))
            row_sum += prob * tl.load(sums + (first_split + p) * Q + q, cache_modifier=".cg")
            its_acc = partials + (first_split + p) * Q * WIDE + q * WIDE + wide
            acc += prob * tl.load(its_acc, prob > 0, 0, cache_modifier=".cg")
        if sinks is not None:
            row_sum += tl.exp(sink - row_max)
        y_at = (b * T + t) * (N * H) + n_head * H + wide
        tl.store(y + y_at, (acc / row_sum).to(kind), is_q & (wide < H))


def launch(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor,
           mask: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None,
           arrivals: Tensor, scale: float, cap: float | None, eps: float, ring: bool) -> Tensor:
    """qkv [B, T, (N + 2K) H], cos sin [(B, 1,) T, H/2], mask [(B, 1,) T, S], slot [(B,) T], caches
    [B, K, S', H], to which new keys and values are written -> [B, T, N H].
    """
    B, T, width = qkv.shape
    K, n_slot, H = k_cache.shape[1:]
    N = width // H - 2 * K
    Q = max(16, triton.next_power_of_2(N // K * T))
    half = max(16, triton.next_power_of_2(H // 2))
    keys = max(16, BLOCK_KEYS * 256 // max(256, 2 * half * qkv.element_size()))  # shared memory
    n_split = n_splits(B, K, mask.shape[-1])
    partials = torch.empty(B * K * n_split * Q * (2 * half + 2), dtype=torch.float32,
                        device=qkv.device)
    y = qkv.new_empty(B, T, N * H)
    mask = mask.contiguous().view(torch.uint8)
    angle_stride = cos.stride(0) if cos.dim() == 4 else 0
    mask_stride = mask.stride(0) if mask.dim() == 4 else 0
    slot_stride = slot.stride(0) if slot.dim() == 2 else 0
    _, overlap = launch_options(qkv.device)
    _attention[(K, n_split, B)](
        qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, sinks, arrivals, partials, y,
        scale, cap, eps, angle_stride, mask_stride, slot_stride, mask.shape[-1], n_slot, ring,
        N, K, T, H, half, 2 * half, Q, keys, n_split,
        "ieee" if qkv.dtype == torch.float32 else "tf32", bool(overlap),
        num_warps=8 if Q > 32 or half >= 64 else 4, num_stages=2, **overlap)
    return y


def n_splits(B: int, K: int, kv_len: int) -> int:
    """A power of two, independent of the number of queries."""
    n = min(MAX_PROGRAMS // (B * K), triton.cdiv(kv_len, BLOCK_KEYS), MAX_SPLITS)
    return 1 << (max(1, n).bit_length() - 1)
