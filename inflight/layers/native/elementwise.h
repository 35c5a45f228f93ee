// Operations on rows that other kernels include.
#pragma once

#include <cmath>

#include "vectors.h"

namespace inflight {

inline float inverse_rms(const float* x, int64_t n, float eps) {
    Vec squares{};
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        Vec v = load<Vec>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < n; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

inline void scale_row(const float* x, const float* weight, float* out, int64_t n, float factor) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
        store(out + i, load<Vec>(x + i) * factor * load<Vec>(weight + i));
    for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// out = rms_norm(x) * weight
inline void rms_norm_row(const float* x, const float* weight, float* out, int64_t n, float eps) {
    scale_row(x, weight, out, n, inverse_rms(x, n, eps));
}

// Rotate feature i with feature i + half by the angle with cosine cos[i] and sine sin[i].
inline void rotate_head(float* x, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        Vec a = load<Vec>(x + i), b = load<Vec>(x + half + i);
        Vec c = load<Vec>(cos + i), s = load<Vec>(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

}  // namespace inflight
