// Linear layers over weights in panels, by any method.

#include <cstring>

#include "gemm.h"
#include "narrow.h"
#include "operations.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kParallelFloats = 64 << 10;  // below which one thread gathers alone

// Products in float32.
template <class Stored>
void multiply_floats(const Linear& linear, const float* x, const float* norm, float eps, float* y, int64_t m,
                     Activation activation, bool add, int threads) {
    thread_local Scratch scratch;
    const int64_t k = linear.in_features, n = linear.out_features, normed = norm ? m * k : 0;
    float* buffer = norm || add ? scratch.floats(normed + (add ? m * n : 0)) : nullptr;
    if (norm) {
        inflight_rms_norm(const_cast<float*>(x), m, 1, k, k, norm, buffer, k, eps, threads);
        x = buffer;
    }
    float* to = add ? buffer + normed : y;
    multiply(Product<Stored>{x, static_cast<const Stored*>(linear.parts->panels), linear.bias, to, m, k, n, activation},
             threads);
    if (add) inflight_add(y, to, m * n, threads);
}

// Products of converted rows, part by part.
void multiply_parts(const Linear& linear, const float* x, const float* norm, float eps, float* y, int64_t m,
                    Activation activation, bool add, int threads) {
    thread_local std::vector<const float*> rows;
    rows.resize(m);
    for (int64_t row = 0; row < m; ++row) rows[row] = x + row * linear.in_features;
    int64_t column = 0;
    for (const Matrix* part = linear.parts; part < linear.parts + linear.num_parts; ++part) {
        const RowGroup all{part->panels, linear.bias ? linear.bias + column : nullptr, 0, m, column};
        multiply_groups({part->method, rows.data(), y, {linear.in_features, part->group}, part->rows,
                         linear.out_features, activation, norm, eps, add},
                        &all, 1, threads);
        column += part->rows;
    }
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

void inflight_linear(const Linear* linear, const float* x, const float* norm, float eps, float* y, int64_t m,
                     Activation activation, int add, int threads) {
    const int64_t float_bytes = linear->parts->method->float_bytes;
    const auto multiply = float_bytes == 4   ? multiply_floats<float>
                          : float_bytes == 2 ? multiply_floats<uint16_t>
                                             : multiply_parts;
    multiply(*linear, x, norm, eps, y, m, activation, add != 0, threads);
}

// out [m][out_features / 2] = gate(first half) * second half of the same product.
void inflight_gated_linear(const Linear* linear, const float* x, const float* norm, float eps, float* out, int64_t m,
                           Activation gate, int threads) {
    thread_local Scratch scratch;
    float* gate_up = scratch.floats(m * linear->out_features);
    inflight_linear(linear, x, norm, eps, gate_up, m, Activation::none, false, threads);
    inflight_gate(gate_up, out, m, linear->out_features / 2, gate, threads);
}

// Weights of some rows as floats.
void inflight_gather(const Linear* linear, const int64_t* ids, float* out, int64_t count, int threads) {
    const int64_t k = linear->in_features;
    parallel_for(count * k > kParallelFloats ? threads : 1, count, even_chunk(threads, count), [&](int64_t i) {
        const Matrix* part = linear->parts;
        int64_t row = ids[i];
        for (; row >= part->rows; ++part) row -= part->rows;
        const Depth depth{k, part->group};
        const char* panel = static_cast<const char*>(part->panels) + row / kPanel * part->method->panel_bytes(depth);
        part->method->expand(panel, row % kPanel, depth, out + i * k);
    });
}

// Return the best method for weights of this type by instructions that the list `allowed` names, or null.
const void* inflight_method(const char* weights, const char* allowed) {
    for (const NamedMethods& methods : {bf16_methods(), integer_methods(), gguf_methods(), float_methods()})
        for (const NamedMethod& named : methods)
            if (!std::strcmp(named.weights, weights) && std::strstr(allowed, named.needs)) return named.method;
    return nullptr;
}

// Bytes of a panel of weights.
int64_t inflight_panel_bytes(const Method* method, int64_t k, int64_t group) { return method->panel_bytes({k, group}); }

// Blocks of a GGUF file [rows][k] become panels.
void inflight_pack_blocks(const Method* method, const uint8_t* blocks, char* panels, int64_t rows, int64_t k,
                          int threads) {
    method->pack(blocks, panels, rows, k, threads);
}
}
