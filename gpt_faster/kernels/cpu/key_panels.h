// A block of a cache's keys in fp32, transposed: for products with many queries.
//
// 32-bit words are transposed before their codes become floats, so that a byte is moved once and not
// once for each of its values. Does not know queries.

#pragma once

#include "direct_attention.h"

constexpr int values_per_word(int type) {
  return type == FP32 ? 1 : type == BF16 ? 2 : type == INT4 ? 8 : 4;
}

// Value e of each word of a cache of this type; FP8: / FP8_UNIT^2, INT4: + 8
template <int TYPE> static inline vf value_of_word(vi word, int e) {
  if (TYPE == FP32) return (vf)word;
  if (TYPE == BF16) return e == 0 ? low_bf16(word) : high_bf16(word);
  if (TYPE == INT4) return to_float((vi)((vu)word >> 4 * e) & 15);
  vi top = word << (24 - 8 * e);               // the value's byte comes first
  return TYPE == INT8 ? to_float(top >> 24) : fp8_of_bits_20(top >> 4);
}

// Keys [first, first + n) of the cache -> panels [n / NR, H, NR], the padding repeats the last key.
// scales: a buffer of n H / GROUP + LANES.
template <int TYPE>
static void read_panels(const Cache& cache, long first, int n, int H, float* scales, float* to) {
  constexpr int E = values_per_word(TYPE);
  const char* keys = vector_address(cache, first, H);
  if (cache.scales) read_scales(cache.scales + first * n_group(H), n * n_group(H), scales);
  for (int j = 0; j < n; j += LANES)
    for (int w = 0; w < H / E; w += LANES) {
      vi words[LANES];
      for (int i = 0; i < LANES; i++)
        words[i] = load<vi>(keys + vector_bytes(TYPE, H) * std::min(j + i, n - 1) + 4 * w);
      transpose(words);
      float* panel = to + (long)(j / NR * H + w * E) * NR + j % NR;
      vf scale = {}, offset = {};
      for (int i = 0; i < LANES; i++) {
        if (TYPE > BF16 && (w + i) * E % GROUP == 0) {
          for (int key = 0; key < LANES; key++)
            scale[key] = scales[std::min(j + key, n - 1) * n_group(H) + (w + i) * E / GROUP];
          if (TYPE == INT4) offset = scale * -8.0f;
          if (TYPE == FP8) scale *= FP8_UNIT;
        }
#pragma GCC unroll 8
        for (int e = 0; e < E; e++) {
          vf x = value_of_word<TYPE>(words[i], e);
          if (TYPE == FP8) x *= FP8_UNIT;
          store(panel + (i * E + e) * NR, TYPE > BF16 ? x * scale + offset : x);
        }
      }
    }
}

static bool has_panels(int type, int H) {
  return H % NR == 0 && H % (values_per_word(type) * LANES) == 0 && (type <= BF16 || H % GROUP == 0);
}

// Packs keys k [n_key, n], floats or bf16 pairs, into panels [n_key / NR, n, NR]. The padding
// repeats the last key.
static void transpose_keys(const int32_t* k, int n_key, int n, int32_t* to) {
  for (int j = 0; j < n_key; j += LANES)
    for (int h = 0; h < n; h += LANES) {
      vi a[LANES];
      for (int i = 0; i < LANES; i++) a[i] = load<vi>(k + std::min(j + i, n_key - 1) * n + h);
      transpose(a);
      int32_t* panel = to + (long)(j / NR * n + h) * NR + j % NR;
      for (int i = 0; i < LANES; i++) store(panel + i * NR, a[i]);
    }
}

// Keys [first, first + n) of the cache -> panels [n / NR, Hp, NR]. rows: a buffer [KEY_BLOCK, Hp],
// whose columns from H on are zero.
static void read_keys(const Cache& cache, long first, int n, int H, float* rows, float* to) {
  int Hp = round_up(H, NR);
  if (!has_panels(cache.type, H)) {
    read_vectors(cache, first, n, H, H, rows, Hp);
    return transpose_keys((const int32_t*)rows, n, Hp, (int32_t*)to);
  }
  for_type(cache.type, [&](auto type) {
    read_panels<decltype(type)::value>(cache, first, n, H, rows, to);
  });
}
