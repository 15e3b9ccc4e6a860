// A linear layer over weights of 4 or 8 bits, in groups of 32 inputs with a scale each.
//
// A weight is scale * value + minimum, value being unsigned. Inputs are rounded to 8 bits, group by
// group and row by row; products within a group are sums of integers, hence exact, and groups are
// added in fp32, in order: a row's result depends on nothing but the row.
#pragma once

#include "linear.h"

constexpr int64_t GROUP = 32;
constexpr int QUANTISED_STRIP = 6;
// How far ahead of its use memory is asked for that is in the second cache.
constexpr int64_t NEAR_BYTES = 2 << 10;

#if defined(WIDE) && defined(__AVX512VNNI__)
#define INT8_DOT 1
constexpr int64_t BYTES_DEPTH = 4;
#else
constexpr int64_t BYTES_DEPTH = 1;
#endif

// Mirrored field by field in kernels/quantised_linear.py.
struct QuantisedLinear {
    Linear plain;         // its weight is packed here
    int64_t bits;         // 4 or 8
    int64_t zero_point;   // with no minimums: what stands for 0
    int64_t has_minimums;
    int64_t has_fp32_scales;  // and minimums; else they are fp16

    int64_t groups() const { return (plain.I + GROUP - 1) / GROUP; }
    int64_t scale_bytes() const { return has_fp32_scales ? 4 : 2; }

    // Of one group of a panel: values, scales, minimums.
    int64_t values_bytes() const { return GROUP * VECS * W * bits / 8; }
    int64_t group_bytes() const {
        return values_bytes() + (1 + has_minimums) * VECS * W * scale_bytes();
    }
    int64_t panel_bytes() const { return groups() * group_bytes(); }

    // Outputs of a panel, and panels.
    int64_t outputs() const { return plain.gate ? W : VECS * W; }
    int64_t panels() const { return (plain.O + outputs() - 1) / outputs(); }
};

// 32 inputs of a row, rounded.
struct InputGroup {
    int8_t values[GROUP];
    float scale;
    float sum;      // of the rounded inputs, times the scale
    int32_t start;  // what values that stand for 0 add to a sum of products, negated
    int32_t unused;
};

// Rows go through a panel in strips, and lie so: strip by strip, group by group, row by row.
struct Strips {
    int64_t T, count;

    explicit Strips(int64_t T) : T(T), count((T + QUANTISED_STRIP - 1) / QUANTISED_STRIP) {}

    int64_t first_row(int64_t strip) const { return T * strip / count; }
    int64_t rows(int64_t strip) const { return first_row(strip + 1) - first_row(strip); }
};

// Writes groups `stride` apart.
template <class A>
static void quantise_row(const A* x, int64_t I, int64_t zero_point, InputGroup* to,
                         int64_t stride) {
    for (int64_t first = 0; first < I; first += GROUP, to += stride) {
        // Sizes compare as whole numbers do, and infinity and NaN are the largest.
        ivec most{};
        for (int64_t i = first; i < first + GROUP && i < I; i += W) {
            ivec size = (ivec)load_some(x + i, I - i) & 0x7fffffff;
            most = size > most ? size : most;
        }
        float largest = bit_cast<float>(largest_of(most)), scale = largest / 127;
        vec factor = splat(scale > 0 ? 1 / scale : 0);
        ivec sums{};
        for (int64_t i = first; i < first + GROUP; i += W) {
            ivec whole = nearest(i < I ? load_some(x + i, I - i) * factor : vec{});
            bvec bytes = __builtin_convertvector((uvec)whole, bvec);
            memcpy(to->values + (i - first), &bytes, sizeof(bytes));
            sums += whole;
        }
        int32_t sum = sum_of(sums);
        // NaN for what has no scale: of infinity and NaN all of the row becomes NaN.
        scale += largest - largest;
        to->scale = scale;
        to->sum = scale * sum;
        to->start = (int32_t)(-zero_point * sum);
    }
}

static inline vec load_scales(const char* from, bool is_fp32, int64_t v) {
    return is_fp32 ? load((const float*)from + v * W) : load((const Fp16*)from + v * W);
}

