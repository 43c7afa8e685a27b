// Activations in the micro-kernels' input formats: fp32, bf16, int16 or int8.
//
// int8 and int4 weights use int16 activations by default, with a scale per GROUP of inputs: more
// precise than bf16, and two products per lane and instruction. In large batches, if x_bits allows:
//   int8 weights    int8 activations where the CPU has int8 dot products
//   int4 weights    the same, or bf16 activations where the CPU has bf16 dot products
//   bf16 weights    bf16 dot products where the CPU has them, for one row too; else x and weights
//                   are quantized to int14, with a scale per GROUP
//   fp4 weights     as bf16 weights, which hold them exactly; int14 for few rows
// With AMX, large batches use bf16 activations for all four.

#pragma once

#include "amx.h"
#include "linear_args.h"

enum ActivationFormat { X_FP32, X_BF16, X_INT16, X_INT8 };

static bool uses_amx(const Linear& op) {       // thresholds as measured
  int threshold = op.format == BF16 ? AMX_THRESHOLD : 48;   // others are dequantized first
  return amx_enabled() && op.M > threshold && op.format != FP32 && op.x_bits <= 16;
}

static ActivationFormat activation_format(const Linear& op) {     // thresholds as measured
  if (uses_amx(op)) return X_BF16;
  bool can_use_bf16 =
      op.format == BF16 || ((op.format == INT4 || op.format == FP4) && op.M > 32);
  bool can_use_int8 = op.format == INT4 ? HAS_INT4_DOT && op.M > (LANES > 8 ? MR : 4)
                                        : HAS_INT8_DOT && op.format == INT8 && op.M > 16;
  if (can_use_int8 && op.x_bits <= 8) return X_INT8;
  if (HAS_BF16 && can_use_bf16 && op.x_bits <= 16) return X_BF16;
  bool use_int16 = op.format >= INT8 || (op.format == BF16 && op.M > 32 && op.x_bits <= 16);
  return use_int16 ? X_INT16 : X_FP32;
}

static int max_code(const Linear& op) {        // of quantized activations
  if (activation_format(op) == X_INT8) return 127;
  return op.format == BF16 || op.format == FP4 ? MAX_INT14 : 32767;
}

// Are whole weight panels multiplied, as stored or unpacked? Else panels are dequantized to fp32,
// one block of KC inputs at a time. Thresholds as measured.
static bool uses_whole_panels(const Linear& op) {
  return activation_format(op) != X_FP32 || op.M <= (op.format == BF16 ? 128 : 8);
}

struct Activations {                           // M rows of K inputs in one ActivationFormat
  float* values;                               // [M, K], fp32
  float* scale;                                // [M, K / GROUP], of q
  float* x_sum;                                // [M, K / GROUP], of the dequantized q
  int32_t* q_sum;                              // [M, K / GROUP], of q
  int16_t* q;                                  // [M, ldq], int16, bf16, or int8 in half a row
  int K;

  Activations(float* scratch, int M, int K) : values(scratch), scale(scratch), K(K) {
    x_sum = scale + (long)M * (K / GROUP);
    q_sum = (int32_t*)x_sum + (long)M * (K / GROUP);
    q = (int16_t*)(q_sum + (long)M * (K / GROUP));
  }

  int ldq() const { return K + 32; }           // a cache line of padding: no power-of-two stride

  static size_t n_float(int M, int K) { return (size_t)M * (K + 32); }

  Activations from_row(int m) const {
    Activations rest = *this;
    rest.values += (long)m * K;
    rest.q += (long)m * ldq();
    rest.q_sum += (long)m * (K / GROUP);
    rest.scale += (long)m * (K / GROUP);
    rest.x_sum += (long)m * (K / GROUP);
    return rest;
  }

  int32_t int16_pair(int m, int i) const {     // q[2i : 2i + 2]
    int32_t pair;
    memcpy(&pair, q + (long)m * ldq() + 2 * i, 4);
    return pair;
  }

  int32_t int8_quad(int m, int i) const {      // q[4i : 4i + 4]
    int32_t quad;
    memcpy(&quad, (int8_t*)(q + (long)m * ldq()) + 4 * i, 4);
    return quad;
  }

  // Quantizes row m from fp32 [K] to int8 (max_code 127) or int16. for_int4: in the order in which
  // int4 and fp4 weights are unpacked
  void quantize(int m, const float* row, int max_code, bool for_int4) const {
    vi index = INT4_UNPACK_ORDERS[max_code == 127];
    for (int g = 0; g < K / GROUP; g++) {
      const float* from = row + g * GROUP;
      vf abs_max = {};
      for (int i = 0; i < GROUP; i += LANES) {
        vf v = load<vf>(from + i);
        abs_max = max_of(abs_max, max_of(v, -v));
      }
      float top = horizontal_max(abs_max);
      float unit = top * (1.0f / max_code);
      float inverse = top > 0 ? max_code / top : 0;
      int16_t* to = q + (long)m * ldq() + g * GROUP;
      int8_t* bytes = (int8_t*)(q + (long)m * ldq()) + g * GROUP;
      vi sums = {};
      for (int i = 0; i < GROUP; i += LANES) {
        // Adding 1.5 * 2^23 rounds to an integer, held in the low mantissa bits
        vi code = (vi)(load<vf>(from + i) * inverse + 12582912.0f);
        code -= 0x4b400000;
        sums += code;
        if (for_int4) code = permute(code, index);
        if (max_code > 127) store(to + i, __builtin_convertvector(code, vi16_half));
        else store(bytes + i, __builtin_convertvector(code, vi8_quarter));
      }
      long group = (long)m * (K / GROUP) + g;
      scale[group] = unit;
      q_sum[group] = horizontal_sum(sums);
      x_sum[group] = q_sum[group] * unit;
    }
  }
};
