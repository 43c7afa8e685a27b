// Records hidden states between two layers: model.py's HiddenStates.

#pragma once

#include "dtypes.h"
#include "positions.h"
#include "threads.h"

// states [n_row, S, D]: x [B, T, D] is stored at each token's position
struct Record {
  int32_t kind, B, T, D, S, n_row, x_type, states_type;
  const Positions* positions;
  const void* x;
  void* states;
};

static void record(const Record& op, Phase* phase) {
  run_tasks(phase[0], op.B * op.T, 4, [&](int m) {
    int b = m / op.T, t = m % op.T;
    long row = op.positions->rows ? op.positions->rows[b] : b;
    long to = (row * op.S + cache_slot(op.positions, b, t)) * op.D;
    if (op.x_type == FP32)
      return write_floats((const float*)op.x + (long)m * op.D, op.D, op.states, op.states_type, to);
    float* x = reserve(thread_scratch, op.D);
    read_floats(op.x, op.x_type, (long)m * op.D, op.D, x);
    write_floats(x, op.D, op.states, op.states_type, to);
  });
}
