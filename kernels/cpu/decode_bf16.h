// Decoding in pairs of bf16: one instruction multiplies 32 of them and sums in fp32.
#pragma once

// Loads 64 bytes, or `count` and zeros behind them; nothing if that is negative.
template <bool WHOLE>
static inline __m512i load_bytes(const void* from, int64_t count) {
    if (WHOLE || count >= 64) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8(count <= 0 ? 0 : (1ull << count) - 1, from);
}

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

#endif

// Weights are rounded to bf16, as a tensor core would have them. Keys and values are bf16, or 8 bits.
struct DotBf16 {
    typedef Bf16 Query;

    static int64_t width(int64_t D) { return round_up(D, 64); }

    // Copies the band's queries, [heads, D], to [D / x, BAND, x]: what a line of keys is multiplied by.
    template <class T>
    static void pack(const Bf16* q, int64_t heads, int64_t D, Bf16* to) {
        constexpr int64_t X = WORD<T>;
        memset((void*)to, 0, BAND * D * sizeof(Bf16));
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t d = 0; d < D; ++d) to[d / X * BAND * X + h * X + d % X] = q[h * D + d];
        }
    }

    // scores[h, t] = q[h] . k[t]
    template <int HEADS, class T>
    static __attribute__((noinline)) void scores(const Bf16* q, const T* const* keys, int64_t D,
                                                 float* scores, Ahead& ahead) {
        Ahead ask = ahead;
        if constexpr (sizeof(T) == 2) {
            __m512 acc[HEADS][2] = {};
#pragma GCC unroll 2
            for (int64_t d = 0; d < D; d += 2) {
                ask.template ask<2>();
                __m512bh x = (__m512bh)_mm512_loadu_si512(keys[0] + d * LANES);
                __m512bh y = (__m512bh)_mm512_loadu_si512(keys[1] + d * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    int32_t pair;
                    memcpy(&pair, q + d * BAND + i * 2, sizeof(pair));
                    __m512bh query = (__m512bh)_mm512_set1_epi32(pair);
                    acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, query);
                    acc[i][1] = _mm512_dpbf16_ps(acc[i][1], y, query);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
                _mm512_storeu_ps(scores + i * TILE, acc[i][0]);
                _mm512_storeu_ps(scores + i * TILE + LANES, acc[i][1]);
            }
        } else {
            // Of both bytes side by side, 32 bits are two elements, and 64 a token.
            __m512 acc[HEADS][4] = {};
            for (int64_t d = 0; d < D; d += 4) {
                ask.template ask<2>();
                __m512bh x[4];
#pragma GCC unroll 2
                for (int g = 0; g < 2; ++g) {
                    __m512i low, high;
                    look_up(keys[g], _mm512_loadu_si512(keys[g] + d * LANES), low, high);
                    x[2 * g] = (__m512bh)_mm512_unpacklo_epi8(low, high);
                    x[2 * g + 1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
                }
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    int64_t four;
                    memcpy(&four, q + d * BAND + i * 4, sizeof(four));
                    __m512bh query = (__m512bh)_mm512_set1_epi64(four);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x[j], query);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 2
                for (int g = 0; g < 2; ++g) {
                    __m512 sum = _mm512_shuffle_ps(acc[i][2 * g], acc[i][2 * g + 1], 0x88) +
                                 _mm512_shuffle_ps(acc[i][2 * g], acc[i][2 * g + 1], 0xdd);
                    _mm512_storeu_ps(scores + i * TILE + g * LANES, sum);
                }
            }
        }
        ahead = ask;
    }

    // acc[h] = acc[h] * shrink[h] + sum of weights[h, t] * v[t], in the order of `pair`.
    template <int HEADS, class T>
    static void accumulate(const float* weights, const float* shrink, const T* v, const Tile& tile,
                           int64_t D, float* acc, Ahead& ahead) {
        alignas(64) Bf16 rounded[HEADS * TILE];
        for (int i = 0; i < HEADS * TILE; i += 32) {
            __m512bh few = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + i + 16),
                                               _mm512_loadu_ps(weights + i));
            memcpy((void*)(rounded + i), &few, sizeof(few));
        }
        for (int64_t d = 0; d < D; d += 64) {
            Block<HEADS, T> block{rounded, shrink, v + d, tile, acc + d, width(D), D - d, ahead};
            if (D - d < 64) {
                block.template run<false>();
            } else {
                block.template run<true>();
            }
        }
    }

    // 64 dimensions of the values of two tokens, side by side in pairs. Whatever order of dimensions
    // is cheapest will do, as long as sums end up in their own: interleaving within 128 bits.
    template <bool WHOLE>
    __attribute__((always_inline)) static void pair(const Bf16* a, const Bf16* b, int64_t count,
                                                    __m512bh* x) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            __m512i first = load_bytes<WHOLE>(a + 32 * i, 2 * (count - 32 * i));
            __m512i second = load_bytes<WHOLE>(b + 32 * i, 2 * (count - 32 * i));
            x[2 * i] = (__m512bh)_mm512_unpacklo_epi16(first, second);
            x[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(first, second);
        }
    }

    // Element i of vector j of `pair` is this dimension of the 64.
    static int place(const Bf16*, int j, int i) { return j / 2 * 32 + i / 4 * 8 + j % 2 * 4 + i % 4; }

#ifdef __AVX512VBMI__
    template <bool WHOLE, class T>
    __attribute__((always_inline)) static void pair(const T* a, const T* b, int64_t count,
                                                    __m512bh* x) {
        __m512i first = load_bytes<WHOLE>(a, count), second = load_bytes<WHOLE>(b, count);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            __m512i bytes = i ? _mm512_unpackhi_epi8(first, second)
                              : _mm512_unpacklo_epi8(first, second);
            __m512i low, high;
            look_up(a, bytes, low, high);
            x[2 * i] = (__m512bh)_mm512_unpacklo_epi8(low, high);
            x[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
        }
    }

    template <class T>
    static int place(const T*, int j, int i) { return i / 4 * 16 + j * 4 + i % 4; }
#endif

    template <class T>
    static void put_in_order(int64_t D, float* acc) {
        for (int64_t d = 0; d < D; d += 64) {
            float mixed[64];
            memcpy(mixed, acc + d, sizeof(mixed));
            for (int j = 0; j < 4; ++j) {
                for (int i = 0; i < 16; ++i) acc[d + place((const T*)nullptr, j, i)] = mixed[j * 16 + i];
            }
        }
    }

    // At most 64 dimensions of the band's heads, the tokens two at a time.
    template <int HEADS, class T>
    struct Block {
        const Bf16* weights;
        const float* shrink;
        const T* values;
        const Tile& tile;
        float* acc;
        int64_t padded, left;
        Ahead& ahead;

        template <bool WHOLE>
        __attribute__((noinline)) void run() const {
            // Beside the first or the last of an odd number of tokens: its own infinity times a weight
            // of 0 would be NaN.
            static const T nothing[64] = {};
            __m512 sums[HEADS][4];
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    sums[i][j] = _mm512_loadu_ps(acc + i * padded + j * 16) * shrink[i];
                }
            }
            Ahead ask = ahead;
            for (int64_t t = tile.from / 2 * 2; t < tile.end; t += 2) {
                ask.template ask<2 * sizeof(T)>();
                __m512bh x[4];
                pair<WHOLE>(t >= tile.from ? values + tile.at[t] : nothing,
                            t + 1 < tile.end ? values + tile.at[t + 1] : nothing, left, x);
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    int32_t both;
                    memcpy(&both, weights + i * TILE + t, sizeof(both));
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
