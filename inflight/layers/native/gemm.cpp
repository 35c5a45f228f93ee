// y = activation(x @ W.T + bias) over weights packed in panels.

#include <algorithm>

#include "gemm.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kPackStep = 256;      // k steps of one unit of packing work
constexpr int64_t kPackedFloats = 4 << 20;      // of x that are packed at a time
constexpr int64_t kBlockFloats = 64 << 10;      // of packed rows: a block stays in the L2 cache
constexpr int64_t kUnitsPerThread = 16;         // pairs of block and panel, at least: no thread waits long for the last
constexpr int64_t kParallelPacking = 64 << 10;  // floats below which one thread copies alone

// Return into how many blocks the rows are cut: each fits the cache, and together with the panels there are enough
// units for all threads. A block has at least two tiles, which share each load of a panel into the L1 cache.
template <class Stored>
int64_t count_blocks(const Product<Stored>& product, int threads) {
    const int64_t panels = product.panels(), tiles = Tiling(product.m).tiles;
    const int64_t by_cache = (product.m * product.k + kBlockFloats - 1) / kBlockFloats;
    const int64_t by_threads = threads > 1 ? (kUnitsPerThread * threads + panels - 1) / panels : 1;
    return std::max<int64_t>(1, std::min(std::max(by_cache, by_threads), tiles / 2));
}

// All of x is packed, then each panel passes over each block of it, in units that any free thread takes.
template <class Stored>
void multiply_slab(const Product<Stored>& product, int threads) {
    thread_local Scratch scratch;
    const int64_t m = product.m, k = product.k, panels = product.panels();
    const int64_t blocks = count_blocks(product, threads);
    const Tiling tiling(m, blocks);
    float* packed = m > 1 ? scratch.floats(m * k) : nullptr;
    const float* rows = m > 1 ? packed : product.x;
    const int64_t steps = m > 1 ? (k + kPackStep - 1) / kPackStep : 0, pieces = tiling.tiles * steps;
    parallel_for(m * k > kParallelPacking ? threads : 1, pieces, even_chunk(threads, pieces), [&](int64_t piece) {
        const int64_t tile = piece / steps, begin = piece % steps * kPackStep;
        const int64_t first = tiling.first(tile), size = tiling.size(tile);
        pack_tile<kGemmRows>(product.x + first * k + begin, k, size, std::min(kPackStep, k - begin),
                             packed + first * k + begin * size);
    });
    const int64_t units = blocks * panels;
    const int64_t by_bytes = std::max<int64_t>(1, kChunkBytes / (k * kPanel * static_cast<int64_t>(sizeof(Stored))));
    parallel_for(threads, units, std::min(by_bytes, even_chunk(threads, units)), [&](int64_t unit) {
        const int64_t block = unit / panels, panel = unit % panels;
        const int64_t first_tile = block * tiling.tiles / blocks, last_tile = (block + 1) * tiling.tiles / blocks;
        const float* own = rows + tiling.first(first_tile) * k;
        for (int64_t begin = 0; begin < k; begin += kDepth) {
            const int64_t end = std::min(begin + kDepth, k);
            // Panels are contiguous, so the memory after this block is needed next.
            multiply_panel(product, tiling, {own, first_tile, last_tile, 0, k, begin, end}, panel,
                           product.panel(panel, end));
        }
    });
}

}  // namespace

template <class Stored>
void multiply(const Product<Stored>& product, int threads) {
    const int64_t m = product.m, k = product.k, n = product.n;
    if (m * k * n <= kParallelWork) threads = 1;
    const int64_t slabs = std::max<int64_t>(1, (m * k + kPackedFloats - 1) / kPackedFloats);
    for (int64_t slab = 0; slab < slabs; ++slab) {
        const int64_t first = slab * m / slabs, last = (slab + 1) * m / slabs;
        if (first == last) continue;
        Product<Stored> part = product;
        part.x += first * k;
        part.y += first * n;
        part.m = last - first;
        multiply_slab(part, threads);
    }
}

template void multiply(const Product<float>&, int);
template void multiply(const Product<uint16_t>&, int);

}  // namespace inflight
