// Products of rows that are first converted to a narrow type, with weights of the same width: bfloat16 or int8.
//
// A `Method` is the arithmetic of one instruction set. Whatever the number of rows, threads and neighbours, it sums an
// output element in one fixed order, so a row's result has the same bits in every batch.
//
// Weights are panels of kPanel columns, as in gemm.h, in rows of 32-bit lanes: a lane holds neighbouring features of one
// column, two in bfloat16 and four in int8. Dot products of vectors and of tiles read the same panels:
//
//     bfloat16: [K / 2][kPanel][2]
//     int8:     [kPanel] scales, [kPanel] corrections, [K / 4][kPanel][4]
//     int4:     for each group of features: [kPanel] scales with zero points, [group / 8][kPanel][4] pairs of nibbles
//
// K is padded with zeros to whole tiles of kTileBytes, or to whole groups.
#pragma once

#include <vector>

#include "activations.h"
#include "instructions.h"
#include "tile.h"

namespace inflight {

constexpr int64_t kTileBytes = 64;  // of a row that one tile instruction takes; rows and panels are padded to it
constexpr int64_t kRowGap = 64;     // bytes between converted rows, so that they do not compete for the same cache lines

inline int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Features of a row, and how many of them share a scale in int4.
struct Depth {
    int64_t k, group;

    int64_t groups() const { return (k + group - 1) / group; }
};

// Some rows times one panel.
struct NarrowTile {
    const char* rows;  // converted
    int64_t stride;    // bytes between rows
    int64_t count;
    const char* panel;
    Depth depth;
    Ahead ahead;
};

// Addresses of rows `stride` apart, from few registers: a sum of a base and a multiple of a register each.
struct Strides {
    const char *first, *eighth;
    int64_t once, thrice, five_times, seven_times;

    Strides(const char* rows, int64_t stride)
        : first(rows), eighth(rows + 8 * stride), once(stride), thrice(3 * stride), five_times(5 * stride),
          seven_times(7 * stride) {}

    __attribute__((always_inline)) const char* operator()(int row, int64_t offset) const {
        const char* base = (row < 8 ? first : eighth) + offset;
        switch (row % 8) {
            case 0: return base;
            case 1: return base + once;
            case 2: return base + 2 * once;
            case 3: return base + thrice;
            case 4: return base + 4 * once;
            case 5: return base + five_times;
            case 6: return base + 2 * thrice;
            default: return base + seven_times;
        }
    }

    // The four bytes there.
    __attribute__((always_inline)) int32_t word(int row, int64_t offset) const {
        int32_t bytes;
        std::memcpy(&bytes, (*this)(row, offset), sizeof bytes);
        return bytes;
    }
};

struct Method {
    int64_t (*panel_bytes)(Depth depth);
    void (*expand)(const char* panel, int64_t column, Depth depth, float* out);  // a row of weights to floats
    int64_t tile_rows;  // rows that are multiplied together, at most
    int64_t (*row_bytes)(Depth depth);
    void (*convert)(const float* x, Depth depth, char* row);
    // sums [tile_rows][kPanel] = rows @ panel. Rows past the last one are readable, and their sums may be anything.
    void (*multiply)(const NarrowTile& tile, float* sums);
    // Called by a thread before and after it multiplies.
    void (*enter)();
    void (*leave)();
    void (*pack)(const uint8_t* blocks, char* panels, int64_t rows, int64_t k, int threads) = nullptr;  // of GGUF files
    int64_t float_bytes = 0;  // of a weight that is multiplied in float32 (gemm.h), without the functions of rows above
};

// Rows [first, first + count), which are multiplied with one matrix. Groups may share rows.
struct RowGroup {
    const void* weight;  // panels
    const float* bias;   // [n] or null
    int64_t first, count;
    int64_t column;      // of y, where the n columns of the product begin
};

// y [rows][width] = activation(x @ W.T + bias), or y += that. x is one pointer per row, each to k floats; with `norm`
// [k], its RMS norm is multiplied.
struct NarrowProduct {
    const Method* method;
    const float* const* x;
    float* y;
    Depth depth;
    int64_t n, width;
    Activation activation = Activation::none;
    const float* norm = nullptr;
    float eps = 0.0f;
    bool add = false;
};

void multiply_groups(const NarrowProduct& product, const RowGroup* groups, int64_t count, int threads);

// The methods for each type of weights, the best first. One needs the named instructions, or "" for none.
struct NamedMethod {
    const char *weights, *needs;
    const Method* method;
};
using NamedMethods = std::vector<NamedMethod>;

NamedMethods float_methods();
NamedMethods bf16_methods();
NamedMethods integer_methods();
NamedMethods gguf_methods();

// Widen a row of bfloat16 weights, for `expand`.
void expand_bf16(const char* panel, int64_t column, Depth depth, float* out);

}  // namespace inflight
