// Draws of tokens: the token at a given share of the probabilities, most likely first.
//
// That order makes every filter a cut: min_p, top_k and top_p each keep a head of it. No head is
// sorted as a whole: tokens fall into bins by how likely they are, and only bins in which something
// ends are sorted. A draw is one unit of work.
#pragma once

#include <cfloat>

#include "told.h"

// Mirrored field by field in kernels/cpu_draw.py.
struct Draws {
    const float* logits;        // [S, V], each row contiguous
    const int64_t* places;      // [D] which row
    const double* temperatures; // [D] above 0, as all below
    const int64_t* top_ks;      // [D] 0: all
    const double* top_ps;       // [D] 1: all
    const double* min_ps;       // [D] 0: all
    const double* shares;       // [D] in [0, 1)
    int32_t* tokens;            // [D]
    int64_t stride, V, D;
    int64_t num_threads;
};

// A token's depth is how far its logit, divided by the temperature, lies below the best. Tokens
// deeper than this are looked at only if something ends among them.
constexpr float LIKELY = 10.0f;
constexpr int64_t BINS = 512, BINS_PER_DEPTH = 16;

struct DrawScratch {
    float* depths;            // [V]
    int32_t* ids;             // [V]
    uint64_t* grouped;        // [V] depth, and the id behind it, bin by bin
    int64_t ends[BINS];       // where each bin ends
    double weights[BINS];     // of all bins up to this one
    bool is_sorted[BINS];

    // Room for a vector more than there are tokens.
    static int64_t room(int64_t V) { return round_up(V + W, 16); }

    static int64_t bytes(int64_t V) { return room(V) * 16; }

    void lay_out(int64_t V, char* base) {
        grouped = (uint64_t*)base;
        depths = (float*)(grouped + room(V));
        ids = (int32_t*)(depths + room(V));
    }
};

static inline float depth_of(uint64_t key) { return bit_cast<float>((uint32_t)(key >> 32)); }

static inline float weight_of(float depth) { return exp2(splat(depth * -LOG2_E))[0]; }

static inline int64_t bin_of(float depth) {
    return depth < (float)(BINS / BINS_PER_DEPTH) ? (int64_t)(depth * BINS_PER_DEPTH) : BINS - 1;
}

// Writes depths that are no deeper than `floor`, and their ids, from `first` on; returns how many.
static inline int64_t keep(vec depth, float floor, int64_t first, float* depths, int32_t* ids) {
    ivec lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    ivec id = lane + (int32_t)first;
#ifdef WIDE
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)depth, _mm512_set1_ps(floor), _CMP_LE_OQ);
    _mm512_storeu_ps(depths, _mm512_maskz_compress_ps(kept, (__m512)depth));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(kept, (__m512i)id));
    return __builtin_popcount(kept);
#else
    int64_t count = 0;
    for (int i = 0; i < W; ++i) {
        depths[count] = depth[i];
        ids[count] = id[i];
        count += depth[i] <= floor;
    }
    return count;
#endif
}

// Collects tokens no deeper than `floor`, in order of their ids; returns how many there are. Adds
// the weights of all tokens to `total`, unless it is null.
static inline int64_t collect(const float* row, int64_t V, float best, float temperature,
                              float floor, double* total, DrawScratch& s) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < V; begin += SUMMED_AT_ONCE) {
        int64_t end = std::min(V, begin + SUMMED_AT_ONCE);
        vec sums{};
        for (int64_t i = begin; i < end; i += W) {
            vec depth = (splat(best) - load_logits(row, i, V)) / splat(temperature);
            if (total) sums += exp2(depth * splat(-LOG2_E));
            if (!any_of(depth <= splat(floor))) continue;
            count += keep(depth, floor, i, s.depths + count, s.ids + count);
        }
        if (total) *total += sum(sums);
    }
    return count;
}

// Tokens in order of their depths, the first `limit` of those collected.
struct Head {
    DrawScratch& s;
    int64_t limit;

    Head(DrawScratch& s, int64_t count) : s(s), limit(count) {
        int64_t next[BINS] = {}, start = 0;
        std::fill(s.weights, s.weights + BINS, 0.0);
        std::fill(s.is_sorted, s.is_sorted + BINS, false);
        for (int64_t i = 0; i < count; i += W) {
            float weights[W];
            store(weights, exp2(load(s.depths + i) * splat(-LOG2_E)));
            for (int64_t j = i; j < std::min(i + W, count); ++j) {
                int64_t bin = bin_of(s.depths[j]);
                ++next[bin];
                s.weights[bin] += weights[j - i];
            }
        }
        for (int64_t b = 0; b < BINS; ++b) {
            int64_t in_bin = next[b];
            next[b] = start;
            s.ends[b] = start += in_bin;
            if (b) s.weights[b] += s.weights[b - 1];
        }
        for (int64_t i = 0; i < count; ++i) {
            uint64_t depth = bit_cast<uint32_t>(s.depths[i] + 0.0f);  // -0 is 0
            s.grouped[next[bin_of(s.depths[i])]++] = depth << 32 | (uint32_t)s.ids[i];
        }
    }

