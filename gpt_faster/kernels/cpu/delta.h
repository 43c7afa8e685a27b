// Gated DeltaNet (Qwen3.5): a causal convolution, then the recurrence token by token or in chunks.

#pragma once

#include "gemm_tiles.h"
#include "norms.h"
#include "recurrent.h"

// x [B, T, channels], the channels of q and k [Nk, Dk] and v [N, Dv], goes through a depthwise
// convolution and SiLU. Then for each of N heads, with a state S [Dk, Dv]:
//
//     S = decay S + k (beta (v - decay S' k))'        out = S' q
//
// where |q| = q_scale, |k| = 1 and, with rates [B, T, 2, N], beta = sigmoid(rates[0]) and
// decay = exp(decay_rate softplus(rates[1] + decay_bias)). out = norm(out) * SiLU(z [B, T, N, Dv]).
struct Delta {
  int32_t kind, B, T, Nk, N, Dk, Dv, n_tap, n_state, n_input, n_row, input_type, out_type;
  float q_scale;
  Norm norm;
  const Positions* positions;
  const float *taps, *conv_bias;               // [n_tap, channels], the last for the current token;
                                               // [channels] or null
  const float *decay_rate, *decay_bias;        // [N]
  const float *x, *z, *rates;
  float* states;
  void *inputs, *out;
};

constexpr int COLUMN_BLOCK = 2 * LANES;        // of a state: a block [Dk, COLUMN_BLOCK] fits in L1
constexpr int CHUNK = 32;                      // maximum tokens of a chunk

static float dot(const float* a, const float* b, int n) {         // n a multiple of LANES
  vf sum = {};
  for (int i = 0; i < n; i += LANES) sum += load<vf>(a + i) * load<vf>(b + i);
  return horizontal_sum(sum);
}

// to = x [n] scaled to L2 norm `length`
static void l2_normalize(const float* x, int n, float length, float* to) {
  float factor = length / std::sqrt(dot(x, x, n) + 1e-6f);
  for (int i = 0; i < n; i += LANES) store(to + i, load<vf>(x + i) * factor);
}

struct Token {                                 // of one head
  float decay, beta, kq;                       // kq: k' q
  const float *k, *q, *v;
  float* out;
};

// One token, V vectors of columns of the state [Dk, Dv]: from -> to. from null: zeros
template <int V>
static void recurrent_step_columns(const Token& token, int Dk, int Dv, int column,
                                   const float* from, float* to) {
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
      long offset = (long)i * Dv + column + j * LANES;
      vf s = from ? load<vf>(from + offset) : vf{};
      store_non_temporal(to + offset, token.decay * s + token.k[i] * change[j]);
    }
}

static void recurrent_step(const Token& token, int Dk, int Dv, const float* from, float* to) {
  int c = 0;
  for (; c + 8 * LANES <= Dv; c += 8 * LANES) recurrent_step_columns<8>(token, Dk, Dv, c, from, to);
  for (; c < Dv; c += COLUMN_BLOCK) recurrent_step_columns<2>(token, Dk, Dv, c, from, to);
}

// n tokens at once (arXiv 2412.06464). With G_i the product of the decays up to token i, and U_i
// what token i adds to the state along k_i:
//
//     U_i = beta_i (v_i - G_i S' k_i - sum over j < i of G_i/G_j (k_j' k_i) U_j)
//     out_i = G_i S' q_i + sum over j <= i of G_i/G_j (k_j' q_i) U_j
//     S = G_n S + sum over j of G_n/G_j k_j U_j'
struct Chunk {
  int n, Dk;
  float *k, *q;                                // [CHUNK, Dk]
  float *k_transposed;                         // [Dk, CHUNK], times G_n/G_j after prepare()
  float *kk, *kq;                              // k k' and q k' [CHUNK, CHUNK], times G_i/G_j
  float G[CHUNK], beta[CHUNK];

  // Computes what all column blocks share
  void prepare(const Token* tokens) {
    double log_G = 0, log_Gs[CHUNK];
    for (int i = 0; i < n; i++) {
      log_G += std::log((double)std::max(tokens[i].decay, 1e-30f));
      log_Gs[i] = log_G;
      G[i] = std::exp(log_G);
      beta[i] = tokens[i].beta;
    }
    for (int i = 0; i < Dk; i++)
      for (int j = 0; j < CHUNK; j++) k_transposed[i * CHUNK + j] = j < n ? k[j * Dk + i] : 0;
    for (int j = 0; j < CHUNK; j += NR) {
      gemm_panel(n, k_transposed + j, CHUNK, Dk, k, Dk, kk + j, CHUNK, false);
      gemm_panel(n, k_transposed + j, CHUNK, Dk, q, Dk, kq + j, CHUNK, false);
    }
    for (int i = 0; i < n; i++)
      for (int j = 0; j <= i; j++) {
        float decay = std::exp(log_Gs[i] - log_Gs[j]);
        kk[i * CHUNK + j] *= decay;
        kq[i * CHUNK + j] *= decay;
      }
    for (int j = 0; j < n; j++) {
      float decay = std::exp(log_G - log_Gs[j]);
      for (int i = 0; i < Dk; i++) k_transposed[i * CHUNK + j] *= decay;
    }
  }

