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

// Rows that go through a panel of a together, lest it be fetched again.
constexpr int64_t STRIPS_AT_ONCE = 4;

// The tokens that adapters change, adapter by adapter, and what is to be done for them.
struct Changed {
    struct Unit {
        const LowRank* low;
        int64_t panel;        // of a
        int64_t first, rows;  // in `order`
    };

    std::vector<int32_t> order;  // places of tokens, rising for each adapter
    std::vector<int32_t> place;  // of a token in `order`
    std::vector<Unit> units;
    int64_t pitch = 0;       // of what `shrink` gives: the most ranks, in whole panels
    int64_t operations = 0;  // of `shrink`

    Changed(const AdaptedLinear& a, int64_t num_threads) {
        const AdaptedTokens& tokens = *a.tokens;
        std::vector<int32_t> next(tokens.num_adapters + 1);
        for (int64_t t = 0; t < tokens.T; ++t) {
            if (a.added_by(tokens.adapter_of[t])) ++next[tokens.adapter_of[t] + 1];
        }
        for (int64_t i = 0; i < tokens.num_adapters; ++i) {
            if (next[i + 1]) cut(a, *a.added_by(i), next[i], next[i + 1], num_threads);
            next[i + 1] += next[i];
        }
        order.resize(next.back());
        place.resize(tokens.T);
        for (int64_t t = 0; t < tokens.T; ++t) {
            int32_t adapter = tokens.adapter_of[t];
            if (!a.added_by(adapter)) continue;
            place[t] = next[adapter]++;
            order[place[t]] = (int32_t)t;
        }
    }

  private:
    void cut(const AdaptedLinear& a, const LowRank& low, int64_t first, int64_t count,
             int64_t num_threads) {
        int64_t panels = (low.ranks + VECS * W - 1) / (VECS * W);
        int64_t at_once = STRIP * (panels < num_threads ? 1 : STRIPS_AT_ONCE);
        int64_t blocks = (count + at_once - 1) / at_once;
        for (int64_t p = 0; p < panels; ++p) {
            for (int64_t i = 0; i < blocks; ++i) {
                int64_t from = count * i / blocks;
                units.push_back({&low, p, first + from, count * (i + 1) / blocks - from});
            }
        }
        pitch = std::max(pitch, panels * VECS * W);
        operations += 2 * count * panels * VECS * W * a.plain->I;
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

// What a thread must have to do: less than elsewhere, as the helpers are awake and wait for the
// weight.
constexpr int64_t OPERATIONS_PER_THREAD = 128 << 10;

// Some rows meet a panel of a.
template <class P, class A>
static void shrink_unit(const Linear& a, const Inputs& in, const int32_t* tokens,
                        const Changed::Unit& unit, int64_t pitch, typename P::Input* copy,
                        float* shrunk) {
    Layout<P> layout(Linear{nullptr, nullptr, unit.low->ranks, a.I, 0, a.dtype});
    const typename P::Weight* panel =
        (const typename P::Weight*)unit.low->a + unit.panel * layout.panel_size;
    int64_t strips = (unit.rows + STRIP - 1) / STRIP;
    for (int64_t s = 0; s < strips; ++s) {
        int64_t row = unit.rows * s / strips, rows = unit.rows * (s + 1) / strips - row, x_pitch;
        const typename P::Input* x = gather<P, A>(a, in, tokens + row, rows, copy, &x_pitch);
        vec results[STRIP * VECS];
        const char* ahead = (const char*)panel + (strips == 1 ? AHEAD_BYTES : 0);
        multiply_rows<P>(rows, x, x_pitch, panel, layout.units, ahead, results);
        for (int64_t i = 0; i < rows; ++i) {
            float* to = shrunk + (unit.first + row + i) * pitch + unit.panel * VECS * W;
            for (int j = 0; j < VECS; ++j) store(to + j * W, results[i * VECS + j]);
        }
    }
}

// Writes x @ a.T of the tokens that are changed, in their order: shrunk [order, changed.pitch].
template <class P, class A>
static void shrink(const Linear& a, const Inputs& in, const Changed& changed, float* shrunk) {
    typedef typename P::Input Input;
    int64_t num_threads = std::max<int64_t>(
        1, std::min(in.num_threads, changed.operations / OPERATIONS_PER_THREAD));
    int64_t room = STRIP * Prepared<P, A>::pitch_of(a.I);
    Lines copies(num_threads * room * sizeof(Input));
    over_units_with_thread(changed.units.size(), num_threads, [&](int64_t i, int64_t thread) {
        const Changed::Unit& unit = changed.units[i];
        Input* copy = (Input*)copies.memory.get() + thread * room;
        shrink_unit<P, A>(a, in, &changed.order[unit.first], unit, changed.pitch, copy, shrunk);
    });
}

// --- what b makes of it ---

struct Adding {
    const AdaptedLinear& layer;
    const Changed& changed;
    const float* shrunk;  // [order, changed.pitch]
};

// Rows of a strip that have one adapter. Of x @ a.T theirs lie one behind the other.
struct OfAdapter {
    int64_t places[STRIP], count;  // in the strip
    const float* shrunk;
    int64_t pitch;
};

// Adds to N rows' sums of a vector of outputs.
template <class T, int N>
static void add_ranks(const T* b, const Reach& reach, const OfAdapter& rows, vec* sums) {
    vec total[N];
#pragma GCC unroll 12
    for (int i = 0; i < N; ++i) total[i] = sums[rows.places[i] * VECS];
    int64_t pitch = rows.pitch;
    const float* x = rows.shrunk + reach.first;
    const float* from[4] = {x, x + 3 * pitch, x + 6 * pitch, x + 9 * pitch};
    b += reach.at;
    for (int64_t k = 0; k < reach.count; ++k, b += W) {
        vec weights = load(b);
#pragma GCC unroll 12
        for (int i = 0; i < N; ++i) {
            total[i] = multiply_add(splat(from[i / 3][i % 3 * pitch]), weights, total[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < (N + 2) / 3; ++i) ++from[i];
    }
#pragma GCC unroll 12
    for (int i = 0; i < N; ++i) sums[rows.places[i] * VECS] = total[i];
}

template <class T, int N = STRIP>
static void add_to_rows(const T* b, const Reach& reach, const OfAdapter& rows, vec* sums) {
    if constexpr (N > 1) {
        if (rows.count < N) return add_to_rows<T, N - 1>(b, reach, rows, sums);
    }
    add_ranks<T, N>(b, reach, rows, sums);
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
    const Changed& changed = adding.changed;
    const int32_t* adapter_of = adding.layer.tokens->adapter_of + first;
    uint32_t done = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const LowRank* low = adding.layer.added_by(adapter_of[row]);
        if (!low || done >> row & 1) continue;
        const float* shrunk = adding.shrunk + changed.place[first + row] * changed.pitch;
        OfAdapter of{{}, 0, shrunk, changed.pitch};
        for (int64_t i = row; i < rows; ++i) {
            if (adapter_of[i] != adapter_of[row]) continue;
            of.places[of.count++] = i;
            done |= 1u << i;
        }
        ask_for<T>(*low, next);
        for (int j = 0; j < VECS; ++j) {
            add_to_rows<T>((const T*)low->b, low->reach[panel * VECS + j], of, sums + j);
        }
    }
}

template <class P, class A>
static int run_adapted(const AdaptedLinear& a, Inputs in) {
    Changed changed(a, in.num_threads);
    if (changed.units.empty()) return a.run(in);
    Lines shrunk(changed.order.size() * changed.pitch * sizeof(float));
    Adding adding{a, changed, (const float*)shrunk.memory.get()};
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
