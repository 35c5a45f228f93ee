// Products of int8 and int4 weights with activations that are rounded to int8, with one scale for each row.
//
// Integers are summed exactly, so the instructions and their order make no difference. In int4, the sums of groups are
// scaled and added in ascending order.

#include <cmath>

#include "instructions.h"
#include "narrow.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace inflight {
namespace {

constexpr int64_t kHeader = 2 * kPanel * 4;  // bytes before the weights of an int8 panel: scales and corrections
constexpr int64_t kRowTail = 64;             // bytes after the values of a row: its scale, and sums of groups
constexpr int64_t kLargest = 127;
constexpr uint32_t kZeroBits = 31;  // of a scale in int4: its lowest bits hold the zero point
constexpr int64_t kInt8Rows = kGemmRows, kInt4Rows = kGemmRows - 2;
constexpr int64_t kTileRows = 16;

inline Vec as_floats(IntVec v) { return __builtin_convertvector(v, Vec); }

// Four products of signed bytes in each lane, in instructions that every processor of the kind has. Rows are signed.
struct Plain {
    static constexpr bool kUnsignedRows = false;

    static inline IntVec dot(IntVec sum, WordVec weight, int32_t x) {
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
        // Even and odd bytes apart, widened to 16 bits.
        const IntVec w = bits<IntVec>(weight), xs = x - IntVec{};
        return sum + pairs(even(w), even(xs)) + pairs(odd(w), odd(xs));
#elif defined(__ARM_FEATURE_DOTPROD)
        return bits<IntVec>(vdotq_s32(bits<int32x4_t>(sum), bits<int8x16_t>(weight), vreinterpretq_s8_s32(vdupq_n_s32(x))));
#else
        const IntVec w = bits<IntVec>(weight);
        for (int byte = 0; byte < 4; ++byte)
            sum += (w << (24 - 8 * byte) >> 24) * static_cast<int32_t>(static_cast<int8_t>(x >> (8 * byte)));
        return sum;
#endif
    }

    static inline IntVec dot_unsigned(IntVec sum, WordVec weight, int32_t x) { return dot(sum, weight, x); }

