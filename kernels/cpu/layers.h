// What stands around attention: the tokens' embedding, their rotary one with the store, norms and the
// activation.
#pragma once

#include <cmath>

#include "activation.h"
#include "attention.h"

// Mirrored in kernels/cpu_embedding.py.
struct Embedding {
    const char* table;         // [V, E]
    const int64_t* token_ids;  // [T]
    char* out;                 // [T, E]
    int64_t V, T;
    int64_t row_bytes;  // of E elements
};

// Returns 0; 1 if a token has no row.
static int embed(const Embedding& a) {
    for (int64_t t = 0; t < a.T; ++t) {
        int64_t id = a.token_ids[t];
        if (id < 0 || id >= a.V) return 1;
        memcpy(a.out + t * a.row_bytes, a.table + id * a.row_bytes, a.row_bytes);
    }
    return 0;
}

// Mirrored field by field in kernels/cpu_layers.py. Strides count elements.
struct Rotary {
    void* q;                      // [T, H, D], rotated in place
    void* k;                      // [T, G, D], rotated in place if nothing is stored
    const void* v;                // [T, G, D]
    const float* cos;             // [T, D / 2]
    const float* sin;             // [T, D / 2]
    void* k_cache;                // as of `Attention`, or null: nothing is stored
    void* v_cache;                // as k_cache
    const int64_t* slot_mapping;  // [T]; -1: this token is not stored
    const float* k_scale;         // [1] or [G], or null
    const float* v_scale;         // as k_scale
    int64_t q_stride, k_stride, v_stride, scale_stride;
    int64_t T, H, G, D;
    int64_t S, in_lanes;  // of the cache
    int64_t dtype, kv_dtype;
    int64_t num_threads;
};

// Stores the elements [d, d + count), W at most, of what lies in a row.
template <class T>
struct InRow {
    T* to;

    void operator()(int64_t d, vec x, int64_t count) const { store_some(to + d, x, count); }
};

// The same of a key in lanes: 32 bits in each line.
template <class T>
struct InLanes {
    T* to;

    void operator()(int64_t d, vec x, int64_t count) const {
        T row[W];
        store(row, x);
        for (int64_t i = 0; i < W && i < count; i += WORD<T>) {
            memcpy((void*)(to + (d + i) * LANES), row + i, 4);
        }
    }
};

// Turns each pair of elements (i, i + D / 2) by its angle, and divides by `scale`.
template <class A, class Write>
static inline void rotate(const A* from, const float* cos, const float* sin, int64_t D, float scale,
                          const Write& write) {
    int64_t half = D / 2;
    vec divisor = splat(scale);
    for (int64_t i = 0; i < half; i += W) {
        int64_t left = half - i;
        vec low = load_some(from + i, left), high = load_some(from + half + i, left);
        vec c = load_some(cos + i, left), s = load_some(sin + i, left);
        write(i, (low * c - high * s) / divisor, left);
        write(half + i, (high * c + low * s) / divisor, left);
    }
}

template <class A, class T>
static void rotate_token(const Rotary& a, int64_t token) {
    int64_t D = a.D;
    const float *cos = a.cos + token * D / 2, *sin = a.sin + token * D / 2;
    A* q = (A*)a.q + token * a.q_stride;
    A* k = (A*)a.k + token * a.k_stride;
    for (int64_t h = 0; h < a.H; ++h) {
        rotate(q + h * D, cos, sin, D, 1, InRow<A>{q + h * D});
    }
    if (!a.k_cache) {
        for (int64_t g = 0; g < a.G; ++g) {
            rotate(k + g * D, cos, sin, D, 1, InRow<A>{k + g * D});
        }
        return;
    }
    int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    const A* v = (const A*)a.v + token * a.v_stride;
    T *k_cache = (T*)a.k_cache, *v_cache = (T*)a.v_cache;
    for (int64_t g = 0; g < a.G; ++g) {
        float k_scale = a.k_scale ? a.k_scale[g * a.scale_stride] : 1;
        vec v_scale = splat(a.v_scale ? a.v_scale[g * a.scale_stride] : 1);
        T* value;
        if (a.in_lanes) {
            int64_t head = slot / a.S * a.G * a.S + g * a.S, in_block = slot % a.S;
            int64_t lane = in_block % LANES;
            T* group = k_cache + (head + in_block - lane) * D;
            rotate(k + g * D, cos, sin, D, k_scale, InLanes<T>{group + lane * WORD<T>});
            value = v_cache + (head + in_block) * D;
        } else {
            rotate(k + g * D, cos, sin, D, k_scale, InRow<T>{k_cache + (slot * a.G + g) * D});
            value = v_cache + (slot * a.G + g) * D;
        }
        for (int64_t d = 0; d < D; d += W) {
            store_some(value + d, load_some(v + g * D + d, D - d) / v_scale, D - d);
        }
    }
}

