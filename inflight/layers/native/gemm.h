// The parts of products over weights packed in panels (tile.h), which linear layers and experts share.
//
// An output element is one chain of multiply-adds over k = 0, 1, ... K-1, whatever the number of rows or threads and
// the row's position in its tile: a row's result has the same bits in every batch.
#pragma once

#include <algorithm>

#include "activations.h"
#include "tile.h"

namespace inflight {

constexpr int64_t kDepth = 1024;            // k steps of one block: a block of a panel stays in the L2 cache
constexpr int64_t kChunkBytes = 256 << 10;  // weights that a thread takes at a time
constexpr int64_t kParallelWork = 128 << 10;  // multiply-adds below which one thread is faster than two

// A product as all threads see it.
template <class Stored>
struct Product {
    const float* x;        // [M][K]
    const Stored* weight;  // panels
    const float* bias;     // [N] or null
    float* y;              // [M][N]
    int64_t m, k, n;
    Activation activation;

    int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    const Stored* panel(int64_t p, int64_t begin) const { return weight + (p * panel_depth<Stored>(k) + begin) * kPanel; }
};

template <class Stored>
void multiply(const Product<Stored>& product, int threads);

// Part of a product: some rows of one panel, k in [begin, end). The caller passes its packed x.
struct Part {
    int64_t panel, first, begin, end;
};

template <int Rows, class Stored>
void multiply_tile(const Product<Stored>& product, const Part& part, const float* packed, Ahead ahead) {
    const int64_t column = part.panel * kPanel, stride = product.n;
    const int64_t valid = std::min<int64_t>(kPanel, product.n - column);
    float* y = product.y + part.first * stride + column;
    Vec low[Rows], high[Rows];
    for (int r = 0; r < Rows; ++r) {
        low[r] = high[r] = Vec{};
        if (part.begin > 0) load_valid(y + r * stride, valid, low[r], high[r]);
        if (Rows + 1 >= kGemmRows) __builtin_prefetch(y + (Rows + r) * stride, 1);  // with many tiles, those of the next one
    }
    accumulate<Rows>(PackedRows<Rows>{packed}, product.panel(part.panel, part.begin), part.end - part.begin, ahead,
                     low, high);
    if (part.end == product.k) {
        if (product.bias) {
            Vec b0, b1;
            load_valid(product.bias + column, valid, b0, b1);
            for (int r = 0; r < Rows; ++r) {
                low[r] += b0;
                high[r] += b1;
            }
        }
        if (product.activation != Activation::none) {
            Vec all[2 * Rows];
            for (int r = 0; r < Rows; ++r) {
                all[r] = low[r];
                all[Rows + r] = high[r];
            }
            activate(product.activation, all, 2 * Rows);
            for (int r = 0; r < Rows; ++r) store_valid(y + r * stride, valid, all[r], all[Rows + r]);
            return;
        }
    }
    for (int r = 0; r < Rows; ++r) store_valid(y + r * stride, valid, low[r], high[r]);
}

template <class Stored>
using TileFunction = void (*)(const Product<Stored>&, const Part&, const float*, Ahead);

template <int Rows, class Stored>
TileFunction<Stored> tile_function(int64_t rows) {
    if constexpr (Rows == 1) {
        (void)rows;
        return multiply_tile<1, Stored>;
    } else {
        return rows == Rows ? multiply_tile<Rows, Stored> : tile_function<Rows - 1, Stored>(rows);
    }
}

// Split M rows into as few tiles as fit, or somewhat more that divide evenly between `blocks`. Tiles are as even as
// possible: the first `larger` ones have one row more.
struct Tiling {
    int64_t tiles, rows, larger;

    explicit Tiling(int64_t m, int64_t blocks = 1)
        : tiles(((m + kGemmRows - 1) / kGemmRows + blocks - 1) / blocks * blocks), rows(m / tiles), larger(m % tiles) {}
    int64_t first(int64_t tile) const { return tile * rows + std::min(tile, larger); }
    int64_t size(int64_t tile) const { return rows + (tile < larger); }
};

// Tiles [first_tile, last_tile) of x, packed one after another for `depth` k steps from `origin` on; of these, [begin, end)
// are to be multiplied.
struct Block {
    const float* packed;
    int64_t first_tile, last_tile, origin, depth, begin, end;
};

// Multiply a block with one panel. The tiles share the work of prefetching `next`.
template <class Stored>
void multiply_panel(const Product<Stored>& product, const Tiling& tiling, const Block& block, int64_t panel,
                    const Stored* next) {
    const auto small = tile_function<kGemmRows, Stored>(tiling.rows);
    const auto large = tile_function<kGemmRows, Stored>(tiling.rows + 1);
    const int64_t tiles = block.last_tile - block.first_tile, first_row = tiling.first(block.first_tile);
    const int64_t lines_per_group = kUnroll * kPanel * static_cast<int64_t>(sizeof(Stored)) / kLine;
    const int64_t lines = (lines_per_group + tiles - 1) / tiles;
    const int64_t share = (block.end - block.begin) / kUnroll * lines * kLine;
    const char* ahead = reinterpret_cast<const char*>(next);
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t tile = block.first_tile + i, first = tiling.first(tile), size = tiling.size(tile);
        const auto multiply = tile < tiling.larger ? large : small;
        const float* rows = block.packed + (first - first_row) * block.depth + (block.begin - block.origin) * size;
        const bool prefetches = i * lines < lines_per_group;
        multiply(product, {panel, first, block.begin, block.end}, rows, {ahead + i * share, prefetches ? lines : 0});
    }
}

// Rows of x, `stride` floats apart, become [steps][rows].
template <int Rows>
void pack_tile(const float* x, int64_t stride, int64_t rows, int64_t steps, float* to) {
    if constexpr (Rows > 1)
        if (rows < Rows) return pack_tile<Rows - 1>(x, stride, rows, steps, to);
    pack_rows<Rows>(x, stride, steps, to, Rows);
}

// The same for rows anywhere in memory, from their step `begin` on.
template <int Rows>
void pack_sources(const float* const* sources, int64_t begin, int64_t rows, int64_t steps, float* to) {
    if constexpr (Rows > 1)
        if (rows < Rows) return pack_sources<Rows - 1>(sources, begin, rows, steps, to);
    const PlainRows<Rows> plain(sources, begin);
    for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) to[i * Rows + r] = plain(r, i);
}

}  // namespace inflight
