// Products of weights in the block types of GGUF files, without expanding them.
//
// Rows are quantized to int8, 32 or 256 features with one scale, and multiplied with the codes of the blocks as integers,
// group by group; scales are applied in float32, in one fixed order.
//
// A panel is two runs of kWidth columns. In a run, codes are in vectors of kWidth lanes of four bytes: a lane holds four
// neighbouring features ("a quad") of one column. A step is 32 features, eight quads:
//
//     codes of 8 bits: eight vectors
//     codes of 4 bits: four vectors; quads 0 to 3 in the low halves of the bytes, 4 to 7 in the high halves
//     a fifth bit:     one more vector; bit i of a byte belongs to quad i
//     two more bits:   two more vectors, for quads 0 to 3 and 4 to 7; bits 2i and 2i + 1 belong to the i-th
//
// Types with blocks of 32 have one step after another, each followed by float16 scales (and minimums) of its columns.
// Types with blocks of 256 have eight steps, then the scales and minimums of all groups, one byte each, and two factors.

#include <algorithm>

#include "instructions.h"
#include "narrow.h"
#include "team.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace inflight {
namespace {

constexpr int64_t kStep = 32, kSuper = 256, kQuads = 8;
constexpr int64_t kVectorBytes = 4 * kWidth;

enum class Kind { q4_0, q4_1, q5_0, q5_1, q8_0, mxfp4, q4_k, q5_k, q6_k };

// How a type stores its codes: the value of a code is (code - zero) * scale - minimum.
struct Shape {
    int low_bits, high_bits;  // of a code
    int zero;
    bool super;     // whether blocks have 256 features
    bool minimums;
    int group;      // features with one scale
    int block_bytes;  // in a file

    constexpr int64_t step_bytes() const { return kVectorBytes * (low_bits == 8 ? 8 : 4 + high_bits); }
    constexpr int64_t unit() const { return super ? kSuper : kStep; }
    constexpr int64_t scales_at() const { return step_bytes() * (unit() / kStep); }
    constexpr int64_t num_groups() const { return unit() / group; }
    constexpr int64_t minimums_at() const { return scales_at() + (super ? num_groups() : 2) * kWidth; }
    constexpr int64_t factors_at() const { return minimums_at() + (minimums ? num_groups() : 0) * kWidth; }
    // Of all features of a block and a run of columns.
    constexpr int64_t unit_bytes() const {
        return super ? factors_at() + (minimums ? 4 : 2) * kWidth : minimums_at() + (minimums ? 2 : 0) * kWidth;
    }
};

template <Kind>
constexpr Shape kShape{};
template <> constexpr Shape kShape<Kind::q4_0>{4, 0, 8, false, false, 32, 18};
template <> constexpr Shape kShape<Kind::q4_1>{4, 0, 0, false, true, 32, 20};
template <> constexpr Shape kShape<Kind::q5_0>{4, 1, 16, false, false, 32, 22};
template <> constexpr Shape kShape<Kind::q5_1>{4, 1, 0, false, true, 32, 24};
template <> constexpr Shape kShape<Kind::q8_0>{8, 0, 128, false, false, 32, 34};
template <> constexpr Shape kShape<Kind::mxfp4>{4, 0, 12, false, false, 32, 17};
template <> constexpr Shape kShape<Kind::q4_k>{4, 0, 0, true, true, 32, 144};
template <> constexpr Shape kShape<Kind::q5_k>{4, 1, 0, true, true, 32, 176};
template <> constexpr Shape kShape<Kind::q6_k>{4, 2, 32, true, false, 16, 210};

// The values of MXFP4's codes, doubled, plus 12.
alignas(16) constexpr uint8_t kFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

using HalfVec = VectorOf<uint16_t, kWidth>::type;

inline float widen_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return bits<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent) return bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
}

inline Vec load_halves(const char* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__) && defined(__AVX__)
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    float wide[kWidth];
    for (int i = 0; i < kWidth; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, sizeof half);
        wide[i] = widen_half(half);
    }
    return load<Vec>(wide);
#endif
}

// Panels are read from end to end: ask for what comes next. A single row is multiplied as fast as the processor's own
// prefetching fetches the panel, and asking as well slows it down.
template <int64_t bytes, int rows>
inline void prefetch(const char* from) {
    constexpr int64_t distance = 4096;
    if constexpr (rows == 1) return;
    for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(from + distance + line);
}

