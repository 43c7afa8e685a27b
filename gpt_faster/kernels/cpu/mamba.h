// Mamba-2 (Granite 4 H, Nemotron-H, Falcon-H1): a causal convolution, the recurrence token by
// token, a gated norm.
//
// A head's state is processed in blocks of columns that stay in L1 from token to token, so that a
// prompt reads and writes the states in memory once. Knows no projection.

#pragma once

#include "norms.h"
#include "recurrent.h"

// x [B, T, channels], the channels of q and k [Nk, Dk] and v [N, Dv], goes through a depthwise
// convolution and SiLU. Then for each of N heads, of which N / Nk share q and k, with a state
// S [Dk, Dv], dt = softplus(steps + decay_bias) clamped to [min_step, max_step], steps [B, T, N]:
//
//     S = exp(decay_rate dt) S + k (dt v)'            out = S' q + skip v
//
// out = norm(out * SiLU(z [B, T, N, Dv])), or norm(out) * SiLU(z) if norm_first. The norm is over
// the N / Nk heads of each group. Papers call q, k, v: C, B, x.
struct Mamba {
  int32_t kind, B, T, Nk, N, Dk, Dv, n_tap, n_state, n_input, n_row, input_type, out_type;
  int32_t norm_first;
  float min_step, max_step;
  Norm norm;                                   // its weight [N Dv]
  const Positions* positions;
  const float *taps, *conv_bias;               // as Delta's
  const float *decay_rate, *decay_bias, *skip; // [N]
  const float *x, *z, *steps;
  float* states;
  void *inputs, *out;
};

// One token, V vectors of columns: the state's rows i go from `from + i * from_stride` to
// `to + i * to_stride`, which may be the same. v [V vectors] becomes the output.
template <int V, bool NON_TEMPORAL>
static void mamba_step(int Dk, float decay, float dt, float skip, const float* k, const float* q,
                       float* v, const float* from, long from_stride, float* to, long to_stride) {
  vf input[V], out[V] = {};
  for (int j = 0; j < V; j++) input[j] = dt * load<vf>(v + j * LANES);
  for (int i = 0; i < Dk; i++) {
    float key = k[i], query = q[i];            // copies: the stores below might change k and q
    for (int j = 0; j < V; j++) {
      vf s = decay * load<vf>(from + i * from_stride + j * LANES) + key * input[j];
      out[j] += query * s;
      if (NON_TEMPORAL) store_non_temporal(to + i * to_stride + j * LANES, s);
      else store(to + i * to_stride + j * LANES, s);
    }
  }
  for (int j = 0; j < V; j++)
    store(v + j * LANES, out[j] + skip * load<vf>(v + j * LANES));
}

// One head of a row
struct MambaHead {
  const Mamba& op;
  int b, head;
  const float *q, *k;                          // [T, Dk]
  float* v;                                    // [T, Dv]; becomes the output
  float *decay, *dt;                           // [T]
  float* block;                                // a block of the state [Dk, V vectors]

  MambaHead(const Mamba& op, int b, int head, float* conv_out) : op(op), b(b), head(head) {
    conv_out += (long)b * op.T * n_channels(op);
    q = conv_out + (long)(head / (op.N / op.Nk)) * op.Dk * op.T;
    k = q + (long)op.Nk * op.Dk * op.T;
    v = conv_out + (2l * op.Nk * op.Dk + (long)head * op.Dv) * op.T;
    block = reserve(thread_scratch, (size_t)op.Dk * op.Dv + 2 * (size_t)op.T);
    decay = block + (long)op.Dk * op.Dv;
    dt = decay + op.T;
    for (int t = 0; t < op.T; t++) {
      float step = softplus(op.steps[((long)b * op.T + t) * op.N + head] + op.decay_bias[head]);
      dt[t] = std::min(std::max(step, op.min_step), op.max_step);
      decay[t] = std::exp(op.decay_rate[head] * dt[t]);
    }
  }

  // V vectors of columns, all tokens. The states of the last n_state tokens are stored: decoding may
  // go back to any of them (rejected drafts).
  template <int V> void run_columns(int column) const {
    long first = cache_slot(op.positions, b, 0), last = cache_slot(op.positions, b, op.T - 1);
    float* from = block;
    long from_stride = V * LANES;
    if (first == 0) std::fill(block, block + op.Dk * V * LANES, 0.0f);
    else {
      from = state_at(op, b, head, first - 1) + column;
      from_stride = op.Dv;
    }
    for (int t = 0; t < op.T && follows(op.positions, b, t); t++) {        // padding is at the end
      bool is_stored = first + t > last - op.n_state;
      float* to = is_stored ? state_at(op, b, head, first + t) + column : block;
      long to_stride = is_stored ? op.Dv : V * LANES;
      auto step = op.T == 1 ? mamba_step<V, true> : mamba_step<V, false>;
      step(op.Dk, decay[t], dt[t], op.skip[head], k + (long)t * op.Dk, q + (long)t * op.Dk,
           v + (long)t * op.Dv + column, from, from_stride, to, to_stride);
      from = to;
      from_stride = to_stride;
    }
  }

  void run() const {
    int c = 0, n = op.Dv / LANES;
    if (op.T == 1)                             // whole rows: memory is read in order
      for (; c + 8 <= n; c += 8) run_columns<8>(c * LANES);
    for (; c + 4 <= n; c += 4) run_columns<4>(c * LANES);
    for (; c + 2 <= n; c += 2) run_columns<2>(c * LANES);
    for (; c < n; c++) run_columns<1>(c * LANES);
  }
};

// The gate and the norm of group g, for token t of row b
static void gate_and_normalize(const Mamba& op, int b, int t, int g, const float* conv_out) {
  int n_head = op.N / op.Nk, width = n_head * op.Dv;
  const float* heads = conv_out + (long)b * op.T * n_channels(op) +
                       (2l * op.Nk * op.Dk + (long)g * width) * op.T;     // [n_head, T, Dv]
  long offset = ((long)b * op.T + t) * op.N * op.Dv + (long)g * width;
  float* y = reserve(thread_scratch, width);
  Norm norm = op.norm;
  if (norm.kind) norm.weight += (long)g * width;
  auto gate = [&] {
    for (int i = 0; i < width; i += LANES)
      store(y + i, load<vf>(y + i) * activated(SILU, load<vf>(op.z + offset + i)));
  };
  for (int n = 0; n < n_head; n++)
    copy_floats(heads + ((long)n * op.T + t) * op.Dv, op.Dv, y + n * op.Dv);
  if (!op.norm_first) gate();
  normalize(norm, width, y);
  if (op.norm_first) gate();
  write_floats(y, width, op.out, op.out_type, offset);
}

static void mamba(const Mamba& op, Phase* phase) {
  float* conv_out = reserve(shared_scratch, 0);
  run_tasks(phase[0], op.B * n_conv_heads(op), 1, [&](int i) {
    convolve(op, i / n_conv_heads(op), i % n_conv_heads(op), conv_out);
  });
  run_tasks(phase[1], op.B * (op.N + 1), 1, [&](int i) {
    if (i < op.B) store_inputs(op, i);
    else MambaHead(op, (i - op.B) / op.N, (i - op.B) % op.N, conv_out).run();
  });
  run_tasks(phase[2], op.B * op.T * op.Nk, 1, [&](int i) {
    gate_and_normalize(op, i / op.Nk / op.T, i / op.Nk % op.T, i % op.Nk, conv_out);
  });
}
