// Linears with fp32, bf16, int8, int4 or fp4 weights, for one row or many, and MoE expert linears.

#pragma once

#include "dequantize.h"
#include "epilogue.h"
#include "gemm_tiles.h"
#include "threads.h"

// y [M, NR]: the outputs of panel i
static void apply_row_scales(int M, const Linear& op, int i, float* y) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      float* sum = y + m * NR + v * LANES;
      store(sum, load<vf>(sum) * row_scale(op, i, v));
    }
}

// y [M, NR] = x times panel i; unpacked: the panel in x's format, or null
template <int M>
static void panel_kernel(const Linear& op, int i, const Activations& x, float* y,
                         const UnpackedPanel* unpacked) {
  const char* w = weight_panel(op, i, x.K);
  if (op.format == FP32) fp32_kernel<M>((const float*)w, x, y);
  if (op.format == BF16 && unpacked) a16_kernel<M>(unpacked->codes, unpacked->scales, x, y);
  else if (op.format == BF16) bf16_kernel<M>((const int32_t*)w, x, y);
  if (op.format == INT4 && activation_format(op) == X_INT8)
    a8_kernel<M>((const int32_t*)unpacked->codes, unpacked->scales, x, y);
  else if (op.format == INT4 && unpacked) a16_kernel<M>(unpacked->codes, unpacked->scales, x, y);
  else if (op.format == INT4)
    a16w4_kernel<M>((const int32_t*)w, int4_scales(op, i, x.K), op.group_size, x, y);
  if (op.format == INT8) {
    if (unpacked && activation_format(op) == X_INT16)
      a16_kernel<M>(unpacked->codes, nullptr, x, y);
    else if (unpacked) a8_kernel<M>((const int32_t*)unpacked->codes, nullptr, x, y);
    else a16_kernel<M>((const int8_t*)w, nullptr, x, y);
  }
  if (op.format == FP4 && unpacked) a16_kernel<M>(unpacked->codes, unpacked->scales, x, y);
  else if (op.format == FP4 && op.group_size < GROUP)
    a16fp4_kernel<M, GROUP / 2>((const int32_t*)w, fp4_scales(w, x.K), x, y);
  else if (op.format == FP4)
    a16fp4_kernel<M, GROUP>((const int32_t*)w, fp4_scales(w, x.K), x, y);
  if (has_row_scales(op)) apply_row_scales(M, op, i, y);
}

// Dispatches to panel_kernel<m>, 1 <= m <= M
template <int M>
static void panel_kernel_for(int m, const Linear& op, int i, const Activations& x, float* y,
                             const UnpackedPanel* unpacked) {
  if (m == M) return panel_kernel<M>(op, i, x, y, unpacked);
  if constexpr (M > 1) panel_kernel_for<M - 1>(m, op, i, x, y, unpacked);
}

static int max_tile_rows(const Linear& op) {
  if (uses_amx(op)) return AMX_MR;
  return activation_format(op) == X_INT8 ? MR_INT8 : MR;
}

// y [M, NR] = x times panel i; M <= max_tile_rows()
static void multiply_tile(int M, const Linear& op, int i, const Activations& x, float* y,
                          const UnpackedPanel* unpacked) {
  if (activation_format(op) == X_BF16) {
    const void* pairs = unpacked ? (const void*)unpacked->codes : weight_panel(op, i, x.K);
    gemm_panel(M, (const int32_t*)pairs, NR, x.K / 2, (const int32_t*)x.q, x.ldq() / 2, y, NR,
               false);
    if (has_row_scales(op)) apply_row_scales(M, op, i, y);
    return;
  }
  int n_group = x.K / GROUP;
  panel_kernel_for<MR>(M, op, i, x, y, unpacked);
  if (unpacked && op.format == INT4)
    micro_kernel_for<MR>(M, unpacked->offsets, NR, n_group, x.x_sum, n_group, y, NR, true);
}

// Is a panel unpacked before its tiles are multiplied? Thresholds as measured.
static bool needs_unpacking(const Linear& op) {
  if (uses_amx(op)) return op.format != BF16;
  int few = (LANES > 8 ? 2 : 1) * MR;
  if (op.format == INT4) return activation_format(op) == X_INT8 || op.M > few;
  if (op.format == FP4) return activation_format(op) == X_BF16 || op.M > few;
  if (op.format == INT8) return activation_format(op) == X_INT8 || (LANES == 8 && op.M > 128);
  return op.format == BF16 && activation_format(op) == X_INT16;
}

