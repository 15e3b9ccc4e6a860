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
    const void* k_cache;             // [N, S, G, D], contiguous
    const void* v_cache;             // [N, S, G, D], contiguous
    void* out;                       // [T, H, D], contiguous
    const int32_t* block_tables;     // [R, B], rows contiguous
    const int32_t* seq_lens;         // [R]
    const int32_t* query_start_loc;  // [R + 1], or null: one new token each
    const float* k_scale;            // [1] or [G], or null
    const float* v_scale;            // as k_scale
    int64_t q_stride, table_stride, scale_stride;
    int64_t R, H, G, D, S;
    int64_t window;  // 0: none
    int64_t dtype, kv_dtype;
    int64_t num_threads;
    double scale;
    double soft_cap;  // 0: none
};

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The slots of one request's tokens.
struct Slots {
    const int32_t* table;
    int64_t block_size, row_size;  // row_size: elements from one slot to the next, G * D

    // Returns the element at which the token's first head starts, in either cache.
    int64_t operator[](int64_t position) const {
        return (table[position / block_size] * block_size + position % block_size) * row_size;
    }
};

static inline Slots slots_of(const Attention& a, int64_t request) {
    return {a.block_tables + request * a.table_stride, a.S, a.G * a.D};
}

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
