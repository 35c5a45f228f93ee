// Gated delta nets: a short convolution, the gated delta rule, then a norm and a gate.
//
// A state is [kernel - 1][conv_size] floats, the last inputs of the convolution with the oldest first, then a matrix
// [key_dim][value_dim] for each value head.
//
// Every token goes through the same operations in the same order, so nothing depends on how a request's tokens are
// divided among calls. The columns of a matrix do not depend on each other: a unit of work takes kTile columns of one
// head through all tokens of an entry, and they stay in the first-level cache meanwhile.

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int kVecs = 2;                        // vectors of one tile
constexpr int64_t kTile = kVecs * kWidth;       // columns of a matrix that walk through the tokens together
constexpr int kChains = 4;                      // sums over keys that are added up at the end
constexpr int64_t kFeatures = 16 * kWidth;      // features of one unit of convolution
constexpr int64_t kCopied = 2;                  // tokens from which a tile is worth copying
constexpr int64_t kParallelWork = 64 << 10;     // multiply-adds below which one thread is faster than two
constexpr float kUnitEps = 1e-6f;               // added to the squared length of queries and keys

struct Job {
    const float* projected;  // [tokens][projected_stride]: queries, keys, values, z, b, a
    const float* conv_weight;  // [conv_size][kernel]
    const float *a_log, *dt_bias, *norm;
    float* states;
    float* mixed;  // [tokens][conv_size]
    float* gates;  // [tokens][2][value_heads]: decays, and the sizes of updates
    float* out;    // [tokens][value_heads * value_dim]
    const int32_t *begins, *ends;  // [entries]: the tokens of each
    const int32_t *rows, *fresh;   // [entries]: the row of its state, and whether it starts from zeros
    int64_t entries, projected_stride, state_stride;
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    float eps;

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t conv_size() const { return 2 * keys() + values(); }
    float* state(int64_t entry) const { return states + rows[entry] * state_stride; }
    float* matrix(int64_t entry, int64_t head) const {
        return state(entry) + (kernel - 1) * conv_size() + head * key_dim * value_dim;
    }
};

// Vectors at the end of a row, where only `count` floats exist. The others are 0 and are not stored.
Vec load_some(const float* from, int64_t count) {
    if (count >= kWidth) return load<Vec>(from);
    float x[kWidth] = {};
    std::memcpy(x, from, count * sizeof(float));
    return load<Vec>(x);
}

void store_some(float* to, Vec v, int64_t count) {
    if (count >= kWidth) return store(to, v);
    float x[kWidth];
    store(x, v);
    std::memcpy(to, x, count * sizeof(float));
}

// Convolve features [first, first + count) of an entry, and keep its last inputs for the next call.
void convolve(const Job& job, int64_t entry, int64_t first, int64_t count) {
    thread_local Scratch scratch;
    const int64_t before = job.kernel - 1, size = job.conv_size(), begin = job.begins[entry], end = job.ends[entry];
    float* history = scratch.floats((before + job.kernel) * kFeatures);  // [kernel - 1][kFeatures]
    float* weights = history + before * kFeatures;                       // [kernel][kFeatures]
    float* state = job.state(entry) + first;
    for (int64_t i = 0; i < before; ++i) {
        if (job.fresh[entry]) std::memset(history + i * kFeatures, 0, count * sizeof(float));
        else std::memcpy(history + i * kFeatures, state + i * size, count * sizeof(float));
    }
    for (int64_t tap = 0; tap < job.kernel; ++tap)
        for (int64_t i = 0; i < count; ++i)
            weights[tap * kFeatures + i] = job.conv_weight[(first + i) * job.kernel + tap];
    // The input of a token, which may be one of an earlier call.
    const auto input = [&](int64_t token) {
        return token < begin ? history + (token - begin + before) * kFeatures
                             : job.projected + token * job.projected_stride + first;
    };
    for (int64_t token = begin; token < end; ++token) {
        float* to = job.mixed + token * size + first;
        for (int64_t i = 0; i < count; i += kWidth) {
            Vec sum{};
            for (int64_t tap = 0; tap < job.kernel; ++tap)
                sum += load_some(input(token - before + tap) + i, count - i) * load<Vec>(weights + tap * kFeatures + i);
            store_some(to + i, silu(sum), count - i);
        }
    }
    for (int64_t i = 0; i < before; ++i)
        std::memcpy(state + i * size, input(end - before + i), count * sizeof(float));
}

