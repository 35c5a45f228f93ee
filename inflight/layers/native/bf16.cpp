// Products of bfloat16 weights in bfloat16 instructions: dot products of vectors (AVX512-BF16) and of tiles (AMX).
//
// Activations are rounded to bfloat16; products are exact in float32, in which they are summed.

#include "instructions.h"
#include "narrow.h"

#if defined(INFLIGHT_AVX512_EXTENSIONS)
#include <immintrin.h>

namespace inflight {
namespace {

#define INFLIGHT_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INFLIGHT_TILES __attribute__((target("avx512f,amx-tile,amx-bf16")))

constexpr int64_t kStep = kTileBytes / 2;  // features that one tile instruction takes
constexpr int kDotRows = 14;
constexpr int64_t kTileRows = 16;

int64_t row_bytes(Depth depth) { return 2 * padded(depth.k, kStep); }
int64_t panel_bytes(Depth depth) { return kPanel * row_bytes(depth); }
void nothing() {}

// Round to nearest even, as the instruction does; AMX comes with it.
INFLIGHT_DOT void round_row(const float* x, Depth depth, char* row) {
    const int64_t k = depth.k;
    int64_t i = 0;
    for (; i + kStep <= k; i += kStep)
        _mm512_store_si512(row + 2 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                                            _mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i))));
    if (i == k) return;
    const int64_t left = k - i;
    const auto low = static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
    const auto high = static_cast<__mmask16>(left > 16 ? (1 << (left - 16)) - 1 : 0);
    _mm512_store_si512(row + 2 * i,
                       reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x + i + 16),
                                                                     _mm512_maskz_loadu_ps(low, x + i))));
}

template <int Rows>
INFLIGHT_DOT void dot_rows(const NarrowTile& tile, float* sums) {
    __m512 low[Rows], high[Rows];
    for (int r = 0; r < Rows; ++r) low[r] = high[r] = _mm512_setzero_ps();
    const Strides rows(tile.rows, tile.stride);
    const char* panel = tile.panel;
    Ahead ahead = tile.ahead;
    const int64_t end = row_bytes(tile.depth);
    for (int64_t offset = 0; offset < end; offset += 4 * kUnroll) {
        for (int64_t line = 0; line < ahead.lines; ++line) __builtin_prefetch(ahead.data + line * kLine, 0, 2);
        ahead.data += ahead.lines * kLine;
#pragma GCC unroll 8
        for (int u = 0; u < kUnroll; ++u) {
            __m512 w0 = _mm512_loadu_ps(panel + u * 2 * kLine), w1 = _mm512_loadu_ps(panel + (u * 2 + 1) * kLine);
            asm("" : "+v"(w0), "+v"(w1));  // kept in registers
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(rows.word(r, offset + 4 * u)));
                low[r] = _mm512_dpbf16_ps(low[r], reinterpret_cast<__m512bh>(w0), x);
                high[r] = _mm512_dpbf16_ps(high[r], reinterpret_cast<__m512bh>(w1), x);
            }
        }
        panel += kUnroll * 2 * kLine;
    }
    for (int r = 0; r < Rows; ++r) {
        _mm512_store_ps(sums + r * kPanel, low[r]);
        _mm512_store_ps(sums + r * kPanel + kWidth, high[r]);
    }
}

template <int Rows>
void dot(const NarrowTile& tile, float* sums) {
    if constexpr (Rows > 1)
        if (tile.count < Rows) return dot<Rows - 1>(tile, sums);
    dot_rows<Rows>(tile, sums);
}

inline void prefetch_step(Ahead& ahead) {
    for (int64_t line = 0; line < 2 * ahead.lines; ++line) __builtin_prefetch(ahead.data + line * kLine, 0, 2);
    ahead.data += 2 * ahead.lines * kLine;
}

// Tiles are whole even where there are fewer rows: every row goes through the same instruction.
INFLIGHT_TILES void multiply_tiles(const NarrowTile& tile, float* sums) {
    Ahead ahead = tile.ahead;
    const char *panel = tile.panel, *rows = tile.rows, *more = rows + kTileRows * tile.stride;
    const int64_t end = row_bytes(tile.depth), stride = tile.stride;
    _tile_zero(0);
    _tile_zero(1);
    if (tile.count <= kTileRows) {
        for (int64_t offset = 0; offset < end; offset += kTileBytes, panel += kTileRows * 2 * kLine) {
            prefetch_step(ahead);
            _tile_loadd(4, rows + offset, stride);
            _tile_loadd(6, panel, 2 * kLine);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + kLine, 2 * kLine);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t offset = 0; offset < end; offset += kTileBytes, panel += kTileRows * 2 * kLine) {
            prefetch_step(ahead);
            _tile_loadd(4, rows + offset, stride);
            _tile_loadd(6, panel, 2 * kLine);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + kLine, 2 * kLine);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, more + offset, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + kTileRows * kPanel, kPanel * sizeof(float));
        _tile_stored(3, sums + kTileRows * kPanel + kWidth, kPanel * sizeof(float));
    }
    _tile_stored(0, sums, kPanel * sizeof(float));
    _tile_stored(1, sums + kWidth, kPanel * sizeof(float));
}

const Method kDot{panel_bytes, expand_bf16, kDotRows, row_bytes, round_row, dot<kDotRows>, nothing, nothing};
const Method kTiles{panel_bytes,   expand_bf16,    2 * kTileRows, row_bytes,
                    round_row,     multiply_tiles, enter_tiles,   leave_tiles};

}  // namespace

NamedMethods bf16_methods() { return {{"bf16", "amx_bf16", &kTiles}, {"bf16", "avx512_bf16", &kDot}}; }

}  // namespace inflight

#else

namespace inflight {
NamedMethods bf16_methods() { return {}; }
}  // namespace inflight

#endif
