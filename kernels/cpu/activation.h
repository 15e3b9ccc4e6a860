// Activations, of vectors.
#pragma once

#include "attention.h"

// Of a gated linear layer's gates. Numbers of kernels/activation.py.
enum Gate { NO_GATE, SILU_GATE, GELU_GATE };

struct Silu {
    // What the logistic function is taken of.
    static vec inside(vec x) { return x; }
};

// With tanh: x * (1 + tanh(z)) / 2 is x / (1 + exp(-2 z)).
struct Gelu {
    static vec inside(vec x) {
        return x * splat(1.5957691216f) * (splat(1.0f) + splat(0.044715f) * x * x);
    }
};

template <class Activation>
static inline vec activate(vec x) {
    return x / (splat(1.0f) + exp2(Activation::inside(x) * splat(-LOG2_E)));
}

static inline vec activate(int64_t gate, vec x) {
    return gate == GELU_GATE ? activate<Gelu>(x) : activate<Silu>(x);
}
