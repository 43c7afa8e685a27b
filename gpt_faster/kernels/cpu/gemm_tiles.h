// Micro-kernels: a tile of activation rows times a weight panel, with accumulators in registers.

#pragma once

#include "activations.h"
#include "amx.h"

// One K step: acc += weights * activation (or a dot product of bf16 pairs)
static inline vf add_product(vf acc, const float* w, float x) { return acc + x * load<vf>(w); }
static inline vf add_product(vf acc, const uint16_t* w, float x) { return acc + x * load_bf16(w); }
static inline vf add_product(vf acc, const int32_t* w, int32_t x) {
  return dot2_bf16(acc, load<vi>(w), x);
}

// y [M, NR] (+)= x [M, n] times w [n, NR]; int32 holds bf16 pairs
template <int M, class Weight, class Input>
static void micro_kernel(const Weight* w, long ldw, int n, const Input* x, long ldx, float* y,
                         long ldy, bool accumulate) {
  vf acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) acc[m][v] = accumulate ? load<vf>(y + m * ldy + v * LANES) : vf{};
  for (int k = 0; k < n; k++) {
    if (M >= 8 && std::is_same<Weight, int32_t>::value) prefetch(w + k * ldw, 4 * NR);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++)
        acc[m][v] = add_product(acc[m][v], w + k * ldw + v * LANES, x[m * ldx + k]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ldy + v * LANES, acc[m][v]);
}

// Dispatches to micro_kernel<m>, 1 <= m <= M
template <int M, class Weight, class Input>
static void micro_kernel_for(int m, const Weight* w, long ldw, int n, const Input* x, long ldx,
                             float* y, long ldy, bool accumulate) {
  if (m == M) return micro_kernel<M>(w, ldw, n, x, ldx, y, ldy, accumulate);
  if constexpr (M > 1) micro_kernel_for<M - 1>(m, w, ldw, n, x, ldx, y, ldy, accumulate);
}

// micro_kernel for any M, in tiles of nearly equal height
template <class Weight, class Input>
static void gemm_panel(int M, const Weight* w, long ldw, int n, const Input* x, long ldx, float* y,
                       long ldy, bool accumulate) {
  if constexpr (std::is_same<Weight, int32_t>::value)
    if (amx_enabled() && M > AMX_THRESHOLD && n % AMX_TILE == 0) {
      for (int m = 0; m < M; m += AMX_MR)
        amx_micro_kernel(std::min(M - m, AMX_MR), w, ldw, n, x + m * ldx, ldx, y + m * ldy, ldy,
                         accumulate);
      return;
    }
  int n_tile = (M + MR - 1) / MR;
  for (int i = 0, m = 0; i < n_tile; i++) {
    int height = (M - m + n_tile - i - 1) / (n_tile - i);
    micro_kernel_for<MR>(height, w, ldw, n, x + m * ldx, ldx, y + m * ldy, ldy, accumulate);
    m += height;
  }
}

// The kernels below: y [M, NR] = x times a whole panel. Small M uses several accumulators per
// output to hide the latency of the additions. noinline: with inlining, a change to one kernel
// slowed another down by 20 %.

template <int M>
[[gnu::noinline]] static void fp32_kernel(const float* w, const Activations& x, float* y) {
  constexpr int U = M == 1 ? 4 : M == 2 ? 2 : 1;
  vf acc[U][M][2] = {};
  for (int k = 0; k < x.K; k += U)
    for (int u = 0; u < U; u++)
      for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++)
          acc[u][m][v] += x.values[(long)m * x.K + k + u] * load<vf>(w + (k + u) * NR + v * LANES);
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      for (int u = 1; u < U; u++) acc[0][m][v] += acc[u][m][v];
      store(y + m * NR + v * LANES, acc[0][m][v]);
    }
}

template <int M>
[[gnu::noinline]] static void bf16_kernel(const int32_t* w, const Activations& x, float* y) {
  constexpr int U = M == 1 ? 2 : 1;
  vf acc[U][2][M][2] = {};                     // [1] for odd inputs if M < 4, else unused
  for (int p = 0; p < x.K / 2; p += U)
    for (int u = 0; u < U; u++) {
      const int32_t* pair_ptr = w + (p + u) * NR;
      prefetch(pair_ptr, 4 * NR);
      for (int odd = 0; odd < 2; odd++) {
        vi pairs[2] = {load<vi>(pair_ptr), load<vi>(pair_ptr + LANES)};
        vf weights[2];                         // both vectors reuse the broadcast x
        for (int v = 0; v < 2; v++) weights[v] = odd ? high_bf16(pairs[v]) : low_bf16(pairs[v]);
        for (int m = 0; m < M; m++)
          for (int v = 0; v < 2; v++)
            acc[u][M < 4 && odd][m][v] += x.values[(long)m * x.K + 2 * (p + u) + odd] * weights[v];
      }
    }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      vf sum = acc[0][0][m][v] + acc[0][1][m][v];
      for (int u = 1; u < U; u++) sum += acc[u][0][m][v] + acc[u][1][m][v];
      store(y + m * NR + v * LANES, sum);
    }
}

