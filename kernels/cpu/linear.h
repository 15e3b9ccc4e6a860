// A linear layer, y = x @ weight.T + bias, over a weight packed for it.
//
// Each output is one sum, in one register, over all inputs in order: it depends neither on the
// other rows, nor on how many there are, nor on the number of threads.
#pragma once

#include "activation.h"
#include "attention.h"
#include "threads.h"

// Mirrored field by field in kernels/packed_linear.py.
struct Linear {
    const void* weight;  // packed
    const void* bias;    // [O], or null
    int64_t O, I;        // outputs, inputs
    int64_t gate;        // 0: none; else weight rows are [gate; up], and the outputs
                         // activate(gate) * up: O of them
    int64_t dtype;
};

// What is added to a panel's sums before they are written.
struct MoreSums {
    // Adds to `rows` rows from `first` on. `next`: the panel that the thread needs behind this one.
    void (*add)(const void* what, int64_t panel, int64_t next, int64_t first, int64_t rows,
                vec* sums);
    const void* what;
};

// What one call brings. Strides count elements.
struct Inputs {
    const void* x;  // [T, I], rows contiguous
    void* out;      // [T, O], rows contiguous
    int64_t x_stride, out_stride;
    int64_t T;
    int64_t num_threads;
    const MoreSums* more;  // or null
};

// A panel is VECS vectors of outputs, input by input; DEPTH inputs of an output stand together. Of
// a gated layer, the first vector is of gates and the second of what they scale. A block of
// registers is STRIP rows by a panel.
constexpr int VECS = 2;
constexpr int STRIP = W == 16 ? 12 : 6;

// Weights of any type, multiplied in fp32.
template <class T>
struct WeightsFp32 {
    typedef T Weight;
    typedef float Input;
    typedef vec Loaded;
    static constexpr int DEPTH = 1;

    static vec get(const T* weights) { return load(weights); }
    static vec multiply(vec sums, const float* x, vec weights) { return sums + splat(*x) * weights; }
};

#ifdef BF16_DOT
struct WeightsBf16 {
    typedef Bf16 Weight, Input;
    typedef __m512bh Loaded;
    static constexpr int DEPTH = 2;

    static __m512bh get(const Bf16* weights) { return (__m512bh)_mm512_loadu_si512(weights); }

    static vec multiply(vec sums, const Bf16* x, __m512bh weights) {
        int32_t pair;
        memcpy(&pair, x, sizeof(pair));
        return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), weights);
    }
};
#else
typedef WeightsFp32<Bf16> WeightsBf16;
#endif

// --- writing ---

template <class A>
static inline void put(A* to, vec x, int64_t count) { store_some(to, x, count); }

#ifdef BF16_DOT
// One instruction instead of six. Numbers below 2 ** -126 become zeros.
static inline void put(Bf16* to, vec x, int64_t count) {
    __mmask16 mask = count >= W ? 0xffff : (1u << count) - 1;
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#endif

// Where a panel's outputs go.
template <class A>
struct Target {
    A* out;         // of row 0 and the panel's first output
    const A* bias;  // of the panel's first output, or null
    int64_t stride, left;  // left: outputs from the panel's first on
    int64_t to_up;  // from a gate's bias to its partner's; 0: the layer is not gated
    int64_t activation;  // of a gate

    void write(const vec* sums, int64_t first, int64_t rows) const {
        for (int64_t row = first; row < first + rows; ++row, sums += VECS) {
            A* to = out + row * stride;
            if (to_up) {
                vec gate = sums[0], up = sums[1];
                if (bias) {
                    gate += load_some(bias, left);
                    up += load_some(bias + to_up, left);
                }
                put(to, activate(activation, gate) * up, left);
                continue;
            }
            for (int j = 0; j < VECS && j * W < left; ++j) {
                vec y = sums[j];
                if (bias) y += load_some(bias + j * W, left - j * W);
                put(to + j * W, y, left - j * W);
            }
        }
    }
};

template <class A>
static Target<A> target_of(const Linear& a, const Inputs& in, int64_t output) {
    return {(A*)in.out + output, a.bias ? (const A*)a.bias + output : nullptr, in.out_stride,
            a.O - output, a.gate ? a.O : 0, a.gate};
}

// --- arithmetic ---

// ROWS rows of x, `pitch` elements apart, meet a panel. Meanwhile memory from `ahead` on is asked
// for, as much as the panel has.
template <class P, int ROWS>
static void multiply_strip(const typename P::Input* x, int64_t pitch,
                           const typename P::Weight* panel, int64_t units, const char* ahead,
                           vec* results) {
    vec sums[ROWS][VECS] = {};
    // Three rows from each pointer: one for each row would not fit in registers.
    const typename P::Input* from[4] = {x, x + 3 * pitch, x + 6 * pitch, x + 9 * pitch};
    constexpr int64_t BYTES = W * P::DEPTH * sizeof(typename P::Weight);
    for (int64_t u = 0; u < units; ++u) {
        typename P::Loaded weights[VECS];
#pragma GCC unroll 2
        for (int j = 0; j < VECS; ++j) {
            weights[j] = P::get(panel + j * W * P::DEPTH);
            if (ROWS > 4) prefetch(ahead + j * BYTES);
        }
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
            for (int j = 0; j < VECS; ++j) {
                sums[i][j] = P::multiply(sums[i][j], from[i / 3] + i % 3 * pitch, weights[j]);
            }
        }
        panel += VECS * W * P::DEPTH;
        ahead += VECS * BYTES;
#pragma GCC unroll 4
        for (int i = 0; i < (ROWS + 2) / 3; ++i) from[i] += P::DEPTH;
    }
    memcpy((void*)results, sums, sizeof(sums));
}

