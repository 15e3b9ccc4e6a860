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

// Converts at most 64 numbers: both bytes of each are looked up, and put together.
template <class T>
__attribute__((always_inline)) static inline void widen(const T* from, int64_t count, Bf16* to) {
    __mmask64 mask = count >= 64 ? ~0ull : (1ull << count) - 1;
    __m512i bytes = _mm512_maskz_loadu_epi8(mask, from);
    const Fp8Table& table = table_of(from);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), bytes,
                                           _mm512_load_si512(table.low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), bytes,
                                            _mm512_load_si512(table.high + 64));
    high = _mm512_or_si512(high, _mm512_and_si512(bytes, _mm512_set1_epi8((char)0x80)));
    const SideBySide& order = SIDE_BY_SIDE;
    __m512i pairs = _mm512_permutex2var_epi8(low, _mm512_load_si512(order.first), high);
    _mm512_storeu_si512(to, pairs);
    if (count <= 32) return;
    pairs = _mm512_permutex2var_epi8(low, _mm512_load_si512(order.second), high);
    _mm512_storeu_si512(to + 32, pairs);
}

#else

template <class T>
static inline void widen(const T* from, int64_t count, Bf16* to) {
    for (int64_t d = 0; d < 64 && d < count; d += W) store(to + d, load_some(from + d, count - d));
}

#endif

// Weights are rounded to bf16, as a tensor core would have them.
struct DotBf16 {
    typedef Bf16 Query;

    static int64_t width(int64_t D) { return round_up(D, 32); }

    template <class T>
    static constexpr bool converts() { return sizeof(T) == 1; }

    static __m512bh pairs(const Bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

    static __m512bh some_pairs(const Bf16* p, __mmask32 mask) {
        return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
    }

    static __mmask32 first_of(int64_t count) {
        return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1;
    }

    // Returns rows of bf16: those of the cache, or converted ones in `staging`.
    static const Bf16* rows_of(const Bf16* cache, const TileRows& rows, int64_t offset, int64_t,
                               float*, int64_t* starts) {
        for (int64_t t = 0; t < rows.count; ++t) starts[t] = rows.here[t] + offset;
        return cache;
    }

    template <class T>
    static const Bf16* rows_of(const T* cache, const TileRows& rows, int64_t offset, int64_t D,
                               float* staging, int64_t* starts) {
        Bf16* converted = (Bf16*)staging;
        int64_t padded = width(D);
        for (int64_t t = 0; t < rows.count; ++t) {
            starts[t] = t * padded;
            const T *row = cache + rows.here[t] + offset, *next = cache + rows.next[t] + offset;
            for (int64_t d = 0; d < D; d += 64) {
                prefetch(next + d);
                widen(row + d, D - d, converted + starts[t] + d);
            }
        }
        return converted;
    }

    template <class T>
    static void scores(const Bf16* q, int64_t heads, const T* k, const TileRows& rows,
                       int64_t offset, int64_t D, float* products, float* staging, Ahead& ahead) {
        int64_t starts[TILE + 16];
        const Bf16* keys = rows_of(k, rows, offset, D, staging, starts);
        // Behind the last token its key stands again.
        for (int64_t t = rows.count; t < TILE + 16; ++t) starts[t] = starts[rows.count - 1];
        for (int64_t h = 0; h < heads;) {
            const Bf16* query = q + h * width(D);
            float* out = products + h * TILE;
            int64_t step = heads - h >= 4 ? 4 : heads - h >= 2 ? 2 : 1;
            if (step == 4) dot<4>(query, keys, starts, rows.count, D, out, ahead);
            if (step == 2) dot<2>(query, keys, starts, rows.count, D, out, ahead);
            if (step == 1) dot<1>(query, keys, starts, rows.count, D, out, ahead);
            h += step;
        }
    }

    // Products of HEADS queries and 16 / HEADS keys at a time, in 16 registers.
    template <int HEADS>
    static void dot(const Bf16* query, const Bf16* keys, const int64_t* starts, int64_t count,
                    int64_t D, float* products, Ahead& ahead) {
        constexpr int TOKENS = 16 / HEADS;
        int64_t padded = width(D), whole = D & ~31;
        __mmask32 mask = first_of(D - whole);
        Ahead ask = ahead;
        for (int64_t t = 0; t < count; t += TOKENS) {
            const Bf16* key[TOKENS];
            for (int i = 0; i < TOKENS; ++i) key[i] = keys + starts[t + i];
            vec acc[16] = {};
            ask.ask(ahead.per_products);
            for (int64_t d = 0; d < whole; d += 32) {
                __m512bh x[HEADS];
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; ++h) x[h] = pairs(query + h * padded + d);
#pragma GCC unroll 16
                for (int i = 0; i < TOKENS; ++i) {
                    __m512bh y = pairs(key[i] + d);
#pragma GCC unroll 4
                    for (int h = 0; h < HEADS; ++h) {
                        vec& sum = acc[h * TOKENS + i];
                        sum = (vec)_mm512_dpbf16_ps((__m512)sum, x[h], y);
                    }
                }
            }
            if (mask) {
#pragma GCC unroll 16
                for (int i = 0; i < TOKENS; ++i) {
                    __m512bh y = some_pairs(key[i] + whole, mask);
#pragma GCC unroll 4
                    for (int h = 0; h < HEADS; ++h) {
                        __m512bh x = pairs(query + h * padded + whole);
                        vec& sum = acc[h * TOKENS + i];
                        sum = (vec)_mm512_dpbf16_ps((__m512)sum, x, y);
                    }
                }
            }
            float found[16];
            store(found, sums(acc));
            for (int h = 0; h < HEADS; ++h) {
                memcpy(products + h * TILE + t, found + h * TOKENS, TOKENS * sizeof(float));
            }
        }
        ahead = ask;
    }