// Powers of two as the upper halves of floats: float16 has too few of them.
inline Vec load_powers(const char* from) {
    return bits<Vec>(__builtin_convertvector(load<HalfVec>(from), WordVec) << 16);
}

template <Kind kind>
inline Vec load_scales(const char* from) {
    return kind == Kind::mxfp4 ? load_powers(from) : load_halves(from);
}

// ---- integer products ----

// Each adds to lane i the product of its four codes with four features, or of its two numbers with two.
struct PlainDot {
    static constexpr bool kSigned = false;  // whether 8-bit codes are multiplied as signed numbers, without an offset
    static constexpr int kTileRows = 4;

    static IntVec quads(IntVec sums, WordVec codes, int32_t features) {
        const auto x = bits<VectorOf<int8_t, 4>::type>(features);
        uint8_t bytes[4 * kWidth];
        store(bytes, codes);
        for (int lane = 0; lane < kWidth; ++lane)
            for (int i = 0; i < 4; ++i) sums[lane] += bytes[4 * lane + i] * x[i];
        return sums;
    }
    static IntVec pairs(IntVec sums, const char* numbers, int32_t features) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(numbers);
        const auto x = bits<VectorOf<int16_t, 2>::type>(features);
        for (int lane = 0; lane < kWidth; ++lane) sums[lane] += bytes[2 * lane] * x[0] + bytes[2 * lane + 1] * x[1];
        return sums;
    }
    static WordVec look_up(WordVec codes) {
        uint8_t bytes[4 * kWidth];
        store(bytes, codes);
        for (uint8_t& byte : bytes) byte = kFp4[byte];
        return load<WordVec>(bytes);
    }
};

#if defined(__AVX2__)
// Instructions of 256 bits. Sums of two products must fit into 16 bits, so 8-bit codes become signed.
struct Avx2Dot {
    static constexpr bool kSigned = true;
    static constexpr int kTileRows = 4;

    static __m256i part(WordVec v, int i) {
        __m256i parts[kWidth / 8];
        std::memcpy(parts, &v, sizeof v);
        return parts[i];
    }
    template <class Function>
    static IntVec each(IntVec sums, Function function) {
        __m256i parts[kWidth / 8];
        std::memcpy(parts, &sums, sizeof sums);
        for (int i = 0; i < kWidth / 8; ++i) parts[i] = _mm256_add_epi32(parts[i], function(i));
        std::memcpy(&sums, parts, sizeof sums);
        return sums;
    }
    static IntVec quads(IntVec sums, WordVec codes, int32_t features) {
        const __m256i x = _mm256_set1_epi32(features), ones = _mm256_set1_epi16(1);
        return each(sums, [&](int i) { return _mm256_madd_epi16(_mm256_maddubs_epi16(part(codes, i), x), ones); });
    }
    static IntVec signed_quads(IntVec sums, WordVec codes, int32_t features) {
        const __m256i x = _mm256_set1_epi32(features), ones = _mm256_set1_epi16(1);
        return each(sums, [&](int i) {
            const __m256i w = _mm256_xor_si256(part(codes, i), _mm256_set1_epi8(-128));
            return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), ones);
        });
    }
    static IntVec pairs(IntVec sums, const char* numbers, int32_t features) {
        const __m256i x = _mm256_set1_epi32(features);
        return each(sums, [&](int i) {
            const auto* from = reinterpret_cast<const __m128i*>(numbers + 16 * i);
            return _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(from)), x);
        });
    }
    static WordVec look_up(WordVec codes) {
        const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kFp4)));
        __m256i parts[kWidth / 8];
        std::memcpy(parts, &codes, sizeof codes);
        for (__m256i& part : parts) part = _mm256_shuffle_epi8(table, part);
        std::memcpy(&codes, parts, sizeof codes);
        return codes;
    }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct VnniDot {
    static constexpr bool kSigned = false;
    static constexpr int kTileRows = 12;

    static IntVec quads(IntVec sums, WordVec codes, int32_t features) {
        return reinterpret_cast<IntVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                            reinterpret_cast<__m512i>(codes),
                                                            _mm512_set1_epi32(features)));
    }
    static IntVec pairs(IntVec sums, const char* numbers, int32_t features) {
        const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
        return reinterpret_cast<IntVec>(
            _mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sums), wide, _mm512_set1_epi32(features)));
    }
    static WordVec look_up(WordVec codes) {
        const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kFp4)));
        return reinterpret_cast<WordVec>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
    }
};
#endif

