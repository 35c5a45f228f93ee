// y = activation(x @ W.T + bias) over weights packed in panels.

#include <algorithm>

#include "gemm.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kPackStep = 256;      // k steps of one unit of packing work
constexpr int64_t kBlockDepth = 512;    // k steps of a block of rows
constexpr int64_t kGroupPanels = 8;     // at least, of those that pass over one block
constexpr int64_t kParallelPacking = 64 << 10;  // floats below which one thread copies alone

// Few rows: all of x is packed, then every panel is read once, by any free thread.
template <class Stored>
void multiply_few(const Product<Stored>& product, int threads) {
    thread_local Scratch scratch;
    const int64_t m = product.m, k = product.k;
    const Tiling tiling(m);
    float* packed = m > 1 ? scratch.floats(m * k) : nullptr;
    const float* tiles = m > 1 ? packed : product.x;
    const int64_t steps = m > 1 ? (k + kPackStep - 1) / kPackStep : 0;
    const int64_t chunk = std::max<int64_t>(1, kChunkBytes / (k * kPanel * static_cast<int64_t>(sizeof(Stored))));
    const int64_t units = tiling.tiles * steps;
    parallel_for(m * k > kParallelPacking ? threads : 1, units, even_chunk(threads, units), [&](int64_t unit) {
        const int64_t tile = unit / steps, begin = unit % steps * kPackStep;
        const int64_t first = tiling.first(tile), rows = tiling.size(tile);
        pack_tile<kGemmRows>(product.x + first * k + begin, k, rows, std::min(kPackStep, k - begin),
                             packed + first * k + begin * rows);
    });
    parallel_for(threads, product.panels(), chunk, [&](int64_t panel) {
        for (int64_t begin = 0; begin < k; begin += kDepth) {
            const int64_t end = std::min(begin + kDepth, k);
            // Panels are contiguous, so the memory after this block is needed next.
            multiply_panel(product, tiling, {tiles, 0, tiling.tiles, 0, k, begin, end}, panel,
                           product.panel(panel, end));
        }
    });
}

// Many rows: a thread packs a block of x that its L2 cache holds, and a group of panels passes over it.
template <class Stored>
void multiply_many(const Product<Stored>& product, int threads) {
    const int64_t k = product.k, panels = product.panels();
    const Tiling tiling(product.m);
    const int64_t blocks = (product.m + kBlockRows - 1) / kBlockRows;
    const int64_t most = (16 * threads + blocks - 1) / blocks;  // so that no thread waits long for the last
    const int64_t groups = std::max<int64_t>(1, std::min(most, panels / kGroupPanels));
    const int64_t cuts = (k + kBlockDepth - 1) / kBlockDepth;
    parallel_for(threads, blocks * groups, 1, [&](int64_t unit) {
        thread_local Scratch scratch;
        const int64_t block = unit / groups, group = unit % groups;
        const int64_t first_tile = block * tiling.tiles / blocks, last_tile = (block + 1) * tiling.tiles / blocks;
        const int64_t first_panel = group * panels / groups, last_panel = (group + 1) * panels / groups;
        const int64_t first_row = tiling.first(first_tile);
        for (int64_t cut = 0; cut < cuts; ++cut) {
            const int64_t begin = cut_at(cut, cuts, k), end = cut_at(cut + 1, cuts, k), depth = end - begin;
            float* packed = scratch.floats((tiling.first(last_tile) - first_row) * depth);
            for (int64_t tile = first_tile; tile < last_tile; ++tile) {
                const int64_t first = tiling.first(tile);
                pack_tile<kGemmRows>(product.x + first * k + begin, k, tiling.size(tile), depth,
                                     packed + (first - first_row) * depth);
            }
            for (int64_t panel = first_panel; panel < last_panel; ++panel) {
                const bool last = panel + 1 == last_panel;
                multiply_panel(product, tiling, {packed, first_tile, last_tile, begin, depth, begin, end}, panel,
                               last ? product.panel(first_panel, end) : product.panel(panel + 1, begin));
            }
        }
    });
}

template <class Stored>
void multiply(const Product<Stored>& product, int threads) {
    if (product.m * product.k * product.n <= kParallelWork) threads = 1;
    return product.m <= kBlockRows ? multiply_few(product, threads) : multiply_many(product, threads);
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

void inflight_multiply_f32(const float* x, const float* weight, const float* bias, float* y, int64_t m, int64_t k,
                           int64_t n, int activation, int threads) {
    multiply(Product<float>{x, weight, bias, y, m, k, n, static_cast<Activation>(activation)}, threads);
}

void inflight_multiply_bf16(const float* x, const uint16_t* weight, const float* bias, float* y, int64_t m, int64_t k,
                            int64_t n, int activation, int threads) {
    multiply(Product<uint16_t>{x, weight, bias, y, m, k, n, static_cast<Activation>(activation)}, threads);
}
}