// Sums of products of one group, whole numbers, for ROWS rows.
#ifdef INT8_DOT
template <int BITS, int ROWS>
static inline __attribute__((always_inline)) void
multiply_group(const InputGroup* x, const char* panel, vec (*products)[VECS]) {
    __m512i sums[ROWS][VECS];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < VECS; ++j) sums[i][j] = _mm512_set1_epi32(x[i].start);
    }
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int u = 0; u < 8; u += 2) {
        __m512i weights[2][VECS];
#pragma GCC unroll 2
        for (int j = 0; j < VECS; ++j) {
            if (BITS == 4) {
                __m512i both = _mm512_loadu_si512(panel + (u / 2 * VECS + j) * 64);
                weights[0][j] = _mm512_and_si512(both, low);
                weights[1][j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            } else {
                weights[0][j] = _mm512_loadu_si512(panel + (u * VECS + j) * 64);
                weights[1][j] = _mm512_loadu_si512(panel + ((u + 1) * VECS + j) * 64);
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; ++i) {
                int32_t four;
                memcpy(&four, x[i].values + (u + half) * 4, sizeof(four));
                __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 2
                for (int j = 0; j < VECS; ++j) {
                    sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], weights[half][j], inputs);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < VECS; ++j) products[i][j] = (vec)_mm512_cvtepi32_ps(sums[i][j]);
    }
}
#else
// In fp32, which holds all whole numbers there can be.
template <int BITS, int ROWS>
static inline void multiply_group(const InputGroup* x, const char* panel, vec (*products)[VECS]) {
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < VECS; ++j) products[i][j] = splat((float)x[i].start);
    }
    for (int u = 0; u < GROUP; ++u) {
        for (int j = 0; j < VECS; ++j) {
            int at = BITS == 4 ? u / 2 : u;
            bvec bytes = read<bvec>(panel + (at * VECS + j) * W);
            if (BITS == 4) bytes = u % 2 ? bytes >> 4 : bytes & 15;
            vec weights = __builtin_convertvector(__builtin_convertvector(bytes, ivec), vec);
            for (int i = 0; i < ROWS; ++i) {
                products[i][j] += splat((float)x[i].values[u]) * weights;
            }
        }
    }
}
#endif

// ROWS rows meet a panel. Meanwhile memory from `ahead` on is asked for.
template <int BITS, int ROWS>
static void multiply_quantised(const QuantisedLinear& a, const InputGroup* x, const char* panel,
                               const char* ahead, bool is_near, vec* results) {
    vec sums[ROWS][VECS] = {};
    int64_t to_scales = a.values_bytes(), group_bytes = a.group_bytes();
    int64_t to_minimums = to_scales + VECS * W * a.scale_bytes();
    bool is_fp32 = a.has_fp32_scales, has_minimums = a.has_minimums;
    for (int64_t g = a.groups(); g > 0; --g) {
        if (is_near) {
            for (int64_t at = 0; at < group_bytes; at += 64) prefetch_near(ahead + at);
        } else if (ROWS > 2) {
            for (int64_t at = 0; at < group_bytes; at += 64) prefetch(ahead + at);
        }
        vec products[ROWS][VECS];
        multiply_group<BITS, ROWS>(x, panel, products);
#pragma GCC unroll 2
        for (int j = 0; j < VECS; ++j) {
            vec scales = load_scales(panel + to_scales, is_fp32, j);
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; ++i) {
                sums[i][j] += products[i][j] * splat(x[i].scale) * scales;
            }
        }
        if (has_minimums) {
#pragma GCC unroll 2
            for (int j = 0; j < VECS; ++j) {
                vec minimums = load_scales(panel + to_minimums, is_fp32, j);
#pragma GCC unroll 6
                for (int i = 0; i < ROWS; ++i) {
                    sums[i][j] += splat(x[i].sum) * minimums;
                }
            }
        }
        x += ROWS;
        panel += group_bytes;
        ahead += group_bytes;
    }
    memcpy((void*)results, sums, sizeof(sums));
}

// The same for a number of rows from 1 to QUANTISED_STRIP.
template <int BITS, int ROWS = QUANTISED_STRIP>
static void multiply_quantised_rows(const QuantisedLinear& a, const InputGroup* x, int64_t rows,
                                    const char* panel, const char* ahead, bool is_near,
                                    vec* results) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) {
            return multiply_quantised_rows<BITS, ROWS - 1>(a, x, rows, panel, ahead, is_near,
                                                           results);
        }
    }
    multiply_quantised<BITS, ROWS>(a, x, panel, ahead, is_near, results);
}

// Rows, rounded.
template <class A>
static Lines quantise_rows(const QuantisedLinear& a, const Inputs& in, const Strips& strips,
                           int64_t num_threads) {
    int64_t groups = a.groups();
    Lines memory(in.T * groups * sizeof(InputGroup));
    over_units(strips.count, in.T < 32 ? 1 : num_threads, [&](int64_t strip) {
        int64_t first = strips.first_row(strip), rows = strips.rows(strip);
        InputGroup* to = (InputGroup*)memory.memory.get() + first * groups;
        for (int64_t i = 0; i < rows; ++i) {
            quantise_row((const A*)in.x + (first + i) * in.x_stride, a.plain.I,
                         a.has_minimums ? 0 : a.zero_point, to + i, rows);
        }
    });
    return memory;
}

// One panel meets some strips. The first one reads it and asks for the next panel; for the others
// it is in the second cache, and is asked for a little before it is needed.
template <class A>
static void multiply_panel(const QuantisedLinear& a, const Inputs& in, const Strips& strips,
                           int64_t first, int64_t end, const InputGroup* x, int64_t p) {
    const char* panel = (const char*)a.plain.weight + p * a.panel_bytes();
    Target<A> target = target_of<A>(a.plain, in, p * a.outputs());
    vec results[QUANTISED_STRIP * VECS];
    for (int64_t strip = first; strip < end; ++strip) {
        int64_t row = strips.first_row(strip), rows = strips.rows(strip);
        const InputGroup* of_strip = x + row * a.groups();
        const char* ahead = panel + (end - first == 1 ? AHEAD_BYTES : a.panel_bytes());
        bool is_near = strip > first;
        if (is_near) ahead = panel + NEAR_BYTES;
        if (a.bits == 4) {
            multiply_quantised_rows<4>(a, of_strip, rows, panel, ahead, is_near, results);
        } else {
            multiply_quantised_rows<8>(a, of_strip, rows, panel, ahead, is_near, results);
        }
        if (in.more) {
            int64_t after = p + 1 < a.panels() ? p + 1 : p;
            in.more->add(in.more->what, p, after, row, rows, results);
        }
        target.write(results, row, rows);
    }
}

