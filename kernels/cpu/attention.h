// What decoding and prefill share: the arguments, where a token's key lies, and the softmax.
#pragma once

#include <cmath>
#include <limits>

#include "vectors.h"

constexpr float INFINITY_BELOW = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504089f;

// Mirrored field by field in kernels/cpu_attention.py. Strides count elements.
struct Attention {
    const void* q;                   // [T, H, D], each token's heads contiguous
    const void* k_cache;             // in rows or in lanes (see below), contiguous
    const void* v_cache;             // likewise
    void* out;                       // [T, H, D], contiguous
    const int32_t* block_tables;     // [R, B], rows contiguous
    const int32_t* seq_lens;         // [R]
    const int32_t* query_start_loc;  // [R + 1], or null: one new token each
    const float* k_scale;            // [1] or [G], or null
    const float* v_scale;            // as k_scale
    int64_t q_stride, table_stride, scale_stride;
    int64_t R, H, G, D, S;
    int64_t in_lanes;  // whether the cache is; S is a multiple of LANES then
    int64_t window;  // 0: none
    int64_t dtype, kv_dtype;
    int64_t num_threads;
    double scale;
    double soft_cap;  // 0: none
};

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A cache lies in rows: keys and values [N, S, G, D]. Or in lanes, as processors multiply it: keys
// [N, G, S / LANES, D / x, LANES, x], where x elements are 32 bits, and values [N, G, S, D]. A
// vector of such keys is 16 tokens, so that what it is multiplied by sums up to their scores lane by
// lane. Either way LANES tokens' keys under one head are a group, LANES * D elements.
constexpr int64_t LANES = 16;

template <class T>
constexpr int64_t WORD = 4 / sizeof(T);  // x

// Where one request's keys and values lie. Strides count elements.
struct Places {
    const int32_t* table;
    int64_t S, block, token, head;

    Places(const Attention& a, int64_t request)
        : table(a.block_tables + request * a.table_stride), S(a.S), block(a.S * a.G * a.D),
          token(a.in_lanes ? a.D : a.G * a.D), head(a.in_lanes ? a.S * a.D : a.D) {}

    // Finds where the values of tokens from `first` on start, under the first head; in rows their
    // keys as well. In lanes that of a multiple of LANES is where a group of keys starts.
    void find(int64_t first, int64_t count, int64_t* at) const {
        int64_t in_table = first / S, slot = first % S;
        for (int64_t t = 0; t < count; ++t) {
            at[t] = table[in_table] * block + slot * token;
            if (++slot == S) {
                slot = 0;
                ++in_table;
            }
        }
    }
};

// Lays LANES rows of 32-bit words out in lanes: to[u * LANES + i] = from[i][u].
static inline void to_lanes(const uint32_t* const* from, int64_t words, uint32_t* to) {
#ifdef WIDE
    for (int64_t u = 0; u < words; u += 16) {
        __m512i r[16], t[16];
        __mmask16 there = words - u < 16 ? (1 << (words - u)) - 1 : 0xffff;
        for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(there, from[i] + u);
        for (int i = 0; i < 8; ++i) {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 4; ++i) {
            r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
            r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
            r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
            r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
            t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
            t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
            t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        }
        for (int i = 0; i < 4; ++i) {
            __m512i columns[4] = {
                _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88),
                _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88),
                _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd),
                _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd),
            };
            for (int j = 0; j < 4; ++j) {
                int64_t unit = u + 4 * j + i;
                if (unit < words) _mm512_storeu_si512(to + unit * LANES, columns[j]);
            }
        }
    }
#else
    for (int64_t u = 0; u < words; ++u) {
        for (int64_t i = 0; i < LANES; ++i) to[u * LANES + i] = from[i][u];
    }
#endif
}

// Returns the keys of a group under a head, in lanes: where they lie, or laid out in `scratch`. Of
// the group the tokens [from, end) are there, at least one; what stands for others is any number.
template <class T>
static inline const T* group_of(const Attention& a, const int64_t* at, int64_t from, int64_t end,
                                const T* head, T* scratch) {
    if (a.in_lanes) return head + at[0];
    const uint32_t* rows[LANES];
    for (int64_t i = 0; i < LANES; ++i) {
        rows[i] = (const uint32_t*)(head + at[i < from || i >= end ? from : i]);
    }
    to_lanes(rows, a.D / WORD<T>, (uint32_t*)scratch);
    return scratch;
}

// Makes fp32 of a line of keys in lanes: of element i of all tokens, to[i * LANES] and on.
template <class T>
inline void widen_line(const T* line, vec* to) {
    for (int64_t j = 0; j < LANES / W; ++j) {
        uvec words = read<uvec>((const uint32_t*)line + j * W);
        for (int64_t i = 0; i < WORD<T>; ++i) to[i * (LANES / W) + j] = element_of<T>(words, i);
    }
}

#ifdef WIDE
template <>
inline void widen_line<Fp16>(const Fp16* line, vec* to) {
    // Fewer instructions than taking words apart.
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512 first = (__m512)load(line), second = (__m512)load(line + W);
    to[0] = (vec)_mm512_permutex2var_ps(first, even, second);
    to[1] = (vec)_mm512_permutex2var_ps(first, even + _mm512_set1_epi64(0x100000001), second);
}
#endif

// From products to scores whose exponentials are powers of two.
struct Scores {
    float scale, soft_cap;

    Scores(const Attention& a, int64_t kv_head) : scale(a.scale), soft_cap(a.soft_cap) {
        if (a.k_scale) scale *= a.k_scale[kv_head * a.scale_stride];
    }

    vec operator()(vec products) const {
        if (soft_cap == 0) return products * splat(scale * LOG2_E);
        return tanh(products * splat(scale / soft_cap)) * splat(soft_cap * LOG2_E);
    }
};

// Of one query head over the keys seen so far.
struct Row {
    float best = INFINITY_BELOW;  // the largest score
    float total = 0;              // the sum of 2 ** (score - best)

    // What scores are compared with: no infinity, lest a difference be NaN.
    float origin() const { return best == INFINITY_BELOW ? 0 : best; }
};

// Turns a row's scores in [0, count), a multiple of W, into weights, in place. Scores of -inf are
// keys that are not seen. Returns what the sums before must be multiplied by.
static inline float to_weights(Row& row, float* scores, int64_t count) {
    vec top = load(scores);
    for (int64_t i = W; i < count; i += W) top = larger(load(scores + i), top);
    float tile_best = largest(top), before = row.origin();
    float shrink = 1;
    if (tile_best > row.best) {
        row.best = tile_best;
        shrink = exp2(splat(before - tile_best))[0];
        // Nothing was summed before the first key.
        if (row.total == 0) shrink = 0;
    }
    vec total{}, origin = splat(row.origin());
    for (int64_t i = 0; i < count; i += W) {
        vec weight = exp2(load(scores + i) - origin);
        store(scores + i, weight);
        total += weight;
    }
    row.total = row.total * shrink + sum(total);
    return shrink;
}

// Writes sums of weighted values, divided by the sum of weights; 0 if no key was seen.
template <class A>
static inline void finish(const Row& row, const float* acc, float v_scale, A* out, int64_t D) {
    float factor = row.total == 0 ? 0 : v_scale / row.total;
    for (int64_t d = 0; d < D; d += W) store_some(out + d, load(acc + d) * splat(factor), D - d);
}

static inline float v_scale_of(const Attention& a, int64_t kv_head) {
    return a.v_scale ? a.v_scale[kv_head * a.scale_stride] : 1;
}
