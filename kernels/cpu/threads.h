// Work shared out among threads: whoever is free takes the next unit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

// Calls run(unit) once for each unit. A thread that shares its core takes fewer.
template <class Run>
static void over_units(int64_t num_units, int64_t num_threads, const Run& run) {
    num_threads = std::min(num_threads, num_units);
    if (num_threads <= 1) {
        for (int64_t unit = 0; unit < num_units; ++unit) run(unit);
        return;
    }
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) {
        run(unit);
    }
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