// The same for a number of rows from 1 to STRIP.
template <class P, int ROWS = STRIP>
static void multiply_rows(int64_t rows, const typename P::Input* x, int64_t pitch,
                          const typename P::Weight* panel, int64_t units, const char* ahead,
                          vec* results) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) {
            return multiply_rows<P, ROWS - 1>(rows, x, pitch, panel, units, ahead, results);
        }
    }
    multiply_strip<P, ROWS>(x, pitch, panel, units, ahead, results);
}

// --- layout ---

// Returns the row of the weight that stands in vector `v` at `lane` of the panel whose outputs start
// at `output`; -1: none.
static inline int64_t weight_row(const Linear& a, int64_t output, int64_t v, int64_t lane) {
    int64_t row = output + (a.gate ? 0 : v * W) + lane;
    if (row >= a.O) return -1;
    return a.gate ? row + v * a.O : row;
}

template <class P>
struct Layout {
    int64_t outputs;  // of a panel
    int64_t panels, units, panel_size;

    explicit Layout(const Linear& a) {
        outputs = a.gate ? W : VECS * W;
        panels = (a.O + outputs - 1) / outputs;
        units = (a.I + P::DEPTH - 1) / P::DEPTH;
        panel_size = VECS * W * units * P::DEPTH;
    }

    int64_t size() const { return panels * panel_size; }
};

// --- one call ---

// Rows that go through a panel together: their inputs must stay in the second cache.
constexpr int64_t ROWS_AT_ONCE = 192;
// Units of work per thread: the last one to end keeps the others waiting for one of them.
constexpr int64_t UNITS_PER_THREAD = 12;
// In bytes read, or eight operations each: what a thread must have to do for waking it to pay.
constexpr int64_t WORK_PER_THREAD = 256 << 10;
// How far ahead of a single strip of rows memory is asked for.
constexpr int64_t AHEAD_BYTES = 8 << 10;

static inline int64_t threads_for(int64_t num_threads, int64_t bytes, int64_t operations) {
    return std::max<int64_t>(1, std::min(num_threads, (bytes + operations / 8) / WORK_PER_THREAD));
}

// How rows and panels are cut into units of work.
struct Units {
    int64_t rows, panels, row_blocks, chunks;

    Units(int64_t rows, int64_t at_once, int64_t panels, int64_t num_threads)
        : rows(rows), panels(panels) {
        row_blocks = (rows + at_once - 1) / at_once;
        int64_t most = UNITS_PER_THREAD * num_threads;
        // Of few panels each is a unit: one of two panels at the end would be waited for.
        chunks = num_threads == 1 ? 1 : panels < 2 * most ? panels : most;
    }

    int64_t count() const { return row_blocks * chunks; }
    int64_t first_row(int64_t unit) const { return rows * (unit / chunks) / row_blocks; }
    int64_t end_row(int64_t unit) const { return rows * (unit / chunks + 1) / row_blocks; }
    int64_t first_panel(int64_t unit) const { return panels * (unit % chunks) / chunks; }
    int64_t end_panel(int64_t unit) const { return panels * (unit % chunks + 1) / chunks; }

    // The panel that this thread will most likely need behind this one: others take the units
    // between.
    int64_t panel_after(int64_t unit, int64_t panel, int64_t num_threads) const {
        return panel + 1 < end_panel(unit) ? panel + 1 : first_panel(unit + num_threads);
    }
};

// Rows of x as products take them: where they lie, if they may, or converted.
template <class P, class A>
struct Prepared {
    const typename P::Input* x;
    int64_t pitch;
    Lines copy;