// ---- rows ----

// What is added to sums of products, times the sum of the features, so that codes count from zero.
template <Kind kind, class Dot>
constexpr int kOffset = kShape<kind>.low_bits == 8 && Dot::kSigned ? 0 : -kShape<kind>.zero;

// A row of k features in int8, and after them, for blocks of 32, for each: the scale, and the sum of its features times the
// scale, in float32, and the sum times kOffset in int32; for blocks of 256: scales [k / 256] in float32, sums of 32
// features [k / 32] in int16, and sums of 16 times kOffset [k / 16] in int32.
template <bool super>
int64_t row_bytes(Depth depth) {
    const int64_t k = depth.k;
    return k + (super ? k / kSuper * 4 + k / kStep * 2 + k / 16 * 4 : k / kStep * 12);
}

inline int32_t load_int(const char* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float load_float(const char* from) { return bits<float>(load_int(from)); }
inline IntVec splat_int(int32_t x) { return x - IntVec{}; }

// Addresses of up to 12 rows `stride` apart from few registers: a base, and a multiple of a register.
struct RowAddresses {
    const char *first, *fifth, *ninth;
    int64_t once, thrice;

    RowAddresses(const char* rows, int64_t stride)
        : first(rows), fifth(rows + 4 * stride), ninth(rows + 8 * stride), once(stride), thrice(3 * stride) {}

    __attribute__((always_inline)) const char* operator()(int row, int64_t offset) const {
        const char* base = (row < 4 ? first : row < 8 ? fifth : ninth) + offset;
        return row % 4 == 0 ? base : row % 4 == 1 ? base + once : row % 4 == 2 ? base + 2 * once : base + thrice;
    }
};

// Quantize `count` features to one scale, which is returned.
float quantize(const float* x, int64_t count, int8_t* to) {
    Vec largest{};
    for (int64_t i = 0; i < count; i += kWidth) {
        const Vec v = load<Vec>(x + i);
        largest = larger(largest, larger(v, -v));
    }
    const float scale = max(largest) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    const float shift = 12582912.0f;  // 1.5 * 2^23: the low bits of the sum are the rounded number
    for (int64_t i = 0; i < count; i += kWidth) {
        const IntVec rounded = bits<IntVec>(load<Vec>(x + i) * inverse + shift);
#if defined(__AVX512F__)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(rounded)));
#else
        for (int lane = 0; lane < kWidth; ++lane) to[i + lane] = static_cast<int8_t>(rounded[lane]);
#endif
    }
    return scale;
}

inline int32_t sum_of(const int8_t* codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += codes[i];
    return sum;
}

template <Kind kind, class Dot>
void convert_row(const float* x, Depth depth, char* row) {
    const int64_t k = depth.k;
    constexpr int32_t offset = kOffset<kind, Dot>;
    auto* codes = reinterpret_cast<int8_t*>(row);
    char* after = row + k;
    if constexpr (kShape<kind>.super) {
        char *sums = after + k / kSuper * 4, *small_sums = sums + k / kStep * 2;
        for (int64_t i = 0; i < k / kSuper; ++i)
            store(after + 4 * i, quantize(x + i * kSuper, kSuper, codes + i * kSuper));
        for (int64_t i = 0; i < k / kStep; ++i) {
            const int32_t first = sum_of(codes + i * kStep, 16), second = sum_of(codes + i * kStep + 16, 16);
            store(small_sums + 8 * i, offset * first);
            store(small_sums + 8 * i + 4, offset * second);
            store(sums + 2 * i, static_cast<int16_t>(first + second));
        }
    } else {
        const int64_t steps = k / kStep;
        for (int64_t i = 0; i < steps; ++i) {
            const float scale = quantize(x + i * kStep, kStep, codes + i * kStep);
            const int32_t sum = sum_of(codes + i * kStep, kStep);
            store(after + 12 * i, scale);
            store(after + 12 * i + 4, scale * static_cast<float>(sum));
            store(after + 12 * i + 8, offset * sum);
        }
    }
}

// ---- products ----

// The codes of quad 4 * half + j of a step.
template <Kind kind, class Dot>
__attribute__((always_inline)) inline WordVec codes_of(const char* step, int half, int j) {
    constexpr Shape shape = kShape<kind>;
    if constexpr (shape.low_bits == 8) return load<WordVec>(step + (4 * half + j) * kVectorBytes);
    WordVec codes = load<WordVec>(step + j * kVectorBytes);
    codes = (half ? codes >> 4 : codes) & 0x0f0f0f0fu;
    if constexpr (kind == Kind::mxfp4) return Dot::look_up(codes);
    if constexpr (shape.high_bits == 1) {
        const WordVec high = load<WordVec>(step + 4 * kVectorBytes);
        const int bit = 4 * half + j;
        codes |= (bit <= 4 ? high << (4 - bit) : high >> (bit - 4)) & 0x10101010u;
    }
    if constexpr (shape.high_bits == 2) {
        const WordVec high = load<WordVec>(step + (4 + half) * kVectorBytes);
        codes |= (j <= 2 ? high << (4 - 2 * j) : high >> 2) & 0x30303030u;
    }
    return codes;
}

template <Kind kind, class Dot>
__attribute__((always_inline)) inline IntVec add_quad(IntVec sums, WordVec codes, int32_t features) {
    if constexpr (kShape<kind>.low_bits == 8 && Dot::kSigned) return Dot::signed_quads(sums, codes, features);
    else return Dot::quads(sums, codes, features);
}

// One run of columns of types with blocks of 32.
template <Kind kind, class Dot, int Rows>
__attribute__((always_inline)) inline void multiply_plain(const RowAddresses& rows, const char* run, int64_t k,
                                                          Vec* totals) {
    constexpr Shape shape = kShape<kind>;
    int64_t at = k;  // the block's numbers in a row
    for (int64_t first = 0; first < k; first += kStep, at += 12, run += shape.unit_bytes()) {
        prefetch<shape.unit_bytes(), Rows>(run);
        IntVec sums[Rows];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
            sums[r] = kOffset<kind, Dot> ? splat_int(load_int(rows(r, at + 8))) : IntVec{};
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) {
            const WordVec codes = codes_of<kind, Dot>(run, quad / 4, quad % 4);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
                sums[r] = add_quad<kind, Dot>(sums[r], codes, load_int(rows(r, first + 4 * quad)));
        }
        const Vec scales = load_scales<kind>(run + shape.scales_at());
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
            totals[r] += __builtin_convertvector(sums[r], Vec) * (scales * load_float(rows(r, at)));
        if constexpr (shape.minimums) {
            const Vec minimums = load_halves(run + shape.minimums_at());
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) totals[r] += minimums * load_float(rows(r, at + 4));
        }
    }
}