    // Goes through the places in order, from bin `b` on, until is_last(place, weights up to and with
    // it) or the end, which is place `limit`. Returns the place; `weight` becomes those weights.
    template <class IsLast>
    int64_t walk(int64_t b, const IsLast& is_last, double& weight) const {
        int64_t place = b ? s.ends[b - 1] : 0;
        weight = b ? s.weights[b - 1] : 0;
        for (; place < limit; ++place) {
            while (s.ends[b] <= place) ++b;
            if (!s.is_sorted[b]) {
                // Whoever comes into a bin comes to its start.
                std::sort(s.grouped + place, s.grouped + s.ends[b]);
                s.is_sorted[b] = true;
            }
            weight += weight_of(depth_of(s.grouped[place]));
            if (is_last(place, weight)) break;
        }
        return place;
    }

    // Puts the last place in order; returns the weight of all.
    double weight_of_all() const {
        int64_t b = 0;
        double weight;
        while (s.ends[b] < limit) ++b;
        walk(b, [](int64_t, double) { return false; }, weight);
        return weight;
    }

    // Returns the first place up to which the weights are `target` or more (more, if `above`), and
    // the weights; `limit` if there is none.
    int64_t find(double target, bool above, double& weight) const {
        auto reached = [&](double sum) { return above ? sum > target : sum >= target; };
        int64_t b = 0;
        while (s.ends[b] < limit && !reached(s.weights[b])) ++b;
        return walk(b, [&](int64_t, double sum) { return reached(sum); }, weight);
    }
};

// Draws from the `count` tokens collected. `total` is the weight of all tokens, and the result -1 if
// the answer may be one that was not collected; 0: all others are cut off.
static inline int64_t draw_from_head(DrawScratch& s, int64_t count, double total, int64_t top_k,
                                     double top_p, double share) {
    Head head(s, count);
    bool is_all = total == 0;
    double weight;
    if (top_k > 0) {
        if (top_k > count && !is_all) return -1;
        head.limit = std::min(top_k, count);
        is_all = true;
    }
    if (is_all) total = head.weight_of_all();
    if (top_p < 1) {
        int64_t place = head.find(top_p * total, false, weight);
        if (place >= head.limit && !is_all) return -1;
        head.limit = std::min(place + 1, head.limit);
        total = weight;
        is_all = true;
    }
    int64_t place = head.find(share * total, true, weight);
    if (place >= head.limit) {
        if (!is_all) return -1;
        // Sums are rounded.
        head.weight_of_all();
        place = head.limit - 1;
    }
    return (int64_t)(uint32_t)s.grouped[place];
}

static inline int64_t draw(const Draws& a, int64_t d, DrawScratch& s) {
    const float* row = a.logits + a.places[d] * a.stride;
    float best = largest_logit(row, a.V), temperature = (float)a.temperatures[d];
    int64_t top_k = a.top_ks[d];
    double top_p = a.top_ps[d], share = a.shares[d], total = 0;
    if (a.min_ps[d] > 0) {
        float floor = (float)-std::log(a.min_ps[d]);
        int64_t count = collect(row, a.V, best, temperature, floor, nullptr, s);
        return draw_from_head(s, count, 0, top_k, top_p, share);
    }
    int64_t count = collect(row, a.V, best, temperature, LIKELY, &total, s);
    int64_t token = draw_from_head(s, count, total, top_k, top_p, share);
    if (token >= 0) return token;
    count = collect(row, a.V, best, temperature, FLT_MAX, nullptr, s);
    return draw_from_head(s, count, 0, top_k, top_p, share);
}

// Returns 0; 1 if memory is short.
extern "C" int pagemill_draw(const Draws* a) {
    int64_t num_threads = std::min(a->num_threads, a->D), bytes = DrawScratch::bytes(a->V);
    try {
        Lines memory(bytes * num_threads);
        over_units_with_thread(a->D, num_threads, [&](int64_t d, int64_t thread) {
            DrawScratch scratch;
            scratch.lay_out(a->V, memory.memory.get() + thread * bytes);
            a->tokens[d] = (int32_t)draw(*a, d, scratch);
        });
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// Mirrored in kernels/cpu_draw.py.
struct Likeliest {
    const float* logits;  // [S, V], each row contiguous
    int32_t* tokens;      // [S]
    float* scores;        // [S] the tokens' logits
    int64_t stride, V, S;
    int64_t num_threads;
};

// Finds the first of a row's largest logits. NaN counts as the largest.
static void find_likeliest(const Likeliest& a, int64_t s) {
    const float* row = a.logits + s * a.stride;
    constexpr int CHAINS = 4;  // one would wait for itself
    vec most[CHAINS];
    ivec is_nan{};
    for (vec& each : most) each = splat(-INFINITY);
    int64_t v = 0;
    for (; v + CHAINS * W <= a.V; v += CHAINS * W) {
#pragma GCC unroll 4
        for (int i = 0; i < CHAINS; ++i) {
            vec x = load(row + v + i * W);
            most[i] = larger(most[i], x);
            is_nan |= x != x;
        }
    }
    float best = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    bool none = sum_of(is_nan) != 0;
    for (; v < a.V; ++v) {
        best = row[v] > best ? row[v] : best;
        none |= row[v] != row[v];
    }
    auto is_it = [&](float x) { return none ? x != x : x == best; };
    // A vector at a time up to the one that has it.
    for (v = 0; v + W <= a.V; v += W) {
        vec x = load(row + v);
        if (sum_of(none ? x != x : x == splat(best))) break;
    }
    while (!is_it(row[v])) ++v;
    a.tokens[s] = (int32_t)v;
    a.scores[s] = row[v];
}

extern "C" void pagemill_likeliest(const Likeliest* a) {
    over_units(a->S, a->num_threads, [&](int64_t s) { find_likeliest(*a, s); });
}
