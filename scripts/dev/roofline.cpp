// Reads the weights of a step's products in the order, tasks and threads of the products themselves:
// what memory and the borders between operations allow. scripts/dev/roofline.py compiles it.

#include "run.cpp"

vi read_sum;                                       // exported: so that the loads are not removed

static void read_bytes(const char* from, size_t n) {
  vi sum{};
  for (size_t i = 0; i + 64 <= n; i += 64) {
    prefetch(from + i, 64);
    for (size_t j = 0; j < 64; j += sizeof(vi)) sum ^= load<vi>(from + i + j);
  }
  if (horizontal_sum(sum) == 12345) read_sum = sum;            // practically never
}

static void read_weights(const Linear& op, Phase* phase, int n_thread) {
  Gemm gemm(op, 0, n_thread);
  run_tasks(phase[1], gemm.n_task, 1, [&](int task) {
    int begin = task * gemm.panels_per_task;
    int end = std::min(gemm.n_panel, begin + gemm.panels_per_task);
    size_t n = panel_bytes(op.format, gemm.K, op.group_size);
    for (int half = 0; half <= op.gated; half++)
      for (int i = begin; i < end; i++) {
        int panel = i + half * gemm.n_panel;
        read_bytes(weight_panel(op, panel, gemm.K), n);
        if (op.format == INT4)
          read_bytes((const char*)int4_scales(op, panel, gemm.K), 4 * NR * (gemm.K / op.group_size));
      }
  });
}

// Of linears without experts
extern "C" void read_all_weights(const int32_t* const* ops, int n_op, int n_thread) {
  n_range = std::min(n_thread, MAX_RANGES);
  for (int i = 0; i < n_op; i++)
    for (Phase& phase : phases[i]) phase.reset();
  on_threads(n_thread, [&] {
    for (int i = 0; i < n_op; i++) read_weights(*(const Linear*)ops[i], phases[i], n_thread);
  });
}
