// Which positions a call's tokens have, and which keys they see.

#pragma once

#include <cstdint>

struct Positions {                             // what layers share
  int64_t n_key, mask_b, mask_t, angle_b, slot_b;                 // the others are strides
  const float *cos, *sin;                      // [(B, 1,) T, H / 2]
  const uint8_t* mask;                         // [(B, 1,) T, n_key]
  const int64_t *slot, *rows;                  // [(B,) T]; [B], of the caches, or null: all
};

static long position(const Positions* at, int b, int t) { return at->slot[b * at->slot_b + t]; }

static bool follows(const Positions* at, int b, int t) {
  return t == 0 || position(at, b, t) == position(at, b, t - 1) + 1;
}