// One run of columns of types with blocks of 256.
template <Kind kind, class Dot, int Rows>
__attribute__((always_inline)) inline void multiply_super(const RowAddresses& rows, const char* run, int64_t k,
                                                          Vec* totals) {
    constexpr Shape shape = kShape<kind>;
    int64_t at = k, sums_at = k + k / kSuper * 4, small_sums_at = sums_at + k / kStep * 2, first = 0;
    for (; first < k; at += 4, sums_at += 16, run += shape.unit_bytes()) {
        Vec parts[Rows];
        for (int r = 0; r < Rows; ++r) parts[r] = Vec{};
        const char *step = run, *group = run + shape.scales_at();
        for (; step < run + shape.scales_at(); step += shape.step_bytes(), first += kStep, small_sums_at += 8) {
            prefetch<shape.unit_bytes() / 8, Rows>(step);
            IntVec sums[Rows];
            for (int r = 0; r < Rows; ++r) sums[r] = IntVec{};
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                if constexpr (shape.group == 16)
#pragma GCC unroll 16
                    for (int r = 0; r < Rows; ++r) sums[r] = splat_int(load_int(rows(r, small_sums_at + 4 * half)));
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const WordVec codes = codes_of<kind, Dot>(step, half, j);
#pragma GCC unroll 16
                    for (int r = 0; r < Rows; ++r)
                        sums[r] = Dot::quads(sums[r], codes, load_int(rows(r, first + 16 * half + 4 * j)));
                }
                if (shape.group == 32 && half == 0) continue;
                const Vec scales = load_bytes<kind == Kind::q6_k>(group);
                group += kWidth;
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) parts[r] += __builtin_convertvector(sums[r], Vec) * scales;
            }
        }
        const Vec factors = load_halves(run + shape.factors_at());
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) totals[r] += parts[r] * (factors * load_float(rows(r, at)));
        if constexpr (shape.minimums) {
            const Vec factor = load_halves(run + shape.factors_at() + 2 * kWidth);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                IntVec sums{};
                for (int pair = 0; pair < 4; ++pair)
                    sums = Dot::pairs(sums, run + shape.minimums_at() + pair * 2 * kWidth,
                                      load_int(rows(r, sums_at + 4 * pair)));
                totals[r] -= __builtin_convertvector(sums, Vec) * (factor * load_float(rows(r, at)));
            }
        }
    }
}

