// Some rows of x by a block of weights [n, ROWS]: the loops that take the time.

#pragma once

#include "matrices.h"
#include "rows.h"

// A step of a product: weights by one number of x, or by two of bf16
static inline vf add_product(vf acc, const float* w, float x) { return acc + x * load<vf>(w); }
static inline vf add_product(vf acc, const uint16_t* w, float x) { return acc + x * load_bf16(w); }
static inline vf add_product(vf acc, const int32_t* w, int32_t x) {
  return dot2_bf16(acc, load<vi>(w), x);
}

// y [M, ROWS] (+)= x [M, n] by w [n, ROWS]; a row of w begins every ldw numbers
template <int M, class Weight, class Number>
static void tile(const Weight* w, long ldw, int n, const Number* x, long ldx, float* y, long ldy,
                 bool add) {
  vf acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) acc[m][v] = add ? load<vf>(y + m * ldy + v * LANES) : vf{};
  for (int k = 0; k < n; k++) {
    if (M >= 8 && std::is_same<Weight, int32_t>::value) prefetch(w + k * ldw, 4 * ROWS);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++)
        acc[m][v] = add_product(acc[m][v], w + k * ldw + v * LANES, x[m * ldx + k]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ldy + v * LANES, acc[m][v]);
}

template <int M, class Weight, class Number>
static void tile_of(int m, const Weight* w, long ldw, int n, const Number* x, long ldx, float* y,
                    long ldy, bool add) {
  if (m == M) return tile<M>(w, ldw, n, x, ldx, y, ldy, add);
  if constexpr (M > 1) tile_of<M - 1>(m, w, ldw, n, x, ldx, y, ldy, add);
}

template <class Weight, class Number>
static void tiles(int M, const Weight* w, long ldw, int n, const Number* x, long ldx, float* y,
                  long ldy, bool add) {
  if constexpr (std::is_same<Weight, int32_t>::value)
    if (has_matrices() && M > FEW_FOR_MATRICES && n % MATRIX == 0) {
      for (int m = 0; m < M; m += MATRICES_ROWS)
        by_matrices(std::min(M - m, MATRICES_ROWS), w, ldw, n, x + m * ldx, ldx, y + m * ldy, ldy, add);
      return;
    }
  int n_tile = (M + TILE - 1) / TILE;
  for (int i = 0, m = 0; i < n_tile; i++) {    // of nearly equal height
    int height = (M - m + n_tile - i - 1) / (n_tile - i);
    tile_of<TILE>(height, w, ldw, n, x + m * ldx, ldx, y + m * ldy, ldy, add);
    m += height;
  }
}

// y [M][ROWS] = x by a block of weights. Few rows have several sums of each under way. Each is
// compiled by itself: in line, a change to one of them made another a fifth slower.

template <int M>
[[gnu::noinline]] static void by_fp32(const float* w, const Rows& rows, float* y) {
  constexpr int U = M == 1 ? 4 : M == 2 ? 2 : 1;
  vf acc[U][M][2] = {};
  for (int k = 0; k < rows.K; k += U)
    for (int u = 0; u < U; u++)
      for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++)
          acc[u][m][v] += rows.x[(long)m * rows.K + k + u] * load<vf>(w + (k + u) * ROWS + v * LANES);
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      for (int u = 1; u < U; u++) acc[0][m][v] += acc[u][m][v];
      store(y + m * ROWS + v * LANES, acc[0][m][v]);
    }
}

template <int M>
[[gnu::noinline]] static void by_bf16(const int32_t* w, const Rows& rows, float* y) {
  constexpr int U = M == 1 ? 2 : 1;
  vf acc[U][2][M][2] = {};                     // few rows have sums of their own for odd inputs
  for (int p = 0; p < rows.K / 2; p += U)
    for (int u = 0; u < U; u++) {
      const int32_t* at = w + (p + u) * ROWS;
      prefetch(at, 4 * ROWS);
      for (int odd = 0; odd < 2; odd++) {
        vi pairs[2] = {load<vi>(at), load<vi>(at + LANES)};
        vf halves[2];                          // both meet x while it is in a register
        for (int v = 0; v < 2; v++) halves[v] = odd ? high_bf16(pairs[v]) : low_bf16(pairs[v]);
        for (int m = 0; m < M; m++)
          for (int v = 0; v < 2; v++)
            acc[u][M < 4 && odd][m][v] += rows.x[(long)m * rows.K + 2 * (p + u) + odd] * halves[v];
      }
    }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      vf sum = acc[0][0][m][v] + acc[0][1][m][v];
      for (int u = 1; u < U; u++) sum += acc[u][0][m][v] + acc[u][1][m][v];
      store(y + m * ROWS + v * LANES, sum);
    }
}

static inline vs load_codes(const int8_t* p) { return load_int8(p); }
static inline vs load_codes(const int16_t* p) { return load<vs>(p); }

