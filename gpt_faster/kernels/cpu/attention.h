// Attention over a KV cache, for one query or many.
//
// Many queries meet a block of keys in fp32 or bf16 that has been transposed; few read the cache
// itself (direct_attention.h).

#pragma once

#include <cmath>

#include "direct_attention.h"
#include "key_panels.h"
#include "kv_cache.h"
#include "norms.h"
#include "positions.h"
#include "threads.h"

// Applies RoPE to qkv [B, T, N + 2 K, H], writes keys and values to the caches [n_row, K, S, H],
// then computes out [B, T, N, V] = softmax(cap(scale q k')) v over n_key slots, times
// sigmoid(gate [B, T, N, V]) if there is a gate. V < H: the values are the first V elements of the
// cached vectors (MLA). Queries are turned like the keys, and the output like the values.
struct Attention {
  int32_t kind, B, T, N, K, H, V, S, n_row;
  int32_t wide_norm;                           // q_norm and k_norm span all heads (OLMo 2)
  int32_t out_type;
  int32_t has_keys;                            // 0: qkv [B, T, N, H], with another layer's cache
  int32_t rope_applied;                        // MLA: qkv holds rotated queries only
  float scale, cap;                            // cap 0: no soft cap of the scores
  Norm q_norm, k_norm, v_norm;
  Cache k_cache, v_cache;
  const Positions* positions;
  const float *sinks, *gate;                   // sinks [N]; or null
  float* qkv;
  void* out;
};

constexpr int QUERY_BLOCK = 96;                // queries of all heads that share a KV head
// With at most this many queries the cache is read directly. Measured with AVX2: other CPUs multiply
// tiles faster.
constexpr int MAX_DIRECT_QUERIES = LANES > 8 ? 4 : 8;
constexpr int MAX_DIRECT_CODED = LANES > 8 ? 8 : 32;    // of a cache that tiles would dequantize

