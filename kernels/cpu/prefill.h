// Many new tokens attend. Arithmetic is the bound: tiles of (token, query head) rows meet tiles of
// keys as matrix products, keys and values packed once per tile of rows.
#pragma once

#include "attention.h"

constexpr int64_t KEYS = 128;   // of one tile
constexpr int64_t ROWS = 192;   // of one tile, if the group of heads divides it

// A matrix [depth, columns] is packed in panels of VECS vectors (the last may be narrower), within
// them depth by depth. DEPTH elements of a column stand together: what one instruction multiplies
// and sums. A block of registers is STRIP rows by VECS vectors, and a panel of 128 deep must leave
// room in 32 KiB of cache.

struct ProductFp32 {
    typedef float Element;
    static constexpr int DEPTH = 1, STRIP = W == 16 ? 12 : 6, VECS = 2;

    static vec multiply(vec acc, const float* a, const float* b) {
        return acc + splat(*a) * load(b);
    }
};

#ifdef BF16_DOT
struct ProductBf16 {
    typedef Bf16 Element;
    static constexpr int DEPTH = 2, STRIP = 6, VECS = 4;

    static vec multiply(vec acc, const Bf16* a, const Bf16* b) {
        int32_t pair;
        memcpy(&pair, a, sizeof(pair));
        return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair),
                                     (__m512bh)_mm512_loadu_si512(b));
    }
};
#endif

// c = c * factor + a @ b over a block of registers; a row of a has `a_width` elements, of c `width`.
template <class P, int VECS>
static inline void strip(const typename P::Element* a, int64_t a_width,
                         const typename P::Element* b, int64_t depth, const float* factor, float* c,
                         int64_t width) {
    vec sums[P::STRIP][VECS];
#pragma GCC unroll 12
    for (int i = 0; i < P::STRIP; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) {
            sums[i][j] = factor ? load(c + i * width + j * W) * splat(factor[i]) : vec{};
        }
    }
    for (int64_t d = 0; d < depth; d += P::DEPTH) {
#pragma GCC unroll 12
        for (int i = 0; i < P::STRIP; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < VECS; ++j) {
                sums[i][j] = P::multiply(sums[i][j], a + i * a_width + d, b + j * W * P::DEPTH);
            }
        }
        b += VECS * W * P::DEPTH;
    }
#pragma GCC unroll 12
    for (int i = 0; i < P::STRIP; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) store(c + i * width + j * W, sums[i][j]);
    }
}

// The same for whole matrices: a [rows, depth], b packed [depth, columns], c [rows, width]. For the
// strip that ends before a row, `columns_of` and `depth_of` say how much of them it needs.
template <class P, class Columns, class Depth>
static void multiply(const typename P::Element* a, int64_t a_width, int64_t rows,
                     const typename P::Element* b, int64_t b_depth, const Depth& depth_of,
                     const float* factors, float* c, int64_t columns, const Columns& columns_of,
                     int64_t width) {
    for (int64_t column = 0; column < columns; column += P::VECS * W) {
        const typename P::Element* panel = b + column * b_depth;
        for (int64_t row = 0; row < rows; row += P::STRIP) {
            if (column >= columns_of(row + P::STRIP)) continue;
            int64_t depth = depth_of(row + P::STRIP);
            const typename P::Element* strip_a = a + row * a_width;
            const float* factor = factors ? factors + row : nullptr;
            float* strip_c = c + row * width + column;
            int64_t vecs = (columns - column) / W;
            if (vecs >= P::VECS) {
                strip<P, P::VECS>(strip_a, a_width, panel, depth, factor, strip_c, width);
            } else if (vecs == 1) {
                strip<P, 1>(strip_a, a_width, panel, depth, factor, strip_c, width);
            } else if (vecs == 2) {
                strip<P, 2>(strip_a, a_width, panel, depth, factor, strip_c, width);
            } else {
                strip<P, 3>(strip_a, a_width, panel, depth, factor, strip_c, width);
            }
        }
    }
}

// Returns where column `column` of `columns` starts in a packed matrix, and how far it is from
// there to the next DEPTH elements of it.
template <class P>
static inline int64_t packed_at(int64_t column, int64_t columns, int64_t depth, int64_t& stride) {
    int64_t panel = column / (P::VECS * W) * (P::VECS * W);
    stride = columns - panel < P::VECS * W ? columns - panel : P::VECS * W;
    return panel * depth + (column - panel) * P::DEPTH;
}

// Converts one row of D elements; behind them zeros, up to `width`.
template <class T, class To>
static inline void convert_row(const T* from, int64_t D, To* to, int64_t width) {
    for (int64_t d = 0; d < width; d += W) {
        store(to + d, d < D ? load_some(from + d, D - d) : vec{});
    }
}

template <class T>
static inline void convert_row(const T* from, int64_t D, T* to, int64_t width) {
    memcpy((void*)to, from, D * sizeof(T));
    memset((void*)(to + D), 0, (width - D) * sizeof(T));
}

