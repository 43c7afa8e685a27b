// Gated DeltaNet (Qwen3.5), token by token or in chunks.

#pragma once

#include <cmath>

#include "blocks.h"
#include "norms.h"
#include "positions.h"

// The channels q, k [Nk, Dk], v [N, Dv] of x [B, T, channels] through a short convolution of their own and
// SiLU; then for each of N heads a state S [Dk, Dv] over the tokens,
//
//     S = decay S + k (beta (v - decay S' k))'        out = S' q
//
// with q of length q_scale, k of length 1, beta and decay by rates [B, T, 2, N]: sigmoid(rates[0]) and
// exp(decay_rate softplus(rates[1] + decay_bias)); out is normalized, times SiLU(z [B, T, N, Dv]).
// Rings hold the state after a position p [n_row, n_state, N, Dk, Dv] and the convolution's input at
// it [n_row, n_input, channels], at p modulo their lengths. A token that is not at its predecessor's
// position + 1, padding, leaves the state as it is.
struct Delta {
  int32_t kind, B, T, Nk, N, Dk, Dv, n_tap, n_state, n_input, n_row, input_type, out_type;
  float q_scale;
  Norm norm;
  const Positions* at;
  const float *taps;                           // [n_tap, channels], a token's own the last
  const float *decay_rate, *decay_bias;        // [N]
  const float *x, *z, *rates;
  float* states;
  void *inputs, *out;
};

constexpr int COLUMNS = 2 * LANES;             // of a state at a time: they stay in the L1
constexpr int TOKENS = 32;                     // at a time
constexpr int MOST_TAPS = 8;                   // kernels/cpu/native.py has it too

static int channels_of(const Delta& op) { return 2 * op.Nk * op.Dk + op.N * op.Dv; }

static long input_at(const Delta& op, int b, long p) {
  long row = op.at->rows ? op.at->rows[b] : b;
  return (row * op.n_input + p % op.n_input) * channels_of(op);
}

// Token t of row b, convolved -> mixed, where the n channels of a head's q, k or v from c on are
// [T, n] at c T.
static void convolve(const Delta& op, int b, int t, float* mixed) {
  int n_channel = channels_of(op), before = op.n_tap - 1;
  const float* in[MOST_TAPS];
  float* past = memory_of(own, (size_t)op.n_tap * n_channel);
  for (int i = 0; i < op.n_tap; i++) {
    int from = t - before + i;
    long p = position(op.at, b, 0) + from;
    in[i] = from < 0 ? past + (long)i * n_channel : op.x + ((long)b * op.T + from) * n_channel;
    if (from >= 0) continue;
    if (p < 0) std::fill(past + (long)i * n_channel, past + (i + 1l) * n_channel, 0.0f);
    else read_floats(op.inputs, op.input_type, input_at(op, b, p), n_channel, (float*)in[i]);
  }
  for (int c = 0, n; c < n_channel; c += n) {
    n = c < 2 * op.Nk * op.Dk ? op.Dk : op.Dv;
    float* to = mixed + (long)b * op.T * n_channel + (long)c * op.T + (long)t * n;
    for (int j = 0; j < n; j += LANES) {
      vf y = {};
      for (int i = 0; i < op.n_tap; i++)
        y += load<vf>(op.taps + (long)i * n_channel + c + j) * load<vf>(in[i] + c + j);
      store(to + j, activated(SILU, y));
    }
  }
}

// Those inputs that a call may go on from
static void keep_inputs(const Delta& op, int b) {
  long last = position(op.at, b, op.T - 1);
  for (int t = 0; t < op.T; t++) {
    long p = position(op.at, b, t);
    if (p > last - op.n_input && follows(op.at, b, t))
      write_floats(op.x + ((long)b * op.T + t) * channels_of(op), channels_of(op), op.inputs,
                   op.input_type, input_at(op, b, p));
  }
}

static float dot(const float* a, const float* b, int n) {         // n: whole vectors
  vf sum = {};
  for (int i = 0; i < n; i += LANES) sum += load<vf>(a + i) * load<vf>(b + i);
  return sum_of(sum);
}

// x [n] as long as `length` -> to
static void to_length(const float* x, int n, float length, float* to) {
  float factor = length / std::sqrt(dot(x, x, n) + 1e-6f);
  for (int i = 0; i < n; i += LANES) store(to + i, load<vf>(x + i) * factor);
}

struct Token {                                 // of a head
  float decay, beta, kq;                       // kq: k' q
  const float *k, *q, *v;
  float* out;
};

static inline void store_past_caches(float* to, vf x) {           // 64 bytes each, or 32
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__) && !defined(WIDE)
  _mm256_stream_ps(to, (__m256)x);
#else
  store(to, x);
#endif
}

