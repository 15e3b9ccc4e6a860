// One new token attends. Memory is the bound: a token's keys and values are read once for all query
// heads that share them, and asked for one tile before they are needed.
#pragma once

#include "attention.h"

constexpr int64_t TILE = 32;  // tokens

// Query heads that share a key/value head are worked on four at a time: a band. Of a tile its scores,
// and then its weights, are [TILE / 4, 4 heads, 4 tokens]: quads.
constexpr int64_t BAND = 4, QUAD = 4 * BAND;

static inline int64_t bands_of(int64_t group) { return (group + BAND - 1) / BAND; }

// Where in quads the score of a token with a head of the band is.
static inline int64_t quad_at(int64_t head, int64_t token) {
    return token / 4 * QUAD + head * 4 + token % 4;
}

// Where one tile's tokens lie, and those of the next one. Places without a token lead to one that
// is there.
struct TileRows {
    int64_t here[TILE], next[TILE];
    int64_t count = 0, count_next = 0;
};

// Asks for the next tile while this one is worked on: line by line as it lies in memory, and evenly
// over all of the work, since a processor that has too much under way waits.
struct Ahead {
    struct Run {
        const char *at, *end;
    };
    int64_t to_values;                         // from a key to its value, in bytes
    const Run* next;                           // runs of keys
    const char *at = nullptr, *end = nullptr;  // what is left of this one
    int64_t left = 0;                          // runs

    // In 1 / 4096 of a line of keys and one of values: what is due, and what a cycle of work makes
    // due. What all asks of a tile add up to is what `rate` is made from, or lines are left out.
    int32_t due = 0, rate = 0;

    void start(const Run* runs, int64_t count) {
        next = runs;
        left = count;
        at = end = nullptr;
        due = 0;
    }

    inline __attribute__((always_inline)) void ask(int32_t cycles) {
        for (due += cycles * rate; due >= 4096; due -= 4096) {
            if (at >= end) {
                if (left == 0) return;
                at = next->at;
                end = next->end;
                ++next;
                --left;
            }
            prefetch(at);
            prefetch(at + to_values);
            at += 64;
        }
    }
};

// --- the softmax of a band ---

// Over the keys seen so far, as in a quad: the largest score of each head four times, and its sum of
// weights in four parts.
struct Band {
    float best[QUAD], total[QUAD];

    void reset() {
        for (int i = 0; i < QUAD; ++i) {
            best[i] = INFINITY_BELOW;
            total[i] = 0;
        }
    }

    Row row(int64_t head) const {
        const float* t = total + head * 4;
        return {best[head * 4], t[0] + t[1] + (t[2] + t[3])};
    }
};

// Turns the products of `count` tokens into weights, in place; those of other tokens into 0.
// Returns in `shrink`, a quad, what the sums before must be multiplied by.
static inline void weigh(const Scores& to_scores, int64_t count, Band& band, float* quads,
                         float* shrink, Ahead& ahead) {
    int64_t end = (count + 3) / 4 * QUAD;
    ivec token;
    for (int i = 0; i < W; ++i) token[i] = i % 4;
    Ahead ask = ahead;
    for (int64_t part = 0; part < QUAD; part += W) {
        vec before = load(band.best + part), top = before;
        for (int64_t i = part; i < end; i += QUAD) {
            ask.ask(8);
            vec x = to_scores(load(quads + i));
            int32_t left = (int32_t)(count - i / QUAD * 4);
            if (left < 4) x = pick(token < left, x, splat(INFINITY_BELOW));
            store(quads + i, x);
            top = larger(x, top);
        }
        top = largest_of_fours(top);
        // No infinity, lest a difference be NaN.
        vec origin = pick(top == splat(INFINITY_BELOW), vec{}, top);
        vec factor = exp2(before - origin), total = load(band.total + part) * factor;
        for (int64_t i = part; i < end; i += QUAD) {
            ask.ask(12);
            vec weight = exp2(load(quads + i) - origin);
            store(quads + i, weight);
            total += weight;
        }
        store(band.best + part, top);
        store(band.total + part, total);
        store(shrink + part, factor);
    }
    ahead = ask;
}

// Stores the sums of W vectors, [HEADS, TOKENS], as products of the tokens from `token` on.
template <int HEADS, int TOKENS>
__attribute__((always_inline)) static inline void store_quads(const vec* v, int64_t token,
                                                              float* quads) {
    constexpr int PIECE = TOKENS < 4 ? TOKENS : 4;
    vec found = sums(v);
    if (HEADS * TOKENS == QUAD && TOKENS == 4) return store(quads + quad_at(0, token), found);
    float pieces[W];
    store(pieces, found);
    for (int i = 0; i < HEADS; ++i) {
        for (int j = 0; j < TOKENS; j += PIECE) {
            memcpy(quads + quad_at(i, token + j), pieces + i * TOKENS + j, PIECE * sizeof(float));
        }
    }
}

constexpr int32_t CYCLES_TO_WEIGH = TILE / 4 * 20;  // of a tile and band, about

#include "decode_fp32.h"
#ifdef BF16_DOT
#include "decode_bf16.h"
#endif

