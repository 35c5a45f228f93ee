// A layer's experts: choose each token's experts, group tokens by expert, multiply, and add up.
//
// A pair is a token and one of its experts. The products of a pair are summed as in gemm.h or narrow.h, and a token's
// experts are added in the order in which they were chosen: its result has the same bits in every batch.

#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"
#include "elementwise.h"
#include "gemm.h"
#include "narrow.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kParallelLogits = 4 << 10;  // below which one thread chooses
constexpr int64_t kParallelFloats = 32 << 10;
constexpr int64_t kChunkPairs = 4096;      // pairs worked on at a time, at least,
constexpr int64_t kChunkRows = 64;         // so that each expert gets many rows
constexpr int64_t kBlockRows = 144;        // more rows of an expert than these are worked on in blocks
constexpr int64_t kPackedFloats = 72 << 10;  // of a block of rows, which stays in the L2 cache
constexpr float kSmallest = 1e-20f;        // all sigmoids may be 0

// The first k step of one of `cuts` parts of k: even, since panels may hold pairs.
int64_t cut_at(int64_t cut, int64_t cuts, int64_t k) { return cut == cuts ? k : cut * k / cuts / 2 * 2; }

// Return the unused index with the largest value, and mark it as used. Of equal ones the first; NaN is never larger.
int64_t take_best(const float* values, int64_t count, std::vector<char>& used) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!used[i] && (best < 0 || values[i] > values[best])) best = i;
    used[best] = 1;
    return best;
}

void softmax(float* values, int64_t count) {
    const float largest = *std::max_element(values, values + count);
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += values[i] = std::exp(values[i] - largest);
    for (int64_t i = 0; i < count; ++i) values[i] /= total;
}

// Mark the experts outside the groups whose two best have the largest sums.
void exclude_groups(const Experts& layer, const float* ranking, std::vector<char>& used) {
    const int64_t size = layer.experts / layer.groups;
    std::vector<float> sums(layer.groups);
    for (int64_t group = 0; group < layer.groups; ++group) {
        std::vector<char> taken(size);
        const float* values = ranking + group * size;
        const float first = values[take_best(values, size, taken)];
        sums[group] = first + values[take_best(values, size, taken)];
    }
    std::vector<char> kept(layer.groups);
    for (int64_t i = 0; i < layer.top_groups; ++i) take_best(sums.data(), layer.groups, kept);
    for (int64_t i = 0; i < layer.experts; ++i) used[i] = !kept[i / size];
}

// Write a token's experts, best first, and their weights.
void choose(const Experts& layer, const float* logits, int64_t* ids, float* weights) {
    thread_local std::vector<float> scores, ranking;
    thread_local std::vector<char> used;
    scores.assign(logits, logits + layer.experts);
    if (layer.scores == Scores::softmax) softmax(scores.data(), layer.experts);
    if (layer.scores == Scores::sigmoid)
        for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
    ranking = scores;
    if (layer.correction)
        for (int64_t i = 0; i < layer.experts; ++i) ranking[i] += layer.correction[i];
    used.assign(layer.experts, 0);
    if (layer.top_groups < layer.groups) exclude_groups(layer, ranking.data(), used);
    for (int64_t j = 0; j < layer.top_k; ++j) {
        ids[j] = take_best(ranking.data(), layer.experts, used);
        weights[j] = scores[ids[j]];
    }
    if (layer.scores == Scores::chosen) softmax(weights, layer.top_k);
    float total = kSmallest;
    for (int64_t j = 0; j < layer.top_k; ++j) total += weights[j];
    const float divisor = layer.normalise ? total : 1.0f;
    for (int64_t j = 0; j < layer.top_k; ++j) {
        weights[j] = weights[j] / divisor * layer.scale;
        if (layer.factors) weights[j] *= layer.factors[ids[j]];
    }
}

// Rows [first, first + count) of the pairs in the order of their experts, all of one expert.
struct Rows {
    int64_t expert, first, count;
};

// The pairs of some tokens, grouped by expert.
struct Groups {
    std::vector<int64_t> ids;        // [tokens][top_k]
    std::vector<float> weights;      // [tokens][top_k]
    std::vector<int64_t> positions;  // [tokens][top_k]: the row of a pair; -1: the expert is not here
    std::vector<const float*> sources;  // the input of each row
    std::vector<Rows> blocks;
    std::vector<int64_t> starts;

