// Attention of a few queries: scores and weighted sums straight from a cache's vectors.
//
// Nothing is unpacked to memory: a decode step reads each key and value once. int8 and int4 keys
// are multiplied as integers by queries in int16, which are finer than any code; a group's scale
// multiplies the sum. Values are converted in registers.

#pragma once

#include "gemm_tiles.h"
#include "kv_cache.h"

constexpr int KEY_BLOCK = HAS_BF16 ? 256 : 64;
constexpr int DIRECT_ROWS = 4;                 // queries that share the loads of a key

// Horizontal sums of LANES vectors, as one vector: first inside blocks of 4 lanes, where shuffles
// are cheapest, then over the blocks
static inline vf horizontal_sums(vf* a) {
  vi even, odd, even_block, odd_block;
  for (int i = 0; i < LANES; i++) {            // from two vectors: lanes of both in each block
    even[i] = i / 4 * 4 + i % 2 * 2 + i % 4 / 2 * LANES;
    odd[i] = even[i] + 1;
    even_block[i] = i / 4 * 8 + i % 4;
    odd_block[i] = even_block[i] + 4;
  }
  for (int n = LANES; n > 1; n /= 2) {
    bool in_block = 4 * n > LANES;             // the first two steps
    for (int i = 0; i < n / 2; i++) {
      vf x = a[2 * i], y = a[2 * i + 1];
      a[i] = in_block ? permute(x, y, even) + permute(x, y, odd)
                      : permute(x, y, even_block) + permute(x, y, odd_block);
    }
  }
  return a[0];
}

// Transposes a [LANES, LANES] in registers
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
      a[i] = permute(first, a[i + step], low);
      a[i + step] = permute(first, a[i + step], high);
    }
  }
}

// ---- Scales ----

// fp16 scales [n] -> fp32; `to` has LANES more
static void read_scales(const uint16_t* from, int n, float* to) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load_half(from + i));
  for (; i < n; i++) to[i] = half_to_float(from[i]);
}

// int4 codes are read as words of 8: a vector of words has LANES / 4 groups, or fewer if the head is
// narrower. The scale of each lane's group:
static inline vf scales_of_words(const float* scales) {
  vi group;
  for (int i = 0; i < LANES; i++) group[i] = i / 4;
  return (vf)permute(load<vi>(scales), group);
}

static inline int n_word_vector(int H) { return (H / 8 + LANES - 1) / LANES; }

static inline vu load_words(const void* p, int H) {     // of a narrower head: half a vector
  if (LANES == 8 || H >= 8 * LANES) return load<vu>(p);
  vu words = {};
  memcpy(&words, p, 2 * LANES);
  return words;
}

// Can vectors of H elements be read directly?
static inline bool is_direct(const Cache& cache, int H) {
  if (cache.type == INT4) return H % (8 * LANES) == 0 || (LANES > 8 && H == 4 * LANES);
  return H % NR == 0 && (cache.type <= BF16 || H % GROUP == 0);
}

// ---- Scores ----

// Queries in int16 [n_query, H], with one unit each. For int4 keys in the order in which words are
// unpacked, with -8 times each lane's sum, as codes are stored + 8.
struct IntQueries {
  int16_t* codes;
  int32_t* offsets;                            // [n_query, n_word_vector(H) * LANES]
  float* units;

  static size_t n_float(int n_query, int H) { return (size_t)n_query * (H + 4 * LANES); }

  IntQueries(float* memory, int n_query, int H) {
    units = memory;
    offsets = (int32_t*)(memory + round_up(n_query, LANES));
    codes = (int16_t*)(offsets + (size_t)n_query * n_word_vector(H) * LANES);
  }

  IntQueries from_row(int r, int H, bool is_int4) const {
    IntQueries rest = *this;
    rest.units += r;
    rest.offsets += r * n_word_vector(H) * LANES;
    rest.codes += r * row_size(H, is_int4);
    return rest;
  }

  static int row_size(int H, bool is_int4) { return is_int4 ? n_word_vector(H) * 8 * LANES : H; }