// --- one item: a request, or a part of one ---

// What a part leaves behind for the merge; without parts, what is divided and written at once.
struct Partial {
    Row* rows;   // [H]
    float* acc;  // [H, width]
};

template <class Dot>
struct DecodeScratch {
    typename Dot::Query* queries;  // [G, bands, BAND * width]
    Band* bands;                   // [G, bands]
    float *quads, *shrink;

    // Lays the parts out from `base` on; returns how many floats they take.
    int64_t lay_out(const Attention& a, float* base) {
        int64_t width = Dot::width(a.D), bands_total = a.G * bands_of(a.H / a.G);
        float* next = base;
        auto take = [&](int64_t floats) {
            float* here = next;
            next += round_up(floats, 16);
            return here;
        };
        queries = (typename Dot::Query*)take(bands_total * BAND * width);
        bands = (Band*)take(bands_total * 2 * QUAD);
        quads = take(TILE * BAND);
        shrink = take(QUAD);
        return next - base;
    }
};

static inline void find_rows(const Slots& slots, int64_t from, int64_t end, int64_t* rows,
                             int64_t& count) {
    count = end - from < TILE ? end - from : TILE;
    if (count <= 0) {
        count = 0;
        return;
    }
    for (int64_t i = 0; i < count; ++i) rows[i] = slots[from + i];
    for (int64_t i = count; i < TILE; ++i) rows[i] = rows[0];
}

// Finds the runs of memory in which the next tile's keys lie. Returns how many.
static inline int64_t find_runs(const TileRows& rows, int64_t row_size, int64_t itemsize,
                                const void* k, Ahead::Run* runs) {
    int64_t count = 0;
    for (int64_t first = 0, last; first < rows.count_next; first = last) {
        for (last = first + 1; last < rows.count_next; ++last) {
            if (rows.next[last] != rows.next[last - 1] + row_size) break;
        }
        const char* at = (const char*)k + rows.next[first] * itemsize;
        runs[count++] = {at, at + (last - first) * row_size * itemsize};
    }
    return count;
}

// Attends to the tokens [start, end) of a request with the query of token `token`.
template <class Dot, class A, class T>
static void decode(const Attention& a, int64_t request, int64_t token, int64_t start, int64_t end,
                   const Partial& partial, float* scratch) {
    int64_t D = a.D, group = a.H / a.G, width = Dot::width(D), num_bands = bands_of(group);
    const A* q = (const A*)a.q + token * a.q_stride;
    const T *k = (const T*)a.k_cache, *v = (const T*)a.v_cache;
    DecodeScratch<Dot> s;
    s.lay_out(a, scratch);
    auto heads_of = [&](int64_t b) { return group - b * BAND < BAND ? group - b * BAND : BAND; };
    int32_t cycles = 0;
    for (int64_t g = 0; g < a.G; ++g) {
        for (int64_t b = 0; b < num_bands; ++b) {
            int64_t band = g * num_bands + b, heads = heads_of(b);
            Dot::pack((const T*)nullptr, q + (g * group + b * BAND) * D, heads, D,
                      s.queries + band * BAND * width);
            s.bands[band].reset();
            cycles += Dot::cycles((const T*)nullptr, heads, D) + CYCLES_TO_WEIGH;
        }
    }
    memset(s.quads, 0, TILE * BAND * sizeof(float));
    memset(partial.acc, 0, a.H * width * sizeof(float));
    TileRows rows;
    Slots slots = slots_of(a, request);
    Ahead ahead;
    Ahead::Run runs[TILE];
    ahead.to_values = (const char*)v - (const char*)k;
    ahead.rate = 4096 * TILE * ((slots.row_size * (int64_t)sizeof(T) + 63) / 64) / cycles + 1;
    find_rows(slots, start, end, rows.next, rows.count_next);
    for (int64_t first = start; first < end; first += TILE) {
        rows.count = rows.count_next;
        memcpy(rows.here, rows.next, sizeof(rows.here));
        find_rows(slots, first + TILE, end, rows.next, rows.count_next);
        ahead.start(runs, find_runs(rows, slots.row_size, sizeof(T), k, runs));
        for (int64_t g = 0; g < a.G; ++g) {
            Scores to_scores(a, g);
            for (int64_t b = 0; b < num_bands; ++b) {
                int64_t band = g * num_bands + b, heads = heads_of(b);
                float* acc = partial.acc + (g * group + b * BAND) * width;
                Dot::scores(s.queries + band * BAND * width, heads, k, rows, g * D, D, s.quads,
                            ahead);
                weigh(to_scores, rows.count, s.bands[band], s.quads, s.shrink, ahead);
                Dot::accumulate(s.quads, s.shrink, heads, v, rows, g * D, D, acc, ahead);
            }
        }
    }
    for (int64_t h = 0; h < a.H; ++h) {
        int64_t in_group = h % group;
        const Band& band = s.bands[h / group * num_bands + in_group / BAND];
        partial.rows[h] = band.row(in_group % BAND);
        Dot::put_in_order((const T*)nullptr, D, partial.acc + h * width);
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
