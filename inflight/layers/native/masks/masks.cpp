// Threads that advance the matchers of constrained rows and fill their masks, without Python and its lock.
//
// A batch waits in host memory for the tokens that a device copies there: each is `UNKNOWN` until it arrives. Batches
// are worked through in order. A batch's rows are divided into groups, and one thread works through a group: matchers
// of one group share a lexer, which only one thread can use at a time.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using IsStopped = bool (*)(const void* matcher);
using Consume = int32_t (*)(void* matcher, uint32_t token);
using ComputeMask = int32_t (*)(void* matcher, uint32_t* mask, size_t bytes);

constexpr int32_t UNKNOWN = INT32_MIN;
constexpr auto SPIN = std::chrono::microseconds(3000);  // longer waits sleep in between
constexpr auto NAP = std::chrono::microseconds(30);

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `is_done`, and looks often at first.
template <typename Done>
void wait_until(Done is_done) {
    const auto start = Clock::now();
    for (int64_t round = 1; !is_done(); ++round) {
        relax();
        if (round % 64 != 0) continue;
        if (Clock::now() - start > SPIN) std::this_thread::sleep_for(NAP);
        else std::this_thread::yield();  // another thread may need this core for what we wait for
    }
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

struct Row {
    void* matcher;
    uint32_t* mask;
    const uint32_t* allowed;  // may be null
    int32_t sample;
};

struct Batch {
    int64_t number;
    std::vector<Row> rows;
    std::vector<int32_t> group_ends;
    const volatile int32_t* tokens;
    int32_t* failed;  // by row: 1 where the matcher has failed
    std::atomic<int32_t> next_group{0};
    std::atomic<int32_t> groups_left{0};
    std::atomic<int64_t> tokens_at{0};
};

struct Threads {
    IsStopped is_stopped;
    Consume consume;
    ComputeMask compute_mask;
    size_t words;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Batch>> batches;  // that are not completed
    std::atomic<bool> is_closed{false};
    std::atomic<int64_t> num_completed{0};  // the number of the last completed batch
    int64_t num_submitted = 0;
    std::atomic<int64_t> tokens_at{0}, done_at{0};  // of the last completed batch
    std::vector<std::thread> threads;

    bool has_tokens(const Batch& batch) const {
        for (const Row& row : batch.rows)
            if (batch.tokens[row.sample] == UNKNOWN) return false;
        return true;
    }

    void fill(const Batch& batch, int32_t index) const {
        const Row& row = batch.rows[index];
        // Tokens after the end of the text are ignored.
        if (!is_stopped(row.matcher)) consume(row.matcher, static_cast<uint32_t>(batch.tokens[row.sample]));
        const bool has_failed = compute_mask(row.matcher, row.mask, words * sizeof(uint32_t)) != 0;
        batch.failed[index] = has_failed;
        if (has_failed) std::memset(row.mask, 0, words * sizeof(uint32_t));
        if (row.allowed != nullptr)
            for (size_t word = 0; word < words; ++word) row.mask[word] &= row.allowed[word];
    }

    void complete(const Batch& batch) {
        std::lock_guard<std::mutex> lock(mutex);
        batches.pop_front();
        tokens_at = batch.tokens_at.load();
        done_at = now_ns();
        num_completed.store(batch.number, std::memory_order_release);
        changed.notify_all();
    }

    void run() {
        int64_t last = 0;
        while (true) {
            std::shared_ptr<Batch> batch;
            {
                std::unique_lock<std::mutex> lock(mutex);
                changed.wait(lock, [&] { return is_closed || (!batches.empty() && batches[0]->number > last); });
                if (is_closed) return;
                batch = batches[0];
            }
            last = batch->number;
            wait_until([&] { return is_closed.load(std::memory_order_relaxed) || has_tokens(*batch); });
            if (is_closed) return;
            std::atomic_thread_fence(std::memory_order_acquire);
            int64_t unset = 0;
            batch->tokens_at.compare_exchange_strong(unset, now_ns());
            const auto num_groups = static_cast<int32_t>(batch->group_ends.size());
            for (int32_t group; (group = batch->next_group++) < num_groups;) {
                const int32_t start = group ? batch->group_ends[group - 1] : 0;
                for (int32_t index = start; index < batch->group_ends[group]; ++index) fill(*batch, index);
                if (--batch->groups_left == 0) complete(*batch);
            }
        }
    }
};

}  // namespace

extern "C" {

void* inflight_masks_open(int64_t num_threads, void* is_stopped, void* consume, void* compute_mask, int64_t words) {
    auto* threads = new Threads();
    threads->is_stopped = reinterpret_cast<IsStopped>(is_stopped);
    threads->consume = reinterpret_cast<Consume>(consume);
    threads->compute_mask = reinterpret_cast<ComputeMask>(compute_mask);
    threads->words = static_cast<size_t>(words);
    for (int64_t i = 0; i < num_threads; ++i) threads->threads.emplace_back([threads] { threads->run(); });
    return threads;
}

// Returns the number of the batch. `masks` [rows, words] is indexed by `places`. Rows of one group come one after
// another, and `group_ends` says where each group ends. Everything is copied but the tokens, the masks, `allowed` and
// `failed`, which must outlive the batch.
int64_t inflight_masks_submit(void* handle, void* const* matchers, const int32_t* places, const int32_t* samples,
                              const uint32_t* const* allowed, int64_t num_rows, const int32_t* group_ends,
                              int64_t num_groups, const int32_t* tokens, uint32_t* masks, int32_t* failed) {
    auto* threads = static_cast<Threads*>(handle);
    auto batch = std::make_shared<Batch>();
    for (int64_t i = 0; i < num_rows; ++i)
        batch->rows.push_back({matchers[i], masks + places[i] * threads->words, allowed[i], samples[i]});
    batch->group_ends.assign(group_ends, group_ends + num_groups);
    batch->groups_left = static_cast<int32_t>(num_groups);
    batch->tokens = tokens;
    batch->failed = failed;
    std::lock_guard<std::mutex> lock(threads->mutex);
    batch->number = ++threads->num_submitted;
    threads->batches.push_back(batch);
    threads->changed.notify_all();
    return batch->number;
}

// Returns 1 once the batch is completed, or 0 after `nanoseconds`.
int32_t inflight_masks_wait(void* handle, int64_t number, int64_t nanoseconds) {
    auto* threads = static_cast<Threads*>(handle);
    const int64_t deadline = now_ns() + nanoseconds;
    const auto is_done = [&] { return threads->num_completed.load(std::memory_order_acquire) >= number; };
    wait_until([&] { return is_done() || now_ns() > deadline; });
    return is_done();
}

// Writes when the tokens of the last completed batch were there, and when its masks were.
void inflight_masks_times(void* handle, int64_t* times) {
    auto* threads = static_cast<Threads*>(handle);
    std::lock_guard<std::mutex> lock(threads->mutex);
    times[0] = threads->tokens_at;
    times[1] = threads->done_at;
}

// Abandons what is not completed, and waits for the threads.
void inflight_masks_close(void* handle) {
    auto* threads = static_cast<Threads*>(handle);
    {
        std::lock_guard<std::mutex> lock(threads->mutex);
        threads->is_closed = true;
        threads->changed.notify_all();
    }
    for (auto& thread : threads->threads) thread.join();
    delete threads;
}
}
