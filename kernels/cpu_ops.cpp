// What the layers of a transformer do on a CPU, for one row or many: products with fp32, bf16, int8
// or int4 weights, attention over a cache, norms. kernels/cpu_ops.py compiles this file for the CPU
// it runs on, and describes each operation by a struct that it has too. There is one entry: run().
//
// Weights lie in blocks of ROWS outputs, a number of inputs of each output side by side:
//
//     fp32 [out/ROWS, in, ROWS]        bf16 [out/ROWS, in/2, ROWS, 2]
//     int8 [out/ROWS, in/2, ROWS, 2]   int4 [out/ROWS, in/8, ROWS] words, input i at bits 4i
//
// so that a vector holds as many outputs as it has lanes. `in` is a multiple of 32, `out` of ROWS,
// filled up with zeros. Sums are in fp32. x meets int8 and int4 as 16-bit integers, each 32 inputs
// with a scale of their own: finer than bf16, and two products in an instruction. Where a CPU has
// products of bf16, bf16 weights take these; elsewhere many rows meet them as integers of 14 bits,
// both with a scale for 32 inputs, if x need not be exact. Many rows may meet int8 and int4 as bytes,
// where it has products of these, or int4 as bf16.
//
// Tests define WIDE, WITH_BF16 and WITH_BYTES: as on CPUs that have these, by what every CPU has.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <omp.h>
#include <thread>
#include <type_traits>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

// ---- Vectors ------------------------------------------------------------------------------------

#if defined(__AVX512BF16__) || defined(WITH_BF16)
constexpr bool HAS_BF16 = true;                // products of bf16, two in an instruction
#else
constexpr bool HAS_BF16 = false;
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(WITH_BYTES)
constexpr bool HAS_BYTES = true;               // products of bytes, four in an instruction
#else
constexpr bool HAS_BYTES = false;
#endif
#if defined(__AVX2__) || defined(WIDE)
constexpr bool HAS_NIBBLES = true;             // of four bits by bytes, two in an instruction
#else
constexpr bool HAS_NIBBLES = HAS_BYTES;
#endif
#if defined(__AVX512F__) || defined(WIDE)
constexpr int LANES = 16;
constexpr int TILE = 12;                       // rows of x that share what is loaded of the weights
#else
constexpr int LANES = 8;
constexpr int TILE = 6;
#endif
constexpr int BYTES_TILE = LANES > 8 ? 8 : 6;  // of those that are bytes: as many again for sums
constexpr int ROWS = 2 * LANES;
constexpr int GROUP = 32;                      // inputs that share a scale, of x
constexpr int MOST_14_BITS = 8191;             // a group's products of two of these fit into 32 bits
constexpr int DEPTH = 256;                     // inputs of a block of weights as floats: in the L1
constexpr int AHEAD = 2048;                    // bytes

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));       // twice as many numbers
typedef int8_t vb __attribute__((vector_size(2 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int16_t vn __attribute__((vector_size(2 * LANES)));       // as many, narrower
typedef int8_t vq __attribute__((vector_size(LANES)));

template <class V> static inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V> static inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }

static inline void prefetch(const void* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + AHEAD + i);
}

static inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16));
#elif defined(__AVX2__) && !defined(WIDE)
  return (vf)(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16));
#else
  return (vf)(__builtin_convertvector(load<vh>(p), vu) << 16);
#endif
}

static inline vs load_int8(const void* p) {
#if defined(__AVX512BW__)
  return (vs)_mm512_cvtepi8_epi16(load<__m256i>(p));
#elif defined(__AVX2__) && !defined(WIDE)
  return (vs)_mm256_cvtepi8_epi16(load<__m128i>(p));
#else
  return __builtin_convertvector(load<vb>(p), vs);
#endif
}

static inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
static inline vf low_bf16(vi pair) { return (vf)(pair << 16); }
static inline vf high_bf16(vi pair) { return (vf)(pair & (int32_t)0xffff0000); }
static inline float bf16_to_float(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}

static inline uint16_t float_to_bf16(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

// acc + the products of neighbouring 16-bit numbers, two and two; pair: two numbers, for all lanes
static inline vi dot2(vi acc, vs a, int32_t pair) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32(pair));
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, _mm256_set1_epi32(pair));
#elif defined(__AVX512BW__)
  return acc + (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(pair));
#elif defined(__AVX2__) && !defined(WIDE)
  return acc + (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(pair));
#else
  return acc + ((vi)a << 16 >> 16) * (int32_t)(int16_t)pair + ((vi)a >> 16) * (pair >> 16);
#endif
}

// acc + the products of neighbouring bytes, four and four; a: from 0 to 255, x: from -127 to 127
static inline vi dot4(vi acc, vi a, int32_t x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, _mm256_set1_epi32(x));
#else
  for (int i = 0; i < 32; i += 8) acc += ((a >> i) & 255) * (int32_t)(int8_t)(x >> i);
  return acc;
#endif
}

// The same two and two, a: from 0 to 15. Sums of 16 bits hold what a GROUP gives.
static inline vs dot4(vs acc, vi a, int32_t x) {
#if defined(__AVX512BW__)
  return acc + (vs)_mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !defined(WIDE)
  return acc + (vs)_mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(x));
#else
  vi low = (a & 255) * (int8_t)x + (a >> 8 & 255) * (int8_t)(x >> 8);
  vi high = (a >> 16 & 255) * (int8_t)(x >> 16) + (a >> 24 & 255) * (int8_t)(x >> 24);
  return acc + (vs)((low & 0xffff) | high << 16);
#endif
}

typedef std::conditional<HAS_BYTES, vi, vs>::type Sums;           // of products of bytes
static inline vi whole(vi sums) { return sums; }
static inline vi whole(vs sums) { return dot2(vi{}, sums, 0x00010001); }

// acc + the products of neighbouring bf16 numbers, two and two; x: two numbers, for all lanes
static inline vf dot2_bf16(vf acc, vi a, int32_t x) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(x));
#else
  return acc + low_bf16(a) * bf16_to_float(x) + high_bf16(a) * bf16_to_float((uint32_t)x >> 16);
#endif
}

static inline vf larger(vf a, vf b) { return a > b ? a : b; }

static inline vf exp_of(vf x) {                // 0 below -87, 1.6e38 from 88; relative error 2e-7
  x = x > 88.0f ? vf{} + 88.0f : x;
  vf n = x * 1.44269504f + 12582912.0f - 12582912.0f;             // rounded
  vf f = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = ((((1.3981999e-3f * f + 8.3334519e-3f) * f + 4.1665796e-2f) * f + 1.6666665e-1f) * f
          + 0.5f) * f * f + f + 1.0f;
#if defined(__AVX512F__)
  return x < -87.0f ? vf{} : (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vf power = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  return x < -87.0f ? vf{} : p * power;
#endif
}

static inline vf power_of_2(vf x) {            // of x <= 0; relative error 8e-5: to weigh bf16
  auto power = [](vf f) {
    return ((0.05517167f * f + 0.24261112f) * f + 0.69326099f) * f + 0.99992807f;
  };
#if defined(__AVX512F__)
  x = larger(x, vf{} - 1000.0f);
  vf n = (vf)_mm512_roundscale_ps((__m512)x, 8);
  return (vf)_mm512_scalef_ps((__m512)power(x - n), (__m512)n);
#else
  vf n = x + 12582912.0f;                      // rounded, in its low bits
  vf p = (vf)((vi)power(x - (n - 12582912.0f)) + ((vi)n << 23));
  return x < -125.0f ? vf{} : p;
#endif
}

static inline vf inverse_of(vf x) {            // of 1 to 1.6e38; relative error 2e-7
#if defined(__AVX512F__)
  vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y * (2.0f - x * y);
#endif
  return 1.0f / x;
}

static inline vf tanh_of(vf x) {
  vf e = exp_of(x * -2.0f);
  return (1.0f - e) / (1.0f + e);
}

static inline float sum_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float y = 0;
  for (int i = 0; i < LANES; i++) y += x[i];
  return y;
}

static inline int32_t sum_of(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#endif
  int32_t y = 0;
  for (int i = 0; i < LANES; i++) y += x[i];
  return y;
}

static inline float largest_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float y = x[0];
  for (int i = 1; i < LANES; i++) y = std::max(y, x[i]);
  return y;
}

static inline vi permuted(vi x, vi order) {    // y[i] = x[order[i]]
#ifdef __clang__
  vi y;
  for (int i = 0; i < LANES; i++) y[i] = x[order[i]];
  return y;
#else
  return __builtin_shuffle(x, order);
#endif
}

template <class V> static inline V permuted(V a, V b, vi order) { // of both, one after the other
#ifdef __clang__
  V y;
  for (int i = 0; i < LANES; i++) y[i] = order[i] < LANES ? a[order[i]] : b[order[i] - LANES];
  return y;
#else
  return __builtin_shuffle(a, b, order);
#endif
}

static inline vi order_of_words(int n) {       // of 8 numbers: n that lie 8 / n apart, the next n
  vi order;
  for (int i = 0; i < LANES; i++) order[i] = i / 8 * 8 + i % n * (8 / n) + i % 8 / n;
  return order;
}
static const vi WORD_ORDERS[] = {order_of_words(2), order_of_words(4)};       // 16 bits, 8 bits

// ---- Threads and memory -------------------------------------------------------------------------

// A phase of an operation is a number of tasks, which threads take as they come. It is over when
// all are done: a thread that the system let wait holds nobody up, unless it has a task.
struct Phase {
  std::atomic<int> next, done;
};

template <class F> static void do_tasks(Phase& phase, int n, int step, F task) {
  for (int from; (from = phase.next.fetch_add(step)) < n;) {
    int to = std::min(from + step, n);
    for (int i = from; i < to; i++) task(i);
    phase.done.fetch_add(to - from);
  }
  for (int spins = 0; phase.done.load() < n; spins++) {
#ifdef __x86_64__
    _mm_pause();
#endif
    if (spins % 4096 == 4095) std::this_thread::yield();
  }
}

constexpr int PHASES = 3;                      // of an operation at most
constexpr int MOST_OPS = 4096;                 // at a time
static Phase phases[MOST_OPS][PHASES];
static std::vector<float> shared;              // between threads, within an operation
static thread_local std::vector<float> own, own_row;

static std::atomic<bool> out_of_range;         // a token, or a position of the cache: not touched

static float* memory_of(std::vector<float>& v, size_t n) {
  if (v.size() < n + 16) v.resize(n + 16);
  return (float*)(((uintptr_t)v.data() + 63) & ~(uintptr_t)63);
}

static inline int padded(int n, int to) { return (n + to - 1) / to * to; }

enum Type { FP32, BF16, INT8, INT4 };

static inline void copy_floats(const float* from, int n, float* to) {     // mostly a few vectors
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load<vf>(from + i));
  for (; i < n; i++) to[i] = from[i];
}

static void read_floats(const void* from, int type, long at, int n, float* to) {
  if (type == FP32) return copy_floats((const float*)from + at, n, to);
  const uint16_t* bits = (const uint16_t*)from + at;
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    store(to + i, load_bf16(bits + i));
  for (; i < n; i++) to[i] = bf16_to_float(bits[i]);
}

