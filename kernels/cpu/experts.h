// A mixture of experts: a router sends each token to a few of many gated MLPs, and what these give
// is summed by the router's weights. Tokens of an expert are multiplied together, so that each expert
// that is chosen at all is read once.
#pragma once

#include <vector>

#include "any_linear.h"
#include "layers.h"
#include "linear.h"

// Mirrored field by field in kernels/cpu_experts.py.
struct Experts {
    AnyLinear router;          // [E] to [X]
    const AnyLinear* gate_up;  // [X]: [E] to [I], gated
    const AnyLinear* down;     // [X]: [I] to [E]
    int64_t E, X;
    int64_t K;            // experts a token goes to
    int64_t sums_to_one;  // whether a token's weights are divided by their sum
    int64_t dtype;
};

// Which experts tokens go to.
struct Routes {
    std::vector<int32_t> chosen;  // [T, K], by falling probability; of equal ones the lower first
    std::vector<float> weights;   // [T, K]
    std::vector<int32_t> starts;  // [X + 1], into `order`
    std::vector<int32_t> order;   // [T * K], places in `chosen`, expert by expert, tokens rising

    Routes(const Experts& a, int64_t T)
        : chosen(T * a.K), weights(T * a.K), starts(a.X + 1), order(T * a.K) {}
};

// Chooses the K largest of X logits, and weighs them.
static void choose(const Experts& a, const float* logits, int32_t* chosen, float* weights) {
    int64_t found = 0;
    for (int64_t expert = 0; expert < a.X; ++expert) {
        float logit = logits[expert];
        if (found == a.K && !(logit > weights[a.K - 1])) continue;
        int64_t at = found < a.K ? found++ : a.K - 1;
        for (; at > 0 && logit > weights[at - 1]; --at) {
            weights[at] = weights[at - 1];
            chosen[at] = chosen[at - 1];
        }
        weights[at] = logit;
        chosen[at] = (int32_t)expert;
    }
    float largest = weights[0], total = 0;
    for (int64_t k = 0; k < a.K; ++k) weights[k] = std::exp(weights[k] - largest);
    if (a.sums_to_one) {
        for (int64_t k = 0; k < a.K; ++k) total += weights[k];
    } else {
        for (int64_t x = 0; x < a.X; ++x) total += std::exp(logits[x] - largest);
    }
    for (int64_t k = 0; k < a.K; ++k) weights[k] /= total;
}

// Sorts what was chosen by expert.
static void sort_by_expert(const Experts& a, Routes& routes) {
    for (int32_t expert : routes.chosen) ++routes.starts[expert + 1];
    for (int64_t x = 0; x < a.X; ++x) routes.starts[x + 1] += routes.starts[x];
    std::vector<int32_t> next(routes.starts.begin(), routes.starts.end() - 1);
    for (size_t i = 0; i < routes.chosen.size(); ++i) {
        routes.order[next[routes.chosen[i]]++] = (int32_t)i;
    }
}

template <class A>
static int route(const Experts& a, const Inputs& in, Routes& routes) {
    Lines logits(in.T * a.X * sizeof(A)), wide(in.T * a.X * sizeof(float));
    int status = a.router(in.x, in.x_stride, in.T, logits.memory.get(), in.num_threads);
    if (status) return status;
    widen_over<A>({logits.memory.get(), (float*)wide.memory.get(), in.T * a.X, a.dtype,
                   in.num_threads});
    over_tokens(in.T, a.X * a.K, in.num_threads, [&](int64_t t) {
        choose(a, (float*)wide.memory.get() + t * a.X, &routes.chosen[t * a.K],
               &routes.weights[t * a.K]);
    });
    sort_by_expert(a, routes);
    return 0;
}

// Sums in fp32, expert by expert, are rounded once.
template <class A>
static int mix_experts(const Experts& a, const Inputs& in) {
    Routes routes(a, in.T);
    if (int status = route<A>(a, in, routes)) return status;
    int64_t most = 0, widest = 0;
    for (int64_t x = 0; x < a.X; ++x) {
        most = std::max<int64_t>(most, routes.starts[x + 1] - routes.starts[x]);
        widest = std::max(widest, a.gate_up[x].O);
    }
    Lines theirs(most * a.E * sizeof(A)), inner(most * widest * sizeof(A));
    Lines sums(in.T * a.E * sizeof(float));
    A* rows = (A*)theirs.memory.get();
    float* mixed = (float*)sums.memory.get();
    memset(mixed, 0, in.T * a.E * sizeof(float));
    for (int64_t x = 0; x < a.X; ++x) {
        const int32_t* order = &routes.order[routes.starts[x]];
        int64_t count = routes.starts[x + 1] - routes.starts[x];
        if (count == 0) continue;
        over_tokens(count, a.E, in.num_threads, [&](int64_t i) {
            const A* from = (const A*)in.x + order[i] / a.K * in.x_stride;
            memcpy((void*)(rows + i * a.E), from, a.E * sizeof(A));
        });
        void* between = inner.memory.get();
        int status = a.gate_up[x](rows, a.E, count, between, in.num_threads);
        if (!status) status = a.down[x](between, a.gate_up[x].O, count, rows, in.num_threads);
        if (status) return status;
        over_tokens(count, a.E, in.num_threads, [&](int64_t i) {
            vec weight = splat(routes.weights[order[i]]);
            float* sum = mixed + order[i] / a.K * a.E;
            for (int64_t e = 0; e < a.E; e += W) {
                int64_t left = a.E - e;
                vec y = load_some(rows + i * a.E + e, left);
                store_some(sum + e, load_some(sum + e, left) + y * weight, left);
            }
        });
    }
    over_tokens(in.T, a.E, in.num_threads, [&](int64_t t) {
        A* to = (A*)in.out + t * in.out_stride;
        for (int64_t e = 0; e < a.E; e += W) {
            store_some(to + e, load_some(mixed + t * a.E + e, a.E - e), a.E - e);
        }
    });
    return 0;
}

// Returns 0, or what an operation returned that failed.
extern "C" int pagemill_experts(const Experts* a, const void* x, int64_t x_stride, int64_t T,
                                void* out, int64_t out_stride, int64_t num_threads) {
    Inputs in{x, out, x_stride, out_stride, T, num_threads, nullptr};
    if (T == 0) return 0;
    int status = 0;
    try {
        int known = with_type(a->dtype, [&](auto type) {
            status = mix_experts<decltype(type)>(*a, in);
        });
        return known ? known : status;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
