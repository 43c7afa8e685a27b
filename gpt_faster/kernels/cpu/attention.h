// Attention over a cache, for one query or many.

#pragma once

#include <cmath>
#include <omp.h>

#include "blocks.h"
#include "norms.h"
#include "positions.h"
#include "threads.h"

// RoPE of qkv [B, T, N + 2 K, H], the write of keys and values to slots of the caches
// [n_row, K, S, H], softmax(cap(q k' scale)) v of the first n_key slots -> out [B, T, N, V], times
// the sigmoid of a gate of its shape if there is one. V is H, or as much of a key as is its value.
struct Attention {
  int32_t kind, B, T, N, K, H, V, S, n_row, cache_type, wide_norm, out_type;      // n_row: of the caches
  int32_t has_keys;                            // else qkv are queries, and the cache another layer's
  int32_t is_turned;                           // or these are as they meet the keys
  float scale, cap;
  Norm q_norm, k_norm, v_norm;
  const Positions* at;
  const float *sinks, *gate;
  float* qkv;
  void *k_cache, *v_cache, *out;
};

constexpr int KEYS = HAS_BF16 ? 256 : 64;      // at a time
constexpr int QUERIES = 96;                    // heads that share keys are queries side by side
constexpr int FEW = 4;                         // of which each takes its own sums over a key