// The first n of a vector's floats, the others 0
static inline vf read_vector(const void* from, int type, long at, int n) {
  if (n < LANES) {
    float first[LANES] = {};
    read_floats(from, type, at, n, first);
    return load<vf>(first);
  }
  return type == FP32 ? load<vf>((const float*)from + at) : load_bf16((const uint16_t*)from + at);
}

static void write_floats(const float* from, int n, void* to, int type, long at) {
  if (type == FP32) return copy_floats(from, n, (float*)to + at);
  uint16_t* bits = (uint16_t*)to + at;
  int i = 0;
#if defined(__AVX512BF16__)
  for (; i + LANES <= n; i += LANES)
    store(bits + i, _mm512_cvtneps_pbh((__m512)load<vf>(from + i)));
#endif
  for (; i < n; i++) bits[i] = float_to_bf16(from[i]);
}

// ---- Norms --------------------------------------------------------------------------------------

enum NormKind { NO_NORM, RMS_NORM, LAYER_NORM };

struct Norm {
  int32_t kind;
  float eps;
  const float *weight, *bias;
};

static void normalize(const Norm& norm, int n, float* x) {        // n may be any number
  if (norm.kind == NO_NORM) return;
  float mean = 0;
  if (norm.kind == LAYER_NORM) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    mean = sum / n;
    for (int i = 0; i < n; i++) x[i] -= mean;
  }
  vf squares[4] = {};
  int i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      vf v = load<vf>(x + i + j * LANES);
      squares[j] += v * v;
    }
  float sum = sum_of(squares[0] + squares[1] + squares[2] + squares[3]);
  for (; i < n; i++) sum += x[i] * x[i];
  float factor = 1 / std::sqrt(sum / n + norm.eps);
  for (i = 0; i + LANES <= n; i += LANES)
    store(x + i, load<vf>(x + i) * factor * load<vf>(norm.weight + i));
  for (; i < n; i++) x[i] *= factor * norm.weight[i];
  if (norm.bias)
    for (i = 0; i < n; i++) x[i] += norm.bias[i];
}

// ---- Products -----------------------------------------------------------------------------------

enum Activation { NONE, SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU2 };

// x [M, K], perhaps normalized, by weight -> out [M, N]: + bias, activated (gated: the first half
// of the outputs by the second; out is [M, N / 2]), times others, times factor, + residual.
// Experts have a weight and a bias each, one after the other, and none of the residual: e's rows
// end before ends[e], and row m is made of x's row order[m], or m. Without ends each makes M rows
// of its own columns of x, which begin x_step apart, to columns of out.
struct Linear {
  int32_t kind, format, M, N, K, group, activation, gated, x_type, out_type, residual_type;
  int32_t x_bits;                              // that x must have: 32, 16, or 8 for many rows
  int32_t n_expert;                            // or 0
  int32_t x_stride, x_step, out_stride, out_step;                 // strides 0: rows lie together
  int32_t times_type, times_stride;
  float factor;
  Norm norm;
  const void *x, *weight, *scales, *residual, *times;
  const float* bias;
  void* out;
  const int32_t *ends, *order;
};

static inline int outputs(const Linear& op) { return op.gated ? op.N / 2 : op.N; }

static inline vf activated(int activation, vf x) {
  if (activation == SILU) return x * inverse_of(1.0f + exp_of(-x));
  if (activation == RELU2) return x < 0.0f ? vf{} : x * x;
  if (activation == CLAMPED_SILU) {
    x = x > 7.0f ? vf{} + 7.0f : x;
    return x / (1.0f + exp_of(x * -1.702f));
  }
  if (activation == GELU_TANH)
    return x * 0.5f * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
  if (activation == GELU)
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1 + std::erf(x[i] * 0.707106781f));
  return x;
}

// y [ROWS], up beside a gate; A: which one it is, if that is known
template <int A>
static inline void activate(float* y, float* up, int activation = A) {
#pragma GCC unroll 2
  for (int i = 0; i < ROWS; i += LANES) {
    vf a = activated(activation, load<vf>(y + i));
    if (up) {
      vf b = load<vf>(up + i);
      if (activation == CLAMPED_SILU) {
        b = b > 7.0f ? vf{} + 7.0f : b;
        b = (b < -7.0f ? vf{} - 7.0f : b) + 1.0f;
      }
      a *= b;
    }
    store(y + i, a);
  }
}

static inline long out_at(const Linear& op, int m, int first) {
  return (long)m * (op.out_stride ? op.out_stride : outputs(op)) + first;
}

// What finish() will read and write of a row, which lies far from the row before. In line: GCC drops
// calls of functions that only prefetch.
template <int WRITES>
[[gnu::always_inline]] static inline void prefetch_outputs(const void* p, int type, long at) {
  int bytes = type == FP32 ? 4 : 2;
  for (int i = 0; i < ROWS; i += 64 / bytes)
    __builtin_prefetch((const char*)p + (at + i) * bytes, WRITES);
}

[[gnu::always_inline]] static inline void prefetch_out(const Linear& op, int m, int first) {
  long at = out_at(op, m, first);
  if (op.residual) prefetch_outputs<0>(op.residual, op.residual_type, at);
  prefetch_outputs<1>(op.out, op.out_type, at);
}

// y [ROWS] of the n outputs that begin at `first`, up beside a gate -> out of row m
static void finish(const Linear& op, int m, int first, int n, float* y, float* up) {
  if (op.bias)
    for (int i = 0; i < n; i++) {
      y[i] += op.bias[first + i];
      if (up) up[i] += op.bias[op.N / 2 + first + i];
    }
  if (op.activation == SILU) activate<SILU>(y, up);
  else if (op.activation) activate<NONE>(y, up, op.activation);
  long at = out_at(op, m, first), times_at = (long)m * op.times_stride + first;
  auto write = [&](int i, int count) {           // a vector of floats, or fewer
    vf out = load<vf>(y + i);
    if (op.times) out *= read_vector(op.times, op.times_type, times_at + i, count);
    if (op.residual)
      out = read_vector(op.residual, op.residual_type, at + i, count) + op.factor * out;
    write_floats((const float*)&out, count, op.out, op.out_type, at + i);
  };
  int i = 0;
  for (; i + LANES <= n; i += LANES) write(i, LANES);
  if (i < n) write(i, n - i);
}

static inline size_t block_bytes(int format, int K) {             // K padded
  size_t bytes[] = {4, 2, 1, 0};
  return format == INT4 ? (size_t)K / 2 * ROWS : bytes[format] * K * ROWS;
}

static inline const char* block(const Linear& op, int i, int K) {
  return (const char*)op.weight + i * block_bytes(op.format, K);
}

static inline vf int8_scale(const Linear& op, int i, int v) {     // fp32 [out]
  return load<vf>((const float*)op.scales + i * ROWS + v * LANES);
}

// int4: w = scale * code + term, [out/ROWS, in/G, ROWS] words of two bf16, scale and zero
static inline const int32_t* int4_scales(const Linear& op, int i, int K) {
  return (const int32_t*)op.scales + (long)i * (K / op.group) * ROWS;
}

static inline void scale_and_term(const void* words, vf* scale, vf* term) {
  vi both = load<vi>(words);
  *scale = low_bf16(both);
  *term = high_bf16(both) - 8.0f * *scale;
}

// - Tiles: some rows of x by a block of weights, or of anything else [n, ROWS]

// A step of a product: weights by one number of x, or by two of bf16
static inline vf add_product(vf acc, const float* w, float x) { return acc + x * load<vf>(w); }
static inline vf add_product(vf acc, const uint16_t* w, float x) { return acc + x * load_bf16(w); }
static inline vf add_product(vf acc, const int32_t* w, int32_t x) {
  return dot2_bf16(acc, load<vi>(w), x);
}

// y [M, ROWS] (+)= x [M, n] by w [n, ROWS]; a row of w begins every ldw numbers
template <int M, class Weight, class Number>
static void tile(const Weight* w, long ldw, int n, const Number* x, long ldx, float* y, long ldy,
                 bool add) {
  vf acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) acc[m][v] = add ? load<vf>(y + m * ldy + v * LANES) : vf{};
  for (int k = 0; k < n; k++) {
    if (M >= 8 && std::is_same<Weight, int32_t>::value) prefetch(w + k * ldw, 4 * ROWS);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++)
        acc[m][v] = add_product(acc[m][v], w + k * ldw + v * LANES, x[m * ldx + k]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ldy + v * LANES, acc[m][v]);
}

template <int M, class Weight, class Number>
static void tile_of(int m, const Weight* w, long ldw, int n, const Number* x, long ldx, float* y,
                    long ldy, bool add) {
  if (m == M) return tile<M>(w, ldw, n, x, ldx, y, ldy, add);
  if constexpr (M > 1) tile_of<M - 1>(m, w, ldw, n, x, ldx, y, ldy, add);
}

template <class Weight, class Number>
static void tiles(int M, const Weight* w, long ldw, int n, const Number* x, long ldx, float* y,
                  long ldy, bool add) {
  int n_tile = (M + TILE - 1) / TILE;
  for (int i = 0, m = 0; i < n_tile; i++) {    // of nearly equal height
    int height = (M - m + n_tile - i - 1) / (n_tile - i);
    tile_of<TILE>(height, w, ldw, n, x + m * ldx, ldx, y + m * ldy, ldy, add);
    m += height;
  }
}

// - Weights as they lie in memory, by up to TILE rows at a time

enum Numbers { FLOATS, PAIRS, INTEGERS, BYTES };     // what x meets them as; pairs of bf16

static Numbers numbers(const Linear& op) {     // as measured
  bool by_pairs = op.format == BF16 || (op.format == INT4 && op.M > 32);
  bool by_bytes = op.format == INT4 ? HAS_NIBBLES && op.M > (LANES > 8 ? TILE : 4)
                                    : HAS_BYTES && op.format == INT8 && op.M > 16;
  if (by_bytes && op.x_bits <= 8) return BYTES;
  if (HAS_BF16 && by_pairs && op.x_bits <= 16) return PAIRS;
  bool by_integers = op.format >= INT8 || (op.format == BF16 && op.M > 32 && op.x_bits <= 16);
  return by_integers ? INTEGERS : FLOATS;
}

static int most_of(const Linear& op) {         // of x as whole numbers
  return numbers(op) == BYTES ? 127 : op.format == BF16 ? MOST_14_BITS : 32767;
}

static bool is_by_stored(const Linear& op) {   // as measured
  return numbers(op) != FLOATS || op.M <= (op.format == BF16 ? 128 : 8);
}

struct Rows {                                  // of x, as floats, as bf16 or as integers
  float *x, *scale, *sum;                      // [M, K]; [M, K / GROUP], of q; of q's values
  int32_t* total;                              // [M, K / GROUP], of q
  int16_t* q;                                  // [M, ldq], integers or bf16; or bytes
  int K;

  Rows(float* memory, int M, int K) : x(memory), scale(memory), K(K) {
    sum = scale + (long)M * (K / GROUP);
    total = (int32_t*)sum + (long)M * (K / GROUP);
    q = (int16_t*)(total + (long)M * (K / GROUP));
  }