  void quantize(int r, const float* q, int H, bool is_int4) const {
    float top = 0;
    for (int h = 0; h < H; h++) top = std::max(top, std::fabs(q[h]));
    float inverse = top > 0 ? 32767 / top : 0;
    units[r] = top / 32767;
    IntQueries row = from_row(r, H, is_int4);
    if (!is_int4) {
      for (int h = 0; h < H; h++) row.codes[h] = std::lrintf(q[h] * inverse);
      return;
    }
    memset(row.codes, 0, 2 * row_size(H, true));
    memset(row.offsets, 0, 4 * n_word_vector(H) * LANES);
    for (int h = 0; h < H; h++) {              // element b of word w: shift b % 4, half b / 4
      int w = h / 8, b = h % 8;
      int code = std::lrintf(q[h] * inverse);
      row.codes[(w / LANES * 4 + b % 4) * 2 * LANES + w % LANES * 2 + b / 4] = code;
      row.offsets[w] -= 8 * code;
    }
  }
};

static inline vf load_key(const float* k) { return load<vf>(k); }
static inline vf load_key(const uint16_t* k) { return load_bf16(k); }

// Scores [R, KEY_BLOCK] of queries [R, H] by n keys [n, H]: one dot product each
template <int R, class Key>
static void direct_scores(const float* q, const Key* k, int n, int H, float* score) {
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
    for (int r = 0; r < R; r++) store(score + r * KEY_BLOCK + j, horizontal_sums(sums[r]));
  }
}

// The same for keys with scales [n, H / GROUP]; queries times FP8_UNIT
template <int R>
static void direct_scores(const float* q, const Fp8* k, const float* scales, int n, int H,
                          float* score) {
  for (int j = 0; j < n; j += LANES) {
    vf sums[R][LANES];
    for (int i = 0; i < LANES; i++) {
      long key = std::min(j + i, n - 1);
      vf total[R] = {};
      for (int h = 0; h < H; h += GROUP) {
        vf sum[R] = {};
#pragma GCC unroll 4
        for (int u = h; u < h + GROUP; u += LANES) {
          vf a = load_fp8(k + key * H + u);
          for (int r = 0; r < R; r++) sum[r] += a * load<vf>(q + r * H + u);
        }
        for (int r = 0; r < R; r++) total[r] += sum[r] * scales[(key * H + h) / GROUP];
      }
      for (int r = 0; r < R; r++) sums[r][i] = total[r] * FP8_UNIT;
    }
    for (int r = 0; r < R; r++) store(score + r * KEY_BLOCK + j, horizontal_sums(sums[r]));
  }
}

template <int R>
static void direct_scores(const IntQueries& q, const Int8* k, const float* scales, int n, int H,
                          float* score) {
  for (int j = 0; j < n; j += LANES) {
    vf sums[R][LANES];
    for (int i = 0; i < LANES; i++) {
      long key = std::min(j + i, n - 1);
      vf total[R] = {};
      for (int h = 0; h < H; h += GROUP) {
        vi acc[R] = {};
#pragma GCC unroll 2
        for (int u = 0; u < GROUP; u += 2 * LANES) {
          vi16 codes = load_int8(k + key * H + h + u);
          for (int r = 0; r < R; r++)
            acc[r] = dot2(acc[r], codes, load<vi16>(q.codes + r * H + h + u));
        }
        for (int r = 0; r < R; r++) total[r] += to_float(acc[r]) * scales[(key * H + h) / GROUP];
      }
      for (int r = 0; r < R; r++) sums[r][i] = total[r];
    }
    for (int r = 0; r < R; r++)
      store(score + r * KEY_BLOCK + j, horizontal_sums(sums[r]) * q.units[r]);
  }
}

template <int R>
static void direct_scores(const IntQueries& q, const Int4* k, const float* scales, int n, int H,
                          float* score) {
  int n_vector = n_word_vector(H);
  for (int j = 0; j < n; j += LANES) {
    vf sums[R][LANES];
    for (int i = 0; i < LANES; i++) {
      long key = std::min(j + i, n - 1);
      vf total[R] = {};
      for (int c = 0; c < n_vector; c++) {
        vu words = load_words(k + key * H / 2 + c * 4 * LANES, H);
        vi acc[R];
        for (int r = 0; r < R; r++) acc[r] = load<vi>(q.offsets + (r * n_vector + c) * LANES);
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
          vi16 codes = (vi16)((vi)(words >> (4 * b)) & 0x000f000f);
          for (int r = 0; r < R; r++)
            acc[r] = dot2(acc[r], codes,
                          load<vi16>(q.codes + ((r * n_vector + c) * 4 + b) * 2 * LANES));
        }
        vf scale = scales_of_words(scales + key * (H / GROUP) + c * LANES / 4);
        for (int r = 0; r < R; r++) total[r] += to_float(acc[r]) * scale;
      }
      for (int r = 0; r < R; r++) sums[r][i] = total[r];
    }
    for (int r = 0; r < R; r++)
      store(score + r * KEY_BLOCK + j, horizontal_sums(sums[r]) * q.units[r]);
  }
}

