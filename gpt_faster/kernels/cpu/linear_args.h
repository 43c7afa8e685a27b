// The arguments of a linear, and the layout of its weights.

#pragma once

#include "norms.h"

// out [M, N] = residual + factor * multiplier * activation(norm(x) [M, K] weight' + bias). Gated:
// the activation of the first N / 2 outputs times the others, out [M, N / 2].
//
// MoE: n_expert consecutive weights and biases, no residual. Rows of `out` are sorted by expert;
// expert e's end before expert_ends[e]. Row m reads row gather_rows[m] of x, or m if that is null.
//
// Without expert_ends, every expert processes all M rows: expert e reads K columns of x from
// e * x_expert_stride on and writes its columns of `out` from e * out_expert_stride on (MLA's
// per-head matrices).
struct Linear {
  int32_t kind, format, M, N, K, group_size, activation, gated, x_type, out_type, residual_type;
  int32_t x_bits;                              // fewest bits that x may be rounded to: 32, 16 or 8
  int32_t n_expert;                            // 0: not an MoE
  int32_t x_stride, x_expert_stride, out_stride, out_expert_stride;      // row stride 0: contiguous
  int32_t multiplier_type, multiplier_stride, bias_type;
  float factor;
  Norm norm;
  const void *x, *weight, *scales, *residual, *multiplier, *bias;
  void* out;
  const int32_t *expert_ends, *gather_rows;
};

static inline int n_output(const Linear& op) { return op.gated ? op.N / 2 : op.N; }

static inline size_t panel_bytes(int format, int K, int group_size = 0) {     // K padded to GROUP
  size_t bytes[] = {4, 2, 1};
  if (format == FP4) return ((size_t)K / 2 + K / group_size) * NR;
  return format == INT4 ? (size_t)K / 2 * NR : bytes[format] * K * NR;
}

static inline const char* weight_panel(const Linear& op, int i, int K) {
  return (const char*)op.weight + i * panel_bytes(op.format, K, op.group_size);
}

static inline bool has_row_scales(const Linear& op) { return op.format == INT8 || op.format == FP4; }

static inline vf row_scale(const Linear& op, int i, int v) {      // fp32 [out]
  return load<vf>((const float*)op.scales + i * NR + v * LANES);
}

// int4: w = scale * code + offset. Scales [out / NR, in / group_size, NR]: words of two bf16, scale
// and zero, with offset = zero - 8 scale
static inline const int32_t* int4_scales(const Linear& op, int i, int K) {
  return (const int32_t*)op.scales + (long)i * (K / op.group_size) * NR;
}

// fp4: w = e2m1(code) * scale of the group * row_scale. The panel's codes are followed by its scales
// [in / group_size, NR] in bytes without a sign: e4m3 for groups of 16, e8m0 for groups of 32
static inline const uint8_t* fp4_scales(const char* panel, int K) {
  return (const uint8_t*)panel + (size_t)K / 2 * NR;
}

// The bits as a float: e8m0's value, or 2^-120 of e4m3's, whose exponent has another bias
static inline vf fp4_scale_bits(const uint8_t* scales, int group_size) {
  return (vf)(load_uint8(scales) << (group_size < 32 ? 20 : 23));
}

static inline vf fp4_scale(const uint8_t* scales, int group_size) {
  return fp4_scale_bits(scales, group_size) * (group_size < 32 ? 0x1p120f : 1.0f);
}

static inline void scale_and_offset(const void* words, vf* scale, vf* offset) {
  vi both = load<vi>(words);
  *scale = low_bf16(both);
  *offset = high_bf16(both) - 8.0f * *scale;
}
