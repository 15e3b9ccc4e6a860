// The layers of a decoder in one call: what stands in worker_svc/model/llama.py and, with the parts
// that may be null, in qwen3.py and gemma3.py there, without its way through Python a dozen times a
// layer.
#pragma once

#include <cstring>

#include "adapted.h"
#include "any_linear.h"
#include "attention.h"
#include "layers.h"

// Mirrored in kernels/cpu_decoder.py.
struct DecoderLayer {
    const void* attention_norm;  // [E]
    const void* mlp_norm;        // [E]
    AnyLinear qkv;               // [E] to [(H + 2 * G) * D]
    AnyLinear output;            // [H * D] to [E]
    AnyLinear gate_up;           // [E] to [I], gated; or no function: `down` is all of the MLP
    AnyLinear down;              // [I] to [E]
    // What only some families have, or null.
    const void* head_norms;            // [H + G, D]: of queries and keys, before they are rotated
    const void* after_attention_norm;  // [E]: of what attention gave, before it is added
    const void* after_mlp_norm;        // [E]: likewise of the MLP
    int64_t group;
};

// What the layers of a KV group read. Mirrored in kernels/cpu_decoder.py.
struct DecoderGroup {
    const float* frequencies;     // [D / 2]: what positions are multiplied by to turn
    float* cos;                   // [T, D / 2], overwritten
    float* sin;                   // [T, D / 2], overwritten
    const int64_t* slot_mapping;  // [T]
    const int32_t* block_tables;  // [R, B], rows contiguous
    int64_t table_stride;
    int64_t window;  // 0: none
};

// Mirrored in kernels/cpu_decoder.py.
struct Decoder {
    const DecoderLayer* layers;  // [num_layers]
    const DecoderGroup* groups;  // [num_groups]
    const int64_t* positions;    // [T]
    void* const* caches;         // [2 * num_layers]: keys and values, layer by layer
    const float* const* scales;  // likewise of an fp8 cache, or null
    const void* last_norm;       // [E]
    void* hidden;                // [T, E], overwritten
    void* out;                   // [T, E]; rows that nobody reads are left as they are
    const int64_t* read;         // [num_read] ascending: the tokens read; null: all are
    void* normed;                // [T, E], as all below for what stands between operations
    void* added;                 // [T, E]
    void* qkv;                   // [T, (H + 2 * G) * D]
    void* mixed;                 // [T, H * D]
    void* inner;                 // [T, I], rows `inner_stride` apart
    void* scores;                // [num_read, V]: logits before they are widened
    float* logits;               // [num_read, V] of the tokens read, or null: not asked for
    int64_t num_read, num_layers, num_groups, E, inner_stride;
    int64_t itemsize;  // of activations
    double eps;
    Rotary rotary;        // but for the addresses of q, k, v and the caches, and what a group has
    Attention attention;  // likewise
    AdaptedTokens* adapted;  // of layers that adapters change; null: there are none
    AnyLinear head;          // [E] to [V], or no function
};

// Finds the angles of each group. Neighbours that turn alike share the memory of one.
static void turn(const Decoder& a) {
    for (int64_t g = 0; g < a.num_groups; ++g) {
        const DecoderGroup& group = a.groups[g];
        if (g && group.cos == a.groups[g - 1].cos) continue;
        Turns turns{a.positions, group.frequencies, group.cos, group.sin, a.rotary.T,
                    a.rotary.D / 2, a.rotary.num_threads};
        pagemill_turns(&turns);
    }
}

// Finds the logits of `T` tokens whose hidden states stand in front.
static int find_logits(const Decoder& a, int64_t T) {
    int64_t threads = a.rotary.num_threads;
    if (int status = a.head(a.out, a.E, T, a.scores, threads)) return status;
    if (a.scores == a.logits) return 0;
    Widen widen{a.scores, a.logits, T * a.head.O, a.rotary.dtype, threads};
    return pagemill_widen(&widen);
}

// Normalises what was computed before it is added, where a family does.
static void norm_before_sum(const Decoder& a, const void* weight, int64_t T) {
    if (!weight) return;
    RmsNorm norm{a.added, weight, nullptr, a.added, a.E, T, a.E, a.rotary.dtype,
                 a.rotary.num_threads, a.eps};
    pagemill_rms_norm(&norm);
}

