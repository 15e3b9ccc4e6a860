// What an adapter adds to a linear layer, packed for the panels of that layer's weight.
#pragma once

#include <vector>

#include "linear.h"

// The ranks that reach a vector of a layer's outputs, and where they stand in b.
struct Reach {
    int64_t at;  // element
    int64_t first, count;
};

// What an adapter adds to a layer: the matrices it changes there, one behind the other. Mirrored in
// kernels/low_rank.py.
struct LowRank {
    const void* a;       // packed as the weight [ranks, I] of a plain layer
    const void* b;       // vector by vector of outputs, W outputs of a rank side by side
    const Reach* reach;  // [panels * VECS]
    int64_t ranks;       // of all matrices; 0: it changes none of the layer's
};

// One of the matrices, on its way in. Mirrored in kernels/low_rank.py.
struct LowRankPart {
    const void* a;  // [rank, I], of the layer's type
    const void* b;  // [rows, rank]
    int64_t first_row, rows, rank;
};

// --- packing ---

static int64_t num_vectors(const Linear& a) {
    int64_t outputs = a.gate ? W : VECS * W;
    return (a.O + outputs - 1) / outputs * VECS;
}

// Returns the row of the weight that stands at `lane` of a vector of outputs; -1: none.
static int64_t row_of(const Linear& a, int64_t vector, int64_t lane) {
    int64_t outputs = a.gate ? W : VECS * W;
    return weight_row(a, vector / VECS * outputs, vector % VECS, lane);
}

// Writes the ranks of parts that reach a vector, from `first_rank` on, those of others being 0.
template <class T>
static void pack_part(const Linear& a, const LowRankPart& part, int64_t vector, T* to) {
    for (int64_t k = 0; k < part.rank; ++k) {
        for (int64_t lane = 0; lane < W; ++lane) {
            int64_t row = row_of(a, vector, lane) - part.first_row;
            if (row < 0 || row >= part.rows) continue;
            to[k * W + lane] = ((const T*)part.b)[row * part.rank + k];
        }
    }
}

static bool reaches(const Linear& a, const LowRankPart& part, int64_t vector) {
    for (int64_t lane = 0; lane < W; ++lane) {
        int64_t row = row_of(a, vector, lane) - part.first_row;
        if (row >= 0 && row < part.rows) return true;
    }
    return false;
}

// Where all stands: a, then the reach of vectors, then b.
struct LowRankLayout {
    int64_t ranks = 0, to_reach, to_b, bytes;

    template <class P>
    void lay_out(P, const Linear& a, const LowRankPart* parts, int64_t num_parts) {
        int64_t itemsize = sizeof(typename P::Weight), vectors = num_vectors(a), reached = 0;
        for (int64_t i = 0; i < num_parts; ++i) {
            ranks += parts[i].rank;
            for (int64_t v = 0; v < vectors; ++v) {
                if (reaches(a, parts[i], v)) reached += parts[i].rank;
            }
        }
        Layout<P> of_a(Linear{nullptr, nullptr, ranks, a.I, 0, a.dtype});
        to_reach = round_up(of_a.size() * itemsize, 64);
        to_b = round_up(to_reach + vectors * (int64_t)sizeof(Reach), 64);
        bytes = round_up(to_b + reached * W * itemsize, 64);
    }
};

template <class P, class A>
static void pack_low_rank(const Linear& a, const LowRankPart* parts, int64_t num_parts,
                          char* memory, LowRank* to) {
    LowRankLayout layout;
    layout.lay_out(P{}, a, parts, num_parts);
    typedef typename P::Weight Weight;
    Weight* b = (Weight*)(memory + layout.to_b);
    Reach* reach = (Reach*)(memory + layout.to_reach);
    int64_t at = 0;
    for (int64_t v = 0; v < num_vectors(a); ++v) {
        reach[v] = {at, 0, 0};
        for (int64_t i = 0, rank = 0; i < num_parts; rank += parts[i++].rank) {
            if (!reaches(a, parts[i], v)) continue;
            if (!reach[v].count) reach[v].first = rank;
            pack_part(a, parts[i], v, b + at);
            at += parts[i].rank * W;
            reach[v].count += parts[i].rank;
        }
    }
    // One behind the other, they are the rows of one matrix.
    Linear of_a{nullptr, nullptr, layout.ranks, a.I, 0, a.dtype};
    std::vector<A> rows(layout.ranks * a.I);
    int64_t rank = 0;
    for (int64_t i = 0; i < num_parts; rank += parts[i++].rank) {
        memcpy((void*)&rows[rank * a.I], parts[i].a, parts[i].rank * a.I * sizeof(A));
    }
    pack_weight<P>(of_a, rows.data(), a.I, (Weight*)memory);
    *to = {memory, b, reach, layout.ranks};
}

// Returns the bytes that `pagemill_low_rank_pack` needs, whatever parts hold; 0 if the type is not
// known.
extern "C" int64_t pagemill_low_rank_bytes(const Linear* layer, const LowRankPart* parts,
                                           int64_t num_parts) {
    LowRankLayout layout;
    layout.bytes = 0;
    with_weights(layer->dtype, [&](auto p, auto) { layout.lay_out(p, *layer, parts, num_parts); });
    return layout.bytes;
}

// Packs matrices that stand above one another in the layer, by rising `first_row`, into zeros.
// Returns 0; 1 if memory is short, 2 if the type is not known.
extern "C" int pagemill_low_rank_pack(const Linear* layer, const LowRankPart* parts,
                                      int64_t num_parts, void* memory, LowRank* to) {
    try {
        return with_weights(layer->dtype, [&](auto p, auto type) {
            pack_low_rank<decltype(p), decltype(type)>(*layer, parts, num_parts, (char*)memory,
                                                       to);
        });
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
