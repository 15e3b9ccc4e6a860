// Work shared out among threads: whoever is free takes the next unit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "pool.h"

// Calls run(unit, thread) once for each unit; threads count from 0 to num_threads - 1.
template <class Run>
static void over_units_with_thread(int64_t num_units, int64_t num_threads, const Run& run) {
    num_threads = std::min(num_threads, num_units);
    if (num_threads <= 1) {
        for (int64_t unit = 0; unit < num_units; ++unit) run(unit, 0);
        return;
    }
    Pool::shared().share(
        num_units, num_threads,
        [](const void* context, int64_t unit, int64_t thread) {
            (*(const Run*)context)(unit, thread);
        },
        &run);
}

// Calls run(unit) once for each unit. A thread that shares its core takes fewer.
template <class Run>
static void over_units(int64_t num_units, int64_t num_threads, const Run& run) {
    over_units_with_thread(num_units, num_threads, [&](int64_t unit, int64_t) { run(unit); });
}

// Memory in whole lines, not initialised; freed with its owner.
struct Lines {
    struct Free {
        void operator()(char* p) const { free(p); }
    };
    std::unique_ptr<char, Free> memory;

    explicit Lines(int64_t bytes) {
        if (bytes == 0) return;
        memory.reset((char*)aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (!memory) throw std::bad_alloc();
    }
};
