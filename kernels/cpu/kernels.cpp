// Attention and what stands around it, on a processor. Built and loaded by kernels/cpu_build.py.

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "decode.h"
#include "draw.h"
#include "inputs.h"
#include "layers.h"
#include "linear.h"
#include "pack.h"
#include "prefill.h"
#include "quantise.h"
#include "quantised.h"
#include "read.h"
#include "told.h"
#include "unpack.h"

namespace {

struct DecodeItem {
    int64_t request, token, start, end;
    int64_t part;  // among all parts; -1: the request is not split
};

struct Split {
    int64_t token, first_part, num_parts;
};

struct Work {
    std::vector<DecodeItem> decodes;
    std::vector<PrefillItem> prefills;
    std::vector<Split> splits;
    int64_t num_parts = 0;
};

// Below this many tokens a part costs more, in the merge, than it hides.
constexpr int64_t MIN_PART = 128;
// Items per thread: the last one to end keeps the others waiting for a quarter of its share.
constexpr int64_t PARTS_PER_THREAD = 4;
// Below this many bytes of keys and values, waking a second thread costs more than it gains.
constexpr int64_t BYTES_PER_THREAD = 64 << 10;

void plan_decode(const Attention& a, int64_t request, int64_t token, int64_t part_size, Work& work) {
    int64_t end = a.seq_lens[request];
    int64_t start = a.window && end > a.window ? end - a.window : 0;
    int64_t parts = (end - start + part_size - 1) / part_size;
    if (parts <= 1) {
        work.decodes.push_back({request, token, start, end, -1});
        return;
    }
    int64_t share = round_up((end - start + parts - 1) / parts, TILE);
    Split split{token, work.num_parts, 0};
    // Parts meet at multiples of LANES, lest a group of keys be read twice.
    for (int64_t at = start, next; at < end; at = next) {
        next = std::min(at / LANES * LANES + share, end);
        work.decodes.push_back({request, token, at, next, work.num_parts++});
        ++split.num_parts;
    }
    work.splits.push_back(split);
}

Work plan(const Attention& a) {
    Work work;
    int64_t total = 0;
    auto new_tokens = [&](int64_t r) -> int64_t {
        return a.query_start_loc ? a.query_start_loc[r + 1] - a.query_start_loc[r] : 1;
    };
    for (int64_t r = 0; r < a.R; ++r) {
        int64_t seen = a.seq_lens[r];
        if (a.window) seen = std::min(seen, a.window);
        if (new_tokens(r) == 1) total += seen;
    }
    int64_t part_size = a.num_threads == 1 ? INT64_MAX / 2
        : std::max(MIN_PART, total / (PARTS_PER_THREAD * a.num_threads));
    int64_t per_tile = tokens_per_tile(a);
    for (int64_t r = 0; r < a.R; ++r) {
        int64_t start = a.query_start_loc ? a.query_start_loc[r] : r, count = new_tokens(r);
        if (count == 1) plan_decode(a, r, start, part_size, work);
        if (count <= 1) continue;
        for (int64_t first = 0; first < count; first += per_tile) {
            for (int64_t g = 0; g < a.G; ++g) {
                work.prefills.push_back({r, g, first, std::min(per_tile, count - first)});
            }
        }
    }
    // The longest first, so that none ends alone.
    std::stable_sort(work.prefills.begin(), work.prefills.end(),
                     [&](const PrefillItem& x, const PrefillItem& y) {
                         return x.first + a.seq_lens[x.request] - new_tokens(x.request) >
                                y.first + a.seq_lens[y.request] - new_tokens(y.request);
                     });
    return work;
}

int64_t useful_threads(const Attention& a, const Work& work, int64_t itemsize) {
    if (!work.prefills.empty()) return a.num_threads;
    int64_t tokens = 0;
    for (const DecodeItem& item : work.decodes) tokens += item.end - item.start;
    int64_t bytes = tokens * 2 * a.G * a.D * itemsize;
    return std::max<int64_t>(1, std::min({a.num_threads, bytes / BYTES_PER_THREAD,
                                          (int64_t)work.decodes.size()}));
}

struct Free {
    void operator()(void* p) const { free(p); }
};
typedef std::unique_ptr<float, Free> Floats;

Floats allocate(int64_t floats) {
    Floats memory((float*)aligned_alloc(64, round_up(std::max<int64_t>(floats, 1) * 4, 64)));
    if (!memory) throw std::bad_alloc();
    return memory;
}

template <class Dot, class P, class A, class T>
void attend(const Attention& a) {
    Work work = plan(a);
    int64_t width = Dot::width(a.D), num_items = work.prefills.size() + work.decodes.size();
    int64_t num_threads = useful_threads(a, work, sizeof(T));
    int64_t scratch_size = round_up(DecodeScratch<Dot>().lay_out(a, nullptr) + a.H * width + 2 * a.H, 16);
    if (!work.prefills.empty()) {
        PrefillScratch<P> layout;
        scratch_size = std::max(scratch_size, layout.lay_out(a, nullptr));
    }
    Floats scratch = allocate(scratch_size * num_threads);
    Floats parts = allocate(work.num_parts * a.H * width);
    std::vector<Row> part_rows(work.num_parts * a.H);
    over_units_with_thread(num_items, num_threads, [&](int64_t i, int64_t thread) {
        float* mine = scratch.get() + thread * scratch_size;
        if (i < (int64_t)work.prefills.size()) return prefill<P, A, T>(a, work.prefills[i], mine);
        const DecodeItem& item = work.decodes[i - work.prefills.size()];
        float* own = mine + scratch_size - a.H * width - 2 * a.H;
        Partial partial{(Row*)(own + a.H * width), own};
        if (item.part >= 0) {
            partial = {&part_rows[item.part * a.H], parts.get() + item.part * a.H * width};
        }
        decode<Dot, A, T>(a, item.request, item.token, item.start, item.end, partial, mine);
        if (item.part < 0) merge<Dot, A>(a, item.token, partial, 1);
    });
    for (const Split& split : work.splits) {
        Partial partial{&part_rows[split.first_part * a.H],
                        parts.get() + split.first_part * a.H * width};
        merge<Dot, A>(a, split.token, partial, split.num_parts);
    }
}

// Numbers of types in kernels/cpu_build.py.
enum Type { FP32, BF16, FP16, E4M3, E5M2 };

// `Dot8` decodes keys and values of 8 bits.
template <class Dot, class Dot8, class P, class A>
bool attend_over(const Attention& a) {
    switch (a.kv_dtype) {
        case E4M3: attend<Dot8, P, A, E4m3>(a); return true;
        case E5M2: attend<Dot8, P, A, E5m2>(a); return true;
        default: attend<Dot, P, A, A>(a); return a.kv_dtype == a.dtype;
    }
}

// Below this many elements per thread, one thread is faster.
constexpr int64_t ELEMENTS_PER_THREAD = 16 << 10;
// What a cosine and a sine cost, in elements of the above.
constexpr int64_t OPERATIONS_PER_ANGLE = 32;

template <class Run>
void over_tokens(int64_t num_tokens, int64_t elements, int64_t num_threads, const Run& run) {
    num_threads = std::max<int64_t>(
        1, std::min({num_threads, num_tokens, num_tokens * elements / ELEMENTS_PER_THREAD}));
    int64_t num_units = num_threads == 1 ? 1 : std::min(num_tokens, UNITS_PER_THREAD * num_threads);
    over_units(num_units, num_threads, [&](int64_t unit) {
        int64_t end = num_tokens * (unit + 1) / num_units;
        for (int64_t token = num_tokens * unit / num_units; token < end; ++token) run(token);
    });
}

template <class A>
void rotary_over(const Rotary& a) {
    over_tokens(a.T, (a.H + 2 * a.G) * a.D, a.num_threads, [&](int64_t token) {
        if (a.kv_dtype == E4M3) return rotate_token<A, E4m3>(a, token);
        if (a.kv_dtype == E5M2) return rotate_token<A, E5m2>(a, token);
        rotate_token<A, A>(a, token);
    });
}

// Calls `run` with a number of the type's C++ twin.
template <class Run>
int with_type(int64_t dtype, const Run& run) {
    switch (dtype) {
        case FP32: run(float{}); return 0;
        case BF16: run(Bf16{}); return 0;
        case FP16: run(Fp16{}); return 0;
        default: return 2;
    }
}

}  // namespace