static inline vi16 load_codes(const int8_t* p) { return load_int8(p); }
static inline vi16 load_codes(const int16_t* p) { return load<vi16>(p); }

// sum += scale * x_scale * acc, for group g; weight scales [K / GROUP, NR], or null: 1
template <int M>
static inline void add_group(vf sum[M][2], const vi acc[M][2], const float* scales,
                             const Activations& x, int g) {
  vf scale[2] = {vf{} + 1.0f, vf{} + 1.0f};
  if (scales)
    for (int v = 0; v < 2; v++) scale[v] = load<vf>(scales + g * NR + v * LANES);
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++)
      sum[m][v] += to_float(acc[m][v]) * (scale[v] * x.scale[m * (x.K / GROUP) + g]);
}

// int16 activations times weight pairs [K / 2, NR, 2]: int8, or unpacked int16 with one scale per
// GROUP
template <int M, class Code>
[[gnu::noinline]] static void a16_kernel(const Code* w, const float* scales,
                                         const Activations& x, float* y) {
  constexpr bool use_prefetch = sizeof(Code) == 1 && (M > 1 || LANES == 8);       // as measured
  int n_group = x.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < n_group; g++) {
    vi acc[M][2] = {};
    auto multiply_pair = [&](int p) {
      const Code* code_ptr = w + (g * GROUP / 2 + p) * NR * 2;
      if (use_prefetch && p % (32 / NR) == 0) prefetch(code_ptr, 64);
      vi16 codes[2] = {load_codes(code_ptr), load_codes(code_ptr + 2 * LANES)};
      for (int m = 0; m < M; m++) {
        int32_t pair = x.int16_pair(m, g * GROUP / 2 + p);
        for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], pair);
      }
    };
    if constexpr (M == 1) {
      for (int p = 0; p < GROUP / 2; p++) multiply_pair(p);
    } else {
#pragma GCC unroll 2
      for (int p = 0; p < GROUP / 2; p++) multiply_pair(p);
    }
    add_group<M>(sum, acc, scales, x, g);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * NR + v * LANES, sum[m][v]);
}

// One row's int16 activations times a group of packed int4 weights [GROUP / 8, NR]. The second code
// of 16 bits is not shifted: its products are 16 times as large.
static inline void multiply_int4_group(const int32_t* words, const int16_t* x, vi acc[2]) {
  const auto* pairs = (const int32_t*)x;
  vi sum[2] = {}, sum_16[2] = {};
#pragma GCC unroll 1
  for (int j = 0; j < GROUP / 8; j++, words += NR, pairs += 4) {
    prefetch(words, 4 * NR);
    for (int v = 0; v < 2; v++) {
      vi codes = load<vi>(words + v * LANES);
      sum[v] = dot2(sum[v], (vi16)(codes & 0x000f000f), pairs[0]);
      sum_16[v] = dot2(sum_16[v], (vi16)(codes & 0x00f000f0), pairs[1]);
      sum[v] = dot2(sum[v], (vi16)((vi)((vu16)codes >> 8) & 0x000f000f), pairs[2]);
      sum[v] = dot2(sum[v], (vi16)((vu16)codes >> 12), pairs[3]);
    }
  }
  for (int v = 0; v < 2; v++) acc[v] = sum[v] + (sum_16[v] >> 4);
}

