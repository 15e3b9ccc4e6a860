// A linear layer that adapters change: a token's y has (x @ a.T) @ b.T added, by its own adapter's
// a and b.
//
// x @ a.T comes first, for the tokens of each adapter together, so that a is read once. b meets each
// panel of the weight while its sums stand in fp32, and is read once as well; so gates are changed
// before they are activated, all is rounded once, and the weight stays as it was packed. A token's
// result depends on nothing but the token and its adapter: of one without an adapter it is, bit for
// bit, the plain layer's.
#pragma once

#include <vector>

#include "low_rank.h"
#include "quantised.h"

// Which tokens of the step in hand have which adapter, for all layers of a model. Mirrored in
// kernels/adapted_linear.py.
struct AdaptedTokens {
    const LowRank* const* adapters;  // [num_adapters], of each what it adds, layer by layer
    const int32_t* adapter_of;       // [T]; -1: none
    int32_t* of_read;                // [T], to write to
    int64_t T, num_adapters;
};

// Mirrored in kernels/adapted_linear.py.
struct AdaptedLinear {
    const Linear* plain;  // what is changed; of a quantised layer its first field
    int64_t is_quantised;
    const AdaptedTokens* tokens;
    int64_t number;  // of the layer

    // Returns what an adapter adds; null: nothing.
    const LowRank* added_by(int64_t adapter) const {
        const LowRank* found = adapter < 0 ? nullptr : tokens->adapters[adapter] + number;
        return found && found->ranks ? found : nullptr;
    }

    int run(const Inputs& in) const {
        return is_quantised ? run_quantised(*(const QuantisedLinear*)plain, in)
                            : run_linear(*plain, in);
    }
};

// Has layers see the tokens that are read alone, for as long as it lives.
struct OnlyRead {
    AdaptedTokens* tokens;  // or null
    AdaptedTokens all;

    explicit OnlyRead(AdaptedTokens* tokens) : tokens(tokens), all() {
        if (tokens) all = *tokens;
    }

    void begin(const int64_t* read, int64_t num_read) {
        if (!tokens || !tokens->num_adapters) return;
        for (int64_t i = 0; i < num_read; ++i) all.of_read[i] = all.adapter_of[read[i]];
        tokens->adapter_of = all.of_read;
        tokens->T = num_read;
    }

    ~OnlyRead() {
        if (tokens) *tokens = all;
    }
};

// --- x @ a.T ---

// The tokens that adapters change, adapter by adapter, in strips.
struct Changed {
    struct Strip {
        const LowRank* low;
        int64_t first, rows;  // in `order`
    };

    std::vector<int32_t> order;  // places of tokens
    std::vector<Strip> strips;
    int64_t pitch = 0;       // of what `shrink` gives: the most ranks, in whole panels
    int64_t operations = 0;  // of `shrink`

    explicit Changed(const AdaptedLinear& a) {
        const AdaptedTokens& tokens = *a.tokens;
        std::vector<int32_t> next(tokens.num_adapters + 1);
        for (int64_t t = 0; t < tokens.T; ++t) {
            if (a.added_by(tokens.adapter_of[t])) ++next[tokens.adapter_of[t] + 1];
        }
        for (int64_t i = 0; i < tokens.num_adapters; ++i) {
            if (int64_t count = next[i + 1]) cut(a, a.added_by(i), next[i], count);
            next[i + 1] += next[i];
        }
        order.resize(next.back());
        for (int64_t t = 0; t < tokens.T; ++t) {
            int32_t adapter = tokens.adapter_of[t];
            if (a.added_by(adapter)) order[next[adapter]++] = (int32_t)t;
        }
    }

  private:
    void cut(const AdaptedLinear& a, const LowRank* low, int64_t first, int64_t count) {
        int64_t num_strips = (count + STRIP - 1) / STRIP, ranks = round_up(low->ranks, VECS * W);
        for (int64_t s = 0; s < num_strips; ++s) {
            int64_t from = count * s / num_strips;
            strips.push_back({low, first + from, count * (s + 1) / num_strips - from});
        }
        pitch = std::max(pitch, ranks);
        operations += 2 * count * ranks * a.plain->I;
    }
};

// Returns the inputs of some tokens as products take them, and sets how far apart they are.
template <class P, class A>
static const typename P::Input* gather(const Linear& a, const Inputs& in, const int32_t* tokens,
                                       int64_t rows, typename P::Input* copy, int64_t* pitch) {
    const A* x = (const A*)in.x;
    if (Prepared<P, A>::fits(a, in) && tokens[rows - 1] - tokens[0] == rows - 1) {
        *pitch = in.x_stride;
        return (const typename P::Input*)(x + tokens[0] * in.x_stride);
    }
    *pitch = Prepared<P, A>::pitch_of(a.I);
    for (int64_t i = 0; i < rows; ++i) {
        Prepared<P, A>::convert(x + tokens[i] * in.x_stride, a.I, copy + i * *pitch);
    }
    return copy;
}