  private:
#if defined(__AVX512BW__)
    static inline IntVec even(IntVec v) {
        const __m512i wide = bits<__m512i>(v);
        return bits<IntVec>(_mm512_srai_epi16(_mm512_slli_epi16(wide, 8), 8));
    }
    static inline IntVec odd(IntVec v) { return bits<IntVec>(_mm512_srai_epi16(bits<__m512i>(v), 8)); }
    static inline IntVec pairs(IntVec a, IntVec b) {
        return bits<IntVec>(_mm512_madd_epi16(bits<__m512i>(a), bits<__m512i>(b)));
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    static inline IntVec even(IntVec v) {
        return bits<IntVec>(_mm256_srai_epi16(_mm256_slli_epi16(bits<__m256i>(v), 8), 8));
    }
    static inline IntVec odd(IntVec v) { return bits<IntVec>(_mm256_srai_epi16(bits<__m256i>(v), 8)); }
    static inline IntVec pairs(IntVec a, IntVec b) {
        return bits<IntVec>(_mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
    }
#endif
};

#if (defined(__AVX512VNNI__) && defined(INFLIGHT_AVX512_EXTENSIONS)) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define INFLIGHT_VNNI 1
// One instruction, which multiplies unsigned bytes with signed ones: rows of int8 weights are stored 128 too large.
struct Vnni {
    static constexpr bool kUnsignedRows = true;

    static inline IntVec dot(IntVec sum, WordVec weight, int32_t x) { return multiply(sum, x - IntVec{}, weight); }
    static inline IntVec dot_unsigned(IntVec sum, WordVec weight, int32_t x) {
        return multiply(sum, weight, x - IntVec{});
    }

  private:
    template <class A, class B>
    static inline IntVec multiply(IntVec sum, A unsigned_bytes, B signed_bytes) {
#if defined(__AVX512VNNI__)
        return bits<IntVec>(_mm512_dpbusd_epi32(bits<__m512i>(sum), bits<__m512i>(unsigned_bytes),
                                                bits<__m512i>(signed_bytes)));
#else
        return bits<IntVec>(_mm256_dpbusd_avx_epi32(bits<__m256i>(sum), bits<__m256i>(unsigned_bytes),
                                                    bits<__m256i>(signed_bytes)));
#endif
    }
};
#endif

inline void keep_words(WordVec& v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#else
    (void)v;
#endif
}

void nothing() {}

// ---- rows ----

int64_t int8_values(Depth depth) { return padded(depth.k, kTileBytes); }
int64_t int8_row_bytes(Depth depth) { return int8_values(depth) + kRowTail; }
int64_t int4_values(Depth depth) { return depth.groups() * depth.group; }
int64_t int4_row_bytes(Depth depth) { return padded(int4_values(depth), 64) + padded(4 + 4 * depth.groups(), kRowTail); }

// The largest magnitude of a row, and NaN if the row is not finite.
float magnitude(const float* x, int64_t k) {
    Vec top{}, spoiled{};
    int64_t i = 0;
    for (; i + kWidth <= k; i += kWidth) {
        const Vec v = load<Vec>(x + i);
        top = larger(top, v < 0.0f ? -v : v);
        spoiled += v * 0.0f;
    }
    float largest = max(top), rest = sum(spoiled);
    for (; i < k; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        rest += x[i] * 0.0f;
    }
    return largest + rest;
}

// Round a row to [-127, 127], increased by `offset`, and return its scale. Values past the row are 0 + offset.
float quantize_row(const float* x, int64_t k, int64_t values, int offset, char* row) {
    const float largest = magnitude(x, k), factor = largest > 0.0f ? kLargest / largest : 0.0f;
    const float shift = 12582912.0f;  // leaves the rounded value in the low bits of the sum
    int64_t i = 0;
    for (; i + kWidth <= k; i += kWidth) {
        const IntVec rounded = bits<IntVec>(load<Vec>(x + i) * factor + shift) - bits<int32_t>(shift) + offset;
        using Bytes = VectorOf<int8_t, kWidth>::type;
        store(row + i, __builtin_convertvector(rounded, Bytes));
    }
    for (; i < k; ++i)
        row[i] = static_cast<char>(bits<int32_t>(x[i] * factor + shift) - bits<int32_t>(shift) + offset);
    for (; i < values; ++i) row[i] = static_cast<char>(offset);
    return largest / kLargest;
}

template <int Offset>
void convert_int8(const float* x, Depth depth, char* row) {
    const int64_t values = int8_values(depth);
    store(row + values, quantize_row(x, depth.k, values, Offset, row));
}

void convert_int4(const float* x, Depth depth, char* row) {
    const int64_t values = int4_values(depth);
    char* tail = row + padded(values, 64);
    store(tail, quantize_row(x, depth.k, values, 0, row));
    for (int64_t g = 0; g < depth.groups(); ++g) {
        int32_t total = 0;
        for (int64_t i = g * depth.group; i < (g + 1) * depth.group; ++i) total += static_cast<int8_t>(row[i]);
        store(tail + 4 + 4 * g, static_cast<float>(total));
    }
}

// ---- int8 ----

int64_t int8_panel_bytes(Depth depth) { return kHeader + kPanel * int8_values(depth); }

// Scale the integers of one row, in place.
inline void scale_row_sums(const char* panel, IntVec low, IntVec high, float row_scale, float* sums) {
    store(sums, as_floats(low) * row_scale * load<Vec>(panel));
    store(sums + kWidth, as_floats(high) * row_scale * load<Vec>(panel + 4 * kWidth));
}

template <class Dot, int Rows>
void int8_rows(const NarrowTile& tile, float* sums) {
    IntVec low[Rows] = {}, high[Rows] = {};
    const Strides rows(tile.rows, tile.stride);
    const char* weight = tile.panel + kHeader;
    Ahead ahead = tile.ahead;
    const int64_t end = int8_values(tile.depth);
    for (int64_t offset = 0; offset < end; offset += 4 * kUnroll) {
        for (int64_t line = 0; line < ahead.lines; ++line) __builtin_prefetch(ahead.data + line * kLine, 0, 2);
        ahead.data += ahead.lines * kLine;
#pragma GCC unroll 8
        for (int u = 0; u < kUnroll; ++u) {
            WordVec w0 = load<WordVec>(weight), w1 = load<WordVec>(weight + 4 * kWidth);
            keep_words(w0);
            keep_words(w1);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const int32_t x = rows.word(r, offset + 4 * u);
                low[r] = Dot::dot(low[r], w0, x);
                high[r] = Dot::dot(high[r], w1, x);
            }
            weight += 4 * kPanel;
        }
    }
    const char* corrections = tile.panel + 4 * kPanel;
    for (int r = 0; r < Rows; ++r) {
        if (Dot::kUnsignedRows) {
            low[r] -= load<IntVec>(corrections);
            high[r] -= load<IntVec>(corrections + 4 * kWidth);
        }
        scale_row_sums(tile.panel, low[r], high[r], load<float>(tile.rows + r * tile.stride + end), sums + r * kPanel);
    }
}

template <class Dot, int Rows>
void multiply_int8(const NarrowTile& tile, float* sums) {
    if constexpr (Rows > 1)
        if (tile.count < Rows) return multiply_int8<Dot, Rows - 1>(tile, sums);
    int8_rows<Dot, Rows>(tile, sums);
}

#if defined(INFLIGHT_AVX512_EXTENSIONS)
__attribute__((target("avx512f,amx-tile,amx-int8"))) void multiply_int8_tiles(const NarrowTile& tile, float* sums) {
    Ahead ahead = tile.ahead;
    const char *weight = tile.panel + kHeader, *rows = tile.rows, *more = rows + kTileRows * tile.stride;
    const int64_t end = int8_values(tile.depth), stride = tile.stride;
    const bool two = tile.count > kTileRows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t offset = 0; offset < end; offset += kTileBytes, weight += kTileRows * 2 * kLine) {
        for (int64_t line = 0; line < 2 * ahead.lines; ++line) __builtin_prefetch(ahead.data + line * kLine, 0, 2);
        ahead.data += 2 * ahead.lines * kLine;
        _tile_loadd(4, rows + offset, stride);
        _tile_loadd(6, weight, 2 * kLine);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, weight + kLine, 2 * kLine);
        _tile_dpbssd(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, more + offset, stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums, kPanel * sizeof(float));
    _tile_stored(1, sums + kWidth, kPanel * sizeof(float));
    if (two) {
        _tile_stored(2, sums + kTileRows * kPanel, kPanel * sizeof(float));
        _tile_stored(3, sums + kTileRows * kPanel + kWidth, kPanel * sizeof(float));
    }
    for (int64_t r = 0; r < tile.count; ++r) {
        float* row = sums + r * kPanel;
        scale_row_sums(tile.panel, load<IntVec>(row), load<IntVec>(row + kWidth),
                       load<float>(tile.rows + r * stride + end), row);
    }
}
#endif

// ---- int4 ----

int64_t group_bytes(Depth depth) { return 4 * kPanel + kPanel * depth.group / 2; }
int64_t int4_panel_bytes(Depth depth) { return depth.groups() * group_bytes(depth); }

template <class Dot, int Rows>
void int4_rows(const NarrowTile& tile, float* sums) {
    const Strides rows(tile.rows, tile.stride);
    const Depth depth = tile.depth;
    const int64_t tail = padded(int4_values(depth), 64), bytes = group_bytes(depth);
    Ahead ahead = tile.ahead;
    std::memset(sums, 0, Rows * kPanel * sizeof(float));
    for (int64_t g = 0; g < depth.groups(); ++g) {
        const char *header = tile.panel + g * bytes, *weight = header + 4 * kPanel;
        const int64_t lines = bytes / kLine * ahead.lines / (kUnroll * kPanel * 4 / kLine);
        for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(ahead.data + line * kLine, 0, 2);
        ahead.data += lines * kLine;
        IntVec low[Rows] = {}, high[Rows] = {};
        const int64_t begin = g * depth.group;
        for (int64_t i = 0; i < depth.group; i += 8, weight += 4 * kPanel) {
            const WordVec w0 = load<WordVec>(weight), w1 = load<WordVec>(weight + 4 * kWidth);
            WordVec first0 = w0 & 0x0f0f0f0fu, first1 = w1 & 0x0f0f0f0fu;
            WordVec second0 = w0 >> 4 & 0x0f0f0f0fu, second1 = w1 >> 4 & 0x0f0f0f0fu;
            keep_words(first0);
            keep_words(first1);
            keep_words(second0);
            keep_words(second1);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const int32_t x0 = rows.word(r, begin + i), x1 = rows.word(r, begin + i + 4);
                low[r] = Dot::dot_unsigned(low[r], first0, x0);
                high[r] = Dot::dot_unsigned(high[r], first1, x0);
                low[r] = Dot::dot_unsigned(low[r], second0, x1);
                high[r] = Dot::dot_unsigned(high[r], second1, x1);
            }
        }
        const WordVec h0 = load<WordVec>(header), h1 = load<WordVec>(header + 4 * kWidth);
        const Vec zero0 = as_floats(bits<IntVec>(h0 & kZeroBits)), zero1 = as_floats(bits<IntVec>(h1 & kZeroBits));
        const Vec scale0 = bits<Vec>(h0 & ~kZeroBits), scale1 = bits<Vec>(h1 & ~kZeroBits);
        for (int r = 0; r < Rows; ++r) {
            // Integers up to 2^24 are exact.
            const float total = load<float>(tile.rows + r * tile.stride + tail + 4 + 4 * g);
            float* row = sums + r * kPanel;
            store(row, load<Vec>(row) + scale0 * (as_floats(low[r]) - zero0 * total));
            store(row + kWidth, load<Vec>(row + kWidth) + scale1 * (as_floats(high[r]) - zero1 * total));
        }
    }
    for (int r = 0; r < Rows; ++r) {
        const float scale = load<float>(tile.rows + r * tile.stride + tail);
        float* row = sums + r * kPanel;
        store(row, load<Vec>(row) * scale);
        store(row + kWidth, load<Vec>(row + kWidth) * scale);
    }
}

