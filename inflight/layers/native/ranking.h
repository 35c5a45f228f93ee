// A row of logits ranked by (logit, greatest first; id, lowest first), without a sort.
//
// Logits are grouped in blocks whose greatest one is known, so a search reads only blocks that can contain what it looks
// for.
// Sums run over the blocks in order: a row's numbers do not depend on the threads or on the other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vectors.h"

namespace inflight {

constexpr int64_t kBlock = 128;  // tokens of a block, a multiple of kWidth
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A prefix of the ranking, up to the token `id` with this logit. top_k, top_p and min_p each keep such a prefix.
struct Cut {
    float logit;
    int32_t id;

    bool keeps(float x, int32_t token) const { return x > logit || (x == logit && token <= id); }
};

// Keeps every token that is not forbidden (-inf).
constexpr Cut kEveryToken{std::numeric_limits<float>::lowest(), std::numeric_limits<int32_t>::max()};

struct Candidate {
    float logit;
    int32_t id;
};

inline bool ranks_before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Map floats to integers in the same order; 0.0 and -0.0 are equal.
inline int32_t order_key(float x) {
    const int32_t word = bits<int32_t>(x + 0.0f);
    return word ^ (word >> 31 & 0x7FFFFFFF);
}

inline float of_order_key(int64_t key) {
    const int32_t word = static_cast<int32_t>(key);
    return bits<float>(word ^ (word >> 31 & 0x7FFFFFFF));
}

inline bool any(IntVec mask) {
    int32_t lanes[kWidth], joined = 0;
    store(lanes, mask);
    for (int32_t lane : lanes) joined |= lane;
    return joined != 0;
}

class Ranking {
  public:
    // Read all logits once. They must stay valid and unchanged for as long as the ranking is used.
    void read(const float* logits, int64_t size) {
        logits_ = logits;
        size_ = size;
        num_blocks_ = (size + kBlock - 1) / kBlock;
        std::fill(tail_, tail_ + kBlock, -kInfinity);
        const int64_t whole = size / kBlock * kBlock;
        std::copy(logits + whole, logits + size, tail_);
        tops_.assign((num_blocks_ + kWidth - 1) / kWidth * kWidth, -kInfinity);
        IntVec nan{};
        for (int64_t b = 0; b < num_blocks_; ++b) {
            const float* x = block(b);
            Vec top = load<Vec>(x);
            nan |= top != top;
            for (int64_t i = kWidth; i < kBlock; i += kWidth) {
                const Vec v = load<Vec>(x + i);
                nan |= v != v;
                top = larger(v, top);
            }
            tops_[b] = inflight::max(top);
        }
        top_block_ = std::max_element(tops_.begin(), tops_.begin() + num_blocks_) - tops_.begin();
        poisoned_ = any(nan) || tops_[top_block_] == kInfinity;
    }

    int64_t num_blocks() const { return num_blocks_; }
    float logit(int64_t token) const { return logits_[token]; }
    float top() const { return tops_[top_block_]; }

    // Whether the logits contain NaN or inf.
    bool poisoned() const { return poisoned_; }
    // Whether that is so, or all logits are -inf. No other function may be called then.
    bool bad() const { return poisoned_ || top() == -kInfinity; }

    // The greatest logit of each block, padded with -inf to whole vectors.
    const float* tops() const { return tops_.data(); }

    // The id of a block's first token.
    int32_t id_of(int64_t b) const { return static_cast<int32_t>(b * kBlock); }

    // Return kBlock logits, padded with -inf after the last token.
    const float* block(int64_t b) const {
        return (b + 1) * kBlock <= size_ ? logits_ + b * kBlock : tail_;
    }

    // Return the most likely token; ties go to the lower id.
    int64_t first() const {
        const float* x = block(top_block_);
        return id_of(top_block_) + (std::find(x, x + kBlock, top()) - x);
    }

