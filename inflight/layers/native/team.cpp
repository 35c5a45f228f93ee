#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <condition_variable>
#endif

namespace inflight {
namespace {

constexpr int kMostThreads = 256;
constexpr std::chrono::microseconds kSpinTime(50);    // longer than the gap between two products of a step
constexpr std::chrono::microseconds kYieldTime(1000);  // longer than the gap between two steps
constexpr int kSpins = 32;                            // between two looks at the clock
constexpr size_t kOwnLine = 128;                    // processors fetch lines in pairs

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Word = std::atomic<uint32_t>;

// Sleep until `word` is no longer `value`, or for no reason.
#if defined(__linux__)
void sleep_while(Word& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(Word& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable changed;

void sleep_while(Word& word, uint32_t value) {
    std::unique_lock<std::mutex> lock(sleep_mutex);
    if (word.load() == value) changed.wait(lock);
}

void wake_all(Word&) {
    { std::lock_guard<std::mutex> lock(sleep_mutex); }  // so that nobody is between looking and sleeping
    changed.notify_all();
}
#endif

// Spin for a short time, then for a longer one in which any other thread that wants this processor has it. To wake
// sleepers takes longer than most products, and the longer the more of them there are. Returns whether the word has changed.
bool spin_while(const Word& word, uint32_t value) {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (word.load(std::memory_order_acquire) != value) return true;
            relax();
        }
        const auto waited = std::chrono::steady_clock::now() - begin;
        if (waited >= kYieldTime) return false;
        if (waited >= kSpinTime) std::this_thread::yield();
    }
}

std::vector<Node>& nodes() {
    static auto* const all = new std::vector<Node>;
    return *all;
}

// Keep the calling thread on a node. Where that is not allowed, it may run anywhere.
void stay_on(const Node& node) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int processor : node.processors) CPU_SET(processor, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)node;
#endif
}

int64_t share_begin(int64_t share, int64_t shares, int64_t units) { return share * units / shares; }

struct Job {
    Work work;
    const void* context;
    int64_t units, chunk;
    int shares;
};

// No lock is taken for a job. A helper announces in its own word that it enters a round, then looks whether the round is
// still open; the caller closes the round, then looks for helpers inside. All four accesses are sequentially
// consistent, so one of the two sees the other, and a job is never changed while somebody works on it.
class Team {
  public:
    // Returns false if another thread has the team: the caller then works alone.
    bool run(int threads, Job job) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner) return false;
        job.shares = static_cast<int>(std::min<int64_t>(threads, (job.units + job.chunk - 1) / job.chunk));
        hire(threads - 1);
        job_ = job;
        for (int i = 0; i < job.shares; ++i) {
            shares_[i].end = share_begin(i + 1, job.shares, job.units);
            shares_[i].next.store(share_begin(i, job.shares, job.units), std::memory_order_relaxed);
        }
        const uint32_t round = next_round(round_.load(std::memory_order_relaxed));
        round_.store(round);
        if (sleepers_.load() > 0) wake_all(round_);
        take(0);
        close(round);
        return true;
    }

  private:
    struct alignas(kOwnLine) Share {
        std::atomic<int64_t> next{0};  // the first unit that is not taken
        int64_t end = 0;
    };
    struct alignas(kOwnLine) Helper {
        Word round{0};  // in which it works; 0: none
    };

    static uint32_t next_round(uint32_t round) { return round + 1 ? round + 1 : 1; }

    void hire(int helpers) {
        for (; hired_ < helpers; ++hired_) {
            const int index = hired_ + 1;
            const size_t node = nodes().size() * index / (helpers + 1);
            std::thread([this, index, node] {
                if (nodes().size() > 1) stay_on(nodes()[node]);
                help(index);
            }).detach();
        }
    }

    // Take chunks, of this thread's own share first, until there are none.
    void take(int index) {
        for (int i = 0; i < job_.shares; ++i) {
            Share& share = shares_[(index + i) % job_.shares];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                const int64_t begin = share.next.fetch_add(job_.chunk, std::memory_order_relaxed);
                if (begin < share.end)
                    job_.work(job_.context, begin, std::min(begin + job_.chunk, share.end));
            }
        }
    }

    // No more helpers may join; those that did finish their chunk.
    void close(uint32_t round) {
        closed_.store(round);
        for (int i = 1; i <= hired_; ++i) {
            Word& working = helpers_[i].round;
            if (working.load() != round || spin_while(working, round)) continue;
            waiting_.store(1);
            while (working.load() == round) sleep_while(working, round);
            waiting_.store(0);
        }
    }

    [[noreturn]] void help(int index) {
        uint32_t seen = 0;
        for (;;) {
            if (!spin_while(round_, seen)) {
                sleepers_.fetch_add(1);
                while (round_.load() == seen) sleep_while(round_, seen);
                sleepers_.fetch_sub(1);
            }
            seen = round_.load(std::memory_order_acquire);
            Word& working = helpers_[index].round;
            working.store(seen);
            if (closed_.load() != seen && round_.load() == seen && index < job_.shares) take(index);
            working.store(0);
            if (waiting_.load()) wake_all(working);
        }
    }

    std::mutex owner_;  // held by the thread whose job is running
    int hired_ = 0;     // guarded by owner_
    Job job_{};         // changed by the owner between rounds
    alignas(kOwnLine) Word round_{0};   // counts jobs
    alignas(kOwnLine) Word closed_{0};  // the last round that is over
    alignas(kOwnLine) std::atomic<int> sleepers_{0};
    std::atomic<int> waiting_{0};  // whether the owner sleeps until a helper is done
    Share shares_[kMostThreads];
    Helper helpers_[kMostThreads];
};

}  // namespace

void place_team(std::vector<Node> all) { nodes() = std::move(all); }

const std::vector<Node>& team_nodes() { return nodes(); }

std::vector<int64_t> deal(int threads, int64_t units) {
    std::vector<int64_t> order(units);
    const int64_t shares = std::min<int64_t>(std::min(threads, kMostThreads), units);
    int64_t next = 0;
    for (int64_t place = 0; next < units; ++place)
        for (int64_t share = 0; share < shares; ++share) {
            const int64_t at = share_begin(share, shares, units) + place;
            if (at < share_begin(share + 1, shares, units)) order[at] = next++;
        }
    return order;
}

void run_team(int threads, int64_t units, int64_t chunk, Work work, const void* context) {
    // Never destroyed: helpers may outlive every other static object.
    static Team* const team = new Team;
    threads = std::min(threads, kMostThreads);
    if (threads > 1 && units > chunk && team->run(threads, {work, context, units, chunk, 0})) return;
    if (units > 0) work(context, 0, units);
}

}  // namespace inflight

// Node i has the identifier ids[i] and processors[starts[i]] to processors[starts[i + 1] - 1].
extern "C" void inflight_place_team(const int32_t* ids, const int32_t* starts, const int32_t* processors,
                                    int64_t count) {
    std::vector<inflight::Node> all;
    for (int64_t i = 0; i < count; ++i)
        all.push_back({ids[i], std::vector<int>(processors + starts[i], processors + starts[i + 1])});
    inflight::place_team(std::move(all));
}
