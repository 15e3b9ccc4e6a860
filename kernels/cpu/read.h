// Reading memory as fast as it can be read: what the other kernels' speed is measured against.
#pragma once

#include "vectors.h"

// Returns the sum of `count` numbers, a multiple of 16 * W.
static inline float read_all(const float* from, int64_t count) {
    vec sums[4] = {};
    for (int64_t i = 0; i < count; i += 16 * W) {
        for (int j = 0; j < 16; j += 4) {
            for (int k = 0; k < 4; ++k) sums[k] += load(from + i + (j + k) * W);
        }
    }
    return sum(sums[0] + sums[1] + (sums[2] + sums[3]));
}
