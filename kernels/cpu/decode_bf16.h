// Decoding in pairs of bf16: one instruction multiplies 32 of them and sums in fp32.
#pragma once

#ifdef __AVX512VBMI__

// The bytes of bf16 numbers for the 128 sizes of an 8-bit one.
struct Fp8Table {
    alignas(64) uint8_t low[128];
    alignas(64) uint8_t high[128];

    constexpr Fp8Table(int mantissa, int bias, int first_special, int special)
        : low(), high() {
        for (int size = 0; size < 128; ++size) {
            int exponent = size >> mantissa, fraction = size & ((1 << mantissa) - 1);
            if (exponent == 0 && fraction != 0) {
                // A subnormal number of 8 bits is a normal one of 16.
                exponent = 1;
                for (; !(fraction >> mantissa); fraction <<= 1) --exponent;
                fraction &= (1 << mantissa) - 1;
            }
            int bits = ((exponent + bias) << 7) | (fraction << (7 - mantissa));
            if (size == 0) bits = 0;
            if (size >= first_special) bits = special | (fraction << (7 - mantissa));
            low[size] = bits & 0xff;
            high[size] = bits >> 8;
        }
    }
};

constexpr Fp8Table TABLE_E4M3(3, 120, 0x7f, 0x7fc0), TABLE_E5M2(2, 112, 0x7c, 0x7f80);

static inline const Fp8Table& table_of(const E4m3*) { return TABLE_E4M3; }
static inline const Fp8Table& table_of(const E5m2*) { return TABLE_E5M2; }

// Bytes 0 and 64 side by side, then 1 and 65, and so on.
struct SideBySide {
    alignas(64) uint8_t first[64];
    alignas(64) uint8_t second[64];

    constexpr SideBySide() : first(), second() {
        for (int i = 0; i < 64; ++i) {
            first[i] = i / 2 + i % 2 * 64;
            second[i] = first[i] + 32;
        }
    }
};

constexpr SideBySide SIDE_BY_SIDE;

// Loads 64 bytes, or `count` and zeros behind them.
template <bool WHOLE>
static inline __m512i load_bytes(const void* from, int64_t count) {
    if (WHOLE || count >= 64) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8((1ull << count) - 1, from);
}

// Looks up the low and the high byte of each of 64 numbers.
template <class T>
__attribute__((always_inline)) static inline void look_up(const T* type, __m512i bytes, __m512i& low,
                                                          __m512i& high) {
    const Fp8Table& table = table_of(type);
    low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), bytes,
                                   _mm512_load_si512(table.low + 64));
    high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), bytes,
                                    _mm512_load_si512(table.high + 64));
    // high | (bytes & 0x80)
    high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8((char)0x80), 0xf8);
}

// Puts bytes together: the numbers of even places, then those of odd ones.
__attribute__((always_inline)) static inline void put_together(__m512i low, __m512i high,
                                                               __m512bh* x) {
    const __m512i swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    x[0] = (__m512bh)_mm512_mask_shuffle_epi8(low, 0xaaaaaaaaaaaaaaaa, high, swap);
    x[1] = (__m512bh)_mm512_mask_shuffle_epi8(high, 0x5555555555555555, low, swap);
}

// Converts at most 64 numbers: both bytes of each are looked up, and put together.
template <class T>
__attribute__((always_inline)) static inline void widen(const T* from, int64_t count, Bf16* to) {
    __m512i low, high;
    look_up(from, load_bytes<false>(from, count), low, high);
    const SideBySide& order = SIDE_BY_SIDE;
    __m512i pairs = _mm512_permutex2var_epi8(low, _mm512_load_si512(order.first), high);
    _mm512_storeu_si512(to, pairs);
    if (count <= 32) return;
    pairs = _mm512_permutex2var_epi8(low, _mm512_load_si512(order.second), high);
    _mm512_storeu_si512(to + 32, pairs);
}

#else

// Converts at most 64 numbers.
template <class T>
static inline void widen(const T* from, int64_t count, Bf16* to) {
    for (int64_t d = 0; d < 64 && d < count; d += W) store(to + d, load_some(from + d, count - d));
}

#endif

// Weights are rounded to bf16, as a tensor core would have them.
struct DotBf16 {
    typedef Bf16 Query;

    static int64_t width(int64_t D) { return round_up(D, 64); }

    // What a tile's products and sums ask with, in all.
    template <class T>
    static int32_t cycles(const T*, int64_t heads, int64_t D) {
        return TILE * (width(D) / 64 * (cycles_of_key<T>(heads) + cycles_of_pair<T>(heads) / 2) + 6);
    }

    // Of 64 dimensions of a key, and of a pair of values.
    template <class T>
    static constexpr int32_t cycles_of_key(int heads) { return heads * 2 + (sizeof(T) == 1 ? 6 : 0); }

    template <class T>
    static constexpr int32_t cycles_of_pair(int heads) {
        return heads * 4 + (sizeof(T) == 1 ? 14 : 4);
    }

