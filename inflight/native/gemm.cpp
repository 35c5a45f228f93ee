// y = x @ W.T + bias over weights packed in panels [N / kPanel][K][kPanel].
//
// An output element is one chain of multiply-adds over k = 0, 1, ... K-1, whatever the number of rows,
// of threads, or the place of the row in its tile: a row's result is the same bits in every batch.

#include <algorithm>

#include "team.h"
#include "vectors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace inflight {
namespace {

constexpr int kPanel = 2 * kWidth;      // output features of one panel
constexpr int64_t kDepth = 1024;        // k steps of one block: a block of a panel stays in the L2 cache
constexpr int kUnroll = 8;              // k steps between two groups of prefetches
constexpr int64_t kPackStep = 256;      // k steps of one unit of packing work
constexpr int64_t kChunkBytes = 256 << 10;  // weights that a thread takes at a time
constexpr int64_t kParallelWork = 128 << 10;  // multiply-adds below which one thread is done before two have met
constexpr int64_t kParallelPacking = 64 << 10;  // floats below which one thread copies them
constexpr int kLine = 64;               // bytes of a cache line

// A bfloat16 panel row interleaves features i and i + kWidth, so that each 32-bit lane holds both.
inline void load_row(const float* row, Vec& low, Vec& high) {
    low = load<Vec>(row);
    high = load<Vec>(row + kWidth);
}

inline void load_row(const uint16_t* row, Vec& low, Vec& high) {
    WordVec pair = load<WordVec>(row);
    low = bits<Vec>(pair << 16);
    high = bits<Vec>(pair & 0xffff0000u);
}

template <class Stored>
inline int64_t place(int64_t lane) {
    return sizeof(Stored) == 4 ? lane : lane < kWidth ? 2 * lane : 2 * (lane - kWidth) + 1;
}

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

// One panel's share of a product, as a thread sees it.
template <class Stored>
struct Panel {
    const float* x;       // tiles of [K][rows of the tile]
    const Stored* weight; // [K][kPanel]
    const float* bias;    // [valid] or null
    float* y;             // [M][stride], the panel's first column
    int64_t k, stride, valid;
};

inline void load_valid(const float* from, int64_t valid, Vec& low, Vec& high) {
    if (valid == kPanel) return load_row(from, low, high);
    float lanes[kPanel] = {};
    std::memcpy(lanes, from, valid * sizeof(float));
    low = load<Vec>(lanes);
    high = load<Vec>(lanes + kWidth);
}

inline void store_valid(float* to, int64_t valid, Vec low, Vec high) {
    float lanes[kPanel];
    float* target = valid == kPanel ? to : lanes;
    store(target, low);
    store(target + kWidth, high);
    if (target == lanes) std::memcpy(to, lanes, valid * sizeof(float));
}

// Rows [first, first + Rows) of a panel, k in [begin, end). `ahead` is memory that a later block reads:
// `lines` cache lines of it are fetched every kUnroll steps.
template <int Rows, class Stored>
void multiply_tile(const Panel<Stored>& panel, int64_t first, int64_t begin, int64_t end, const char* ahead,
                   int64_t lines) {
    const float* a = panel.x + first * panel.k + begin * Rows;
    const Stored* b = panel.weight + begin * kPanel;
    float* y = panel.y + first * panel.stride;
    Vec low[Rows], high[Rows];
    for (int r = 0; r < Rows; ++r) {
        low[r] = high[r] = Vec{};
        if (begin > 0) load_valid(y + r * panel.stride, panel.valid, low[r], high[r]);
    }
    auto step = [&]() {
        Vec w0, w1;
        load_row(b, w0, w1);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            low[r] += w0 * a[r];
            high[r] += w1 * a[r];
        }
        a += Rows;
        b += kPanel;
    };
    int64_t i = begin;
    for (; i + kUnroll <= end; i += kUnroll) {
        for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(ahead + line * kLine, 0, 2);
        ahead += lines * kLine;
#pragma GCC unroll 8
        for (int u = 0; u < kUnroll; ++u) step();
    }
    for (; i < end; ++i) step();
    if (end == panel.k && panel.bias) {
        Vec b0, b1;
        load_valid(panel.bias, panel.valid, b0, b1);
        for (int r = 0; r < Rows; ++r) {
            low[r] += b0;
            high[r] += b1;
        }
    }
    for (int r = 0; r < Rows; ++r) store_valid(y + r * panel.stride, panel.valid, low[r], high[r]);
}

