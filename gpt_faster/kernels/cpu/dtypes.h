// Loads and stores that convert between fp32 and bf16.

#pragma once

#include "simd.h"

enum Dtype { FP32, BF16, INT8, INT4, FP8, FP4 };

static inline void copy_floats(const float* from, int n, float* to) {     // n is small
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load<vf>(from + i));
  for (; i < n; i++) to[i] = from[i];
}

static void read_floats(const void* from, int dtype, long offset, int n, float* to) {
  if (dtype == FP32) return copy_floats((const float*)from + offset, n, to);
  const uint16_t* bits = (const uint16_t*)from + offset;
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    store(to + i, load_bf16(bits + i));
  for (; i < n; i++) to[i] = bf16_to_float(bits[i]);
}

static void add_floats(const void* from, int dtype, long offset, int n, float* to) {
  for (int i = 0; i < n; i++)
    to[i] += dtype == FP32 ? ((const float*)from)[offset + i]
                           : bf16_to_float(((const uint16_t*)from)[offset + i]);
}

// A vector of n floats, n <= LANES, padded with zeros
static inline vf read_vector(const void* from, int dtype, long offset, int n) {
  if (n < LANES) {
    float partial[LANES] = {};
    read_floats(from, dtype, offset, n, partial);
    return load<vf>(partial);
  }
  return dtype == FP32 ? load<vf>((const float*)from + offset)
                       : load_bf16((const uint16_t*)from + offset);
}

static void write_floats(const float* from, int n, void* to, int dtype, long offset) {
  if (dtype == FP32) return copy_floats(from, n, (float*)to + offset);
  uint16_t* bits = (uint16_t*)to + offset;
  int i = 0;
#if defined(__AVX512BF16__)
  for (; i + LANES <= n; i += LANES)
    store(bits + i, _mm512_cvtneps_pbh((__m512)load<vf>(from + i)));
#endif
  for (; i < n; i++) bits[i] = float_to_bf16(from[i]);
}