// V vectors of columns of a state [Dk, Dv] take one token. from: the state before, null: zeros
template <int V>
static void step_columns(const Token& token, int Dk, int Dv, int column, const float* from, float* to) {
  vf sk[V] = {}, sq[V] = {}, change[V];
  if (from)
    for (int i = 0; i < Dk; i++)
      for (int j = 0; j < V; j++) {
        vf s = load<vf>(from + (long)i * Dv + column + j * LANES);
        sk[j] += token.k[i] * s;
        sq[j] += token.q[i] * s;
      }
  for (int j = 0; j < V; j++) {
    vf v = load<vf>(token.v + column + j * LANES);
    change[j] = token.beta * (v - token.decay * sk[j]);
    store(token.out + column + j * LANES, token.decay * sq[j] + token.kq * change[j]);
  }
  for (int i = 0; i < Dk; i++)
    for (int j = 0; j < V; j++) {
      long at = (long)i * Dv + column + j * LANES;
      vf s = from ? load<vf>(from + at) : vf{};
      store_past_caches(to + at, token.decay * s + token.k[i] * change[j]);
    }
}

static void step(const Token& token, int Dk, int Dv, const float* from, float* to) {
  int c = 0;
  for (; c + 8 * LANES <= Dv; c += 8 * LANES) step_columns<8>(token, Dk, Dv, c, from, to);
  for (; c < Dv; c += COLUMNS) step_columns<2>(token, Dk, Dv, c, from, to);
}

// What n tokens do to all columns at once, U being what each adds to the state for its k:
//
//     U_i = beta_i (v_i - G_i S' k_i - sum over j < i of G_i/G_j (k_j' k_i) U_j)
//     out_i = G_i S' q_i + sum over j <= i of G_i/G_j (k_j' q_i) U_j
//     S = G_n S + sum over j of G_n/G_j k_j U_j'
//
// with G_i the product of the decays up to i (arXiv 2412.06464).
struct Chunk {
  int n, Dk;
  float *k, *q;                                // [TOKENS, Dk]
  float *turned;                               // k' [Dk, TOKENS], then times G_n/G_j
  float *kk, *kq;                              // [TOKENS, TOKENS], times G_i/G_j
  float G[TOKENS], beta[TOKENS];

  void begin(const Token* tokens) {
    double sum = 0, sums[TOKENS];              // of logarithms
    for (int i = 0; i < n; i++) {
      sum += std::log((double)std::max(tokens[i].decay, 1e-30f));
      sums[i] = sum;
      G[i] = std::exp(sum);
      beta[i] = tokens[i].beta;
    }
    for (int i = 0; i < Dk; i++)
      for (int j = 0; j < TOKENS; j++) turned[i * TOKENS + j] = j < n ? k[j * Dk + i] : 0;
    for (int j = 0; j < TOKENS; j += ROWS) {
      tiles(n, turned + j, TOKENS, Dk, k, Dk, kk + j, TOKENS, false);
      tiles(n, turned + j, TOKENS, Dk, q, Dk, kq + j, TOKENS, false);
    }
    for (int i = 0; i < n; i++)
      for (int j = 0; j <= i; j++) {
        float share = std::exp(sums[i] - sums[j]);
        kk[i * TOKENS + j] *= share;
        kq[i * TOKENS + j] *= share;
      }
    for (int j = 0; j < n; j++) {
      float share = std::exp(sum - sums[j]);
      for (int i = 0; i < Dk; i++) turned[i * TOKENS + j] *= share;
    }
  }

  // Columns of S [Dk, COLUMNS]; v, out [n, Dv], U [n, COLUMNS]
  void columns(const float* v, int Dv, float* S, float* U, float* out) const {
    tiles(n, S, COLUMNS, Dk, k, Dk, U, COLUMNS, false);
    tiles(n, S, COLUMNS, Dk, q, Dk, out, Dv, false);
    for (int i = 0; i < n; i++) {
      vf sums[2] = {}, outs[2];
      for (int c = 0; c < 2; c++) outs[c] = G[i] * load<vf>(out + i * Dv + c * LANES);
      for (int j = 0; j < i; j++)
        for (int c = 0; c < 2; c++) {
          vf u = load<vf>(U + j * COLUMNS + c * LANES);
          sums[c] += kk[i * TOKENS + j] * u;
          outs[c] += kq[i * TOKENS + j] * u;
        }
      for (int c = 0; c < 2; c++) {
        float* at = U + i * COLUMNS + c * LANES;
        vf u = beta[i] * (load<vf>(v + i * Dv + c * LANES) - G[i] * load<vf>(at) - sums[c]);
        store(at, u);
        store(out + i * Dv + c * LANES, outs[c] + kq[i * TOKENS + i] * u);
      }
    }
    for (int i = 0; i < Dk * COLUMNS; i += LANES) store(S + i, G[n - 1] * load<vf>(S + i));
    tiles(Dk, U, COLUMNS, n, turned, TOKENS, S, COLUMNS, true);
  }
};

