// What an operation would read or write outside of its tensors, found before anything is done.

#pragma once

#include "attention.h"
#include "delta.h"
#include "ends.h"
#include "latent.h"
#include "short_conv.h"

static bool rows_exist(const Positions* at, int B, int n_row) {
  if (!at->rows) return B <= n_row;
  return std::all_of(at->rows, at->rows + B, [&](int64_t row) { return row >= 0 && row < n_row; });
}

// n_key of the cache's S slots are looked at, and those that tokens go to are among them
static bool slots_exist(const Positions* at, int B, int T, int S) {
  for (int b = 0; b < B; b++)
    for (int t = 0; t < T; t++)
      if (position(at, b, t) < 0 || position(at, b, t) >= S) return false;
  return at->n_key <= S;
}

// The tokens of a row follow each other without a gap, then there is padding, all at one position
static bool rows_have_no_gap(const Positions* at, int B, int T) {
  for (int b = 0; b < B; b++) {
    if (position(at, b, 0) < 0) return false;
    for (int t = 1, is_padding = false; t < T; t++) {
      if (is_padding && follows(at, b, t)) return false;
      if (!follows(at, b, t) && position(at, b, t) != position(at, b, t - 1)) return false;
      is_padding = is_padding || !follows(at, b, t);
    }
  }
  return true;
}

template <class Op> static bool is_within_cache(const Op& op) {
  return rows_exist(op.at, op.B, op.n_row) && slots_exist(op.at, op.B, op.T, op.S);
}

template <class Op> static bool is_within_ring(const Op& op) {
  return rows_exist(op.at, op.B, op.n_row) && rows_have_no_gap(op.at, op.B, op.T);
}

static bool is_within(const Embed& op) {
  return std::all_of(op.ids, op.ids + op.n, [&](int64_t id) { return id >= 0 && id < op.n_vocab; });
}
