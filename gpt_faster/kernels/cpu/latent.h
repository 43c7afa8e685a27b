// Multi-head latent attention (DeepSeek, GLM-4.7-Flash): RoPE and the cache write.

#pragma once

#include "attention.h"
#include "norms.h"

// Latents k [B, T, rank + rope] -> cache [n_row, S, rank + rope]: normalizes the rank part, applies
// RoPE to the rest. Applies RoPE to the rope part of q [B, T, N, nope + rope] and copies it to
// queries [B, T, N, rank + rope]; the linear with wk_b writes their rank part.
struct Latent {
  int32_t kind, B, T, N, nope, rope, rank, S, n_row;
  int32_t q_stride, k_stride;                  // between tokens
  Norm norm;
  const Positions* positions;
  Cache cache;                                 // not turned
  const float *q, *k;
  float* queries;
};

static void rope_and_cache_latent(const Latent& op, int b, int t) {
  long m = (long)b * op.T + t;
  long row = op.positions->rows ? op.positions->rows[b] : b;
  long width = op.rank + op.rope;
  const float* cos = op.positions->cos + b * op.positions->rope_stride_b + t * (op.rope / 2);
  const float* sin = op.positions->sin + b * op.positions->rope_stride_b + t * (op.rope / 2);
  for (int i = 0; i < op.N; i++) {
    float* to = op.queries + (m * op.N + i) * width + op.rank;
    copy_floats(op.q + m * op.q_stride + (long)i * (op.nope + op.rope) + op.nope, op.rope, to);
    apply_rope(op.rope / 2, cos, sin, to);
  }
  float* k = reserve(thread_scratch, width);
  copy_floats(op.k + m * op.k_stride, width, k);
  normalize(op.norm, op.rank, k);
  apply_rope(op.rope / 2, cos, sin, k + op.rank);
  long slot = cache_slot(op.positions, b, t);
  write_vectors(op.cache, row * op.S + slot, 0, 1, width, k);
}

static void latent(const Latent& op, Phase* phase) {
  run_tasks(phase[0], op.B * op.T, 1,
            [&](int i) { rope_and_cache_latent(op, i / op.T, i % op.T); });
}
