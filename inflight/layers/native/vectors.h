// Vectors of one register, written with the compiler's own vector types so that the same source serves
// AVX-512, AVX2, SSE and NEON. Nothing here depends on how many rows a caller works on at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace inflight {

#if defined(__AVX512F__)
constexpr int kWidth = 16;      // floats in a vector
constexpr int kGemmRows = 14;   // rows of a GEMM tile: 2 * rows accumulators, 2 weights, 1 activation
constexpr int kQueryRows = 8;   // query rows that share one load of a key or value vector
#elif defined(__AVX__)
constexpr int kWidth = 8;
constexpr int kGemmRows = 6;
constexpr int kQueryRows = 3;
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kGemmRows = 12;
constexpr int kQueryRows = 3;
#else
constexpr int kWidth = 4;
constexpr int kGemmRows = 6;
constexpr int kQueryRows = 1;
#endif

template <class T, int N>
struct VectorOf {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};

using Vec = VectorOf<float, kWidth>::type;
using IntVec = VectorOf<int32_t, kWidth>::type;
using WordVec = VectorOf<uint32_t, kWidth>::type;

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits are kept");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Numbers of one byte each, widened. Compilers do not find these instructions in __builtin_convertvector.
template <bool is_signed>
inline Vec load_bytes(const void* from) {
#if defined(__AVX512F__)
    const __m128i bytes = load<__m128i>(from);
    return bits<Vec>(_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes)));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
    return bits<Vec>(_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes)));
#elif defined(__aarch64__)
    // One byte of the word to the top of each lane, and back with or without its sign.
    const WordVec word = load<uint32_t>(from) - WordVec{}, places = {24, 16, 8, 0}, raised = word << places;
    return is_signed ? __builtin_convertvector(bits<IntVec>(raised) >> 24, Vec)
                     : __builtin_convertvector(raised >> 24, Vec);
#else
    float wide[kWidth];
    for (int i = 0; i < kWidth; ++i) {
        const auto byte = static_cast<const uint8_t*>(from)[i];
        wide[i] = is_signed ? static_cast<int8_t>(byte) : byte;
    }
    return load<Vec>(wide);
#endif
}

inline Vec splat(float x) { return x - Vec{}; }

inline IntVec lane_numbers() {
    int32_t lanes[kWidth];
    for (int i = 0; i < kWidth; ++i) lanes[i] = i;
    return load<IntVec>(lanes);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Fold a vector in halves: always the same tree, so always the same rounding.
template <int N>
inline float fold_sum(const float* x) {
    if constexpr (N == 1) {
        return x[0];
    } else {
        using Half = typename VectorOf<float, N / 2>::type;
        Half sum = load<Half>(x) + load<Half>(x + N / 2);
        float half[N / 2];
        store(half, sum);
        return fold_sum<N / 2>(half);
    }
}

inline float sum(Vec v) {
    float x[kWidth];
    store(x, v);
    return fold_sum<kWidth>(x);
}

template <int N>
inline float fold_max(const float* x) {
    if constexpr (N == 1) {
        return x[0];
    } else {
        using Half = typename VectorOf<float, N / 2>::type;
        Half a = load<Half>(x), b = load<Half>(x + N / 2);
        float half[N / 2];
        store(half, a > b ? a : b);
        return fold_max<N / 2>(half);
    }
}

inline float max(Vec v) {
    float x[kWidth];
    store(x, v);
    return fold_max<kWidth>(x);
}

// exp to about 2 units in the last place. Below -87.3 it is exactly 0; above 88.3 it stays at exp(88.3).
inline Vec exp(Vec x) {
    const float lowest = -87.3f, highest = 88.3f;
    const IntVec vanishes = x < lowest;
    x = vanishes ? splat(lowest) : x;
    x = x > highest ? splat(highest) : x;
    // Adding 1.5 * 2^23 leaves round(x / ln 2) in the low bits of the sum.
    const float shift = 12582912.0f;
    Vec shifted = x * 1.44269504f + shift;
    Vec n = shifted - shift;
    Vec r = x - n * 0.693359375f;  // ln 2 in two pieces, the first exact in few bits
    r = r + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    IntVec exponent = bits<IntVec>(shifted) - bits<int32_t>(shift) + 127;
    Vec power = bits<Vec>(exponent << 23);
    return vanishes ? Vec{} : p * power;
}

// Memory that grows to the largest requested size and is freed with its thread.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }

    float* floats(size_t count) {
        if (count > capacity_) {
            std::free(data_);
            size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
            data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
            capacity_ = data_ ? count : 0;
            if (!data_) throw std::bad_alloc();
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    size_t capacity_ = 0;
};

}  // namespace inflight
