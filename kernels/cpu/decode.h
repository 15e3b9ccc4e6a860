// One new token attends. Memory is the bound: a token's keys and values are read once for all query
// heads that share them, and asked for one tile before they are needed.
#pragma once

#include "attention.h"

constexpr int64_t GROUPS = 4, TILE = GROUPS * LANES;  // tokens

// Query heads that share a key/value head are worked on four at a time: a band. Of a tile its scores,
// and then its weights, are [heads, TILE].
constexpr int64_t BAND = 4;

static inline int64_t bands_of(int64_t group) { return (group + BAND - 1) / BAND; }

// Calls `run` with a band's number of heads as a constant.
template <class Run>
static inline void with_heads(int64_t heads, const Run& run) {
    if (heads == 4) return run(std::integral_constant<int, 4>());
    if (heads == 3) return run(std::integral_constant<int, 3>());
    if (heads == 2) return run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
}

// One tile's tokens [from, end), of TILE, and where they lie (see `Places`).
struct Tile {
    int64_t at[TILE];
    int64_t from = 0, end = 0;

    void find(const Places& places, int64_t first, int64_t start, int64_t stop) {
        from = start > first ? start - first : 0;
        end = stop - first < TILE ? stop - first : TILE;
        places.find(first, end, at);
    }
};

// --- asking for memory ---

// Asks for the next tile while this one is worked on: a line for each line that is read, run by run
// as they lie in memory. The processor's own prefetcher sees a stream then, which blocks in random
// order are not. What is asked for too early or too fast is dropped: pages first, and slowly.
class Ahead {
public:
    struct Run {
        const char *at, *end;
    };

    // Behind the last of `count` runs there must be room for one more.
    void start(Run* runs, int64_t count) {
        for (int64_t i = 0; i < count; ++i) look_up_pages(runs[i]);
        // The end: a line that is there already, again and again.
        runs[count] = {(const char*)runs, (const char*)runs + 64};
        next = runs;
        last = runs + count;
        at = end = nullptr;
    }

    // Up to LINES - 1 lines behind a run are asked for in vain.
    template <int LINES>
    inline __attribute__((always_inline)) void ask() {
        if (at >= end) {
            at = next->at;
            end = next->end;
            if (next < last) ++next;
        }
#pragma GCC unroll 8
        for (int i = 0; i < LINES; ++i) {
            prefetch(at);
            at = later(at) + 64;
        }
    }

    // Asks for what is left.
    void finish() {
        while (at < end || next < last) ask<1>();
    }

private:
    // A request is dropped while the processor looks its page up: more than half of them were, in
    // pages of 4 KiB (Zen 4 under KVM). So pages come first, all at once.
    static void look_up_pages(const Run& run) {
        for (const char* page = run.at; page < run.end; page += PAGE) prefetch(page);
        prefetch(run.end - 1);
    }

    // Returns the same, some cycles later. Requests that come faster than memory answers are dropped
    // as well, and what was dropped is waited for: a line in 7 cycles, some 33 GB/s, gave a fifth
    // more than one in 5 (Zen 4, a core alone).
    static inline __attribute__((always_inline)) const char* later(const char* line) {
#ifdef __x86_64__
        asm volatile("imul $1, %0, %0\n\timul $1, %0, %0" : "+r"(line));
#endif
        return line;
    }

    static constexpr int64_t PAGE = 4096;  // bytes

    const char *at, *end;
    const Run *next, *last;
};

constexpr int64_t MAX_SEGMENTS = TILE;  // of a tile: parts of blocks

// Finds the runs of memory in which the keys and values of a tile lie, block by block. Returns how
// many: 2 at most for each segment, and in lanes for each head of GROUPS segments.
static inline int64_t find_runs(const Attention& a, const Places& places, const Tile& tile,
                                int64_t first, int64_t itemsize, Ahead::Run* runs) {
    int64_t count = 0;
    auto add = [&](int64_t from, int64_t elements) {
        for (const void* cache : {a.k_cache, a.v_cache}) {
            const char* at = (const char*)cache + from * itemsize;
            runs[count++] = {at, at + elements * itemsize};
        }
    };
    // In lanes the first group is read whole, whatever a window cuts off.
    for (int64_t t = a.in_lanes ? 0 : tile.from, next; t < tile.end; t = next) {
        int64_t slot = (first + t) % a.S, tokens = std::min(a.S - slot, tile.end - t);
        next = t + tokens;
        if (!a.in_lanes || tokens == a.S) {
            add(tile.at[t], tokens * a.G * a.D);
            continue;
        }
        for (int64_t g = 0; g < a.G; ++g) {
            add(tile.at[t] + g * places.head, round_up(tokens, LANES) * a.D);
        }
    }
    return count;
}

