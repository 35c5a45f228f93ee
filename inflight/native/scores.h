// Log-probabilities of tokens under the logits as the model made them.
#pragma once

#include "ranking.h"

namespace inflight {

// Where a position's go: the target, then the most likely tokens in order.
struct Scores {
    int64_t* ids;
    float* logprobs;
    int64_t* ranks;

    // The target, how many tokens are more likely, and the best in any order. `log_total` is the logarithm of the sum of
    // all exp(logit), NaN where there is none.
    void tell(const Candidate& target, int64_t above, double log_total, std::vector<Candidate>& best) const {
        std::sort(best.begin(), best.end(), ranks_before);
        ids[0] = target.id;
        logprobs[0] = static_cast<float>(target.logit - log_total);
        ranks[0] = 1 + above;
        for (int64_t i = 0; i < static_cast<int64_t>(best.size()); ++i) {
            ids[1 + i] = best[i].id;
            logprobs[1 + i] = static_cast<float>(best[i].logit - log_total);
            ranks[1 + i] = i > 0 && best[i].logit == best[i - 1].logit ? ranks[i] : 1 + i;
        }
    }

    // Where logits are no numbers there is no ranking: some tokens.
    void tell_nothing(int64_t target, int64_t count, std::vector<Candidate>& best) const {
        best.clear();
        for (int64_t i = 0; i < count; ++i) best.push_back({0.0f, static_cast<int32_t>(i)});
        tell({0.0f, static_cast<int32_t>(target)}, 0, std::numeric_limits<double>::quiet_NaN(), best);
    }
};

}  // namespace inflight