static void read_row(const Linear& op, int m, int K, float* to) { // normalized, padded to K
  long row = op.gather_rows ? op.gather_rows[m] : m;
  read_floats(op.x, op.x_type, row * (op.x_stride ? op.x_stride : op.K), op.K, to);
  normalize(op.norm, op.K, to);
  std::fill(to + op.K, to + K, 0.0f);
}

constexpr int MC = 192;                        // rows of an fp32 task: the activations stay in L2

constexpr int L2_WEIGHT_BYTES = 1 << 19;       // of an AMX task's panels as bf16: they stay in L2

// A linear, or one expert's: rows of x to convert, then tasks, each of some panels
struct Gemm {
  Linear op;
  int first_row;                               // among the rows of all experts
  int K;                                       // padded to GROUP
  int n_panel, panels_per_task, n_task;
  bool whole_panels;                           // see uses_whole_panels()

  Gemm(const Linear& op, int first_row, int n_thread) : op(op), first_row(first_row) {
    K = round_up(op.K, GROUP);
    n_panel = round_up(n_output(op), NR) / NR;
    whole_panels = uses_whole_panels(op);
    panels_per_task = op.M > MR || needs_unpacking(op) ? 1 : std::max(1, n_panel / (8 * n_thread));
    if (uses_amx(op))
      panels_per_task =
          std::max(1, std::min(L2_WEIGHT_BYTES / (2 * K * NR), n_panel / (4 * n_thread)));
    n_task = whole_panels ? (n_panel + panels_per_task - 1) / panels_per_task
                          : n_panel * ((op.M + MC - 1) / MC);
  }

  void convert_row(int m, const Activations& x) const {
    float* row = activation_format(op) == X_FP32 ? x.values + (long)m * K
                                                 : reserve(thread_scratch, K);
    read_row(op, m, K, row);
    bool in_order_of_codes = op.format == INT4 || (op.format == FP4 && !needs_unpacking(op));
    if (activation_format(op) >= X_INT16) x.quantize(m, row, max_code(op), in_order_of_codes);
    if (activation_format(op) == X_BF16) write_floats(row, K, x.q, BF16, (long)m * x.ldq());
  }

  void run_task(int task, const Activations& x) const {
    if (whole_panels) return run_panels(task, x);
    int first = task / n_panel * MC;
    run_fp32_blocks(task % n_panel, x.values + (long)first * K, first, std::min(MC, op.M - first));
  }

  // Some panels for all rows, in tiles of nearly equal height
  void run_panels(int task, const Activations& x) const {
    int tile_rows = max_tile_rows(op);
    int n_tile = (op.M + tile_rows - 1) / tile_rows;
    size_t n_y = (size_t)panels_per_task * tile_rows * NR;
    size_t n_unpacked = needs_unpacking(op) ? UnpackedPanel::n_float(K) : 0;
    float* y = reserve(thread_scratch, 2 * n_y + 2 * panels_per_task * n_unpacked);
    int begin = task * panels_per_task;
    int end = std::min(n_panel, begin + panels_per_task);
    auto unpacked_panel = [&](int half, int i) {                  // half 1: the up projection
      return UnpackedPanel(y + 2 * n_y + (half * panels_per_task + i - begin) * n_unpacked, K);
    };
    if (n_unpacked)
      for (int half = 0; half <= op.gated; half++)
        for (int i = begin; i < end; i++) unpacked_panel(half, i).unpack(op, i + half * n_panel, K);
    for (int j = 0, m = 0; j < n_tile; j++) {
      int height = (op.M - m + n_tile - j - 1) / (n_tile - j);
      auto tile = [&](int half, int i) { return y + half * n_y + (i - begin) * height * NR; };
      if (n_tile > 1)
        for (int r = 0; r < height; r++) prefetch_epilogue(op, m + r, begin * NR);
      for (int half = 0; half <= op.gated; half++)
        for (int i = begin; i < end; i++) {
          UnpackedPanel unpacked = unpacked_panel(half, i);
          multiply_tile(height, op, i + half * n_panel, x.from_row(m), tile(half, i),
                        n_unpacked ? &unpacked : nullptr);
        }
      for (int r = 0; r < height; r++)
        for (int i = begin; i < end; i++)
          epilogue(op, m + r, i * NR, std::min(NR, n_output(op) - i * NR), tile(0, i) + r * NR,
                   op.gated ? tile(1, i) + r * NR : nullptr);
      m += height;
    }
  }