// Writes a line of keys in lanes, element by element of all tokens: depth by depth, `stride` apart.
template <class T>
static inline void write_line(const T* line, int64_t vector, float* to, int64_t stride) {
    vec x[WORD<T> * (LANES / W)];
    widen_line(line, x);
    for (int64_t i = 0; i < WORD<T>; ++i) store(to + i * stride, x[i * (LANES / W) + vector]);
}

#ifdef BF16_DOT
template <class T>
static inline void write_line(const T* line, int64_t, Bf16* to, int64_t stride) {
    vec x[WORD<T>];
    widen_line(line, x);
    for (int64_t i = 0; i < WORD<T>; i += 2) {
        // These are bf16 numbers already.
        uvec pairs = ((uvec)x[i] >> 16) | ((uvec)x[i + 1] & 0xffff0000u);
        memcpy((void*)(to + i * stride), &pairs, sizeof(pairs));
    }
}

static inline void write_line(const Bf16* line, int64_t, Bf16* to, int64_t) {
    memcpy((void*)to, line, LANES * 2 * sizeof(Bf16));
}
#endif

// Packs a group of keys in lanes as columns from `first` on of [D, columns].
template <class P, class T>
static void pack_keys(const T* group, int64_t first, int64_t columns, int64_t D,
                      typename P::Element* packed) {
    for (int64_t j = 0; j < LANES / W && first + j * W < columns; ++j) {
        int64_t stride;
        typename P::Element* to = packed + packed_at<P>(first + j * W, columns, D, stride);
        for (int64_t d = 0; d < D; d += WORD<T>) {
            write_line(group + d * LANES, j, to + d * stride, stride);
        }
    }
}

// Packs the values of tokens [from, count) as [KEYS, width]. Others are zeros, as far as products
// read them.
template <class P, class T>
static void pack_values(const T* cache, const int64_t* rows, int64_t from, int64_t count, int64_t D,
                        int64_t width, float* packed, float*) {
    // Row by row, as they lie in memory.
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t d = 0; d < width; d += W) {
            int64_t stride, at = packed_at<P>(d, width, KEYS, stride);
            vec x = t >= from && d < D ? load_some(cache + rows[t] + d, D - d) : vec{};
            store(packed + at + t * stride, x);
        }
    }
}

#ifdef BF16_DOT
template <class P, class T>
static void pack_values(const T* cache, const int64_t* rows, int64_t from, int64_t count, int64_t D,
                        int64_t width, Bf16* packed, Bf16* staging) {
    int64_t padded = round_up(D, 2 * W);
    for (int64_t t = 0; t < count; t += 2) {
        for (int64_t i = 0; i < 2; ++i) {
            Bf16* row = staging + i * padded;
            if (t + i >= from && t + i < count) {
                convert_row(cache + rows[t + i], D, row, padded);
            } else {
                memset((void*)row, 0, padded * sizeof(Bf16));
            }
        }
        for (int64_t d = 0; d < width; d += W) {
            int64_t stride, at = packed_at<P>(d, width, KEYS, stride);
            __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((__m256i*)(staging + d)));
            __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((__m256i*)(staging + padded + d)));
            __m512i pairs = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            _mm512_storeu_si512(packed + at + t * stride, pairs);
        }
    }
}
#endif

// New tokens [first, first + count) of a request under the heads of one key/value head.
struct PrefillItem {
    int64_t request, kv_head, first, count;
};

static inline int64_t tokens_per_tile(const Attention& a) {
    int64_t group = a.H / a.G;
    return group >= ROWS ? 1 : ROWS / group;
}

template <class P>
struct PrefillScratch {
    int64_t rows, width;
    float *scores, *acc, *factors;
    Row* state;
    typename P::Element *queries, *weights, *keys, *values, *staging;

    // Lays the parts out from `base` on; returns how many floats they take.
    int64_t lay_out(const Attention& a, float* base) {
        rows = round_up(tokens_per_tile(a) * (a.H / a.G), P::STRIP);
        width = round_up(a.D, W);
        float* next = base;
        auto take = [&](int64_t floats) {
            float* here = next;
            next += round_up(floats, 16);
            return here;
        };
        int64_t padded = round_up(a.D, 2 * W);
        scores = take(rows * KEYS);
        acc = take(rows * width);
        factors = take(rows);
        state = (Row*)take(rows * 2);
        queries = (typename P::Element*)take(rows * padded);
        weights = (typename P::Element*)take(rows * KEYS);
        keys = (typename P::Element*)take(KEYS * padded);
        values = (typename P::Element*)take(KEYS * width);
        staging = (typename P::Element*)take(LANES * padded);
        return next - base;
    }
};