// int16 activations times packed int4 weights
template <int M>
[[gnu::noinline]] static void a16w4_kernel(const int32_t* w, const int32_t* scales,
                                           int group_size, const Activations& x, float* y) {
  int n_group = x.K / GROUP, x_groups = group_size / GROUP;       // of activations
  vf sum[M][2] = {};
  for (int i = 0; i < n_group; i++) {
    const int32_t* group_scales = scales + i / x_groups * NR;
    vi acc[M][2] = {};
    if constexpr (M == 1) multiply_int4_group(w + i * GROUP / 8 * NR, x.q + i * GROUP, acc[0]);
    else {
#pragma GCC unroll 1
      for (int j = 0; j < GROUP / 8; j++) {
        const int32_t* words = w + (i * GROUP / 8 + j) * NR;
        prefetch(words, 4 * NR);
#pragma GCC unroll 2                           // by 4, GCC spills the products
        for (int b = 0; b < 4; b++) {
          vi16 codes[2];
          for (int v = 0; v < 2; v++)
            codes[v] = (vi16)((vi)(load<vu>(words + v * LANES) >> (4 * b)) & 0x000f000f);
          for (int m = 0; m < M; m++) {
            int32_t pair = x.int16_pair(m, i * GROUP / 2 + 4 * j + b);
            for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], pair);
          }
        }
      }
    }
    prefetch(group_scales, 4 * NR);
    for (int v = 0; v < 2; v++) {
      vf scale, offset;
      scale_and_offset(group_scales + v * LANES, &scale, &offset);
      for (int m = 0; m < M; m++) {
        sum[m][v] += to_float(acc[m][v]) * (scale * x.scale[m * n_group + i]);
        sum[m][v] += offset * x.x_sum[m * n_group + i];
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * NR + v * LANES, sum[m][v]);
}

// int14 activations times packed fp4 weights, without the scale of the row. Activations are those
// of a group or of two (G = GROUP or GROUP / 2).
template <int M, int G>
[[gnu::noinline]] static void a16fp4_kernel(const int32_t* w, const uint8_t* scales,
                                            const Activations& x, float* y) {
  int n_group = x.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < x.K / G; g++) {
    vi acc[M][2] = {};
#pragma GCC unroll 1
    for (int j = g * G / 8; j < (g + 1) * G / 8; j++) {
      const int32_t* words = w + (long)j * NR;
      prefetch(words, 4 * NR);
      auto multiply_pairs = [&](int odd) {     // byte i: input 2 i + odd
        vi bytes[2];
        for (int v = 0; v < 2; v++)
          bytes[v] = twice_e2m1((vi)(load<vu>(words + v * LANES) >> (4 * odd)) & 0x0f0f0f0f);
        // In the high bytes of int16, 256 times as large: bytes 0 and 2, then 1 and 3
        for (int high = 0; high < 2; high++) {
          vi16 codes[2];
          for (int v = 0; v < 2; v++)
            codes[v] = high ? (vi16)(bytes[v] & (int32_t)0xff00ff00) : (vi16)bytes[v] << 8;
          for (int m = 0; m < M; m++) {
            int32_t pair = x.int16_pair(m, 4 * j + 2 * high + odd);
            for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], pair);
          }
        }
      };
      if constexpr (M < 2) {
        for (int odd = 0; odd < 2; odd++) multiply_pairs(odd);
      } else {                                 // unrolled, GCC spills the products
#pragma GCC unroll 1
        for (int odd = 0; odd < 2; odd++) multiply_pairs(odd);
      }
    }
    prefetch(scales + g * NR, NR);
    vf scale[2];
    for (int v = 0; v < 2; v++) scale[v] = fp4_scale_bits(scales + g * NR + v * LANES, G);
    for (int m = 0; m < M; m++) {
      float x_scale = x.scale[m * n_group + g * G / GROUP] * (G < GROUP ? 0x1p80f : 1.0f);
      for (int v = 0; v < 2; v++) sum[m][v] += to_float(acc[m][v]) * (scale[v] * x_scale);
    }
  }
  for (int m = 0; m < M; m++)                  // the values were 512 times as large
    for (int v = 0; v < 2; v++)
      store(y + m * NR + v * LANES, sum[m][v] * (G < GROUP ? 0x1p31f : 0x1p-9f));
}

// int8 activations times uint8 codes [K / 4, NR, 4]: int4 codes if `scales` is given, else int8
// codes + 128, whose accumulators start at -128 times the sum of x.
template <int M>
[[gnu::noinline]] static void a8_kernel(const int32_t* w, const float* scales,
                                        const Activations& x, float* y) {
  int n_group = x.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < n_group; g++) {
    DotSums acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      acc[m][0] = acc[m][1] = (DotSums)(vi{} - (scales ? 0 : 128 * x.q_sum[m * n_group + g]));
#pragma GCC unroll 4
    for (int p = 0; p < GROUP / 4; p++) {
      const int32_t* words = w + (g * GROUP / 4 + p) * NR;
      vi codes[2] = {load<vi>(words), load<vi>(words + LANES)};
#pragma GCC unroll 16
      for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++)
          acc[m][v] = dot4(acc[m][v], codes[v], x.int8_quad(m, g * GROUP / 4 + p));
    }
    vi wide_acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++) wide_acc[m][v] = widen_sums(acc[m][v]);
    add_group<M>(sum, wide_acc, scales, x, g);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * NR + v * LANES, sum[m][v]);
}
