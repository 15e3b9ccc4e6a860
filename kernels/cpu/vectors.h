// Vectors of fp32, as wide as the machine has them, and how other types become them and back.
//
// GCC's vector extensions give arithmetic on any machine; intrinsics stand where they alone are
// fast. NaN stays NaN everywhere: comparisons are written so that they fail for it.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define WIDE 1
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(WIDE) && defined(__AVX512BF16__)
#define BF16_DOT 1
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef uint8_t bvec __attribute__((vector_size(W)));

template <int BYTES> struct Narrow { typedef hvec type; };
template <> struct Narrow<1> { typedef bvec type; };
template <> struct Narrow<4> { typedef uvec type; };

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };
struct E4m3 { uint8_t bits; };
struct E5m2 { uint8_t bits; };

template <class To, class From>
static inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V, class T>
static inline V read(const T* from) {
    V v;
    memcpy(&v, from, sizeof(v));
    return v;
}

static inline vec splat(float x) { return x - vec{}; }

static inline vec pick(ivec where, vec yes, vec no) { return where ? yes : no; }

// sum + a * b, rounded once where the machine can. Where a result must not depend on what stands
// around it: GCC, tuned for Zen, joins or parts a product and a sum as it likes the loop.
static inline vec multiply_add(vec a, vec b, vec sum) {
#if defined(WIDE)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

static inline vec larger(vec a, vec b) { return pick(a > b, a, b); }

static inline float sum(vec x) {
#ifdef WIDE
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < W; ++i) total += x[i];
    return total;
#endif
}

static inline float largest(vec x) {
#ifdef WIDE
    return _mm512_reduce_max_ps((__m512)x);
#else
    float best = x[0];
    for (int i = 1; i < W; ++i) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

static inline int32_t largest_of(ivec x) {
#ifdef WIDE
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t best = x[0];
    for (int i = 1; i < W; ++i) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

static inline int32_t sum_of(ivec x) {
#ifdef WIDE
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < W; ++i) total += x[i];
    return total;
#endif
}

// The largest element of each of N vectors, at most 4: of vector i in elements i, i + 4, and so on.
// Of NaN there is no saying.
template <int N>
__attribute__((always_inline)) static inline vec largest_of_each(const vec* v) {
#ifdef WIDE
    __m512 x[4];
    for (int i = 0; i < 4; ++i) x[i] = (__m512)v[i < N ? i : N - 1];
    __m512 y[2];
    for (int i = 0; i < 2; ++i) {
        y[i] = _mm512_max_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]),
                             _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    }
    __m512 z = _mm512_max_ps(_mm512_shuffle_ps(y[0], y[1], 0x44),
                             _mm512_shuffle_ps(y[0], y[1], 0xee));
    z = _mm512_max_ps(z, _mm512_shuffle_f32x4(z, z, 0x4e));
    return (vec)_mm512_max_ps(z, _mm512_shuffle_f32x4(z, z, 0xb1));
#else
    vec result{};
    for (int i = 0; i < N; ++i) {
        float best = largest(v[i]);
        for (int j = i; j < W; j += 4) result[j] = best;
    }
    return result;
#endif
}

// Element `i` of the first four, everywhere, of a vector that repeats them.
template <int I>
__attribute__((always_inline)) static inline vec splat_of(vec x) {
#ifdef WIDE
    return (vec)_mm512_permute_ps((__m512)x, I * 0x55);
#else
    return splat(x[I]);
#endif
}

// --- to fp32 ---

static inline vec from_half(hvec bits) {
#if defined(WIDE)
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#else
    uvec h = __builtin_convertvector(bits, uvec);
    uvec magnitude = (h & 0x7fff) << 13;
    // The product makes normal numbers of subnormal ones.
    uvec finite = (uvec)((vec)magnitude * splat(0x1p112f));
    uvec special = magnitude | 0x7f800000;
    return (vec)(((h & 0x8000) << 16) | (magnitude >= (0x7c00u << 13) ? special : finite));
#endif
}

static inline vec load(const float* p) { return read<vec>(p); }

static inline vec load(const Bf16* p) {
    return (vec)(__builtin_convertvector(read<hvec>(p), uvec) << 16);
}

static inline vec load(const Fp16* p) { return from_half(read<hvec>(p)); }

static inline vec load(const E5m2* p) {
    return from_half(__builtin_convertvector(read<bvec>(p), hvec) << 8);
}

static inline vec load(const E4m3* p) {
    hvec h = __builtin_convertvector(read<bvec>(p), hvec);
    hvec magnitude = h & 0x7f;
    hvec bits = magnitude == 0x7f ? magnitude * 0 + 0x7e00 : magnitude << 7;
    // Eight more in the exponent's bias.
    return from_half(bits | ((h & 0x80) << 8)) * splat(256.0f);
}

// Element i of the 32-bit word in each lane.
template <class T>
static inline vec element_of(uvec words, int i) {
    typedef typename Narrow<sizeof(T)>::type narrow;
    narrow bits = __builtin_convertvector(words >> (i * 8 * sizeof(T)), narrow);
    T elements[W];
    memcpy((void*)elements, &bits, sizeof(elements));
    return load(elements);
}

template <>
inline vec element_of<float>(uvec words, int) { return (vec)words; }

template <>
inline vec element_of<Bf16>(uvec words, int i) {
    return (vec)(i ? words & 0xffff0000u : words << 16);
}

// --- from fp32, to nearest even ---

static inline void store(float* p, vec x) { memcpy(p, &x, sizeof(x)); }

