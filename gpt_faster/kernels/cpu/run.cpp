// The C interface: run() executes a list of operations, which make up a transformer's layers.
//
// kernels/cpu/native.py compiles this file for the host CPU and describes each operation by a
// struct that mirrors one of the headers'.
//
// Weights are packed into panels of NR outputs, two vectors wide; 16-bit and smaller types keep
// neighbouring inputs of an output adjacent:
//
//     fp32 [out/NR, in, NR]        bf16 [out/NR, in/2, NR, 2]
//     int8 [out/NR, in/2, NR, 2]   int4 [out/NR, in/8, NR] words, input i at bits 4i
//     fp4 [out/NR, in/8 words and in/G bytes, NR], codes like int4's, then a scale per G inputs
//
// `in` is padded with zeros to a multiple of 32 (GROUP), `out` to one of NR. Sums are fp32.

#include <mutex>

#include "bounds.h"
#include "draw.h"
#include "hidden_states.h"
#include "linear.h"
#include "moe.h"
#include "norms.h"
#include "struct_layout.h"

enum Result { DONE, OUT_OF_RANGE, FAILED };
enum OpKind {
  LINEAR, ATTENTION, ADD_NORM, EMBED, ROPE_TABLE, MASK, DELTA, LATENT, ROUTE, COMBINE, SHORT_CONV,
  DRAW, RECORD, MAMBA, RING_MASK
};

extern "C" int panel_width() { return NR; }
extern "C" int has_int8_dot(int format) {
  return format == INT4 ? HAS_INT4_DOT : HAS_INT8_DOT && format != FP4;
}
extern "C" int has_bf16() { return HAS_BF16; }
extern "C" int has_amx() { return amx_enabled(); }
extern "C" const Field* fields() { return FIELDS; }

template <class Word> static void pack_words(const Word* from, long n_panel, long n, Word* to) {
#pragma omp parallel for
  for (long i = 0; i < n_panel; i++)
    for (long k = 0; k < n; k++)
      for (int r = 0; r < NR; r++) to[(i * n + k) * NR + r] = from[(i * NR + r) * n + k];
}

// Words of 2 or 4 bytes, [n_panel NR, n] -> [n_panel, n, NR]
extern "C" void pack_panels(const void* from, long n_panel, long n, int n_byte, void* to) {
  if (n_byte == 2) pack_words((const int16_t*)from, n_panel, n, (int16_t*)to);
  else pack_words((const int32_t*)from, n_panel, n, (int32_t*)to);
}

static size_t shared_scratch_size(const int32_t* op, int n_thread) {      // in floats
  if (*op == LINEAR) {
    const Linear& linear = *(const Linear*)op;
    return Activations::n_float(total_rows(linear), round_up(linear.K, GROUP));
  }
  if (*op == DELTA) return convolution_size(*(const Delta*)op);
  if (*op == MAMBA) return convolution_size(*(const Mamba*)op);
  if (*op != ATTENTION) return 0;
  AttentionPlan plan(*(const Attention*)op, n_thread);
  return plan.state_size * (plan.n_split > 1 ? plan.n_block * plan.n_split : n_thread);
}

static bool is_within_bounds(const int32_t* op) {
  if (*op == ATTENTION) return is_within_cache(*(const Attention*)op);
  if (*op == LATENT) return is_within_cache(*(const Latent*)op);
  if (*op == RECORD) return is_within_cache(*(const Record*)op);
  if (*op == DELTA) return is_within_ring(*(const Delta*)op);
  if (*op == MAMBA) return is_within_ring(*(const Mamba*)op);
  if (*op == SHORT_CONV) return is_within_ring(*(const ShortConv*)op);
  if (*op == RING_MASK) {
    const RingMask& ring = *(const RingMask*)op;
    return rows_exist(ring.rows, ring.B, ring.n_row);
  }
  return *op != EMBED || is_within_vocab(*(const Embed*)op);
}

static void run_op(const int32_t* op, Phase* phase, int n_thread) {
  if (*op == LINEAR) linear(*(const Linear*)op, phase, n_thread);
  else if (*op == ATTENTION) attention(*(const Attention*)op, phase, n_thread);
  else if (*op == ADD_NORM) add_norm(*(const AddNorm*)op, phase);
  else if (*op == EMBED) embed(*(const Embed*)op, phase);
  else if (*op == ROPE_TABLE) rope_table(*(const RopeTable*)op, phase);
  else if (*op == DELTA) delta(*(const Delta*)op, phase);
  else if (*op == MAMBA) mamba(*(const Mamba*)op, phase);
  else if (*op == SHORT_CONV) short_conv(*(const ShortConv*)op, phase);
  else if (*op == LATENT) latent(*(const Latent*)op, phase);
  else if (*op == ROUTE) route(*(const Route*)op, phase);
  else if (*op == COMBINE) combine(*(const Combine*)op, phase);
  else if (*op == DRAW) draw(*(const Draw*)op, phase);
  else if (*op == RECORD) record(*(const Record*)op, phase);
  else if (*op == RING_MASK) ring_mask(*(const RingMask*)op, phase);
  else causal_mask(*(const Mask*)op, phase);
}

static void run_ops(const int32_t* const* ops, int n_op, int n_thread) {
  for (int begin = 0; begin < n_op; begin += MAX_OPS) {
    int n = std::min(MAX_OPS, n_op - begin);
    size_t n_float = 0;
    n_range = std::min(n_thread, MAX_RANGES);
    for (int i = 0; i < n; i++) {
      for (Phase& phase : phases[i]) phase.reset();
      n_float = std::max(n_float, shared_scratch_size(ops[begin + i], n_thread));
    }
    reserve(shared_scratch, n_float);
    on_threads(n_thread, [&] {
      for (int i = 0; i < n; i++) {
        try {                                  // if this thread fails, the others run its tasks
          run_op(ops[begin + i], phases[i], n_thread);
        } catch (const std::exception&) {
          has_failed = true;
        }
      }
      release_tiles();
    });
  }
}

// Runs the operations in order; each is one of the structs, whose first field is its OpKind.
// Returns a Result and throws nothing.
extern "C" int run(const int32_t* const* ops, int n_op, int n_thread) {
  static std::mutex one_at_a_time;
  try {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    if (!std::all_of(ops, ops + n_op, is_within_bounds)) return OUT_OF_RANGE;
    has_failed = false;
    run_ops(ops, n_op, n_thread);
    return has_failed ? FAILED : DONE;
  } catch (const std::exception&) {
    return FAILED;
  }
}