template <Kind kind, class Dot, int Rows>
void multiply_rows(const NarrowTile& tile, float* sums) {
    const RowAddresses rows(tile.rows, tile.stride);
    const int64_t k = tile.depth.k, run_bytes = k / kShape<kind>.unit() * kShape<kind>.unit_bytes();
    for (int run = 0; run < 2; ++run) {
        Vec totals[Rows];
        for (int r = 0; r < Rows; ++r) totals[r] = Vec{};
        if constexpr (kShape<kind>.super) multiply_super<kind, Dot, Rows>(rows, tile.panel + run * run_bytes, k, totals);
        else multiply_plain<kind, Dot, Rows>(rows, tile.panel + run * run_bytes, k, totals);
        for (int r = 0; r < Rows; ++r) store(sums + r * kPanel + run * kWidth, totals[r]);
    }
}

// Rows past the last one may be read, so that not every number needs a separate function.
template <Kind kind, class Dot, int Rows>
void multiply_tile(const NarrowTile& tile, float* sums) {
    constexpr int fewer = Rows > 8 ? 8 : Rows > 6 ? 6 : Rows > 4 ? 4 : Rows / 2;
    if constexpr (Rows > 1)
        if (tile.count <= fewer) return multiply_tile<kind, Dot, fewer>(tile, sums);
    multiply_rows<kind, Dot, Rows>(tile, sums);
}

template <Kind kind>
int64_t panel_bytes(Depth depth) {
    return 2 * (depth.k / kShape<kind>.unit()) * kShape<kind>.unit_bytes();
}

void nothing() {}

// ---- files' blocks to panels and back ----

// A block of a file as codes and scales.
struct Block {
    uint8_t codes[kSuper];
    uint16_t scale, minimum;               // float16, of blocks of 32; or the factors of blocks of 256
    uint8_t scales[16], minimums[8];
};

inline void read_nibbles(const uint8_t* from, int count, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < count; ++i) {
        low[i] = from[i] & 15;
        high[i] = from[i] >> 4;
    }
}

inline void read_k_scales(const uint8_t* from, Block& block) {
    for (int i = 0; i < 4; ++i) {
        block.scales[i] = from[i] & 63;
        block.minimums[i] = from[i + 4] & 63;
        block.scales[i + 4] = (from[i + 8] & 15) | (from[i] >> 6 << 4);
        block.minimums[i + 4] = (from[i + 8] >> 4) | (from[i + 4] >> 6 << 4);
    }
}

