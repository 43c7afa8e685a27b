// Short convolutions (LFM2).

#pragma once

#include "floats.h"
#include "positions.h"
#include "threads.h"

// b, c, h of x [B, T, 3, width]: c times the convolution of b h over a channel's last n_tap tokens, the
// inputs of those before the call in a ring [n_row, n_input, width] by position, as Delta's.
struct ShortConv {
  int32_t kind, B, T, width, n_tap, n_input, n_row, input_type, out_type;
  const Positions* at;
  const float *taps, *bias;                    // [n_tap, width], a token's own the last; or null
  const float* x;
  void *inputs, *out;
};

static long input_at(const ShortConv& op, int b, long p) {
  long row = op.at->rows ? op.at->rows[b] : b;
  return (row * op.n_input + p % op.n_input) * op.width;
}

static void conv_input(const ShortConv& op, int b, int t, float* to) {
  const float* x = op.x + ((long)b * op.T + t) * 3 * op.width;
  for (int c = 0; c < op.width; c++) to[c] = x[c] * x[2 * op.width + c];
}

static void short_conv(const ShortConv& op, Phase* phase) {
  do_tasks(phase[0], op.B * op.T, 1, [&](int i) {
    int b = i / op.T, t = i % op.T;
    float *y = memory_of(own, 2 * (size_t)op.width), *h = y + op.width;
    for (int c = 0; c < op.width; c++) y[c] = op.bias ? op.bias[c] : 0;
    for (int tap = 0; tap < op.n_tap; tap++) {
      int from = t - (op.n_tap - 1) + tap;
      long p = position(op.at, b, 0) + from;
      if (from >= 0) conv_input(op, b, from, h);
      else if (p < 0) continue;
      else read_floats(op.inputs, op.input_type, input_at(op, b, p), op.width, h);
      for (int c = 0; c < op.width; c++) y[c] += op.taps[(long)tap * op.width + c] * h[c];
    }
    const float* gate = op.x + (long)i * 3 * op.width + op.width;
    for (int c = 0; c < op.width; c++) y[c] *= gate[c];
    write_floats(y, op.width, op.out, op.out_type, (long)i * op.width);
  });
  do_tasks(phase[1], op.B, 1, [&](int b) {     // what a call may go on from
    float* h = memory_of(own, op.width);
    for (int t = 0; t < op.T; t++) {
      long p = position(op.at, b, t);
      if (p < 0 || p <= position(op.at, b, op.T - 1) - op.n_input || !follows(op.at, b, t)) continue;
      conv_input(op, b, t, h);
      write_floats(h, op.width, op.inputs, op.input_type, input_at(op, b, p));
    }
  });
}
