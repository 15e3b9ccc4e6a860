// Decoding in fp32 arithmetic, for every type of keys and values.
#pragma once

struct DotFp32 {
    typedef float Query;

    static int64_t width(int64_t D) { return round_up(D, W); }

    // What a tile's products and sums ask with, in all.
    template <class T>
    static int32_t cycles(const T*, int64_t heads, int64_t D) {
        return TILE * ((heads + 1) * (D / W + width(D) / W) + heads * 4);
    }

    // Copies the band's queries, [heads, D], to [BAND, width].
    template <class T, class A>
    static void pack(const T*, const A* q, int64_t heads, int64_t D, float* to) {
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t d = 0; d < D; d += W) {
                store(to + h * width(D) + d, load_some(q + h * D + d, D - d));
            }
        }
    }

    template <class T>
    static void put_in_order(const T*, int64_t, float*) {}

    // quads[h, t] = q[h] . k[t]
    template <class T>
    static void scores(const float* q, int64_t heads, const T* k, const TileRows& rows,
                       int64_t offset, int64_t D, float* quads, Ahead& ahead) {
        if (heads == 4) dot<4>(q, k + offset, rows, D, quads, ahead);
        if (heads == 3) dot<3>(q, k + offset, rows, D, quads, ahead);
        if (heads == 2) dot<2>(q, k + offset, rows, D, quads, ahead);
        if (heads == 1) dot<1>(q, k + offset, rows, D, quads, ahead);
    }

    // Products of HEADS queries and as many keys at a time as give W products.
    template <int HEADS, class T>
    static void dot(const float* query, const T* k, const TileRows& rows, int64_t D, float* quads,
                    Ahead& ahead) {
        constexpr int TOKENS = HEADS == 3 ? W / 4 : W / HEADS;
        int64_t padded = width(D), whole = D / W * W;
        Ahead ask = ahead;
        for (int64_t t = 0; t < rows.count; t += TOKENS) {
            const int64_t* here = rows.here + t;
            vec acc[W] = {};
            for (int64_t d = 0; d < whole; d += W) {
                ask.ask(TOKENS * (HEADS + 1));
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
            ask.ask(TOKENS * HEADS * 4);
            store_quads<HEADS, TOKENS>(acc, t, quads);
        }
        ahead = ask;
    }

    // acc[h] = acc[h] * shrink[h] + sum of weights[h, t] * v[t]
    template <class T>
    static void accumulate(const float* weights, const float* shrink, int64_t heads, const T* v,
                           const TileRows& rows, int64_t offset, int64_t D, float* acc, Ahead& ahead) {
        for (int64_t d = 0; d < D;) {
            Block<T> block{weights, shrink, v + offset + d, rows, acc + d, width(D), D - d, ahead};
            switch (heads) {
                case 4: d += block.template run<4>(); break;
                case 3: d += block.template run<3>(); break;
                case 2: d += block.template run<2>(); break;
                default: d += block.template run<1>();
            }
        }
    }

    // Some dimensions of the band's heads.
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
                    sums[i][j] = load(acc + i * padded + j * W) * splat(shrink[4 * i]);
                }
            }
            Ahead ask = ahead;
            for (int64_t t = 0; t < rows.count; ++t) {
                const T* value = values + rows.here[t];
                const float* weight = weights + quad_at(0, t);
                ask.ask((HEADS + 1) * VECS);
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) {
                    vec x = VECS > 1 ? load(value + j * W) : load_some(value, left);
#pragma GCC unroll 4
                    for (int i = 0; i < HEADS; ++i) sums[i][j] += splat(weight[4 * i]) * x;
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
