// A KV cache's formats: writes and reads vectors in fp32, bf16, int8, int4 or fp8 (e4m3).
//
// Codes of 8 and 4 bits have a fp16 scale for each GROUP of a vector, and may be turned by a
// Hadamard matrix. layers/quantized_cache.py describes the formats, and stores the same codes.
// Does not know queries: direct_attention.h computes with codes.

#pragma once

#include "norms.h"

struct Cache {                                 // keys or values of a layer, or latents
  int32_t type;                                // Dtype
  int32_t turn;                                // width of the Hadamard matrix; 1: not turned
  void* codes;                                 // vectors [n_row, K, S, H]; int4: H / 2 bytes each
  uint16_t* scales;                            // fp16 [n_row, K, S, n_group(H)]; null: no codes
};

struct Int8 { int8_t code; };
struct Int4 { uint8_t codes; };                // two of them, the first in the low bits
struct Fp8 { uint8_t bits; };                  // e4m3
constexpr float FP8_UNIT = 0x1p60f;            // load_fp8() returns values / FP8_UNIT^2

static inline int n_group(int H) { return (H + GROUP - 1) / GROUP; }

static inline long vector_bytes(int type, int H) {
  return type == FP32 ? 4l * H : type == BF16 ? 2l * H : type == INT4 ? H / 2 : H;
}

static inline char* vector_address(const Cache& cache, long i, int H) {
  return (char*)cache.codes + i * vector_bytes(cache.type, H);
}

// f(integral_constant type)
template <class F> static void for_type(int type, F f) {
  if (type == FP32) f(std::integral_constant<int, FP32>());
  if (type == BF16) f(std::integral_constant<int, BF16>());
  if (type == INT8) f(std::integral_constant<int, INT8>());
  if (type == INT4) f(std::integral_constant<int, INT4>());
  if (type == FP8) f(std::integral_constant<int, FP8>());
}

// ---- fp16 and e4m3 ----

static inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#endif
  uint32_t word = (uint32_t)(bits & 0x7fff) << 13;     // the exponent's bias is 112 too small
  float x;
  memcpy(&x, &word, 4);
  x = word < 0x0f800000 ? x * 5.192296858534828e33f : INFINITY;            // 2^112
  return bits & 0x8000 ? -x : x;
}

static inline uint16_t float_to_half(float x) {        // to nearest even; too large: infinity
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#endif
  uint32_t word;
  memcpy(&word, &x, 4);
  uint32_t sign = word >> 16 & 0x8000, abs = word & 0x7fffffff;
  if (abs >= 0x477ff000) return sign | 0x7c00;
  if (abs >= 0x38800000) return sign | (abs - 0x38000000 + 0xfff + (abs >> 13 & 1)) >> 13;
  float y;                                     // subnormal: a multiple of 2^-24
  memcpy(&y, &abs, 4);
  return sign | (uint32_t)std::nearbyint(y * 16777216.0f);
}

static inline void store_half(uint16_t* p, vf x) {
#if defined(__AVX512F__)
  store(p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__) && !defined(WITH_512_BITS)
  store(p, _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int i = 0; i < LANES; i++) p[i] = float_to_half(x[i]);
#endif
}

static inline vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__) && !defined(WITH_512_BITS)
  return (vf)_mm256_cvtph_ps(load<__m128i>(p));
#else
  vf y;
  for (int i = 0; i < LANES; i++) y[i] = half_to_float(p[i]);
  return y;
#endif
}

static inline vi widen_int8(const void* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(load<__m128i>(p));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  int64_t bytes = load<int64_t>(p);
  return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes));
#else
  return __builtin_convertvector(load<vi8_quarter>(p), vi);
#endif
}

// e4m3's exponent and mantissa at the place of fp32's, whose exponents are 120 larger: a value times
// 2^-120. Codes below 2^-6 are subnormal floats: exact, unless a program has set the CPU to flush
// those to zero. The sign is in the copies of bit 7.
static inline vf fp8_of_bits_20(vi bits) { return (vf)(bits & (int32_t)0x87f00000); }
static inline vf load_fp8(const Fp8* p) { return fp8_of_bits_20(widen_int8(p) << 20); }

// ---- Vectors ----

static inline vf load_int8_as_float(const void* p) { return to_float(widen_int8(p)); }

// LANES bytes of two int4 codes each -> codes + 8, in two vectors
static inline void widen_int4(const void* p, vi* first, vi* second) {
  typedef uint8_t vu8_quarter __attribute__((vector_size(LANES)));
  vu16_half pairs = __builtin_convertvector(load<vu8_quarter>(p), vu16_half);
  pairs = (pairs | pairs << 4) & 0x0f0f;       // 2 LANES bytes in order
#if defined(__AVX512F__)
  *first = (vi)_mm512_cvtepi8_epi32(_mm256_castsi256_si128((__m256i)pairs));
  *second = (vi)_mm512_cvtepi8_epi32(_mm256_extracti128_si256((__m256i)pairs, 1));
#elif defined(__AVX2__) && !defined(WITH_512_BITS)
  *first = (vi)_mm256_cvtepi8_epi32((__m128i)pairs);
  *second = (vi)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)pairs, (__m128i)pairs));