// Mirrored in kernels/cpu_layers.py.
struct Turns {
    const int64_t* positions;  // [T]
    const float* frequencies;  // [D / 2]
    float* cos;                // [T, D / 2]
    float* sin;                // [T, D / 2]
    int64_t T, half;
    int64_t num_threads;
};

// Finds the angles by which a token is turned.
static inline void turn_token(const Turns& a, int64_t token) {
    float position = a.positions[token];
    for (int64_t i = 0; i < a.half; ++i) {
        float angle = position * a.frequencies[i];
        a.cos[token * a.half + i] = std::cos(angle);
        a.sin[token * a.half + i] = std::sin(angle);
    }
}

// Mirrored in kernels/cpu_layers.py.
struct RmsNorm {
    const void* x;       // [T, E], each token contiguous
    const void* weight;  // [E]
    void* residual;      // [T, E], or null: added to x, and overwritten with the sum
    void* out;           // [T, E]
    int64_t x_stride;
    int64_t T, E;
    int64_t dtype;
    int64_t num_threads;
    double eps;
};

template <class A>
static void norm_token(const RmsNorm& a, int64_t token) {
    const A *x = (const A*)a.x + token * a.x_stride, *weight = (const A*)a.weight;
    A* out = (A*)a.out + token * a.E;
    A* residual = a.residual ? (A*)a.residual + token * a.E : nullptr;
    vec squares{};
    for (int64_t i = 0; i < a.E; i += W) {
        int64_t left = a.E - i;
        vec y = load_some(x + i, left);
        if (residual) {
            // What is normalised is the sum as it is rounded.
            store_some(residual + i, y + load_some(residual + i, left), left);
            y = load_some(residual + i, left);
        }
        squares += y * y;
    }
    vec factor = splat(1 / std::sqrt(sum(squares) / (float)a.E + (float)a.eps));
    const A* y = residual ? residual : x;
    for (int64_t i = 0; i < a.E; i += W) {
        int64_t left = a.E - i;
        store_some(out + i, load_some(y + i, left) * factor * load_some(weight + i, left), left);
    }
}

// Mirrored in kernels/cpu_layers.py.
struct NormHeads {
    void* x;             // [T, H, D], each token contiguous, written in place
    const void* weight;  // [H, D]
    int64_t x_stride;
    int64_t T, H, D;
    int64_t dtype;
    int64_t num_threads;
    double eps;
};

template <class A>
static void norm_heads_of_token(const NormHeads& a, int64_t token) {
    for (int64_t h = 0; h < a.H; ++h) {
        A* x = (A*)a.x + token * a.x_stride + h * a.D;
        const A* weight = (const A*)a.weight + h * a.D;
        vec squares{};
        for (int64_t d = 0; d < a.D; d += W) {
            vec y = load_some(x + d, a.D - d);
            squares += y * y;
        }
        vec factor = splat(1 / std::sqrt(sum(squares) / (float)a.D + (float)a.eps));
        for (int64_t d = 0; d < a.D; d += W) {
            int64_t left = a.D - d;
            store_some(x + d, load_some(x + d, left) * factor * load_some(weight + d, left), left);
        }
    }
}

// Mirrored in kernels/cpu_layers.py, and of gelu_and_mul, too.
struct SiluAndMul {
    const void* gate_up;  // [T, 2 * I], each token contiguous
    void* out;            // [T, I], contiguous
    int64_t stride;       // of gate_up
    int64_t T, I;
    int64_t dtype;
    int64_t num_threads;
};

template <class A, class Activation>
static void activate_token(const SiluAndMul& a, int64_t token) {
    const A *gate = (const A*)a.gate_up + token * a.stride, *up = gate + a.I;
    A* out = (A*)a.out + token * a.I;
    for (int64_t i = 0; i < a.I; i += W) {
        int64_t left = a.I - i;
        vec activated = activate<Activation>(load_some(gate + i, left));
        store_some(out + i, activated * load_some(up + i, left), left);
    }
}

// Mirrored in kernels/cpu_layers.py, too.
struct Widen {
    const void* x;  // [count], contiguous
    float* out;     // [count]
    int64_t count;
    int64_t dtype;
    int64_t num_threads;
};

template <class A>
static void widen_over(const Widen& a) {
    // 64 KiB of results: few enough units for their price, enough to share out.
    const int64_t NUM_IN_UNIT = 16384;
    int64_t num_units = (a.count + NUM_IN_UNIT - 1) / NUM_IN_UNIT;
    over_units(num_units, a.num_threads, [&](int64_t unit) {
        int64_t end = std::min(a.count, (unit + 1) * NUM_IN_UNIT);
        for (int64_t i = unit * NUM_IN_UNIT; i < end; i += W) {
            store_some(a.out + i, load_some((const A*)a.x + i, end - i), end - i);
        }
    });
}
