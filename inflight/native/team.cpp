#include "team.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace inflight {
namespace {

constexpr int kSpins = 2000;  // checks of a flag before sleeping: about 25 to 100 microseconds

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Job {
    Work work;
    const void* context;
    int64_t units, chunk;
};

class Team {
  public:
    // Returns false if another thread has the team: the caller then works alone.
    bool run(int threads, const Job& job) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner) return false;
        hire(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            next_.store(0, std::memory_order_relaxed);
            places_ = threads - 1;
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take();
        close();
        return true;
    }

  private:
    void hire(int helpers) {
        for (; hired_ < helpers; ++hired_) std::thread([this] { help(); }).detach();
    }

    // Take chunks until there are none.
    void take() {
        for (;;) {
            const int64_t begin = next_.fetch_add(job_.chunk, std::memory_order_relaxed);
            if (begin >= job_.units) return;
            job_.work(job_.context, begin, std::min(begin + job_.chunk, job_.units));
        }
    }

    // No more helpers may join; those that did finish their chunk.
    void close() {
        for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) > 0; ++spin) relax();
        std::unique_lock<std::mutex> lock(mutex_);
        places_ = 0;
        done_.wait(lock, [this] { return busy_.load(std::memory_order_relaxed) == 0; });
    }

    [[noreturn]] void help() {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < kSpins && round_.load(std::memory_order_acquire) == seen; ++spin) relax();
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
                seen = round_.load(std::memory_order_relaxed);
                if (places_ == 0) continue;
                --places_;
                busy_.fetch_add(1, std::memory_order_relaxed);
            }
            take();
            std::lock_guard<std::mutex> lock(mutex_);
            if (busy_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
        }
    }

    std::mutex owner_;  // held by the thread whose job is running
    int hired_ = 0;     // guarded by owner_
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<uint64_t> round_{0};  // counts jobs
    std::atomic<int> busy_{0};        // helpers inside the job
    std::atomic<int64_t> next_{0};    // the first unit that is not taken
    int places_ = 0;                  // helpers that may still join; guarded by mutex_, as is job_ between jobs
    Job job_{};
};

}  // namespace

void run_team(int threads, int64_t units, int64_t chunk, Work work, const void* context) {
    // Never destroyed: helpers may outlive every other static object.
    static Team* const team = new Team;
    if (threads > 1 && units > chunk && team->run(threads, {work, context, units, chunk})) return;
    if (units > 0) work(context, 0, units);
}

}  // namespace inflight
