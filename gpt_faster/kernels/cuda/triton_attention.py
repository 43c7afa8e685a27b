"""RoPE, cache update and attention of a few queries on a GPU, in Triton (flash decoding).

The keys in use are split over programs; the last program to finish combines the partial results.
How many splits have keys is read from device memory, so that one compiled step serves every length:
the other programs of the grid leave at once. New keys and values never come from the cache: split 0
takes them from qkv and stores them, and all programs ignore what their slots hold. Keys and
values of a quantized cache stay turned: queries are turned, and the result is turned back. Imported
on a GPU only.

    y = launch(qkv, None, None, cos, sin, mask, slot, k_cache, v_cache, None, arrivals, scale, …)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpt_faster.kernels.cuda import triton_cache
from gpt_faster.kernels.cuda.triton_matvec import launch_options

BLOCK_KEYS = 64                                    # per block, fewer for wide heads
MAX_PROGRAMS = 256                                 # about two per multiprocessor
MAX_SPLITS = 64
MAX_PARTIALS = 64                                  # fp32 sums that a thread loads at once
MIN_QUERIES = 16 if torch.version.hip else 8       # columns of a tile of the matrix cores


@triton.jit
def _load_heads(x, offset, is_row, norm, cos, sin, angle, H: tl.constexpr, WIDE: tl.constexpr):
    """Heads at x + offset [n, 1], each element with its partner of RoPE, and what _rope() needs.

    angle [n, 1]: where each row's cos and sin begin.
    """
    h = tl.arange(0, WIDE)[None, :]
    is_first = h < H // 2
    partner = tl.where(is_first, h + H // 2, h - H // 2)
    turn = angle + tl.where(is_first, h, h - H // 2)
    is_h = is_row & (h < H)
    norms = (None, None)
    if norm is not None:
        norms = (tl.load(norm + h, h < H, 0), tl.load(norm + partner, h < H, 0))
    return (tl.load(x + offset + h, is_h, 0), tl.load(x + offset + partner, is_h, 0),
            tl.load(cos + turn, is_h, 0), tl.load(sin + turn, is_h, 0), norms)


@triton.jit
def _rope(heads, eps, H: tl.constexpr, WIDE: tl.constexpr):
    """_load_heads() -> heads [n, WIDE], normalized and rotated."""
    a, b, cos, sin, norms = heads
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if norms[0] is not None:
        inverse = tl.rsqrt(tl.sum(a * a, 1, keep_dims=True) / H + eps)
        a = (a * inverse * norms[0]).to(kind).to(tl.float32)
        b = (b * inverse * norms[1]).to(kind).to(tl.float32)
    is_first = tl.arange(0, WIDE)[None, :] < H // 2
    return (a * cos + tl.where(is_first, -b, b) * sin).to(kind)


@triton.jit
def _attend(q, k, v, visible, scale, cap, row_max, row_sum, acc, precision: tl.constexpr):
    """One block of keys: q [Q, WIDE], k v [S, WIDE], visible [S, Q] -> the state with it added.

    Keys are the rows of both products: few queries are few columns.
    """
    score = tl.dot(k, q.T, input_precision=precision) * scale              # [S, Q]
    if cap is not None:
        score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)                # tanh
    score = tl.where(visible, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 0, keep_dims=True))        # [1, Q]
    base = tl.where(new_max == float("-inf"), 0.0, new_max)                # no visible key so far
    prob = tl.exp(score - base)
    rescale = tl.exp(row_max - base)
    row_sum = row_sum * rescale + tl.sum(prob, 0, keep_dims=True)
    acc = tl.dot(prob.to(v.dtype).T, v, acc * rescale.T, input_precision=precision)    # [Q, WIDE]
    return new_max, row_sum, acc


@triton.jit
def _slots(new_slots, T: tl.constexpr, R: tl.constexpr):
    """The tuple of new slots as a tensor [R], R >= T."""
    n = tl.arange(0, R)
    slots = tl.zeros([R], tl.int32)
    for i in tl.static_range(T):
        slots = tl.where(n == i, new_slots[i], slots)
    return slots


@triton.jit
def _is_old(s, end, new_slots, T: tl.constexpr):
    """Do these slots [S] hold keys in use that were there before this step?"""
    is_old = s < end
    for i in tl.static_range(T):
        is_old = is_old & (s != new_slots[i])
    return is_old


@triton.jit
def _repeat(x, NEW: tl.constexpr):
    """x [R, WIDE] -> [NEW, WIDE], the rows over and over."""
    R: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1]
    if R < NEW:
        x = x[None].broadcast_to(NEW // R, R, WIDE).reshape(NEW, WIDE)
    return x


@triton.jit
def _combine(partials, maxes, sums, first_split, n_active, N_ROW: tl.constexpr, R: tl.constexpr,
             WIDE: tl.constexpr, AT: tl.constexpr):
    """Add up n_active splits, AT at a time: all loads of a turn are in flight together.

    -> the maxima and sums [1, R], acc [R, WIDE], R >= N_ROW queries.
    """
    r = tl.arange(0, R)[None, :]
    wide = tl.arange(0, WIDE)[None, None, :]
    row_max = tl.full([1, R], float("-inf"), tl.float32)
    row_sum = tl.zeros([1, R], tl.float32)
    acc = tl.zeros([R, WIDE], tl.float32)
    for first in range(0, n_active, AT):
        p = first + tl.arange(0, AT)[:, None]
        row = (first_split + p) * N_ROW + r                                # [AT, R]
        is_row = (p < n_active) & (r < N_ROW)
        its_acc = tl.load(partials + row[:, :, None] * WIDE + wide, is_row[:, :, None], 0,
                          cache_modifier=".cg")                            # [AT, R, WIDE]
        its_max = tl.load(maxes + row, is_row, float("-inf"), cache_modifier=".cg")
        its_sum = tl.load(sums + row, is_row, 0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(its_max, 0, keep_dims=True))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)            # no visible key so far
        share = tl.exp(its_max - base)
        rescale = tl.exp(row_max - base)
        row_sum = row_sum * rescale + tl.sum(its_sum * share, 0, keep_dims=True)
        acc = acc * rescale.T + tl.sum(its_acc * share[:, :, None], 0)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _write(y, sinks, row_max, row_sum, acc, head, b, N: tl.constexpr, G: tl.constexpr,
           T: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
           V_TURN: tl.constexpr):
    """y = the average of the values; row_max, row_sum [1, R], acc [R, WIDE]."""
    r = tl.arange(0, R)
    n_head = head * G + r % G
    is_row = r < T * G
    if sinks is not None:
        sink = tl.load(sinks + n_head, is_row, 0)[None, :]
        new_max = tl.maximum(row_max, sink)
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.exp(sink - new_max)
        acc = acc * rescale.T
    wide = tl.arange(0, WIDE)[None, :]
    at = ((b * T + r // G) * N + n_head)[:, None] * H + wide
    average = acc / row_sum.T
    average = triton_cache.turn(average, V_TURN)                           # back
    tl.store(y + at, average.to(y.dtype.element_ty), is_row[:, None] & (wide < H))


@triton.jit
def _attention(qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, k_scale, v_scale,
               sinks, arrivals, partials, y, scale, cap, eps, angle_stride, mask_stride,
               slot_stride, kv_len, n_slot, ring: tl.constexpr, N: tl.constexpr,
               K: tl.constexpr, T: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
               Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
               NEW: tl.constexpr, n_split: tl.constexpr, AT: tl.constexpr,
               K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_TURN: tl.constexpr,
               V_TURN: tl.constexpr, precision: tl.constexpr, use_pdl: tl.constexpr):
    if use_pdl:                                    # let the next kernel load its weights
        gdc_launch_dependents()
        gdc_wait()                                 # wait for qkv
    G: tl.constexpr = N // K                       # queries per key head
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width: tl.constexpr = (N + 2 * K) * H          # of a row of qkv
    q = tl.arange(0, Q)
    t = q // G
    is_q = q < T * G
    n_head = head * G + q % G
    n = tl.arange(0, ROWS)
    is_new = n < T
    wide = tl.arange(0, WIDE)[None, :]

    # Loads first, before anything waits for one of them.
    q_at = ((b * T + t) * width + n_head * H)[:, None]
    k_at = ((b * T + n) * width + (N + head) * H)[:, None]
    q_heads = _load_heads(qkv, q_at, is_q[:, None], q_norm, cos, sin,
                          (b * angle_stride + t * (H // 2))[:, None], H, WIDE)
    k_heads = _load_heads(qkv, k_at, (is_new & (split == 0))[:, None], k_norm, cos, sin,
                          (b * angle_stride + n * (H // 2))[:, None], H, WIDE)
    new_v = tl.load(qkv + k_at + K * H + wide, (is_new & (split == 0))[:, None] & (wide < H), 0)
    new_slots, end = (), 0
    for i in tl.static_range(T):
        new_slots += (tl.load(slot + b * slot_stride + i).to(tl.int32),)
    new = _slots(new_slots, T, ROWS)
    tile = _slots(new_slots, T, NEW)

    first_slot = (b * K + head).to(tl.int64) * n_slot
    k_cache += first_slot * (H // 2 if K_KIND == "int4" else H)
    v_cache += first_slot * (H // 2 if V_KIND == "int4" else H)
    if k_scale is not None:
        n_scale: tl.constexpr = (H + triton_cache.GROUP - 1) // triton_cache.GROUP
        k_scale += first_slot * n_scale
        v_scale += first_slot * n_scale
    kind = qkv.dtype.element_ty
    new_k = tl.zeros([ROWS, WIDE], kind)
    if split == 0:                                 # no program reads these slots
        new_k = _rope(k_heads, eps, H, WIDE)
        new_k = triton_cache.store(k_cache, k_scale, new, new_k, is_new, H, WIDE, K_KIND, K_TURN)
        new_v = triton_cache.store(v_cache, v_scale, new, new_v, is_new, H, WIDE, V_KIND, V_TURN)

    for i in tl.static_range(T):                   # the cache's later keys are unused
        end = tl.maximum(end, new_slots[i])
    end = kv_len if ring else tl.minimum(kv_len, end)
    n_active = tl.maximum(1, tl.minimum(tl.cdiv(end, S), n_split))
    if split >= n_active:
        return

    s = split * S + tl.arange(0, S)
    is_old = _is_old(s, end, new_slots, T)
    mask += b * mask_stride + t[None, :] * kv_len                          # [1, Q]
    next_visible = tl.load(mask + s[:, None], is_old[:, None] & is_q[None, :], 0)
    if k_scale is not None:
        next_k = triton_cache.load(k_cache, s, is_old, H, WIDE, K_KIND)
        next_v = triton_cache.load(v_cache, s, is_old, H, WIDE, V_KIND)
        next_k_scale = triton_cache.load_scales(k_scale, s, is_old, H, WIDE)
        next_v_scale = triton_cache.load_scales(v_scale, s, is_old, H, WIDE)
    is_tile = tl.arange(0, NEW)[:, None] < T
    new_visible = tl.load(mask + tile[:, None], is_tile & is_q[None, :], 0)
    qs = _rope(q_heads, eps, H, WIDE)
    if K_TURN > 0:
        qs = triton_cache.turn(qs.to(tl.float32), K_TURN).to(kind)
    row_max = tl.full([1, Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([1, Q], tl.float32)
    acc = tl.zeros([Q, WIDE], tl.float32)
    for first in range(split * S, end, n_split * S):
        s = first + tl.arange(0, S)
        visible = next_visible != 0
        s_next = s + n_split * S
        is_next = _is_old(s_next, end, new_slots, T)
        next_visible = tl.load(mask + s_next[:, None], is_next[:, None] & is_q[None, :], 0)
        if k_scale is None:                        # Triton asks for these a turn ahead
            is_old = _is_old(s, end, new_slots, T)
            k = triton_cache.load(k_cache, s, is_old, H, WIDE, K_KIND)     # [S, WIDE]
            v = triton_cache.load(v_cache, s, is_old, H, WIDE, V_KIND)
        else:                                      # as codes, decoded once and not in each warp
            k = triton_cache.decode(next_k, next_k_scale, K_KIND).to(kind)
            v = triton_cache.decode(next_v, next_v_scale, V_KIND).to(kind)
            next_k = triton_cache.load(k_cache, s_next, is_next, H, WIDE, K_KIND)
            next_v = triton_cache.load(v_cache, s_next, is_next, H, WIDE, V_KIND)
            next_k_scale = triton_cache.load_scales(k_scale, s_next, is_next, H, WIDE)
            next_v_scale = triton_cache.load_scales(v_scale, s_next, is_next, H, WIDE)
        row_max, row_sum, acc = _attend(qs, k, v, visible, scale, cap, row_max, row_sum, acc,
                                        precision)
    if split == 0:
        row_max, row_sum, acc = _attend(qs, _repeat(new_k, NEW), _repeat(new_v, NEW),
                                        new_visible != 0, scale, cap, row_max, row_sum, acc,
                                        precision)

    if n_active == 1:
        _write(y, sinks, row_max, row_sum, acc, head, b, N, G, T, H, Q, WIDE,
               V_TURN)
    else:
        # the sums of each split's queries; after those of all splits, maxima and sums of weights
        n_row: tl.constexpr = T * G
        first_split = (b * K + head) * n_split
        maxes = partials + tl.num_programs(2) * K * n_split * n_row * WIDE
        sums = maxes + tl.num_programs(2) * K * n_split * n_row
        row = (first_split + split) * n_row + q
        tl.store(partials + row[:, None] * WIDE + wide, acc, is_q[:, None])
        tl.store(maxes + row[None, :], row_max, is_q[None, :])
        tl.store(sums + row[None, :], row_sum, is_q[None, :])
        tl.debug_barrier()                         # all stores precede the counter
        counter = arrivals + b * K + head
        n_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if n_before == n_active - 1:
            tl.debug_barrier()
            tl.store(counter, 0)                   # for the next launch
            all_max, all_sum, all_acc = _combine(partials, maxes, sums, first_split, n_active,
                                                 n_row, R, WIDE, AT)
            _write(y, sinks, all_max, all_sum, all_acc, head, b, N, G, T, H, R, WIDE, V_TURN)


def launch(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor,
           mask: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None,
           arrivals: Tensor, scale: float, cap: float | None, eps: float, ring: bool,
           k_scale: Tensor | None = None, v_scale: Tensor | None = None, k_turn: int = 1,
           v_turn: int = 1) -> Tensor:
    """qkv [B, T, (N + 2K) H], cos sin [(B, 1,) T, H/2], mask [(B, 1,) T, S], slot [(B,) T], caches
    [B, K, S', H], to which new keys and values are written -> [B, T, N H]. k_scale, v_scale,
    k_turn, v_turn: of layers/quantized_cache.py, whose codes the caches are then.
    """
    B, T, width = qkv.shape
    K, n_slot, _ = k_cache.shape[1:]
    H = 2 * cos.shape[-1]
    kinds = [triton_cache.KINDS.get(cache.dtype, "plain") for cache in (k_cache, v_cache)]
    k_cache, v_cache = (cache.view(torch.uint8) if kind == "fp8" else cache
                        for cache, kind in zip((k_cache, v_cache), kinds))
    N = width // H - 2 * K
    rows = triton.next_power_of_2(N // K * T)
    Q = max(MIN_QUERIES, rows)
    wide = max(32, triton.next_power_of_2(H))
    keys = max(16, BLOCK_KEYS * 256 // max(256, wide * qkv.element_size()))    # shared memory
    if rows > 64:                                  # registers
        keys = max(16, keys // 2)
    if rows > 16 and k_scale is not None:          # codes of the next block too
        keys = max(16, keys // 2)
    n_split = n_splits(B, K, mask.shape[-1])
    n_warp = 8 if Q > 32 else 4
    new = max(16, triton.next_power_of_2(T))       # a tile of the matrix cores
    n_row = new if k_scale is None else triton.next_power_of_2(T)          # rows to encode
    partials = torch.empty(B * K * n_split * (N // K * T) * (wide + 2), dtype=torch.float32,
                           device=qkv.device)
    y = qkv.new_empty(B, T, N * H)
    mask = mask.contiguous().view(torch.uint8)
    angle_stride = cos.stride(0) if cos.dim() == 4 else 0
    mask_stride = mask.stride(0) if mask.dim() == 4 else 0
    slot_stride = slot.stride(0) if slot.dim() == 2 else 0
    _, overlap = launch_options(qkv.device)
    at_once = min(n_split, max(1, MAX_PARTIALS * 32 * n_warp // (rows * wide)))
    _attention[(K, n_split, B)](
        qkv, q_norm, k_norm, cos, sin, mask, slot, k_cache, v_cache, k_scale, v_scale, sinks,
        arrivals, partials, y, scale, cap, eps, angle_stride, mask_stride, slot_stride,
        mask.shape[-1], n_slot, ring, N, K, T, H, wide, Q, rows, keys, n_row, new, n_split,
        at_once, *kinds, k_turn.bit_length() - 1, v_turn.bit_length() - 1,
        "ieee" if qkv.dtype == torch.float32 else "tf32", bool(overlap),
        num_warps=n_warp, num_stages=2, **overlap)
    return y


def n_splits(B: int, K: int, kv_len: int) -> int:
    """A power of two, independent of the number of queries."""
    n = min(MAX_PROGRAMS // (B * K), triton.cdiv(kv_len, BLOCK_KEYS), MAX_SPLITS)
    return 1 << (max(1, n).bit_length() - 1)