  // Panel i for rows [first, first + M), x [M, K], one dequantized block [KC, NR] at a time
  void run_fp32_blocks(int i, const float* x, int first, int M) const {
    float* w = reserve(thread_scratch, KC * NR + 2 * (size_t)M * NR);
    float* y[2] = {w + KC * NR, w + KC * NR + M * NR};
    for (int half = 0; half <= op.gated; half++)
      for (int k = 0; k < K; k += KC) {
        int n = std::min(KC, K - k);
        dequantize_block(op, i + half * n_panel, K, k, n, w);
        gemm_panel(M, w, NR, n, x + k, K, y[half], NR, k > 0);
      }
    int n = std::min(NR, n_output(op) - i * NR);
    for (int m = 0; m < M; m++)
      epilogue(op, first + m, i * NR, n, y[0] + m * NR, op.gated ? y[1] + m * NR : nullptr);
  }
};

// The linear of expert e, whose M sorted rows begin at first_row
static Linear expert_linear(const Linear& op, int e, int first_row, int M) {
  auto advance = [](const void* p, int dtype, long n) {
    return (char*)p + n * (dtype == FP32 ? 4 : 2);
  };
  int K = round_up(op.K, GROUP);
  long n_panel = (long)round_up(n_output(op), NR) / NR << op.gated;
  size_t n_scale = (op.format == INT4 ? K / op.group_size : 1) * n_panel * NR;
  Linear one = op;
  one.M = M;
  one.weight = (const char*)op.weight + e * n_panel * panel_bytes(op.format, K, op.group_size);
  if (op.scales) one.scales = (const float*)op.scales + e * n_scale;
  if (op.bias) one.bias = advance(op.bias, op.bias_type, (long)e * op.N);
  if (op.gather_rows) one.gather_rows = op.gather_rows + first_row;
  else
    one.x = advance(op.x, op.x_type,
                    op.expert_ends ? (long)first_row * op.K : (long)e * op.x_expert_stride);
  one.out = advance(op.out, op.out_type, op.expert_ends ? (long)first_row * n_output(op)
                                                        : (long)e * op.out_expert_stride);
  return one;
}

static int total_rows(const Linear& op) {
  return op.n_expert && !op.expert_ends ? op.n_expert * op.M : op.M;
}

static void linear(const Linear& op, Phase* phase, int n_thread) {
  static thread_local std::vector<Gemm> gemms;
  gemms.clear();
  int n_row = 0, n_task = 0;
  for (int e = 0; e < std::max(1, op.n_expert); e++) {
    int M = op.n_expert && op.expert_ends ? op.expert_ends[e] - n_row : op.M;
    if (M == 0) continue;
    gemms.push_back(Gemm(op.n_expert ? expert_linear(op, e, n_row, M) : op, n_row, n_thread));
    n_row += M;
    n_task += gemms.back().n_task;
  }
  int K = round_up(op.K, GROUP);
  // A single row is converted by every thread for itself: cheaper than waiting for one that does it
  bool is_shared = n_row > 1;
  bool is_converted = false;
  float* memory = is_shared ? reserve(shared_scratch, 0)
                            : reserve(thread_activations, Activations::n_float(1, K));
  auto activations_of = [&](const Gemm& gemm) {
    return Activations(memory + Activations::n_float(gemm.first_row, K), gemm.op.M, K);
  };
  size_t i = 0;                                // the task's GEMM: near the thread's last one
  if (is_shared)
    run_tasks(phase[0], n_row, std::max(1, n_row / (16 * n_thread)), [&](int row) {
      while (row < gemms[i].first_row) i--;
      while (row >= gemms[i].first_row + gemms[i].op.M) i++;
      gemms[i].convert_row(row - gemms[i].first_row, activations_of(gemms[i]));
    });
  i = 0;
  int first_task = 0;                          // of GEMM i
  run_tasks(phase[1], n_task, 1, [&](int task) {
    if (!is_shared && !is_converted) gemms[0].convert_row(0, activations_of(gemms[0]));
    is_converted = true;
    while (task < first_task) first_task -= gemms[--i].n_task;
    for (; task >= first_task + gemms[i].n_task; i++) first_task += gemms[i].n_task;
    gemms[i].run_task(task - first_task, activations_of(gemms[i]));
  });
}
