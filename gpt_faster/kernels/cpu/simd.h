// SIMD vectors of the CPU's widest registers, their arithmetic, and the GEMM blocking constants.
//
// Tests define WITH_512_BITS, WITH_BF16 and WITH_INT8_DOT to run the code paths of CPUs that have
// these features, with portable code in place of the instructions.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__ARM_NEON) && !defined(WITH_512_BITS)
#include <arm_neon.h>
#define NEON                                   // vectors are pairs of its registers
#endif

#if defined(__AVX512BF16__) || defined(WITH_BF16) \
    || (defined(NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
constexpr bool HAS_BF16 = true;                // bf16 dot products of 2 (vdpbf16ps, bfdot)
#else
constexpr bool HAS_BF16 = false;
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(WITH_INT8_DOT) \
    || (defined(NEON) && defined(__ARM_FEATURE_DOTPROD))
constexpr bool HAS_INT8_DOT = true;            // int8 dot products of 4 (vpdpbusd, sdot)
#else
constexpr bool HAS_INT8_DOT = false;
#endif
#if defined(__AVX2__) || defined(WITH_512_BITS)
constexpr bool HAS_INT4_DOT = true;            // uint4 by int8 dot products of 2 (vpmaddubsw)
#else
constexpr bool HAS_INT4_DOT = HAS_INT8_DOT;
#endif
#if defined(__AVX512F__) || defined(WITH_512_BITS)
constexpr int LANES = 16;                      // 32-bit lanes of a vector
constexpr int MR = 12;                         // maximum activation rows of a tile
#else
constexpr int LANES = 8;
constexpr int MR = 6;
#endif
constexpr int MR_INT8 = LANES > 8 ? 8 : 6;     // int32 and fp32 accumulators: more registers
constexpr int NR = 2 * LANES;                  // outputs of a weight panel and of a tile
constexpr int KC = 256;                        // K block: a dequantized block [KC, NR] fits in L1
constexpr int GROUP = 32;                      // inputs that share an activation scale
constexpr int MAX_INT14 = 8191;                // GROUP products of int14 fit in an int32
constexpr int PREFETCH_DISTANCE = 2048;        // bytes

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int16_t vi16 __attribute__((vector_size(4 * LANES)));     // 2 LANES elements
typedef uint16_t vu16 __attribute__((vector_size(4 * LANES)));
typedef int8_t vi8_half __attribute__((vector_size(2 * LANES)));  // 2 LANES elements
typedef uint16_t vu16_half __attribute__((vector_size(2 * LANES)));
typedef int16_t vi16_half __attribute__((vector_size(2 * LANES)));
typedef int8_t vi8_quarter __attribute__((vector_size(LANES)));
typedef uint8_t vu8_quarter __attribute__((vector_size(LANES)));

template <class V> static inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V> static inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }

static inline void prefetch(const void* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + PREFETCH_DISTANCE + i);
}

#ifdef NEON
static inline int32x4_t low(vi x) { return (int32x4_t)__builtin_shufflevector(x, x, 0, 1, 2, 3); }
static inline int32x4_t high(vi x) { return (int32x4_t)__builtin_shufflevector(x, x, 4, 5, 6, 7); }
static inline vi join(int32x4_t a, int32x4_t b) {
  return (vi)__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}

static inline int32x4_t dot2(int32x4_t acc, int32x4_t a, int32x4_t x) {
  int16x8_t pairs = (int16x8_t)a, others = (int16x8_t)x;
  int32x4_t first = vmull_s16(vget_low_s16(pairs), vget_low_s16(others));
  return vaddq_s32(acc, vpaddq_s32(first, vmull_high_s16(pairs, others)));
}
#endif

static inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return (vf)(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16));
#else
  return (vf)(__builtin_convertvector(load<vu16_half>(p), vu) << 16);
#endif
}

static inline vi16 load_int8(const void* p) {
#if defined(__AVX512BW__)
  return (vi16)_mm512_cvtepi8_epi16(load<__m256i>(p));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return (vi16)_mm256_cvtepi8_epi16(load<__m128i>(p));
#else
  return __builtin_convertvector(load<vi8_half>(p), vi16);
#endif
}