  int ldq() const { return K + 32; }           // a line more than K: no power of two

  static size_t floats(int M, int K) { return (size_t)M * (K + 32); }

  Rows from(int m) const {
    Rows rest = *this;
    rest.x += (long)m * K;
    rest.q += (long)m * ldq();
    rest.total += (long)m * (K / GROUP);
    rest.scale += (long)m * (K / GROUP);
    rest.sum += (long)m * (K / GROUP);
    return rest;
  }

  int32_t pair(int m, int i) const {           // q at 2i and 2i + 1
    int32_t two;
    memcpy(&two, q + (long)m * ldq() + 2 * i, 4);
    return two;
  }

  int32_t four(int m, int i) const {           // bytes at 4i to 4i + 3
    int32_t four;
    memcpy(&four, (int8_t*)(q + (long)m * ldq()) + 4 * i, 4);
    return four;
  }

  // row m from floats [K]; most: of the whole numbers, 127 for bytes; by_words: numbers that a shift
  // of int4's words gives together beside each other
  void quantize(int m, const float* row, int most, bool by_words) const {
    vi order = WORD_ORDERS[most == 127];
    for (int g = 0; g < K / GROUP; g++) {
      const float* from = row + g * GROUP;
      vf tops = {};
      for (int i = 0; i < GROUP; i += LANES) {
        vf v = load<vf>(from + i);
        tops = larger(tops, larger(v, -v));
      }
      float top = largest_of(tops), unit = top * (1.0f / most), inverse = top > 0 ? most / top : 0;
      int16_t* to = q + (long)m * ldq() + g * GROUP;
      int8_t* bytes = (int8_t*)(q + (long)m * ldq()) + g * GROUP;
      vi totals = {};
      for (int i = 0; i < GROUP; i += LANES) {
        vi whole = (vi)(load<vf>(from + i) * inverse + 12582912.0f);
        whole -= 0x4b400000;                   // of 12582912: what is left is the whole number
        totals += whole;
        if (by_words) whole = permuted(whole, order);
        if (most > 127) store(to + i, __builtin_convertvector(whole, vn));
        else store(bytes + i, __builtin_convertvector(whole, vq));
      }
      long at = (long)m * (K / GROUP) + g;
      scale[at] = unit;
      total[at] = sum_of(totals);
      sum[at] = total[at] * unit;
    }
  }
};

// y [M][ROWS] = x by a block of weights. Few rows have several sums of each under way. Each is
// compiled by itself: in line, a change to one of them made another a fifth slower.

template <int M>
[[gnu::noinline]] static void by_fp32(const float* w, const Rows& rows, float* y) {
  constexpr int U = M == 1 ? 4 : M == 2 ? 2 : 1;
  vf acc[U][M][2] = {};
  for (int k = 0; k < rows.K; k += U)
    for (int u = 0; u < U; u++)
      for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++)
          acc[u][m][v] += rows.x[(long)m * rows.K + k + u] * load<vf>(w + (k + u) * ROWS + v * LANES);
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      for (int u = 1; u < U; u++) acc[0][m][v] += acc[u][m][v];
      store(y + m * ROWS + v * LANES, acc[0][m][v]);
    }
}

template <int M>
[[gnu::noinline]] static void by_bf16(const int32_t* w, const Rows& rows, float* y) {
  constexpr int U = M == 1 ? 2 : 1;
  vf acc[U][2][M][2] = {};                     // few rows have sums of their own for odd inputs
  for (int p = 0; p < rows.K / 2; p += U)
    for (int u = 0; u < U; u++) {
      const int32_t* at = w + (p + u) * ROWS;
      prefetch(at, 4 * ROWS);
      for (int odd = 0; odd < 2; odd++) {
        vi pairs[2] = {load<vi>(at), load<vi>(at + LANES)};
        vf halves[2];                          // both meet x while it is in a register
        for (int v = 0; v < 2; v++) halves[v] = odd ? high_bf16(pairs[v]) : low_bf16(pairs[v]);
        for (int m = 0; m < M; m++)
          for (int v = 0; v < 2; v++)
            acc[u][M < 4 && odd][m][v] += rows.x[(long)m * rows.K + 2 * (p + u) + odd] * halves[v];
      }
    }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) {
      vf sum = acc[0][0][m][v] + acc[0][1][m][v];
      for (int u = 1; u < U; u++) sum += acc[u][0][m][v] + acc[u][1][m][v];
      store(y + m * ROWS + v * LANES, sum);
    }
}

static inline vs load_codes(const int8_t* p) { return load_int8(p); }
static inline vs load_codes(const int16_t* p) { return load<vs>(p); }

// sum + a group's whole numbers, as what they stand for; scales [K / GROUP, ROWS], or null: ones
template <int M>
static inline void add_group(vf sum[M][2], const vi acc[M][2], const float* scales,
                             const Rows& rows, int g) {
  vf scale[2] = {vf{} + 1.0f, vf{} + 1.0f};
  if (scales)
    for (int v = 0; v < 2; v++) scale[v] = load<vf>(scales + g * ROWS + v * LANES);
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++)
      sum[m][v] += to_float(acc[m][v]) * (scale[v] * rows.scale[m * (rows.K / GROUP) + g]);
}

// int8, or int4 that has been decoded and has scales.
template <int M, class Code>
[[gnu::noinline]] static void by_codes(const Code* w, const float* scales, const Rows& rows,
                                      float* y) {
  constexpr bool is_ahead = sizeof(Code) == 1 && (M > 1 || LANES == 8);      // as measured
  int n_group = rows.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < n_group; g++) {
    vi acc[M][2] = {};
    auto meet = [&](int p) {
      const Code* at = w + (g * GROUP / 2 + p) * ROWS * 2;
      if (is_ahead && p % (32 / ROWS) == 0) prefetch(at, 64);
      vs codes[2] = {load_codes(at), load_codes(at + 2 * LANES)};
      for (int m = 0; m < M; m++) {
        int32_t x = rows.pair(m, g * GROUP / 2 + p);
        for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], x);
      }
    };
    if constexpr (M == 1) {
      for (int p = 0; p < GROUP / 2; p++) meet(p);
    } else {
#pragma GCC unroll 2
      for (int p = 0; p < GROUP / 2; p++) meet(p);
    }
    add_group<M>(sum, acc, scales, rows, g);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ROWS + v * LANES, sum[m][v]);
}

template <int M>
[[gnu::noinline]] static void by_int4(const int32_t* w, const int32_t* scales, int group,
                                     const Rows& rows, float* y) {
  int n_group = rows.K / GROUP, steps = group / GROUP;
  vf total[M][2] = {};
  for (int g = 0; g < rows.K / group; g++) {
    vf sum[M][2] = {};
    float x_sum[M] = {};
    for (int i = g * steps; i < (g + 1) * steps; i++) {
      vi acc[M][2] = {};
#pragma GCC unroll 1
      for (int j = 0; j < GROUP / 8; j++) {
        const int32_t* at = w + (i * GROUP / 8 + j) * ROWS;
        prefetch(at, 4 * ROWS);
        auto meet = [&](int b) {               // both halves meet x while it is in a register
          vs codes[2];
          for (int v = 0; v < 2; v++)
            codes[v] = (vs)((vi)(load<vu>(at + v * LANES) >> (4 * b)) & 0x000f000f);
          for (int m = 0; m < M; m++) {
            int32_t x = rows.pair(m, i * GROUP / 2 + 4 * j + b);
            for (int v = 0; v < 2; v++) acc[m][v] = dot2(acc[m][v], codes[v], x);
          }
        };
        if constexpr (M < 2) {
          for (int b = 0; b < 4; b++) meet(b);
        } else {                               // else its products wait in memory for their sums
#pragma GCC unroll 2
          for (int b = 0; b < 4; b++) meet(b);
        }
      }
      for (int m = 0; m < M; m++) {
        for (int v = 0; v < 2; v++) sum[m][v] += to_float(acc[m][v]) * rows.scale[m * n_group + i];
        x_sum[m] += rows.sum[m * n_group + i];
      }
    }
    prefetch(scales + g * ROWS, 4 * ROWS);
    for (int v = 0; v < 2; v++) {
      vf scale, term;
      scale_and_term(scales + g * ROWS + v * LANES, &scale, &term);
      for (int m = 0; m < M; m++) total[m][v] += scale * sum[m][v] + term * x_sum[m];
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ROWS + v * LANES, total[m][v]);
}

// The same as bytes [K / 4, ROWS, 4]; int8, where four make a product, has 128 added to each
template <int M>
[[gnu::noinline]] static void by_bytes(const int32_t* w, const float* scales, const Rows& rows,
                                      float* y) {
  int n_group = rows.K / GROUP;
  vf sum[M][2] = {};
  for (int g = 0; g < n_group; g++) {
    Sums acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      acc[m][0] = acc[m][1] = (Sums)(vi{} - (scales ? 0 : 128 * rows.total[m * n_group + g]));
#pragma GCC unroll 4
    for (int p = 0; p < GROUP / 4; p++) {
      const int32_t* at = w + (g * GROUP / 4 + p) * ROWS;
      vi bytes[2] = {load<vi>(at), load<vi>(at + LANES)};
#pragma GCC unroll 16
      for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++)
          acc[m][v] = dot4(acc[m][v], bytes[v], rows.four(m, g * GROUP / 4 + p));
    }
    vi wholes[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++) wholes[m][v] = whole(acc[m][v]);
    add_group<M>(sum, wholes, scales, rows, g);
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < 2; v++) store(y + m * ROWS + v * LANES, sum[m][v]);
}

// Weights of inputs [from, from + n) as floats [n, ROWS]
static void to_floats(const Linear& op, int i, int K, int from, int n, float* to) {
  const char* w = block(op, i, K);
  if (op.format == FP32) memcpy(to, (const float*)w + (long)from * ROWS, 4 * (size_t)n * ROWS);
  for (int v = 0; v < 2; v++) {
    float* column = to + v * LANES;
    if (op.format == BF16)
      for (int k = 0; k < n; k += 2) {
        vi pair = load<vi>((const int32_t*)w + (from + k) / 2 * ROWS + v * LANES);
        store(column + k * ROWS, low_bf16(pair));
        store(column + (k + 1) * ROWS, high_bf16(pair));
      }
    if (op.format == INT4) {
      const int32_t* scales = int4_scales(op, i, K);
      for (int k = 0; k < n; k += GROUP) {
        vf scale, term;
        scale_and_term(scales + (from + k) / op.group * ROWS + v * LANES, &scale, &term);
        for (int j = k; j < k + GROUP; j += 8) {
          const int32_t* codes = (const int32_t*)w + (from + j) / 8 * ROWS + v * LANES;
          prefetch(codes, 4 * LANES);
          vu words = load<vu>(codes);
          for (int b = 0; b < 8; b++) {
            vf code = to_float((vi)(words >> (4 * b) & 15));
            store(column + (j + b) * ROWS, code * scale + term);
          }
        }
      }
    }
  }
}

