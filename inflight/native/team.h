// Work shared between the calling thread and a few helpers.
//
// Made for machines that are busy with other things too. Units of work are taken one chunk at a time, by whoever
// is awake: a helper that the system has put aside is not waited for, only a chunk that it has already begun is.
// Helpers watch for work for a few microseconds, then sleep.

#pragma once

#include <cstdint>

namespace inflight {

using Work = void (*)(const void* context, int64_t begin, int64_t end);

// Calls work(context, begin, end) for chunks that cover [0, units), on up to `threads` threads; all is done
// when it returns.
void run_team(int threads, int64_t units, int64_t chunk, Work work, const void* context);

// Calls body(unit) for every unit in [0, units).
template <class Body>
void parallel_for(int threads, int64_t units, int64_t chunk, const Body& body) {
    const Work work = [](const void* context, int64_t begin, int64_t end) {
        const Body& run = *static_cast<const Body*>(context);
        for (; begin < end; ++begin) run(begin);
    };
    run_team(threads, units, chunk, work, &body);
}

// A chunk for work whose units are alike: a few chunks a thread, so that a late helper still finds one.
inline int64_t even_chunk(int threads, int64_t units) {
    const int64_t chunks = 4 * static_cast<int64_t>(threads);
    return units > chunks ? (units + chunks - 1) / chunks : 1;
}

}  // namespace inflight