    // Return the number of rows.
    int64_t fill(const Experts& layer, const float* x, const float* logits, const int32_t* padding_mask, int64_t tokens,
                 int threads) {
        const int64_t pairs = tokens * layer.top_k;
        ids.resize(pairs);
        weights.resize(pairs);
        positions.resize(pairs);
        if (tokens * layer.experts <= kParallelLogits) threads = 1;
        parallel_for(threads, tokens, even_chunk(threads, tokens), [&](int64_t token) {
            choose(layer, logits + token * layer.experts, &ids[token * layer.top_k], &weights[token * layer.top_k]);
        });
        starts.assign(layer.held + 1, 0);
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t expert = ids[pair] - layer.first_held;
            const bool counts = !padding_mask || padding_mask[pair / layer.top_k] >= 0;
            const bool here = counts && expert >= 0 && expert < layer.held;
            layer.tokens[ids[pair]] += counts;
            ids[pair] = here ? expert : -1;
            if (here) ++starts[expert + 1];
        }
        blocks.clear();
        for (int64_t expert = 0; expert < layer.held; ++expert) {
            const int64_t count = starts[expert + 1], parts = (count + kBlockRows - 1) / kBlockRows;
            for (int64_t i = 0; i < parts; ++i) {
                const int64_t begin = i * count / parts, end = (i + 1) * count / parts;
                blocks.push_back({expert, starts[expert] + begin, end - begin});
            }
            starts[expert + 1] += starts[expert];
        }
        const int64_t rows = starts[layer.held];
        sources.resize(rows);
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t expert = ids[pair];
            positions[pair] = expert < 0 ? -1 : starts[expert]++;
            if (expert >= 0) sources[positions[pair]] = x + pair / layer.top_k * layer.hidden;
        }
        return rows;
    }
};

// y[row] = W of the row's expert @ the row's source + bias. A thread packs a block of rows, and panels pass over it.
template <class Stored>
void multiply_plain(const std::vector<Rows>& blocks, const float* const* sources, const Matrix* matrices,
                    const float* bias, float* y, int64_t k, int64_t n, int threads) {
    const int64_t panels = (n + kPanel - 1) / kPanel, count = static_cast<int64_t>(blocks.size());
    const int64_t panel_bytes = k * kPanel * static_cast<int64_t>(sizeof(Stored));
    const int64_t most = (16 * threads + count - 1) / count;  // so that no thread waits long for the last
    const int64_t groups = std::max<int64_t>(1, std::min(most, panels * panel_bytes / kChunkBytes));
    parallel_for(threads, count * groups, 1, [&](int64_t unit) {
        thread_local Scratch scratch;
        const Rows& rows = blocks[unit / groups];
        const int64_t group = unit % groups;
        const int64_t first_panel = group * panels / groups, last_panel = (group + 1) * panels / groups;
        const auto* weight = static_cast<const Stored*>(matrices[rows.expert].panels);
        const Product<Stored> product{nullptr, weight, bias ? bias + rows.expert * n : nullptr,
                                      y + rows.first * n, rows.count, k, n, Activation::none};
        const Tiling tiling(rows.count);
        const int64_t cuts = std::max((k + kDepth - 1) / kDepth, (rows.count * k + kPackedFloats - 1) / kPackedFloats);
        for (int64_t cut = 0; cut < cuts; ++cut) {
            const int64_t begin = cut_at(cut, cuts, k), end = cut_at(cut + 1, cuts, k), depth = end - begin;
            float* packed = scratch.floats(rows.count * depth);
            for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                const int64_t first = tiling.first(tile);
                pack_sources<kGemmRows>(sources + rows.first + first, begin, tiling.size(tile), depth,
                                        packed + first * depth);
            }
            for (int64_t panel = first_panel; panel < last_panel; ++panel) {
                const bool last = panel + 1 == last_panel;
                multiply_panel(product, tiling, {packed, 0, tiling.tiles, begin, depth, begin, end}, panel,
                               last ? product.panel(first_panel, end) : product.panel(panel + 1, begin));
            }
        }
    });
}

// The same by methods of narrow.h. An expert has `parts` matrices, which compute equal shares of its columns, and may
// differ in their methods: those of one method are multiplied together.
void multiply_narrow(const std::vector<Rows>& blocks, const float* const* sources, const Matrix* matrices,
                     int64_t parts, const float* bias, float* y, int64_t k, int64_t width, int threads) {
    thread_local std::vector<RowGroup> groups;
    const int64_t n = width / parts, count = static_cast<int64_t>(blocks.size()) * parts;
    const auto matrix_of = [&](int64_t i) -> const Matrix& { return matrices[blocks[i / parts].expert * parts + i % parts]; };
    thread_local std::vector<char> done;
    done.assign(count, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (done[i]) continue;
        const Matrix& first = matrix_of(i);
        groups.clear();
        for (int64_t j = i; j < count; ++j) {
            const Matrix& matrix = matrix_of(j);
            if (done[j] || matrix.method != first.method || matrix.group != first.group) continue;
            done[j] = 1;
            const Rows& rows = blocks[j / parts];
            const int64_t column = j % parts * n;
            groups.push_back({matrix.panels, bias ? bias + rows.expert * width + column : nullptr, rows.first,
                              rows.count, column});
        }
        multiply_groups({first.method, sources, y, {k, first.group}, n, width}, groups.data(),
                        static_cast<int64_t>(groups.size()), threads);
    }
}

