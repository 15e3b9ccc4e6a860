// One new token attends. Memory is the bound: a token's keys and values are read once for all query
// heads that share them, and asked for one tile before they are needed.
#pragma once

#include "attention.h"

constexpr int64_t TILE = 32;  // tokens

// Where one tile's tokens lie, and those of the next one. Places without a token lead to one that
// is there.
struct TileRows {
    int64_t here[TILE], next[TILE];
    int64_t count = 0, count_next = 0;
};

// Asks for the next tile while this one is worked on: in the order in which it lies in memory, and
// evenly over all of the work, since a processor that has too much under way waits.
struct Ahead {
    int64_t to_values;  // from a key to its value, in bytes
    const char* const* slots;
    const char *at = nullptr, *end = nullptr;  // what is left of a slot's keys
    int64_t left = 0;  // slots
    int64_t slot_bytes;

    // In 1 / 256 of a line of keys and one of values: what is due, and what 16 products, the weights
    // of a head and a pair of values (64 dimensions, one head) each make due.
    int32_t due = 0, per_products, per_weights, per_sums;

    void start(const char* const* from, int64_t count) {
        slots = from;
        left = count;
        at = end = nullptr;
        due = 0;
    }

    inline __attribute__((always_inline)) void ask(int32_t more) {
        for (due += more; due >= 256; due -= 256) {
            if (at >= end) {
                if (left == 0) return;
                at = *slots++;
                end = at + slot_bytes;
                --left;
            }
            prefetch(at);
            prefetch(at + to_values);
            at += 64;
        }
    }
};

// --- fp32 arithmetic, for every type of keys and values ---

struct DotFp32 {
    typedef float Query;

    static int64_t width(int64_t D) { return round_up(D, W); }

    // Whether rows are converted before they are used. Who does so asks for the next tile meanwhile.
    template <class T>
    static constexpr bool converts() { return false; }

    // products[h * TILE + t] = q[h] . k[t]
    template <class T>
    static void scores(const float* q, int64_t heads, const T* k, const TileRows& rows,
                       int64_t offset, int64_t D, float* products, float*, Ahead& ahead) {
        for (int64_t h = 0; h < heads;) {
            const float* query = q + h * width(D);
            float* out = products + h * TILE;
            int64_t step = heads - h >= 4 ? 4 : heads - h;
            if (step == 4) dot<4>(query, k + offset, rows, D, out, ahead);
            if (step == 3) dot<3>(query, k + offset, rows, D, out, ahead);
            if (step == 2) dot<2>(query, k + offset, rows, D, out, ahead);
            if (step == 1) dot<1>(query, k + offset, rows, D, out, ahead);
            h += step;
        }
    }

    // Products of HEADS queries and as many keys at a time as give W products.
    template <int HEADS, class T>
    static void dot(const float* query, const T* k, const TileRows& rows, int64_t D,
                    float* products, Ahead& ahead) {
        constexpr int TOKENS = HEADS == 3 ? W / 4 : W / HEADS;
        int64_t padded = width(D), whole = D / W * W;
        Ahead ask = ahead;
        int32_t per = ahead.per_products * HEADS * TOKENS / 16;
        for (int64_t t = 0; t < rows.count; t += TOKENS) {
            ask.ask(per);
            const int64_t* here = rows.here + t;
            vec acc[W] = {};
            for (int64_t d = 0; d < whole; d += W) {
#pragma GCC unroll 16
                for (int j = 0; j < TOKENS; ++j) {
                    vec x = load(k + here[j] + d);
#pragma GCC unroll 4
                    for (int i = 0; i < HEADS; ++i) {
                        acc[i * TOKENS + j] += load(query + i * padded + d) * x;
                    }
                }
            }
            if (whole < D) {
#pragma GCC unroll 16
                for (int j = 0; j < TOKENS; ++j) {
                    vec x = load_some(k + here[j] + whole, D - whole);
#pragma GCC unroll 4
                    for (int i = 0; i < HEADS; ++i) {
                        acc[i * TOKENS + j] += load(query + i * padded + whole) * x;
                    }
                }
            }
            float found[W];
            store(found, sums(acc));
            for (int i = 0; i < HEADS; ++i) {
                memcpy(products + i * TILE + t, found + i * TOKENS, TOKENS * sizeof(float));
            }
        }
        ahead = ask;
    }

    // acc[h] = acc[h] * shrink[h] + sum of weights[h * TILE + t] * v[t]
    template <class T>
    static void accumulate(const float* weights, const float* shrink, int64_t heads, const T* v,
                           const TileRows& rows, int64_t offset, int64_t D, float* acc, float*,
                           Ahead& ahead) {
        for (int64_t h = 0; h < heads;) {
            const float* w = weights + h * TILE;
            int64_t step = heads - h >= 4 ? 4 : heads - h;
            for (int64_t d = 0; d < D;) {
                const T* values = v + offset + d;
                Block<T> block{w, shrink + h, values, rows, acc + h * width(D) + d, width(D),
                               D - d, ahead};
                switch (step) {
                    case 4: d += block.template run<4>(); break;
                    case 3: d += block.template run<3>(); break;
                    case 2: d += block.template run<2>(); break;
                    default: d += block.template run<1>();
                }
            }
            h += step;
        }
    }