template <class Stored>
using TileFunction = void (*)(const Panel<Stored>&, int64_t, int64_t, int64_t, const char*, int64_t);

template <int Rows, class Stored>
TileFunction<Stored> tile_function(int64_t rows) {
    if constexpr (Rows == 1) {
        (void)rows;
        return multiply_tile<1, Stored>;
    } else {
        return rows == Rows ? multiply_tile<Rows, Stored> : tile_function<Rows - 1, Stored>(rows);
    }
}

// M rows in as few tiles as fit, as even as they go: the first `larger` tiles have one row more.
struct Tiling {
    int64_t tiles, rows, larger;

    explicit Tiling(int64_t m)
        : tiles((m + kGemmRows - 1) / kGemmRows), rows(m / tiles), larger(m % tiles) {}
    int64_t first(int64_t tile) const { return tile * rows + std::min(tile, larger); }
    int64_t size(int64_t tile) const { return rows + (tile < larger); }
};

template <class Stored>
void multiply_panel(const Panel<Stored>& panel, const Tiling& tiling) {
    const auto small = tile_function<kGemmRows, Stored>(tiling.rows);
    const auto large = tile_function<kGemmRows, Stored>(tiling.rows + 1);
    const int64_t lines_per_group = kUnroll * kPanel * static_cast<int64_t>(sizeof(Stored)) / kLine;
    const int64_t lines = (lines_per_group + tiling.tiles - 1) / tiling.tiles;
    for (int64_t begin = 0; begin < panel.k; begin += kDepth) {
        const int64_t end = std::min(begin + kDepth, panel.k);
        // Panels lie one after another, so what follows this block is what is needed next; the tiles share
        // the work of fetching it.
        const char* ahead = reinterpret_cast<const char*>(panel.weight + end * kPanel);
        const int64_t share = (end - begin) / kUnroll * lines * kLine;
        for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
            const auto multiply = tile < tiling.larger ? large : small;
            const bool wanted = tile * lines < lines_per_group;
            multiply(panel, tiling.first(tile), begin, end, ahead + tile * share, wanted ? lines : 0);
        }
    }
}

// Rows of x [rows][K] become [K][rows], for k in [begin, end).
void pack_tile(const float* x, int64_t rows, int64_t k, int64_t begin, int64_t end, float* to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = begin; i < end; ++i) to[i * rows + r] = x[r * k + i];
}

template <class Stored>
void multiply(const float* x, const Stored* weight, const float* bias, float* y, int64_t m, int64_t k, int64_t n,
              int threads) {
    thread_local Scratch scratch;
    const Tiling tiling(m);
    float* packed = m > 1 ? scratch.floats(m * k) : nullptr;
    const float* tiles = m > 1 ? packed : x;
    const int64_t panels = (n + kPanel - 1) / kPanel;
    const int64_t steps = m > 1 ? (k + kPackStep - 1) / kPackStep : 0;
    const int64_t chunk = std::max<int64_t>(1, kChunkBytes / (k * kPanel * static_cast<int64_t>(sizeof(Stored))));
    if (m * k * n <= kParallelWork) threads = 1;
    const int64_t units = tiling.tiles * steps;
    parallel_for(m * k > kParallelPacking ? threads : 1, units, even_chunk(threads, units), [&](int64_t unit) {
        const int64_t tile = unit / steps, begin = unit % steps * kPackStep;
        const int64_t first = tiling.first(tile);
        pack_tile(x + first * k, tiling.size(tile), k, begin, std::min(begin + kPackStep, k), packed + first * k);
    });
    parallel_for(threads, panels, chunk, [&](int64_t p) {
        const int64_t column = p * kPanel;
        Panel<Stored> panel{tiles,     weight + p * k * kPanel, bias ? bias + column : nullptr,
                            y + column, k,                       n,
                            std::min<int64_t>(kPanel, n - column)};
        multiply_panel(panel, tiling);
    });
}

