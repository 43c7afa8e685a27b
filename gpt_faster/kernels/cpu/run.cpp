// The entry, run(): what a transformer's layers do on a CPU, for one row or many.
//
// kernels/cpu/native.py compiles this file for the CPU it runs on, and describes each operation by a
// struct that a file here has too.
//
// Weights lie in blocks of ROWS outputs, a number of inputs of each output side by side:
//
//     fp32 [out/ROWS, in, ROWS]        bf16 [out/ROWS, in/2, ROWS, 2]
//     int8 [out/ROWS, in/2, ROWS, 2]   int4 [out/ROWS, in/8, ROWS] words, input i at bits 4i
//
// so that a vector holds as many outputs as it has lanes. `in` is a multiple of 32, `out` of ROWS,
// filled up with zeros. Sums are in fp32.

#include <mutex>

#include "bounds.h"
#include "experts.h"
#include "layout.h"
#include "linear.h"
#include "norms.h"

enum Result { DONE, OUT_OF_RANGE, FAILED };
enum Kind { LINEAR, ATTENTION, ADD_NORM, EMBED, ANGLES, MASK, DELTA, LATENT, ROUTE, COMBINE, SHORT_CONV };

extern "C" int rows_in_a_block() { return ROWS; }
extern "C" int has_bytes(int format) { return format == INT4 ? HAS_NIBBLES : HAS_BYTES; }
extern "C" int has_bf16() { return HAS_BF16; }
extern "C" int has_amx() { return has_matrices(); }
extern "C" const Field* fields() { return FIELDS; }

template <class Word> static void blocks_of(const Word* from, long n_block, long n, Word* to) {
#pragma omp parallel for
  for (long i = 0; i < n_block; i++)
    for (long k = 0; k < n; k++)
      for (int r = 0; r < ROWS; r++) to[(i * n + k) * ROWS + r] = from[(i * ROWS + r) * n + k];
}

// Words of 2 or 4 bytes [n_block ROWS, n] -> [n_block, n, ROWS]
extern "C" void lay_out(const void* from, long n_block, long n, int n_byte, void* to) {
  if (n_byte == 2) blocks_of((const int16_t*)from, n_block, n, (int16_t*)to);
  else blocks_of((const int32_t*)from, n_block, n, (int32_t*)to);
}

// What threads share within an operation
static size_t shared_floats(const int32_t* op, int n_thread) {
  if (*op == LINEAR) {
    const Linear& linear = *(const Linear*)op;
    return Rows::floats(rows_in_all(linear), padded(linear.K, GROUP));
  }
  if (*op == DELTA) {
    const Delta& delta = *(const Delta*)op;
    return (size_t)delta.B * delta.T * channels_of(delta);
  }
  if (*op != ATTENTION) return 0;
  Plan plan(*(const Attention*)op, n_thread);
  return plan.size * (plan.n_part > 1 ? plan.n_task * plan.n_part : n_thread);
}

static bool is_within_bounds(const int32_t* op) {
  if (*op == ATTENTION) return is_within_cache(*(const Attention*)op);
  if (*op == LATENT) return is_within_cache(*(const Latent*)op);
  if (*op == DELTA) return is_within_ring(*(const Delta*)op);
  if (*op == SHORT_CONV) return is_within_ring(*(const ShortConv*)op);
  return *op != EMBED || is_within(*(const Embed*)op);
}

static void do_op(const int32_t* op, Phase* phase, int n_thread) {
  if (*op == LINEAR) linear(*(const Linear*)op, phase, n_thread);
  else if (*op == ATTENTION) attention(*(const Attention*)op, phase, n_thread);
  else if (*op == ADD_NORM) add_norm(*(const AddNorm*)op, phase);
  else if (*op == EMBED) embed(*(const Embed*)op, phase);
  else if (*op == ANGLES) angles(*(const Angles*)op, phase);
  else if (*op == DELTA) delta(*(const Delta*)op, phase);
  else if (*op == SHORT_CONV) short_conv(*(const ShortConv*)op, phase);
  else if (*op == LATENT) latent(*(const Latent*)op, phase);
  else if (*op == ROUTE) route(*(const Route*)op, phase);
  else if (*op == COMBINE) combine(*(const Combine*)op, phase);
  else masks(*(const Mask*)op, phase);
}

static void do_all(const int32_t* const* list, int n_listed, int n_thread) {
  for (int begin = 0; begin < n_listed; begin += MOST_OPS) {
    int n = std::min(MOST_OPS, n_listed - begin);
    size_t n_float = 0;
    for (int i = 0; i < n; i++) {
      for (Phase& phase : phases[i]) phase.next = phase.done = 0;
      n_float = std::max(n_float, shared_floats(list[begin + i], n_thread));
    }
    memory_of(shared, n_float);
#pragma omp parallel num_threads(n_thread) if (n_thread > 1)
    {
      for (int i = 0; i < n; i++) {
        try {                                  // without this thread the others do its tasks
          do_op(list[begin + i], phases[i], n_thread);
        } catch (const std::exception&) {
          has_failed = true;
        }
      }
      leave_matrices();
    }
  }
}

// The operations one after the other; each is one of the structs above, which begin with their kind.
// No exception leaves it.
extern "C" int run(const int32_t* const* list, int n_listed, int n_thread) {
  static std::mutex one_at_a_time;
  try {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    if (!std::all_of(list, list + n_listed, is_within_bounds)) return OUT_OF_RANGE;
    has_failed = false;
    do_all(list, n_listed, n_thread);
    return has_failed ? FAILED : DONE;
  } catch (const std::exception&) {
    return FAILED;
  }
}