// The same as pairs of bf16 [K / 2, ROWS, 2]; memory: [DEPTH, ROWS]
static void to_pairs(const Linear& op, int i, int K, float* memory, int32_t* to) {
  for (int from = 0; from < K; from += DEPTH, to += DEPTH / 2 * ROWS) {
    int n = std::min(DEPTH, K - from);
    to_floats(op, i, K, from, n, memory);
    for (int k = 0; k < n; k += 2)
      for (int v = 0; v < ROWS; v += LANES) {
        vi even = load<vi>(memory + k * ROWS + v) + 0x8000;       // rounded
        vi odd = load<vi>(memory + (k + 1) * ROWS + v) + 0x8000;
        store(to + k / 2 * ROWS + v, (vi)((vu)even >> 16) | (odd & (int32_t)0xffff0000));
      }
  }
}

// A block of weights as several tiles share it
struct Decoded {
  int16_t* codes;                              // [K / 2, ROWS, 2] as x is: bf16, integers or bytes
  float *scales, *terms;                       // [K / GROUP, ROWS], of int4's integers; bf16's scales
  float* floats;                               // [DEPTH, ROWS]

  Decoded(float* memory, int K) {
    codes = (int16_t*)memory;
    scales = memory + (size_t)K / 2 * ROWS;
    terms = scales + (size_t)K / GROUP * ROWS;
    floats = terms + (size_t)K / GROUP * ROWS;
  }

  static size_t size(int K) { return (size_t)(K / 2 + 2 * (K / GROUP) + DEPTH) * ROWS; }

  void decode(const Linear& op, int i, int K) {
    if (numbers(op) == PAIRS) return to_pairs(op, i, K, floats, (int32_t*)codes);
    if (op.format == BF16) return take_bf16((const int32_t*)block(op, i, K), K);
    if (op.format == INT8 && numbers(op) == INTEGERS)
      return widen((const int8_t*)block(op, i, K), K);
    if (op.format == INT8) return take_bytes((const uint16_t*)block(op, i, K), K);
    const int32_t *w = (const int32_t*)block(op, i, K), *words = int4_scales(op, i, K);
    bool by_bytes = numbers(op) == BYTES;
    for (int k = 0; k < K / 8 * ROWS; k += LANES) {
      prefetch(w + k, 4 * LANES);
      int n = by_bytes ? 2 : 4, mask = by_bytes ? 0x0f0f0f0f : 0x000f000f;
      int32_t* to = (int32_t*)codes + k / ROWS * n * ROWS + k % ROWS;
      for (int b = 0; b < n; b++) store(to + b * ROWS, (vi)(load<vu>(w + k) >> (4 * b)) & mask);
    }
    for (int g = 0; g < K / GROUP; g++)
      for (int v = 0; v < ROWS; v += LANES) {
        vf scale, term;
        scale_and_term(words + g * GROUP / op.group * ROWS + v, &scale, &term);
        store(scales + g * ROWS + v, scale);
        store(terms + g * ROWS + v, term);
      }
  }

  void widen(const int8_t* w, int K) {
    for (int k = 0; k < K * ROWS; k += 2 * LANES) store(codes + k, load_int8(w + k));
  }

  void take_bytes(const uint16_t* w, int K) {  // pairs [K / 2, ROWS] of int8
    for (int k = 0; k < K / 2 * ROWS; k += 2 * ROWS)
      for (int v = 0; v < ROWS; v += LANES) {
        prefetch(w + k + 2 * v, 4 * LANES);
        vu pair = (vu)load_bf16(w + k + v) >> 16, next = (vu)load_bf16(w + k + ROWS + v);
        store((int32_t*)codes + k / 2 + v, (vi)(pair | next) ^ (int32_t)0x80808080);
      }
  }

  void take_bf16(const int32_t* w, int K) {    // pairs [K / 2, ROWS], rounded to 14 bits
    for (int g = 0; g < K / GROUP; g++)
      for (int v = 0; v < ROWS; v += LANES) {
        const int32_t* from = w + g * GROUP / 2 * ROWS + v;
        int32_t* to = (int32_t*)codes + g * GROUP / 2 * ROWS + v;
        vf top = {};
        for (int p = 0; p < GROUP / 2; p++) {
          vf low = low_bf16(load<vi>(from + p * ROWS)), high = high_bf16(load<vi>(from + p * ROWS));
          top = larger(larger(top, larger(low, -low)), larger(high, -high));
        }
        vf inverse = top > 0 ? MOST_14_BITS / top : vf{};
        for (int p = 0; p < GROUP / 2; p++) {  // 12582912: whole numbers, the low bits of the sum
          vi pair = load<vi>(from + p * ROWS);
          vi low = (vi)(low_bf16(pair) * inverse + 12582912.0f);
          vi high = (vi)(high_bf16(pair) * inverse + 12582912.0f);
          store(to + p * ROWS, (low & 0xffff) | high << 16);
        }
        store(scales + g * ROWS + v, top * (1.0f / MOST_14_BITS));
      }
  }
};

template <int M>
static void block_by(const Linear& op, int i, const Rows& rows, float* y, const Decoded* decoded) {
  const char* w = block(op, i, rows.K);
  if (numbers(op) == PAIRS)
    return tile<M>(decoded ? (const int32_t*)decoded->codes : (const int32_t*)w, ROWS, rows.K / 2,
                   (const int32_t*)rows.q, rows.ldq() / 2, y, ROWS, false);
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
    for (int m = 0; m < M; m++)
      for (int v = 0; v < 2; v++) {
        float* sum = y + m * ROWS + v * LANES;
        store(sum, load<vf>(sum) * int8_scale(op, i, v));
      }
  }
}

template <int M>
static void block_by_some(int m, const Linear& op, int i, const Rows& rows, float* y,
                          const Decoded* decoded) {
  if (m == M) return block_by<M>(op, i, rows, y, decoded);
  if constexpr (M > 1) block_by_some<M - 1>(m, op, i, rows, y, decoded);
}

// y [M, ROWS], M up to TILE
static void block_by_tile(int M, const Linear& op, int i, const Rows& rows, float* y,
                          const Decoded* decoded) {
  int n_group = rows.K / GROUP;
  block_by_some<TILE>(M, op, i, rows, y, decoded);
  if (decoded && op.format == INT4 && numbers(op) != PAIRS)
    tile_of<TILE>(M, decoded->terms, ROWS, n_group, rows.sum, n_group, y, ROWS, true);
}