template <class Dot, int Rows>
void multiply_int4(const NarrowTile& tile, float* sums) {
    if constexpr (Rows > 1)
        if (tile.count < Rows) return multiply_int4<Dot, Rows - 1>(tile, sums);
    int4_rows<Dot, Rows>(tile, sums);
}

// ---- packing ----

// The byte of a column's value k in the rows of lanes of a panel.
inline int64_t byte_of(int64_t k, int64_t column) { return (k / 4 * kPanel + column) * 4 + k % 4; }

void pack_int8_row(const int8_t* codes, float scale, char* panel, int64_t column, int64_t k) {
    int32_t total = 0;
    for (int64_t i = 0; i < k; ++i) {
        panel[kHeader + byte_of(i, column)] = static_cast<char>(codes[i]);
        total += codes[i];
    }
    store(panel + 4 * column, scale);
    store(panel + 4 * (kPanel + column), 128 * total);
}

void pack_int4_row(const uint8_t* codes, const float* scales, const uint8_t* zeros, char* panel, int64_t column,
                   Depth depth) {
    for (int64_t g = 0; g < depth.groups(); ++g) {
        char *header = panel + g * group_bytes(depth), *weight = header + 4 * kPanel;
        const uint32_t zero = zeros ? zeros[g] : 8;
        store(header + 4 * column, (bits<uint32_t>(scales[g]) & ~kZeroBits) | zero);
        const int64_t begin = g * depth.group, end = std::min(begin + depth.group, depth.k);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t in_group = i - begin;
            const int code = codes[i / 2] >> (i % 2 * 4) & 15;
            char& byte = weight[byte_of(in_group / 8 * 4 + in_group % 4, column)];
            byte = static_cast<char>(in_group % 8 < 4 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
        }
    }
}

