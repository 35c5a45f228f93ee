// Layers of a decoder in one call: attention over the KV cache, then a gated MLP.
//
// Every operation is the one that has a function of its own, with the same bits. Between two of them there is no Python,
// and intermediate results stay in the same memory for all layers.

#include <algorithm>

#include "attention.h"
#include "operations.h"

namespace inflight {
namespace {

// A linear layer [n][k], numbered as in narrow.h; those in float32 have the number 0, or -1 with bfloat16 weights.
struct Matrix {
    const void* weight;
    const float* bias;  // or null
    int64_t k, n, method, group;
};

// The layouts of these are known to native/library.py.
struct Layer {
    const float* attention_norm;  // [hidden], or null
    const float* mlp_norm;        // the same
    Matrix qkv, output, gate_up, down;
    Preparation prepare;  // without positions
    const float* sinks;
    int64_t heads, kv_heads, dim, window, table;
    float scale, softcap;
    int64_t gate;
    float eps;
    // Of the cache.
    void* memory;
    uint32_t* scales;
    int64_t block_size, block_stride;
};

struct Step {
    const int64_t* positions;     // [tokens]
    const int32_t* query_starts;  // [entries + 1]
    const int32_t* context_lens;  // [entries]
    const int32_t* rows;          // [entries]
    const int32_t* tables;        // [num_tables][...]
    const int64_t* slot_mapping;  // [num_tables][tokens]
    int64_t entries, tokens, table_size, table_stride;
};

// Memory for the intermediate results of one layer.
struct Buffers {
    Scratch normed, projected, attended, inner;
};

// y = norm(x) @ W.T + bias, or y += that.
void multiply(const Matrix& matrix, const float* x, const float* norm, float eps, float* y, int64_t tokens, bool add,
              Buffers& buffers, int threads) {
    const int64_t k = matrix.k, n = matrix.n;
    if (matrix.method > 0)
        return inflight_linear(x, norm, matrix.weight, matrix.bias, y, tokens, k, n, matrix.method, matrix.group, eps, 0,
                               add, threads);
    // Only one of the two is needed: what is added is not normalised.
    float* other = buffers.normed.floats(tokens * (add ? n : k));
    if (norm) {
        inflight_rms_norm(const_cast<float*>(x), tokens, 1, k, k, norm, other, k, eps, threads);
        x = other;
    }
    float* to = add ? other : y;
    if (matrix.method == 0)
        inflight_multiply_f32(x, static_cast<const float*>(matrix.weight), matrix.bias, to, tokens, k, n, 0, threads);
    else
        inflight_multiply_bf16(x, static_cast<const uint16_t*>(matrix.weight), matrix.bias, to, tokens, k, n, 0, threads);
    if (add) inflight_add(y, to, tokens * n, threads);
}

void attend_layer(const Layer& layer, const Step& step, float* qkv, float* out, int threads) {
    const int64_t dim = layer.dim, width = layer.qkv.n;
    float* key = qkv + layer.heads * dim;
    Preparation prepare = layer.prepare;
    prepare.positions = step.positions;
    attend({{qkv, width, dim}, {key, width, dim}, {key + layer.kv_heads * dim, width, dim}, prepare, layer.memory,
            layer.scales, out, step.query_starts, step.context_lens, step.rows,
            step.tables + layer.table * step.table_size, step.slot_mapping + layer.table * step.tokens, layer.sinks,
            step.entries, step.tokens, layer.heads, layer.kv_heads, dim, layer.block_size, layer.block_stride,
            step.table_stride, layer.window, layer.scale, layer.softcap},
           threads);
}

void run_layer(const Layer& layer, const Step& step, float* x, Buffers& buffers, int threads) {
    const int64_t tokens = step.tokens, inner = layer.down.k;
    const Matrix& gate_up = layer.gate_up;
    float* projected = buffers.projected.floats(tokens * std::max(layer.qkv.n, gate_up.n));
    float* attended = buffers.attended.floats(tokens * layer.output.k);
    multiply(layer.qkv, x, layer.attention_norm, layer.eps, projected, tokens, false, buffers, threads);
    attend_layer(layer, step, projected, attended, threads);
    multiply(layer.output, attended, nullptr, 0.0f, x, tokens, true, buffers, threads);
    float* gated = buffers.inner.floats(tokens * inner);
    multiply(gate_up, x, layer.mlp_norm, layer.eps, projected, tokens, false, buffers, threads);
    inflight_gate(projected, gated, tokens, inner, layer.gate, threads);
    multiply(layer.down, gated, nullptr, 0.0f, x, tokens, true, buffers, threads);
}

}  // namespace
}  // namespace inflight

// x [tokens][hidden] becomes the residual after these layers.
extern "C" void inflight_decoder_layers(const inflight::Layer* layers, int64_t count, const inflight::Step* step,
                                        float* x, int threads) {
    thread_local inflight::Buffers buffers;
    for (int64_t i = 0; i < count; ++i) inflight::run_layer(layers[i], *step, x, buffers, threads);
}