// Writes x @ a.T of the tokens that are changed, each to its own place.
template <class P, class A>
static void shrink(const Linear& a, const Inputs& in, const Changed& changed, float* shrunk) {
    typedef typename P::Input Input;
    int64_t num_threads = threads_for(in.num_threads, 0, changed.operations);
    int64_t room = STRIP * Prepared<P, A>::pitch_of(a.I);
    Lines copies(num_threads * room * sizeof(Input));
    over_units_with_thread(changed.strips.size(), num_threads, [&](int64_t unit, int64_t thread) {
        const Changed::Strip& strip = changed.strips[unit];
        const int32_t* tokens = &changed.order[strip.first];
        int64_t pitch;
        const Input* x = gather<P, A>(a, in, tokens, strip.rows,
                                      (Input*)copies.memory.get() + thread * room, &pitch);
        Layout<P> layout(Linear{nullptr, nullptr, strip.low->ranks, a.I, 0, a.dtype});
        const typename P::Weight* panel = (const typename P::Weight*)strip.low->a;
        for (int64_t p = 0; p < layout.panels; ++p, panel += layout.panel_size) {
            vec results[STRIP * VECS];
            multiply_rows<P>(strip.rows, x, pitch, panel, layout.units, (const char*)panel,
                             results);
            for (int64_t i = 0; i < strip.rows; ++i) {
                float* to = shrunk + tokens[i] * changed.pitch + p * VECS * W;
                for (int j = 0; j < VECS; ++j) store(to + j * W, results[i * VECS + j]);
            }
        }
    });
}

// --- what b makes of it ---

// Rows that meet a vector of b together.
constexpr int ROWS_OF_ADAPTER = 6;

struct Adding {
    const AdaptedLinear& layer;
    const float* shrunk;  // [T, pitch]
    int64_t pitch;
};

// Adds to N rows' sums of a vector of outputs.
template <class T, int N>
static void add_ranks(const T* b, int64_t count, const float* const* shrunk, vec* const* sums) {
    vec total[N];
#pragma GCC unroll 6
    for (int i = 0; i < N; ++i) total[i] = *sums[i];
    for (int64_t k = 0; k < count; ++k, b += W) {
        vec weights = load(b);
#pragma GCC unroll 6
        for (int i = 0; i < N; ++i) {
            total[i] = multiply_add(splat(shrunk[i][k]), weights, total[i]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < N; ++i) *sums[i] = total[i];
}

template <class T, int N = ROWS_OF_ADAPTER>
static void add_to_rows(int64_t rows, const T* b, int64_t count, const float* const* shrunk,
                        vec* const* sums) {
    if constexpr (N > 1) {
        if (rows < N) return add_to_rows<T, N - 1>(rows, b, count, shrunk, sums);
    }
    add_ranks<T, N>(b, count, shrunk, sums);
}

template <class T>
static void ask_for(const LowRank& low, int64_t panel) {
    const Reach* reach = low.reach + panel * VECS;
    for (int j = 0; j < VECS; ++j) {
        const char* b = (const char*)((const T*)low.b + reach[j].at);
        for (int64_t at = 0; at < reach[j].count * W * (int64_t)sizeof(T); at += 64) {
            prefetch(b + at);
        }
    }
}

// A `MoreSums::add`: rows of one adapter together, wherever they stand.
template <class T>
static void add_adapters(const void* what, int64_t panel, int64_t next, int64_t first,
                         int64_t rows, vec* sums) {
    const Adding& adding = *(const Adding*)what;
    const int32_t* adapter_of = adding.layer.tokens->adapter_of + first;
    uint32_t left = 0;
    for (int64_t i = 0; i < rows; ++i) left |= (uint32_t)(adapter_of[i] >= 0) << i;
    while (left) {
        int32_t adapter = adapter_of[__builtin_ctz(left)];
        const LowRank* low = adding.layer.added_by(adapter);
        int64_t places[ROWS_OF_ADAPTER], count = 0;
        for (int64_t i = 0; i < rows && count < ROWS_OF_ADAPTER; ++i) {
            if (!(left >> i & 1) || adapter_of[i] != adapter) continue;
            left &= ~(1u << i);
            if (low) places[count++] = i;
        }
        if (!low) continue;
        ask_for<T>(*low, next);
        for (int j = 0; j < VECS; ++j) {
            const Reach& reach = low->reach[panel * VECS + j];
            const float* shrunk[ROWS_OF_ADAPTER];
            vec* to[ROWS_OF_ADAPTER];
            for (int64_t i = 0; i < count; ++i) {
                shrunk[i] = adding.shrunk + (first + places[i]) * adding.pitch + reach.first;
                to[i] = sums + places[i] * VECS + j;
            }
            add_to_rows<T>(count, (const T*)low->b + reach.at, reach.count, shrunk, to);
        }
    }
}

template <class P, class A>
static int run_adapted(const AdaptedLinear& a, Inputs in) {
    Changed changed(a);
    if (changed.strips.empty()) return a.run(in);
    Lines shrunk(in.T * changed.pitch * sizeof(float));
    Adding adding{a, (const float*)shrunk.memory.get(), changed.pitch};
    shrink<P, A>(*a.plain, in, changed, (float*)shrunk.memory.get());
    MoreSums more{add_adapters<typename P::Weight>, &adding};
    in.more = &more;
    return a.run(in);
}

// Returns 0; 1 if memory is short, 2 if the type is not known, 3 if there are not as many tokens as
// `tokens` tells of.
extern "C" int pagemill_adapted(const AdaptedLinear* a, const void* x, int64_t x_stride, int64_t T,
                                void* out, int64_t out_stride, int64_t num_threads) {
    Inputs in{x, out, x_stride, out_stride, T, num_threads, nullptr};
    if (!a->tokens->num_adapters) return a->run(in);
    if (T != a->tokens->T) return 3;
    int status = 0;
    try {
        int known = with_weights(a->plain->dtype, [&](auto p, auto type) {
            status = run_adapted<decltype(p), decltype(type)>(*a, in);
        });
        return known ? known : status;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
