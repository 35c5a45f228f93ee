// Attention over the KV cache, as it is called (attention.cpp).
#pragma once

#include <cstdint>

#include "elementwise.h"
#include "structures.h"

namespace inflight {

struct Strided {
    float* data;
    int64_t token_stride, head_stride;

    float* operator()(int64_t token, int64_t head) const {
        return data + token * token_stride + head * head_stride;
    }
};

struct Attention : Heads, Step {
    Strided query, key, value;  // key and value are null if this step's are in the cache
    float* out;                 // [tokens][heads][dim]

    // Heads are prepared in place.
    void normalise(float* head, const float* norm) const {
        if (norm) rms_norm_row(head, norm, head, dim, eps);
    }
    void rotate(float* head, int64_t token) const {
        if (!cos_sin) return;
        const float* cos = cos_sin + positions[token] * rotary_dim;
        rotate_head(head, cos, cos + rotary_dim / 2, rotary_dim / 2);
    }
};

void attend(Attention attention, int threads);

}  // namespace inflight