void multiply_experts(const std::vector<Rows>& blocks, const float* const* sources, const Matrix* matrices,
                      int64_t parts, const float* bias, float* y, int64_t k, int64_t n, int threads) {
    const int64_t float_bytes = matrices->method->float_bytes;
    if (float_bytes == 4) return multiply_plain<float>(blocks, sources, matrices, bias, y, k, n, threads);
    if (float_bytes == 2) return multiply_plain<uint16_t>(blocks, sources, matrices, bias, y, k, n, threads);
    multiply_narrow(blocks, sources, matrices, parts, bias, y, k, n, threads);
}

// In place: the first half of a row becomes activation(first half) * second half.
void gate_rows(const Experts& layer, float* rows, int64_t count, int threads) {
    const int64_t n = layer.inner;
    if (count * n <= kParallelFloats / 4) threads = 1;
    parallel_for(threads, count, even_chunk(threads, count), [&](int64_t row) {
        float *gate = rows + row * 2 * n, *up = gate + n;
        switch (layer.gate) {
            case Activation::silu: return gate_row<silu>(gate, up, gate, n);
            case Activation::gelu_tanh: return gate_row<gelu_tanh>(gate, up, gate, n);
            case Activation::gelu: return gate_row<gelu>(gate, up, gate, n);
            default:
                for (int64_t i = 0; i < n; ++i) {
                    gate[i] = std::min(gate[i], layer.limit);
                    up[i] = std::max(-layer.limit, std::min(up[i], layer.limit)) + 1.0f;
                }
                return gate_row<steep_silu>(gate, up, gate, n);
        }
    });
}

void run_experts(const Experts& layer, const float* x, const float* logits, const int32_t* padding_mask, float* y,
                 int64_t tokens, bool add, int threads) {
    thread_local Groups own_groups;
    thread_local Scratch scratch;
    Groups& groups = own_groups;  // other threads read it too
    const int64_t hidden = layer.hidden, inner = layer.inner, top_k = layer.top_k;
    const int64_t num_rows = groups.fill(layer, x, logits, padding_mask, tokens, threads);
    if (num_rows * hidden * inner <= kParallelWork) threads = 1;
    float* middle = scratch.floats(num_rows * (2 * inner + hidden));
    float* products = middle + num_rows * 2 * inner;
    if (num_rows) {
        multiply_experts(groups.blocks, groups.sources.data(), layer.gate_up, layer.gate_up_parts, layer.gate_up_bias,
                         middle, hidden, 2 * inner, threads);
        gate_rows(layer, middle, num_rows, threads);
        for (int64_t row = 0; row < num_rows; ++row) groups.sources[row] = middle + row * 2 * inner;
        multiply_experts(groups.blocks, groups.sources.data(), layer.down, 1, layer.down_bias, products, inner, hidden,
                         threads);
    }
    parallel_for(tokens * hidden <= kParallelFloats ? 1 : threads, tokens, even_chunk(threads, tokens),
                 [&](int64_t token) {
        float* to = y + token * hidden;
        if (!add) std::fill(to, to + hidden, 0.0f);
        const int64_t* positions = &groups.positions[token * top_k];
        const float* weights = &groups.weights[token * top_k];
        constexpr int64_t piece = 256;
        for (int64_t begin = 0; begin < hidden; begin += piece) {
            const int64_t count = std::min(piece, hidden - begin);
            float sums[piece] = {};
            for (int64_t j = 0; j < top_k; ++j) {
                if (positions[j] < 0) continue;
                const float* from = products + positions[j] * hidden + begin;
                for (int64_t i = 0; i < count; ++i) sums[i] += weights[j] * from[i];
            }
            for (int64_t i = 0; i < count; ++i) to[begin + i] += sums[i];
        }
    });
}

}  // namespace
}  // namespace inflight

// y [tokens][hidden] becomes the weighted sum of each token's experts, or is increased by it. Tokens whose `padding_mask` is
// negative have no experts.
extern "C" void inflight_experts(const inflight::Experts* layer, const float* x, const float* logits,
                                 const int32_t* padding_mask, float* y, int64_t tokens, int add, int threads) {
    using namespace inflight;
    const int64_t chunk = std::max(kChunkPairs, kChunkRows * layer->experts) / layer->top_k + 1;
    for (int64_t first = 0; first < tokens; first += chunk)
        run_experts(*layer, x + first * layer->hidden, logits + first * layer->experts, padding_mask ? padding_mask + first : nullptr,
                    y + first * layer->hidden, std::min(chunk, tokens - first), add != 0, threads);
}
