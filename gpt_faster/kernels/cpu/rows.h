// Rows of x as what they meet weights as: floats, pairs of bf16, integers of 16 bits, or bytes.
//
// x meets int8 and int4 as 16-bit integers, each 32 inputs with a scale of their own: finer than
// bf16, and two products in an instruction. Where a CPU has products of bf16, bf16 weights take
// these; elsewhere many rows meet them as integers of 14 bits, both with a scale for 32 inputs, if
// x need not be exact. Many rows may meet int8 and int4 as bytes, where it has products of these, or
// int4 as bf16.

#pragma once

#include "matrices.h"
#include "outputs.h"

enum Numbers { FLOATS, PAIRS, INTEGERS, BYTES };     // what x meets them as; pairs of bf16

static bool is_by_matrices(const Linear& op) { // as measured
  int few = op.format == BF16 ? FEW_FOR_MATRICES : 48;     // the others are decoded first
  return has_matrices() && op.M > few && op.format != FP32 && op.x_bits <= 16;
}

static Numbers numbers(const Linear& op) {     // as measured
  if (is_by_matrices(op)) return PAIRS;
  bool by_pairs = op.format == BF16 || (op.format == INT4 && op.M > 32);
  bool by_bytes = op.format == INT4 ? HAS_NIBBLES && op.M > (LANES > 8 ? TILE : 4)
                                    : HAS_BYTES && op.format == INT8 && op.M > 16;
  if (by_bytes && op.x_bits <= 8) return BYTES;
  if (HAS_BF16 && by_pairs && op.x_bits <= 16) return PAIRS;
  bool by_integers = op.format >= INT8 || (op.format == BF16 && op.M > 32 && op.x_bits <= 16);
  return by_integers ? INTEGERS : FLOATS;
}

static int most_of(const Linear& op) {         // of x as whole numbers
  return numbers(op) == BYTES ? 127 : op.format == BF16 ? MOST_14_BITS : 32767;
}

static bool is_by_stored(const Linear& op) {   // as measured
  return numbers(op) != FLOATS || op.M <= (op.format == BF16 ? 128 : 8);
}

struct Rows {                                  // of x, as floats, as bf16 or as integers
  float *x, *scale, *sum;                      // [M, K]; [M, K / GROUP], of q; of q's values
  int32_t* total;                              // [M, K / GROUP], of q
  int16_t* q;                                  // [M, ldq], integers or bf16; or bytes
  int K;

  Rows(float* memory, int M, int K) : x(memory), scale(memory), K(K) {
    sum = scale + (long)M * (K / GROUP);
    total = (int32_t*)sum + (long)M * (K / GROUP);
    q = (int16_t*)(total + (long)M * (K / GROUP));
  }

  int ldq() const { return K + 32; }           // a line more than K: no power of two

  static size_t floats(int M, int K) { return (size_t)M * (K + 32); }

  Rows from(int m) const {
    Rows rest = *this;
    rest.x += (long)m * K;
    rest.q += (long)m * ldq();
    rest.total += (long)m * (K / GROUP);
    rest.scale += (long)m * (K / GROUP);
    rest.sum += (long)m * (K / GROUP);
    return rest;
  }

  int32_t pair(int m, int i) const {           // q at 2i and 2i + 1
    int32_t two;
    memcpy(&two, q + (long)m * ldq() + 2 * i, 4);
    return two;
  }

  int32_t four(int m, int i) const {           // bytes at 4i to 4i + 3
    int32_t four;
    memcpy(&four, (int8_t*)(q + (long)m * ldq()) + 4 * i, 4);
    return four;
  }

  // row m from floats [K]; most: of the whole numbers, 127 for bytes; by_words: numbers that a shift
  // of int4's words gives together beside each other
  void quantize(int m, const float* row, int most, bool by_words) const {
    vi order = WORD_ORDERS[most == 127];
    for (int g = 0; g < K / GROUP; g++) {
      const float* from = row + g * GROUP;
      vf tops = {};
      for (int i = 0; i < GROUP; i += LANES) {
        vf v = load<vf>(from + i);
        tops = larger(tops, larger(v, -v));
      }
      float top = largest_of(tops), unit = top * (1.0f / most), inverse = top > 0 ? most / top : 0;
      int16_t* to = q + (long)m * ldq() + g * GROUP;
      int8_t* bytes = (int8_t*)(q + (long)m * ldq()) + g * GROUP;
      vi totals = {};
      for (int i = 0; i < GROUP; i += LANES) {
        vi whole = (vi)(load<vf>(from + i) * inverse + 12582912.0f);
        whole -= 0x4b400000;                   // of 12582912: what is left is the whole number
        totals += whole;
        if (by_words) whole = permuted(whole, order);
        if (most > 127) store(to + i, __builtin_convertvector(whole, vn));
        else store(bytes + i, __builtin_convertvector(whole, vq));
      }
      long at = (long)m * (K / GROUP) + g;
      scale[at] = unit;
      total[at] = sum_of(totals);
      sum[at] = total[at] * unit;
    }
  }
};
