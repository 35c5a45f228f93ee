// The threads' part of narrow products: convert rows, then pass panels over blocks of them.

#include "narrow.h"

#include <algorithm>

#include "elementwise.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;    // of converted rows: a block stays in the L2 cache
constexpr int64_t kChunkBytes = 256 << 10;    // weights that a thread takes at a time
constexpr int64_t kParallelRows = 32 << 10;   // floats below which one thread converts alone
constexpr int64_t kParallelWork = 128 << 10;  // multiply-adds below which one thread is faster than two
constexpr int64_t kMostTileRows = 32;

// Rows of one group that stay in the cache while panels pass over them.
struct Block {
    const RowGroup* group;
    int64_t first, count;
};

void cut_blocks(const RowGroup* groups, int64_t count, int64_t most, std::vector<Block>& blocks) {
    blocks.clear();
    for (const RowGroup* group = groups; group < groups + count; ++group) {
        const int64_t parts = (group->count + most - 1) / most;
        for (int64_t i = 0; i < parts; ++i) {
            const int64_t begin = i * group->count / parts, end = (i + 1) * group->count / parts;
            blocks.push_back({group, group->first + begin, end - begin});
        }
    }
}

// Add the bias, apply the activation, and store or add the valid columns of a tile.
void finish(const NarrowProduct& product, const RowGroup& group, const float* sums, int64_t first, int64_t count,
            int64_t column) {
    const float* bias = group.bias;
    const int64_t valid = std::min<int64_t>(kPanel, product.n - column);
    Vec bias_low{}, bias_high{};
    if (bias) load_valid(bias + column, valid, bias_low, bias_high);
    Vec all[2 * kMostTileRows];
    for (int64_t r = 0; r < count; ++r) {
        all[2 * r] = load<Vec>(sums + r * kPanel);
        all[2 * r + 1] = load<Vec>(sums + r * kPanel + kWidth);
        if (!bias) continue;
        all[2 * r] += bias_low;
        all[2 * r + 1] += bias_high;
    }
    activate(product.activation, all, static_cast<int>(2 * count));
    for (int64_t r = 0; r < count; ++r) {
        float* y = product.y + (first + r) * product.width + group.column + column;
        if (product.add) {
            Vec low, high;
            load_valid(y, valid, low, high);
            all[2 * r] += low;
            all[2 * r + 1] += high;
        }
        store_valid(y, valid, all[2 * r], all[2 * r + 1]);
    }
}

void convert(const NarrowProduct& product, int64_t row, char* to) {
    thread_local Scratch scratch;
    const float* x = product.x[row];
    if (product.norm) {
        float* normed = scratch.floats(product.depth.k);
        rms_norm_row(x, product.norm, normed, product.depth.k, product.eps);
        x = normed;
    }
    product.method->convert(x, product.depth, to);
}

// Multiply a block with one panel. Its tiles share the work of prefetching the next panel, which lies behind this one.
void multiply_block(const NarrowProduct& product, const char* rows, int64_t stride, const Block& block,
                    int64_t panel) {
    const Method& method = *product.method;
    const int64_t bytes = method.panel_bytes(product.depth);
    const int64_t tiles = (block.count + method.tile_rows - 1) / method.tile_rows;
    const int64_t lines_per_group = kUnroll * kPanel * 4 / kLine, lines = (lines_per_group + tiles - 1) / tiles;
    const int64_t share = bytes / (kUnroll * kPanel * 4) * lines * kLine;
    const char* weight = static_cast<const char*>(block.group->weight) + panel * bytes;
    alignas(64) float sums[kMostTileRows * kPanel];
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t begin = i * block.count / tiles, count = (i + 1) * block.count / tiles - begin;
        const int64_t first = block.first + begin;
        const Ahead ahead{weight + bytes + i * share, i * lines < lines_per_group ? lines : 0};
        method.multiply({rows + first * stride, stride, count, weight, product.depth, ahead}, sums);
        finish(product, *block.group, sums, first, count, panel * kPanel);
    }
}

}  // namespace

void multiply_groups(const NarrowProduct& product, const RowGroup* groups, int64_t count, int threads) {
    thread_local Scratch scratch;
    thread_local std::vector<Block> own_blocks;
    std::vector<Block>& blocks = own_blocks;  // this thread's, for the whole team
    const Method& method = *product.method;
    const int64_t stride = method.row_bytes(product.depth) + kRowGap, panels = (product.n + kPanel - 1) / kPanel;
    int64_t total = 0;
    for (const RowGroup* group = groups; group < groups + count; ++group)
        total = std::max(total, group->first + group->count);
    // Tiles may read rows past the last one.
    char* rows = reinterpret_cast<char*>(scratch.floats((total + method.tile_rows) * stride / sizeof(float)));
    if (total * product.depth.k * product.n <= kParallelWork) threads = 1;
    parallel_for(total * product.depth.k > kParallelRows ? threads : 1, total, even_chunk(threads, total),
                 [&](int64_t row) { convert(product, row, rows + row * stride); });
    const int64_t most = std::max<int64_t>(1, kBlockBytes / stride / method.tile_rows) * method.tile_rows;
    cut_blocks(groups, count, most, blocks);
    const int64_t units = static_cast<int64_t>(blocks.size()) * panels;
    const int64_t by_bytes = std::max<int64_t>(1, kChunkBytes / method.panel_bytes(product.depth));
    parallel_ranges(threads, units, std::min(by_bytes, even_chunk(threads, units)), [&](int64_t begin, int64_t end) {
        method.enter();
        for (int64_t unit = begin; unit < end; ++unit)
            multiply_block(product, rows, stride, blocks[unit / panels], unit % panels);
        method.leave();
    });
}

}  // namespace inflight
