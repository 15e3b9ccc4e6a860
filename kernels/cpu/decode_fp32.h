// Decoding in fp32 arithmetic, for every type of keys and values.
#pragma once

struct DotFp32 {
    typedef float Query;

    static int64_t width(int64_t D) { return round_up(D, W); }

    // Copies the band's queries, [heads, D], to [D, BAND].
    template <class T, class A>
    static void pack(const A* q, int64_t heads, int64_t D, float* to) {
        memset(to, 0, D * BAND * sizeof(float));
        for (int64_t h = 0; h < heads; ++h) {
            float row[W];
            for (int64_t d = 0; d < D; d += W) {
                store(row, load_some(q + h * D + d, D - d));
                for (int64_t i = 0; i < W && d + i < D; ++i) to[(d + i) * BAND + h] = row[i];
            }
        }
    }

    template <class T>
    static void put_in_order(int64_t, float*) {}

    // scores[h, t] = q[h] . k[t], over as many groups at once as there are registers for.
    template <int HEADS, class T>
    static void scores(const float* q, const T* const* keys, int64_t D, float* scores, Ahead& ahead) {
        constexpr int GROUPS = W == 16 ? 2 : 1;
        for (int g = 0; g < 2; g += GROUPS) {
            dot<HEADS, GROUPS>(q, keys + g, D, scores + g * LANES, ahead);
        }
    }

    template <int HEADS, int GROUPS, class T>
    static __attribute__((noinline)) void dot(const float* q, const T* const* keys, int64_t D,
                                              float* scores, Ahead& ahead) {
        constexpr int VECS = LANES / W, X = WORD<T>;
        vec acc[HEADS][GROUPS][VECS] = {};
        Ahead ask = ahead;
        for (int64_t d = 0; d < D; d += X) {
            ask.template ask<GROUPS>();
            vec x[GROUPS][X * VECS];
#pragma GCC unroll 2
            for (int g = 0; g < GROUPS; ++g) widen_line(keys[g] + d * LANES, x[g]);
#pragma GCC unroll 4
            for (int e = 0; e < X; ++e) {
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    vec query = splat(q[(d + e) * BAND + i]);
#pragma GCC unroll 2
                    for (int g = 0; g < GROUPS; ++g) {
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
            for (int g = 0; g < GROUPS; ++g) {
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
