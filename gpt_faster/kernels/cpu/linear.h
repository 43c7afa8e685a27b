// Products with fp32, bf16, int8 or int4 weights: of one row or many, of experts too.

#pragma once

#include "blocks.h"
#include "decoded.h"
#include "threads.h"

// y [M, ROWS] of int8's whole numbers -> of what these stand for
static void times_scale(int M, const Linear& op, int i, float* y) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      float* sum = y + m * ROWS + v * LANES;
      store(sum, load<vf>(sum) * int8_scale(op, i, v));
    }
}

template <int M>
static void block_by(const Linear& op, int i, const Rows& rows, float* y, const Decoded* decoded) {
  const char* w = block(op, i, rows.K);
  if (op.format == FP32) by_fp32<M>((const float*)w, rows, y);
  if (op.format == BF16 && decoded) by_codes<M>(decoded->codes, decoded->scales, rows, y);
  else if (op.format == BF16) by_bf16<M>((const int32_t*)w, rows, y);
  if (op.format == INT4 && numbers(op) == BYTES)
    by_bytes<M>((const int32_t*)decoded->codes, decoded->scales, rows, y);
  else if (op.format == INT4 && decoded) by_codes<M>(decoded->codes, decoded->scales, rows, y);
  else if (op.format == INT4)
    by_int4<M>((const int32_t*)w, int4_scales(op, i, rows.K), op.group, rows, y);
  if (op.format == INT8) {
    if (decoded && numbers(op) == INTEGERS) by_codes<M>(decoded->codes, nullptr, rows, y);
    else if (decoded) by_bytes<M>((const int32_t*)decoded->codes, nullptr, rows, y);
    else by_codes<M>((const int8_t*)w, nullptr, rows, y);
    times_scale(M, op, i, y);
  }
}

template <int M>
static void block_by_some(int m, const Linear& op, int i, const Rows& rows, float* y,
                          const Decoded* decoded) {
  if (m == M) return block_by<M>(op, i, rows, y, decoded);
  if constexpr (M > 1) block_by_some<M - 1>(m, op, i, rows, y, decoded);
}

static int most_rows(const Linear& op) {       // that share what is loaded of the weights
  if (is_by_matrices(op)) return MATRICES_ROWS;
  return numbers(op) == BYTES ? BYTES_TILE : TILE;
}

// y [M, ROWS], M up to most_rows()
static void block_by_tile(int M, const Linear& op, int i, const Rows& rows, float* y,
                          const Decoded* decoded) {
  if (numbers(op) == PAIRS) {
    const void* pairs = decoded ? (const void*)decoded->codes : block(op, i, rows.K);
    tiles(M, (const int32_t*)pairs, ROWS, rows.K / 2, (const int32_t*)rows.q, rows.ldq() / 2, y,
          ROWS, false);
    if (op.format == INT8) times_scale(M, op, i, y);
    return;
  }
  int n_group = rows.K / GROUP;
  block_by_some<TILE>(M, op, i, rows, y, decoded);
  if (decoded && op.format == INT4)
    tile_of<TILE>(M, decoded->terms, ROWS, n_group, rows.sum, n_group, y, ROWS, true);
}

static bool is_decoded(const Linear& op) {     // once for all tiles; as measured
  if (is_by_matrices(op)) return op.format != BF16;
  if (op.format == INT4) return numbers(op) == BYTES || op.M > (LANES > 8 ? 2 : 1) * TILE;
  if (op.format == INT8) return numbers(op) == BYTES || (LANES == 8 && op.M > 128);
  return op.format == BF16 && numbers(op) == INTEGERS;
}

static void read_row(const Linear& op, int m, int K, float* to) {
  long row = op.order ? op.order[m] : m;
  read_floats(op.x, op.x_type, row * (op.x_stride ? op.x_stride : op.K), op.K, to);
  normalize(op.norm, op.K, to);
  std::fill(to + op.K, to + K, 0.0f);
}

constexpr int MOST_ROWS = 192;                 // of x at a time, as floats: they stay in the L2

constexpr int STEP_BYTES = 1 << 19;            // of weights, as bf16, that meet all rows: in the L2

// A linear, or an expert of one: rows of x that are read, then tasks that each make blocks of outputs
struct Product {
  Linear op;
  int first;                                   // of its rows, among all experts'
  int K, n_block, step, n_task;                // step: blocks of a task
  bool by_stored;                              // or as floats

  Product(const Linear& op, int first, int n_thread) : op(op), first(first) {
    K = padded(op.K, GROUP);
    n_block = padded(outputs(op), ROWS) / ROWS;
    by_stored = is_by_stored(op);
    step = op.M > TILE || is_decoded(op) ? 1 : std::max(1, n_block / (8 * n_thread));
    if (is_by_matrices(op))                    // rows of x meet several, which stay in the L2
      step = std::max(1, std::min(STEP_BYTES / (2 * K * ROWS), n_block / (4 * n_thread)));
    n_task = by_stored ? (n_block + step - 1) / step
                       : n_block * ((op.M + MOST_ROWS - 1) / MOST_ROWS);
  }

  void read(int m, const Rows& rows) const {
    float* row = numbers(op) == FLOATS ? rows.x + (long)m * K : memory_of(own, K);
    read_row(op, m, K, row);
    if (numbers(op) >= INTEGERS)
      rows.quantize(m, row, most_of(op), op.format == INT4);
    if (numbers(op) == PAIRS) write_floats(row, K, rows.q, BF16, (long)m * rows.ldq());
  }

  void make(int task, const Rows& rows) const {
    if (by_stored) return make_by_stored(task, rows);
    int from = task / n_block * MOST_ROWS;
    make_by_floats(task % n_block, rows.x + (long)from * K, from, std::min(MOST_ROWS, op.M - from));
  }

