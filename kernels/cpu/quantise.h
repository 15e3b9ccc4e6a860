// Weights to few bits, in groups of inputs that share a scale: kernels/quantised_linear.py says how.
#pragma once

#include <cmath>

#include "quantised.h"

constexpr float HALF_MAX = 65504;

// As fp16 has it, and fp16's largest in place of what it has not.
static inline float rounded_to_half(float x) {
    Fp16 halves[W];
    store(halves, splat(x > HALF_MAX ? HALF_MAX : x < -HALF_MAX ? -HALF_MAX : x));
    return load(halves)[0];
}

// Of a group with a NaN all weights shall be NaN, whatever their values.
static void quantise_group(const float* group, int64_t bits, uint8_t* values, float* scale,
                           float* minimum) {
    vec most = splat(-INFINITY), least = splat(INFINITY), nan{};
    for (int64_t i = 0; i < GROUP; i += W) {
        vec x = load(group + i);
        most = larger(x, most);
        least = -larger(-x, -least);
        nan = pick(x == x, nan, x);
    }
    float high = largest(most), low = -largest(-least), step;
    float base = 0, first = -127, last = 127, zero = 128;
    if (bits == 8) {
        step = rounded_to_half(std::max(high, -low) / 127);
    } else {
        base = rounded_to_half(low);
        step = rounded_to_half(std::max(high - base, 0.0f) / 15);
        first = 0, last = 15, zero = 0;
    }
    float divisor = step == 0 ? 1 : step;
    for (int64_t i = 0; i < GROUP; i += W) {
        vec x = (load(group + i) - splat(base)) / splat(divisor);
        x = larger(-larger(-x, splat(-last)), splat(first));
        bvec rounded = __builtin_convertvector(nearest(x) + (int32_t)zero, bvec);
        memcpy(values + i, &rounded, sizeof(rounded));
    }
    bool has_nan = sum(nan) != 0;
    *scale = has_nan ? NAN : step;
    if (minimum) *minimum = has_nan ? NAN : base;
}

// Rounds rows of a weight [O, I] fp32 to values [O, I], scales [O, groups] and, of 4 bits, minimums.
extern "C" void pagemill_quantise(const float* weight, int64_t O, int64_t I, int64_t bits,
                                  uint8_t* values, float* scales, float* minimums,
                                  int64_t num_threads) {
    int64_t groups = (I + GROUP - 1) / GROUP;
    over_units(O, num_threads, [&](int64_t row) {
        for (int64_t g = 0; g < groups; ++g) {
            int64_t first = row * I + g * GROUP, count = std::min<int64_t>(GROUP, I - g * GROUP);
            float group[GROUP];
            uint8_t rounded[GROUP];
            // What fills a group up must not widen its range: the last weight does not.
            std::fill(group, group + GROUP, weight[first + count - 1]);
            memcpy(group, weight + first, count * sizeof(float));
            int64_t at = row * groups + g;
            quantise_group(group, bits, rounded, scales + at, minimums ? minimums + at : nullptr);
            memcpy(values + first, rounded, count);
        }
    });
}
