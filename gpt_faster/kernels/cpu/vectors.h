// Vectors of the widest registers that a CPU has, and what is done to all of a vector's numbers.
//
// Tests define WIDE, WITH_BF16 and WITH_BYTES: as on CPUs that have these, by what every CPU has.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

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
