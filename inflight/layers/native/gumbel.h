// Gumbel-max sampling: the token with the greatest score, logit / temperature - log(exponential); ties go to the lower id.
//
// The exponentials are a function of (seed, position, token id), defined and explained in
// execution/sampling/gumbel.py. Their bits are computed for whole blocks, but the two logarithms only for tokens that
// can still win: given the best score so far, a token of weight w = exp(logit / temperature - score) wins only if its
// exponential is at most w, and the uniform number behind that is smaller still.
#pragma once

#include "ranking.h"

namespace inflight {

// The two words derived from (seed, position).
struct NoiseKey {
    uint32_t first, second;

    NoiseKey(uint32_t seed_low, uint32_t seed_high, uint32_t position)
        : first(word(0x3C6EF35Fu, seed_low, seed_high, position)),
          second(word(0xA54FF53Au, seed_low, seed_high, position)) {}

    // Return the random bits of a token, or of a vector of tokens.
    template <class Word>
    Word bits(Word token) const {
        Word x = token * 0x9E3779B1u + first;
        x ^= x >> 16;
        x = x * kA ^ second;
        x ^= x >> 15;
        x *= kB;
        return x ^ x >> 16;
    }

  private:
    static constexpr uint32_t kA = 0xEF46EB25u, kB = 0xDA7ACF6Du;

    static uint32_t mix(uint32_t x) {
        x = (x ^ x >> 16) * kA;
        x = (x ^ x >> 15) * kB;
        return x ^ x >> 16;
    }

    static uint32_t word(uint32_t start, uint32_t seed_low, uint32_t seed_high, uint32_t position) {
        return mix(mix(mix(seed_low + start) + seed_high) + position);
    }
};

// Return the logarithm of the exponential encoded by `half`, the upper 31 bits of a token's random bits.
inline float log_exponential(int32_t half) {
    const float uniform = std::min(static_cast<float>(half) * 0x1p-31f + 0x1p-32f, 1 - 0x1p-24f);
    return static_cast<float>(std::log(-std::log1p(-static_cast<double>(uniform))));
}

class GumbelMax {
  public:
    GumbelMax(const Ranking& ranking, float temperature, const NoiseKey& key)
        : ranking_(ranking), temperature_(temperature), scale_(1.0f / temperature), key_(key) {}

    // Return the winner among the tokens that `cut` keeps, which must include the first of the ranking.
    int64_t winner(const Cut& cut) {
        const int32_t first = static_cast<int32_t>(ranking_.first());
        best_ = -kInfinity;
        winner_ = first;
        consider(ranking_.top(), first, static_cast<int32_t>(key_.bits(static_cast<uint32_t>(first)) >> 1));
        const float* tops = ranking_.tops();
        for (int64_t from = 0; from < ranking_.num_blocks(); from += kWidth) {
            float weights[kWidth];  // of each block's best token, relative to the best overall
            store(weights, weigh(load<Vec>(tops + from)));
            for (int64_t i = 0; i < kWidth; ++i)
                if (weights[i] * reach_ >= kLeastChance && tops[from + i] >= cut.logit)
                    visit_block(from + i, weights[i] * reach_, cut);
        }
        return winner_;
    }

  private:
    static constexpr float kLeastChance = 0x1p-33f;  // the smallest uniform number is twice that

    static float score_of(float logit, int32_t half, float temperature) {
        return logit / temperature - log_exponential(half);
    }

    Vec weigh(Vec logits) const { return exp((logits - ranking_.top()) * scale_); }

    // Score the tokens of a block that can still win; `chance` is an upper bound for all of them.
    void visit_block(int64_t b, float chance, const Cut& cut) {
        const float* x = ranking_.block(b);
        const int32_t limit =
            chance < 1 ? static_cast<int32_t>(chance * 0x1p31f) : std::numeric_limits<int32_t>::max();
        const int32_t first = ranking_.id_of(b);
        int32_t halves[kBlock];
        IntVec may_win{};
        for (int64_t i = 0; i < kBlock; i += kWidth) {
            const WordVec tokens = bits<WordVec>(lane_numbers() + (first + static_cast<int32_t>(i)));
            const IntVec half = bits<IntVec>(key_.bits(tokens) >> 1);
            store(halves + i, half);
            may_win |= half <= limit;
        }
        if (!any(may_win)) return;
        float limits[kBlock];  // each token's limit from its own weight
        for (int64_t i = 0; i < kBlock; i += kWidth)
            store(limits + i, weigh(load<Vec>(x + i)) * (reach_ * 0x1p31f));
        for (int32_t i = 0; i < kBlock; ++i)
            if (static_cast<float>(halves[i]) <= limits[i] && cut.keeps(x[i], first + i))
                consider(x[i], first + i, halves[i]);
    }

    void consider(float logit, int32_t token, int32_t half) {
        const float score = score_of(logit, half, temperature_);
        if (!(score > best_ || (score == best_ && token < winner_))) return;
        best_ = score;
        winner_ = token;
        // Scores and weights are rounded: a token behind by less than the rounding must be scored too.
        const double top = static_cast<double>(ranking_.top()) / temperature_;
        const double rounding = 1e-6 * (std::abs(top) + std::abs(static_cast<double>(best_)) + 64);
        reach_ = static_cast<float>(std::exp(top - best_ + rounding));
    }

    const Ranking& ranking_;
    const float temperature_, scale_;
    const NoiseKey key_;
    float best_ = -kInfinity;  // the greatest score so far
    int64_t winner_ = 0;
    float reach_ = 0;  // the weight of the first of the ranking relative to that score
};

// Return the smallest logit that min_p keeps: divided by the temperature, with the same rounding, it reaches the floor.
inline float least_kept(float top, float temperature, float log_min_p) {
    const float floor = top / temperature + log_min_p;
    int64_t low = order_key(-kInfinity), high = order_key(top);  // `high` is kept, `low` is not
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (of_order_key(middle) / temperature >= floor ? high : low) = middle;
    }
    return of_order_key(high);
}

}  // namespace inflight
