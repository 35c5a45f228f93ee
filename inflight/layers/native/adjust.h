// A row's sampling parameters, and how they change its logits before a token is chosen.
#pragma once

#include "ranking.h"

namespace inflight {

// A row's sampling parameters, as execution/sampling/native.py packs them.
struct Row {
    float temperature, log_min_p, top_p;  // log_min_p: -inf without min_p
    float repetition_penalty, frequency_penalty, presence_penalty;
    uint32_t seed_low, seed_high;
    int32_t top_k;  // 0: all
    int32_t num_prompt_tokens;
    int32_t min_length;    // length that the row must reach before a stop id is allowed
    int32_t argmax;        // nonzero: take the most likely token
    int32_t num_logprobs;  // most likely tokens to report beside the chosen one; -1: no log-probabilities
    int32_t penalises, num_stops, num_biases, num_bad_words;
    const uint32_t* mask;  // one bit per token, lowest bit first; null: all are allowed
    const int32_t* stops;
    const int32_t* bias_ids;
    const float* biases;
    const int32_t* bad_words;  // for each word the number of its ids, then the ids

    bool adjusts() const { return penalises || mask || num_stops || num_biases || num_bad_words; }
};
static_assert(sizeof(Row) == 112, "native.py knows this layout");

// The tokens of a row before the new one.
struct History {
    const int32_t* tokens;
    int64_t length;
};

// Why sampling a row can fail, as in execution/sampling/interface.py.
constexpr uint8_t kIsNotFinite = 1, kHasNoToken = 2;

struct Chosen {
    int64_t token;
    uint8_t bad;  // 0, or why it failed
};

// Copy the logits that the row's mask allows; the others become -inf.
inline void copy_allowed(const float* from, float* to, int64_t size, const uint32_t* mask) {
    static_assert(32 % kWidth == 0, "a vector's bits are in one word");
    const WordVec lane_bits = bits<WordVec>((lane_numbers() - lane_numbers() + 1) << lane_numbers());
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) {
        const WordVec allowed = (mask[i / 32] >> (i % 32)) & lane_bits;
        store(to + i, allowed != 0 ? load<Vec>(from + i) : splat(-kInfinity));
    }
    for (; i < size; ++i) to[i] = mask[i / 32] >> (i % 32) & 1 ? from[i] : -kInfinity;
}

// Return whether the last outputs are the first `count` ids of a bad word. Prompt tokens are not matched.
inline bool follows(const int32_t* ids, int64_t count, const Row& row, const History& history) {
    const int64_t first = history.length - count;
    return first >= row.num_prompt_tokens && std::equal(ids, ids + count, history.tokens + first);
}

inline void forbid(float* logits, const Row& row, const History& history) {
    const int32_t* word = row.bad_words;
    for (int32_t i = 0; i < row.num_bad_words; ++i) {
        const int32_t last = word[0];
        if (last == 1 || follows(word + 1, last - 1, row, history)) logits[word[last]] = -kInfinity;
        word += 1 + last;
    }
    if (history.length < row.min_length)
        for (int32_t i = 0; i < row.num_stops; ++i) logits[row.stops[i]] = -kInfinity;
}

// Apply the repetition penalty to tokens of the whole row, frequency and presence penalties to its outputs. Each token
// is penalised once, however often it was seen.
inline void penalise(float* logits, int64_t size, const Row& row, const History& history, std::vector<int32_t>& seen) {
    constexpr int32_t kSeen = 1 << 30;  // above any count
    seen.resize(size);
    for (int64_t i = 0; i < history.length; ++i) {
        int32_t& state = seen[history.tokens[i]];
        state = (state | kSeen) + (i >= row.num_prompt_tokens);
    }
    for (int64_t i = 0; i < history.length; ++i) {
        int32_t& state = seen[history.tokens[i]];
        if (!state) continue;
        const int32_t count = state - kSeen;
        state = 0;
        float& logit = logits[history.tokens[i]];
        logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        logit -= row.frequency_penalty * static_cast<float>(count);
        if (count) logit -= row.presence_penalty;
    }
}

// Apply all rules in the order of execution/sampling/sampler.py. `to` may be `from`; `seen` is all 0 before and after.
inline void adjust(const float* from, float* to, int64_t size, const Row& row, const History& history,
                   std::vector<int32_t>& seen) {
    if (row.mask)
        copy_allowed(from, to, size, row.mask);
    else if (to != from)
        std::copy(from, from + size, to);
    forbid(to, row, history);
    for (int32_t i = 0; i < row.num_biases; ++i) to[row.bias_ids[i]] += row.biases[i];
    if (row.penalises) penalise(to, size, row, history, seen);
}

}  // namespace inflight