void scale_to(float* x, int64_t n, float length) {
    Vec squares{};
    for (int64_t i = 0; i < n; i += kWidth) {
        const Vec v = load_some(x + i, n - i);
        squares += v * v;
    }
    const float factor = length / std::sqrt(sum(squares) + kUnitEps);
    for (int64_t i = 0; i < n; i += kWidth) store_some(x + i, load_some(x + i, n - i) * factor, n - i);
}

// Give queries and keys unit length, divide queries by the root of key_dim, and compute the gates of the value heads.
void prepare(const Job& job, int64_t token) {
    float* mixed = job.mixed + token * job.conv_size();
    const float query_length = 1.0f / std::sqrt(static_cast<float>(job.key_dim));
    for (int64_t head = 0; head < job.key_heads; ++head) {
        scale_to(mixed + head * job.key_dim, job.key_dim, query_length);
        scale_to(mixed + job.keys() + head * job.key_dim, job.key_dim, 1.0f);
    }
    const float* b = job.projected + token * job.projected_stride + job.conv_size() + job.values();
    const float* a = b + job.value_heads;
    float* decays = job.gates + token * 2 * job.value_heads;
    float* sizes = decays + job.value_heads;
    for (int64_t head = 0; head < job.value_heads; ++head) {
        const float x = a[head] + job.dt_bias[head];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        decays[head] = std::exp(-std::exp(job.a_log[head]) * softplus);
        sizes[head] = 1.0f / (1.0f + std::exp(-b[head]));
    }
}

// Call body(k, chain) for the features k of a key, which take turns in the chains.
template <class Body>
inline __attribute__((always_inline)) void each_key(int64_t key_dim, const Body& body) {
    int64_t k = 0;
    for (; k + kChains <= key_dim; k += kChains) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) body(k + chain, chain);
    }
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains - 1; ++chain)
        if (k + chain < key_dim) body(k + chain, chain);
}

// Take columns of a matrix through the tokens [begin, end). One function for all cases, so that all round alike.
__attribute__((noinline)) void walk(const Job& job, int64_t head, int64_t column, int64_t begin, int64_t end,
                                    float* matrix, int64_t stride) {
    const int64_t key_head = head * job.key_heads / job.value_heads, size = job.conv_size();
    const int64_t width = std::min(kTile, job.value_dim - column);
    for (int64_t token = begin; token < end; ++token) {
        const float* query = job.mixed + token * size + key_head * job.key_dim;
        const float* key = query + job.keys();
        const float* value = job.mixed + token * size + 2 * job.keys() + head * job.value_dim + column;
        const float* gates = job.gates + token * 2 * job.value_heads;
        const float decay = gates[head], update = gates[job.value_heads + head];
        Vec read[kChains][kVecs] = {};
        each_key(job.key_dim, [&](int64_t k, int chain) {
            for (int v = 0; v < kVecs; ++v)
                read[chain][v] += load<Vec>(matrix + k * stride + v * kWidth) * key[k];
        });
        Vec change[kVecs];
        for (int v = 0; v < kVecs; ++v) {
            const Vec stored = ((read[0][v] + read[1][v]) + (read[2][v] + read[3][v])) * decay;
            const int64_t count = std::clamp<int64_t>(width - v * kWidth, 0, kWidth);
            change[v] = (load_some(value + v * kWidth, count) - stored) * update;
        }
        Vec result[kChains][kVecs] = {};
        each_key(job.key_dim, [&](int64_t k, int chain) {
            for (int v = 0; v < kVecs; ++v) {
                float* at = matrix + k * stride + v * kWidth;
                const Vec updated = load<Vec>(at) * decay + change[v] * key[k];
                store(at, updated);
                result[chain][v] += updated * query[k];
            }
        });
        float* out = job.out + (token * job.value_heads + head) * job.value_dim + column;
        for (int v = 0; v < kVecs; ++v) {
            const int64_t count = std::clamp<int64_t>(width - v * kWidth, 0, kWidth);
            store_some(out + v * kWidth, (result[0][v] + result[1][v]) + (result[2][v] + result[3][v]), count);
        }
    }
}