// A byte for each lane
static inline vi load_uint8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(load<vu8_quarter>(p), vi);
#endif
}

// The low byte of each lane
static inline void store_bytes(void* p, vi x) {
#if defined(__AVX512F__)
  store(p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  __m256i bytes = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
  store(p, _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(bytes),
                                                _mm256_extracti128_si256(bytes, 1))));
#else
  store(p, __builtin_convertvector(x, vi8_quarter));
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

// acc + dot products of int16 pairs, one per 32-bit lane; `pair` is broadcast to all lanes
static inline vi dot2(vi acc, vi16 a, int32_t pair) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32(pair));
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, _mm256_set1_epi32(pair));
#elif defined(__AVX512BW__)
  return acc + (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(pair));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return acc + (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(pair));
#elif defined(NEON)
  int32x4_t pairs = vdupq_n_s32(pair);
  return join(dot2(low(acc), low((vi)a), pairs), dot2(high(acc), high((vi)a), pairs));
#else
  return acc + ((vi)a << 16 >> 16) * (int32_t)(int16_t)pair + ((vi)a >> 16) * (pair >> 16);
#endif
}

static inline vi dot2(vi acc, vi16 a, vi16 x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)x);
#elif defined(__AVX512BW__)
  return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)x);
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)x);
#elif defined(NEON)
  return join(dot2(low(acc), low((vi)a), low((vi)x)), dot2(high(acc), high((vi)a), high((vi)x)));
#else
  return acc + ((vi)a << 16 >> 16) * ((vi)x << 16 >> 16) + ((vi)a >> 16) * ((vi)x >> 16);
#endif
}

#if defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
static inline int32x4_t dot4(int32x4_t acc, int32x4_t a, int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(acc, (uint8x16_t)a, x);
#else                                          // signed only: 128 less, and 128 times x
  int32x4_t sums = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), x);
  return vaddq_s32(vdotq_s32(acc, veorq_s8((int8x16_t)a, vdupq_n_s8(-128)), x),
                   vshlq_n_s32(sums, 7));
#endif
}
#endif

// acc + dot products of 4 bytes per 32-bit lane; a is uint8, x int8 in [-127, 127], broadcast
static inline vi dot4(vi acc, vi a, int32_t x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, _mm256_set1_epi32(x));
#elif defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
  int8x16_t bytes = (int8x16_t)vdupq_n_s32(x);
  return join(dot4(low(acc), low(a), bytes), dot4(high(acc), high(a), bytes));
#else
  for (int i = 0; i < 32; i += 8) acc += ((a >> i) & 255) * (int32_t)(int8_t)(x >> i);
  return acc;
#endif
}

// acc + dot products of byte pairs per 16-bit lane; a is uint4. 16 bits hold the sum of a GROUP.
static inline vi16 dot4(vi16 acc, vi a, int32_t x) {
#if defined(__AVX512BW__)
  return acc + (vi16)_mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return acc + (vi16)_mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(x));
#else
  vi low = (a & 255) * (int8_t)x + (a >> 8 & 255) * (int8_t)(x >> 8);
  vi high = (a >> 16 & 255) * (int8_t)(x >> 16) + (a >> 24 & 255) * (int8_t)(x >> 24);
  return acc + (vi16)((low & 0xffff) | high << 16);
#endif
}

// Twice the values of the e2m1 codes in the bytes of x, each 0 to 15
static inline vi twice_e2m1(vi x) {
  alignas(16) static const int8_t twice[] = {0, 1, 2,  3,  4,  6,  8,  12,
                                             0, -1, -2, -3, -4, -6, -8, -12};
#if defined(__AVX512BW__)
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(twice)), (__m512i)x);
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(twice)), (__m256i)x);
#else
  int8_t bytes[4 * LANES];
  store(bytes, x);
  for (int8_t& b : bytes) b = twice[b];
  return load<vi>(bytes);
#endif
}

typedef std::conditional<HAS_INT8_DOT, vi, vi16>::type DotSums;        // dot4's accumulator
static inline vi widen_sums(vi sums) { return sums; }
static inline vi widen_sums(vi16 sums) { return dot2(vi{}, sums, 0x00010001); }