// sum + a group's whole numbers, as what they stand for; scales [K / GROUP, ROWS], or null: ones
template <int M>
static inline void add_group(vf sum[M][2], const vi acc[M][2], const float* scales,
                             const Rows& rows, int g) {
  vf scale[2] = {vf{} + 1.0f, vf{} + 1.0f};
  if (scales)
    for (int v = 0; v < 2; v++) scale[v] = load<vf>(scales + g * ROWS + v * LANES);
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++)
      sum[m][v] += to_float(acc[m][v]) * (scale[v] * rows.scale[m * (rows.K / GROUP) + g]);
}

// int8, or int4 that has been decoded and has scales.
template <int M, class Code>
[[gnu::noinline]] static void by_codes(const Code* w, const float* scales, const Rows& rows,
                                      float* y) {
  constexpr bool is_ahead = sizeof(Code) == 1 && (M > 1 || LANES == 8);      // as measured
  int n_group = rows.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < n_group; g++) {
    vi acc[M][2] = {};
    auto meet = [&](int p) {
      const Code* at = w + (g * GROUP / 2 + p) * ROWS * 2;
      if (is_ahead && p % (32 / ROWS) == 0) prefetch(at, 64);
      vs codes[2] = {load_codes(at), load_codes(at + 2 * LANES)};
      for (int m = 0; m < M; m++) {
        int32_t x = rows.pair(m, g * GROUP / 2 + p);
        for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], x);
      }
    };
    if constexpr (M == 1) {
      for (int p = 0; p < GROUP / 2; p++) meet(p);
    } else {
#pragma GCC unroll 2
      for (int p = 0; p < GROUP / 2; p++) meet(p);
    }
    add_group<M>(sum, acc, scales, rows, g);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ROWS + v * LANES, sum[m][v]);
}

template <int M>
[[gnu::noinline]] static void by_int4(const int32_t* w, const int32_t* scales, int group,
                                     const Rows& rows, float* y) {
  int n_group = rows.K / GROUP, steps = group / GROUP;
  vf total[M][2] = {};
  for (int g = 0; g < rows.K / group; g++) {
    vf sum[M][2] = {};
    float x_sum[M] = {};
    for (int i = g * steps; i < (g + 1) * steps; i++) {
      vi acc[M][2] = {};
#pragma GCC unroll 1
      for (int j = 0; j < GROUP / 8; j++) {
        const int32_t* at = w + (i * GROUP / 8 + j) * ROWS;
        prefetch(at, 4 * ROWS);
        auto meet = [&](int b) {               // both halves meet x while it is in a register
          vs codes[2];
          for (int v = 0; v < 2; v++)
            codes[v] = (vs)((vi)(load<vu>(at + v * LANES) >> (4 * b)) & 0x000f000f);
          for (int m = 0; m < M; m++) {
            int32_t x = rows.pair(m, i * GROUP / 2 + 4 * j + b);
            for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], x);
          }
        };
        if constexpr (M < 2) {
          for (int b = 0; b < 4; b++) meet(b);
        } else {                               // else its products wait in memory for their sums
#pragma GCC unroll 2
          for (int b = 0; b < 4; b++) meet(b);
        }
      }
      for (int m = 0; m < M; m++) {
        for (int v = 0; v < 2; v++) sum[m][v] += to_float(acc[m][v]) * rows.scale[m * n_group + i];
        x_sum[m] += rows.sum[m * n_group + i];
      }
    }
    prefetch(scales + g * ROWS, 4 * ROWS);
    for (int v = 0; v < 2; v++) {
      vf scale, term;
      scale_and_term(scales + g * ROWS + v * LANES, &scale, &term);
      for (int m = 0; m < M; m++) total[m][v] += scale * sum[m][v] + term * x_sum[m];
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ROWS + v * LANES, total[m][v]);
}

// The same as bytes [K / 4, ROWS, 4]; int8, where four make a product, has 128 added to each
template <int M>
[[gnu::noinline]] static void by_bytes(const int32_t* w, const float* scales, const Rows& rows,
                                      float* y) {
  int n_group = rows.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < n_group; g++) {
    Sums acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      acc[m][0] = acc[m][1] = (Sums)(vi{} - (scales ? 0 : 128 * rows.total[m * n_group + g]));
#pragma GCC unroll 4
    for (int p = 0; p < GROUP / 4; p++) {
      const int32_t* at = w + (g * GROUP / 4 + p) * ROWS;
      vi bytes[2] = {load<vi>(at), load<vi>(at + LANES)};
#pragma GCC unroll 16
      for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++)
          acc[m][v] = dot4(acc[m][v], bytes[v], rows.four(m, g * GROUP / 4 + p));
    }
    vi wholes[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++) wholes[m][v] = whole(acc[m][v]);
    add_group<M>(sum, wholes, scales, rows, g);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ROWS + v * LANES, sum[m][v]);
}
