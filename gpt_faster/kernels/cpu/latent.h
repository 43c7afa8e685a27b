// Latent attention (DeepSeek, GLM-4.7-Flash).

#pragma once

#include "attention.h"
#include "norms.h"

// What comes before the attention over latents: k [B, T, rank + rope], its first part normalized and
// its last turned by RoPE, into a slot of the cache [n_row, S, rank + rope]; of queries
// [B, T, N, nope + rope] the last, turned, to queries [B, T, N, rank + rope]'s.
struct Latent {
  int32_t kind, B, T, N, nope, rope, rank, S, n_row, cache_type;  // n_row: of the cache
  int32_t q_stride, k_stride;                  // of a token's
  Norm norm;
  const Positions* at;
  const float *q, *k;
  float* queries;
  void* cache;
};

static void turn_latent(const Latent& op, int b, int t) {
  long m = (long)b * op.T + t, row = op.at->rows ? op.at->rows[b] : b, width = op.rank + op.rope;
  const float* cos = op.at->cos + b * op.at->angle_b + t * (op.rope / 2);
  const float* sin = op.at->sin + b * op.at->angle_b + t * (op.rope / 2);
  for (int i = 0; i < op.N; i++) {
    float* to = op.queries + (m * op.N + i) * width + op.rank;
    copy_floats(op.q + m * op.q_stride + (long)i * (op.nope + op.rope) + op.nope, op.rope, to);
    rotate(op.rope / 2, cos, sin, to);
  }
  float* k = memory_of(own, width);
  copy_floats(op.k + m * op.k_stride, width, k);
  normalize(op.norm, op.rank, k);
  rotate(op.rope / 2, cos, sin, k + op.rank);
  long slot = position(op.at, b, t);
  write_floats(k, width, op.cache, op.cache_type, (row * op.S + slot) * width);
}

static void latent(const Latent& op, Phase* phase) {
  do_tasks(phase[0], op.B * op.T, 1, [&](int i) { turn_latent(op, i / op.T, i % op.T); });
}
