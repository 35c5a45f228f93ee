// The race that draws a token: argmax(logit / temperature - log(exponential)), of equals the lower id.
//
// The exponentials are a function of (seed, position, token id); execution/sampling/randomness.py defines them and
// says why. Their bits are computed for whole blocks, two logarithms only for tokens that can still win: with
// the best score so far, a token of weight w = exp(logit / temperature - score) wins only if its exponential is at
// most w, and the uniform number it is made of is smaller still.
#pragma once

#include "ranking.h"

namespace inflight {

// The two words that (seed, position) become.
struct RaceKey {
    uint32_t first, second;

    RaceKey(uint32_t seed_low, uint32_t seed_high, uint32_t position)
        : first(word(0x3C6EF35Fu, seed_low, seed_high, position)),
          second(word(0xA54FF53Au, seed_low, seed_high, position)) {}

    // The random bits of tokens, one number or a vector of them.
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

// The logarithm of the exponential that `half`, the upper 31 of a token's bits, stands for.
inline float log_exponential(int32_t half) {
    const float uniform = std::min(static_cast<float>(half) * 0x1p-31f + 0x1p-32f, 1 - 0x1p-24f);
    return static_cast<float>(std::log(-std::log1p(-static_cast<double>(uniform))));
}

class Race {
  public:
    Race(const Ranking& ranking, float temperature, const RaceKey& key)
        : ranking_(ranking), temperature_(temperature), scale_(1.0f / temperature), key_(key) {}

    // The winner of the tokens that `cut` keeps; the first of the ranking must be one of them.
    int64_t winner(const Cut& cut) {
        const int32_t first = static_cast<int32_t>(ranking_.first());
        best_ = -kInfinity;
        winner_ = first;
        run(ranking_.top(), first, static_cast<int32_t>(key_.bits(static_cast<uint32_t>(first)) >> 1));
        const float* tops = ranking_.tops();
        for (int64_t from = 0; from < ranking_.num_blocks(); from += kWidth) {
            float weights[kWidth];  // of each block's best token, beside the best of all
            store(weights, weigh(load<Vec>(tops + from)));
            for (int64_t i = 0; i < kWidth; ++i)
                if (weights[i] * reach_ >= kLeastChance && tops[from + i] >= cut.logit)
                    enter(from + i, weights[i] * reach_, cut);
        }
        return winner_;
    }

    // That of the last winner.
    float score() const { return best_; }

    // Of a token with this logit.
    static float score(float logit, int32_t token, float temperature, const RaceKey& key) {
        return score_of(logit, static_cast<int32_t>(key.bits(static_cast<uint32_t>(token)) >> 1), temperature);
    }

  private:
    static constexpr float kLeastChance = 0x1p-33f;  // the smallest uniform number is twice that

    static float score_of(float logit, int32_t half, float temperature) {
        return logit / temperature - log_exponential(half);
    }

    Vec weigh(Vec logits) const { return exp((logits - ranking_.top()) * scale_); }

    // Lets those of the block's tokens run that can win; none has a greater chance than `chance`.
    void enter(int64_t b, float chance, const Cut& cut) {
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
        float limits[kBlock];  // of each token by its own weight
        for (int64_t i = 0; i < kBlock; i += kWidth)
            store(limits + i, weigh(load<Vec>(x + i)) * (reach_ * 0x1p31f));
        for (int32_t i = 0; i < kBlock; ++i)
            if (static_cast<float>(halves[i]) <= limits[i] && cut.keeps(x[i], first + i))
                run(x[i], first + i, halves[i]);
    }

    void run(float logit, int32_t token, int32_t half) {
        const float score = score_of(logit, half, temperature_);
        if (!(score > best_ || (score == best_ && token < winner_))) return;
        best_ = score;
        winner_ = token;
        // Scores are rounded, and so are weights: a token that is behind by less than that must run too.
        const double top = static_cast<double>(ranking_.top()) / temperature_;
        const double rounding = 1e-6 * (std::abs(top) + std::abs(static_cast<double>(best_)) + 64);
        reach_ = static_cast<float>(std::exp(top - best_ + rounding));
    }

    const Ranking& ranking_;
    const float temperature_, scale_;
    const RaceKey key_;
    float best_ = -kInfinity;  // the greatest score so far
    int64_t winner_ = 0;
    float reach_ = 0;  // the weight that the first of the ranking has beside that score
};

// The least logit that min_p keeps: its score, rounded as scores are, reaches the floor.
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
