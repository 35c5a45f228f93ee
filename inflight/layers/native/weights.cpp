// Packing weights into the panels that products read (tile.h), and gathering rows from them.

#include <algorithm>

#include "narrow.h"
#include "team.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {
namespace {

constexpr int64_t kParallelFloats = 64 << 10;  // below which one thread copies alone

// The place of a column's value at step k in its panel.
template <class Stored>
inline int64_t place(int64_t k, int64_t column) {
    return (k / kPack<Stored> * kPanel + column) * kPack<Stored> + k % kPack<Stored>;
}

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

// A part [rows][columns] of a weight into output features [first_row, first_row + rows) and input features
// [first_column, first_column + columns) of the panels.
template <class Stored>
void pack(const Stored* weight, Stored* panels, int64_t rows, int64_t columns, int64_t k, int64_t first_row,
          int64_t first_column, int threads) {
    const int64_t last_row = first_row + rows;
    const int64_t from = first_row / kPanel, to = (last_row + kPanel - 1) / kPanel;
    constexpr int64_t block = kLine / sizeof(Stored);  // one line of each row at a time
    if (rows * columns <= kParallelFloats) threads = 1;
    parallel_for(threads, to - from, 1, [&](int64_t unit) {
        const int64_t p = from + unit;
        Stored* panel = panels + p * panel_depth<Stored>(k) * kPanel;
        const int64_t low = std::max(first_row, p * kPanel), high = std::min(last_row, (p + 1) * kPanel);
        for (int64_t begin = 0; begin < columns; begin += block) {
            const int64_t end = std::min(begin + block, columns);
            for (int64_t row = low; row < high; ++row) {
                const Stored* source = weight + (row - first_row) * columns;
                const int64_t column = row - p * kPanel;
                for (int64_t i = begin; i < end; ++i) panel[place<Stored>(first_column + i, column)] = source[i];
            }
        }
    });
}

template <class Stored>
void expand(const char* panel, int64_t column, Depth depth, float* out) {
    const auto* weights = reinterpret_cast<const Stored*>(panel);
    for (int64_t i = 0; i < depth.k; ++i) out[i] = widen(weights[place<Stored>(i, column)]);
}

template <class Stored>
int64_t panel_bytes(Depth depth) {
    return panel_depth<Stored>(depth.k) * kPanel * static_cast<int64_t>(sizeof(Stored));
}

template <class Stored>
const Method kFloats{panel_bytes<Stored>, expand<Stored>, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                     sizeof(Stored)};

#if defined(MADV_HUGEPAGE)
// Take memory that is not yet in use from this node, if it has some left and the system allows it.
void prefer_node(int node, uintptr_t begin, uintptr_t end) {
    constexpr long preferred = 1;  // MPOL_PREFERRED
    constexpr int kMostNodes = 1024, kBits = 8 * sizeof(unsigned long);
    unsigned long mask[kMostNodes / kBits] = {};
    if (node < 0 || node >= kMostNodes || begin >= end) return;
    mask[node / kBits] = 1ul << (node % kBits);
    syscall(SYS_mbind, begin, end - begin, preferred, mask, kMostNodes, 0);
}
#endif

}  // namespace

NamedMethods float_methods() { return {{"f32", "", &kFloats<float>}, {"bf16", "", &kFloats<uint16_t>}}; }

void expand_bf16(const char* panel, int64_t column, Depth depth, float* out) {
    expand<uint16_t>(panel, column, depth, out);
}

}  // namespace inflight

using namespace inflight;

extern "C" {

int64_t inflight_panel() { return kPanel; }

// Ask for huge pages: weights are read from end to end in each step, and page walks are expensive. Each NUMA node gets
// the part that its threads multiply.
void inflight_advise(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    if (begin >= end) return;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    const std::vector<Node>& nodes = team_nodes();
    const uintptr_t pages = (end - begin) / page;
    for (size_t i = 0; nodes.size() > 1 && i < nodes.size(); ++i)
        prefer_node(nodes[i].id, begin + i * pages / nodes.size() * page, begin + (i + 1) * pages / nodes.size() * page);
#else
    (void)data;
    (void)bytes;
#endif
}

void inflight_pack_f32(const float* weight, float* panels, int64_t rows, int64_t columns, int64_t k,
                       int64_t first_row, int64_t first_column, int threads) {
    pack(weight, panels, rows, columns, k, first_row, first_column, threads);
}

void inflight_pack_bf16(const uint16_t* weight, uint16_t* panels, int64_t rows, int64_t columns, int64_t k,
                        int64_t first_row, int64_t first_column, int threads) {
    pack(weight, panels, rows, columns, k, first_row, first_column, threads);
}
}
