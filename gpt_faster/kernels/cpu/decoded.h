// A block of weights as other numbers, once for all rows that meet it.

#pragma once

#include "rows.h"

// Weights of inputs [from, from + n) as floats [n, ROWS]
static void to_floats(const Linear& op, int i, int K, int from, int n, float* to) {
  const char* w = block(op, i, K);
  if (op.format == FP32) memcpy(to, (const float*)w + (long)from * ROWS, 4 * (size_t)n * ROWS);
  for (int v = 0; v < 2; v++) {
    float* column = to + v * LANES;
    if (op.format == BF16)
      for (int k = 0; k < n; k += 2) {
        vi pair = load<vi>((const int32_t*)w + (from + k) / 2 * ROWS + v * LANES);
        store(column + k * ROWS, low_bf16(pair));
        store(column + (k + 1) * ROWS, high_bf16(pair));
      }
    if (op.format == INT8)                     // without its scale
      for (int k = 0; k < n; k += 2) {
        vi pair = (vi)load_int8(w + (from + k) * ROWS + 2 * v * LANES);
        store(column + k * ROWS, to_float(pair << 16 >> 16));
        store(column + (k + 1) * ROWS, to_float(pair >> 16));
      }
    if (op.format == INT4) {
      const int32_t* scales = int4_scales(op, i, K);
      for (int k = 0; k < n; k += GROUP) {
        vf scale, term;
        scale_and_term(scales + (from + k) / op.group * ROWS + v * LANES, &scale, &term);
        for (int j = k; j < k + GROUP; j += 8) {
          const int32_t* codes = (const int32_t*)w + (from + j) / 8 * ROWS + v * LANES;
          prefetch(codes, 4 * LANES);
          vu words = load<vu>(codes);
          for (int b = 0; b < 8; b++) {
            vf code = to_float((vi)(words >> (4 * b) & 15));
            store(column + (j + b) * ROWS, code * scale + term);
          }
        }
      }
    }
  }
}

// The same as pairs of bf16 [K / 2, ROWS, 2]; memory: [DEPTH, ROWS]
static void to_pairs(const Linear& op, int i, int K, float* memory, int32_t* to) {
  for (int from = 0; from < K; from += DEPTH, to += DEPTH / 2 * ROWS) {
    int n = std::min(DEPTH, K - from);
    to_floats(op, i, K, from, n, memory);
    for (int k = 0; k < n; k += 2)
      for (int v = 0; v < ROWS; v += LANES) {
        vi even = load<vi>(memory + k * ROWS + v) + 0x8000;       // rounded
        vi odd = load<vi>(memory + (k + 1) * ROWS + v) + 0x8000;
        store(to + k / 2 * ROWS + v, (vi)((vu)even >> 16) | (odd & (int32_t)0xffff0000));
      }
  }
}

// A block of weights as several tiles share it
struct Decoded {
  int16_t* codes;                              // [K / 2, ROWS, 2] as x is: bf16, integers or bytes
  float *scales, *terms;                       // [K / GROUP, ROWS], of int4's integers; bf16's scales
  float* floats;                               // [DEPTH, ROWS]

  Decoded(float* memory, int K) {
    codes = (int16_t*)memory;
    scales = memory + (size_t)K / 2 * ROWS;
    terms = scales + (size_t)K / GROUP * ROWS;
    floats = terms + (size_t)K / GROUP * ROWS;
  }

  static size_t size(int K) { return (size_t)(K / 2 + 2 * (K / GROUP) + DEPTH) * ROWS; }

  void decode(const Linear& op, int i, int K) {
    if (numbers(op) == PAIRS) return to_pairs(op, i, K, floats, (int32_t*)codes);
    if (op.format == BF16) return take_bf16((const int32_t*)block(op, i, K), K);
    if (op.format == INT8 && numbers(op) == INTEGERS)
      return widen((const int8_t*)block(op, i, K), K);
    if (op.format == INT8) return take_bytes((const uint16_t*)block(op, i, K), K);
    const int32_t *w = (const int32_t*)block(op, i, K), *words = int4_scales(op, i, K);
    bool by_bytes = numbers(op) == BYTES;
    for (int k = 0; k < K / 8 * ROWS; k += LANES) {
      prefetch(w + k, 4 * LANES);
      int n = by_bytes ? 2 : 4, mask = by_bytes ? 0x0f0f0f0f : 0x000f000f;
      int32_t* to = (int32_t*)codes + k / ROWS * n * ROWS + k % ROWS;
      for (int b = 0; b < n; b++) store(to + b * ROWS, (vi)(load<vu>(w + k) >> (4 * b)) & mask);
    }
    for (int g = 0; g < K / GROUP; g++)
      for (int v = 0; v < ROWS; v += LANES) {
        vf scale, term;
        scale_and_term(words + g * GROUP / op.group * ROWS + v, &scale, &term);
        store(scales + g * ROWS + v, scale);
        store(terms + g * ROWS + v, term);
      }
  }

  void widen(const int8_t* w, int K) {
    for (int k = 0; k < K * ROWS; k += 2 * LANES) store(codes + k, load_int8(w + k));
  }

  void take_bytes(const uint16_t* w, int K) {  // pairs [K / 2, ROWS] of int8
    for (int k = 0; k < K / 2 * ROWS; k += 2 * ROWS)
      for (int v = 0; v < ROWS; v += LANES) {
        prefetch(w + k + 2 * v, 4 * LANES);
        vu pair = (vu)load_bf16(w + k + v) >> 16, next = (vu)load_bf16(w + k + ROWS + v);
        store((int32_t*)codes + k / 2 + v, (vi)(pair | next) ^ (int32_t)0x80808080);
      }
  }

  void take_bf16(const int32_t* w, int K) {    // pairs [K / 2, ROWS], rounded to 14 bits
    for (int g = 0; g < K / GROUP; g++)
      for (int v = 0; v < ROWS; v += LANES) {
        const int32_t* from = w + g * GROUP / 2 * ROWS + v;
        int32_t* to = (int32_t*)codes + g * GROUP / 2 * ROWS + v;
        vf top = {};
        for (int p = 0; p < GROUP / 2; p++) {
          vf low = low_bf16(load<vi>(from + p * ROWS)), high = high_bf16(load<vi>(from + p * ROWS));
          top = larger(larger(top, larger(low, -low)), larger(high, -high));
        }
        vf inverse = top > 0 ? MOST_14_BITS / top : vf{};
        for (int p = 0; p < GROUP / 2; p++) {  // 12582912: whole numbers, the low bits of the sum
          vi pair = load<vi>(from + p * ROWS);
          vi low = (vi)(low_bf16(pair) * inverse + 12582912.0f);
          vi high = (vi)(high_bf16(pair) * inverse + 12582912.0f);
          store(to + p * ROWS, (low & 0xffff) | high << 16);
        }
        store(scales + g * ROWS + v, top * (1.0f / MOST_14_BITS));
      }
  }
};
