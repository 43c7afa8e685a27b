// Sampling: the filters and the draw of sampling.Sampler, which is the reference.

#pragma once

#include <cfloat>
#include <cmath>

#include "simd.h"
#include "threads.h"

// logits [B, V] -> token [B], by each row's parameters [B]. temperature 0: greedy; top_k 0, top_p 1,
// min_p 0: off. seeds [B]: of each row's noise at this position, as sampling.uniform() takes them.
// No temperature, and no other parameter: all rows are greedy. No token: only note.
// not_finite [B]: as Sampler.note() updates it.
struct Draw {
  int32_t kind, B, V;
  const float *logits, *temperature, *top_k, *top_p, *min_p;
  const int64_t* seeds;
  int64_t* token;
  float* not_finite;
};

constexpr int DRAW_BLOCK = 64;                 // tokens with a common maximum

// Probabilities of one row up to a factor: the largest is 1
struct Candidates {
  int n, n_block;                              // n is padded with zeros
  float *p, *block_max, *values;               // [n], [n_block], scratch [n]

  static size_t n_float(int V) { return 3 * (size_t)round_up(V, DRAW_BLOCK); }

  Candidates(float* scratch, int V)
      : n(round_up(V, DRAW_BLOCK)), n_block(n / DRAW_BLOCK), p(scratch), block_max(scratch + n),
        values(scratch + 2 * n) {}

  // -> their sum
  double fill(const float* logits, int V, float best, float temperature) {
    std::copy(logits, logits + V, p);
    std::fill(p + V, p + n, -INFINITY);
    double sum = 0;
    for (int b = 0; b < n_block; b++) {
      vf block_sum = {}, max = {};
      for (int i = b * DRAW_BLOCK; i < (b + 1) * DRAW_BLOCK; i += LANES) {
        vf value = exp_of((load<vf>(p + i) - best) / temperature);
        store(p + i, value);
        block_sum += value;
        max = max_of(max, value);
      }
      sum += horizontal_sum(block_sum);
      block_max[b] = horizontal_max(max);
    }
    return sum;
  }

  // Copies the `count` largest probabilities to `values`, and some others -> their number
  int copy_largest(long count);
};

// The smallest of the values [n] for which the weights of all larger ones sum to less than `limit`.
// Reorders the values. weight: value -> weight.
template <class F> static float last_kept(float* values, int n, double limit, F weight) {
  double above = 0;                            // the weight of all values larger than these
  while (true) {
    float a = values[0], b = values[n / 2], c = values[n - 1];
    float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    double larger = 0, equal = 0;
    int n_larger = 0, n_smaller = 0;
    for (int i = 0; i < n - n_smaller;) {      // [larger, equal, not seen, smaller]
      float value = values[i];
      if (value > pivot) {
        larger += weight(value);
        std::swap(values[n_larger++], values[i++]);
      } else if (value < pivot) {
        std::swap(values[n - ++n_smaller], values[i]);
      } else {
        equal += weight(value);
        i++;
      }
    }
    if (above + larger >= limit) {
      n = n_larger;
    } else if (above + larger + equal >= limit || n_smaller == 0) {
      return pivot;
    } else {
      above += larger + equal;
      values += n - n_smaller;
      n = n_smaller;
    }
  }
}

static double one_each(float) { return 1; }
static double itself(float p) { return p; }

int Candidates::copy_largest(long count) {
  float least = 0;                             // as many blocks contain a value that is as large
  if (count <= n_block) {
    std::copy(block_max, block_max + n_block, values);
    least = last_kept(values, n_block, count, one_each);
  }
  int n_copied = 0;
  for (int b = 0; b < n_block; b++) {
    if (block_max[b] < least) continue;
    for (int i = b * DRAW_BLOCK; i < (b + 1) * DRAW_BLOCK; i++) {
      values[n_copied] = p[i];
      n_copied += p[i] >= least;
    }
  }
  return n_copied;
}

// The smallest probability that all filters keep. `sum`: of all probabilities
static float smallest_kept(Candidates& row, double sum, float top_k, float top_p, float min_p) {
  constexpr long SHORTLIST = 512;              // usually enough for top_p
  float least = min_p, *values = row.values;
  int n = 0;
  if (top_k > 0 && top_k < row.n) {
    n = row.copy_largest(top_k);
    float kth = last_kept(values, n, top_k, one_each);
    n = std::partition(values, values + n, [&](float value) { return value >= kth; }) - values;
    sum = 0;
    for (int i = 0; i < n; i++) sum += values[i];
    least = std::max(least, kth);
  }
  if (top_p >= 1) return least;
  double limit = top_p * sum;
  if (n == 0) {                                // no top_k
    n = row.copy_largest(SHORTLIST);
    double copied = 0;
    for (int i = 0; i < n; i++) copied += values[i];
    if (copied < limit) n = row.copy_largest(row.n);
  }
  return std::max(least, last_kept(values, n, limit, itself));
}

// Uniform in [0, 1): sampling.uniform()
static inline float uniform_of(uint64_t x) {
  x *= 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  int64_t bits = (x ^ x >> 31) & INT64_MAX;
  return std::min((float)bits * 0x1p-63f, 1 - 0x1p-24f);
}

// The token with the largest probability / noise, of those with at least the probability `least`
static int race(const Candidates& row, float least, uint64_t seed) {
  float best = 0;
  int winner = 0;
  for (int b = 0; b < row.n_block; b++) {
    if (row.block_max[b] < least) continue;
    for (int i = b * DRAW_BLOCK; i < (b + 1) * DRAW_BLOCK; i++) {
      if (row.p[i] < least || row.p[i] == 0) continue;
      float u = uniform_of(seed + i);
      if (row.p[i] <= best * u) continue;      // the noise, -log(1 - u), is at least u
      float score = row.p[i] / std::max(-std::log1p(-u), FLT_MIN);
      if (score > best) best = score, winner = i;
    }
  }
  return winner;
}

static float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// NaN if one of x is NaN
static float largest(const float* x, int n) {
  vf max = vf{} - INFINITY;
  vi is_nan = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf value = load<vf>(x + i);
    max = max_of(value, max);
    is_nan |= value != value;
  }
  max = is_nan ? vf{} + NAN : max;
  float best = max[0];
  for (int lane = 1; lane < LANES; lane++) best = larger_or_nan(best, max[lane]);
  for (; i < n; i++) best = larger_or_nan(best, x[i]);
  return best;
}

static void draw(const Draw& op, Phase* phase) {
  run_tasks(phase[0], op.B, 1, [&](int b) {
    const float* logits = op.logits + (long)b * op.V;
    float best = largest(logits, op.V);
    if (op.not_finite) op.not_finite[b] += best - best;            // inf - inf is NaN
    if (!op.token) return;
    if (op.temperature && op.temperature[b] > 0) {
      Candidates row(reserve(thread_scratch, Candidates::n_float(op.V)), op.V);
      double sum = row.fill(logits, op.V, best, std::max(op.temperature[b], 1e-20f));
      op.token[b] = 0;
      if (!std::isfinite(sum)) return;                             // Sampler.note() reports it
      float least = smallest_kept(row, sum, op.top_k[b], op.top_p[b], op.min_p[b]);
      op.token[b] = race(row, least, op.seeds[b]);
    } else {
      op.token[b] = std::find(logits, logits + op.V, best) - logits;
      if (op.token[b] == op.V) op.token[b] = 0;                    // NaN
    }
  });
}
