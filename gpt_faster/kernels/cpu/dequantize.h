// Dequantizes or unpacks weight panels, once for all activation rows.

#pragma once

#include "activations.h"

// n inputs of fp4 -> fp32 [n, NR] without the scale of the row; codes [n / 8, NR] words
static void dequantize_fp4(const int32_t* codes, const uint8_t* scales, int group_size, int n,
                           float* to) {
  for (int k = 0; k < n; k += 8)
    for (int v = 0; v < NR; v += LANES) {
      vf half_scale = 0.5f * fp4_scale(scales + k / group_size * NR + v, group_size);
      vu words = load<vu>(codes + k / 8 * NR + v);
      for (int odd = 0; odd < 2; odd++) {
        vi bytes = twice_e2m1((vi)(words >> (4 * odd)) & 0x0f0f0f0f);
        for (int i = 0; i < 4; i++)            // byte i: input 2 i + odd
          store(to + (k + 2 * i + odd) * NR + v, to_float(bytes << (24 - 8 * i) >> 24) * half_scale);
      }
    }
}

// Inputs [begin, begin + n) of panel i -> fp32 [n, NR]; int8 and fp4 without the scale of the row
static void dequantize_block(const Linear& op, int i, int K, int begin, int n, float* to) {
  const char* w = weight_panel(op, i, K);
  if (op.format == FP32) memcpy(to, (const float*)w + (long)begin * NR, 4 * (size_t)n * NR);
  if (op.format == FP4)
    dequantize_fp4((const int32_t*)w + begin / 8 * NR,
                   fp4_scales(w, K) + begin / op.group_size * NR, op.group_size, n, to);
  for (int v = 0; v < 2; v++) {
    float* column = to + v * LANES;
    if (op.format == BF16)
      for (int k = 0; k < n; k += 2) {
        vi pair = load<vi>((const int32_t*)w + (begin + k) / 2 * NR + v * LANES);
        store(column + k * NR, low_bf16(pair));
        store(column + (k + 1) * NR, high_bf16(pair));
      }
    if (op.format == INT8)
      for (int k = 0; k < n; k += 2) {
        vi pair = (vi)load_int8(w + (begin + k) * NR + 2 * v * LANES);
        store(column + k * NR, to_float(pair << 16 >> 16));
        store(column + (k + 1) * NR, to_float(pair >> 16));
      }
    if (op.format == INT4) {
      const int32_t* scales = int4_scales(op, i, K);
      for (int k = 0; k < n; k += GROUP) {
        vf scale, offset;
        scale_and_offset(scales + (begin + k) / op.group_size * NR + v * LANES, &scale, &offset);
        for (int j = k; j < k + GROUP; j += 8) {
          const int32_t* codes = (const int32_t*)w + (begin + j) / 8 * NR + v * LANES;
          prefetch(codes, 4 * LANES);
          vu words = load<vu>(codes);
          for (int b = 0; b < 8; b++) {
            vf code = to_float((vi)(words >> (4 * b) & 15));
            store(column + (j + b) * NR, code * scale + offset);
          }
        }
      }
    }
  }
}

// Panel i -> bf16 pairs [K / 2, NR, 2], by way of the scratch buffer [KC, NR]
static void dequantize_to_bf16(const Linear& op, int i, int K, float* scratch, int32_t* to) {
  for (int begin = 0; begin < K; begin += KC, to += KC / 2 * NR) {
    int n = std::min(KC, K - begin);
    dequantize_block(op, i, K, begin, n, scratch);
    for (int k = 0; k < n; k += 2)
      for (int v = 0; v < NR; v += LANES) {
        vi even = load<vi>(scratch + k * NR + v) + 0x8000;        // round to nearest
        vi odd = load<vi>(scratch + (k + 1) * NR + v) + 0x8000;
        store(to + k / 2 * NR + v, (vi)((vu)even >> 16) | (odd & (int32_t)0xffff0000));
      }
  }
}

// A weight panel converted to the activations' format, reused by all row tiles
struct UnpackedPanel {
  int16_t* codes;                              // bf16, int16 [K / 2, NR, 2], uint8 [K / 4, NR, 4]
  float* scales;                               // [K / GROUP, NR], of int4, and of bf16 as int14
  float* offsets;                              // [K / GROUP, NR], of int4
  float* scratch;                              // [KC, NR]