template <class A>
static void quantised_linear(const QuantisedLinear& a, const Inputs& in) {
    int64_t panels = a.panels();
    // Products of bytes are twice as fast as those of bf16.
    int64_t num_threads = threads_for(in.num_threads, panels * a.panel_bytes(),
                                      in.T * panels * VECS * W * a.groups() * GROUP);
    Strips strips(in.T);
    Lines rounded = quantise_rows<A>(a, in, strips, num_threads);
    const InputGroup* x = (const InputGroup*)rounded.memory.get();
    Units units(strips.count, ROWS_AT_ONCE / QUANTISED_STRIP, panels, num_threads);
    over_units(units.count(), num_threads, [&](int64_t unit) {
        for (int64_t p = units.first_panel(unit); p < units.end_panel(unit); ++p) {
            multiply_panel<A>(a, in, strips, units.first_row(unit), units.end_row(unit), x, p);
        }
    });
}

// --- packing ---

// Unpacked weights of a layer: values [rows, I], scales and minimums [rows, groups] as fp32.
struct Unpacked {
    const uint8_t* values;
    const float *scales, *minimums;
};

static void pack_scales(const QuantisedLinear& a, const float* from, const int64_t* rows, int64_t g,
                        char* to) {
    for (int64_t v = 0; v < VECS; ++v) {
        vec scales;
        for (int64_t lane = 0; lane < W; ++lane) {
            int64_t row = rows[v * W + lane];
            scales[lane] = row < 0 ? 0 : from[row * a.groups() + g];
        }
        if (a.has_fp32_scales) {
            store((float*)to + v * W, scales);
        } else {
            store((Fp16*)to + v * W, scales);
        }
    }
}

static void pack_group(const QuantisedLinear& a, const Unpacked& from, const int64_t* rows,
                       int64_t g, char* to) {
    typedef std::conditional_t<BYTES_DEPTH == 1, uint8_t, uint32_t> Unit;
    static_assert(sizeof(Unit) == BYTES_DEPTH, "inputs of an output that stand together");
    constexpr int64_t UNITS = GROUP / BYTES_DEPTH;
    for (int64_t n = 0; n < VECS * W; ++n) {
        Unit units[UNITS] = {};
        if (rows[n] >= 0) {
            const uint8_t* values = from.values + rows[n] * a.plain.I + g * GROUP;
            memcpy(units, values, std::min<int64_t>(GROUP, a.plain.I - g * GROUP));
        }
        // Of 4 bits two units lie in one, the first below the second.
        int64_t in_one = a.bits == 4 ? 2 : 1;
        for (int64_t u = 0; u < UNITS; u += in_one) {
            Unit unit = in_one == 2 ? units[u] | units[u + 1] << 4 : units[u];
            memcpy(to + (u / in_one * VECS * W + n) * BYTES_DEPTH, &unit, sizeof(unit));
        }
    }
    char* scales = to + a.values_bytes();
    pack_scales(a, from.scales, rows, g, scales);
    if (a.has_minimums) {
        pack_scales(a, from.minimums, rows, g, scales + VECS * W * a.scale_bytes());
    }
}

extern "C" int64_t pagemill_quantised_bytes(const QuantisedLinear* a) {
    return a->panels() * a->panel_bytes();
}

extern "C" void pagemill_quantised_pack(const QuantisedLinear* a, const uint8_t* values,
                                        const float* scales, const float* minimums, char* packed,
                                        int64_t num_threads) {
    over_units(a->panels(), num_threads, [&](int64_t p) {
        int64_t rows[VECS * W];
        for (int64_t n = 0; n < VECS * W; ++n) {
            rows[n] = weight_row(a->plain, p * a->outputs(), n / W, n % W);
        }
        char* to = packed + p * a->panel_bytes();
        for (int64_t g = 0; g < a->groups(); ++g, to += a->group_bytes()) {
            pack_group(*a, {values, scales, minimums}, rows, g, to);
        }
    });
}

// Returns 0; 1 if memory is short, 2 if the type is not known.
static int run_quantised(const QuantisedLinear& a, const Inputs& in) {
    try {
        return with_weights(a.plain.dtype, [&](auto, auto type) {
            quantised_linear<decltype(type)>(a, in);
        });
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" int pagemill_quantised(const QuantisedLinear* a, const void* x, int64_t x_stride,
                                  int64_t T, void* out, int64_t out_stride, int64_t num_threads) {
    return run_quantised(*a, {x, out, x_stride, out_stride, T, num_threads, nullptr});
}