static inline hvec to_bf16(vec x) {
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, hvec);
}

static inline void store(Bf16* p, vec x) {
    hvec h = to_bf16(x);
    memcpy(p, &h, sizeof(h));
}

static inline uint16_t to_half(float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);
    if (bits < 0x38800000) {
        // Adding a half puts the last bit of a subnormal number where fp32's last bit is.
        float shifted = bit_cast<float>(bits) + 0.5f;
        return sign | (bit_cast<uint32_t>(shifted) - 0x3f000000);
    }
    return sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
}

static inline void store(Fp16* p, vec x) {
#if defined(WIDE)
    __m256i h = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(p, &h, sizeof(h));
#elif defined(__F16C__)
    __m128i h = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(p, &h, sizeof(h));
#else
    for (int i = 0; i < W; ++i) p[i].bits = to_half(x[i]);
#endif
}

// Rounds to an 8-bit type whose finite numbers end at `most`. A subnormal one counts steps of
// 2 ** (23 - log2(counter)).
static inline uint8_t to_fp8(float x, int mantissa, uint32_t bias, float most, float least_normal,
                             float counter) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
    if (x != x) return sign | 0x7f;
    float size = bit_cast<float>(bits & 0x7fffffff);
    if (size > most) size = most;
    if (size < least_normal) {
        return sign | (bit_cast<uint32_t>(size + counter) - bit_cast<uint32_t>(counter));
    }
    int dropped = 23 - mantissa;
    bits = bit_cast<uint32_t>(size);
    bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return sign | ((bits >> dropped) - (bias << mantissa));
}

static inline void store(E4m3* p, vec x) {
    for (int i = 0; i < W; ++i) p[i].bits = to_fp8(x[i], 3, 120, 448.0f, 0x1p-6f, 0x1p14f);
}

static inline void store(E5m2* p, vec x) {
    for (int i = 0; i < W; ++i) p[i].bits = to_fp8(x[i], 2, 112, 57344.0f, 0x1p-14f, 0x1p7f);
}

// To the nearest whole number, to even from halfway. NaN and what is too large give any number.
static inline ivec nearest(vec x) {
#if defined(WIDE)
    return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return (ivec)_mm256_cvtps_epi32((__m256)x);
#else
    return __builtin_convertvector((x + splat(12582912.0f)) - splat(12582912.0f), ivec);
#endif
}

// --- a row's end, where fewer than W elements are left: nothing behind them is touched ---

template <class T>
static inline vec load_some(const T* p, int64_t count) {
    if (count >= W) return load(p);
    T whole[W] = {};
    memcpy(whole, p, count * sizeof(T));
    return load(whole);
}

template <class T>
static inline void store_some(T* p, vec x, int64_t count) {
    if (count >= W) return store(p, x);
    T whole[W];
    store(whole, x);
    memcpy(p, whole, count * sizeof(T));
}

// --- functions ---

// 2 ** x for x in [-0.5, 0.5].
static inline vec exp2_of_part(vec part) {
    vec power = splat(1.5403530394e-4f);
    power = power * part + splat(1.3333558147e-3f);
    power = power * part + splat(9.6181291076e-3f);
    power = power * part + splat(5.5504108665e-2f);
    power = power * part + splat(2.4022650696e-1f);
    power = power * part + splat(6.9314718056e-1f);
    power = power * part + splat(1.0f);
    return power;
}

// 2 ** x within two units in the last place; 0 below 2 ** -126, 2 ** 126 at most.
static inline vec exp2(vec x) {
#ifdef WIDE
    // Of NaN and a number, these take the second.
    __m512 inside = _mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x);
    inside = _mm512_min_ps(_mm512_set1_ps(126.0f), inside);
    vec whole = (vec)_mm512_roundscale_ps(inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vec part = (vec)inside - whole;
#else
    vec inside = pick(x < splat(-126.0f), splat(-126.0f), x);
    inside = pick(inside > splat(126.0f), splat(126.0f), inside);
    vec whole = (inside + splat(12582912.0f)) - splat(12582912.0f);
    vec part = inside - whole;
#endif
    vec power = exp2_of_part(part);
#ifdef WIDE
    __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(there, (__m512)power, (__m512)whole);
#else
    ivec exponent = __builtin_convertvector(whole, ivec) << 23;
    vec result = (vec)((ivec)power + exponent);
    // Of NaN the exponent is nonsense, and may have made a number of it.
    result = pick(x == x, result, x);
    return pick(x < splat(-126.0f), vec{}, result);
#endif
}

// The same of a number that is not above 0, or hardly: a few instructions less.
static inline vec exp2_below(vec x) {
#ifdef WIDE
    __m512 inside = _mm512_max_ps(_mm512_set1_ps(-1000.0f), (__m512)x);
    vec whole = (vec)_mm512_roundscale_ps(inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vec)_mm512_scalef_ps((__m512)exp2_of_part((vec)inside - whole), (__m512)whole);
#else
    return exp2(x);
#endif
}

static inline vec tanh(vec x) {
    return splat(1.0f) - splat(2.0f) / (exp2(x * splat(2.8853900818f)) + splat(1.0f));
}

// Always inline: GCC takes a function that only asks for one without effect, and drops its calls.
__attribute__((always_inline)) static inline void prefetch(const void* p) {
    __builtin_prefetch(p, 0, 2);
}

// For what is needed soon.
__attribute__((always_inline)) static inline void prefetch_near(const void* p) {
    __builtin_prefetch(p, 0, 3);
}