// --- the softmax of a band ---

// Over the keys seen so far: each head's largest score, and its sum of weights in parts.
struct Band {
    float best[W];  // of head i in elements i, i + 4, and so on
    float total[BAND][W];

    void reset() {
        for (float& x : best) x = INFINITY_BELOW;
        memset(total, 0, sizeof(total));
    }

    Row row(int64_t head) const { return {best[head], sum(load(total[head]))}; }
};

// Turns the products of a tile's tokens into weights, in place; those of other tokens into 0.
// Returns in `shrink` what the sums before must be multiplied by, head by head.
template <int HEADS>
static __attribute__((noinline)) void weigh(const Scores& to_scores, const Tile& tile, Band& band,
                                            float* scores, float* shrink) {
    constexpr int VECS = TILE / W;
    bool whole = tile.from == 0 && tile.end == TILE;
    ivec lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    vec x[HEADS][VECS], tops[HEADS];
#pragma GCC unroll 4
    for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) {
            x[i][j] = to_scores(load(scores + i * TILE + j * W));
            if (!whole) {
                ivec token = lane + j * W;
                ivec seen = (token >= (int32_t)tile.from) & (token < (int32_t)tile.end);
                x[i][j] = pick(seen, x[i][j], splat(INFINITY_BELOW));
            }
            tops[i] = j ? larger(x[i][j], tops[i]) : x[i][j];
        }
    }
    vec before = load(band.best), best = larger(largest_of_each<HEADS>(tops), before);
    // No infinity, lest a difference be NaN.
    vec origins = pick(best == splat(INFINITY_BELOW), vec{}, best);
    vec factors = exp2_below(before - origins);
    store(band.best, best);
    auto weigh_head = [&](auto head) __attribute__((always_inline)) {
        constexpr int I = decltype(head)::value;
        if constexpr (I < HEADS) {
            vec origin = splat_of<I>(origins);
            vec total = load(band.total[I]) * splat_of<I>(factors);
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) {
                vec weight = exp2_below(x[I][j] - origin);
                store(scores + I * TILE + j * W, weight);
                total += weight;
            }
            store(band.total[I], total);
            shrink[I] = factors[I];
        }
    };
    weigh_head(std::integral_constant<int, 0>());
    weigh_head(std::integral_constant<int, 1>());
    weigh_head(std::integral_constant<int, 2>());
    weigh_head(std::integral_constant<int, 3>());
}

#include "decode_fp32.h"
#ifdef BF16_DOT
#include "decode_bf16.h"
#endif

// --- one item: a request, or a part of one ---

struct DecodeItem {
    int64_t request, token, start, end;
    int64_t part;  // among all parts; -1: the request is not split

    // Where its first tile starts: a group does at a multiple of LANES.
    int64_t first() const { return start / LANES * LANES; }
};

// What a part leaves behind for the merge; without parts, what is divided and written at once.
struct Partial {
    Row* rows;   // [H]
    float* acc;  // [H, width]
};

template <class Dot>
struct DecodeScratch {
    typename Dot::Query* queries;  // [G, bands, D, BAND] (see Dot::pack)
    Band* bands;                   // [G, bands]
    float *scores, *shrink;
    float* keys;                   // of a tile under one head, in lanes
    Ahead::Run* runs;

    // Lays the parts out from `base` on; returns how many floats they take.
    int64_t lay_out(const Attention& a, float* base) {
        int64_t bands_total = a.G * bands_of(a.H / a.G);
        float* next = base;
        auto take = [&](int64_t bytes) {
            float* here = next;
            next += round_up(bytes, 64) / 4;
            return here;
        };
        queries = (typename Dot::Query*)take(bands_total * BAND * a.D * sizeof(*queries));
        bands = (Band*)take(bands_total * sizeof(Band));
        scores = take(TILE * BAND * sizeof(float));
        shrink = take(BAND * sizeof(float));
        keys = take(TILE * a.D * sizeof(float));
        runs = (Ahead::Run*)take((2 * MAX_SEGMENTS + 2 * GROUPS * a.G + 4) * sizeof(Ahead::Run));
        return next - base;
    }
};

