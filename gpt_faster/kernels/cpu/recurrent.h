// What recurrent layers (gated DeltaNet, Mamba-2) share: the causal convolution before the
// recurrence, and ring buffers of states and inputs, indexed by position modulo their length.
//
// `Op` is the struct of one of them: states [n_row, n_state, N, Dk, Dv] holds each head's state after
// a position, inputs [n_row, n_input, channels] the convolution's input at it. The channels are those
// of q and k [Nk, Dk] and v [N, Dv]. A token that is not at its predecessor's position + 1 is padding
// and changes neither. Knows no recurrence.

#pragma once

#include <cmath>

#include "epilogue.h"
#include "positions.h"
#include "threads.h"

constexpr int MAX_TAPS = 8;                    // also in kernels/cpu/native.py

template <class Op> static int n_channels(const Op& op) {
  return 2 * op.Nk * op.Dk + op.N * op.Dv;
}

template <class Op> static size_t convolution_size(const Op& op) {    // in floats
  return (size_t)op.B * op.T * n_channels(op);
}

template <class Op> static long ring_row(const Op& op, int b) {
  return op.positions->rows ? op.positions->rows[b] : b;
}

template <class Op> static float* state_at(const Op& op, int b, int head, long p) {
  return op.states +
         ((ring_row(op, b) * op.n_state + p % op.n_state) * op.N + head) * op.Dk * op.Dv;
}

template <class Op> static long input_offset(const Op& op, int b, long p) {
  return (ring_row(op, b) * op.n_input + p % op.n_input) * n_channels(op);
}

// Heads of q, k and v: each is a task of the convolution
template <class Op> static int n_conv_heads(const Op& op) { return 2 * op.Nk + op.N; }

// The convolution, its bias (or null) and SiLU: one head of q, k or v of row b, all tokens -> conv_out,
// where the head's n channels are [T, n] from c T on, c being the first of them
template <class Op> static void convolve(const Op& op, int b, int head, float* conv_out) {
  bool is_value = head >= 2 * op.Nk;
  int n = is_value ? op.Dv : op.Dk, n_before = op.n_tap - 1;
  long n_channel = n_channels(op);
  long c = is_value ? 2l * op.Nk * op.Dk + (head - 2l * op.Nk) * n : (long)head * n;
  float* past = reserve(thread_scratch, (size_t)n_before * n);    // inputs before the call
  for (int i = 0; i < n_before; i++) {
    long p = cache_slot(op.positions, b, 0) - n_before + i;
    if (p < 0) std::fill(past + i * n, past + (i + 1) * n, 0.0f);
    else read_floats(op.inputs, op.input_type, input_offset(op, b, p) + c, n, past + i * n);
  }
  const float* x = op.x + (long)b * op.T * n_channel + c;
  float* to = conv_out + (long)b * op.T * n_channel + c * op.T;
  for (int t = 0; t < op.T; t++, to += n) {
    const float* in[MAX_TAPS];
    for (int i = 0; i < op.n_tap; i++) {
      int from = t - n_before + i;
      in[i] = from < 0 ? past + (t + i) * n : x + from * n_channel;
    }
    for (int j = 0; j < n; j += LANES) {
      vf y = op.conv_bias ? load<vf>(op.conv_bias + c + j) : vf{};
      for (int i = 0; i < op.n_tap; i++)
        y += load<vf>(op.taps + i * n_channel + c + j) * load<vf>(in[i] + j);
      store(to + j, activated(SILU, y));
    }
  }
}

// Writes the last n_input inputs of row b to the ring
template <class Op> static void store_inputs(const Op& op, int b) {
  long last = cache_slot(op.positions, b, op.T - 1);
  for (int t = 0; t < op.T; t++) {
    long p = cache_slot(op.positions, b, t);
    if (p > last - op.n_input && follows(op.positions, b, t))
      write_floats(op.x + ((long)b * op.T + t) * n_channels(op), n_channels(op), op.inputs,
                   op.input_type, input_offset(op, b, p));
  }
}

static inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

static inline void store_non_temporal(float* to, vf x) {          // aligned to the vector's size
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  _mm256_stream_ps(to, (__m256)x);
#else
  store(to, x);
#endif
}