// f(integral_constant n) for a number of rows 1 <= n <= R
template <int R, class F> static void for_rows(int n, F f) {
  if (n == R) return f(std::integral_constant<int, R>());
  if constexpr (R > 1) for_rows<R - 1>(n, f);
}

// Scores [n_row, KEY_BLOCK] of keys [key, key + n): vectors of the cache. q and int_q begin with the
// first of the rows; FP8: q times FP8_UNIT. scales: a buffer of n H / GROUP + LANES.
static void direct_scores(const Cache& cache, long key, int n, int H, int n_row, const float* q,
                          const IntQueries& int_q, float* scales, float* score) {
  const void* k = vector_address(cache, key, H);
  if (cache.scales) read_scales(cache.scales + key * n_group(H), n * n_group(H), scales);
  for (int first = 0; first < n_row; first += DIRECT_ROWS) {
    const float* rows = q + first * H;
    IntQueries int_rows = int_q.from_row(first, H, cache.type == INT4);
    float* s = score + first * KEY_BLOCK;
    for_rows<DIRECT_ROWS>(std::min(n_row - first, DIRECT_ROWS), [&](auto constant) {
      constexpr int R = decltype(constant)::value;
      if (cache.type == FP32) direct_scores<R>(rows, (const float*)k, n, H, s);
      if (cache.type == BF16) direct_scores<R>(rows, (const uint16_t*)k, n, H, s);
      if (cache.type == INT8) direct_scores<R>(int_rows, (const Int8*)k, scales, n, H, s);
      if (cache.type == INT4) direct_scores<R>(int_rows, (const Int4*)k, scales, n, H, s);
      if (cache.type == FP8) direct_scores<R>(rows, (const Fp8*)k, scales, n, H, s);
    });
  }
}

// ---- Weighted sums of values ----

static inline vf load_value(const Int8* v) { return load_int8_as_float(v); }
static inline vf load_value(const Fp8* v) { return load_fp8(v); }

// out [R, N LANES] += unit * p [R, KEY_BLOCK] times codes [n, N LANES] (row stride H)
template <int R, int N, class Code>
static void add_codes(const Code* v, int n, int H, const float* p, float unit, float* out, int Vp) {
  vf acc[R][N] = {};
  for (int j = 0; j < n; j++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      vf code = load_value(v + (long)j * H + i * LANES);
      for (int r = 0; r < R; r++) acc[r][i] += p[r * KEY_BLOCK + j] * code;
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) {
      float* to = out + r * Vp + i * LANES;
      store(to, load<vf>(to) + unit * acc[r][i]);
    }
}

// out [n_row, Vp] += p [n_row, KEY_BLOCK] times values [n, H], whose groups have scales. unit: of the
// codes, by halves: it and a scale may be too large for one product.
template <class Code>
static void add_scaled_values(const Code* v, const float* scales, float unit, int n, int H, int V,
                              int n_row, const float* p, float* scaled_p, float* out, int Vp) {
  float group_scales[KEY_BLOCK];
  for (int h = 0; h < V; h += GROUP) {
    for (int j = 0; j < n; j++) group_scales[j] = unit * scales[j * n_group(H) + h / GROUP];
    for (int r = 0; r < n_row; r++)
      for (int j = 0; j < n; j++)
        scaled_p[r * KEY_BLOCK + j] = p[r * KEY_BLOCK + j] * group_scales[j];
    for (int first = 0; first < n_row; first += MR)
      for_rows<MR>(std::min(n_row - first, MR), [&](auto constant) {
        constexpr int R = decltype(constant)::value;
        constexpr int N = R <= MR / 2 ? GROUP / LANES : 2;        // few rows: all in registers
        const float* rows = scaled_p + first * KEY_BLOCK;
        int i = h;
        for (; i + N * LANES <= std::min(h + GROUP, V); i += N * LANES)
          add_codes<R, N>(v + i, n, H, rows, unit, out + first * Vp + i, Vp);
        if (i < std::min(h + GROUP, V))
          add_codes<R, 2>(v + i, n, H, rows, unit, out + first * Vp + i, Vp);
      });
  }
}