void expand_int8(const char* panel, int64_t column, Depth depth, float* out) {
    const float scale = load<float>(panel + 4 * column);
    for (int64_t i = 0; i < depth.k; ++i)
        out[i] = static_cast<int8_t>(panel[kHeader + byte_of(i, column)]) * scale;
}

void expand_int4(const char* panel, int64_t column, Depth depth, float* out) {
    for (int64_t i = 0; i < depth.k; ++i) {
        const int64_t in_group = i % depth.group;
        const char* header = panel + i / depth.group * group_bytes(depth);
        const auto word = load<uint32_t>(header + 4 * column);
        const char byte = header[4 * kPanel + byte_of(in_group / 8 * 4 + in_group % 4, column)];
        const int code = byte >> (in_group % 8 < 4 ? 0 : 4) & 15;
        const float zero = static_cast<float>(word & kZeroBits);
        out[i] = (static_cast<float>(code) - zero) * bits<float>(word & ~kZeroBits);
    }
}

template <class Dot, int Shift>
const Method kInt8{int8_panel_bytes, expand_int8, kInt8Rows, int8_row_bytes, convert_int8<Shift>,
                   multiply_int8<Dot, kInt8Rows>, nothing, nothing};
template <class Dot>
const Method kInt4{int4_panel_bytes, expand_int4, kInt4Rows, int4_row_bytes, convert_int4,
                   multiply_int4<Dot, kInt4Rows>, nothing, nothing};