static void norm_queries_and_keys(const Decoder& a, const void* weight) {
    const Rotary& r = a.rotary;
    if (!weight) return;
    NormHeads norm{a.qkv, weight, (r.H + 2 * r.G) * r.D, r.T, r.H + r.G, r.D, r.dtype,
                   r.num_threads, a.eps};
    pagemill_norm_heads(&norm);
}

// Moves the rows that are read to the front, or from there back to their places.
static void gather_read(const Decoder& a, void* rows, int64_t row_bytes) {
    char* at = (char*)rows;
    for (int64_t i = 0; i < a.num_read; ++i) {
        memmove(at + i * row_bytes, at + a.read[i] * row_bytes, row_bytes);
    }
}

static void scatter_read(const Decoder& a, void* rows, int64_t row_bytes) {
    char* at = (char*)rows;
    for (int64_t i = a.num_read - 1; i >= 0; --i) {
        memmove(at + a.read[i] * row_bytes, at + i * row_bytes, row_bytes);
    }
}

static int run_mlp(const Decoder& a, const DecoderLayer& layer, int64_t T) {
    int64_t threads = a.rotary.num_threads, inner = a.inner_stride;
    if (!layer.gate_up.call) return layer.down(a.normed, a.E, T, a.added, threads);
    if (int status = layer.gate_up(a.normed, a.E, T, a.inner, inner, threads)) return status;
    return layer.down(a.inner, inner, T, a.added, threads);
}

// Returns 0, or what an operation returned that failed.
static int decode_layers(const Decoder& a) {
    Rotary rotary = a.rotary;
    Attention attention = a.attention;
    int64_t T = rotary.T, heads = rotary.H * rotary.D, keys = rotary.G * rotary.D;
    int64_t threads = rotary.num_threads;
    turn(a);
    OnlyRead only_read(a.adapted);
    RmsNorm norm{a.hidden, nullptr, nullptr, a.normed, a.E, T, a.E, rotary.dtype, threads, a.eps};
    char* qkv = (char*)a.qkv;
    rotary.q = qkv;
    rotary.k = qkv + heads * a.itemsize;
    rotary.v = qkv + (heads + keys) * a.itemsize;
    rotary.q_stride = rotary.k_stride = rotary.v_stride = heads + 2 * keys;
    attention.q = qkv;
    attention.q_stride = rotary.q_stride;
    attention.out = a.mixed;
    for (int64_t i = 0; i < a.num_layers; ++i) {
        const DecoderLayer& layer = a.layers[i];
        const DecoderGroup& group = a.groups[layer.group];
        norm.weight = layer.attention_norm;
        pagemill_rms_norm(&norm);
        // From here on what the operation before gave is added to what came in.
        norm.x = a.added;
        norm.residual = a.hidden;
        if (int status = layer.qkv(a.normed, a.E, T, a.qkv, threads)) return status;
        norm_queries_and_keys(a, layer.head_norms);
        rotary.cos = group.cos;
        rotary.sin = group.sin;
        rotary.slot_mapping = group.slot_mapping;
        attention.block_tables = group.block_tables;
        attention.table_stride = group.table_stride;
        attention.window = group.window;
        attention.k_cache = rotary.k_cache = a.caches[2 * i];
        attention.v_cache = rotary.v_cache = a.caches[2 * i + 1];
        if (a.scales) {
            attention.k_scale = rotary.k_scale = a.scales[2 * i];
            attention.v_scale = rotary.v_scale = a.scales[2 * i + 1];
        }
        if (int status = pagemill_rotary(&rotary)) return status;
        if (int status = pagemill_attention(&attention)) return status;
        if (a.read && i == a.num_layers - 1) {
            // Behind the last layer's attention a token is of use to those alone who read it.
            if (a.num_read == 0) return 0;
            only_read.begin(a.read, a.num_read);
            gather_read(a, a.mixed, heads * a.itemsize);
            gather_read(a, a.hidden, a.E * a.itemsize);
            norm.T = T = a.num_read;
        }
        if (int status = layer.output(a.mixed, heads, T, a.added, threads)) return status;
        norm_before_sum(a, layer.after_attention_norm, T);
        norm.weight = layer.mlp_norm;
        pagemill_rms_norm(&norm);
        if (int status = run_mlp(a, layer, T)) return status;
        norm_before_sum(a, layer.after_mlp_norm, T);
    }
    norm.weight = a.last_norm;
    norm.out = a.out;
    int status = pagemill_rms_norm(&norm);
    if (a.logits && !status) status = find_logits(a, T);
    if (a.read) scatter_read(a, a.out, a.E * a.itemsize);
    return status;
}