static void apply_rope(int half, const float* cos, const float* sin, float* x) {
  for (int i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

static inline int qkv_width(const Attention& op) {                // per token
  return (op.N + (op.has_keys ? 2 * op.K : 0)) * op.H;
}

static inline long cache_index(const Attention& op, int b, int head, long slot) {
  long row = op.positions->rows ? op.positions->rows[b] : b;
  return (row * op.K + head) * op.S + slot;
}

static void rope_and_cache(const Attention& op, int b, int t) {
  float* q = op.qkv + ((long)b * op.T + t) * qkv_width(op);
  float *k = q + op.N * op.H, *v = k + op.K * op.H;
  const float* cos = op.positions->cos + b * op.positions->rope_stride_b + t * (op.H / 2);
  const float* sin = op.positions->sin + b * op.positions->rope_stride_b + t * (op.H / 2);
  if (op.wide_norm) {
    normalize(op.q_norm, op.N * op.H, q);
    normalize(op.k_norm, op.K * op.H, k);
  }
  for (int i = 0; i < op.N + (op.has_keys ? op.K : 0); i++) {
    float* x = q + i * op.H;
    if (!op.wide_norm) normalize(i < op.N ? op.q_norm : op.k_norm, op.H, x);
    apply_rope(op.H / 2, cos, sin, x);
    if (i < op.N) turn(op.k_cache.turn, op.H, x);
  }
  if (!op.has_keys) return;
  for (int i = 0; i < op.K; i++) normalize(op.v_norm, op.H, v + i * op.H);
  long slot = cache_slot(op.positions, b, t);
  write_vectors(op.k_cache, cache_index(op, b, 0, slot), op.S, op.K, op.H, k);
  write_vectors(op.v_cache, cache_index(op, b, 0, slot), op.S, op.K, op.H, v);
}

struct QueryBlock {                            // queries [t0, t1) of the heads that share a KV head
  int b, kv_head, t0, t1;
  int key0, key1;                              // keys [key0, key1) to attend to
};

struct SoftmaxState {                          // online softmax: running max, sum, unscaled output
  float *max, *sum, *out;                      // [queries], [queries], [queries, Vp]
};

static const uint8_t* mask_row(const Attention& op, int b, int t) {
  return op.positions->mask + b * op.positions->mask_stride_b + t * op.positions->mask_stride_t;
}

// The smallest range of keys [*first, *last) that holds all keys visible to queries [t0, t1)
static void visible_range(const Attention& op, int b, int t0, int t1, int* first, int* last) {
  *first = op.positions->n_key;
  *last = 0;
  for (int t = t0; t < t1; t++) {
    const uint8_t* mask = mask_row(op, b, t);
    int end = op.positions->n_key;
    while (end - 8 >= *last && load<uint64_t>(mask + end - 8) == 0) end -= 8;
    while (end > *last && !mask[end - 1]) end--;
    *last = std::max(*last, end);
    int begin = 0;
    while (begin + 8 <= *first && load<uint64_t>(mask + begin) == 0) begin += 8;
    while (begin < *first && !mask[begin]) begin++;
    *first = std::min(*first, begin);
  }
  *first = std::min(*first, *last);
}

// Packs bf16 values v [n, V] (row stride H) into [end / 2, Vp, 2], interleaving adjacent tokens;
// rows from n on are zero
static void pair_values(const uint16_t* v, int n, int end, int V, int H, int Vp, int32_t* to) {
  for (int j = 0; j < end; j += 2) {
    const uint16_t *first = v + j * H, *second = first + H;
    int32_t* pairs = to + j / 2 * Vp;
    if (j >= n)
      memset(pairs, 0, 4 * V);
    else if (j + 1 < n)
      for (int h = 0; h < V; h++) pairs[h] = first[h] | second[h] << 16;
    else
      for (int h = 0; h < V; h++) pairs[h] = first[h];
  }
}

// One step of the online softmax: scores s [KEY_BLOCK] of n keys become exp(score - *max); also
// updates *max, and rescales *sum and out [Vp] to match. is_masked: some of the keys are masked.
// APPROXIMATE: accurate enough for a bf16 cache. AS_BF16: stores the exponentials as bf16.
template <bool APPROXIMATE, bool AS_BF16>
static void online_softmax(const Attention& op, const uint8_t* mask, bool is_masked, int n,
                           float* s, float* max, float* sum, float* out, int Vp) {
  int end = round_up(n, NR);
  if (op.cap)
    for (int j = 0; j < end; j += LANES) store(s + j, op.cap * tanh_of(load<vf>(s + j) / op.cap));
  if (is_masked)
    for (int j = 0; j < n; j++) s[j] = mask[j] ? s[j] : -INFINITY;
  for (int j = n; j < end; j++) s[j] = -INFINITY;
  vf maxima = load<vf>(s);
  for (int j = LANES; j < end; j += LANES) maxima = max_of(maxima, load<vf>(s + j));
  float new_max = std::max(*max, horizontal_max(maxima));
  if (new_max == -INFINITY) {                  // no visible key, now or before
    memset(s, 0, 4 * end);
    return;
  }
  vf sums = {};
  for (int j = 0; j < end; j += LANES) {
    constexpr float LOG2_E = 1.44269504f;
    vf p = APPROXIMATE ? exp2_approx(load<vf>(s + j) * LOG2_E - new_max * LOG2_E)
                       : exp_of(load<vf>(s + j) - new_max);
    sums += p;
    if (!AS_BF16) store(s + j, p);
    else write_floats((const float*)&p, LANES, s, BF16, j);       // in place
  }
  if (new_max > *max) {
    float rescale = *max == -INFINITY ? 0 : std::exp(*max - new_max);
    for (int h = 0; h < Vp; h += LANES) store(out + h, load<vf>(out + h) * rescale);
    *sum *= rescale;
    *max = new_max;
  }
  *sum += horizontal_sum(sums);
}

// Can this many rows read the cache directly?
static bool is_direct(const Attention& op, int n_row) {
  int max_row = op.k_cache.scales && op.v_cache.scales ? MAX_DIRECT_CODED : MAX_DIRECT_QUERIES;
  return n_row <= max_row && is_direct(op.k_cache, op.H) && is_direct(op.v_cache, op.H) &&
         op.V % NR == 0;
}

// Vectors [i, i + n) of the cache -> bf16 [n, ld], the first V elements of each; scratch [H]
static void read_as_bf16(const Cache& cache, long i, int n, int H, int V, int ld, float* scratch,
                         uint16_t* to) {
  for (int j = 0; j < n; j++) {
    read_vectors(cache, i + j, 1, H, V, scratch, V);
    write_floats(scratch, V, to, BF16, (long)j * ld);
  }
}

// Flash attention of the query block over its keys, KEY_BLOCK at a time -> state. Tile: the format
// of transposed keys and of values.
template <class Tile>
static void attend(const Attention& op, const QueryBlock& block, const SoftmaxState& state) {
  constexpr bool USE_BF16_DOT = HAS_BF16 && sizeof(Tile) == 2;
  int H = op.H, V = op.V, Hp = round_up(H, NR), Vp = round_up(V, NR);
  int heads_per_kv = op.N / op.K;
  int width = qkv_width(op);
  int n_query = (block.t1 - block.t0) * heads_per_kv;
  bool has_direct_codes = op.k_cache.scales && is_direct(op, n_query);
  bool has_int_queries = has_direct_codes && op.k_cache.type != FP8;
  float q_scale = has_direct_codes && op.k_cache.type == FP8 ? op.scale * FP8_UNIT : op.scale;
  size_t n_int_float = has_int_queries ? IntQueries::n_float(n_query, H) : 0;
  float* q = reserve(thread_scratch, (size_t)n_query * (2 * Hp + KEY_BLOCK) + 3 * KEY_BLOCK * Hp
                                         + n_int_float);
  float* score = q + n_query * Hp;
  float *k = score + n_query * KEY_BLOCK, *v = k + KEY_BLOCK * Hp;
  float* transposed = v + KEY_BLOCK * Hp;
  float* q_pairs = transposed + KEY_BLOCK * Hp;
  IntQueries int_q(q_pairs + n_query * Hp, n_query, H);
  for (int r = 0; r < n_query; r++) {
    int t = block.t0 + r / heads_per_kv;
    int head = block.kv_head * heads_per_kv + r % heads_per_kv;
    const float* from = op.qkv + ((long)block.b * op.T + t) * width + head * H;
    for (int h = 0; h < H; h++) q[r * Hp + h] = from[h] * q_scale;
    std::fill(q + r * Hp + H, q + (r + 1) * Hp, 0.0f);
    if (has_int_queries) int_q.quantize(r, q + r * Hp, H, op.k_cache.type == INT4);
    state.max[r] = -INFINITY;
    state.sum[r] = 0;
  }
  if (USE_BF16_DOT) write_floats(q, n_query * Hp, q_pairs, BF16, 0);
  memset(state.out, 0, 4 * (size_t)n_query * Vp);
  if (H < Hp) memset(k, 0, 8 * (size_t)KEY_BLOCK * Hp);
  for (int key = block.key0; key < block.key1; key += KEY_BLOCK) {
    int n = std::min(KEY_BLOCK, block.key1 - key);
    int n_pair = amx_enabled() ? round_up(n, NR) / 2 : (n + 1) / 2;
    int first_t = block.t0;                    // the first query that sees any of these keys
    while (first_t < block.t1 && !memchr(mask_row(op, block.b, first_t) + key, 1, n)) first_t++;
    int first_row = (first_t - block.t0) * heads_per_kv;
    int n_row = n_query - first_row;
    if (n_row == 0) continue;
    long first_key = cache_index(op, block.b, block.kv_head, key);
    float *s = score + first_row * KEY_BLOCK, *out = state.out + first_row * Vp;
    bool direct = op.k_cache.scales ? has_direct_codes : is_direct(op, n_row);
    if (direct) {
      direct_scores(op.k_cache, first_key, n, H, n_row, q + first_row * Hp,
                    int_q.from_row(first_row, H, op.k_cache.type == INT4), k, s);
    } else if (USE_BF16_DOT) {
      const uint16_t* keys = (const uint16_t*)vector_address(op.k_cache, first_key, H);
      const uint16_t* values = (const uint16_t*)vector_address(op.v_cache, first_key, H);
      int value_stride = H;
      if (H < Hp || op.k_cache.type != BF16) {
        read_as_bf16(op.k_cache, first_key, n, H, H, Hp, transposed, (uint16_t*)k);
        keys = (const uint16_t*)k;
      }
      if (op.v_cache.type != BF16) {           // the keys take the first half of k
        uint16_t* to = (uint16_t*)k + KEY_BLOCK * Hp;
        value_stride = Vp;
        read_as_bf16(op.v_cache, first_key, n, H, V, value_stride, transposed, to);
        values = to;
      }
      pair_values(values, n, 2 * n_pair, V, value_stride, Vp, (int32_t*)v);
      transpose_keys((const int32_t*)keys, n, Hp / 2, (int32_t*)transposed);
      for (int j = 0; j < n; j += NR)
        gemm_panel(n_row, (const int32_t*)transposed + j * Hp / 2, NR, Hp / 2,
                   (const int32_t*)q_pairs + first_row * Hp / 2, Hp / 2, s + j, KEY_BLOCK, false);
    } else {
      read_vectors(op.v_cache, first_key, n, H, V, v, Vp);
      read_keys(op.k_cache, first_key, n, H, k, transposed);
      for (int j = 0; j < n; j += NR)
        gemm_panel(n_row, transposed + j * Hp, NR, Hp, q + first_row * Hp, Hp, s + j, KEY_BLOCK,
                   false);
    }
    auto softmax = direct ? online_softmax<false, false>
                          : online_softmax<sizeof(Tile) == 2, USE_BF16_DOT>;
    for (int t = first_t; t < block.t1; t++) {
      const uint8_t* mask = mask_row(op, block.b, t) + key;
      bool is_masked = memchr(mask, 0, n);
      for (int r = (t - block.t0) * heads_per_kv; r < (t - block.t0 + 1) * heads_per_kv; r++)
        softmax(op, mask, is_masked, n, score + r * KEY_BLOCK, state.max + r, state.sum + r,
                state.out + r * Vp, Vp);
    }
    if (direct) {
      add_values(op.v_cache, first_key, n, H, V, n_row, s, k, transposed, out, Vp);
      continue;
    }
    for (int h = 0; h < Vp; h += NR) {
      if (USE_BF16_DOT)
        gemm_panel(n_row, (const int32_t*)v + h, Vp, n_pair, (const int32_t*)s, KEY_BLOCK,
                   out + h, Vp, true);
      else gemm_panel(n_row, v + h, Vp, n, s, KEY_BLOCK, out + h, Vp, true);
    }
  }
}

// Merges the states of query r's n_split key splits, `stride` floats apart -> out
static void merge_splits(const Attention& op, const QueryBlock& block, int r,
                         const SoftmaxState& first, int n_split, long stride) {
  int Vp = round_up(op.V, NR);
  int heads_per_kv = op.N / op.K;
  int t = block.t0 + r / heads_per_kv;
  int head = block.kv_head * heads_per_kv + r % heads_per_kv;
  float max = op.sinks ? op.sinks[head] : -INFINITY;
  float sum = 0;
  for (int i = 0; i < n_split; i++) max = std::max(max, first.max[r + i * stride]);
  if (op.sinks) sum = std::exp(op.sinks[head] - max);
  std::vector<float> y(2 * Vp, 0.0f);
  for (int i = 0; i < n_split; i++) {
    if (first.max[r + i * stride] == -INFINITY) continue;
    float weight = std::exp(first.max[r + i * stride] - max);
    sum += weight * first.sum[r + i * stride];
    for (int h = 0; h < op.V; h++) y[h] += weight * first.out[r * Vp + h + i * stride];
  }
  for (int h = 0; h < op.V; h++) y[h] /= sum;
  turn(op.v_cache.turn, op.V, y.data());
  long offset = (((long)block.b * op.T + t) * op.N + head) * op.V;
  if (op.gate) {
    float* gate = y.data() + Vp;
    copy_floats(op.gate + offset, op.V, gate);
    for (int h = 0; h < Vp; h += LANES)
      store(&y[h], load<vf>(&y[h]) * reciprocal(1.0f + exp_of(-load<vf>(gate + h))));
  }
  write_floats(y.data(), op.V, op.out, op.out_type, offset);
}

struct AttentionPlan {
  int heads_per_kv, block_t, n_t_block;
  int n_block;                                 // query blocks
  int n_split;                                 // of each block's keys, if there are few blocks
  size_t state_size;                           // floats of a block's softmax state

  AttentionPlan(const Attention& op, int n_thread) {
    heads_per_kv = op.N / op.K;
    block_t = std::max(1, std::min(op.T, QUERY_BLOCK / heads_per_kv));
    n_t_block = (op.T + block_t - 1) / block_t;
    n_block = op.B * op.K * n_t_block;
    n_split = 1;
    if (n_block < 4 * n_thread)
      n_split = std::min((4 * n_thread + n_block - 1) / n_block, (int)op.positions->n_key / 128);
    n_split = std::max(1, n_split);
    state_size = (size_t)block_t * heads_per_kv * (round_up(op.V, NR) + 2);
  }

  SoftmaxState softmax_state(float* memory, int i) const {
    float* state = memory + i * state_size;
    return {state, state + block_t * heads_per_kv, state + 2 * block_t * heads_per_kv};
  }

  QueryBlock query_block(const Attention& op, int i) const {      // longest first: the last queries
    int t_block = n_t_block - 1 - i / (op.B * op.K);
    int rest = i % (op.B * op.K);
    QueryBlock block = {rest / op.K, rest % op.K, t_block * block_t,
                        std::min(op.T, (t_block + 1) * block_t), 0, 0};
    visible_range(op, block.b, block.t0, block.t1, &block.key0, &block.key1);
    return block;
  }
};

// bf16 tiles: for a bf16 cache, and for codes in a bf16 model
static bool has_bf16_tiles(const Attention& op) {
  bool has_codes = op.k_cache.scales || op.v_cache.scales;
  return op.k_cache.type == BF16 || op.v_cache.type == BF16 || (has_codes && op.out_type == BF16);
}

static void attention(const Attention& op, Phase* phase, int n_thread) {
  if (!op.rope_applied)
    run_tasks(phase[0], op.B * op.T, 2, [&](int i) { rope_and_cache(op, i / op.T, i % op.T); });
  AttentionPlan plan(op, n_thread);
  float* memory = reserve(shared_scratch, 0);
  auto write = [&](const QueryBlock& block, const SoftmaxState& state, int n_split) {
    for (int r = 0; r < (block.t1 - block.t0) * plan.heads_per_kv; r++)
      merge_splits(op, block, r, state, n_split, plan.state_size);
  };
  run_tasks(phase[1], plan.n_block * plan.n_split, 1, [&](int i) {
    QueryBlock block = plan.query_block(op, i / plan.n_split);
    int n_key = (block.key1 - block.key0 + plan.n_split - 1) / plan.n_split;
    block.key0 += i % plan.n_split * round_up(n_key, NR);
    block.key1 = std::min(block.key1, block.key0 + round_up(n_key, NR));
    SoftmaxState state = plan.softmax_state(memory, plan.n_split > 1 ? i : thread_index());
    if (has_bf16_tiles(op)) attend<uint16_t>(op, block, state);
    else attend<float>(op, block, state);
    if (plan.n_split == 1) write(block, state, 1);
  });
  if (plan.n_split > 1)
    run_tasks(phase[2], plan.n_block, 1, [&](int i) {
      write(plan.query_block(op, i), plan.softmax_state(memory, i * plan.n_split), plan.n_split);
    });
}