constexpr int INT4_KEYS = 64;                  // that add_int4_values() takes at most

// The same for int4 codes. Elements [8 i, 8 i + 8) of a chunk of 8 LANES are in lane i of accumulators
// 0 to 7, which are transposed at the end; a few accumulators at a time stay in registers.
template <int R>
static void add_int4_values(const Int4* v, const float* scales, int n, int H, const float* p,
                            float* out, int Vp) {
  constexpr int N = R <= MR / 2 ? 4 : 2;
  vf scaled_p[INT4_KEYS][R];                   // of each lane's group
  for (int c = 0; c < n_word_vector(H); c++) {
    vf sums[R][8], offsets[R] = {};
    for (int j = 0; j < n; j++) {
      vf scale = scales_of_words(scales + j * (H / GROUP) + c * LANES / 4);
      for (int r = 0; r < R; r++) {
        scaled_p[j][r] = p[r * KEY_BLOCK + j] * scale;
        offsets[r] += scaled_p[j][r];
      }
    }
    for (int b = 0; b < 8; b += N) {
      vf acc[R][N] = {};
      for (int j = 0; j < n; j++) {
        vu words = load_words(v + (long)j * H / 2 + c * 4 * LANES, H) >> (4 * b);
        for (int i = 0; i < N; i++) {
          vf code = to_float((vi)(words >> (4 * i) & 15));
          for (int r = 0; r < R; r++) acc[r][i] += scaled_p[j][r] * code;
        }
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) sums[r][b + i] = acc[r][i] - 8.0f * offsets[r];
    }
    for (int r = 0; r < R; r++) {
      vi lanes[LANES] = {};
      for (int b = 0; b < 8; b++) lanes[b] = (vi)sums[r][b];
      transpose(lanes);
      for (int i = 0; i < std::min(LANES, H / 8); i++)
        for (int b = 0; b < 8; b++)
          out[r * Vp + (c * LANES + i) * 8 + b] += ((vf)lanes[i])[b];
    }
  }
}

// out [n_row, Vp] += p [n_row, KEY_BLOCK] times the values [key, key + n) of the cache. V < H: only
// the first V elements. scales: as above; scaled_p [n_row, KEY_BLOCK]: a buffer.
static void add_values(const Cache& cache, long key, int n, int H, int V, int n_row, const float* p,
                       float* scales, float* scaled_p, float* out, int Vp) {
  const void* v = vector_address(cache, key, H);
  if (cache.scales) read_scales(cache.scales + key * n_group(H), n * n_group(H), scales);
  if (cache.type == INT8)
    return add_scaled_values((const Int8*)v, scales, 1, n, H, V, n_row, p, scaled_p, out, Vp);
  if (cache.type == FP8)
    return add_scaled_values((const Fp8*)v, scales, FP8_UNIT, n, H, V, n_row, p, scaled_p, out, Vp);
  if (cache.type == INT4) {
    for (int first = 0; first < n_row; first += MR)
      for_rows<MR>(std::min(n_row - first, MR), [&](auto constant) {
        for (int j = 0; j < n; j += INT4_KEYS)
          add_int4_values<decltype(constant)::value>(
              (const Int4*)v + (long)j * H / 2, scales + j * n_group(H),
              std::min(n - j, INT4_KEYS), H, p + first * KEY_BLOCK + j, out + first * Vp, Vp);
      });
    return;
  }
  for (int h = 0; h < V; h += NR) {
    if (cache.type == FP32)
      gemm_panel(n_row, (const float*)v + h, H, n, p, KEY_BLOCK, out + h, Vp, true);
    else gemm_panel(n_row, (const uint16_t*)v + h, H, n, p, KEY_BLOCK, out + h, Vp, true);
  }
}
