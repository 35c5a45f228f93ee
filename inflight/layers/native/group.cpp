// Shared-memory operations of the ranks of one engine: sums, gathers, and streams of bytes.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "group.h"

namespace inflight {
namespace {

// One writer, several readers, a ring of bytes between them.
struct Stream {
    alignas(64) std::atomic<uint64_t> written;
    Counter rung;   // raised by the writer when there is more to read
    Counter freed;  // raised by readers when there is more space
    struct alignas(64) {
        std::atomic<uint64_t> at;
    } taken[kMaxRanks];

    char* ring() { return reinterpret_cast<char*>(this + 1); }

    uint64_t oldest(int readers) const {
        uint64_t least = UINT64_MAX;
        for (int i = 0; i < readers; ++i) least = std::min(least, taken[i].at.load());
        return least;
    }
};

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

int64_t inflight_group_bytes() { return sizeof(Group); }
int64_t inflight_stream_bytes() { return sizeof(Stream); }

void inflight_group_lose(void* group) { static_cast<Group*>(group)->lost.store(1); }

// x [count] becomes the sum of all ranks' x, added in the order of the ranks: the same bits on each of them.
int inflight_group_sum(void* group, int rank, int size, int64_t region, int spins, int64_t limit, float* x,
                       int64_t count) {
    const Member member{static_cast<Group*>(group), rank, size, spins, region, limit};
    const int64_t most = region / static_cast<int64_t>(sizeof(float));
    for (int64_t done = 0; done < count; done += most) {
        const int64_t n = std::min(most, count - done);
        const uint32_t round = member.next();
        float* to = x + done;
        std::memcpy(member.part(rank, round), to, n * sizeof(float));
        if (const int status = member.meet(round)) return status;
        const float* first = reinterpret_cast<const float*>(member.part(0, round));
        const float* second = reinterpret_cast<const float*>(member.part(1, round));
        for (int64_t i = 0; i < n; ++i) to[i] = first[i] + second[i];
        for (int other = 2; other < size; ++other) {
            const float* part = reinterpret_cast<const float*>(member.part(other, round));
            for (int64_t i = 0; i < n; ++i) to[i] += part[i];
        }
    }
    return 0;
}

// Rank r contributes x [num_rows][widths[r]]: out [num_rows] gets the columns of all ranks side by side. A region holds at
// least one row of the widest rank.
int inflight_group_gather(void* group, int rank, int size, int64_t region, int spins, int64_t limit, const float* x,
                          int64_t num_rows, const int64_t* widths, float* out) {
    const Member member{static_cast<Group*>(group), rank, size, spins, region, limit};
    const int64_t mine = widths[rank], total = std::accumulate(widths, widths + size, int64_t{0});
    const int64_t most = region / (*std::max_element(widths, widths + size) * static_cast<int64_t>(sizeof(float)));
    for (int64_t done = 0; done < num_rows; done += most) {
        const int64_t n = std::min(most, num_rows - done);
        const uint32_t round = member.next();
        std::memcpy(member.part(rank, round), x + done * mine, n * mine * sizeof(float));
        if (const int status = member.meet(round)) return status;
        float* to = out + done * total;
        for (int other = 0; other < size; to += widths[other++]) {
            const float* part = reinterpret_cast<const float*>(member.part(other, round));
            for (int64_t i = 0; i < n; ++i)
                std::memcpy(to + i * total, part + i * widths[other], widths[other] * sizeof(float));
        }
    }
    return 0;
}

// Write to the stream; waits only while the ring is full.
int inflight_stream_write(void* stream, void* group, int readers, int64_t capacity, int spins, const char* data,
                          int64_t count) {
    Stream& to = *static_cast<Stream*>(stream);
    uint64_t written = to.written.load();
    while (count > 0) {
        const auto space = [&](uint32_t = 0) {
            return static_cast<int64_t>(capacity - (written - to.oldest(readers)));
        };
        if (space() <= 0) {
            const auto reached = [&](uint32_t) { return space() > 0; };
            if (const int status = to.freed.wait(static_cast<Group*>(group)->lost, spins, 0, reached)) return status;
        }
        const int64_t at = static_cast<int64_t>(written % capacity);
        const int64_t n = std::min({count, space(), capacity - at});
        std::memcpy(to.ring() + at, data, n);
        written += n, data += n, count -= n;
        to.written.store(written);
        to.rung.set(to.rung.value.load() + 1);
    }
    return 0;
}

// Read `count` bytes, waiting until they are there.
int inflight_stream_read(void* stream, void* group, int reader, int64_t capacity, int spins, char* data,
                         int64_t count) {
    Stream& from = *static_cast<Stream*>(stream);
    uint64_t taken = from.taken[reader].at.load();
    while (count > 0) {
        const auto ready = [&](uint32_t = 0) { return static_cast<int64_t>(from.written.load() - taken); };
        if (ready() <= 0) {
            const auto reached = [&](uint32_t) { return ready() > 0; };
            if (const int status = from.rung.wait(static_cast<Group*>(group)->lost, spins, 0, reached)) return status;
        }
        const int64_t at = static_cast<int64_t>(taken % capacity);
        const int64_t n = std::min({count, ready(), capacity - at});
        std::memcpy(data, from.ring() + at, n);
        taken += n, data += n, count -= n;
        from.taken[reader].at.store(taken);
        from.freed.value.fetch_add(1);
        from.freed.wake();
    }
    return 0;
}

// Heartbeat: count up in `beats` from a separate thread for as long as this process lives.
void inflight_beat(void* beats, int64_t milliseconds) {
    auto* count = static_cast<std::atomic<uint32_t>*>(beats);
    std::thread([count, milliseconds] {
        for (;;) {
            count->fetch_add(1);
            std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        }
    }).detach();
}

}  // extern "C"