static void rotate(int half, const float* cos, const float* sin, float* x) {
  for (int i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

static inline int width_of(const Attention& op) {                 // of a token's qkv
  return (op.N + (op.has_keys ? 2 * op.K : 0)) * op.H;
}

static inline long cache_at(const Attention& op, int b, int head, long slot) {
  long row = op.at->rows ? op.at->rows[b] : b;
  return ((row * op.K + head) * op.S + slot) * op.H;
}

static void write_keys(const Attention& op, int b, int t) {
  float* q = op.qkv + ((long)b * op.T + t) * width_of(op);
  float *k = q + op.N * op.H, *v = k + op.K * op.H;
  const float* cos = op.at->cos + b * op.at->angle_b + t * (op.H / 2);
  const float* sin = op.at->sin + b * op.at->angle_b + t * (op.H / 2);
  if (op.wide_norm) {
    normalize(op.q_norm, op.N * op.H, q);
    normalize(op.k_norm, op.K * op.H, k);
  }
  for (int i = 0; i < op.N + (op.has_keys ? op.K : 0); i++) {
    float* x = q + i * op.H;
    if (!op.wide_norm) normalize(i < op.N ? op.q_norm : op.k_norm, op.H, x);
    rotate(op.H / 2, cos, sin, x);
  }
  if (!op.has_keys) return;
  for (int i = 0; i < op.K; i++) normalize(op.v_norm, op.H, v + i * op.H);
  long slot = position(op.at, b, t);
  for (int i = 0; i < op.K; i++) {
    write_floats(k + i * op.H, op.H, op.k_cache, op.cache_type, cache_at(op, b, i, slot));
    write_floats(v + i * op.H, op.H, op.v_cache, op.cache_type, cache_at(op, b, i, slot));
  }
}

struct Task {
  int b, head, t0, t1, key0, key1;             // queries [t0, t1) of the heads that share one
};

struct Softmax {                               // of a task's queries, over the keys so far
  float *top, *sum, *out;                      // [queries], [queries], [queries, Hp]
};

static const uint8_t* mask_of(const Attention& op, int b, int t) {
  return op.at->mask + b * op.at->mask_b + t * op.at->mask_t;
}

// keys that any of the queries sees: from the first to the last, [first, last)
static void seen(const Attention& op, int b, int t0, int t1, int* first, int* last) {
  *first = op.at->n_key;
  *last = 0;
  for (int t = t0; t < t1; t++) {
    const uint8_t* mask = mask_of(op, b, t);
    int end = op.at->n_key;
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

// LANES vectors -> a vector of their sums
static inline vf sums_of(vf* a) {
  vi even, odd;
  for (int i = 0; i < LANES; i++) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  for (int n = LANES; n > 1; n /= 2)
    for (int i = 0; i < n / 2; i++)
      a[i] = permuted(a[2 * i], a[2 * i + 1], even) + permuted(a[2 * i], a[2 * i + 1], odd);
  return a[0];
}

static inline vf load_key(const float* k) { return load<vf>(k); }
static inline vf load_key(const uint16_t* k) { return load_bf16(k); }

// scores [R, KEYS] of few queries [R, H] with n keys [n, H]: a sum for each
template <int R, class Key>
static void few_scores(const float* q, const Key* k, int n, int H, float* score) {
  for (int j = 0; j < n; j += LANES) {
    vf sums[R][LANES];
    for (int i = 0; i < LANES; i++) {
      const Key* key = k + (long)std::min(j + i, n - 1) * H;
      vf even[R] = {}, odd[R] = {};
      for (int h = 0; h < H; h += 2 * LANES) {
        vf a = load_key(key + h), b = load_key(key + h + LANES);
        for (int r = 0; r < R; r++) {
          even[r] += a * load<vf>(q + r * H + h);
          odd[r] += b * load<vf>(q + r * H + h + LANES);
        }
      }
      for (int r = 0; r < R; r++) sums[r][i] = even[r] + odd[r];
    }
    for (int r = 0; r < R; r++) store(score + r * KEYS + j, sums_of(sums[r]));
  }
}

template <int R, class Key>
static void few_scores_of(int n_query, const float* q, const Key* k, int n, int H, float* score) {
  if (n_query == R) return few_scores<R>(q, k, n, H, score);
  if constexpr (R > 1) few_scores_of<R - 1>(n_query, q, k, n, H, score);
}

// a [LANES] -> its columns
static inline void transpose(vi* a) {
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2) {
    vi low, high;
    for (int j = 0; j < LANES; j++) {
      low[j] = j & step ? LANES + j - step : j;
      high[j] = j & step ? LANES + j : j + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & step) continue;
      vi first = a[i];
      a[i] = permuted(first, a[i + step], low);
      a[i + step] = permuted(first, a[i + step], high);
    }
  }
}

// k [n_key, n], floats or pairs -> [keys / ROWS][n][ROWS]; whatever there is from n_key on
static void transpose_keys(const int32_t* k, int n_key, int n, int32_t* to) {
  for (int j = 0; j < n_key; j += LANES)
    for (int h = 0; h < n; h += LANES) {
      vi a[LANES];
      for (int i = 0; i < LANES; i++) a[i] = load<vi>(k + std::min(j + i, n_key - 1) * n + h);
      transpose(a);
      int32_t* block = to + (long)(j / ROWS * n + h) * ROWS + j % ROWS;
      for (int i = 0; i < LANES; i++) store(block + i * ROWS, a[i]);
    }
}

// v [n, V] of bf16, H apart -> pairs [end / 2, Vp], neighbours in a word; zeros from n on
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

// s [KEYS], scores of n keys -> their weights, floats or bf16; what is masked has none. is_masked:
// something is. ROUGH: of keys and values in bf16
template <bool ROUGH, bool AS_BF16>
static void weigh(const Attention& op, const uint8_t* mask, bool is_masked, int n, float* s,
                  float* top, float* sum, float* out, int Hp) {
  int end = padded(n, ROWS);
  if (op.cap)
    for (int j = 0; j < end; j += LANES) store(s + j, op.cap * tanh_of(load<vf>(s + j) / op.cap));
  if (is_masked)
    for (int j = 0; j < n; j++) s[j] = mask[j] ? s[j] : -INFINITY;
  for (int j = n; j < end; j++) s[j] = -INFINITY;
  vf tops = load<vf>(s);
  for (int j = LANES; j < end; j += LANES) tops = larger(tops, load<vf>(s + j));
  float new_top = std::max(*top, largest_of(tops));
  if (new_top == -INFINITY) {                  // it sees none of these, and saw none before
    memset(s, 0, 4 * end);
    return;
  }
  vf sums = {};
  for (int j = 0; j < end; j += LANES) {
    constexpr float LOG2_E = 1.44269504f;
    vf p = ROUGH ? power_of_2(load<vf>(s + j) * LOG2_E - new_top * LOG2_E)
                 : exp_of(load<vf>(s + j) - new_top);
    sums += p;
    if (!AS_BF16) store(s + j, p);
    else write_floats((const float*)&p, LANES, s, BF16, j);      // before what is read next
  }
  if (new_top > *top) {
    float old = *top == -INFINITY ? 0 : std::exp(*top - new_top);
    for (int h = 0; h < Hp; h += LANES) store(out + h, load<vf>(out + h) * old);
    *sum *= old;
    *top = new_top;
  }
  *sum += sum_of(sums);
}

template <class Key>
static void attend(const Attention& op, const Task& task, const Softmax& softmax) {
  constexpr bool BY_PAIRS = HAS_BF16 && sizeof(Key) == 2;
  int H = op.H, V = op.V, Hp = padded(H, ROWS), Vp = padded(V, ROWS);
  int share = op.N / op.K, W = width_of(op), n_query = (task.t1 - task.t0) * share;
  float* q = memory_of(own, (size_t)n_query * (2 * Hp + KEYS) + 3 * KEYS * Hp);
  float *score = q + n_query * Hp, *k = score + n_query * KEYS, *v = k + KEYS * Hp;
  float *turned = v + KEYS * Hp, *q_pairs = turned + KEYS * Hp;
  for (int r = 0; r < n_query; r++) {
    int t = task.t0 + r / share, head = task.head * share + r % share;
    const float* from = op.qkv + ((long)task.b * op.T + t) * W + head * H;
    for (int h = 0; h < H; h++) q[r * Hp + h] = from[h] * op.scale;
    std::fill(q + r * Hp + H, q + (r + 1) * Hp, 0.0f);
    softmax.top[r] = -INFINITY;
    softmax.sum[r] = 0;
  }
  if (BY_PAIRS) write_floats(q, n_query * Hp, q_pairs, BF16, 0);
  memset(softmax.out, 0, 4 * (size_t)n_query * Vp);
  if (H < Hp) memset(k, 0, 8 * (size_t)KEYS * Hp);
  for (int key = task.key0; key < task.key1; key += KEYS) {
    int n = std::min(KEYS, task.key1 - key), first_t = task.t0;
    int n_pair = has_matrices() ? padded(n, ROWS) / 2 : (n + 1) / 2;
    while (first_t < task.t1 && !memchr(mask_of(op, task.b, first_t) + key, 1, n)) first_t++;
    int from = (first_t - task.t0) * share, n_row = n_query - from;    // the others see none
    if (n_row == 0) continue;
    long at = cache_at(op, task.b, task.head, key);
    const Key *keys = (const Key*)op.k_cache + at, *values = (const Key*)op.v_cache + at;
    float *s = score + from * KEYS, *out = softmax.out + from * Vp;
    bool few = n_row <= FEW && H == Hp && V == Vp;                // straight from the cache
    if (few) {
      few_scores_of<FEW>(n_row, q + from * Hp, keys, n, H, s);
    } else if (BY_PAIRS) {
      const int32_t* pairs = (const int32_t*)keys;
      if (H < Hp) {
        for (int j = 0; j < n; j++) memcpy((uint16_t*)k + j * Hp, keys + j * H, 2 * H);
        pairs = (const int32_t*)k;
      }
      pair_values((const uint16_t*)values, n, 2 * n_pair, V, H, Vp, (int32_t*)v);
      transpose_keys(pairs, n, Hp / 2, (int32_t*)turned);
      for (int j = 0; j < n; j += ROWS)
        tiles(n_row, (const int32_t*)turned + j * Hp / 2, ROWS, Hp / 2,
              (const int32_t*)q_pairs + from * Hp / 2, Hp / 2, s + j, KEYS, false);
    } else {
      for (int j = 0; j < n; j++) {
        read_floats(op.k_cache, op.cache_type, at + (long)j * H, H, k + j * Hp);
        read_floats(op.v_cache, op.cache_type, at + (long)j * H, V, v + j * Vp);
      }
      transpose_keys((const int32_t*)k, n, Hp, (int32_t*)turned);
      for (int j = 0; j < n; j += ROWS)
        tiles(n_row, turned + j * Hp, ROWS, Hp, q + from * Hp, Hp, s + j, KEYS, false);
    }
    auto weigh_rows = few ? weigh<false, false> : weigh<sizeof(Key) == 2, BY_PAIRS>;
    for (int t = first_t; t < task.t1; t++) {
      const uint8_t* mask = mask_of(op, task.b, t) + key;
      bool is_masked = memchr(mask, 0, n);
      for (int r = (t - task.t0) * share; r < (t - task.t0 + 1) * share; r++)
        weigh_rows(op, mask, is_masked, n, score + r * KEYS, softmax.top + r, softmax.sum + r,
                   softmax.out + r * Vp, Vp);
    }
    for (int h = 0; h < Vp; h += ROWS) {
      if (few) tiles(n_row, values + h, H, n, s, KEYS, out + h, Vp, true);
      else if (BY_PAIRS)
        tiles(n_row, (const int32_t*)v + h, Vp, n_pair, (const int32_t*)s, KEYS, out + h, Vp,
              true);
      else tiles(n_row, v + h, Vp, n, s, KEYS, out + h, Vp, true);
    }
  }
}

// out of a query, from its softmax over each of n_part parts of the keys, `step` floats apart
static void write_out(const Attention& op, const Task& task, int r, const Softmax& first,
                      int n_part, long step) {
  int Vp = padded(op.V, ROWS), share = op.N / op.K;
  int t = task.t0 + r / share, head = task.head * share + r % share;
  float top = op.sinks ? op.sinks[head] : -INFINITY, sum = 0;
  for (int i = 0; i < n_part; i++) top = std::max(top, first.top[r + i * step]);
  if (op.sinks) sum = std::exp(op.sinks[head] - top);
  std::vector<float> y(2 * Vp, 0.0f);
  for (int i = 0; i < n_part; i++) {
    if (first.top[r + i * step] == -INFINITY) continue;
    float weight = std::exp(first.top[r + i * step] - top);
    sum += weight * first.sum[r + i * step];
    for (int h = 0; h < op.V; h++) y[h] += weight * first.out[r * Vp + h + i * step];
  }
  for (int h = 0; h < op.V; h++) y[h] /= sum;
  long at = (((long)task.b * op.T + t) * op.N + head) * op.V;
  if (op.gate) {
    float* gate = y.data() + Vp;
    copy_floats(op.gate + at, op.V, gate);
    for (int h = 0; h < Vp; h += LANES)
      store(&y[h], load<vf>(&y[h]) * inverse_of(1.0f + exp_of(-load<vf>(gate + h))));
  }
  write_floats(y.data(), op.V, op.out, op.out_type, at);
}

struct Plan {                                  // of an attention
  int share, step_t, n_tile, n_task, n_part;   // n_part: of the keys, where tasks are few
  size_t size;                                 // floats of a task's softmax

  Plan(const Attention& op, int n_thread) {
    share = op.N / op.K;
    step_t = std::max(1, std::min(op.T, QUERIES / share));
    n_tile = (op.T + step_t - 1) / step_t;
    n_task = op.B * op.K * n_tile;
    n_part = 1;
    if (n_task < 4 * n_thread)
      n_part = std::min((4 * n_thread + n_task - 1) / n_task, (int)op.at->n_key / 128);
    n_part = std::max(1, n_part);
    size = (size_t)step_t * share * (padded(op.V, ROWS) + 2);
  }

  Softmax softmax(float* memory, int i) const {
    float* at = memory + i * size;
    return {at, at + step_t * share, at + 2 * step_t * share};
  }

  Task task(const Attention& op, int i) const {                   // the longest first
    int tile = n_tile - 1 - i / (op.B * op.K), rest = i % (op.B * op.K);
    Task task = {rest / op.K, rest % op.K, tile * step_t, std::min(op.T, (tile + 1) * step_t), 0, 0};
    seen(op, task.b, task.t0, task.t1, &task.key0, &task.key1);
    return task;
  }
};

static void attention(const Attention& op, Phase* phase, int n_thread) {
  if (!op.is_turned)
    do_tasks(phase[0], op.B * op.T, 2, [&](int i) { write_keys(op, i / op.T, i % op.T); });
  Plan plan(op, n_thread);
  float* memory = memory_of(shared, 0);
  auto write = [&](const Task& task, const Softmax& softmax, int n_part) {
    for (int r = 0; r < (task.t1 - task.t0) * plan.share; r++)
      write_out(op, task, r, softmax, n_part, plan.size);
  };
  do_tasks(phase[1], plan.n_task * plan.n_part, 1, [&](int i) {
    Task task = plan.task(op, i / plan.n_part);
    int n_key = (task.key1 - task.key0 + plan.n_part - 1) / plan.n_part;
    task.key0 += i % plan.n_part * padded(n_key, ROWS);
    task.key1 = std::min(task.key1, task.key0 + padded(n_key, ROWS));
    Softmax softmax = plan.softmax(memory, plan.n_part > 1 ? i : omp_get_thread_num());
    if (op.cache_type == FP32) attend<float>(op, task, softmax);
    else attend<uint16_t>(op, task, softmax);
    if (plan.n_part == 1) write(task, softmax, 1);
  });
  if (plan.n_part > 1)
    do_tasks(phase[2], plan.n_task, 1, [&](int i) {
      write(plan.task(op, i), plan.softmax(memory, i * plan.n_part), plan.n_part);
    });
}
