// Gated short convolutions (LFM2).

#pragma once

#include "dtypes.h"
#include "positions.h"
#include "threads.h"

// out = c * conv(b * h), with x [B, T, 3, width] = b, c, h and a depthwise convolution over the
// last n_tap tokens. The ring buffer inputs [n_row, n_input, width] holds b * h of earlier calls,
// indexed by position modulo n_input.
struct ShortConv {
  int32_t kind, B, T, width, n_tap, n_input, n_row, input_type, out_type;
  const Positions* positions;
  const float *taps, *bias;                    // [n_tap, width], the last for token t; [width]
  const float* x;
  void *inputs, *out;
};

static long input_offset(const ShortConv& op, int b, long p) {
  long row = op.positions->rows ? op.positions->rows[b] : b;
  return (row * op.n_input + p % op.n_input) * op.width;
}

static void conv_input(const ShortConv& op, int b, int t, float* to) {
  const float* x = op.x + ((long)b * op.T + t) * 3 * op.width;
  for (int c = 0; c < op.width; c++) to[c] = x[c] * x[2 * op.width + c];
}

static void short_conv(const ShortConv& op, Phase* phase) {
  run_tasks(phase[0], op.B * op.T, 1, [&](int i) {
    int b = i / op.T, t = i % op.T;
    float* y = reserve(thread_scratch, 2 * (size_t)op.width);
    float* h = y + op.width;
    for (int c = 0; c < op.width; c++) y[c] = op.bias ? op.bias[c] : 0;
    for (int tap = 0; tap < op.n_tap; tap++) {
      int from = t - (op.n_tap - 1) + tap;
      long p = cache_slot(op.positions, b, 0) + from;
      if (from >= 0) conv_input(op, b, from, h);
      else if (p < 0) continue;
      else read_floats(op.inputs, op.input_type, input_offset(op, b, p), op.width, h);
      for (int c = 0; c < op.width; c++) y[c] += op.taps[(long)tap * op.width + c] * h[c];
    }
    const float* gate = op.x + (long)i * 3 * op.width + op.width;
    for (int c = 0; c < op.width; c++) y[c] *= gate[c];
    write_floats(y, op.width, op.out, op.out_type, (long)i * op.width);
  });
  run_tasks(phase[1], op.B, 1, [&](int b) {    // the last n_input inputs -> the ring
    float* h = reserve(thread_scratch, op.width);
    for (int t = 0; t < op.T; t++) {
      long p = cache_slot(op.positions, b, t);
      if (p < 0 || p <= cache_slot(op.positions, b, op.T - 1) - op.n_input ||
          !follows(op.positions, b, t))
        continue;
      conv_input(op, b, t, h);
      write_floats(h, op.width, op.inputs, op.input_type, input_offset(op, b, p));
    }
  });
}
