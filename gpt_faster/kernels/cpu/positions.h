// Token positions of a call, with the RoPE tables and attention masks that belong to them.

#pragma once

#include <cstdint>

struct Positions {                             // shared by all layers
  int64_t n_key;                               // keys to attend to
  int64_t mask_stride_b, mask_stride_t, rope_stride_b, slot_stride_b;
  const float *cos, *sin;                      // [(B, 1,) T, H / 2]
  const uint8_t* mask;                         // [(B, 1,) T, n_key]
  const int64_t *slot;                         // [(B,) T], positions = slots of the cache
  const int64_t *rows;                         // [B], rows of the caches, or null: row b is b
};

static long cache_slot(const Positions* positions, int b, int t) {
  return positions->slot[b * positions->slot_stride_b + t];
}

// Is token t at its predecessor's position + 1?
static bool follows(const Positions* positions, int b, int t) {
  return t == 0 || cache_slot(positions, b, t) == cache_slot(positions, b, t - 1) + 1;
}