// Attends to the tokens [start, end) of an item's request with the query of its token. While the
// last tile is worked on, the first one of `after` is asked for, unless that is null.
template <class Dot, class A, class T>
static void decode(const Attention& a, const DecodeItem& item, const DecodeItem* after,
                   const Partial& partial, float* scratch) {
    int64_t D = a.D, group = a.H / a.G, width = Dot::width(D), num_bands = bands_of(group);
    const A* q = (const A*)a.q + item.token * a.q_stride;
    DecodeScratch<Dot> s;
    s.lay_out(a, scratch);
    auto heads_of = [&](int64_t b) { return group - b * BAND < BAND ? group - b * BAND : BAND; };
    auto queries_of = [&](int64_t band) { return s.queries + band * BAND * D; };
    for (int64_t g = 0; g < a.G; ++g) {
        for (int64_t b = 0; b < num_bands; ++b) {
            int64_t band = g * num_bands + b;
            Dot::template pack<T>(q + (g * group + b * BAND) * D, heads_of(b), D, queries_of(band));
            s.bands[band].reset();
        }
    }
    memset(partial.acc, 0, a.H * width * sizeof(float));
    memset(s.scores, 0, TILE * BAND * sizeof(float));
    int64_t head = Places(a, item.request).head;
    Tile tile, next;
    Ahead ahead, idle;
    Ahead::Run nothing[1];
    idle.start(nothing, 0);
    // Returns the number of runs.
    auto find_next = [&](const DecodeItem& of, int64_t first) {
        Places places(a, of.request);
        next.find(places, first, of.start, of.end);
        return find_runs(a, places, next, first, sizeof(T), s.runs);
    };
    if (item.start < item.end) find_next(item, item.first());
    for (int64_t first = item.first(); first < item.end; first += TILE) {
        tile = next;
        int64_t num_runs = first + TILE < item.end ? find_next(item, first + TILE)
                         : after                   ? find_next(*after, after->first())
                                                   : 0;
        ahead.start(s.runs, num_runs);
        for (int64_t g = 0; g < a.G; ++g) {
            Scores to_scores(a, g);
            const T* k = (const T*)a.k_cache + g * head;
            const T* v = (const T*)a.v_cache + g * head;
            T* laid_out = (T*)s.keys;
            const T* keys[GROUPS];
            for (int64_t i = 0; i < GROUPS; ++i) {
                int64_t t = i * LANES;
                // For groups behind the end the one before stands.
                keys[i] = t >= tile.end ? keys[i - 1]
                    : group_of(a, tile.at + t, i ? 0 : tile.from, tile.end - t, k, laid_out + t * D);
            }
            for (int64_t b = 0; b < num_bands; ++b) {
                int64_t band = g * num_bands + b;
                float* acc = partial.acc + (g * group + b * BAND) * width;
                with_heads(heads_of(b), [&](auto heads) {
                    constexpr int HEADS = decltype(heads)::value;
                    Ahead& ask = b ? idle : ahead;
                    // Two groups at a time, so that sums do not wait for each other.
                    for (int64_t i = 0; i < GROUPS && i * LANES < tile.end; i += 2) {
                        Dot::template scores<HEADS, T>(queries_of(band), keys + i, D,
                                                       s.scores + i * LANES, ask);
                    }
                    weigh<HEADS>(to_scores, tile, s.bands[band], s.scores, s.shrink);
                    Dot::template accumulate<HEADS, T>(s.scores, s.shrink, v, tile, D, acc, ask);
                });
            }
        }
        ahead.finish();
    }
    for (int64_t h = 0; h < a.H; ++h) {
        int64_t in_group = h % group;
        const Band& band = s.bands[h / group * num_bands + in_group / BAND];
        partial.rows[h] = band.row(in_group % BAND);
        Dot::template put_in_order<T>(D, partial.acc + h * width);
    }
}

// Joins the parts of one request, which lie one behind the other.
template <class Dot, class A>
static void merge(const Attention& a, int64_t token, const Partial& parts, int64_t num_parts) {
    int64_t D = a.D, width = Dot::width(D);
    A* out = (A*)a.out + token * a.H * D;
    for (int64_t h = 0; h < a.H; ++h) {
        Row whole;
        for (int64_t p = 0; p < num_parts; ++p) {
            float best = parts.rows[p * a.H + h].best;
            if (best > whole.best) whole.best = best;
        }
        float* acc = parts.acc + h * width;
        for (int64_t p = 0; p < num_parts; ++p) {
            const Row& row = parts.rows[p * a.H + h];
            if (row.total == 0) continue;
            float share = exp2(splat(row.origin() - whole.origin()))[0];
            const float* part = parts.acc + (p * a.H + h) * width;
            vec factor = splat(share);
            for (int64_t d = 0; d < width; d += W) {
                vec sums = load(part + d) * factor;
                store(acc + d, p ? load(acc + d) + sums : sums);
            }
            whole.total += row.total * share;
        }
        finish(whole, acc, v_scale_of(a, h / (a.H / a.G)), out + h * D, D);
    }
}
