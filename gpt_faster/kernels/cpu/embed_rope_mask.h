// Embedding lookup, RoPE tables, attention masks.

#pragma once

#include <cmath>

#include "linear_args.h"

// out [n, K] = factor * weight[ids [n]], the weight [n_vocab, K] in panels, fp32, bf16 or int8
struct Embed {
  int32_t kind, format, n, K, n_vocab, out_type, scales_type;
  float factor;
  const void *weight, *scales;                 // int8: scales [n_vocab]
  const int64_t* ids;
  void* out;
};

static void embed(const Embed& op, Phase* phase) {
  run_tasks(phase[0], op.n, 1, [&](int i) {
    int K = round_up(op.K, GROUP);
    int row = op.ids[i] % NR;                  // of the panel
    const char* w = (const char*)op.weight + op.ids[i] / NR * panel_bytes(op.format, K);
    float* y = reserve(thread_scratch, op.K);
    float scale = 1;
    if (op.format == INT8) read_floats(op.scales, op.scales_type, op.ids[i], 1, &scale);
    float factor = op.factor * scale;
    for (int k = 0; k < op.K; k++) {
      int paired = (k / 2 * NR + row) * 2 + k % 2;                // offset in a panel of pairs
      if (op.format == FP32) y[k] = ((const float*)w)[k * NR + row];
      if (op.format == BF16) y[k] = bf16_to_float(((const uint16_t*)w)[paired]);
      if (op.format == INT8) y[k] = ((const int8_t*)w)[paired];
      y[k] *= factor;
    }
    write_floats(y, op.K, op.out, op.out_type, (long)i * op.K);
  });
}

// cos, sin [n, half] = amplitude * cos, sin(pos [n] * freq)
struct RopeTable {
  int32_t kind, n, half;
  const int64_t* pos;
  const float *freq, *amplitude;               // [half]
  float *cos, *sin;
};

static void rope_table(const RopeTable& op, Phase* phase) {
  run_tasks(phase[0], op.n, 1, [&](int i) {
    for (int h = 0; h < op.half; h++) {
      float angle = (float)op.pos[i] * op.freq[h];
      op.cos[i * op.half + h] = std::cos(angle) * op.amplitude[h];
      op.sin[i * op.half + h] = std::sin(angle) * op.amplitude[h];
    }
  });
}

// mask [B, T, n_key]: key <= pos [B, T], and key > pos - window unless window is 0
struct Mask {
  int32_t kind, B, T, n_key, window;
  const int64_t* pos;
  uint8_t* mask;
};

static void causal_mask(const Mask& op, Phase* phase) {
  run_tasks(phase[0], op.B * op.T, 1, [&](int i) {
    uint8_t* mask = op.mask + (long)i * op.n_key;
    long end = std::min(op.pos[i] + 1, (int64_t)op.n_key);
    long begin = op.window ? std::max(0l, (long)op.pos[i] + 1 - op.window) : 0;
    memset(mask, 0, op.n_key);
    if (begin < end) memset(mask + begin, 1, end - begin);
  });
}

// Of a cache that is a ring (model.Ring): the slot of each position, pos mod n_slot, where `stored`
// [n_row, n_slot] gets it; then what it may attend to, of the positions in the first n_key slots
struct RingMask {
  int32_t kind, B, T, n_slot, n_key, window, pos_stride, n_row;  // pos_stride 0: one pos for all
  const int64_t *pos, *rows;                   // rows [B]: of the cache; null: all
  int64_t *stored, *slot;
  uint8_t* mask;                               // [B, T, n_key]
};

static void ring_mask(const RingMask& op, Phase* phase) {
  run_tasks(phase[0], op.B, 1, [&](int b) {
    const int64_t* pos = op.pos + (long)b * op.pos_stride;
    int64_t* stored = op.stored + (op.rows ? op.rows[b] : b) * op.n_slot;
    for (int t = 0; t < op.T; t++) {
      int64_t slot = (pos[t] % op.n_slot + op.n_slot) % op.n_slot;
      stored[slot] = pos[t];
      if (op.pos_stride || b == 0) op.slot[(long)b * op.pos_stride + t] = slot;
    }
    for (int t = 0; t < op.T; t++) {
      uint8_t* mask = op.mask + ((long)b * op.T + t) * op.n_key;
      int64_t first = pos[t] - op.window + 1;
      for (int s = 0; s < op.n_key; s++) mask[s] = (stored[s] >= first) & (stored[s] <= pos[t]);
    }
  });
}