#else
  *first = widen_int8(&pairs);
  *second = widen_int8((const int8_t*)&pairs + LANES);
#endif
}

// x[i] + x[i ^ STEP] where that is the later one, else x[i ^ STEP] - x[i]
template <int STEP, int... I>
static inline vf butterfly(vf x, std::integer_sequence<int, I...>) {
  return swap_lanes<STEP>(x) + x * vf{(I & STEP ? -1.0f : 1.0f)...};
}
template <int STEP> static inline vf butterfly(vf x) { return butterfly<STEP>(x, LaneSequence()); }

template <int WIDTH> static void turn_blocks(int n, float* x) {
  constexpr int N = WIDTH > LANES ? WIDTH / LANES : 1;
  for (; n > 0; n -= N * LANES, x += N * LANES) {
    vf v[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      v[i] = load<vf>(x + i * LANES);
      if (WIDTH > 1) v[i] = butterfly<1>(v[i]);
      if (WIDTH > 2) v[i] = butterfly<2>(v[i]);
      if (WIDTH > 4) v[i] = butterfly<4>(v[i]);
      if constexpr (LANES > 8 && WIDTH > 8) v[i] = butterfly<8>(v[i]);
    }
#pragma GCC unroll 8
    for (int step = 1; step < N; step *= 2)
#pragma GCC unroll 32
      for (int i = 0; i < N; i++) {
        if (i & step) continue;
        vf a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
    for (int i = 0; i < N; i++) store(x + i * LANES, v[i] * (float)(1 / std::sqrt((double)WIDTH)));
  }
}

template <int WIDTH> static void turn_blocks_of(int width, int n, float* x) {
  if (width == WIDTH) return turn_blocks<WIDTH>(n, x);
  if constexpr (WIDTH > 2) turn_blocks_of<WIDTH / 2>(width, n, x);
}

// Multiplies each `width` values of x [n] by a Hadamard matrix / sqrt(width), its own inverse. The
// additions have the order of quantized_cache.turn().
static void turn(int width, int n, float* x) {
  if (width <= 1) return;
  if (n % LANES == 0 && width <= 256) return turn_blocks_of<256>(width, n, x);
  for (int step = 1; step < width; step *= 2)
    for (int i = 0; i < n; i += 2 * step)
      for (int j = i; j < i + step; j++) {
        float a = x[j], b = x[j + step];
        x[j] = a + b;
        x[j + step] = a - b;
      }
  for (int i = 0; i < n; i++) x[i] *= (float)(1 / std::sqrt((double)width));
}

static inline vi round_to_int(vf x) {          // to nearest even, for |x| < 2^22
  return (vi)(x + 12582912.0f) - 0x4b400000;
}

static inline vf clamp(vf x, float low, float high) {
  x = max_of(x, vf{} + low);
  return x < high ? x : vf{} + high;
}

// Values divided by their scale -> codes. Clamping comes before any addition: fused with the
// division, that would round otherwise than quantized_cache.py does.
static inline vi encode(int type, vf x) {
  if (type == INT8) return round_to_int(clamp(x, -127, 127));
  if (type == INT4) return round_to_int(clamp(x, -8, 7)) + 8;
  x = clamp(x, -448, 448);
  vi sign = (vi)((vu)x >> 24) & 0x80, abs = (vi)x & 0x7fffffff;
  vi normal = (abs - 0x3c000000 + 0x7ffff + (abs >> 20 & 1)) >> 20;
  vi subnormal = round_to_int((vf)abs * 512.0f);          // a multiple of 2^-9
  return sign | (abs < 0x3c800000 ? subnormal : normal);
}

// The value of a group of largest magnitude; INT4: with its sign, of equal ones the first
static inline float largest_of(int type, const float* group) {
  vf high = load<vf>(group), low = -high;
  for (int i = LANES; i < GROUP; i += LANES) {
    vf x = load<vf>(group + i);
    high = max_of(high, x);
    low = max_of(low, -x);
  }
  float largest = horizontal_max(max_of(high, low));
  if (type != INT4) return largest;
  if (horizontal_max(high) < largest) return -largest;
  if (horizontal_max(low) < largest) return largest;
  int i = 0;
  while (i < GROUP - 1 && std::fabs(group[i]) != largest) i++;
  return group[i];
}

// A group times 1 / its scale -> n codes
static inline void write_codes(int type, const float* group, float inverse, int n, uint8_t* codes) {
  uint8_t bytes[GROUP], packed[GROUP / 2];
  bool in_place = type != INT4 && n == GROUP;
  for (int i = 0; i < GROUP; i += LANES)
    store_bytes((in_place ? codes : bytes) + i, encode(type, load<vf>(group + i) * inverse));
  for (int i = 0; type == INT4 && i < GROUP / 2; i++)
    packed[i] = bytes[2 * i] | bytes[2 * i + 1] << 4;
  if (type == INT4) memcpy(codes, packed, n / 2);
  else if (!in_place) memcpy(codes, bytes, n);
}

// Stores x [n_vector, H] as codes of vectors first, first + stride, … of the cache. The steps of up
// to LANES groups take turns, so that none waits for another's division.
template <int TYPE>
static void write_groups(const Cache& cache, long first, long stride, int n_vector, int H,
                         const float* x) {
  int n_all = n_vector * n_group(H);
  float padded[GROUP];
  auto group_of = [&](int g) {
    const float* group = x + g / n_group(H) * H + g % n_group(H) * GROUP;
    int n = std::min(GROUP, H - g % n_group(H) * GROUP);
    if (n == GROUP) return group;
    memset(padded, 0, sizeof padded);
    copy_floats(group, n, padded);
    return (const float*)padded;
  };
  for (int begin = 0; begin < n_all; begin += LANES) {
    int n = std::min(LANES, n_all - begin);
    float largest[LANES] = {}, inverse[LANES];
    uint16_t scale[LANES];
    for (int i = 0; i < n; i++) largest[i] = largest_of(TYPE, group_of(begin + i));
    store_half(scale, load<vf>(largest) / (TYPE == INT4 ? -8.0f : TYPE == INT8 ? 127.0f : 448.0f));
    vf rounded = load_half(scale);
    store(inverse, rounded == 0.0f ? vf{} : 1.0f / rounded);
    for (int i = 0; i < n; i++) {
      int g = (begin + i) % n_group(H);
      long vector = first + (begin + i) / n_group(H) * stride;
      cache.scales[vector * n_group(H) + g] = scale[i];
      uint8_t* codes = (uint8_t*)vector_address(cache, vector, H) + vector_bytes(TYPE, g * GROUP);
      write_codes(TYPE, group_of(begin + i), inverse[i], std::min(GROUP, H - g * GROUP), codes);
    }
  }
}

// Stores x [n_vector, H] as vectors first, first + stride, … of the cache; turns x in place
static void write_vectors(const Cache& cache, long first, long stride, int n_vector, int H,
                          float* x) {
  for (int i = 0; i < n_vector; i++) {
    float* vector = x + (long)i * H;
    if (cache.type <= BF16)
      write_floats(vector, H, cache.codes, cache.type, (first + i * stride) * H);
    else turn(cache.turn, H, vector);
  }
  for_type(cache.type, [&](auto type) {
    constexpr int TYPE = decltype(type)::value;
    if constexpr (TYPE > BF16) write_groups<TYPE>(cache, first, stride, n_vector, H, x);
  });
}

// The first n values of vector i, as stored (turned) -> fp32
template <int TYPE>
static void read_vector(const Cache& cache, long i, int H, int n, float* to) {
  if (TYPE <= BF16) return read_floats(cache.codes, TYPE, i * H, n, to);
  const char* codes = vector_address(cache, i, H);
  const uint16_t* scales = cache.scales + i * n_group(H);
  for (int h = 0; h < n; h += GROUP, to += GROUP, codes += vector_bytes(TYPE, GROUP)) {
    int end = std::min(GROUP, n - h);
    float scale = half_to_float(*scales++);
    int j = 0;
    if (TYPE == INT4) {
      for (; j + 2 * LANES <= end; j += 2 * LANES) {
        vi first, second;
        widen_int4(codes + j / 2, &first, &second);
        store(to + j, to_float(first) * scale - 8.0f * scale);           // exact
        store(to + j + LANES, to_float(second) * scale - 8.0f * scale);
      }
      for (; j < end; j += 2) {
        to[j] = ((codes[j / 2] & 15) - 8) * scale;
        to[j + 1] = ((uint8_t)codes[j / 2] / 16 - 8) * scale;
      }
    } else if (TYPE == INT8) {
      for (; j + LANES <= end; j += LANES) store(to + j, load_int8_as_float(codes + j) * scale);
      for (; j < end; j++) to[j] = (int8_t)codes[j] * scale;
    } else {
      for (; j + LANES <= end; j += LANES)
        store(to + j, load_fp8((const Fp8*)codes + j) * FP8_UNIT * (scale * FP8_UNIT));
      for (; j < end; j++)                     // as fp16, whose exponents are 8 larger
        to[j] = half_to_float((uint16_t)((int8_t)codes[j] * 128 & 0xbf80)) * (scale * 256);
    }
  }
}

// Vectors [first, first + n_vector), n values of each -> fp32 [n_vector, ld]
static void read_vectors(const Cache& cache, long first, int n_vector, int H, int n, float* to,
                         int ld) {
  for_type(cache.type, [&](auto type) {
    for (int j = 0; j < n_vector; j++)
      read_vector<decltype(type)::value>(cache, first + j, H, n, to + (long)j * ld);
  });
}
