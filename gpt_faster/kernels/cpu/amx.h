// bf16 matrix products with AMX tile registers, if Linux grants this process their use.
//
// Tests define WITH_AMX to run the AMX code paths with a portable micro-kernel.

#pragma once

#include "simd.h"

constexpr int AMX_TILE = 16;                   // rows of a tile register, and bf16 pairs in a row
constexpr int AMX_MR = 2 * AMX_TILE;           // maximum rows of x per loaded weight tile

constexpr int AMX_THRESHOLD = 4;               // up to here vector code is as fast; measured

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

static bool amx_enabled() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool is_enabled = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
  return is_enabled;
}

static thread_local int configured_rows;       // rows that this thread's tiles are for, or 0

// Tiles 0 to 3: accumulators, 2 tiles of rows by 2 of outputs. 4 and 5: x. 6 and 7: weights
static void configure_tiles(int M) {
  struct alignas(64) {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {AMX_TILE, AMX_TILE, AMX_TILE, AMX_TILE,
                        AMX_TILE, AMX_TILE, AMX_TILE, AMX_TILE};
  } config;
  if (M < AMX_TILE) config.rows[0] = config.rows[1] = config.rows[4] = M;
  else if (M > AMX_TILE) config.rows[2] = config.rows[3] = config.rows[5] = M - AMX_TILE;
  _tile_loadconfig(&config);
  configured_rows = M;
}

static void release_tiles() {
  if (configured_rows) _tile_release();
  configured_rows = 0;
}

// y [M, NR] (+)= bf16 pairs x [M, n] by bf16 pairs w [n, NR]; M <= AMX_MR, n a multiple of AMX_TILE
static void amx_micro_kernel(int M, const int32_t* w, long ldw, int n, const int32_t* x, long ldx,
                             float* y, long ldy, bool accumulate) {
  const int32_t* second_x = x + AMX_TILE * ldx;
  float* second_y = y + AMX_TILE * ldy;
  bool has_second = M > AMX_TILE;
  asm volatile("" ::: "memory");               // compiler barrier: tile loads read earlier stores
  if (configured_rows != M) configure_tiles(M);
  if (accumulate) {
    _tile_loadd(0, y, 4 * ldy);
    _tile_loadd(1, y + LANES, 4 * ldy);
    if (has_second) {
      _tile_loadd(2, second_y, 4 * ldy);
      _tile_loadd(3, second_y + LANES, 4 * ldy);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int p = 0; p < n; p += AMX_TILE) {
    _tile_loadd(6, w + p * ldw, 4 * ldw);
    _tile_loadd(7, w + p * ldw + LANES, 4 * ldw);
    _tile_loadd(4, x + p, 4 * ldx);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!has_second) continue;
    _tile_loadd(5, second_x + p, 4 * ldx);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, 4 * ldy);
  _tile_stored(1, y + LANES, 4 * ldy);
  if (has_second) {
    _tile_stored(2, second_y, 4 * ldy);
    _tile_stored(3, second_y + LANES, 4 * ldy);
  }
  asm volatile("" ::: "memory");
}

#else

#if defined(WITH_AMX)
static bool amx_enabled() { return true; }
#else
static bool amx_enabled() { return false; }
#endif

static void release_tiles() {}

static void amx_micro_kernel(int M, const int32_t* w, long ldw, int n, const int32_t* x, long ldx,
                             float* y, long ldy, bool accumulate) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < NR; v += LANES) {
      vf sum = accumulate ? load<vf>(y + m * ldy + v) : vf{};
      for (int p = 0; p < n; p++)
        sum = dot2_bf16(sum, load<vi>(w + p * ldw + v), x[m * ldx + p]);
      store(y + m * ldy + v, sum);
    }
}

#endif
