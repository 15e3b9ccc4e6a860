// Blocks of a GGUF file to plain weights.
//
// A block has 32 weights that share a scale. In the types here scale times value is exact in fp32, so
// a result is rounded once for a minimum that is added, and once to its type.
#pragma once

#include "threads.h"
#include "vectors.h"

constexpr int64_t BLOCK = 32;
// Blocks of one unit of work.
constexpr int64_t BLOCKS_AT_ONCE = 512;

// Of 4 bits: the first 16 weights are the low halves of the bytes, the others the high ones.
static inline vec unpacked_nibbles(const uint8_t* bytes, int64_t i) {
    bvec b = read<bvec>(bytes + i % 16);
    return __builtin_convertvector(__builtin_convertvector(i < 16 ? b & 15 : b >> 4, ivec), vec);
}

static inline vec splat_half(const char* from) {
    Fp16 halves[W];
    for (Fp16& half : halves) memcpy((void*)&half, from, sizeof(half));
    return load(halves);
}

struct BlocksQ4_0 {
    static constexpr int64_t BYTES = 18;

    static vec get(const char* block, int64_t i) {
        return splat_half(block) * (unpacked_nibbles((const uint8_t*)block + 2, i) - splat(8));
    }
};

struct BlocksQ4_1 {
    static constexpr int64_t BYTES = 20;

    static vec get(const char* block, int64_t i) {
        vec product = splat_half(block) * unpacked_nibbles((const uint8_t*)block + 4, i);
        return product + splat_half(block + 2);
    }
};

struct BlocksQ8_0 {
    static constexpr int64_t BYTES = 34;

    static vec get(const char* block, int64_t i) {
        typedef int8_t signed_bytes __attribute__((vector_size(W)));
        signed_bytes b = read<signed_bytes>(block + 2 + i);
        return splat_half(block) *
               __builtin_convertvector(__builtin_convertvector(b, ivec), vec);
    }
};

template <class Blocks, class A>
static void unpack(const char* blocks, int64_t num_blocks, A* to, int64_t num_threads) {
    int64_t units = (num_blocks + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE;
    over_units(units, num_threads, [&](int64_t unit) {
        int64_t end = std::min(num_blocks, (unit + 1) * BLOCKS_AT_ONCE);
        for (int64_t b = unit * BLOCKS_AT_ONCE; b < end; ++b) {
            for (int64_t i = 0; i < BLOCK; i += W) {
                store(to + b * BLOCK + i, Blocks::get(blocks + b * Blocks::BYTES, i));
            }
        }
    });
}

template <class A>
static int unpack_kind(int64_t kind, const char* blocks, int64_t num_blocks, A* to,
                       int64_t num_threads) {
    switch (kind) {
        case 2: unpack<BlocksQ4_0>(blocks, num_blocks, to, num_threads); return 0;
        case 3: unpack<BlocksQ4_1>(blocks, num_blocks, to, num_threads); return 0;
        case 8: unpack<BlocksQ8_0>(blocks, num_blocks, to, num_threads); return 0;
        default: return 2;
    }
}

// Unpacks blocks of a kind, by its number in GGUF, to 32 weights each. Returns 0; 2 if the kind or
// the type is not known.
extern "C" int pagemill_unpack(int64_t kind, const char* blocks, int64_t num_blocks, void* to,
                               int64_t dtype, int64_t num_threads) {
    switch (dtype) {
        case 0: return unpack_kind(kind, blocks, num_blocks, (float*)to, num_threads);
        case 1: return unpack_kind(kind, blocks, num_blocks, (Bf16*)to, num_threads);
        case 2: return unpack_kind(kind, blocks, num_blocks, (Fp16*)to, num_threads);
        default: return 2;
    }
}
