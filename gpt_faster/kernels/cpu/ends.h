// What layers are given: embeddings, the angles of RoPE, masks.

#pragma once

#include <cmath>

#include "outputs.h"

// rows ids [n] of a weight [out, K] in blocks, in fp32, bf16 or int8 -> out [n, K], times factor
struct Embed {
  int32_t kind, format, n, K, n_vocab, out_type;
  float factor;
  const void *weight, *scales;                 // fp32 [out], of int8
  const int64_t* ids;
  void* out;
};

static void embed(const Embed& op, Phase* phase) {
  do_tasks(phase[0], op.n, 1, [&](int i) {
    int K = padded(op.K, GROUP), row = op.ids[i] % ROWS;
    const char* w = (const char*)op.weight + op.ids[i] / ROWS * block_bytes(op.format, K);
    float* y = memory_of(own, op.K);
    float factor = op.factor * (op.format == INT8 ? ((const float*)op.scales)[op.ids[i]] : 1);
    for (int k = 0; k < op.K; k++) {
      int pair = (k / 2 * ROWS + row) * 2 + k % 2;
      if (op.format == FP32) y[k] = ((const float*)w)[k * ROWS + row];
      if (op.format == BF16) y[k] = bf16_to_float(((const uint16_t*)w)[pair]);
      if (op.format == INT8) y[k] = ((const int8_t*)w)[pair];
      y[k] *= factor;
    }
    write_floats(y, op.K, op.out, op.out_type, (long)i * op.K);
  });
}

// pos [n] -> cos and sin [n, half] of its angles, times an amplitude
struct Angles {
  int32_t kind, n, half;
  const int64_t* pos;
  const float *freq, *amplitude;               // [half]
  float *cos, *sin;
};

static void angles(const Angles& op, Phase* phase) {
  do_tasks(phase[0], op.n, 1, [&](int i) {
    for (int h = 0; h < op.half; h++) {
      float angle = (float)op.pos[i] * op.freq[h];
      op.cos[i * op.half + h] = std::cos(angle) * op.amplitude[h];
      op.sin[i * op.half + h] = std::sin(angle) * op.amplitude[h];
    }
  });
}

// pos [B, T] -> mask [B, T, n_key]: key <= pos, and within the window if there is one
struct Mask {
  int32_t kind, B, T, n_key, window;
  const int64_t* pos;
  uint8_t* mask;
};

static void masks(const Mask& op, Phase* phase) {
  do_tasks(phase[0], op.B * op.T, 1, [&](int i) {
    uint8_t* mask = op.mask + (long)i * op.n_key;
    long end = std::min(op.pos[i] + 1, (int64_t)op.n_key);
    long begin = op.window ? std::max(0l, (long)op.pos[i] + 1 - op.window) : 0;
    memset(mask, 0, op.n_key);
    if (begin < end) memset(mask + begin, 1, end - begin);
  });
}