void apply_rule(const Job& job, int64_t entry, int64_t head, int64_t column) {
    thread_local Scratch scratch;
    const int64_t begin = job.begins[entry], end = job.ends[entry], width = std::min(kTile, job.value_dim - column);
    float* matrix = job.matrix(entry, head) + column;
    if (!job.fresh[entry] && width == kTile && end - begin < kCopied)
        return walk(job, head, column, begin, end, matrix, job.value_dim);
    float* tile = scratch.floats(job.key_dim * kTile);
    std::memset(tile, 0, job.key_dim * kTile * sizeof(float));
    if (!job.fresh[entry])
        for (int64_t k = 0; k < job.key_dim; ++k)
            std::memcpy(tile + k * kTile, matrix + k * job.value_dim, width * sizeof(float));
    walk(job, head, column, begin, end, tile, kTile);
    for (int64_t k = 0; k < job.key_dim; ++k)
        std::memcpy(matrix + k * job.value_dim, tile + k * kTile, width * sizeof(float));
}

// Normalise the heads of a token, and multiply them by silu(z).
void finish(const Job& job, int64_t token) {
    const int64_t n = job.value_dim;
    for (int64_t head = 0; head < job.value_heads; ++head) {
        float* x = job.out + (token * job.value_heads + head) * n;
        const float* z = job.projected + token * job.projected_stride + job.conv_size() + head * n;
        Vec squares{};
        for (int64_t i = 0; i < n; i += kWidth) {
            const Vec v = load_some(x + i, n - i);
            squares += v * v;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + job.eps);
        for (int64_t i = 0; i < n; i += kWidth) {
            const Vec normed = load_some(x + i, n - i) * factor * load_some(job.norm + i, n - i);
            store_some(x + i, normed * silu(load_some(z + i, n - i)), n - i);
        }
    }
}

// Call body(token) for the tokens of all entries.
template <class Body>
void for_tokens(const Job& job, int threads, const Body& body) {
    constexpr int64_t piece = 8;
    for (int64_t entry = 0, next; entry < job.entries; entry = next) {
        // Entries whose tokens follow each other are one range.
        next = entry + 1;
        while (next < job.entries && job.begins[next] == job.ends[next - 1]) ++next;
        const int64_t begin = job.begins[entry], end = job.ends[next - 1], pieces = (end - begin + piece - 1) / piece;
        parallel_for(threads, pieces, even_chunk(threads, pieces), [&](int64_t unit) {
            const int64_t first = begin + unit * piece;
            for (int64_t token = first; token < std::min(first + piece, end); ++token) body(token);
        });
    }
}

void compute(const Job& job, int threads) {
    int64_t tokens = 0;
    for (int64_t entry = 0; entry < job.entries; ++entry) tokens += job.ends[entry] - job.begins[entry];
    if (tokens * job.values() * job.key_dim <= kParallelWork) threads = 1;
    const int64_t slices = (job.conv_size() + kFeatures - 1) / kFeatures;
    parallel_for(threads, job.entries * slices, 1, [&](int64_t unit) {
        const int64_t first = unit % slices * kFeatures;
        convolve(job, unit / slices, first, std::min(kFeatures, job.conv_size() - first));
    });
    for_tokens(job, threads, [&](int64_t token) { prepare(job, token); });
    const int64_t tiles = (job.value_dim + kTile - 1) / kTile, columns = job.value_heads * tiles;
    parallel_for(threads, job.entries * columns, 1, [&](int64_t unit) {
        const int64_t column = unit % columns;
        apply_rule(job, unit / columns, column / tiles, column % tiles * kTile);
    });
    for_tokens(job, threads, [&](int64_t token) { finish(job, token); });
}

}  // namespace
}  // namespace inflight

extern "C" void inflight_delta_net(const float* projected, const float* conv_weight, const float* a_log,
                                   const float* dt_bias, const float* norm, float* states, float* mixed, float* gates,
                                   float* out, const int32_t* begins, const int32_t* ends, const int32_t* rows,
                                   const int32_t* fresh, int64_t entries, int64_t projected_stride,
                                   int64_t state_stride, int64_t key_heads, int64_t value_heads, int64_t key_dim,
                                   int64_t value_dim, int64_t kernel, float eps, int threads) {
    using namespace inflight;
    compute({projected, conv_weight, a_log, dt_bias, norm, states, mixed, gates, out, begins, ends, rows, fresh, entries,
             projected_stride, state_stride, key_heads, value_heads, key_dim, value_dim, kernel, eps},
            threads);
}
