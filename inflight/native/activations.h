// Activation functions of one vector: the same operations in every lane, so a value's result does not depend on its
// neighbours.
#pragma once

#include "vectors.h"

namespace inflight {

// Numbered as in native/library.py.
enum class Activation : int { none, gelu, gelu_tanh, relu, silu, tanh };

inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

inline Vec gelu_tanh(Vec x) {
    // 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2u)).
    Vec u = (x * x * x * 0.044715f + x) * 0.7978845608f;
    return x / (1.0f + exp(-2.0f * u));
}

// x * Phi(x) is max(x, 0) - |x| * Phi(-|x|). Phi(-z) is half of erfc(z / sqrt 2), by formula 7.1.26 of Abramowitz
// and Stegun, whose error is 1.5e-7; in this form it is multiplied by little where it would count.
inline Vec gelu(Vec x) {
    const Vec size = x < 0.0f ? -x : x;
    const Vec z = size > 16.0f ? splat(16.0f) : size;  // beyond, Phi(-z) is 0, and infinity times 0 no number
    const Vec t = 1.0f / (z * (0.3275911f * 0.70710678f) + 1.0f);
    Vec p = t * (0.5f * 1.061405429f) - 0.5f * 1.453152027f;
    p = p * t + 0.5f * 1.421413741f;
    p = p * t - 0.5f * 0.284496736f;
    p = p * t + 0.5f * 0.254829592f;
    const Vec tail = p * t * exp(z * z * -0.5f);
    return (x < 0.0f ? Vec{} : x) - z * tail;
}

inline Vec relu(Vec x) { return x < 0.0f ? Vec{} : x; }

inline Vec tanh(Vec x) { return 1.0f - 2.0f / (1.0f + exp(x * 2.0f)); }

}  // namespace inflight
