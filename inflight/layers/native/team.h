// Work shared between the calling thread and a few helpers.
//
// Each thread has a share of the units, always the same one for the same number of units, and takes it in chunks. A
// thread that is done takes chunks from the shares of others: a helper that the system has preempted is not waited for,
// unless it has already begun a chunk. Helpers spin before they sleep: for some microseconds, and then for a millisecond
// in which they give way to any other thread.
//
// Helpers and memory of a machine with several NUMA nodes are divided in the same proportions, so that a thread finds
// its share of a weight in its own node's memory.

#pragma once

#include <cstdint>
#include <vector>

namespace inflight {

// The processors of one NUMA node that this process may use.
struct Node {
    int id;
    std::vector<int> processors;
};

// Divide helpers hired from now on, and weights, between these nodes. Without a call, or with a single node, the system
// places both.
void place_team(std::vector<Node> nodes);
const std::vector<Node>& team_nodes();

using Work = void (*)(const void* context, int64_t begin, int64_t end);

// Call work(context, begin, end) for chunks that cover [0, units), on up to `threads` threads, and wait for all.
void run_team(int threads, int64_t units, int64_t chunk, Work work, const void* context);

// Call body(begin, end) for ranges that cover [0, units).
template <class Body>
void parallel_ranges(int threads, int64_t units, int64_t chunk, const Body& body) {
    const Work work = [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
    };
    run_team(threads, units, chunk, work, &body);
}

// Call body(unit) for every unit in [0, units).
template <class Body>
void parallel_for(int threads, int64_t units, int64_t chunk, const Body& body) {
    parallel_ranges(threads, units, chunk, [&](int64_t begin, int64_t end) {
        for (; begin < end; ++begin) body(begin);
    });
}

// Return the units in the order in which the team should have them if their numbers rank them by cost, the most expensive
// first, and a chunk is one unit: every thread's share begins with expensive ones and ends with cheap ones, of which the
// first thread that is done takes some.
std::vector<int64_t> deal(int threads, int64_t units);

// Return a chunk size for units of equal cost: a few chunks per thread, so that a late helper still gets one.
inline int64_t even_chunk(int threads, int64_t units) {
    const int64_t chunks = 4 * static_cast<int64_t>(threads);
    return units > chunks ? (units + chunks - 1) / chunks : 1;
}

}  // namespace inflight
