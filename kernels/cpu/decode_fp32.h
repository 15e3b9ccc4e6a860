// Decoding in fp32 arithmetic, for every type of keys and values.
#pragma once

struct DotFp32 {
    typedef float Query;

    static int64_t width(int64_t D) { return round_up(D, W); }

    // Whether keys are multiplied in the order in which they lie, pair by pair: what makes fp32 of
    // fp16 takes 16 numbers as they come.
#ifdef WIDE
    template <class T>
    static constexpr bool IN_PAIRS = std::is_same<T, Fp16>::value;
#else
    template <class T>
    static constexpr bool IN_PAIRS = false;
#endif

    // Copies the band's queries, [heads, D], to [D, BAND], or [D / 2, BAND, 2].
    template <class T, class A>
    static void pack(const A* q, int64_t heads, int64_t D, float* to) {
        constexpr int64_t X = IN_PAIRS<T> ? 2 : 1;
        memset(to, 0, D * BAND * sizeof(float));
        for (int64_t h = 0; h < heads; ++h) {
            float row[W];
            for (int64_t d = 0; d < D; d += W) {
                store(row, load_some(q + h * D + d, D - d));
                for (int64_t i = 0; i < W && d + i < D; ++i) {
                    to[(d + i) / X * X * BAND + h * X + (d + i) % X] = row[i];
                }
            }
        }
    }

    template <class T>
    static void put_in_order(int64_t, float*) {}

    // scores[h, t] = q[h] . k[t] of two groups, at once if there are registers for both.
    template <int HEADS, class T>
    static void scores(const float* q, const T* const* keys, int64_t D, float* scores, Ahead& ahead) {
#ifdef WIDE
        if constexpr (IN_PAIRS<T>) {
            dot_pairs<HEADS>(q, keys, D, scores, ahead);
        } else {
            dot<HEADS, 2>(q, keys, D, scores, ahead);
        }
#else
        for (int g = 0; g < 2; ++g) dot<HEADS, 1>(q, keys + g, D, scores + g * LANES, ahead);
#endif
    }

#ifdef WIDE
    template <int HEADS, class T>
    static __attribute__((noinline)) void dot_pairs(const float* q, const T* const* keys, int64_t D,
                                                    float* scores, Ahead& ahead) {
        // Of each group tokens 0 to 7 and 8 to 15, each with two sums.
        __m512 acc[HEADS][4] = {};
        Ahead ask = ahead;
        for (int64_t d = 0; d < D; d += 2) {
            ask.template ask<2>();
            __m512 x[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                x[j] = (__m512)load(keys[j / 2] + d * LANES + j % 2 * W);
            }
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
                double pair;
                memcpy(&pair, q + d * BAND + i * 2, sizeof(pair));
                __m512 query = (__m512)_mm512_set1_pd(pair);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) acc[i][j] = _mm512_fmadd_ps(x[j], query, acc[i][j]);
            }
        }
        ahead = ask;
        const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
#pragma GCC unroll 4
        for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 2
            for (int g = 0; g < 2; ++g) {
                __m512 sum = _mm512_shuffle_ps(acc[i][2 * g], acc[i][2 * g + 1], 0x88) +
                             _mm512_shuffle_ps(acc[i][2 * g], acc[i][2 * g + 1], 0xdd);
                sum = (__m512)_mm512_permutexvar_pd(order, (__m512d)sum);
                _mm512_storeu_ps(scores + i * TILE + g * LANES, sum);
            }
        }
    }
#endif

    template <int HEADS, int AT_ONCE, class T>
    static __attribute__((noinline)) void dot(const float* q, const T* const* keys, int64_t D,
                                              float* scores, Ahead& ahead) {
        constexpr int VECS = LANES / W, X = WORD<T>;
        vec acc[HEADS][AT_ONCE][VECS] = {};
        Ahead ask = ahead;
        for (int64_t d = 0; d < D; d += X) {
            ask.template ask<AT_ONCE>();
            vec x[AT_ONCE][X * VECS];
#pragma GCC unroll 2
            for (int g = 0; g < AT_ONCE; ++g) widen_line(keys[g] + d * LANES, x[g]);
#pragma GCC unroll 4
            for (int e = 0; e < X; ++e) {
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    vec query = splat(q[(d + e) * BAND + i]);
#pragma GCC unroll 2
                    for (int g = 0; g < AT_ONCE; ++g) {
#pragma GCC unroll 4
                        for (int j = 0; j < VECS; ++j) {
                            acc[i][g][j] += query * x[g][e * VECS + j];
                        }
                    }
                }
            }
        }
        ahead = ask;
        for (int i = 0; i < HEADS; ++i) {
            for (int g = 0; g < AT_ONCE; ++g) {
                for (int j = 0; j < VECS; ++j) {
                    store(scores + i * TILE + g * LANES + j * W, acc[i][g][j]);
                }
            }
        }
    }

    // acc[h] = acc[h] * shrink[h] + sum of weights[h, t] * v[t]
    template <int HEADS, class T>
    static void accumulate(const float* weights, const float* shrink, const T* v, const Tile& tile,
                           int64_t D, float* acc, Ahead& ahead) {
        constexpr int VECS = W == 16 ? 4 : 2;
        for (int64_t d = 0; d < D;) {
            Block<HEADS, T> block{weights, shrink, v + d, tile, acc + d, width(D), D - d, ahead};
            // As many dimensions as there are registers for, if so many are left.
            if (D - d >= VECS * W) {
                block.template run<VECS>();
                d += VECS * W;
            } else {
                block.template run<1>();
                d += W;
            }
        }
    }

    // Some dimensions of the band's heads.
    template <int HEADS, class T>
    struct Block {
        const float *weights, *shrink;
        const T* values;
        const Tile& tile;
        float* acc;
        int64_t padded, left;
        Ahead& ahead;

        template <int VECS>
        __attribute__((noinline)) void run() const {
            vec sums[HEADS][VECS];
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) {
                    sums[i][j] = load(acc + i * padded + j * W) * splat(shrink[i]);
                }
            }
            Ahead ask = ahead;
            for (int64_t t = tile.from; t < tile.end; ++t) {
                const T* value = values + tile.at[t];
                ask.template ask<VECS * W * sizeof(T) < 64 ? 1 : VECS * W * sizeof(T) / 64>();
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
