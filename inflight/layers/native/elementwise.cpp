// Norms, rotary embedding and gated activations: one pass over memory each, rows independent of each other.

#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "operations.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kParallelFloats = 32 << 10;  // below this, waking the other threads costs more than it saves

// Row (i, j) of a view [outer][inner][n] with unit stride inside.
struct Rows {
    float* data;
    int64_t inner, outer_stride, inner_stride;

    float* operator()(int64_t row) const {
        return data + row / inner * outer_stride + row % inner * inner_stride;
    }
};

// The mean of a row, then the mean square around it: a second pass over a small row is more exact than a formula.
struct Moments {
    float mean, inverse_deviation;
};

Moments measure(const float* x, int64_t n, float eps) {
    Vec sums{};
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) sums += load<Vec>(x + i);
    float total = sum(sums);
    for (; i < n; ++i) total += x[i];
    const float mean = total / static_cast<float>(n);
    Vec squares{};
    for (i = 0; i + kWidth <= n; i += kWidth) {
        const Vec centred = load<Vec>(x + i) - mean;
        squares += centred * centred;
    }
    float square = sum(squares);
    for (; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
    return {mean, 1.0f / std::sqrt(square / static_cast<float>(n) + eps)};
}

void standardize(const float* x, Moments moments, const float* weight, const float* bias, float* out, int64_t n) {
    const float factor = moments.inverse_deviation, mean = moments.mean;
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
        const Vec scaled = (load<Vec>(x + i) - mean) * factor * load<Vec>(weight + i);
        store(out + i, bias ? scaled + load<Vec>(bias + i) : scaled);
    }
    for (; i < n; ++i) {
        const float scaled = (x[i] - mean) * factor * weight[i];
        out[i] = bias ? scaled + bias[i] : scaled;
    }
}

template <Vec (*Function)(Vec)>
void gate_each(const float* gate_up, float* out, int64_t tokens, int64_t n, int threads) {
    constexpr int64_t piece = 1024;  // so that one wide token is split too
    const int64_t pieces = (n + piece - 1) / piece;
    if (tokens * n <= kParallelFloats / 4) threads = 1;
    parallel_for(threads, tokens * pieces, even_chunk(threads, tokens * pieces), [&](int64_t unit) {
        const int64_t token = unit / pieces, first = unit % pieces * piece;
        const float* row = gate_up + token * 2 * n + first;
        gate_row<Function>(row, row + n, out + token * n + first, std::min(piece, n - first));
    });
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

void inflight_rms_norm(float* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                       const float* weight, float* out, int64_t n, float eps, int threads) {
    const Rows rows{x, inner, outer_stride, inner_stride};
    if (outer * inner * n <= kParallelFloats) threads = 1;
    parallel_for(threads, outer * inner, even_chunk(threads, outer * inner), [&](int64_t row) {
        rms_norm_row(rows(row), weight, out + row * n, n, eps);
    });
}

void inflight_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows, int64_t n,
                         float eps, int threads) {
    if (rows * n <= kParallelFloats) threads = 1;
    parallel_for(threads, rows, even_chunk(threads, rows), [&](int64_t row) {
        standardize(x + row * n, measure(x + row * n, n, eps), weight, bias, out + row * n, n);
    });
}

// residual = layer_norm(residual + x)
void inflight_add_layer_norm(float* residual, const float* x, const float* weight, const float* bias, int64_t rows,
                             int64_t n, float eps, int threads) {
    if (rows * n <= kParallelFloats) threads = 1;
    parallel_for(threads, rows, even_chunk(threads, rows), [&](int64_t row) {
        float* to = residual + row * n;
        for (int64_t i = 0; i < n; ++i) to[i] += x[row * n + i];
        standardize(to, measure(to, n, eps), weight, bias, to, n);
    });
}

// residual += x
void inflight_add(float* residual, const float* x, int64_t n, int threads) {
    constexpr int64_t piece = 4096;
    const int64_t pieces = (n + piece - 1) / piece;
    if (n <= kParallelFloats) threads = 1;
    parallel_for(threads, pieces, even_chunk(threads, pieces), [&](int64_t unit) {
        const int64_t end = std::min(n, (unit + 1) * piece);
        for (int64_t i = unit * piece; i < end; ++i) residual[i] += x[i];
    });
}

// x = cap * tanh(x / cap)
void inflight_softcap(float* x, int64_t n, float cap, int threads) {
    constexpr int64_t piece = 4096;
    const int64_t pieces = (n + piece - 1) / piece;
    if (n <= kParallelFloats) threads = 1;
    parallel_for(threads, pieces, even_chunk(threads, pieces), [&](int64_t unit) {
        const int64_t end = std::min(n, (unit + 1) * piece);
        for (int64_t i = unit * piece; i < end; i += kWidth) {
            float rest[kWidth] = {};
            const int64_t count = std::min<int64_t>(kWidth, end - i);
            std::memcpy(rest, x + i, count * sizeof(float));
            store(rest, exact_tanh(load<Vec>(rest) / cap) * cap);
            std::memcpy(x + i, rest, count * sizeof(float));
        }
    });
}

// Multiply the n features of each token of x by sigmoid(gate): of a gate for each feature, or of one (width 1) for all.
void inflight_sigmoid_gate(float* x, const float* gate, int64_t tokens, int64_t n, int64_t gate_stride, int64_t width,
                           int threads) {
    if (tokens * n <= kParallelFloats) threads = 1;
    parallel_for(threads, tokens, even_chunk(threads, tokens), [&](int64_t token) {
        float* row = x + token * n;
        const float* gates = gate + token * gate_stride;
        for (int64_t i = 0; i < n; i += kWidth) {
            float part[kWidth] = {}, own[kWidth] = {};
            const int64_t count = std::min<int64_t>(kWidth, n - i);
            std::memcpy(part, row + i, count * sizeof(float));
            if (width == 1) store(own, splat(gates[0]));
            else std::memcpy(own, gates + i, count * sizeof(float));
            store(part, load<Vec>(part) / (1.0f + exp(-load<Vec>(own))));
            std::memcpy(row + i, part, count * sizeof(float));
        }
    });
}

void inflight_rotate(float* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                     const int64_t* positions, const float* cos_sin, int64_t rotary_dim, int threads) {
    const int64_t half = rotary_dim / 2;
    if (tokens * heads * rotary_dim <= kParallelFloats) threads = 1;
    parallel_for(threads, tokens, even_chunk(threads, tokens), [&](int64_t token) {
        const float* cos = cos_sin + positions[token] * rotary_dim;
        for (int64_t head = 0; head < heads; ++head)
            rotate_head(x + token * token_stride + head * head_stride, cos, cos + half, half);
    });
}

void inflight_gate(const float* gate_up, float* out, int64_t tokens, int64_t n, Activation gate, int threads) {
    switch (gate) {
        case Activation::silu: return gate_each<silu>(gate_up, out, tokens, n, threads);
        case Activation::gelu_tanh: return gate_each<gelu_tanh>(gate_up, out, tokens, n, threads);
        default: return gate_each<gelu>(gate_up, out, tokens, n, threads);
    }
}
}