    Prepared(const Linear& a, const Inputs& in, int64_t num_threads)
        : pitch(pitch_of(a.I)), copy(fits(a, in) ? 0 : in.T * pitch * sizeof(*x)) {
        if (!copy.memory) {
            x = (const typename P::Input*)in.x;
            pitch = in.x_stride;
            return;
        }
        typename P::Input* rows = (typename P::Input*)copy.memory.get();
        x = rows;
        over_units((in.T + 15) / 16, num_threads, [&](int64_t unit) {
            for (int64_t t = unit * 16; t < in.T && t < unit * 16 + 16; ++t) {
                convert((const A*)in.x + t * in.x_stride, a.I, rows + t * pitch);
            }
        });
    }

    // Rows a large power of two apart would crowd into a few lines of the first cache: of STRIP rows
    // 2 KiB apart every second one has the same.
    static int64_t pitch_of(int64_t I) { return round_up(I, 2 * W) + 2 * W; }

    static bool fits(const Linear& a, const Inputs& in) {
        if (!std::is_same<A, typename P::Input>::value || a.I % P::DEPTH) return false;
        return in.T <= 4 || in.x_stride * sizeof(A) % 2048;
    }

    static void convert(const A* from, int64_t I, A* to) {
        memcpy((void*)to, from, I * sizeof(A));
        memset((void*)(to + I), 0, W * sizeof(A));
    }

    template <class To>
    static void convert(const A* from, int64_t I, To* to) {
        for (int64_t i = 0; i < I; i += W) store(to + i, load_some(from + i, I - i));
    }
};

template <class P, class A>
static void linear(const Linear& a, const Inputs& in) {
    Layout<P> layout(a);
    const typename P::Weight* weight = (const typename P::Weight*)a.weight;
    int64_t num_threads = threads_for(in.num_threads, layout.size() * sizeof(*weight),
                                      2 * in.T * layout.size());
    Prepared<P, A> prepared(a, in, num_threads);
    Units units(in.T, ROWS_AT_ONCE, layout.panels, num_threads);
    over_units(units.count(), num_threads, [&](int64_t unit) {
        int64_t first = units.first_row(unit), end = units.end_row(unit);
        int64_t strips = (end - first + STRIP - 1) / STRIP;
        for (int64_t p = units.first_panel(unit); p < units.end_panel(unit); ++p) {
            const typename P::Weight* panel = weight + p * layout.panel_size;
            int64_t after = units.panel_after(unit, p, num_threads);
            const char* next = (const char*)(weight + after * layout.panel_size);
            Target<A> target = target_of<A>(a, in, p * layout.outputs);
            vec results[STRIP * VECS];
            for (int64_t s = 0; s < strips; ++s) {
                int64_t row = first + (end - first) * s / strips;
                int64_t rows = first + (end - first) * (s + 1) / strips - row;
                const char* ahead = strips == 1 ? (const char*)panel + AHEAD_BYTES
                                    : s == 0    ? next
                                                : (const char*)panel;
                const typename P::Input* x = prepared.x + row * prepared.pitch;
                multiply_rows<P>(rows, x, prepared.pitch, panel, layout.units, ahead, results);
                if (in.more) in.more->add(in.more->what, p, after, row, rows, results);
                target.write(results, row, rows);
            }
        }
    });
}

// Calls `run` with the arithmetic for a type of weights, and a number of the type.
template <class Run>
static int with_weights(int64_t dtype, const Run& run) {
    switch (dtype) {
        case 0: run(WeightsFp32<float>{}, float{}); return 0;
        case 1: run(WeightsBf16{}, Bf16{}); return 0;
        case 2: run(WeightsFp32<Fp16>{}, Fp16{}); return 0;
        default: return 2;
    }
}

// Returns how many bytes the packed weight takes; 0 if the type is not known.
extern "C" int64_t pagemill_linear_bytes(const Linear* a) {
    int64_t bytes = 0;
    with_weights(a->dtype, [&](auto p, auto type) {
        bytes = Layout<decltype(p)>(*a).size() * sizeof(type);
    });
    return bytes;
}

// Returns 0; 1 if memory is short, 2 if the type is not known.
static int run_linear(const Linear& a, const Inputs& in) {
    try {
        return with_weights(a.dtype, [&](auto p, auto type) {
            linear<decltype(p), decltype(type)>(a, in);
        });
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" int pagemill_linear(const Linear* a, const void* x, int64_t x_stride, int64_t T,
                               void* out, int64_t out_stride, int64_t num_threads) {
    return run_linear(*a, {x, out, x_stride, out_stride, T, num_threads, nullptr});
}