// Turns the scores of all rows over the keys [key, key + count) into weights. After each row a share
// of what comes next is asked for.
template <class P, class Ask>
static void weigh(const Attention& a, const Scores& to_scores, const PrefillItem& item,
                  int64_t num_cached, int64_t key, int64_t count, PrefillScratch<P>& s,
                  const Ask& ask) {
    int64_t group = a.H / a.G, padded = round_up(count, W);
    ivec lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int64_t r = 0; r < item.count * group; ++r) {
        float* row = s.scores + r * KEYS;
        int64_t place = num_cached + item.first + r / group;
        // What the row sees of this tile: [low, high).
        int64_t high = place + 1 - key < count ? place + 1 - key : count;
        int64_t low = a.window && place + 1 - a.window > key ? place + 1 - a.window - key : 0;
        if (low >= high) {
            s.factors[r] = 1;
            memset((void*)(s.weights + r * KEYS), 0, KEYS * sizeof(typename P::Element));
            continue;
        }
        ask(r);
        bool whole = low == 0 && high == padded;
        for (int64_t t = 0; t < padded; t += W) {
            vec x = to_scores(load(row + t));
            if (!whole) {
                ivec at = lane + (int32_t)t;
                x = pick((at >= (int32_t)low) & (at < (int32_t)high), x, splat(INFINITY_BELOW));
            }
            store(row + t, x);
        }
        s.factors[r] = to_weights(s.state[r], row, padded);
        for (int64_t t = 0; t < padded; t += W) {
            store(s.weights + r * KEYS + t, load(row + t));
        }
    }
}

template <class P, class A, class T>
static void prefill(const Attention& a, const PrefillItem& item, float* base) {
    PrefillScratch<P> s;
    s.lay_out(a, base);
    int64_t D = a.D, group = a.H / a.G, g = item.kv_head, num_rows = item.count * group;
    int64_t start = a.query_start_loc[item.request];
    int64_t num_new = a.query_start_loc[item.request + 1] - start;
    int64_t num_cached = a.seq_lens[item.request] - num_new;
    int64_t end = num_cached + item.first + item.count;
    int64_t begin = num_cached + item.first + 1 - a.window;
    if (a.window == 0 || begin < 0) begin = 0;
    int64_t unseen = begin % LANES;
    begin -= unseen;
    int64_t padded_rows = round_up(num_rows, P::STRIP), query_width = round_up(D, 2 * W);
    memset((void*)s.queries, 0, padded_rows * query_width * sizeof(*s.queries));
    memset(s.acc, 0, padded_rows * s.width * sizeof(float));
    memset((void*)s.weights, 0, padded_rows * KEYS * sizeof(*s.weights));
    for (int64_t r = 0; r < padded_rows; ++r) {
        s.state[r] = Row{};
        s.factors[r] = 1;
        if (r >= num_rows) continue;
        int64_t token = start + item.first + r / group, head = g * group + r % group;
        convert_row((const A*)a.q + token * a.q_stride + head * D, D, s.queries + r * query_width,
                    query_width);
    }
    Scores to_scores(a, g);
    Places places(a, item.request);
    const T* k = (const T*)a.k_cache + g * places.head;
    const T* v = (const T*)a.v_cache + g * places.head;
    int64_t at[KEYS], next[KEYS];
    auto find = [&](int64_t key, int64_t* rows) {
        int64_t count = end - key < KEYS ? end - key : KEYS;
        places.find(key, count, rows);
        return count > 0 ? count : 0;
    };
    int64_t count = find(begin, next), count_next;
    for (int64_t key = begin; key < end; key += KEYS, count = count_next, unseen = 0) {
        memcpy(at, next, sizeof(at));
        count_next = find(key + KEYS, next);
        int64_t columns = round_up(count, W);
        for (int64_t t = 0; t < count; t += LANES) {
            const T* group = group_of(a, at + t, t ? 0 : unseen, count - t, k, (T*)s.staging);
            pack_keys<P>(group, t, columns, D, s.keys);
        }
        pack_values<P>(v, at, unseen, count, D, s.width, s.values, s.staging);
        // How many of these keys are seen by the rows before `row`.
        auto seen = [&](int64_t row) {
            int64_t last = (row < num_rows ? row : num_rows) - 1;
            int64_t keys = num_cached + item.first + last / group + 1 - key;
            return keys < 0 ? 0 : keys < count ? keys : count;
        };
        multiply<P>(s.queries, query_width, padded_rows, s.keys, D, [&](int64_t) { return D; },
                    nullptr, s.scores, columns, seen, KEYS);
        // The next keys lie far apart: no processor guesses where.
        weigh<P>(a, to_scores, item, num_cached, key, count, s, [&](int64_t row) {
            for (int64_t t = row * count_next / num_rows; t < (row + 1) * count_next / num_rows; ++t) {
                for (int64_t byte = 0; byte < D * (int64_t)sizeof(T); byte += 64) {
                    prefetch((const char*)(k + next[t]) + byte);
                    prefetch((const char*)(v + next[t]) + byte);
                }
            }
        });
        multiply<P>(s.weights, KEYS, padded_rows, s.values, KEYS,
                    [&](int64_t row) { return round_up(seen(row), P::DEPTH); }, s.factors, s.acc,
                    s.width, [&](int64_t) { return s.width; }, s.width);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        int64_t token = start + item.first + r / group, head = g * group + r % group;
        finish(s.state[r], s.acc + r * s.width, v_scale_of(a, g),
               (A*)a.out + (token * a.H + head) * D, D);
    }
}
