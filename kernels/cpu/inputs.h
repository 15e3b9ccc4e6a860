// The inputs of a step: its tokens, row after row, and where everything lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// Mirrored in kernels/cpu_inputs.py. Columns of rows are [N], tables [N, B]; R rows run T tokens, of
// which S rows sample.
struct StepInputs {
    const int32_t* tokens;  // [N, max_tokens]
    const int32_t* num_tokens;
    const int32_t* num_computed_tokens;
    const int32_t* num_new_tokens;
    const int64_t* pooling;              // 0: the row samples
    const int32_t* const* block_tables;  // [num_groups] of [N, max_blocks]
    const int64_t* running;              // [R] ascending
    // What is written.
    int64_t* token_ids;             // [T]
    int64_t* positions;             // [T]
    int64_t* const* slot_mappings;  // [num_groups] of [T]
    int32_t* const* running_tables;  // [num_groups] of [R, width]
    int32_t* seq_lens;              // [R]
    int32_t* query_start_loc;       // [R + 1]
    int64_t* last_tokens;           // [S]
    int64_t* sampling_rows;         // [S]
    int64_t max_tokens, max_blocks, block_size, num_groups;
    int64_t R, T, S;
    int64_t width;  // what the longest row needs of a table
};

// Finds T, S and `width`, which say how much will be written.
static void measure_inputs(StepInputs& a) {
    int64_t longest = 0;
    a.T = a.S = 0;
    for (int64_t r = 0; r < a.R; ++r) {
        int64_t row = a.running[r], end = a.num_computed_tokens[row] + a.num_new_tokens[row];
        a.T += a.num_new_tokens[row];
        a.S += end == a.num_tokens[row] && !a.pooling[row];
        longest = std::max(longest, end);
    }
    a.width = (longest + a.block_size - 1) / a.block_size;
}

static void write_inputs(const StepInputs& a) {
    int64_t token = 0, sampled = 0;
    a.query_start_loc[0] = 0;
    for (int64_t r = 0; r < a.R; ++r) {
        int64_t row = a.running[r], first = a.num_computed_tokens[row];
        int64_t count = a.num_new_tokens[row], end = first + count;
        for (int64_t i = 0; i < count; ++i) {
            a.token_ids[token + i] = a.tokens[row * a.max_tokens + first + i];
            a.positions[token + i] = first + i;
        }
        for (int64_t g = 0; g < a.num_groups; ++g) {
            const int32_t* table = a.block_tables[g] + row * a.max_blocks;
            memcpy(a.running_tables[g] + r * a.width, table, a.width * sizeof(*table));
            for (int64_t i = 0; i < count; ++i) {
                int64_t position = first + i, block = table[position / a.block_size];
                a.slot_mappings[g][token + i] = block * a.block_size + position % a.block_size;
            }
        }
        token += count;
        a.seq_lens[r] = end;
        a.query_start_loc[r + 1] = token;
        if (end != a.num_tokens[row] || a.pooling[row]) continue;
        a.last_tokens[sampled] = token - 1;
        a.sampling_rows[sampled++] = row;
    }
}
