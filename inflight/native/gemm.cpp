// y = activation(x @ W.T + bias) over weights packed in panels [N / kPanel][K][kPanel].
//
// An output element is one chain of multiply-adds over k = 0, 1, ... K-1, whatever the number of rows or threads and
// the row's position in its tile: a row's result has the same bits in every batch.

#include <algorithm>

#include "activations.h"
#include "team.h"
#include "tile.h"

namespace inflight {
namespace {

constexpr int64_t kDepth = 1024;        // k steps of one block: a block of a panel stays in the L2 cache
constexpr int64_t kPackStep = 256;      // k steps of one unit of packing work
constexpr int64_t kChunkBytes = 256 << 10;  // weights that a thread takes at a time
constexpr int64_t kBlockRows = 144;     // more rows than these are worked on in blocks that stay in the L2 cache,
constexpr int64_t kBlockDepth = 512;    // this many k steps at a time
constexpr int64_t kGroupPanels = 8;     // at least, of those that pass over one block
constexpr int64_t kParallelWork = 128 << 10;  // multiply-adds below which one thread is faster than two
constexpr int64_t kParallelPacking = 64 << 10;  // floats below which one thread copies alone

// A product as all threads see it.
template <class Stored>
struct Product {
    const float* x;        // [M][K]
    const Stored* weight;  // [panels][K][kPanel]
    const float* bias;     // [N] or null
    float* y;              // [M][N]
    int64_t m, k, n;
    Activation activation;

    int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    const Stored* panel(int64_t p, int64_t begin) const { return weight + (p * k + begin) * kPanel; }
};

// Part of a product: some rows of one panel, k in [begin, end). The caller passes its packed x.
struct Part {
    int64_t panel, first, begin, end;
};

template <Vec (*Function)(Vec)>
void activate_each(Vec* x, int count) {
    for (int i = 0; i < count; ++i) x[i] = Function(x[i]);
}

// One function for any number of rows, so that all round alike.
__attribute__((noinline)) void activate(Activation activation, Vec* x, int count) {
    switch (activation) {
        case Activation::none: return;
        case Activation::gelu: return activate_each<gelu>(x, count);
        case Activation::gelu_tanh: return activate_each<gelu_tanh>(x, count);
        case Activation::relu: return activate_each<relu>(x, count);
        case Activation::silu: return activate_each<silu>(x, count);
        case Activation::tanh: return activate_each<tanh>(x, count);
    }
}

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

// Split M rows into as few tiles as fit, as evenly as possible: the first `larger` tiles have one row more.
struct Tiling {
    int64_t tiles, rows, larger;

    explicit Tiling(int64_t m)
        : tiles((m + kGemmRows - 1) / kGemmRows), rows(m / tiles), larger(m % tiles) {}
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
            const int64_t begin = cut * k / cuts, end = (cut + 1) * k / cuts, depth = end - begin;
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