    // Some dimensions of some heads.
    template <class T>
    struct Block {
        const float *weights, *shrink;
        const T* values;
        const TileRows& rows;
        float* acc;
        int64_t padded, left;
        Ahead& ahead;

        // Returns how many dimensions were done: as many as there are registers for, if so many
        // are left.
        template <int HEADS>
        int64_t run() const {
            constexpr int VECS = W == 16 ? 4 : 2;
            if (left >= VECS * W) {
                run<HEADS, VECS>();
                return VECS * W;
            }
            run<HEADS, 1>();
            return W;
        }

        template <int HEADS, int VECS>
        void run() const {
            vec sums[HEADS][VECS];
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) {
                    sums[i][j] = load(acc + i * padded + j * W) * splat(shrink[i]);
                }
            }
            Ahead ask = ahead;
            int32_t per = ahead.per_sums * HEADS * VECS * W / 128;
            for (int64_t t = 0; t < rows.count; ++t) {
                const T* value = values + rows.here[t];
                ask.ask(per);
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) {
                    vec x = VECS > 1 ? load(value + j * W) : load_some(value, left);
#pragma GCC unroll 4
                    for (int i = 0; i < HEADS; ++i) sums[i][j] += splat(weights[i * TILE + t]) * x;
                }
            }
            ahead = ask;
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) store(acc + i * padded + j * W, sums[i][j]);
            }
        }
    };
};

#ifdef BF16_DOT
#include "decode_bf16.h"
#endif

// --- one item: a request, or a part of one ---

// What a part leaves behind for the merge; without parts, what is divided and written at once.
struct Partial {
    Row* rows;   // [H]
    float* acc;  // [H, width]
};

// Floats of scratch that `decode` needs.
template <class Dot>
static int64_t decode_scratch(const Attention& a) {
    int64_t width = Dot::width(a.D), group = a.H / a.G;
    return a.H * width + 2 * group * (TILE + 1) + 64 + TILE * width;
}

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

// Attends to the tokens [start, end) of a request with the query of token `token`.
template <class Dot, class A, class T>
static void decode(const Attention& a, int64_t request, int64_t token, int64_t start, int64_t end,
                   const Partial& partial, float* scratch) {
    int64_t D = a.D, group = a.H / a.G, width = Dot::width(D);
    const A* q = (const A*)a.q + token * a.q_stride;
    const T *k = (const T*)a.k_cache, *v = (const T*)a.v_cache;
    typename Dot::Query* queries = (typename Dot::Query*)scratch;
    float *products = scratch + a.H * width, *shrink = products + group * TILE;
    float* staging = scratch + round_up(a.H * width + group * (TILE + 1), 16);
    for (int64_t h = 0; h < a.H; ++h) {
        partial.rows[h] = Row{};
        for (int64_t d = 0; d < width; d += W) {
            vec x = d < D ? load_some(q + h * D + d, D - d) : vec{};
            store(queries + h * width + d, x);
            store(partial.acc + h * width + d, vec{});
        }
    }
    TileRows rows;
    Slots slots = slots_of(a, request);
    Ahead ahead;
    ahead.to_values = (const char*)v - (const char*)k;
    ahead.slot_bytes = slots.row_size * sizeof(T);
    // Of the time, weights take about a quarter, the others half of the rest.
    int64_t lines = 256 * TILE * ((ahead.slot_bytes + 63) / 64) / a.H;
    ahead.per_products = lines * 3 / 8 / (TILE / 16) + 1;
    ahead.per_weights = lines / 4 + 1;
    ahead.per_sums = lines * 3 / 8 / (TILE / 2 * ((D + 63) / 64)) + 1;
    find_rows(slots, start, end, rows.next, rows.count_next);
    for (int64_t first = start; first < end; first += TILE) {
        rows.count = rows.count_next;
        memcpy(rows.here, rows.next, sizeof(rows.here));
        find_rows(slots, first + TILE, end, rows.next, rows.count_next);
        const char* starts[TILE];
        for (int64_t t = 0; t < rows.count_next; ++t) starts[t] = (const char*)(k + rows.next[t]);
        ahead.start(starts, Dot::template converts<T>() ? 0 : rows.count_next);
        for (int64_t g = 0; g < a.G; ++g) {
            Scores to_scores(a, g);
            Dot::scores(queries + g * group * width, group, k, rows, g * D, D, products, staging,
                        ahead);
            for (int64_t h = 0; h < group; ++h) {
                ahead.ask(ahead.per_weights);
                float* row = products + h * TILE;
                int64_t padded = round_up(rows.count, W);
                for (int64_t t = rows.count; t < padded; ++t) row[t] = 0;
                for (int64_t t = 0; t < padded; t += W) store(row + t, to_scores(load(row + t)));
                for (int64_t t = rows.count; t < padded; ++t) row[t] = INFINITY_BELOW;
                shrink[h] = to_weights(partial.rows[g * group + h], row, padded);
            }
            Dot::accumulate(products, shrink, group, v, rows, g * D, D,
                            partial.acc + g * group * width, staging, ahead);
        }
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
