// How the ranks of one pipeline stage synchronize in shared memory.
//
// A waiter spins for a moment, then sleeps until it is woken. A wait ends early when the group is marked as lost (a rank
// died), or when a rank does not arrive within the time limit.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {

using Clock = std::chrono::steady_clock;

constexpr int kMaxRanks = 64;
constexpr int kLost = -1;
constexpr int64_t kNap = 50;  // milliseconds after which a sleeper checks whether the group is lost

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that only grows (and wraps around), with the number of threads that sleep until it does.
struct alignas(64) Counter {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;

    void sleep(uint32_t seen) {
#if defined(__linux__)
        const timespec nap{kNap / 1000, kNap % 1000 * 1000000};
        syscall(SYS_futex, &value, FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
        std::this_thread::sleep_for(std::chrono::microseconds(value.load() == seen ? 100 : 0));
#endif
    }

    void wake() {
#if defined(__linux__)
        if (sleepers.load() > 0) syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

    void set(uint32_t now) {
        value.store(now);
        wake();
    }

    // Wait until `reached(value)`. Returns 0, kLost if the group is lost first, or 1 after `limit` microseconds (0: no
    // limit).
    template <class Reached>
    int wait(const std::atomic<uint32_t>& lost, int spins, int64_t limit, const Reached& reached) {
        for (int spin = 0; spin < spins; ++spin, relax()) {
            if (reached(value.load(std::memory_order_acquire))) return 0;
        }
        const auto until = Clock::now() + std::chrono::microseconds(limit);
        int status = 0;
        sleepers.fetch_add(1);
        for (;;) {
            const uint32_t seen = value.load();
            if (reached(seen)) break;
            if (lost.load()) {
                status = kLost;
                break;
            }
            if (limit > 0 && Clock::now() > until) {
                status = 1;
                break;
            }
            sleep(seen);
        }
        sleepers.fetch_sub(1);
        return status;
    }
};

// The start of a group's memory; two regions per rank follow.
struct Group {
    std::atomic<uint32_t> lost;
    Counter rounds[kMaxRanks];  // exchanges that each rank has contributed to
};

struct Member {
    Group* group;
    int rank, size, spins;
    int64_t region, limit;

    char* part(int owner, uint32_t round) const {
        return reinterpret_cast<char*>(group + 1) + (2 * owner + (round & 1)) * region;
    }

    uint32_t next() const { return group->rounds[rank].value.load(std::memory_order_relaxed) + 1; }

    // Publish this rank's part of `round` and wait for the others'. No rank can be a whole round ahead of one that still
    // reads, so two regions per rank are enough.
    int meet(uint32_t round) const {
        group->rounds[rank].set(round);
        for (int other = 0; other < size; ++other) {
            if (other == rank) continue;
            const auto reached = [round](uint32_t at) { return static_cast<int32_t>(at - round) >= 0; };
            const int status = group->rounds[other].wait(group->lost, spins, limit, reached);
            if (status) return status == kLost ? kLost : 1 + other;
        }
        return 0;
    }
};

}  // namespace inflight
