// Products of rows that are first converted to a narrow type, with weights of the same width: bfloat16 or int8.
//
// A `Method` is the arithmetic of one instruction set. Whatever the number of rows, threads and neighbours, it sums an
// output element in one fixed order, so a row's result has the same bits in every batch.
//
// Weights are panels of kPanel columns, as in gemm.h, in rows of 32-bit lanes: a lane holds neighbouring features of one
// column, two in bfloat16 and four in int8. Dot products of vectors and of tiles read the same panels:
//
//     bfloat16: [N / kPanel][K / 2][kPanel][2], K padded to whole tiles of kTileBytes with zeros
#pragma once

#include "activations.h"
#include "tile.h"

namespace inflight {

constexpr int64_t kTileBytes = 64;  // of a row that one tile instruction takes; rows and panels are padded to it
constexpr int64_t kRowGap = 64;     // bytes between converted rows, so that they do not compete for the same cache lines

inline int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Some rows times one panel.
struct NarrowTile {
    const char* rows;  // converted
    int64_t stride;    // bytes between rows
    int64_t count;
    const char* panel;
    int64_t k;
    Ahead ahead;
};

struct Method {
    int64_t tile_rows;  // rows that are multiplied together, at most
    int64_t (*row_bytes)(int64_t k);
    int64_t (*panel_bytes)(int64_t k);
    void (*convert)(const float* x, int64_t k, char* row);
    // sums [tile_rows][kPanel] = rows @ panel. Rows past the last one are readable, and their sums may be anything.
    void (*multiply)(const NarrowTile& tile, float* sums);
    // Called by a thread before and after it multiplies.
    void (*enter)();
    void (*leave)();
};

// Rows [first, first + count), which are multiplied with one matrix.
struct RowGroup {
    const void* weight;  // panels
    const float* bias;   // [n] or null
    int64_t first, count;
};

// y [rows][n] = activation(x @ W.T + bias), or y += that. x is one pointer per row, each to k floats; with `norm` [k],
// its RMS norm is multiplied.
struct NarrowProduct {
    const Method* method;
    const float* const* x;
    float* y;
    int64_t k, n;
    Activation activation = Activation::none;
    const float* norm = nullptr;
    float eps = 0.0f;
    bool add = false;
};

void multiply_groups(const NarrowProduct& product, const RowGroup* groups, int64_t count, int threads);

// The methods of bfloat16 weights; null where the processor lacks the instructions.
const Method* bf16_method(int64_t instruction);

}  // namespace inflight