    template <class T>
    static void accumulate(const float* weights, const float* shrink, int64_t heads, const T* v,
                           const TileRows& rows, int64_t offset, int64_t D, float* acc,
                           float* staging, Ahead& ahead) {
        int64_t starts[TILE];
        const Bf16* values = rows_of(v, rows, offset, D, staging, starts);
        Bf16* rounded = (Bf16*)(staging + TILE * width(D) / 2);
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t t = 0; t < rows.count; t += W) {
                store(rounded + h * TILE + t, load(weights + h * TILE + t));
            }
        }
        for (int64_t h = 0; h < heads;) {
            int64_t step = heads - h >= 4 ? 4 : heads - h;
            for (int64_t d = 0; d < D; d += 64) {
                Block block{rounded + h * TILE, shrink + h, values + d, starts, rows.count,
                            acc + h * width(D) + d, width(D), D - d,
                            ahead};
                if (step == 4) block.run<4>();
                if (step == 3) block.run<3>();
                if (step == 2) block.run<2>();
                if (step == 1) block.run<1>();
            }
            h += step;
        }
    }

    // At most 64 dimensions of some heads, the tokens two at a time. Behind the last token stands
    // a weight of 0.
    struct Block {
        const Bf16* weights;
        const float* shrink;
        const Bf16* values;
        const int64_t* starts;
        int64_t count;
        float* acc;
        int64_t padded, left;
        Ahead& ahead;

        template <int HEADS>
        void run() const {
            if (left >= 64) return run<HEADS, 4, false>();
            if (left > 32) return run<HEADS, 4, true>();
            run<HEADS, 2, true>();
        }

        template <int HEADS, int VECS, bool MASKED>
        void run() const {
            const __m512i take_low = interleaving(0), take_high = interleaving(16);
            const __mmask32 low = first_of(left), high = first_of(left - 32);
            __m512 sums[HEADS][VECS];
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) {
                    sums[i][j] = _mm512_loadu_ps(acc + i * padded + j * 16) * shrink[i];
                }
            }
            Ahead ask = ahead;
            int32_t per = ahead.per_sums * HEADS;
            for (int64_t t = 0; t < count; t += 2) {
                const Bf16 *a = values + starts[t], *b = values + starts[t + 1 < count ? t + 1 : t];
                ask.ask(per);
                __m512bh x[VECS];
#pragma GCC unroll 2
                for (int j = 0; j < VECS / 2; ++j) {
                    __m512i first, second;
                    if (MASKED) {
                        first = (__m512i)some_pairs(a + 32 * j, j ? high : low);
                        second = (__m512i)some_pairs(b + 32 * j, j ? high : low);
                    } else {
                        first = (__m512i)pairs(a + 32 * j);
                        second = (__m512i)pairs(b + 32 * j);
                    }
                    x[2 * j] = (__m512bh)_mm512_permutex2var_epi16(first, take_low, second);
                    x[2 * j + 1] = (__m512bh)_mm512_permutex2var_epi16(first, take_high, second);
                }
#pragma GCC unroll 4
                for (int i = 0; i < HEADS; ++i) {
                    int32_t both;
                    memcpy(&both, weights + i * TILE + t, sizeof(both));
                    // The last of an odd number of tokens stands in both places.
                    __m512bh pair = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
                    for (int j = 0; j < VECS; ++j) {
                        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], pair, x[j]);
                    }
                }
            }
            ahead = ask;
#pragma GCC unroll 4
            for (int i = 0; i < HEADS; ++i) {
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) {
                    _mm512_storeu_ps(acc + i * padded + j * 16, sums[i][j]);
                }
            }
        }
    };

    // Indices that take 16 elements of each source in turn, from `first` on.
    static __m512i interleaving(int first) {
        __m512i index = _mm512_set1_epi32(32 << 16);
        __m512i count = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        return _mm512_add_epi32(index, _mm512_or_si512(count, _mm512_slli_epi32(count, 16)));
    }
};
