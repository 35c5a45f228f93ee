// Functions for Python that other functions of the library call, too.
#pragma once

#include "structures.h"

extern "C" {

// y [m][out_features] = activation(x @ W.T + bias), or y += that. With `norm` [in_features], of the RMS norm of x.
void inflight_linear(const inflight::Linear* linear, const float* x, const float* norm, float eps, float* y, int64_t m,
                     inflight::Activation activation, int add, int threads);
void inflight_rms_norm(float* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                       const float* weight, float* out, int64_t n, float eps, int threads);
void inflight_add(float* residual, const float* x, int64_t n, int threads);
// out [tokens][n] = gate(first half of gate_up) * second half, for all gates but clamped_silu.
void inflight_gate(const float* gate_up, float* out, int64_t tokens, int64_t n, inflight::Activation gate, int threads);
}