  void make_by_stored(int task, const Rows& rows) const {
    int most = most_rows(op), n_tile = (op.M + most - 1) / most;
    size_t n_y = (size_t)step * most * ROWS, n_decoded = is_decoded(op) ? Decoded::size(K) : 0;
    float* y = memory_of(own, 2 * n_y + 2 * step * n_decoded);
    int begin = task * step, end = std::min(n_block, begin + step);
    auto decoded = [&](int half, int i) {
      return Decoded(y + 2 * n_y + (half * step + i - begin) * n_decoded, K);
    };
    if (n_decoded)
      for (int half = 0; half <= op.gated; half++)
        for (int i = begin; i < end; i++) decoded(half, i).decode(op, i + half * n_block, K);
    for (int j = 0, m = 0; j < n_tile; j++) {  // of nearly equal height
      int height = (op.M - m + n_tile - j - 1) / (n_tile - j);
      auto to = [&](int half, int i) { return y + half * n_y + (i - begin) * height * ROWS; };
      if (n_tile > 1)
        for (int r = 0; r < height; r++) prefetch_out(op, m + r, begin * ROWS);
      for (int half = 0; half <= op.gated; half++)
        for (int i = begin; i < end; i++) {
          Decoded as_decoded = decoded(half, i);
          block_by_tile(height, op, i + half * n_block, rows.from(m), to(half, i),
                        n_decoded ? &as_decoded : nullptr);
        }
      for (int r = 0; r < height; r++)
        for (int i = begin; i < end; i++)
          finish(op, m + r, i * ROWS, std::min(ROWS, outputs(op) - i * ROWS),
                 to(0, i) + r * ROWS, op.gated ? to(1, i) + r * ROWS : nullptr);
      m += height;
    }
  }

  // Block i for rows [from, from + M), which are x [M, K]: weights become floats [DEPTH, ROWS], which
  // all share
  void make_by_floats(int i, const float* x, int from, int M) const {
    float* w = memory_of(own, DEPTH * ROWS + 2 * (size_t)M * ROWS);
    float* y[2] = {w + DEPTH * ROWS, w + DEPTH * ROWS + M * ROWS};
    for (int half = 0; half <= op.gated; half++)
      for (int k = 0; k < K; k += DEPTH) {
        int n = std::min(DEPTH, K - k);
        to_floats(op, i + half * n_block, K, k, n, w);
        tiles(M, w, ROWS, n, x + k, K, y[half], ROWS, k > 0);
      }
    int n = std::min(ROWS, outputs(op) - i * ROWS);
    for (int m = 0; m < M; m++)
      finish(op, from + m, i * ROWS, n, y[0] + m * ROWS, op.gated ? y[1] + m * ROWS : nullptr);
  }
};

// The linear of expert e, whose rows begin at `first`
static Linear expert(const Linear& op, int e, int first, int M) {
  auto moved = [](const void* p, int type, long n) {
    return (char*)p + n * (type == FP32 ? 4 : 2);
  };
  int K = padded(op.K, GROUP);
  long n_block = (long)padded(outputs(op), ROWS) / ROWS << op.gated;
  size_t n_scale = (op.format == INT4 ? K / op.group : 1) * n_block * ROWS;
  Linear one = op;
  one.M = M;
  one.weight = (const char*)op.weight + e * n_block * block_bytes(op.format, K);
  if (op.scales) one.scales = (const float*)op.scales + e * n_scale;
  if (op.bias) one.bias = moved(op.bias, op.bias_type, (long)e * op.N);
  if (op.order) one.order = op.order + first;
  else one.x = moved(op.x, op.x_type, op.ends ? (long)first * op.K : (long)e * op.x_step);
  one.out = moved(op.out, op.out_type, op.ends ? (long)first * outputs(op) : (long)e * op.out_step);
  return one;
}

static int rows_in_all(const Linear& op) { return op.n_expert && !op.ends ? op.n_expert * op.M : op.M; }

static void linear(const Linear& op, Phase* phase, int n_thread) {
  static thread_local std::vector<Product> products;
  products.clear();
  int n_row = 0, n_task = 0;
  for (int e = 0; e < std::max(1, op.n_expert); e++) {
    int M = op.n_expert && op.ends ? op.ends[e] - n_row : op.M;
    if (M == 0) continue;
    products.push_back(Product(op.n_expert ? expert(op, e, n_row, M) : op, n_row, n_thread));
    n_row += M;
    n_task += products.back().n_task;
  }
  int K = padded(op.K, GROUP);
  bool is_shared = n_row > 1, is_read = false; // one row: each thread reads it, and waits for none
  float* memory = is_shared ? memory_of(shared, 0) : memory_of(own_row, Rows::floats(1, K));
  auto rows_of = [&](const Product& p) {
    return Rows(memory + Rows::floats(p.first, K), p.op.M, K);
  };
  size_t at = 0;                               // the product of a task: a thread's tasks ascend
  if (is_shared)
    do_tasks(phase[0], n_row, std::max(1, n_row / (16 * n_thread)), [&](int row) {
      while (row >= products[at].first + products[at].op.M) at++;
      products[at].read(row - products[at].first, rows_of(products[at]));
    });
  at = 0;
  int before = 0;
  do_tasks(phase[1], n_task, 1, [&](int task) {
    if (!is_shared && !is_read) products[0].read(0, rows_of(products[0]));
    is_read = true;
    for (; task >= before + products[at].n_task; at++) before += products[at].n_task;
    products[at].make(task - before, rows_of(products[at]));
  });
}
