// How the ranks of one stage meet in memory that they share.
//
// Whoever waits looks for a moment, then sleeps until it is woken. A wait ends early when the group is lost (a rank
// died, and someone said so), or when a rank does not come within the time that it was given.
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
constexpr int64_t kNap = 50;  // milliseconds after which a sleeper looks whether the group is lost

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that only grows (and wraps around), and who sleeps until it has.
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

    // Until `reached(value)`: 0, kLost if the group is lost first, 1 if it takes longer than `limit` microseconds. A limit
    // of 0: for as long as it takes.
    template <class Reached>
    int wait(const std::atomic<uint32_t>& lost, int spins, int64_t limit, const Reached& reached) {
        for (int spin = 0; spin < spins; ++spin, relax()) {
            if (reached(value.load(std::memory_order_acquire))) return 0;
        }
        const auto until = Clock::now() + std::chrono::microseconds(limit);
        int found = 0;
        sleepers.fetch_add(1);
        for (;;) {
            const uint32_t seen = value.load();
            if (reached(seen)) break;
            if (lost.load()) {
                found = kLost;
                break;
            }
            if (limit > 0 && Clock::now() > until) {
                found = 1;
                break;
            }
            sleep(seen);
        }
        sleepers.fetch_sub(1);
        return found;
    }
};

// The beginning of a group's memory; the slots of its ranks follow, two for each.
struct Group {
    std::atomic<uint32_t> lost;
    Counter rounds[kMaxRanks];  // the exchanges that each rank has its part in
};

struct Seat {
    Group* group;
    int rank, size, spins;
    int64_t slot, limit;

    char* part(int of, uint32_t round) const {
        return reinterpret_cast<char*>(group + 1) + (2 * of + (round & 1)) * slot;
    }

    uint32_t next() const { return group->rounds[rank].value.load(std::memory_order_relaxed) + 1; }

    // My part of `round` is there. Waits for the others'. Nobody can be a whole round ahead of one who still reads, so
    // two slots for each are enough.
    int meet(uint32_t round) const {
        group->rounds[rank].set(round);
        for (int other = 0; other < size; ++other) {
            if (other == rank) continue;
            const auto reached = [round](uint32_t at) { return static_cast<int32_t>(at - round) >= 0; };
            const int found = group->rounds[other].wait(group->lost, spins, limit, reached);
            if (found) return found == kLost ? kLost : 1 + other;
        }
        return 0;
    }
};

}  // namespace inflight
