// A linear as its caller describes it, and what its sums become: bias, activation, gate, residual.
// Where a block of its weights lies, too.

#pragma once

#include <cmath>

#include "norms.h"

enum Activation { NONE, SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU2 };

// x [M, K], perhaps normalized, by weight -> out [M, N]: + bias, activated (gated: the first half
// of the outputs by the second; out is [M, N / 2]), times others, times factor, + residual.
// Experts have a weight and a bias each, one after the other, and none of the residual: e's rows
// end before ends[e], and row m is made of x's row order[m], or m. Without ends each makes M rows
// of its own columns of x, which begin x_step apart, to columns of out.
struct Linear {
  int32_t kind, format, M, N, K, group, activation, gated, x_type, out_type, residual_type;
  int32_t x_bits;                              // that x must have: 32, 16, or 8 for many rows
  int32_t n_expert;                            // or 0
  int32_t x_stride, x_step, out_stride, out_step;                 // strides 0: rows lie together
  int32_t times_type, times_stride, bias_type;
  float factor;
  Norm norm;
  const void *x, *weight, *scales, *residual, *times, *bias;
  void* out;
  const int32_t *ends, *order;
};

static inline int outputs(const Linear& op) { return op.gated ? op.N / 2 : op.N; }

static inline vf activated(int activation, vf x) {
  if (activation == SILU) return x * inverse_of(1.0f + exp_of(-x));
  if (activation == RELU2) return x < 0.0f ? vf{} : x * x;
  if (activation == CLAMPED_SILU) {
    x = x > 7.0f ? vf{} + 7.0f : x;
    return x / (1.0f + exp_of(x * -1.702f));
  }
  if (activation == GELU_TANH)
    return x * 0.5f * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
  if (activation == GELU)
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1 + std::erf(x[i] * 0.707106781f));
  return x;
}

// y [ROWS], up beside a gate; A: which one it is, if that is known
template <int A>
static inline void activate(float* y, float* up, int activation = A) {
#pragma GCC unroll 2
  for (int i = 0; i < ROWS; i += LANES) {
    vf a = activated(activation, load<vf>(y + i));
    if (up) {
      vf b = load<vf>(up + i);
      if (activation == CLAMPED_SILU) {
        b = b > 7.0f ? vf{} + 7.0f : b;
        b = (b < -7.0f ? vf{} - 7.0f : b) + 1.0f;
      }
      a *= b;
    }
    store(y + i, a);
  }
}

static inline long out_at(const Linear& op, int m, int first) {
  return (long)m * (op.out_stride ? op.out_stride : outputs(op)) + first;
}

// What finish() will read and write of a row, which lies far from the row before. In line: GCC drops
// calls of functions that only prefetch.
template <int WRITES>
[[gnu::always_inline]] static inline void prefetch_outputs(const void* p, int type, long at) {
  int bytes = type == FP32 ? 4 : 2;
  for (int i = 0; i < ROWS; i += 64 / bytes)
    __builtin_prefetch((const char*)p + (at + i) * bytes, WRITES);
}

[[gnu::always_inline]] static inline void prefetch_out(const Linear& op, int m, int first) {
  long at = out_at(op, m, first);
  if (op.residual) prefetch_outputs<0>(op.residual, op.residual_type, at);
  prefetch_outputs<1>(op.out, op.out_type, at);
}

// y [ROWS] of the n outputs that begin at `first`, up beside a gate -> out of row m
static void finish(const Linear& op, int m, int first, int n, float* y, float* up) {
  if (op.bias) {
    add_floats(op.bias, op.bias_type, first, n, y);
    if (up) add_floats(op.bias, op.bias_type, op.N / 2 + first, n, up);
  }
  if (op.activation == SILU) activate<SILU>(y, up);
  else if (op.activation) activate<NONE>(y, up, op.activation);
  long at = out_at(op, m, first), times_at = (long)m * op.times_stride + first;
  auto write = [&](int i, int count) {           // a vector of floats, or fewer
    vf out = load<vf>(y + i);
    if (op.times) out *= read_vector(op.times, op.times_type, times_at + i, count);
    if (op.residual)
      out = read_vector(op.residual, op.residual_type, at + i, count) + op.factor * out;
    write_floats((const float*)&out, count, op.out, op.out_type, at + i);
  };
  int i = 0;
  for (; i + LANES <= n; i += LANES) write(i, LANES);
  if (i < n) write(i, n - i);
}

static inline size_t block_bytes(int format, int K) {             // K padded
  size_t bytes[] = {4, 2, 1, 0};
  return format == INT4 ? (size_t)K / 2 * ROWS : bytes[format] * K * ROWS;
}

static inline const char* block(const Linear& op, int i, int K) {
  return (const char*)op.weight + i * block_bytes(op.format, K);
}

static inline vf int8_scale(const Linear& op, int i, int v) {     // fp32 [out]
  return load<vf>((const float*)op.scales + i * ROWS + v * LANES);
}

// int4: w = scale * code + term, [out/ROWS, in/G, ROWS] words of two bf16, scale and zero
static inline const int32_t* int4_scales(const Linear& op, int i, int K) {
  return (const int32_t*)op.scales + (long)i * (K / op.group) * ROWS;
}

static inline void scale_and_term(const void* words, vf* scale, vf* term) {
  vi both = load<vi>(words);
  *scale = low_bf16(both);
  *term = high_bf16(both) - 8.0f * *scale;
}
