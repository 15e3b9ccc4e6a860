// A plain weight to panels, as linear.h reads them.
#pragma once

#include "linear.h"

// Inputs of a row that are brought into the first cache together: a line of memory.
template <class A>
constexpr int64_t AT_ONCE = 64 / sizeof(A);

// Packs one panel. Each line of the weight is read once, whole: rows a large power of two apart
// share a few lines of the first cache, and would drive one another out between two inputs.
template <class P, class A>
static void pack_panel(const Linear& a, const Layout<P>& layout, int64_t p, const A* weight,
                       int64_t stride, A* packed) {
    constexpr int64_t LANES = VECS * W, DEPTH = P::DEPTH, COLUMNS = AT_ONCE<A>;
    const A* rows[LANES];
    for (int64_t n = 0; n < LANES; ++n) {
        int64_t row = weight_row(a, p * layout.outputs, n / W, n % W);
        rows[n] = row < 0 ? nullptr : weight + row * stride;
    }
    alignas(64) A lines[LANES][COLUMNS] = {};
    for (int64_t i = 0; i < a.I; i += COLUMNS) {
        int64_t count = std::min(COLUMNS, a.I - i);
        if (count < COLUMNS) memset((void*)lines, 0, sizeof(lines));
        for (int64_t n = 0; n < LANES; ++n) {
            if (rows[n]) memcpy((void*)lines[n], rows[n] + i, count * sizeof(A));
        }
        for (int64_t c = 0; c < count; c += DEPTH, packed += LANES * DEPTH) {
            for (int64_t n = 0; n < LANES; ++n) {
                memcpy((void*)(packed + n * DEPTH), lines[n] + c, DEPTH * sizeof(A));
            }
        }
    }
}

// Packs a weight [O, I], or [2 * O, I] if gated, with rows `stride` elements apart.
extern "C" int pagemill_linear_pack(const Linear* a, const void* weight, int64_t stride,
                                    void* packed, int64_t num_threads) {
    return with_weights(a->dtype, [&](auto p, auto type) {
        typedef decltype(p) P;
        typedef decltype(type) A;
        Layout<P> layout(*a);
        over_units(layout.panels, num_threads, [&](int64_t panel) {
            A* to = (A*)packed + panel * layout.panel_size;
            pack_panel<P>(*a, layout, panel, (const A*)weight, stride, to);
        });
    });
}
