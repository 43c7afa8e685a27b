// Floats read from memory and written to it, as fp32 or bf16.

#pragma once

#include "vectors.h"

enum Type { FP32, BF16, INT8, INT4 };

static inline void copy_floats(const float* from, int n, float* to) {     // mostly a few vectors
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load<vf>(from + i));
  for (; i < n; i++) to[i] = from[i];
}

static void read_floats(const void* from, int type, long at, int n, float* to) {
  if (type == FP32) return copy_floats((const float*)from + at, n, to);
  const uint16_t* bits = (const uint16_t*)from + at;
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    store(to + i, load_bf16(bits + i));
  for (; i < n; i++) to[i] = bf16_to_float(bits[i]);
}

static void add_floats(const void* from, int type, long at, int n, float* to) {
  for (int i = 0; i < n; i++)
    to[i] += type == FP32 ? ((const float*)from)[at + i]
                          : bf16_to_float(((const uint16_t*)from)[at + i]);
}

// The first n of a vector's floats, the others 0
static inline vf read_vector(const void* from, int type, long at, int n) {
  if (n < LANES) {
    float first[LANES] = {};
    read_floats(from, type, at, n, first);
    return load<vf>(first);
  }
  return type == FP32 ? load<vf>((const float*)from + at) : load_bf16((const uint16_t*)from + at);
}

static void write_floats(const float* from, int n, void* to, int type, long at) {
  if (type == FP32) return copy_floats(from, n, (float*)to + at);
  uint16_t* bits = (uint16_t*)to + at;
  int i = 0;
#if defined(__AVX512BF16__)
  for (; i + LANES <= n; i += LANES)
    store(bits + i, _mm512_cvtneps_pbh((__m512)load<vf>(from + i)));
#endif
  for (; i < n; i++) bits[i] = float_to_bf16(from[i]);
}
