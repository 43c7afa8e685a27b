// Products of bf16 by a CPU's matrix registers (AMX), where the system gives them to this process.
//
// Tests define WITH_MATRICES: as on such a CPU, by what every CPU has.

#pragma once

#include "vectors.h"

constexpr int MATRIX = 16;                     // rows of one, and pairs of bf16 in a row
constexpr int MATRICES_ROWS = 2 * MATRIX;      // of x that share what is loaded of the weights

constexpr int FEW_FOR_MATRICES = 4;            // rows of x, which vectors take as fast; as measured

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

static bool has_matrices() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool is_given = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
  return is_given;
}

static thread_local int shaped_for;            // rows of x that this thread's registers are for; or 0

// Registers 0 to 3 are sums, of two matrices' rows by two of outputs; 4 and 5 of x; 6 and 7 of weights
static void shape_matrices(int M) {
  struct alignas(64) {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {MATRIX, MATRIX, MATRIX, MATRIX, MATRIX, MATRIX, MATRIX, MATRIX};
  } shapes;
  if (M < MATRIX) shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = M;
  else if (M > MATRIX) shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = M - MATRIX;
  _tile_loadconfig(&shapes);
  shaped_for = M;
}

static void leave_matrices() {
  if (shaped_for) _tile_release();
  shaped_for = 0;
}

// y [M, ROWS] (+)= pairs x [M, n] by pairs w [n, ROWS]; M up to MATRICES_ROWS, n by MATRIX
static void by_matrices(int M, const int32_t* w, long ldw, int n, const int32_t* x, long ldx, float* y,
                        long ldy, bool add) {
  const int32_t* more_x = x + MATRIX * ldx;
  float* more_y = y + MATRIX * ldy;
  bool two = M > MATRIX;
  asm volatile("" ::: "memory");               // what was written before is read here
  if (shaped_for != M) shape_matrices(M);
  if (add) {
    _tile_loadd(0, y, 4 * ldy);
    _tile_loadd(1, y + LANES, 4 * ldy);
    if (two) {
      _tile_loadd(2, more_y, 4 * ldy);
      _tile_loadd(3, more_y + LANES, 4 * ldy);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int p = 0; p < n; p += MATRIX) {
    _tile_loadd(6, w + p * ldw, 4 * ldw);
    _tile_loadd(7, w + p * ldw + LANES, 4 * ldw);
    _tile_loadd(4, x + p, 4 * ldx);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!two) continue;
    _tile_loadd(5, more_x + p, 4 * ldx);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, 4 * ldy);
  _tile_stored(1, y + LANES, 4 * ldy);
  if (two) {
    _tile_stored(2, more_y, 4 * ldy);
    _tile_stored(3, more_y + LANES, 4 * ldy);
  }
  asm volatile("" ::: "memory");
}

#else

#if defined(WITH_MATRICES)
static bool has_matrices() { return true; }
#else
static bool has_matrices() { return false; }
#endif

static void leave_matrices() {}

static void by_matrices(int M, const int32_t* w, long ldw, int n, const int32_t* x, long ldx, float* y,
                        long ldy, bool add) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < ROWS; v += LANES) {
      vf sum = add ? load<vf>(y + m * ldy + v) : vf{};
      for (int p = 0; p < n; p++)
        sum = dot2_bf16(sum, load<vi>(w + p * ldw + v), x[m * ldx + p]);
      store(y + m * ldy + v, sum);
    }
}

#endif
