// What is told of logits: log-probabilities and ranks of tokens, and the likeliest tokens.
//
// A row is one unit of work: its numbers depend neither on other rows nor on threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "attention.h"
#include "threads.h"

// Mirrored field by field in kernels/cpu_told.py.
struct Told {
    const void* logits;      // [S, V], each row contiguous
    const int64_t* places;   // [T] which row
    const int32_t* tokens;   // [T] whose log-probability and rank are told, or null: nobody's
    const int64_t* starts;   // [T + 1] where each one's likeliest tokens go, or null: none are told
    uint64_t* keys;          // [starts[T]], scratch
    int32_t* ids;            // [starts[T]]
    float* ids_logprobs;     // [starts[T]]
    float* logprobs;         // [T]
    int32_t* ranks;          // [T]
    int64_t stride, V, T;
    int64_t dtype;  // of logits
    int64_t num_threads;
};

// Logits from `i` on; behind the row's end stands what no token has.
template <class A>
static inline vec load_logits(const A* row, int64_t i, int64_t V) {
    if (i + W <= V) return load(row + i);
    vec some = load_some(row + i, V - i);
    for (int64_t j = V - i; j < W; ++j) some[j] = INFINITY_BELOW;
    return some;
}

static inline float logit_at(const float* row, int64_t id) { return row[id]; }

template <class A>
static inline float logit_at(const A* row, int64_t id) { return load_some(row + id, 1)[0]; }

static inline bool any_of(ivec where) {
#ifdef WIDE
    return _mm512_movepi32_mask((__m512i)where) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < W; ++i) all |= where[i];
    return all != 0;
#endif
}

// NaN is passed over.
template <class A>
static inline float largest_logit(const A* row, int64_t V) {
    vec best[4];
    for (vec& each : best) each = splat(INFINITY_BELOW);
    int64_t i = 0;
    for (; i + 4 * W <= V; i += 4 * W) {
        for (int j = 0; j < 4; ++j) best[j] = larger(load(row + i + j * W), best[j]);
    }
    for (; i < V; i += W) best[0] = larger(load_logits(row, i, V), best[0]);
    return largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

// Numbers summed in fp32 before they go into a sum in fp64.
constexpr int64_t SUMMED_AT_ONCE = 2048;

// Returns the sum of e ** (logit - best): NaN if a logit is NaN, or `best` is no number.
template <class A>
static inline double total_weight(const A* row, int64_t V, float best) {
    double total = 0;
    for (int64_t begin = 0; begin < V; begin += SUMMED_AT_ONCE) {
        int64_t end = std::min(V, begin + SUMMED_AT_ONCE);
        vec sums{};
        for (int64_t i = begin; i < end; i += W) {
            sums += exp2((load_logits(row, i, V) - splat(best)) * splat(LOG2_E));
        }
        total += sum(sums);
    }
    return total;
}

// Of equal logits the lower id comes first.
template <class A>
static inline int32_t rank_of(const A* row, int64_t V, int32_t token) {
    vec own = splat(logit_at(row, token));
    ivec lane, before{};
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int64_t i = 0; i < V; i += W) {
        vec x = load_logits(row, i, V);
        before += (x > own) | ((x == own) & (lane + (int32_t)i < token));
    }
    return 1 - sum_of(before);
}

// Of two tokens, the likelier has the larger key: the logit, and the lower id.
static inline uint64_t key_of(float logit, int64_t id) {
    uint32_t bits = bit_cast<uint32_t>(logit + 0.0f);  // -0 is 0
    bits ^= bits >> 31 ? 0xffffffff : 0x80000000;
    return (uint64_t)bits << 32 | (0xffffffff - (uint32_t)id);
}

static inline int64_t id_of(uint64_t key) { return 0xffffffff - (uint32_t)key; }

// Writes the keys of the `count` likeliest tokens, the likeliest first. count is at most V.
template <class A>
static inline void find_likeliest(const A* row, int64_t V, int64_t count, uint64_t* keys) {
    if (count == 0) return;
    std::greater<uint64_t> above;
    for (int64_t i = 0; i < count; ++i) keys[i] = key_of(logit_at(row, i), i);
    std::make_heap(keys, keys + count, above);
    auto lowest = [&] { return logit_at(row, id_of(keys[0])); };
    float bar = lowest();
    for (int64_t i = count; i < V; i += W) {
        if (!any_of(load_logits(row, i, V) > splat(bar))) continue;
        for (int64_t j = i; j < std::min(i + W, V); ++j) {
            float logit = logit_at(row, j);
            // An equal one has the higher id.
            if (!(logit > bar)) continue;
            std::pop_heap(keys, keys + count, above);
            keys[count - 1] = key_of(logit, j);
            std::push_heap(keys, keys + count, above);
            bar = lowest();
        }
    }
    std::sort(keys, keys + count, above);
}

template <class A>
static inline void tell(const Told& a, int64_t t) {
    const A* row = (const A*)a.logits + a.places[t] * a.stride;
    float best = largest_logit(row, a.V);
    double log_total = std::log(total_weight(row, a.V, best));
    auto logprob = [&](int64_t id) {
        float found = (float)((double)logit_at(row, id) - best - log_total);
        return found > 0 ? 0 : found;
    };
    if (a.tokens) {
        a.logprobs[t] = logprob(a.tokens[t]);
        a.ranks[t] = rank_of(row, a.V, a.tokens[t]);
    }
    if (!a.starts) return;
    int64_t start = a.starts[t], count = a.starts[t + 1] - start;
    find_likeliest(row, a.V, count, a.keys + start);
    for (int64_t i = start; i < start + count; ++i) {
        a.ids[i] = (int32_t)id_of(a.keys[i]);
        a.ids_logprobs[i] = logprob(a.ids[i]);
    }
}
