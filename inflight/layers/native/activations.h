// Activation functions of one vector: the same operations in every lane, so a value's result does not depend on its
// neighbours.
#pragma once

#include "structures.h"
#include "vectors.h"

namespace inflight {

inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

// x * sigmoid(1.702 * x)
inline Vec steep_silu(Vec x) { return x / (1.0f + exp(-1.702f * x)); }

inline Vec gelu_tanh(Vec x) {
    // 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2u)).
    Vec u = (x * x * x * 0.044715f + x) * 0.7978845608f;
    return x / (1.0f + exp(-2.0f * u));
}

// x * Phi(x) is max(x, 0) - z * Phi(-z) with z = |x|. Phi(-z) is a polynomial over [0, kFar], fitted so that the
// product is off by 2e-7 at most; beyond, both are nearly 0, and so is the difference.
inline Vec gelu(Vec x) {
    constexpr float kFar = 5.25f;
    // From the highest power down, of z / kFar * 2 - 1.
    constexpr float coefficients[] = {
        -0.00392902363f, 0.00584487664f, 0.0174772926f, -0.0376203395f, -0.0166598111f, 0.0986195505f,
        -0.0632896423f, -0.0956913531f, 0.196742937f, -0.0976736993f, -0.120998099f, 0.257112831f,
        -0.225942254f, 0.115075603f, -0.0334012695f, 0.00433245767f};
    const Vec size = x < 0.0f ? -x : x;
    const Vec z = size > kFar ? splat(kFar) : size;
    const Vec t = z * (2.0f / kFar) - 1.0f;
    Vec tail = splat(coefficients[0]);
#pragma GCC unroll 16
    for (int i = 1; i < 16; ++i) tail = tail * t + coefficients[i];
    return (x < 0.0f ? Vec{} : x) - z * tail;
}

inline Vec relu(Vec x) { return x < 0.0f ? Vec{} : x; }

inline Vec tanh(Vec x) { return 1.0f - 2.0f / (1.0f + exp(x * 2.0f)); }

// tanh with a small relative error also near 0, where the formula above subtracts nearly equal numbers.
inline Vec exact_tanh(Vec x) {
    const Vec z = x * x;
    Vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return z < 0.390625f ? p * z * x + x : tanh(x);
}

template <Vec (*Function)(Vec)>
void activate_each(Vec* x, int count) {
    for (int i = 0; i < count; ++i) x[i] = Function(x[i]);
}

// One function for any number of rows, so that all round alike.
__attribute__((noinline)) inline void activate(Activation activation, Vec* x, int count) {
    switch (activation) {
        case Activation::none: case Activation::clamped_silu: return;
        case Activation::gelu: return activate_each<gelu>(x, count);
        case Activation::gelu_tanh: return activate_each<gelu_tanh>(x, count);
        case Activation::relu: return activate_each<relu>(x, count);
        case Activation::silu: return activate_each<silu>(x, count);
        case Activation::tanh: return activate_each<tanh>(x, count);
    }
}

// out = Function(gate) * up; may work in place.
template <Vec (*Function)(Vec)>
void gate_row(const float* gate, const float* up, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
        store(out + i, Function(load<Vec>(gate + i)) * load<Vec>(up + i));
    if (i == n) return;
    float g[kWidth] = {}, u[kWidth] = {}, both[kWidth];
    std::memcpy(g, gate + i, (n - i) * sizeof(float));
    std::memcpy(u, up + i, (n - i) * sizeof(float));
    store(both, Function(load<Vec>(g)) * load<Vec>(u));
    std::memcpy(out + i, both, (n - i) * sizeof(float));
}

}  // namespace inflight
