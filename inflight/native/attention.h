// Attention over the KV cache, as it is called (attention.cpp).
#pragma once

#include <cstdint>

#include "elementwise.h"

namespace inflight {

struct Strided {
    float* data;
    int64_t token_stride, head_stride;

    float* operator()(int64_t token, int64_t head) const {
        return data + token * token_stride + head * head_stride;
    }
};

// What happens to heads, in place, before they are used. Null pointers: nothing.
struct Preparation {
    const float *query_norm, *key_norm, *value_norm;  // [dim]
    const float* cos_sin;                             // [positions][rotary_dim]
    const int64_t* positions;                         // [tokens]
    int64_t rotary_dim;
    float eps;

    void normalise(float* head, const float* norm, int64_t dim) const {
        if (norm) rms_norm_row(head, norm, head, dim, eps);
    }
    void rotate(float* head, int64_t token) const {
        if (!cos_sin) return;
        const float* cos = cos_sin + positions[token] * rotary_dim;
        rotate_head(head, cos, cos + rotary_dim / 2, rotary_dim / 2);
    }
};

struct Attention {
    Strided query, key, value;  // key and value are null if this step's are in the cache
    Preparation prepare;
    void* memory;                 // the cache: float, or int8_t with scales
    uint32_t* scales;             // [kv heads][block_size] in each block; null in float32
    float* out;                   // [tokens][heads][dim]
    const int32_t* query_starts;  // [entries + 1]
    const int32_t* context_lens;  // [entries]
    const int32_t* rows;          // [entries]
    const int32_t* tables;        // [rows][table_stride]
    const int64_t* slot_mapping;  // [tokens]
    const float* sinks;           // [heads]; null: there are none
    int64_t entries, tokens, heads, kv_heads, dim, block_size, block_stride, table_stride, window;
    float scale, softcap;  // softcap 0: scores have no limit
};

void attend(const Attention& attention, int threads);

}  // namespace inflight