    // Count the tokens with at least this logit, which must not be -inf.
    int64_t count_from(float logit) const {
        int64_t count = 0;
        for (int64_t b = 0; b < num_blocks_; ++b) {
            if (tops_[b] < logit) continue;
            const float* x = block(b);
            IntVec counts{};
            for (int64_t i = 0; i < kBlock; i += kWidth) counts -= load<Vec>(x + i) >= logit;
            int32_t lanes[kWidth];
            store(lanes, counts);
            for (int32_t lane : lanes) count += lane;
        }
        return count;
    }

    // Count the tokens with a greater logit.
    int64_t count_above(float logit) const { return count_from(std::nextafter(logit, kInfinity)); }

    // Return the sum of exp((logit - top) * scale) over the tokens that `cut` keeps.
    double mass(const Cut& cut, float scale) const {
        double total = 0.0;
        const bool all = cut.logit == kEveryToken.logit && cut.id == kEveryToken.id;
        for (int64_t b = 0; b < num_blocks_; ++b) {
            if (tops_[b] < cut.logit) continue;
            total += all ? block_mass(block(b), scale) : block_mass(block(b), scale, cut, id_of(b));
        }
        return total;
    }

    // Write the `count` best tokens with at least this logit, or all if there are fewer. If there are `count`, the worst
    // is last.
    void best(int64_t count, float least, std::vector<Candidate>& tokens) {
        tokens.clear();
        if (count <= 0) return;
        if (count < num_blocks_) {  // `count` blocks have a token that reaches the count-th greatest top
            order_.assign(tops_.begin(), tops_.begin() + num_blocks_);
            std::nth_element(order_.begin(), order_.begin() + count - 1, order_.end(), std::greater<float>());
            least = std::max(least, order_[count - 1]);
        } else if (2 * count < size_) {
            least = reached(count, least);
        }
        for (int64_t b = 0; b < num_blocks_; ++b) {
            if (tops_[b] < least) continue;
            const float* x = block(b);
            const int64_t exist = std::min(kBlock, size_ - b * kBlock);
            for (int64_t i = 0; i < exist; ++i)
                if (x[i] >= least) tokens.push_back({x[i], id_of(b) + static_cast<int32_t>(i)});
        }
        if (static_cast<int64_t>(tokens.size()) < count) return;
        std::nth_element(tokens.begin(), tokens.begin() + count - 1, tokens.end(), ranks_before);
        tokens.resize(count);
    }

  private:
    // Return a logit that at least `count` tokens reach, if possible at most twice as many; `least` if there are fewer.
    float reached(int64_t count, float least) const {
        const float finite = std::max(least, kEveryToken.logit);
        if (count_from(finite) <= 2 * count) return least;
        int64_t low = order_key(finite), high = static_cast<int64_t>(order_key(top())) + 1;
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            const int64_t reaching = count_from(of_order_key(middle));
            (reaching >= count ? low : high) = middle;
            if (reaching >= count && reaching <= 2 * count) break;
        }
        return of_order_key(low);
    }

    Vec mass_of(Vec logits, float scale) const { return exp((logits - top()) * scale); }

    double block_mass(const float* x, float scale) const {
        Vec total{};
        for (int64_t i = 0; i < kBlock; i += kWidth) total += mass_of(load<Vec>(x + i), scale);
        return sum(total);
    }

    double block_mass(const float* x, float scale, const Cut& cut, int32_t first) const {
        Vec total{};
        for (int64_t i = 0; i < kBlock; i += kWidth) {
            const Vec v = load<Vec>(x + i);
            const IntVec ids = lane_numbers() + (first + static_cast<int32_t>(i));
            const IntVec kept = (v > cut.logit) | ((v == cut.logit) & (ids <= cut.id));
            total += kept ? mass_of(v, scale) : Vec{};
        }
        return sum(total);
    }

    const float* logits_ = nullptr;
    int64_t size_ = 0, num_blocks_ = 0, top_block_ = 0;
    bool poisoned_ = true;
    float tail_[kBlock];  // a padded copy of the last block, if it is not full
    std::vector<float> tops_, order_;
};

}  // namespace inflight
