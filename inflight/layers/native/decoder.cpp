// Layers of a decoder in one call: attention over the KV cache, then a gated MLP.
//
// Every operation is the one that has a separate function, with the same bits. Between two of them there is no Python,
// and intermediate results stay in the same memory for all layers.

#include <algorithm>

#include "attention.h"
#include "operations.h"

namespace inflight {
namespace {

// Memory for the intermediate results of one layer.
struct Buffers {
    Scratch projected, attended, inner;
};

void run_layer(const DecoderLayer& layer, const Step& step, float* x, Buffers& buffers, int threads) {
    const Linear &qkv = *layer.qkv, &gate_up = *layer.gate_up;
    const int64_t tokens = step.tokens, inner = layer.down->in_features;
    float* projected = buffers.projected.floats(tokens * std::max(qkv.out_features, gate_up.out_features));
    float* attended = buffers.attended.floats(tokens * layer.output->in_features);
    inflight_linear(&qkv, x, layer.attention_norm, layer.eps, projected, tokens, Activation::none, false, threads);
    const int64_t width = qkv.out_features, dim = layer.heads->dim;
    float* key = projected + layer.heads->heads * dim;
    float* value = key + layer.heads->kv_heads * dim;
    attend({*layer.heads, step, {projected, width, dim}, {key, width, dim}, {value, width, dim}, attended}, threads);
    inflight_linear(layer.output, attended, nullptr, 0.0f, x, tokens, Activation::none, true, threads);
    float* gated = buffers.inner.floats(tokens * inner);
    inflight_linear(&gate_up, x, layer.mlp_norm, layer.eps, projected, tokens, Activation::none, false, threads);
    inflight_gate(projected, gated, tokens, inner, layer.gate, threads);
    inflight_linear(layer.down, gated, nullptr, 0.0f, x, tokens, Activation::none, true, threads);
}

}  // namespace
}  // namespace inflight

// x [tokens][hidden] becomes the residual after these layers.
extern "C" void inflight_decoder_layers(const inflight::DecoderLayer* layers, int64_t count,
                                        const inflight::Step* step, float* x, int threads) {
    thread_local inflight::Buffers buffers;
    for (int64_t i = 0; i < count; ++i) inflight::run_layer(layers[i], *step, x, buffers, threads);
}