  UnpackedPanel(float* memory, int K) {
    codes = (int16_t*)memory;
    scales = memory + (size_t)K / 2 * NR;
    offsets = scales + (size_t)K / GROUP * NR;
    scratch = offsets + (size_t)K / GROUP * NR;
  }

  static size_t n_float(int K) { return (size_t)(K / 2 + 2 * (K / GROUP) + KC) * NR; }

  void unpack(const Linear& op, int i, int K) {
    if (activation_format(op) == X_BF16)
      return dequantize_to_bf16(op, i, K, scratch, (int32_t*)codes);
    if (op.format == BF16) return quantize_bf16((const int32_t*)weight_panel(op, i, K), K);
    if (op.format == FP4) {
      dequantize_to_bf16(op, i, K, scratch, (int32_t*)codes);     // exact
      return quantize_bf16((const int32_t*)codes, K);             // in place
    }
    if (op.format == INT8 && activation_format(op) == X_INT16)
      return int8_to_int16((const int8_t*)weight_panel(op, i, K), K);
    if (op.format == INT8) return int8_to_uint8((const uint16_t*)weight_panel(op, i, K), K);
    const int32_t *w = (const int32_t*)weight_panel(op, i, K), *words = int4_scales(op, i, K);
    bool to_uint8 = activation_format(op) == X_INT8;
    for (int k = 0; k < K / 8 * NR; k += LANES) {
      prefetch(w + k, 4 * LANES);
      int n = to_uint8 ? 2 : 4;
      int mask = to_uint8 ? 0x0f0f0f0f : 0x000f000f;
      int32_t* to = (int32_t*)codes + k / NR * n * NR + k % NR;
      for (int b = 0; b < n; b++) store(to + b * NR, (vi)(load<vu>(w + k) >> (4 * b)) & mask);
    }
    for (int g = 0; g < K / GROUP; g++)
      for (int v = 0; v < NR; v += LANES) {
        vf scale, offset;
        scale_and_offset(words + g * GROUP / op.group_size * NR + v, &scale, &offset);
        store(scales + g * NR + v, scale);
        store(offsets + g * NR + v, offset);
      }
  }

  void int8_to_int16(const int8_t* w, int K) {
    for (int k = 0; k < K * NR; k += 2 * LANES) store(codes + k, load_int8(w + k));
  }

  // int8 pairs [K / 2, NR, 2] -> uint8 [K / 4, NR, 4], code + 128, for vpdpbusd
  void int8_to_uint8(const uint16_t* w, int K) {
    for (int k = 0; k < K / 2 * NR; k += 2 * NR)
      for (int v = 0; v < NR; v += LANES) {
        prefetch(w + k + 2 * v, 4 * LANES);
        vu pair = (vu)load_bf16(w + k + v) >> 16, next = (vu)load_bf16(w + k + NR + v);
        store((int32_t*)codes + k / 2 + v, (vi)(pair | next) ^ (int32_t)0x80808080);
      }
  }

  // bf16 pairs [K / 2, NR, 2] -> int14 pairs with a scale per GROUP and output
  void quantize_bf16(const int32_t* w, int K) {
    for (int g = 0; g < K / GROUP; g++)
      for (int v = 0; v < NR; v += LANES) {
        const int32_t* from = w + g * GROUP / 2 * NR + v;
        int32_t* to = (int32_t*)codes + g * GROUP / 2 * NR + v;
        vf abs_max = {};
        for (int p = 0; p < GROUP / 2; p++) {
          vf low = low_bf16(load<vi>(from + p * NR)), high = high_bf16(load<vi>(from + p * NR));
          abs_max = max_of(max_of(abs_max, max_of(low, -low)), max_of(high, -high));
        }
        vf inverse = abs_max > 0 ? MAX_INT14 / abs_max : vf{};
        for (int p = 0; p < GROUP / 2; p++) {  // + 1.5 * 2^23: integer in the low bits
          vi pair = load<vi>(from + p * NR);
          vi low = (vi)(low_bf16(pair) * inverse + 12582912.0f);
          vi high = (vi)(high_bf16(pair) * inverse + 12582912.0f);
          store(to + p * NR, (low & 0xffff) | high << 16);
        }
        store(scales + g * NR + v, abs_max * (1.0f / MAX_INT14));
      }
  }
};