// A part [rows][columns] of a weight into output features [first_row, first_row + rows) and input features
// [first_column, first_column + columns) of the panels.
template <class Stored>
void pack(const Stored* weight, Stored* panels, int64_t rows, int64_t columns, int64_t k, int64_t first_row,
          int64_t first_column, int threads) {
    const int64_t last_row = first_row + rows;
    const int64_t from = first_row / kPanel, to = (last_row + kPanel - 1) / kPanel;
    constexpr int64_t block = kLine / sizeof(Stored);  // one line of each row at a time
    if (rows * columns <= kParallelWork) threads = 1;
    parallel_for(threads, to - from, 1, [&](int64_t unit) {
        const int64_t p = from + unit;
        Stored* panel = panels + (p * k + first_column) * kPanel;
        const int64_t low = std::max(first_row, p * kPanel), high = std::min(last_row, (p + 1) * kPanel);
        for (int64_t begin = 0; begin < columns; begin += block) {
            const int64_t end = std::min(begin + block, columns);
            for (int64_t row = low; row < high; ++row) {
                const Stored* source = weight + (row - first_row) * columns;
                Stored* lane = panel + place<Stored>(row - p * kPanel);
                for (int64_t i = begin; i < end; ++i) lane[i * kPanel] = source[i];
            }
        }
    });
}

template <class Stored>
void gather(const Stored* panels, const int64_t* ids, float* out, int64_t count, int64_t k, int threads) {
    if (count * k <= kParallelPacking) threads = 1;
    parallel_for(threads, count, even_chunk(threads, count), [&](int64_t row) {
        const Stored* lane = panels + ids[row] / kPanel * k * kPanel + place<Stored>(ids[row] % kPanel);
        for (int64_t i = 0; i < k; ++i) out[row * k + i] = widen(lane[i * kPanel]);
    });
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

int64_t inflight_panel() { return kPanel; }

// Asks for huge pages: weights are read from end to end each step, and the page walks are a cost.
void inflight_advise(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

void inflight_multiply_f32(const float* x, const float* weight, const float* bias, float* y, int64_t m, int64_t k,
                           int64_t n, int threads) {
    multiply(x, weight, bias, y, m, k, n, threads);
}

void inflight_multiply_bf16(const float* x, const uint16_t* weight, const float* bias, float* y, int64_t m,
                            int64_t k, int64_t n, int threads) {
    multiply(x, weight, bias, y, m, k, n, threads);
}

void inflight_pack_f32(const float* weight, float* panels, int64_t rows, int64_t columns, int64_t k,
                       int64_t first_row, int64_t first_column, int threads) {
    pack(weight, panels, rows, columns, k, first_row, first_column, threads);
}

void inflight_pack_bf16(const uint16_t* weight, uint16_t* panels, int64_t rows, int64_t columns, int64_t k,
                        int64_t first_row, int64_t first_column, int threads) {
    pack(weight, panels, rows, columns, k, first_row, first_column, threads);
}

void inflight_gather_f32(const float* panels, const int64_t* ids, float* out, int64_t count, int64_t k,
                         int threads) {
    gather(panels, ids, out, count, k, threads);
}

void inflight_gather_bf16(const uint16_t* panels, const int64_t* ids, float* out, int64_t count, int64_t k,
                          int threads) {
    gather(panels, ids, out, count, k, threads);
}
}
