// Functions for Python that other functions of the library call, too.
#pragma once

#include <cstdint>

extern "C" {

void inflight_linear(const float* x, const float* norm, const void* weight, const float* bias, float* y, int64_t m,
                     int64_t k, int64_t n, int64_t method, int64_t group, float eps, int activation, int add,
                     int threads);
void inflight_multiply_f32(const float* x, const float* weight, const float* bias, float* y, int64_t m, int64_t k,
                           int64_t n, int activation, int threads);
void inflight_multiply_bf16(const float* x, const uint16_t* weight, const float* bias, float* y, int64_t m, int64_t k,
                            int64_t n, int activation, int threads);
void inflight_rms_norm(float* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                       const float* weight, float* out, int64_t n, float eps, int threads);
void inflight_add(float* residual, const float* x, int64_t n, int threads);
void inflight_gate(const float* gate_up, float* out, int64_t tokens, int64_t n, int64_t gate, int threads);
}
