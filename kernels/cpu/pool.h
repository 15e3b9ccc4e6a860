// A pool of threads that no one waits for in vain.
//
// Work is cut into units. The thread that has the work takes units until none is left; threads of
// the pool help if they are awake, and it waits only for units that were taken. So a helper that
// has lost its core to another program costs a unit's time, and not, as at a barrier of OpenMP,
// each time until it comes back. A helper without work watches for some 50 us, then sleeps.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>

static inline void breathe() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

class Pool {
  public:
    typedef void (*Run)(const void* context, int64_t unit, int64_t thread);

    // Calls run(context, unit, thread) once for each unit, with threads numbered from 0, which is
    // the caller, to num_threads - 1. Returns when all units are done.
    void share(int64_t num_units, int64_t num_threads, Run run, const void* context) {
        // Another thread of this process has the helpers: rare, and no reason to wait.
        std::unique_lock<std::mutex> mine(mutex_, std::try_to_lock);
        if (!mine || !have(num_threads - 1)) {
            for (int64_t unit = 0; unit < num_units; ++unit) run(context, unit, 0);
            return;
        }
        // No unit of the work before can be taken any more, whatever is read from here on.
        uint64_t number = ticket_.load(std::memory_order_relaxed) >> 32;
        ticket_.store(number << 32 | CLOSED, std::memory_order_seq_cst);
        run_.store(run, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        num_units_.store(num_units, std::memory_order_release);
        num_helpers_.store(num_threads - 1, std::memory_order_release);
        done_.store(0, std::memory_order_release);
        uint64_t ticket = (number + 1) << 32;
        ticket_.store(ticket, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst)) wake();
        help(ticket, 0);
        for (int64_t spins = 0; done_.load(std::memory_order_acquire) < num_units; ++spins) {
            // A unit takes less than this unless its thread has lost its core: perhaps to us.
            spins < SPINS_BEFORE_YIELDING ? breathe() : (void)sched_yield();
        }
    }

    // The pool of this process. Its threads live as long as the process does.
    static Pool& shared() {
        static Pool* pool = new Pool;
        return *pool;
    }

  private:
    // Some 50 us each, at 40 to 140 cycles a turn.
    static constexpr int64_t SPINS_BEFORE_YIELDING = 2000;
    static constexpr int64_t SPINS_BEFORE_SLEEPING = 2000;
    static constexpr int64_t MAX_HELPERS = 4096;
    static constexpr uint64_t CLOSED = 0xffffffff;

    // Takes units of the work of `ticket`, while there are any.
    void help(uint64_t ticket, int64_t thread) {
        uint64_t number = ticket >> 32;
        for (;;) {
            // What is read here is this work's if its ticket can still be taken behind that: the
            // next work closes the ticket first, and begins when no taken unit is left.
            Run run = run_.load(std::memory_order_acquire);
            const void* context = context_.load(std::memory_order_acquire);
            int64_t num_units = num_units_.load(std::memory_order_acquire);
            int64_t unit = (int64_t)(ticket & CLOSED);
            if (ticket >> 32 != number || unit >= num_units) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                continue;
            }
            run(context, unit, thread);
            done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void live(int64_t thread) {
        uint64_t seen = 0;
        for (;;) {
            uint64_t ticket = wait_for_other_than(seen);
            seen = ticket >> 32;
            if (thread <= num_helpers_.load(std::memory_order_acquire)) help(ticket, thread);
        }
    }

    uint64_t wait_for_other_than(uint64_t seen) {
        for (;;) {
            for (int64_t i = 0; i < SPINS_BEFORE_SLEEPING; ++i) {
                uint64_t ticket = ticket_.load(std::memory_order_acquire);
                if (ticket >> 32 != seen) return ticket;
                breathe();
            }
            int32_t bell = bell_.load(std::memory_order_seq_cst);
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            if (ticket_.load(std::memory_order_seq_cst) >> 32 == seen) {
                syscall(SYS_futex, &bell_, FUTEX_WAIT_PRIVATE, bell, nullptr, nullptr, 0);
            }
            num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    void wake() {
        bell_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &bell_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    struct Helper {
        Pool* pool;
        int64_t thread;
    };

    static void* begin(void* argument) {
        Helper helper = *(Helper*)argument;
        delete (Helper*)argument;
        helper.pool->live(helper.thread);
        return nullptr;
    }

    // Returns whether there is any helper, after starting those that are missing.
    bool have(int64_t num_helpers) {
        // A forked child has the memory of the pool, and none of its threads.
        if (owner_ != getpid()) {
            owner_ = getpid();
            num_started_ = 0;
            num_asleep_.store(0);
        }
        num_helpers = std::min(num_helpers, MAX_HELPERS);
        if (num_started_ < num_helpers) start(num_helpers);
        return num_started_ > 0;
    }

    void start(int64_t num_helpers) {
        // Signals are for threads that know what to do with them.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (num_started_ < num_helpers) {
            pthread_t thread;
            Helper* helper = new Helper{this, num_started_ + 1};
            if (pthread_create(&thread, nullptr, begin, helper) != 0) {
                delete helper;
                break;
            }
            pthread_detach(thread);
            ++num_started_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    std::mutex mutex_;  // held by whoever shares work
    pid_t owner_ = 0;
    int64_t num_started_ = 0;
    // The number of the work, and the next of its units in the low half.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<Run> run_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int64_t> num_units_{0}, num_helpers_{0};
    alignas(64) std::atomic<int32_t> bell_{0};
    std::atomic<int32_t> num_asleep_{0};
};