// Returns 0; 1 if memory is short, 2 if a type is not known.
extern "C" int pagemill_attention(const Attention* a) {
    try {
        switch (a->dtype) {
            case FP32: return attend_over<DotFp32, DotFp32, ProductFp32, float>(*a) ? 0 : 2;
            case FP16: return attend_over<DotFp32, DotFp32, ProductFp32, Fp16>(*a) ? 0 : 2;
#if defined(BF16_DOT) && defined(__AVX512VBMI__)
            case BF16: return attend_over<DotBf16, DotBf16, ProductBf16, Bf16>(*a) ? 0 : 2;
#elif defined(BF16_DOT)
            case BF16: return attend_over<DotBf16, DotFp32, ProductBf16, Bf16>(*a) ? 0 : 2;
#else
            case BF16: return attend_over<DotFp32, DotFp32, ProductFp32, Bf16>(*a) ? 0 : 2;
#endif
            default: return 2;
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" int pagemill_embed(const Embedding* a) { return embed(*a); }

extern "C" int pagemill_rotary(const Rotary* a) {
    return with_type(a->dtype, [&](auto type) { rotary_over<decltype(type)>(*a); });
}

extern "C" void pagemill_turns(const Turns* a) {
    over_tokens(a->T, a->half * OPERATIONS_PER_ANGLE, a->num_threads,
                [&](int64_t token) { turn_token(*a, token); });
}

extern "C" int pagemill_rms_norm(const RmsNorm* a) {
    return with_type(a->dtype, [&](auto type) {
        over_tokens(a->T, a->E, a->num_threads,
                    [&](int64_t token) { norm_token<decltype(type)>(*a, token); });
    });
}

extern "C" int pagemill_norm_heads(const NormHeads* a) {
    return with_type(a->dtype, [&](auto type) {
        over_tokens(a->T, a->H * a->D, a->num_threads,
                    [&](int64_t token) { norm_heads_of_token<decltype(type)>(*a, token); });
    });
}

template <class Activation>
static int activate_over(const SiluAndMul& a) {
    return with_type(a.dtype, [&](auto type) {
        over_tokens(a.T, a.I, a.num_threads,
                    [&](int64_t token) { activate_token<decltype(type), Activation>(a, token); });
    });
}

extern "C" int pagemill_silu_and_mul(const SiluAndMul* a) { return activate_over<Silu>(*a); }

extern "C" int pagemill_gelu_and_mul(const SiluAndMul* a) { return activate_over<Gelu>(*a); }

extern "C" int pagemill_widen(const Widen* a) {
    return with_type(a->dtype, [&](auto type) { widen_over<decltype(type)>(*a); });
}

extern "C" int pagemill_tell(const Told* a) {
    return with_type(a->dtype, [&](auto type) {
        over_units(a->T, a->num_threads, [&](int64_t t) { tell<decltype(type)>(*a, t); });
    });
}

#include "decoder.h"
#include "experts.h"

// Returns 0, or what an operation returned that failed: 1 if memory is short.
extern "C" int pagemill_decoder(const Decoder* a) { return decode_layers(*a); }

extern "C" void pagemill_measure_inputs(StepInputs* a) { measure_inputs(*a); }

extern "C" void pagemill_write_inputs(const StepInputs* a) { write_inputs(*a); }

// Threads of this process's operations, where not torch's number counts; 0 until it is told.
static std::atomic<int> threads_of_process{0};

extern "C" void pagemill_use_threads(int num_threads) { threads_of_process.store(num_threads); }

extern "C" int pagemill_threads() { return threads_of_process.load(); }

// Reads memory, for benchmarks: `count` numbers per thread, a multiple of 16 * W, thread by thread.
extern "C" float pagemill_read(const float* from, int64_t count, int64_t num_threads) {
    std::atomic<float> last{0};  // so that no compiler leaves the reading out
    over_units(num_threads, num_threads, [&](int64_t thread) {
        last.store(read_all(from + thread * count, count), std::memory_order_relaxed);
    });
    return last.load();
}
