// Log-probabilities of tokens under the raw logits of the model.
#pragma once

#include "ranking.h"

namespace inflight {

// The output arrays of one position: the target, then the most likely tokens in order.
struct Logprobs {
    int64_t* ids;
    float* logprobs;
    int64_t* ranks;

    // Write the target, the number of more likely tokens, and the best ones, given in any order. `log_total` is the
    // logarithm of the sum of all exp(logit), or NaN if there is none.
    void write(const Candidate& target, int64_t above, double log_total, std::vector<Candidate>& best) const {
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

    // Without finite logits there is no ranking: write arbitrary tokens with NaN.
    void write_unranked(int64_t target, int64_t count, std::vector<Candidate>& best) const {
        best.clear();
        for (int64_t i = 0; i < count; ++i) best.push_back({0.0f, static_cast<int32_t>(i)});
        write({0.0f, static_cast<int32_t>(target)}, 0, std::numeric_limits<double>::quiet_NaN(), best);
    }
};

}  // namespace inflight