  // A column block: updates S [Dk, COLUMN_BLOCK] and writes out [n, Dv]; v is [n, Dv], the scratch
  // buffer U [n, COLUMN_BLOCK]
  void run_columns(const float* v, int Dv, float* S, float* U, float* out) const {
    gemm_panel(n, S, COLUMN_BLOCK, Dk, k, Dk, U, COLUMN_BLOCK, false);
    gemm_panel(n, S, COLUMN_BLOCK, Dk, q, Dk, out, Dv, false);
    for (int i = 0; i < n; i++) {
      vf sums[2] = {}, outs[2];
      for (int c = 0; c < 2; c++) outs[c] = G[i] * load<vf>(out + i * Dv + c * LANES);
      for (int j = 0; j < i; j++)
        for (int c = 0; c < 2; c++) {
          vf u = load<vf>(U + j * COLUMN_BLOCK + c * LANES);
          sums[c] += kk[i * CHUNK + j] * u;
          outs[c] += kq[i * CHUNK + j] * u;
        }
      for (int c = 0; c < 2; c++) {
        float* U_i = U + i * COLUMN_BLOCK + c * LANES;
        vf u = beta[i] * (load<vf>(v + i * Dv + c * LANES) - G[i] * load<vf>(U_i) - sums[c]);
        store(U_i, u);
        store(out + i * Dv + c * LANES, outs[c] + kq[i * CHUNK + i] * u);
      }
    }
    for (int i = 0; i < Dk * COLUMN_BLOCK; i += LANES) store(S + i, G[n - 1] * load<vf>(S + i));
    gemm_panel(Dk, U, COLUMN_BLOCK, n, k_transposed, CHUNK, S, COLUMN_BLOCK, true);
  }
};

// One head of row b: chunks, of which only the last state is stored, then single steps for the last
// n_state tokens, which store each state: decoding may go back to any of them (rejected drafts).
static void run_head(const Delta& op, int b, int head, const float* conv_out) {
  int Dk = op.Dk, Dv = op.Dv;
  int k_head = head / (op.N / op.Nk);
  long size = (long)Dk * Dv;
  long first = cache_slot(op.positions, b, 0), last = cache_slot(op.positions, b, op.T - 1);
  int n_chunked = std::max(0l, last - first + 1 - op.n_state);
  float* S = reserve(thread_scratch, size + CHUNK * (3 * Dk + Dv + COLUMN_BLOCK + 2 * CHUNK));
  float *k = S + size, *q = k + CHUNK * Dk, *out = q + CHUNK * Dk;
  float *U = out + CHUNK * Dv, *k_transposed = U + CHUNK * COLUMN_BLOCK;
  float* kk = k_transposed + CHUNK * Dk;
  conv_out += (long)b * op.T * n_channels(op);
  const float* queries = conv_out + (long)k_head * Dk * op.T;
  const float* keys = queries + (long)op.Nk * Dk * op.T;
  const float* values = conv_out + (2l * op.Nk * Dk + (long)head * Dv) * op.T;
  auto state = [&](long p) { return state_at(op, b, head, p); };
  // S is [Dv / COLUMN_BLOCK, Dk, COLUMN_BLOCK]; i is an index of [Dk, Dv]
  auto blocked = [&](long i) { return S + (i / Dv + i % Dv / COLUMN_BLOCK * Dk) * COLUMN_BLOCK; };
  for (long i = 0; n_chunked && i < size; i += COLUMN_BLOCK) {
    if (first == 0) std::fill(blocked(i), blocked(i) + COLUMN_BLOCK, 0.0f);
    else copy_floats(state(first - 1) + i, COLUMN_BLOCK, blocked(i));
  }
  for (int t0 = 0, n; t0 < op.T; t0 += n) {
    n = std::min(CHUNK, (t0 < n_chunked ? n_chunked : op.T) - t0);
    Token tokens[CHUNK];
    for (int t = 0; t < n; t++) {
      const float* rates = op.rates + ((long)b * op.T + t0 + t) * 2 * op.N + head;
      l2_normalize(queries + (long)(t0 + t) * Dk, Dk, op.q_scale, q + t * Dk);
      l2_normalize(keys + (long)(t0 + t) * Dk, Dk, 1, k + t * Dk);
      float dt = softplus(rates[op.N] + op.decay_bias[head]);
      tokens[t] = {std::exp(op.decay_rate[head] * dt), 1 / (1 + std::exp(-rates[0])),
                   dot(k + t * Dk, q + t * Dk, Dk), k + t * Dk, q + t * Dk,
                   values + (long)(t0 + t) * Dv, out + t * Dv};
    }
    if (t0 < n_chunked) {
      Chunk chunk = {n, Dk, k, q, k_transposed, kk, kk + CHUNK * CHUNK, {}, {}};
      chunk.prepare(tokens);
      for (int c = 0; c < Dv; c += COLUMN_BLOCK)
        chunk.run_columns(tokens[0].v + c, Dv, S + (long)c * Dk, U, out + c);
      if (t0 + n == n_chunked)
        for (long i = 0; i < size; i += COLUMN_BLOCK)
          copy_floats(blocked(i), COLUMN_BLOCK, state(first + n_chunked - 1) + i);
    } else {
      for (int t = 0; t < n; t++) {
        long p = cache_slot(op.positions, b, t0 + t);
        if (follows(op.positions, b, t0 + t))
          recurrent_step(tokens[t], Dk, Dv, p ? state(p - 1) : nullptr, state(p));
        else std::fill(tokens[t].out, tokens[t].out + Dv, 0.0f);  // padding: must be finite
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
  float* conv_out = reserve(shared_scratch, 0);
  run_tasks(phase[0], op.B * n_conv_heads(op), 1, [&](int i) {
    convolve(op, i / n_conv_heads(op), i % n_conv_heads(op), conv_out);
  });
  run_tasks(phase[1], op.B * (op.N + 1), 1, [&](int i) {
    if (i < op.B) store_inputs(op, i);
    else run_head(op, (i - op.B) / op.N, (i - op.B) % op.N, conv_out);
  });
}