    static __m512i some(const Bf16* p, int64_t count) {
        __mmask32 mask = count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1;
        return _mm512_maskz_loadu_epi16(mask, p);
    }

    // Loads at most 64 dimensions of a key; zeros behind them.
    template <bool WHOLE>
    static void halves(const Bf16* p, int64_t count, __m512bh* x) {
        x[0] = (__m512bh)(WHOLE ? _mm512_loadu_si512(p) : some(p, count));
        x[1] = (__m512bh)(WHOLE ? _mm512_loadu_si512(p + 32) : some(p + 32, count - 32));
    }

    // Of keys of 8 bits, those of even places come first: products do not mind.
    template <bool WHOLE, class T>
    static void halves(const T* p, int64_t count, __m512bh* x) {
#ifdef __AVX512VBMI__
        __m512i low, high;
        look_up(p, load_bytes<WHOLE>(p, count), low, high);
        put_together(low, high, x);
#else
        Bf16 wide[64];
        widen(p, count, wide);
        halves<WHOLE>(wide, count, x);
#endif
    }

    // Copies the band's queries, [heads, D], to [D / 64, BAND, 64], in the order of `halves`.
    template <class T>
    static void pack(const T* type, const Bf16* q, int64_t heads, int64_t D, Bf16* to) {
        memset((void*)to, 0, BAND * width(D) * sizeof(Bf16));
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t d = 0; d < D; ++d) {
                to[d / 64 * 64 * BAND + h * 64 + half_place(type, d % 64)] = q[h * D + d];
            }
        }
    }

    static int half_place(const Bf16*, int d) { return d; }

    template <class T>
    static int half_place(const T*, int d) {
#ifdef __AVX512VBMI__
        return d % 2 * 32 + d / 2;
#else
        return d;
#endif
    }

    // quads[h, t] = q[h] . k[t]
    template <class T>
    static void scores(const Bf16* q, int64_t heads, const T* k, const TileRows& rows,
                       int64_t offset, int64_t D, float* quads, Ahead& ahead) {
        if (D % 64) return dot<false>(q, heads, k + offset, rows, D, quads, ahead);
        dot<true>(q, heads, k + offset, rows, D, quads, ahead);
    }

    template <bool WHOLE, class T>
    static void dot(const Bf16* q, int64_t heads, const T* k, const TileRows& rows, int64_t D,
                    float* quads, Ahead& ahead) {
        if (heads == 4) dot<4, WHOLE>(q, k, rows, D, quads, ahead);
        if (heads == 3 && sizeof(T) == 1) dot<3, WHOLE>(q, k, rows, D, quads, ahead);
        if (heads == 3 && sizeof(T) == 2) {
            // More arithmetic, but measured faster by 4 % from memory: keys reach the first cache
            // sooner. What has to be converted is too dear to be read twice.
            dot<2, WHOLE>(q, k, rows, D, quads, ahead);
            dot<1, WHOLE>(q + 2 * 64, k, rows, D, quads + quad_at(2, 0), ahead);
        }
        if (heads == 2) dot<2, WHOLE>(q, k, rows, D, quads, ahead);
        if (heads == 1) dot<1, WHOLE>(q, k, rows, D, quads, ahead);
    }

    // Products of HEADS queries and as many keys at a time as give 16 products.
    template <int HEADS, bool WHOLE, class T>
    __attribute__((noinline)) static void dot(const Bf16* q, const T* k, const TileRows& rows, int64_t D, float* quads,
                    Ahead& ahead) {
        constexpr int TOKENS = HEADS == 3 ? 4 : 16 / HEADS;
        Ahead ask = ahead;
        for (int64_t t = 0; t < rows.count; t += TOKENS) {
            const int64_t* here = rows.here + t;
            vec acc[16] = {};
            for (int64_t d = 0; d < D; d += 64) {
                ask.ask(TOKENS * cycles_of_key<T>(HEADS));
#pragma GCC unroll 16
                for (int j = 0; j < TOKENS; ++j) {
                    __m512bh x[2];
                    halves<WHOLE>(k + here[j] + d, D - d, x);
#pragma GCC unroll 4
                    for (int i = 0; i < HEADS; ++i) {
                        const Bf16* query = q + d * BAND + i * 64;
                        __m512 sum = (__m512)acc[i * TOKENS + j];
                        sum = _mm512_dpbf16_ps(sum, x[0], (__m512bh)_mm512_loadu_si512(query));
                        sum = _mm512_dpbf16_ps(sum, x[1], (__m512bh)_mm512_loadu_si512(query + 32));
                        acc[i * TOKENS + j] = (vec)sum;
                    }
                }
            }
            ask.ask(TOKENS * 6);
            store_quads<HEADS, TOKENS>(acc, t, quads);
        }
        ahead = ask;
    }

    // acc[h] = acc[h] * shrink[h] + sum of weights[h, t] * v[t], in the order of `Pair`.
    template <class T>
    static void accumulate(const float* weights, const float* shrink, int64_t heads, const T* v,
                           const TileRows& rows, int64_t offset, int64_t D, float* acc, Ahead& ahead) {
        alignas(64) Bf16 rounded[TILE * BAND];
        for (int64_t i = 0; i < (rows.count + 3) / 4 * QUAD; i += W) {
            __m256bh few = _mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i));
            memcpy((void*)(rounded + i), &few, sizeof(few));
        }
        for (int64_t d = 0; d < D; d += 64) {
            Block<T> block{rounded, shrink, v + offset + d, rows, acc + d, width(D), D - d, ahead};
            if (heads == 4) block.template run<4>();
            if (heads == 3) block.template run<3>();
            if (heads == 2) block.template run<2>();
            if (heads == 1) block.template run<1>();
        }
    }

    // 64 dimensions of the values of two tokens, side by side in pairs. Whatever order of dimensions
    // is cheapest will do, as long as sums end up in their own: interleaving within lanes of 128 bits.
    template <bool WHOLE>
    static void pair(const Bf16* a, const Bf16* b, int64_t count, __m512bh* x) {
        __m512bh first[2], second[2];
        halves<WHOLE>(a, count, first);
        halves<WHOLE>(b, count, second);
        for (int i = 0; i < 2; ++i) {
            x[2 * i] = (__m512bh)_mm512_unpacklo_epi16((__m512i)first[i], (__m512i)second[i]);
            x[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16((__m512i)first[i], (__m512i)second[i]);
        }
    }

    // Element i of vector j of `pair` is this dimension of the 64.
    static int place(const Bf16*, int j, int i) { return j / 2 * 32 + i / 4 * 8 + j % 2 * 4 + i % 4; }

    template <bool WHOLE, class T>
    static void pair(const T* a, const T* b, int64_t count, __m512bh* x) {
#ifdef __AVX512VBMI__
        __m512i first = load_bytes<WHOLE>(a, count), second = load_bytes<WHOLE>(b, count);
        for (int i = 0; i < 2; ++i) {
            // Of 32 bits two bytes are the first token's, and two the second's.
            __m512i bytes = i ? _mm512_unpackhi_epi16(first, second)
                              : _mm512_unpacklo_epi16(first, second);
            __m512i low, high;
            look_up(a, bytes, low, high);
            put_together(low, high, x + 2 * i);
        }
#else
        Bf16 wide[2][64];
        widen(a, count, wide[0]);
        widen(b, count, wide[1]);
        pair<WHOLE>(wide[0], wide[1], count, x);
#endif
    }

    template <class T>
    static int place(const T*, int j, int i) {
#ifdef __AVX512VBMI__
        return i / 4 * 16 + j / 2 * 8 + i % 4 * 2 + j % 2;
#else
        return place((const Bf16*)nullptr, j, i);
#endif
    }

    template <class T>
    static void put_in_order(const T* type, int64_t D, float* acc) {
        for (int64_t d = 0; d < D; d += 64) {
            float mixed[64];
            memcpy(mixed, acc + d, sizeof(mixed));
            for (int j = 0; j < 4; ++j) {
                for (int i = 0; i < 16; ++i) acc[d + place(type, j, i)] = mixed[j * 16 + i];
            }
        }
    }

    // At most 64 dimensions of the band's heads, the tokens two at a time. Behind the last token
    // stands a weight of 0.
    template <class T>
    struct Block {
        const Bf16* weights;
        const float* shrink;
        const T* values;
        const TileRows& rows;
        float* acc;
        int64_t padded, left;
        Ahead& ahead;

        // Behind the last of an odd number of tokens are zeros: its own infinity would be NaN there.
        template <bool WHOLE>
        __attribute__((always_inline)) void pair_at(int64_t t, __m512bh* x) const {
            static const T nothing[64] = {};
            int64_t last = rows.count - 1;
            const T* a = values + rows.here[t];
            const T* b = t < last ? values + rows.here[t + 1] : nothing;
            pair<WHOLE>(a, b, left, x);
        }

        template <int HEADS>
        void run() const {
            if (left < 64) return run<HEADS, false>();
            run<HEADS, true>();
        }

        template <int HEADS, bool WHOLE>
        __attribute__((noinline)) void run() const {
            __m512 sums[HEADS][4];
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    sums[i][j] = _mm512_loadu_ps(acc + i * padded + j * 16) * shrink[4 * i];
                }
            }
            Ahead ask = ahead;
            for (int64_t t = 0; t < rows.count; t += 2) {
                ask.ask(cycles_of_pair<T>(HEADS));
                __m512bh x[4];
                pair_at<WHOLE>(t, x);
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    int32_t both;
                    memcpy(&both, weights + quad_at(i, t), sizeof(both));
                    __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; ++j) {
                        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], weight, x[j]);
                    }
                }
            }
            ahead = ask;
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    _mm512_storeu_ps(acc + i * padded + j * 16, sums[i][j]);
                }
            }
        }
    };
};
