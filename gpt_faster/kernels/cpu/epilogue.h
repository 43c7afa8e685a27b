// The epilogue of a linear: bias, activation, gate, multiplier, residual.

#pragma once

#include <cmath>

#include "linear_args.h"

enum Activation { NONE, SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU2 };

static inline vf activated(int activation, vf x) {
  if (activation == SILU) return x * reciprocal(1.0f + exp_of(-x));
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

// y [NR] = activation(y), times up [NR] unless it is null. A: the activation, if known at compile
// time
template <int A>
static inline void activate(float* y, float* up, int activation = A) {
#pragma GCC unroll 2
  for (int i = 0; i < NR; i += LANES) {
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

static inline long out_offset(const Linear& op, int m, int column) {
  return (long)m * (op.out_stride ? op.out_stride : n_output(op)) + column;
}

// Always inlined: GCC drops calls of functions that only prefetch.
template <int FOR_WRITE>
[[gnu::always_inline]] static inline void prefetch_row(const void* p, int dtype, long offset) {
  int bytes = dtype == FP32 ? 4 : 2;
  for (int i = 0; i < NR; i += 64 / bytes)
    __builtin_prefetch((const char*)p + (offset + i) * bytes, FOR_WRITE);
}

// The epilogue's memory for row m, which is far from row m - 1: the hardware does not prefetch it
[[gnu::always_inline]] static inline void prefetch_epilogue(const Linear& op, int m, int column) {
  long offset = out_offset(op, m, column);
  if (op.residual) prefetch_row<0>(op.residual, op.residual_type, offset);
  prefetch_row<1>(op.out, op.out_type, offset);
}

// Accumulators y [NR], and up [NR] if gated, -> n outputs of row m from `column` on
static void epilogue(const Linear& op, int m, int column, int n, float* y, float* up) {
  if (op.bias) {
    add_floats(op.bias, op.bias_type, column, n, y);
    if (up) add_floats(op.bias, op.bias_type, op.N / 2 + column, n, up);
  }
  if (op.activation == SILU) activate<SILU>(y, up);
  else if (op.activation) activate<NONE>(y, up, op.activation);
  long offset = out_offset(op, m, column);
  long multiplier_offset = (long)m * op.multiplier_stride + column;
  auto write = [&](int i, int count) {         // count <= LANES
    vf out = load<vf>(y + i);
    if (op.multiplier)
      out *= read_vector(op.multiplier, op.multiplier_type, multiplier_offset + i, count);
    if (op.residual)
      out = read_vector(op.residual, op.residual_type, offset + i, count) + op.factor * out;
    write_floats((const float*)&out, count, op.out, op.out_type, offset + i);
  };
  int i = 0;
  for (; i + LANES <= n; i += LANES) write(i, LANES);
  if (i < n) write(i, n - i);
}
