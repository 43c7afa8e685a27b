// Bounds checks of ids, positions and cache rows, before any operation of a call runs.

#pragma once

#include "attention.h"
#include "delta.h"
#include "embed_rope_mask.h"
#include "latent.h"
#include "mamba.h"
#include "short_conv.h"

static bool rows_exist(const int64_t* rows, int B, int n_row) {
  if (!rows) return B <= n_row;
  return std::all_of(rows, rows + B, [&](int64_t row) { return row >= 0 && row < n_row; });
}

// Are the keys to read and the slots to write among the cache's S slots?
static bool slots_exist(const Positions* positions, int B, int T, int S) {
  for (int b = 0; b < B; b++)
    for (int t = 0; t < T; t++)
      if (cache_slot(positions, b, t) < 0 || cache_slot(positions, b, t) >= S) return false;
  return positions->n_key <= S;
}

// Are each row's positions consecutive, followed at most by padding that repeats the last one?
static bool rows_are_consecutive(const Positions* positions, int B, int T) {
  for (int b = 0; b < B; b++) {
    if (cache_slot(positions, b, 0) < 0) return false;
    for (int t = 1, is_padding = false; t < T; t++) {
      if (is_padding && follows(positions, b, t)) return false;
      if (!follows(positions, b, t) &&
          cache_slot(positions, b, t) != cache_slot(positions, b, t - 1))
        return false;
      is_padding = is_padding || !follows(positions, b, t);
    }
  }
  return true;
}

template <class Op> static bool is_within_cache(const Op& op) {
  return rows_exist(op.positions->rows, op.B, op.n_row) &&
         slots_exist(op.positions, op.B, op.T, op.S);
}

template <class Op> static bool is_within_ring(const Op& op) {
  return rows_exist(op.positions->rows, op.B, op.n_row) &&
         rows_are_consecutive(op.positions, op.B, op.T);
}

static bool is_within_vocab(const Embed& op) {
  return std::all_of(op.ids, op.ids + op.n, [&](int64_t id) { return id >= 0 && id < op.n_vocab; });
}
