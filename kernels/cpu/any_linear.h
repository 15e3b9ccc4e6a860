// Any linear layer of these kernels, and what calls it. Mirrored in kernels/native_linear.py.
#pragma once

#include <cstdint>

struct AnyLinear {
    // Returns 0, or 1 if memory is short, 2 if a type is not known.
    int (*call)(const void* layer, const void* x, int64_t x_stride, int64_t T, void* out,
                int64_t out_stride, int64_t num_threads);
    const void* layer;
    int64_t O;  // outputs

    int operator()(const void* x, int64_t x_stride, int64_t T, void* out, int64_t out_stride,
                   int64_t threads) const {
        return call(layer, x, x_stride, T, out, out_stride, threads);
    }

    int operator()(const void* x, int64_t x_stride, int64_t T, void* out, int64_t threads) const {
        return (*this)(x, x_stride, T, out, O, threads);
    }
};