template <Kind kind>
void read_block(const uint8_t* from, Block& block) {
    uint8_t* codes = block.codes;
    if constexpr (kind == Kind::q6_k) {
        for (int half = 0; half < 2; ++half) {
            const uint8_t *low = from + 64 * half, *high = from + 128 + 32 * half;
            for (int i = 0; i < 32; ++i) {
                uint8_t* to = codes + 128 * half + i;
                to[0] = (low[i] & 15) | (high[i] & 3) << 4;
                to[32] = (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4;
                to[64] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
                to[96] = low[i + 32] >> 4 | (high[i] >> 6) << 4;
            }
        }
        std::memcpy(block.scales, from + 192, 16);
        std::memcpy(&block.scale, from + 208, 2);
        return;
    }
    if constexpr (kind == Kind::mxfp4) {
        read_nibbles(from + 1, 16, codes, codes + 16);
        // 2^(e - 128) as the upper half of a float; the two smallest are subnormal.
        block.scale = from[0] >= 2 ? static_cast<uint16_t>((from[0] - 1) << 7) : from[0] ? 0x0040 : 0x0020;
        return;
    }
    std::memcpy(&block.scale, from, 2);
    if constexpr (kShape<kind>.minimums) std::memcpy(&block.minimum, from + 2, 2);
    if constexpr (kind == Kind::q8_0) {
        for (int i = 0; i < 32; ++i) codes[i] = from[2 + i] ^ 0x80;
    } else if constexpr (kShape<kind>.super) {
        read_k_scales(from + 4, block);
        const uint8_t* low = from + (kind == Kind::q5_k ? 48 : 16);
        for (int i = 0; i < 4; ++i) read_nibbles(low + 32 * i, 32, codes + 64 * i, codes + 64 * i + 32);
        if constexpr (kind == Kind::q5_k)
            for (int i = 0; i < kSuper; ++i) codes[i] |= (from[16 + i % 32] >> (i / 32) & 1) << 4;
    } else {
        const uint8_t* after = from + (kShape<kind>.minimums ? 4 : 2);
        read_nibbles(after + (kShape<kind>.high_bits ? 4 : 0), 16, codes, codes + 16);
        if constexpr (kShape<kind>.high_bits == 1)
            for (int i = 0; i < 32; ++i) codes[i] |= (after[i / 8] >> (i % 8) & 1) << 4;
    }
}

// Write one column of a block into a unit of a run.
template <Kind kind>
void place_block(const Block& block, int lane, char* unit) {
    constexpr Shape shape = kShape<kind>;
    for (int64_t i = 0; i < shape.unit(); ++i) {
        char* step = unit + i / kStep * shape.step_bytes() + 4 * lane + i % 4;
        const int quad = i % kStep / 4;
        const uint8_t code = block.codes[i];
        if constexpr (shape.low_bits == 8) {
            step[quad * kVectorBytes] = static_cast<char>(code);
            continue;
        }
        step[quad % 4 * kVectorBytes] |= static_cast<char>((code & 15) << (quad / 4 * 4));
        if constexpr (shape.high_bits == 1) step[4 * kVectorBytes] |= static_cast<char>((code >> 4) << quad);
        if constexpr (shape.high_bits == 2) step[(4 + quad / 4) * kVectorBytes] |= static_cast<char>((code >> 4) << (quad % 4 * 2));
    }
    if constexpr (shape.super) {
        for (int64_t i = 0; i < shape.num_groups(); ++i)
            unit[shape.scales_at() + i * kWidth + lane] = static_cast<char>(block.scales[i]);
        if constexpr (shape.minimums)  // in pairs of groups
            for (int64_t i = 0; i < 8; ++i)
                unit[shape.minimums_at() + i / 2 * 2 * kWidth + 2 * lane + i % 2] = static_cast<char>(block.minimums[i]);
        store(unit + shape.factors_at() + 2 * lane, block.scale);
        if constexpr (shape.minimums) store(unit + shape.factors_at() + 2 * kWidth + 2 * lane, block.minimum);
    } else {
        store(unit + shape.scales_at() + 2 * lane, block.scale);
        if constexpr (shape.minimums) store(unit + shape.minimums_at() + 2 * lane, block.minimum);
    }
}

// Rows of blocks [rows][k / unit] become panels.
template <Kind kind>
void pack(const uint8_t* blocks, char* panels, int64_t rows, int64_t k, int threads) {
    constexpr Shape shape = kShape<kind>;
    const int64_t units = k / shape.unit(), runs = (rows + kPanel - 1) / kPanel * 2;
    parallel_for(threads, runs, even_chunk(threads, runs), [&](int64_t run) {
        char* to = panels + run * units * shape.unit_bytes();
        std::memset(to, 0, units * shape.unit_bytes());
        Block block;
        for (int64_t lane = 0; lane < kWidth && run * kWidth + lane < rows; ++lane)
            for (int64_t unit = 0; unit < units; ++unit) {
                read_block<kind>(blocks + ((run * kWidth + lane) * units + unit) * shape.block_bytes, block);
                place_block<kind>(block, static_cast<int>(lane), to + unit * shape.unit_bytes());
            }
    });
}

// The code of feature i of a unit, as a number of its scale.
template <Kind kind>
int code_at(const char* unit, int lane, int64_t i) {
    constexpr Shape shape = kShape<kind>;
    const auto* step = reinterpret_cast<const uint8_t*>(unit) + i / kStep * shape.step_bytes() + 4 * lane + i % 4;
    const int quad = i % kStep / 4;
    if constexpr (shape.low_bits == 8) return step[quad * kVectorBytes] - shape.zero;
    int code = step[quad % 4 * kVectorBytes] >> (quad / 4 * 4) & 15;
    if constexpr (kind == Kind::mxfp4) code = kFp4[code];
    if constexpr (shape.high_bits == 1) code |= (step[4 * kVectorBytes] >> quad & 1) << 4;
    if constexpr (shape.high_bits == 2) code |= (step[(4 + quad / 4) * kVectorBytes] >> (quad % 4 * 2) & 3) << 4;
    return code - shape.zero;
}

template <Kind kind>
void expand_row(const char* run, int lane, int64_t k, float* out) {
    constexpr Shape shape = kShape<kind>;
    const auto half_at = [lane](const char* from) {
        uint16_t half;
        std::memcpy(&half, from + 2 * lane, sizeof half);
        return kind == Kind::mxfp4 ? bits<float>(static_cast<uint32_t>(half) << 16) : widen_half(half);
    };
    for (int64_t first = 0; first < k; first += shape.unit(), run += shape.unit_bytes())
        for (int64_t i = 0; i < shape.unit(); ++i) {
            const auto code = static_cast<float>(code_at<kind>(run, lane, i));
            float scale, minimum = 0;
            if constexpr (shape.super) {
                const char number = run[shape.scales_at() + i / shape.group * kWidth + lane];
                const float small = kind == Kind::q6_k ? static_cast<int8_t>(number) : static_cast<uint8_t>(number);
                scale = half_at(run + shape.factors_at()) * small;
                if constexpr (shape.minimums) {
                    const int64_t group = i / 32;
                    const char own = run[shape.minimums_at() + group / 2 * 2 * kWidth + 2 * lane + group % 2];
                    minimum = half_at(run + shape.factors_at() + 2 * kWidth) * static_cast<uint8_t>(own);
                }
            } else {
                scale = half_at(run + shape.scales_at());
                if constexpr (shape.minimums) minimum = -half_at(run + shape.minimums_at());
            }
            const float product = scale * code;
            out[first + i] = product - minimum;
        }
}

template <Kind kind>
void expand(const char* panel, int64_t column, Depth depth, float* out) {
    expand_row<kind>(panel + column / kWidth * panel_bytes<kind>(depth) / 2, static_cast<int>(column % kWidth), depth.k,
                     out);
}

// ---- methods ----

template <Kind kind, class Dot>
const Method kMethod{panel_bytes<kind>,
                     expand<kind>,
                     Dot::kTileRows,
                     row_bytes<kShape<kind>.super>,
                     convert_row<kind, Dot>,
                     multiply_tile<kind, Dot, Dot::kTileRows>,
                     nothing,
                     nothing,
                     pack<kind>};

template <Kind kind>
void add_methods(const char* name, NamedMethods& methods) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    methods.push_back({name, "vnni", &kMethod<kind, VnniDot>});
#endif
#if defined(__AVX2__)
    methods.push_back({name, "", &kMethod<kind, Avx2Dot>});
#else
    methods.push_back({name, "", &kMethod<kind, PlainDot>});
#endif
}

}  // namespace

NamedMethods gguf_methods() {
    NamedMethods methods;
    add_methods<Kind::q4_0>("Q4_0", methods);
    add_methods<Kind::q4_1>("Q4_1", methods);
    add_methods<Kind::q5_0>("Q5_0", methods);
    add_methods<Kind::q5_1>("Q5_1", methods);
    add_methods<Kind::q8_0>("Q8_0", methods);
    add_methods<Kind::mxfp4>("MXFP4", methods);
    add_methods<Kind::q4_k>("Q4_K", methods);
    add_methods<Kind::q5_k>("Q5_K", methods);
    add_methods<Kind::q6_k>("Q6_K", methods);
    return methods;
}

}  // namespace inflight
