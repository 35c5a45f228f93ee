// The inner loop of every product: a few rows of a times a panel of b, one k at a time.
//
// A panel is [K][kPanel] in float32. In bfloat16 it is [K / 2][kPanel][2]: a 32-bit lane holds two neighbouring steps of
// k, as dot-product instructions read them. An output element is one chain of multiply-adds over k in either case,
// whatever the number of rows beside it.
#pragma once

#include "vectors.h"

namespace inflight {

constexpr int kPanel = 2 * kWidth;  // columns of a panel of b
constexpr int kUnroll = 8;          // k steps between two groups of prefetches
constexpr int kLine = 64;           // bytes of a cache line

inline void load_row(const float* row, Vec& low, Vec& high) {
    low = load<Vec>(row);
    high = load<Vec>(row + kWidth);
}

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

// Steps of k for which a panel has room: bfloat16 panels are padded with zeros to whole tiles of dot products.
template <class Stored>
constexpr int64_t panel_depth(int64_t k) {
    return sizeof(Stored) == 2 ? (k + 31) / 32 * 32 : k;
}

// Memory that is needed soon: `lines` cache lines of it are prefetched every kUnroll steps.
struct Ahead {
    const char* data;
    int64_t lines;
};

// Rows packed side by side, [K][Rows].
template <int Rows>
struct PackedRows {
    const float* data;

    float operator()(int row, int64_t k) const { return data[k * Rows + row]; }
};

// Rows in place, `stride` floats apart or anywhere.
template <int Rows>
struct PlainRows {
    const float* rows[Rows];

    PlainRows(const float* first, int64_t stride) {
        for (int r = 0; r < Rows; ++r) rows[r] = first + r * stride;
    }
    PlainRows(const float* const* sources, int64_t begin) {
        for (int r = 0; r < Rows; ++r) rows[r] = sources[r] + begin;
    }
    float operator()(int row, int64_t k) const { return rows[row][k]; }
};

// Transpose rows of x, `stride` floats apart, into columns of `to`, whose rows are `width` floats apart.
template <int Rows>
void pack_rows(const float* __restrict x, int64_t stride, int64_t steps, float* __restrict to, int64_t width) {
    const PlainRows<Rows> rows(x, stride);
    for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) to[i * width + r] = rows(r, i);
}

// Make the compiler keep a vector in its register: it would otherwise reload it for each use, and loads are scarcer
// than registers.
inline void keep(Vec& v) {
#if defined(__x86_64__) || defined(__i386__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    (void)v;
#endif
}

// low and high [Rows] += a[., k] * (w0, w1)
template <int Rows, class Source>
__attribute__((always_inline)) inline void add_products(const Source& a, int64_t k, Vec w0, Vec w1, Vec* low,
                                                        Vec* high) {
    keep(w0);
    keep(w1);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        low[r] += w0 * a(r, k);
        high[r] += w1 * a(r, k);
    }
}

// Steps of k that one row of 32-bit lanes holds.
template <class Stored>
constexpr int kPack = 4 / sizeof(Stored);

template <int Rows, class Source>
__attribute__((always_inline)) inline void add_step(const Source& a, const float* b, int64_t k, int64_t, Vec* low,
                                                    Vec* high) {
    add_products<Rows>(a, k, load<Vec>(b + k * kPanel), load<Vec>(b + k * kPanel + kWidth), low, high);
}

// Two steps, or the last one alone if there is an odd number of them.
template <int Rows, class Source>
__attribute__((always_inline)) inline void add_step(const Source& a, const uint16_t* b, int64_t k, int64_t steps,
                                                    Vec* low, Vec* high) {
    const WordVec w0 = load<WordVec>(b + k * kPanel), w1 = load<WordVec>(b + (k + 1) * kPanel);
    add_products<Rows>(a, k, bits<Vec>(w0 << 16), bits<Vec>(w1 << 16), low, high);
    if (k + 1 < steps)
        add_products<Rows>(a, k + 1, bits<Vec>(w0 & 0xffff0000u), bits<Vec>(w1 & 0xffff0000u), low, high);
}

// low and high [Rows] += a @ b for `steps` steps of k.
template <int Rows, class Source, class Stored>
__attribute__((always_inline)) inline void accumulate(const Source& a, const Stored* b, int64_t steps, Ahead ahead,
                                                      Vec* low, Vec* high) {
    int64_t k = 0;
    for (; k + kUnroll <= steps; k += kUnroll) {
        for (int64_t line = 0; line < ahead.lines; ++line) __builtin_prefetch(ahead.data + line * kLine, 0, 2);
        ahead.data += ahead.lines * kLine;
#pragma GCC unroll 8
        for (int u = 0; u < kUnroll; u += kPack<Stored>) add_step<Rows>(a, b, k + u, k + kUnroll, low, high);
    }
    for (; k < steps; k += kPack<Stored>) add_step<Rows>(a, b, k, steps, low, high);
}

}  // namespace inflight