// acc + dot products of bf16 pairs per 32-bit lane; the pair x is broadcast
static inline vf dot2_bf16(vf acc, vi a, int32_t x) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(x));
#elif defined(NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  bfloat16x8_t pair = (bfloat16x8_t)vdupq_n_s32(x);
  float32x4_t first = vbfdotq_f32((float32x4_t)low((vi)acc), (bfloat16x8_t)low(a), pair);
  float32x4_t second = vbfdotq_f32((float32x4_t)high((vi)acc), (bfloat16x8_t)high(a), pair);
  return (vf)join((int32x4_t)first, (int32x4_t)second);
#else
  return acc + low_bf16(a) * bf16_to_float(x) + high_bf16(a) * bf16_to_float((uint32_t)x >> 16);
#endif
}

static inline vf max_of(vf a, vf b) { return a > b ? a : b; }

// 0 below -87, 1.6e38 from 88; relative error 2e-7
static inline vf exp_of(vf x) {
  x = x > 88.0f ? vf{} + 88.0f : x;
  vf n = x * 1.44269504f + 12582912.0f - 12582912.0f;             // round to nearest
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

// For x <= 0, with relative error 8e-5: enough for softmax weights of a bf16 cache
static inline vf exp2_approx(vf x) {
  auto power = [](vf f) {
    return ((0.05517167f * f + 0.24261112f) * f + 0.69326099f) * f + 0.99992807f;
  };
#if defined(__AVX512F__)
  x = max_of(x, vf{} - 1000.0f);
  vf n = (vf)_mm512_roundscale_ps((__m512)x, 8);
  return (vf)_mm512_scalef_ps((__m512)power(x - n), (__m512)n);
#else
  vf n = x + 12582912.0f;                      // the rounded integer is in the low mantissa bits
  vf p = (vf)((vi)power(x - (n - 12582912.0f)) + ((vi)n << 23));
  return x < -125.0f ? vf{} : p;
#endif
}

// For x in [1, 1.6e38], with relative error 2e-7
static inline vf reciprocal(vf x) {
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

// y[i] = x[index[i]]
static inline vi permute(vi x, vi index) {
#ifdef __clang__
  vi y;
  for (int i = 0; i < LANES; i++) y[i] = x[index[i]];
  return y;
#else
  return __builtin_shuffle(x, index);
#endif
}

// Lane i gets x[i ^ STEP]. Indices by a sequence: GCC builds those of a loop at run time.
typedef std::make_integer_sequence<int, LANES> LaneSequence;
template <int STEP, int... I>
static inline vf swap_lanes(vf x, std::integer_sequence<int, I...>) {
  return (vf)permute((vi)x, vi{(I ^ STEP)...});
}
template <int STEP> static inline vf swap_lanes(vf x) { return swap_lanes<STEP>(x, LaneSequence()); }

static inline float horizontal_sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float y = 0;
  for (int i = 0; i < LANES; i++) y += x[i];
  return y;
}

static inline int32_t horizontal_sum(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#endif
  int32_t y = 0;
  for (int i = 0; i < LANES; i++) y += x[i];
  return y;
}

static inline float horizontal_max(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#endif
  if constexpr (LANES > 8) x = max_of(x, swap_lanes<8>(x));
  x = max_of(x, swap_lanes<4>(x));
  x = max_of(x, swap_lanes<2>(x));
  x = max_of(x, swap_lanes<1>(x));
  return x[0];
}

// Selects from the concatenation of a and b
template <class V> static inline V permute(V a, V b, vi index) {
#ifdef __clang__
  V y;
  for (int i = 0; i < LANES; i++) y[i] = index[i] < LANES ? a[index[i]] : b[index[i] - LANES];
  return y;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// int4 codes are unpacked by shifting and masking 32-bit words of 8 codes: each shift gives n codes
// that are 8 / n apart. Activations are stored in the same order.
static inline vi int4_unpack_order(int n) {
  vi index;
  for (int i = 0; i < LANES; i++) index[i] = i / 8 * 8 + i % n * (8 / n) + i % 8 / n;
  return index;
}

// For int16 and int8 activations
static const vi INT4_UNPACK_ORDERS[] = {int4_unpack_order(2), int4_unpack_order(4)};