// A head's tokens: chunk by chunk up to those after each of which the state is kept
static void recur(const Delta& op, int b, int head, const float* mixed) {
  int Dk = op.Dk, Dv = op.Dv, key_head = head / (op.N / op.Nk);
  long row = op.at->rows ? op.at->rows[b] : b, size = (long)Dk * Dv;
  long first = position(op.at, b, 0), last = position(op.at, b, op.T - 1);
  int n_chunked = std::max(0l, last - first + 1 - op.n_state);
  float* S = memory_of(own, size + TOKENS * (3 * Dk + Dv + COLUMNS + 2 * TOKENS));
  float *k = S + size, *q = k + TOKENS * Dk, *out = q + TOKENS * Dk;
  float *U = out + TOKENS * Dv, *turned = U + TOKENS * COLUMNS, *kk = turned + TOKENS * Dk;
  mixed += (long)b * op.T * channels_of(op);
  const float *queries = mixed + (long)key_head * Dk * op.T, *keys = queries + (long)op.Nk * Dk * op.T;
  const float* values = mixed + (2l * op.Nk * Dk + (long)head * Dv) * op.T;
  auto state_at = [&](long p) {
    return op.states + ((row * op.n_state + p % op.n_state) * op.N + head) * size;
  };
  auto in_blocks = [&](long i) { return S + (i / Dv + i % Dv / COLUMNS * Dk) * COLUMNS; };
  for (long i = 0; n_chunked && i < size; i += COLUMNS) {         // [Dv/COLUMNS, Dk, COLUMNS]
    if (first == 0) std::fill(in_blocks(i), in_blocks(i) + COLUMNS, 0.0f);
    else copy_floats(state_at(first - 1) + i, COLUMNS, in_blocks(i));
  }
  for (int t0 = 0, n; t0 < op.T; t0 += n) {
    n = std::min(TOKENS, (t0 < n_chunked ? n_chunked : op.T) - t0);
    Token tokens[TOKENS];
    for (int t = 0; t < n; t++) {
      const float* rates = op.rates + ((long)b * op.T + t0 + t) * 2 * op.N + head;
      to_length(queries + (long)(t0 + t) * Dk, Dk, op.q_scale, q + t * Dk);
      to_length(keys + (long)(t0 + t) * Dk, Dk, 1, k + t * Dk);
      float time = rates[op.N] + op.decay_bias[head];
      time = time > 20 ? time : std::log1p(std::exp(time));       // softplus
      tokens[t] = {std::exp(op.decay_rate[head] * time), 1 / (1 + std::exp(-rates[0])),
                   dot(k + t * Dk, q + t * Dk, Dk), k + t * Dk, q + t * Dk,
                   values + (long)(t0 + t) * Dv, out + t * Dv};
    }
    if (t0 < n_chunked) {
      Chunk chunk = {n, Dk, k, q, turned, kk, kk + TOKENS * TOKENS, {}, {}};
      chunk.begin(tokens);
      for (int c = 0; c < Dv; c += COLUMNS) chunk.columns(tokens[0].v + c, Dv, S + (long)c * Dk, U, out + c);
      if (t0 + n == n_chunked)
        for (long i = 0; i < size; i += COLUMNS)
          copy_floats(in_blocks(i), COLUMNS, state_at(first + n_chunked - 1) + i);
    } else {
      for (int t = 0; t < n; t++) {
        long p = position(op.at, b, t0 + t);
        if (follows(op.at, b, t0 + t))
          step(tokens[t], Dk, Dv, p ? state_at(p - 1) : nullptr, state_at(p));
        else std::fill(tokens[t].out, tokens[t].out + Dv, 0.0f);  // anything finite
      }
    }
    for (int t = 0; t < n; t++) {
      long m = (long)b * op.T + t0 + t;
      const float* z = op.z + (m * op.N + head) * Dv;
      float* y = out + t * Dv;
      normalize(op.norm, Dv, y);
      for (int i = 0; i < Dv; i += LANES)
        store(y + i, load<vf>(y + i) * activated(SILU, load<vf>(z + i)));
      write_floats(y, Dv, op.out, op.out_type, (m * op.N + head) * Dv);
    }
  }
}

static void delta(const Delta& op, Phase* phase) {
  float* mixed = memory_of(shared, 0);
  do_tasks(phase[0], op.B * op.T, 4, [&](int i) { convolve(op, i / op.T, i % op.T, mixed); });
  do_tasks(phase[1], op.B * (op.N + 1), 1, [&](int i) {
    if (i < op.B) keep_inputs(op, i);
    else recur(op, (i - op.B) / op.N, (i - op.B) % op.N, mixed);
  });
}
