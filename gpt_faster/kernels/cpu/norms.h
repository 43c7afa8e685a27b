// RMSNorm, LayerNorm, and the residual addition with a norm.

#pragma once

#include <cmath>

#include "dtypes.h"
#include "threads.h"

enum NormKind { NO_NORM, RMS_NORM, LAYER_NORM };

struct Norm {
  int32_t kind;
  float eps;
  const float *weight, *bias;
};

static void normalize(const Norm& norm, int n, float* x) {        // any n, in place
  if (norm.kind == NO_NORM) return;
  float mean = 0;
  if (norm.kind == LAYER_NORM) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    mean = sum / n;
    for (int i = 0; i < n; i++) x[i] -= mean;
  }
  vf squares[4] = {};
  int i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      vf v = load<vf>(x + i + j * LANES);
      squares[j] += v * v;
    }
  float sum = horizontal_sum(squares[0] + squares[1] + squares[2] + squares[3]);
  for (; i < n; i++) sum += x[i] * x[i];
  float factor = 1 / std::sqrt(sum / n + norm.eps);
  for (i = 0; i + LANES <= n; i += LANES)
    store(x + i, load<vf>(x + i) * factor * load<vf>(norm.weight + i));
  for (; i < n; i++) x[i] *= factor * norm.weight[i];
  if (norm.bias)
    for (i = 0; i < n; i++) x[i] += norm.bias[i];
}

// out [M, D] = (residual + factor * norm(x)) * scale; scale [1] or null
struct AddNorm {
  int32_t kind, M, D, x_type, out_type, residual_type;
  float factor;
  Norm norm;
  const float* scale;
  const void *x, *residual;
  void* out;
};

static void add_norm(const AddNorm& op, Phase* phase) {
  run_tasks(phase[0], op.M, 4, [&](int m) {
    float* x = reserve(thread_scratch, 2 * (size_t)op.D);
    float* residual = x + op.D;
    read_floats(op.x, op.x_type, (long)m * op.D, op.D, x);
    normalize(op.norm, op.D, x);
    read_floats(op.residual, op.residual_type, (long)m * op.D, op.D, residual);
    float scale = op.scale ? *op.scale : 1;
    for (int i = 0; i < op.D; i++) x[i] = (residual[i] + op.factor * x[i]) * scale;
    write_floats(x, op.D, op.out, op.out_type, (long)m * op.D);
  });
}