static bool is_decoded(const Linear& op) {     // once for all tiles; as measured
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
    int most = numbers(op) == BYTES ? BYTES_TILE : TILE, n_tile = (op.M + most - 1) / most;
    size_t n_y = (size_t)step * TILE * ROWS, n_decoded = is_decoded(op) ? Decoded::size(K) : 0;
    float* y = memory_of(own, 2 * n_y + 2 * n_decoded);
    Decoded decoded[2] = {{y + 2 * n_y, K}, {y + 2 * n_y + n_decoded, K}};
    int begin = task * step, end = std::min(n_block, begin + step);
    if (n_decoded)
      for (int half = 0; half <= op.gated; half++)
        decoded[half].decode(op, begin + half * n_block, K);
    for (int j = 0, m = 0; j < n_tile; j++) {  // of nearly equal height
      int height = (op.M - m + n_tile - j - 1) / (n_tile - j);
      auto to = [&](int half, int i) { return y + half * n_y + (i - begin) * height * ROWS; };
      if (n_tile > 1)
        for (int r = 0; r < height; r++) prefetch_out(op, m + r, begin * ROWS);
      for (int half = 0; half <= op.gated; half++)
        for (int i = begin; i < end; i++)
          block_by_tile(height, op, i + half * n_block, rows.from(m), to(half, i),
                        n_decoded ? decoded + half : nullptr);
      for (int i = begin; i < end; i++)
        for (int r = 0; r < height; r++)
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
  if (op.bias) one.bias = op.bias + (long)e * op.N;
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
    do_tasks(phase[0], n_row, 1, [&](int row) {
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

// ---- Attention ----------------------------------------------------------------------------------

// RoPE of qkv [B, T, N + 2 K, H], the write of keys and values to slots of the caches
// [rows, K, S, H], softmax(cap(q k' scale)) v of the first n_key slots -> out [B, T, N, V], times
// the sigmoid of a gate of its shape if there is one. V is H, or as much of a key as is its value.
struct Positions {                             // what layers share
  int64_t n_key, mask_b, mask_t, angle_b, slot_b;                 // the others are strides
  const float *cos, *sin;                      // [(B, 1,) T, H / 2]
  const uint8_t* mask;                         // [(B, 1,) T, n_key]
  const int64_t *slot, *rows;                  // [(B,) T]; [B], of the caches, or null: all
};

struct Attention {
  int32_t kind, B, T, N, K, H, V, S, cache_type, wide_norm, out_type;
  int32_t has_keys;                            // else qkv are queries, and the cache another layer's
  int32_t is_turned;                           // or these are as they meet the keys
  float scale, cap;
  Norm q_norm, k_norm, v_norm;
  const Positions* at;
  const float *sinks, *gate;
  float* qkv;
  void *k_cache, *v_cache, *out;
};

constexpr int KEYS = HAS_BF16 ? 256 : 64;      // at a time
constexpr int QUERIES = 96;                    // heads that share keys are queries side by side
constexpr int FEW = 4;                         // of which each takes its own sums over a key

static void rotate(int half, const float* cos, const float* sin, float* x) {
  for (int i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

static inline int width_of(const Attention& op) {                 // of a token's qkv
  return (op.N + (op.has_keys ? 2 * op.K : 0)) * op.H;
}

static inline long cache_at(const Attention& op, int b, int head, long slot) {
  long row = op.at->rows ? op.at->rows[b] : b;
  return ((row * op.K + head) * op.S + slot) * op.H;
}

static void write_keys(const Attention& op, int b, int t) {
  float* q = op.qkv + ((long)b * op.T + t) * width_of(op);
  float *k = q + op.N * op.H, *v = k + op.K * op.H;
  const float* cos = op.at->cos + b * op.at->angle_b + t * (op.H / 2);
  const float* sin = op.at->sin + b * op.at->angle_b + t * (op.H / 2);
  if (op.wide_norm) {
    normalize(op.q_norm, op.N * op.H, q);
    normalize(op.k_norm, op.K * op.H, k);
  }
  for (int i = 0; i < op.N + (op.has_keys ? op.K : 0); i++) {
    float* x = q + i * op.H;
    if (!op.wide_norm) normalize(i < op.N ? op.q_norm : op.k_norm, op.H, x);
    rotate(op.H / 2, cos, sin, x);
  }
  if (!op.has_keys) return;
  for (int i = 0; i < op.K; i++) normalize(op.v_norm, op.H, v + i * op.H);
  long slot = op.at->slot[b * op.at->slot_b + t];
  if (slot < 0 || slot >= op.S) {
    out_of_range = true;
    return;
  }
  for (int i = 0; i < op.K; i++) {
    write_floats(k + i * op.H, op.H, op.k_cache, op.cache_type, cache_at(op, b, i, slot));
    write_floats(v + i * op.H, op.H, op.v_cache, op.cache_type, cache_at(op, b, i, slot));
  }
}

struct Task {
  int b, head, t0, t1, key0, key1;             // queries [t0, t1) of the heads that share one
};

struct Softmax {                               // of a task's queries, over the keys so far
  float *top, *sum, *out;                      // [queries], [queries], [queries, Hp]
};

static const uint8_t* mask_of(const Attention& op, int b, int t) {
  return op.at->mask + b * op.at->mask_b + t * op.at->mask_t;
}

// keys that any of the queries sees: from the first to the last, [first, last)
static void seen(const Attention& op, int b, int t0, int t1, int* first, int* last) {
  *first = op.at->n_key;
  *last = 0;
  for (int t = t0; t < t1; t++) {
    const uint8_t* mask = mask_of(op, b, t);
    int end = op.at->n_key;
    while (end - 8 >= *last && load<uint64_t>(mask + end - 8) == 0) end -= 8;
    while (end > *last && !mask[end - 1]) end--;
    *last = std::max(*last, end);
    int begin = 0;
    while (begin + 8 <= *first && load<uint64_t>(mask + begin) == 0) begin += 8;
    while (begin < *first && !mask[begin]) begin++;
    *first = std::min(*first, begin);
  }
  *first = std::min(*first, *last);
}

// LANES vectors -> a vector of their sums
static inline vf sums_of(vf* a) {
  vi even, odd;
  for (int i = 0; i < LANES; i++) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  for (int n = LANES; n > 1; n /= 2)
    for (int i = 0; i < n / 2; i++)
      a[i] = permuted(a[2 * i], a[2 * i + 1], even) + permuted(a[2 * i], a[2 * i + 1], odd);
  return a[0];
}

static inline vf load_key(const float* k) { return load<vf>(k); }
static inline vf load_key(const uint16_t* k) { return load_bf16(k); }

// scores [R, KEYS] of few queries [R, H] with n keys [n, H]: a sum for each
template <int R, class Key>
static void few_scores(const float* q, const Key* k, int n, int H, float* score) {
  for (int j = 0; j < n; j += LANES) {
    vf sums[R][LANES];
    for (int i = 0; i < LANES; i++) {
      const Key* key = k + (long)std::min(j + i, n - 1) * H;
      vf even[R] = {}, odd[R] = {};
      for (int h = 0; h < H; h += 2 * LANES) {
        vf a = load_key(key + h), b = load_key(key + h + LANES);
        for (int r = 0; r < R; r++) {
          even[r] += a * load<vf>(q + r * H + h);
          odd[r] += b * load<vf>(q + r * H + h + LANES);
        }
      }
      for (int r = 0; r < R; r++) sums[r][i] = even[r] + odd[r];
    }
    for (int r = 0; r < R; r++) store(score + r * KEYS + j, sums_of(sums[r]));
  }
}

template <int R, class Key>
static void few_scores_of(int n_query, const float* q, const Key* k, int n, int H, float* score) {
  if (n_query == R) return few_scores<R>(q, k, n, H, score);
  if constexpr (R > 1) few_scores_of<R - 1>(n_query, q, k, n, H, score);
}

// a [LANES] -> its columns
static inline void transpose(vi* a) {
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2) {
    vi low, high;
    for (int j = 0; j < LANES; j++) {
      low[j] = j & step ? LANES + j - step : j;
      high[j] = j & step ? LANES + j : j + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & step) continue;
      vi first = a[i];
      a[i] = permuted(first, a[i + step], low);
      a[i + step] = permuted(first, a[i + step], high);
    }
  }
}

// k [n_key, n], floats or pairs -> [keys / ROWS][n][ROWS]; whatever there is from n_key on
static void transpose_keys(const int32_t* k, int n_key, int n, int32_t* to) {
  for (int j = 0; j < n_key; j += LANES)
    for (int h = 0; h < n; h += LANES) {
      vi a[LANES];
      for (int i = 0; i < LANES; i++) a[i] = load<vi>(k + std::min(j + i, n_key - 1) * n + h);
      transpose(a);
      int32_t* block = to + (long)(j / ROWS * n + h) * ROWS + j % ROWS;
      for (int i = 0; i < LANES; i++) store(block + i * ROWS, a[i]);
    }
}

// v [n, V] of bf16, H apart -> pairs [n / 2, Vp], neighbours in a word; zeros from n on
static void pair_values(const uint16_t* v, int n, int V, int H, int Vp, int32_t* to) {
  for (int j = 0; j < n; j += 2) {
    const uint16_t *first = v + j * H, *second = first + H;
    int32_t* pairs = to + j / 2 * Vp;
    if (j + 1 < n)
      for (int h = 0; h < V; h++) pairs[h] = first[h] | second[h] << 16;
    else
      for (int h = 0; h < V; h++) pairs[h] = first[h];
  }
}

// s [KEYS], scores of n keys -> their weights, floats or bf16; what is masked has none. is_masked:
// something is. ROUGH: of keys and values in bf16
template <bool ROUGH, bool AS_BF16>
static void weigh(const Attention& op, const uint8_t* mask, bool is_masked, int n, float* s,
                  float* top, float* sum, float* out, int Hp) {
  int end = padded(n, LANES);
  if (op.cap)
    for (int j = 0; j < end; j += LANES) store(s + j, op.cap * tanh_of(load<vf>(s + j) / op.cap));
  if (is_masked)
    for (int j = 0; j < n; j++) s[j] = mask[j] ? s[j] : -INFINITY;
  for (int j = n; j < end; j++) s[j] = -INFINITY;
  vf tops = load<vf>(s);
  for (int j = LANES; j < end; j += LANES) tops = larger(tops, load<vf>(s + j));
  float new_top = std::max(*top, largest_of(tops));
  if (new_top == -INFINITY) {                  // it sees none of these, and saw none before
    memset(s, 0, 4 * end);
    return;
  }
  vf sums = {};
  for (int j = 0; j < end; j += LANES) {
    constexpr float LOG2_E = 1.44269504f;
    vf p = ROUGH ? power_of_2(load<vf>(s + j) * LOG2_E - new_top * LOG2_E)
                 : exp_of(load<vf>(s + j) - new_top);
    sums += p;
    if (!AS_BF16) store(s + j, p);
    else write_floats((const float*)&p, LANES, s, BF16, j);      // before what is read next
  }
  if (new_top > *top) {
    float old = *top == -INFINITY ? 0 : std::exp(*top - new_top);
    for (int h = 0; h < Hp; h += LANES) store(out + h, load<vf>(out + h) * old);
    *sum *= old;
    *top = new_top;
  }
  *sum += sum_of(sums);
}

template <class Key>
static void attend(const Attention& op, const Task& task, const Softmax& softmax) {
  constexpr bool BY_PAIRS = HAS_BF16 && sizeof(Key) == 2;
  int H = op.H, V = op.V, Hp = padded(H, ROWS), Vp = padded(V, ROWS);
  int share = op.N / op.K, W = width_of(op), n_query = (task.t1 - task.t0) * share;
  float* q = memory_of(own, (size_t)n_query * (2 * Hp + KEYS) + 3 * KEYS * Hp);
  float *score = q + n_query * Hp, *k = score + n_query * KEYS, *v = k + KEYS * Hp;
  float *turned = v + KEYS * Hp, *q_pairs = turned + KEYS * Hp;
  for (int r = 0; r < n_query; r++) {
    int t = task.t0 + r / share, head = task.head * share + r % share;
    const float* from = op.qkv + ((long)task.b * op.T + t) * W + head * H;
    for (int h = 0; h < H; h++) q[r * Hp + h] = from[h] * op.scale;
    std::fill(q + r * Hp + H, q + (r + 1) * Hp, 0.0f);
    softmax.top[r] = -INFINITY;
    softmax.sum[r] = 0;
  }
  if (BY_PAIRS) write_floats(q, n_query * Hp, q_pairs, BF16, 0);
  memset(softmax.out, 0, 4 * (size_t)n_query * Vp);
  if (H < Hp) memset(k, 0, 8 * (size_t)KEYS * Hp);
  for (int key = task.key0; key < task.key1; key += KEYS) {
    int n = std::min(KEYS, task.key1 - key), first_t = task.t0;
    while (first_t < task.t1 && !memchr(mask_of(op, task.b, first_t) + key, 1, n)) first_t++;
    int from = (first_t - task.t0) * share, n_row = n_query - from;    // the others see none
    if (n_row == 0) continue;
    long at = cache_at(op, task.b, task.head, key);
    const Key *keys = (const Key*)op.k_cache + at, *values = (const Key*)op.v_cache + at;
    float *s = score + from * KEYS, *out = softmax.out + from * Vp;
    bool few = n_row <= FEW && H == Hp && V == Vp;                // straight from the cache
    if (few) {
      few_scores_of<FEW>(n_row, q + from * Hp, keys, n, H, s);
    } else if (BY_PAIRS) {
      const int32_t* pairs = (const int32_t*)keys;
      if (H < Hp) {
        for (int j = 0; j < n; j++) memcpy((uint16_t*)k + j * Hp, keys + j * H, 2 * H);
        pairs = (const int32_t*)k;
      }
      pair_values((const uint16_t*)values, n, V, H, Vp, (int32_t*)v);
      transpose_keys(pairs, n, Hp / 2, (int32_t*)turned);
      for (int j = 0; j < n; j += ROWS)
        tiles(n_row, (const int32_t*)turned + j * Hp / 2, ROWS, Hp / 2,
              (const int32_t*)q_pairs + from * Hp / 2, Hp / 2, s + j, KEYS, false);
    } else {
      for (int j = 0; j < n; j++) {
        read_floats(op.k_cache, op.cache_type, at + (long)j * H, H, k + j * Hp);
        read_floats(op.v_cache, op.cache_type, at + (long)j * H, V, v + j * Vp);
      }
      transpose_keys((const int32_t*)k, n, Hp, (int32_t*)turned);
      for (int j = 0; j < n; j += ROWS)
        tiles(n_row, turned + j * Hp, ROWS, Hp, q + from * Hp, Hp, s + j, KEYS, false);
    }
    auto weigh_rows = few ? weigh<false, false> : weigh<sizeof(Key) == 2, BY_PAIRS>;
    for (int t = first_t; t < task.t1; t++) {
      const uint8_t* mask = mask_of(op, task.b, t) + key;
      bool is_masked = memchr(mask, 0, n);
      for (int r = (t - task.t0) * share; r < (t - task.t0 + 1) * share; r++)
        weigh_rows(op, mask, is_masked, n, score + r * KEYS, softmax.top + r, softmax.sum + r,
                   softmax.out + r * Vp, Vp);
    }
    for (int h = 0; h < Vp; h += ROWS) {
      if (few) tiles(n_row, values + h, H, n, s, KEYS, out + h, Vp, true);
      else if (BY_PAIRS)
        tiles(n_row, (const int32_t*)v + h, Vp, (n + 1) / 2, (const int32_t*)s, KEYS, out + h, Vp,
              true);
      else tiles(n_row, v + h, Vp, n, s, KEYS, out + h, Vp, true);
    }
  }
}

// out of a query, from its softmax over each of n_part parts of the keys, `step` floats apart
static void write_out(const Attention& op, const Task& task, int r, const Softmax& first,
                      int n_part, long step) {
  int Vp = padded(op.V, ROWS), share = op.N / op.K;
  int t = task.t0 + r / share, head = task.head * share + r % share;
  float top = op.sinks ? op.sinks[head] : -INFINITY, sum = 0;
  for (int i = 0; i < n_part; i++) top = std::max(top, first.top[r + i * step]);
  if (op.sinks) sum = std::exp(op.sinks[head] - top);
  std::vector<float> y(2 * Vp, 0.0f);
  for (int i = 0; i < n_part; i++) {
    if (first.top[r + i * step] == -INFINITY) continue;
    float weight = std::exp(first.top[r + i * step] - top);
    sum += weight * first.sum[r + i * step];
    for (int h = 0; h < op.V; h++) y[h] += weight * first.out[r * Vp + h + i * step];
  }
  for (int h = 0; h < op.V; h++) y[h] /= sum;
  long at = (((long)task.b * op.T + t) * op.N + head) * op.V;
  if (op.gate) {
    float* gate = y.data() + Vp;
    copy_floats(op.gate + at, op.V, gate);
    for (int h = 0; h < Vp; h += LANES)
      store(&y[h], load<vf>(&y[h]) * inverse_of(1.0f + exp_of(-load<vf>(gate + h))));
  }
  write_floats(y.data(), op.V, op.out, op.out_type, at);
}

struct Plan {                                  // of an attention
  int share, step_t, n_tile, n_task, n_part;   // n_part: of the keys, where tasks are few
  size_t size;                                 // floats of a task's softmax

  Plan(const Attention& op, int n_thread) {
    share = op.N / op.K;
    step_t = std::max(1, std::min(op.T, QUERIES / share));
    n_tile = (op.T + step_t - 1) / step_t;
    n_task = op.B * op.K * n_tile;
    n_part = 1;
    if (n_task < 4 * n_thread)
      n_part = std::min((4 * n_thread + n_task - 1) / n_task, (int)op.at->n_key / 128);
    n_part = std::max(1, n_part);
    size = (size_t)step_t * share * (padded(op.V, ROWS) + 2);
  }

  Softmax softmax(float* memory, int i) const {
    float* at = memory + i * size;
    return {at, at + step_t * share, at + 2 * step_t * share};
  }

  Task task(const Attention& op, int i) const {                   // the longest first
    int tile = n_tile - 1 - i / (op.B * op.K), rest = i % (op.B * op.K);
    Task task = {rest / op.K, rest % op.K, tile * step_t, std::min(op.T, (tile + 1) * step_t), 0, 0};
    seen(op, task.b, task.t0, task.t1, &task.key0, &task.key1);
    return task;
  }
};

static void attention(const Attention& op, Phase* phase, int n_thread) {
  if (op.at->n_key > op.S) {
    out_of_range = true;
    return;
  }
  if (!op.is_turned)
    do_tasks(phase[0], op.B * op.T, 2, [&](int i) { write_keys(op, i / op.T, i % op.T); });
  Plan plan(op, n_thread);
  float* memory = memory_of(shared, 0);
  auto write = [&](const Task& task, const Softmax& softmax, int n_part) {
    for (int r = 0; r < (task.t1 - task.t0) * plan.share; r++)
      write_out(op, task, r, softmax, n_part, plan.size);
  };
  do_tasks(phase[1], plan.n_task * plan.n_part, 1, [&](int i) {
    Task task = plan.task(op, i / plan.n_part);
    int n_key = (task.key1 - task.key0 + plan.n_part - 1) / plan.n_part;
    task.key0 += i % plan.n_part * padded(n_key, ROWS);
    task.key1 = std::min(task.key1, task.key0 + padded(n_key, ROWS));
    Softmax softmax = plan.softmax(memory, plan.n_part > 1 ? i : omp_get_thread_num());
    if (op.cache_type == FP32) attend<float>(op, task, softmax);
    else attend<uint16_t>(op, task, softmax);
    if (plan.n_part == 1) write(task, softmax, 1);
  });
  if (plan.n_part > 1)
    do_tasks(phase[2], plan.n_task, 1, [&](int i) {
      write(plan.task(op, i), plan.softmax(memory, i * plan.n_part), plan.n_part);
    });
}

// ---- Latent attention ---------------------------------------------------------------------------

// What comes before the attention over latents: k [B, T, rank + rope], its first part normalized and
// its last turned by RoPE, into a slot of the cache [rows, S, rank + rope]; of queries
// [B, T, N, nope + rope] the last, turned, to queries [B, T, N, rank + rope]'s.
struct Latent {
  int32_t kind, B, T, N, nope, rope, rank, S, cache_type, q_stride, k_stride;     // of a token's
  Norm norm;
  const Positions* at;
  const float *q, *k;
  float* queries;
  void* cache;
};

static void turn_latent(const Latent& op, int b, int t) {
  long m = (long)b * op.T + t, row = op.at->rows ? op.at->rows[b] : b, width = op.rank + op.rope;
  const float* cos = op.at->cos + b * op.at->angle_b + t * (op.rope / 2);
  const float* sin = op.at->sin + b * op.at->angle_b + t * (op.rope / 2);
  for (int i = 0; i < op.N; i++) {
    float* to = op.queries + (m * op.N + i) * width + op.rank;
    copy_floats(op.q + m * op.q_stride + (long)i * (op.nope + op.rope) + op.nope, op.rope, to);
    rotate(op.rope / 2, cos, sin, to);
  }
  float* k = memory_of(own, width);
  copy_floats(op.k + m * op.k_stride, width, k);
  normalize(op.norm, op.rank, k);
  rotate(op.rope / 2, cos, sin, k + op.rank);
  long slot = op.at->slot[b * op.at->slot_b + t];
  if (slot < 0 || slot >= op.S) {
    out_of_range = true;
    return;
  }
  write_floats(k, width, op.cache, op.cache_type, (row * op.S + slot) * width);
}

static void latent(const Latent& op, Phase* phase) {
  do_tasks(phase[0], op.B * op.T, 1, [&](int i) { turn_latent(op, i / op.T, i % op.T); });
}

// ---- Mixture of experts -------------------------------------------------------------------------

// logits [M, E] -> each token's A best experts by score + bias, and what they weigh: prob [M, A].
// All tokens' rows sorted by expert: place [M, A] says which row, order [M A] whose token's, and
// expert e's end before ends[e].
struct Route {
  int32_t kind, M, E, A, n_group, topk_group, group_top, by_sigmoid, normalized;
  float factor;
  const float *logits, *bias, *expert_scale;   // [E], or null
  float* prob;
  int32_t *place, *order, *ends;
};

// The places of the n best of x [n_x] -> best; they become -inf
static void take_best(float* x, int n_x, int n, int* best) {
  for (int i = 0; i < n; i++) {
    best[i] = std::max_element(x, x + n_x) - x;
    x[best[i]] = -INFINITY;
  }
}

// choice [E] -> -inf outside of the groups whose group_top best have the largest sums
static void keep_best_groups(const Route& op, float* choice, float* memory) {
  int size = op.E / op.n_group;
  std::vector<int> best(std::max(op.group_top, op.n_group));
  float* worth = memory + size;
  for (int g = 0; g < op.n_group; g++) {
    copy_floats(choice + g * size, size, memory);
    take_best(memory, size, op.group_top, best.data());
    worth[g] = 0;
    for (int i = 0; i < op.group_top; i++) worth[g] += choice[g * size + best[i]];
  }
  take_best(worth, op.n_group, op.topk_group, best.data());
  for (int g = 0; g < op.n_group; g++)
    if (worth[g] != -INFINITY)
      std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
}

static void choose_experts(const Route& op, int m) {
  float* score = memory_of(own, 4 * (size_t)padded(op.E, LANES));
  float *choice = score + padded(op.E, LANES), *memory = choice + padded(op.E, LANES);
  int* expert = op.place + (long)m * op.A;     // until the rows are sorted
  float *prob = op.prob + (long)m * op.A, sum = 0;
  copy_floats(op.logits + (long)m * op.E, op.E, score);
  float top = *std::max_element(score, score + op.E);
  for (int e = 0; e < op.E; e++) {
    score[e] = op.by_sigmoid ? 1 / (1 + std::exp(-score[e])) : std::exp(score[e] - top);
    sum += score[e];
  }
  for (int e = 0; e < op.E; e++) {
    if (!op.by_sigmoid) score[e] /= sum;
    choice[e] = score[e] + (op.bias ? op.bias[e] : 0);
  }
  if (op.n_group > 1) keep_best_groups(op, choice, memory);
  take_best(choice, op.E, op.A, expert);
  sum = 0;
  for (int a = 0; a < op.A; a++) sum += score[expert[a]];
  for (int a = 0; a < op.A; a++) {
    prob[a] = score[expert[a]] * op.factor / (op.normalized ? sum : 1);
    if (op.expert_scale) prob[a] *= op.expert_scale[expert[a]];
  }
}

static void sort_by_expert(const Route& op) {
  int n = op.M * op.A;
  std::fill(op.ends, op.ends + op.E, 0);
  for (int i = 0; i < n; i++) op.ends[op.place[i]]++;
  for (int e = 0, end = 0; e < op.E; e++) {    // where its rows begin
    end += op.ends[e];
    op.ends[e] = end - op.ends[e];
  }
  for (int i = 0; i < n; i++) {
    op.place[i] = op.ends[op.place[i]]++;
    op.order[op.place[i]] = i / op.A;
  }
}

static void route(const Route& op, Phase* phase) {
  do_tasks(phase[0], op.M, 1, [&](int m) { choose_experts(op, m); });
  do_tasks(phase[1], 1, 1, [&](int) { sort_by_expert(op); });
}

// out [M, D] = residual + factor * post(norm(each token's experts' rows y, weighed) + shared_norm(
// shared, times the sigmoid of a gate [M]))
struct Combine {
  int32_t kind, M, D, A, out_type, residual_type;
  float factor;
  Norm norm, shared_norm, post;
  const float *y, *prob;
  const int32_t* place;
  const float *shared, *gate;                  // or null
  const void* residual;
  void* out;
};

static void combine(const Combine& op, Phase* phase) {
  do_tasks(phase[0], op.M, 1, [&](int m) {
    float *sum = memory_of(own, 2 * (size_t)padded(op.D, LANES)), *other = sum + padded(op.D, LANES);
    std::fill(sum, sum + op.D, 0.0f);
    for (int a = 0; a < op.A; a++) {
      const float* y = op.y + (long)op.place[(long)m * op.A + a] * op.D;
      float prob = op.prob[(long)m * op.A + a];
      for (int i = 0; i < op.D; i++) sum[i] += prob * y[i];
    }
    normalize(op.norm, op.D, sum);
    if (op.shared) {
      float share = op.gate ? 1 / (1 + std::exp(-op.gate[m])) : 1;
      copy_floats(op.shared + (long)m * op.D, op.D, other);
      normalize(op.shared_norm, op.D, other);
      for (int i = 0; i < op.D; i++) sum[i] += share * other[i];
    }
    normalize(op.post, op.D, sum);
    read_floats(op.residual, op.residual_type, (long)m * op.D, op.D, other);
    for (int i = 0; i < op.D; i++) sum[i] = other[i] + op.factor * sum[i];
    write_floats(sum, op.D, op.out, op.out_type, (long)m * op.D);
  });
}

// ---- Gated DeltaNet -----------------------------------------------------------------------------

// The channels q, k [Nk, Dk], v [N, Dv] of x [B, T, channels] through a short convolution of their own and
// SiLU; then for each of N heads a state S [Dk, Dv] over the tokens,
//
//     S = decay S + k (beta (v - decay S' k))'        out = S' q
//
// with q of length q_scale, k of length 1, beta and decay by rates [B, T, 2, N]: sigmoid(rates[0]) and
// exp(decay_rate softplus(rates[1] + decay_bias)); out is normalized, times SiLU(z [B, T, N, Dv]).
// Rings hold the state after a position p [rows, n_state, N, Dk, Dv] and the convolution's input at
// it [rows, n_input, channels], at p modulo their lengths. A token that is not at its predecessor's
// position + 1 leaves the state as it is.
struct Delta {
  int32_t kind, B, T, Nk, N, Dk, Dv, n_tap, n_state, n_input, input_type, out_type;
  float q_scale;
  Norm norm;
  const Positions* at;
  const float *taps;                           // [n_tap, channels], a token's own the last
  const float *decay_rate, *decay_bias;        // [N]
  const float *x, *z, *rates;
  float* states;
  void *inputs, *out;
};

constexpr int COLUMNS = 2 * LANES;             // of a state at a time: they stay in the L1
constexpr int TOKENS = 32;                     // at a time
constexpr int MOST_TAPS = 8;                   // kernels/cpu_ops.py has it too

static long position(const Positions* at, int b, int t) { return at->slot[b * at->slot_b + t]; }

static bool follows(const Positions* at, int b, int t) {
  return t == 0 || position(at, b, t) == position(at, b, t - 1) + 1;
}

static int channels_of(const Delta& op) { return 2 * op.Nk * op.Dk + op.N * op.Dv; }

static long input_at(const Delta& op, int b, long p) {
  long row = op.at->rows ? op.at->rows[b] : b;
  return (row * op.n_input + p % op.n_input) * channels_of(op);
}

// Token t of row b, convolved -> mixed, where the n channels of a head's q, k or v from c on are
// [T, n] at c T.
static void convolve(const Delta& op, int b, int t, float* mixed) {
  int n_channel = channels_of(op), before = op.n_tap - 1;
  const float* in[MOST_TAPS];
  float* past = memory_of(own, (size_t)op.n_tap * n_channel);
  for (int i = 0; i < op.n_tap; i++) {
    int from = t - before + i;
    long p = position(op.at, b, 0) + from;
    in[i] = from < 0 ? past + (long)i * n_channel : op.x + ((long)b * op.T + from) * n_channel;
    if (from >= 0) continue;
    if (p < 0) std::fill(past + (long)i * n_channel, past + (i + 1l) * n_channel, 0.0f);
    else read_floats(op.inputs, op.input_type, input_at(op, b, p), n_channel, (float*)in[i]);
  }
  for (int c = 0, n; c < n_channel; c += n) {
    n = c < 2 * op.Nk * op.Dk ? op.Dk : op.Dv;
    float* to = mixed + (long)b * op.T * n_channel + (long)c * op.T + (long)t * n;
    for (int j = 0; j < n; j += LANES) {
      vf y = {};
      for (int i = 0; i < op.n_tap; i++)
        y += load<vf>(op.taps + (long)i * n_channel + c + j) * load<vf>(in[i] + c + j);
      store(to + j, activated(SILU, y));
    }
  }
}

// Those inputs that a call may go on from
static void keep_inputs(const Delta& op, int b) {
  long last = position(op.at, b, op.T - 1);
  for (int t = 0; t < op.T; t++) {
    long p = position(op.at, b, t);
    if (p > last - op.n_input && follows(op.at, b, t))
      write_floats(op.x + ((long)b * op.T + t) * channels_of(op), channels_of(op), op.inputs,
                   op.input_type, input_at(op, b, p));
  }
}

static float dot(const float* a, const float* b, int n) {         // n: whole vectors
  vf sum = {};
  for (int i = 0; i < n; i += LANES) sum += load<vf>(a + i) * load<vf>(b + i);
  return sum_of(sum);
}

// x [n] as long as `length` -> to
static void to_length(const float* x, int n, float length, float* to) {
  float factor = length / std::sqrt(dot(x, x, n) + 1e-6f);
  for (int i = 0; i < n; i += LANES) store(to + i, load<vf>(x + i) * factor);
}

struct Token {                                 // of a head
  float decay, beta, kq;                       // kq: k' q
  const float *k, *q, *v;
  float* out;
};

static inline void store_past_caches(float* to, vf x) {           // 64 bytes each, or 32
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__) && !defined(WIDE)
  _mm256_stream_ps(to, (__m256)x);
#else
  store(to, x);
#endif
}

// V vectors of columns of a state [Dk, Dv] take one token. from: the state before, null: zeros
template <int V>
static void step_columns(const Token& token, int Dk, int Dv, int column, const float* from, float* to) {
  vf sk[V] = {}, sq[V] = {}, change[V];
  if (from)
    for (int i = 0; i < Dk; i++)
      for (int j = 0; j < V; j++) {
        vf s = load<vf>(from + (long)i * Dv + column + j * LANES);
        sk[j] += token.k[i] * s;
        sq[j] += token.q[i] * s;
      }
  for (int j = 0; j < V; j++) {
    vf v = load<vf>(token.v + column + j * LANES);
    change[j] = token.beta * (v - token.decay * sk[j]);
    store(token.out + column + j * LANES, token.decay * sq[j] + token.kq * change[j]);
  }
  for (int i = 0; i < Dk; i++)
    for (int j = 0; j < V; j++) {
      long at = (long)i * Dv + column + j * LANES;
      vf s = from ? load<vf>(from + at) : vf{};
      store_past_caches(to + at, token.decay * s + token.k[i] * change[j]);
    }
}

static void step(const Token& token, int Dk, int Dv, const float* from, float* to) {
  int c = 0;
  for (; c + 8 * LANES <= Dv; c += 8 * LANES) step_columns<8>(token, Dk, Dv, c, from, to);
  for (; c < Dv; c += COLUMNS) step_columns<2>(token, Dk, Dv, c, from, to);
}

// What n tokens do to all columns at once, U being what each adds to the state for its k:
//
//     U_i = beta_i (v_i - G_i S' k_i - sum over j < i of G_i/G_j (k_j' k_i) U_j)
//     out_i = G_i S' q_i + sum over j <= i of G_i/G_j (k_j' q_i) U_j
//     S = G_n S + sum over j of G_n/G_j k_j U_j'
//
// with G_i the product of the decays up to i (arXiv 2412.06464).
struct Chunk {
  int n, Dk;
  float *k, *q;                                // [TOKENS, Dk]
  float *turned;                               // k' [Dk, TOKENS], then times G_n/G_j
  float *kk, *kq;                              // [TOKENS, TOKENS], times G_i/G_j
  float G[TOKENS], beta[TOKENS];

  void begin(const Token* tokens) {
    double sum = 0, sums[TOKENS];              // of logarithms
    for (int i = 0; i < n; i++) {
      sum += std::log((double)std::max(tokens[i].decay, 1e-30f));
      sums[i] = sum;
      G[i] = std::exp(sum);
      beta[i] = tokens[i].beta;
    }
    for (int i = 0; i < Dk; i++)
      for (int j = 0; j < TOKENS; j++) turned[i * TOKENS + j] = j < n ? k[j * Dk + i] : 0;
    for (int j = 0; j < TOKENS; j += ROWS) {
      tiles(n, turned + j, TOKENS, Dk, k, Dk, kk + j, TOKENS, false);
      tiles(n, turned + j, TOKENS, Dk, q, Dk, kq + j, TOKENS, false);
    }
    for (int i = 0; i < n; i++)
      for (int j = 0; j <= i; j++) {
        float share = std::exp(sums[i] - sums[j]);
        kk[i * TOKENS + j] *= share;
        kq[i * TOKENS + j] *= share;
      }
    for (int j = 0; j < n; j++) {
      float share = std::exp(sum - sums[j]);
      for (int i = 0; i < Dk; i++) turned[i * TOKENS + j] *= share;
    }
  }

  // Columns of S [Dk, COLUMNS]; v, out [n, Dv], U [n, COLUMNS]
  void columns(const float* v, int Dv, float* S, float* U, float* out) const {
    tiles(n, S, COLUMNS, Dk, k, Dk, U, COLUMNS, false);
    tiles(n, S, COLUMNS, Dk, q, Dk, out, Dv, false);
    for (int i = 0; i < n; i++) {
      vf sums[2] = {}, outs[2];
      for (int c = 0; c < 2; c++) outs[c] = G[i] * load<vf>(out + i * Dv + c * LANES);
      for (int j = 0; j < i; j++)
        for (int c = 0; c < 2; c++) {
          vf u = load<vf>(U + j * COLUMNS + c * LANES);
          sums[c] += kk[i * TOKENS + j] * u;
          outs[c] += kq[i * TOKENS + j] * u;
        }
      for (int c = 0; c < 2; c++) {
        float* at = U + i * COLUMNS + c * LANES;
        vf u = beta[i] * (load<vf>(v + i * Dv + c * LANES) - G[i] * load<vf>(at) - sums[c]);
        store(at, u);
        store(out + i * Dv + c * LANES, outs[c] + kq[i * TOKENS + i] * u);
      }
    }
    for (int i = 0; i < Dk * COLUMNS; i += LANES) store(S + i, G[n - 1] * load<vf>(S + i));
    tiles(Dk, U, COLUMNS, n, turned, TOKENS, S, COLUMNS, true);
  }
};

// A head's tokens: chunk by chunk up to those after each of which the state is kept
static void recur(const Delta& op, int b, int head, const float* mixed) {
  int Dk = op.Dk, Dv = op.Dv, key_head = head / (op.N / op.Nk);
  long row = op.at->rows ? op.at->rows[b] : b, size = (long)Dk * Dv;
  long first = position(op.at, b, 0), last = position(op.at, b, op.T - 1);
  int n_chunked = std::max(0l, last - first + 1 - op.n_state);
  float* S = memory_of(own, size + TOKENS * (3 * Dk + Dv + COLUMNS + 2 * TOKENS));
  float *k = S + size, *q = k + TOKENS * Dk, *out = q + TOKENS * Dk;
  float *U = out + TOKENS * Dv, *turned = U + TOKENS * COLUMNS, *kk = turned + TOKENS * Dk;
  mixed += (long)b * op.T * channels_of(op);
  const float *queries = mixed + (long)key_head * Dk * op.T, *keys = queries + (long)op.Nk * Dk * op.T;
  const float* values = mixed + (2l * op.Nk * Dk + (long)head * Dv) * op.T;
  auto state_at = [&](long p) {
    return op.states + ((row * op.n_state + p % op.n_state) * op.N + head) * size;
  };
  auto in_blocks = [&](long i) { return S + (i / Dv + i % Dv / COLUMNS * Dk) * COLUMNS; };
  for (long i = 0; n_chunked && i < size; i += COLUMNS) {         // [Dv/COLUMNS, Dk, COLUMNS]
    if (first == 0) std::fill(in_blocks(i), in_blocks(i) + COLUMNS, 0.0f);
    else copy_floats(state_at(first - 1) + i, COLUMNS, in_blocks(i));
  }
  for (int t0 = 0, n; t0 < op.T; t0 += n) {
    n = std::min(TOKENS, (t0 < n_chunked ? n_chunked : op.T) - t0);
    Token tokens[TOKENS];
    for (int t = 0; t < n; t++) {
      const float* rates = op.rates + ((long)b * op.T + t0 + t) * 2 * op.N + head;
      to_length(queries + (long)(t0 + t) * Dk, Dk, op.q_scale, q + t * Dk);
      to_length(keys + (long)(t0 + t) * Dk, Dk, 1, k + t * Dk);
      float time = rates[op.N] + op.decay_bias[head];
      time = time > 20 ? time : std::log1p(std::exp(time));       // softplus
      tokens[t] = {std::exp(op.decay_rate[head] * time), 1 / (1 + std::exp(-rates[0])),
                   dot(k + t * Dk, q + t * Dk, Dk), k + t * Dk, q + t * Dk,
                   values + (long)(t0 + t) * Dv, out + t * Dv};
    }
    if (t0 < n_chunked) {
      Chunk chunk = {n, Dk, k, q, turned, kk, kk + TOKENS * TOKENS, {}, {}};
      chunk.begin(tokens);
      for (int c = 0; c < Dv; c += COLUMNS) chunk.columns(tokens[0].v + c, Dv, S + (long)c * Dk, U, out + c);
      if (t0 + n == n_chunked)
        for (long i = 0; i < size; i += COLUMNS)
          copy_floats(in_blocks(i), COLUMNS, state_at(first + n_chunked - 1) + i);
    } else {
      for (int t = 0; t < n; t++) {
        long p = position(op.at, b, t0 + t);
        if (follows(op.at, b, t0 + t))
          step(tokens[t], Dk, Dv, p ? state_at(p - 1) : nullptr, state_at(p));
        else std::fill(tokens[t].out, tokens[t].out + Dv, 0.0f);  // anything finite
      }
    }
    for (int t = 0; t < n; t++) {
      long m = (long)b * op.T + t0 + t;
      const float* z = op.z + (m * op.N + head) * Dv;
      float* y = out + t * Dv;
      normalize(op.norm, Dv, y);
      for (int i = 0; i < Dv; i += LANES)
        store(y + i, load<vf>(y + i) * activated(SILU, load<vf>(z + i)));
      write_floats(y, Dv, op.out, op.out_type, (m * op.N + head) * Dv);
    }
  }
}

static void delta(const Delta& op, Phase* phase) {
  float* mixed = memory_of(shared, 0);
  for (int b = 0; b < op.B; b++)
    if (position(op.at, b, 0) < 0) {
      out_of_range = true;
      return;
    }
  do_tasks(phase[0], op.B * op.T, 4, [&](int i) { convolve(op, i / op.T, i % op.T, mixed); });
  do_tasks(phase[1], op.B * (op.N + 1), 1, [&](int i) {
    if (i < op.B) keep_inputs(op, i);
    else recur(op, (i - op.B) / op.N, (i - op.B) % op.N, mixed);
  });
}

// ---- Short convolutions -------------------------------------------------------------------------

// b, c, h of x [B, T, 3, width]: c times the convolution of b h over a channel's last n_tap tokens, the
// inputs of those before the call in a ring [rows, n_input, width] by position, as Delta's.
struct ShortConv {
  int32_t kind, B, T, width, n_tap, n_input, input_type, out_type;
  const Positions* at;
  const float *taps, *bias;                    // [n_tap, width], a token's own the last; or null
  const float* x;
  void *inputs, *out;
};

static long input_at(const ShortConv& op, int b, long p) {
  long row = op.at->rows ? op.at->rows[b] : b;
  return (row * op.n_input + p % op.n_input) * op.width;
}

static void conv_input(const ShortConv& op, int b, int t, float* to) {
  const float* x = op.x + ((long)b * op.T + t) * 3 * op.width;
  for (int c = 0; c < op.width; c++) to[c] = x[c] * x[2 * op.width + c];
}

static void short_conv(const ShortConv& op, Phase* phase) {
  do_tasks(phase[0], op.B * op.T, 1, [&](int i) {
    int b = i / op.T, t = i % op.T;
    float *y = memory_of(own, 2 * (size_t)op.width), *h = y + op.width;
    for (int c = 0; c < op.width; c++) y[c] = op.bias ? op.bias[c] : 0;
    for (int tap = 0; tap < op.n_tap; tap++) {
      int from = t - (op.n_tap - 1) + tap;
      long p = position(op.at, b, 0) + from;
      if (from >= 0) conv_input(op, b, from, h);
      else if (p < 0) continue;
      else read_floats(op.inputs, op.input_type, input_at(op, b, p), op.width, h);
      for (int c = 0; c < op.width; c++) y[c] += op.taps[(long)tap * op.width + c] * h[c];
    }
    const float* gate = op.x + (long)i * 3 * op.width + op.width;
    for (int c = 0; c < op.width; c++) y[c] *= gate[c];
    write_floats(y, op.width, op.out, op.out_type, (long)i * op.width);
  });
  do_tasks(phase[1], op.B, 1, [&](int b) {     // what a call may go on from
    float* h = memory_of(own, op.width);
    for (int t = 0; t < op.T; t++) {
      long p = position(op.at, b, t);
      if (p < 0 || p <= position(op.at, b, op.T - 1) - op.n_input || !follows(op.at, b, t)) continue;
      conv_input(op, b, t, h);
      write_floats(h, op.width, op.inputs, op.input_type, input_at(op, b, p));
    }
  });
}

// ---- The residual stream ------------------------------------------------------------------------

// out [M, D] = (residual + factor * norm(x)) * scale
struct AddNorm {
  int32_t kind, M, D, x_type, out_type, residual_type;
  float factor, scale;
  Norm norm;
  const void *x, *residual;
  void* out;
};

static void add_norm(const AddNorm& op, Phase* phase) {
  do_tasks(phase[0], op.M, 4, [&](int m) {
    float* x = memory_of(own, 2 * (size_t)op.D);
    float* old = x + op.D;
    read_floats(op.x, op.x_type, (long)m * op.D, op.D, x);
    normalize(op.norm, op.D, x);
    read_floats(op.residual, op.residual_type, (long)m * op.D, op.D, old);
    for (int i = 0; i < op.D; i++) x[i] = (old[i] + op.factor * x[i]) * op.scale;
    write_floats(x, op.D, op.out, op.out_type, (long)m * op.D);
  });
}

// ---- What layers are given ----------------------------------------------------------------------

// rows ids [n] of a weight [out, K] as above, in fp32, bf16 or int8 -> out [n, K], times factor
struct Embed {
  int32_t kind, format, n, K, n_vocab, out_type;
  float factor;
  const void *weight, *scales;                 // fp32 [out], of int8
  const int64_t* ids;
  void* out;
};

static void embed(const Embed& op, Phase* phase) {
  do_tasks(phase[0], op.n, 1, [&](int i) {
    if (op.ids[i] < 0 || op.ids[i] >= op.n_vocab) {
      out_of_range = true;
      return;
    }
    int K = padded(op.K, GROUP), row = op.ids[i] % ROWS;
    const char* w = (const char*)op.weight + op.ids[i] / ROWS * block_bytes(op.format, K);
    float* y = memory_of(own, op.K);
    float factor = op.factor * (op.format == INT8 ? ((const float*)op.scales)[op.ids[i]] : 1);
    for (int k = 0; k < op.K; k++) {
      int pair = (k / 2 * ROWS + row) * 2 + k % 2;
      if (op.format == FP32) y[k] = ((const float*)w)[k * ROWS + row];
      if (op.format == BF16) y[k] = bf16_to_float(((const uint16_t*)w)[pair]);
      if (op.format == INT8) y[k] = ((const int8_t*)w)[pair];
      y[k] *= factor;
    }
    write_floats(y, op.K, op.out, op.out_type, (long)i * op.K);
  });
}

// pos [n] -> cos and sin [n, half] of its angles, times an amplitude
struct Angles {
  int32_t kind, n, half;
  const int64_t* pos;
  const float *freq, *amplitude;               // [half]
  float *cos, *sin;
};

static void angles(const Angles& op, Phase* phase) {
  do_tasks(phase[0], op.n, 1, [&](int i) {
    for (int h = 0; h < op.half; h++) {
      float angle = (float)op.pos[i] * op.freq[h];
      op.cos[i * op.half + h] = std::cos(angle) * op.amplitude[h];
      op.sin[i * op.half + h] = std::sin(angle) * op.amplitude[h];
    }
  });
}

// pos [B, T] -> mask [B, T, n_key]: key <= pos, and within the window if there is one
struct Mask {
  int32_t kind, B, T, n_key, window;
  const int64_t* pos;
  uint8_t* mask;
};

static void masks(const Mask& op, Phase* phase) {
  do_tasks(phase[0], op.B * op.T, 1, [&](int i) {
    uint8_t* mask = op.mask + (long)i * op.n_key;
    long end = std::min(op.pos[i] + 1, (int64_t)op.n_key);
    long begin = op.window ? std::max(0l, (long)op.pos[i] + 1 - op.window) : 0;
    memset(mask, 0, op.n_key);
    if (begin < end) memset(mask + begin, 1, end - begin);
  });
}

// ---- The entry ----------------------------------------------------------------------------------

enum Kind { LINEAR, ATTENTION, ADD_NORM, EMBED, ANGLES, MASK, DELTA, LATENT, ROUTE, COMBINE, SHORT_CONV };

extern "C" int rows_in_a_block() { return ROWS; }
extern "C" int has_bytes(int format) { return format == INT4 ? HAS_NIBBLES : HAS_BYTES; }
extern "C" int has_bf16() { return HAS_BF16; }

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

// The operations one after the other; each is one of the structs above, which begin with their kind.
// -> 1 where a token or a position was out of range, else 0.
extern "C" int run(const int32_t* const* list, int n_listed, int n_thread) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  for (int begin = 0; begin < n_listed; begin += MOST_OPS) {
    int n = std::min(MOST_OPS, n_listed - begin);
    size_t n_float = 0;
    for (int i = 0; i < n; i++) {
      for (Phase& phase : phases[i]) phase.next = phase.done = 0;
      n_float = std::max(n_float, shared_floats(list[begin + i], n_thread));
    }
    memory_of(shared, n_float);
#pragma omp parallel num_threads(n_thread) if (n_thread > 1)
    for (int i = 0; i < n; i++) do_op(list[begin + i], phases[i], n_thread);
  }
  return out_of_range.exchange(false);
}
