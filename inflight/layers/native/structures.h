// What Python fills and names: structures and numbers. Each list declares one of them here and describes it to
// layers/native/library.py (structures.cpp), which fills fields and looks up numbers by name.
#pragma once

#include <cstdint>

namespace inflight {

#define INFLIGHT_NAME(name) name,
#define INFLIGHT_FIELD(type, name) type name;

#define INFLIGHT_ACTIVATIONS(name) \
    name(none) name(gelu) name(gelu_tanh) name(relu) name(silu) name(tanh) name(clamped_silu) /* of experts only */
enum class Activation : int64_t { INFLIGHT_ACTIVATIONS(INFLIGHT_NAME) };

#define INFLIGHT_SCORES(name) name(softmax) name(sigmoid) name(chosen)
enum class Scores : int64_t { INFLIGHT_SCORES(INFLIGHT_NAME) };

struct Method;

// Rows of weights in panels that one method multiplies (narrow.h).
#define INFLIGHT_MATRIX(field)   \
    field(const void*, panels)   \
    field(const Method*, method) \
    field(int64_t, rows)         \
    field(int64_t, group) /* features with one scale, in int4 */
struct Matrix { INFLIGHT_MATRIX(INFLIGHT_FIELD) };

#define INFLIGHT_LINEAR(field)                                       \
    field(const Matrix*, parts) /* below each other; one in floats */ \
    field(int64_t, num_parts)                                        \
    field(const float*, bias) /* [out_features] or null */           \
    field(int64_t, in_features)                                      \
    field(int64_t, out_features)
struct Linear { INFLIGHT_LINEAR(INFLIGHT_FIELD) };

#define INFLIGHT_EXPERTS(field)                                                                    \
    field(const Matrix*, gate_up)     /* [held][gate_up_parts]: rows of gate, then those of up */ \
    field(const Matrix*, down)        /* [held] */                                                 \
    field(const float*, gate_up_bias) /* [held][2 * inner] or null */                              \
    field(const float*, down_bias)    /* [held][hidden] or null */                                 \
    field(const float*, correction)   /* [experts] or null */                                      \
    field(const float*, factors)      /* [experts] or null */                                      \
    field(int64_t*, tokens)           /* [experts]: increased by the tokens that choose each */    \
    field(int64_t, gate_up_parts)                                                                  \
    field(int64_t, hidden)                                                                         \
    field(int64_t, inner)                                                                          \
    field(int64_t, experts)                                                                        \
    field(int64_t, first_held)                                                                     \
    field(int64_t, held)                                                                           \
    field(int64_t, top_k)                                                                          \
    field(Scores, scores)                                                                          \
    field(int64_t, normalise)                                                                      \
    field(int64_t, groups)                                                                         \
    field(int64_t, top_groups)                                                                     \
    field(Activation, gate)                                                                        \
    field(float, scale)                                                                            \
    field(float, limit)
struct Experts { INFLIGHT_EXPERTS(INFLIGHT_FIELD) };

// The attention of a layer, and its part of the cache.
#define INFLIGHT_HEADS(field)                                                                  \
    field(const float*, query_norm) /* [dim]; norms and tables may be null: nothing is done */ \
    field(const float*, key_norm)                                                              \
    field(const float*, value_norm)                                                            \
    field(const float*, cos_sin) /* [positions][rotary_dim] */                                 \
    field(const float*, sinks)   /* [heads] */                                                 \
    field(int64_t, rotary_dim)                                                                 \
    field(int64_t, heads)                                                                      \
    field(int64_t, kv_heads)                                                                   \
    field(int64_t, dim)                                                                        \
    field(int64_t, window) /* 0: none */                                                       \
    field(int64_t, table)                                                                      \
    field(float, eps)                                                                          \
    field(float, scale)                                                                        \
    field(float, softcap)    /* 0: scores have no limit */                                     \
    field(void*, memory)     /* the cache: float, or int8_t with scales */                     \
    field(uint32_t*, scales) /* [kv_heads][block_size] in each block; null in float */         \
    field(int64_t, block_size)                                                                 \
    field(int64_t, block_stride)
struct Heads { INFLIGHT_HEADS(INFLIGHT_FIELD) };

#define INFLIGHT_STEP(field)                                    \
    field(const int64_t*, positions)    /* [tokens] */          \
    field(const int32_t*, query_starts) /* [entries + 1] */     \
    field(const int32_t*, context_lens) /* [entries] */         \
    field(const int32_t*, rows)         /* [entries] */         \
    field(const int32_t*, tables)       /* [num_tables][...] */ \
    field(const int64_t*, slot_mapping) /* [num_tables][tokens] */ \
    field(int64_t, entries)                                     \
    field(int64_t, tokens)                                      \
    field(int64_t, table_size)                                  \
    field(int64_t, table_stride)
struct Step { INFLIGHT_STEP(INFLIGHT_FIELD) };

#define INFLIGHT_DECODER_LAYER(field)                  \
    field(const float*, attention_norm) /* or null */ \
    field(const Linear*, qkv)                          \
    field(const Heads*, heads)                         \
    field(const Linear*, output)                       \
    field(const float*, mlp_norm) /* or null */       \
    field(const Linear*, gate_up)                      \
    field(const Linear*, down)                         \
    field(Activation, gate)                            \
    field(float, eps)
struct DecoderLayer { INFLIGHT_DECODER_LAYER(INFLIGHT_FIELD) };

}  // namespace inflight
