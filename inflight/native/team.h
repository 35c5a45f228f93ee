// Work shared between the calling thread and a few helpers.
//
// This is made for machines that are also busy with other work. Any thread that is awake takes the next chunk of units:
// a helper that the system has preempted is not waited for, unless it has already begun a chunk. Helpers spin for a few
// microseconds before they sleep.

#pragma once

#include <cstdint>

namespace inflight {

using Work = void (*)(const void* context, int64_t begin, int64_t end);

// Call work(context, begin, end) for chunks that cover [0, units), on up to `threads` threads, and wait for all.
void run_team(int threads, int64_t units, int64_t chunk, Work work, const void* context);

// Call body(unit) for every unit in [0, units).
template <class Body>
void parallel_for(int threads, int64_t units, int64_t chunk, const Body& body) {
    const Work work = [](const void* context, int64_t begin, int64_t end) {
        const Body& run = *static_cast<const Body*>(context);
        for (; begin < end; ++begin) run(begin);
    };
    run_team(threads, units, chunk, work, &body);
}

// Return a chunk size for units of equal cost: a few chunks per thread, so that a late helper still gets one.
inline int64_t even_chunk(int threads, int64_t units) {
    const int64_t chunks = 4 * static_cast<int64_t>(threads);
    return units > chunks ? (units + chunks - 1) / chunks : 1;
}

}  // namespace inflight