#if defined(INFLIGHT_AVX512_EXTENSIONS)
const Method kInt8Tiles{int8_panel_bytes, expand_int8,         2 * kTileRows, int8_row_bytes,
                        convert_int8<0>,  multiply_int8_tiles, enter_tiles,   leave_tiles};
#endif

}  // namespace

NamedMethods integer_methods() {
    return {
#if defined(INFLIGHT_AVX512_EXTENSIONS)
        {"int8", "amx_int8", &kInt8Tiles},
#endif
#if defined(INFLIGHT_VNNI)
        {"int8", "vnni", &kInt8<Vnni, 128>}, {"int4", "vnni", &kInt4<Vnni>},
#endif
        {"int8", "", &kInt8<Plain, 0>}, {"int4", "", &kInt4<Plain>}};
}

}  // namespace inflight

using namespace inflight;

extern "C" {

// Rows [first_row, first_row + rows) of a matrix of codes [rows][k] with one scale each.
void inflight_pack_int8(const int8_t* codes, const float* scales, char* panels, int64_t rows, int64_t k,
                        int64_t first_row, int threads) {
    const int64_t bytes = int8_panel_bytes({k, 0});
    parallel_for(threads, rows, even_chunk(threads, rows), [&](int64_t row) {
        const int64_t place = first_row + row;
        pack_int8_row(codes + row * k, scales[row], panels + place / kPanel * bytes, place % kPanel, k);
    });
}

// The same for codes [rows][k / 2], low nibble first, with scales and zero points [rows][groups]; without: 8.
void inflight_pack_int4(const uint8_t* codes, const float* scales, const uint8_t* zeros, char* panels, int64_t rows,
                        int64_t k, int64_t group, int64_t first_row, int threads) {
    const Depth depth{k, group};
    const int64_t groups = depth.groups();
    parallel_for(threads, rows, even_chunk(threads, rows), [&](int64_t row) {
        const int64_t place = first_row + row;
        pack_int4_row(codes + row * k / 2, scales + row * groups, zeros ? zeros + row * groups : nullptr,
                      panels + place / kPanel * int4_panel_bytes(depth), place % kPanel, depth);
    });
}
}
