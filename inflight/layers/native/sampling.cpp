// From logits to tokens, one row at a time: a result depends only on the row's logits, parameters and tokens.
//
// execution/sampling/sampler.py is the same in torch, and the reference for the meaning of every parameter.

#include "adjust.h"
#include "gumbel.h"
#include "logprobs.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kParallelFloats = 32 << 10;  // below this, waking the other threads costs more than it saves

// Memory that a thread reuses from row to row.
struct Workspace {
    Ranking raw, adjusted;
    std::vector<float> logits;
    std::vector<int32_t> seen;  // all 0 between rows
    std::vector<Candidate> candidates;
};

Workspace& workspace() {
    static thread_local Workspace mine;
    return mine;
}

// Sample with min_p, top_k and top_p. top_p allows a token while the mass that ranks before it is below the goal. The
// Gumbel-max winner usually is allowed; if not, neither is anything that ranks behind it, and the winner among the tokens
// before it is tried next.
int64_t sample(Ranking& ranking, const Row& row, int64_t length, std::vector<Candidate>& candidates) {
    Cut cut = kEveryToken;
    if (row.log_min_p > -kInfinity) cut.logit = least_kept(ranking.top(), row.temperature, row.log_min_p);
    if (row.top_k > 0) {
        ranking.best(row.top_k, cut.logit, candidates);
        if (static_cast<int32_t>(candidates.size()) == row.top_k)
            cut = {candidates.back().logit, candidates.back().id};
    }
    GumbelMax gumbel(ranking, row.temperature, NoiseKey(row.seed_low, row.seed_high, static_cast<uint32_t>(length)));
    int64_t winner = gumbel.winner(cut);
    if (row.top_p >= 1) return winner;
    const float scale = 1.0f / row.temperature;
    const double goal = row.top_p * ranking.mass(cut, scale);
    for (;;) {
        cut = {ranking.logit(winner), static_cast<int32_t>(winner) - 1};
        const double before = ranking.mass(cut, scale);
        if (before < goal || before == 0) return winner;  // 0: it ranks first and is always allowed
        winner = gumbel.winner(cut);
    }
}

void write_logprobs(Ranking& ranking, int64_t target, int64_t count, const Logprobs& to, std::vector<Candidate>& best) {
    if (ranking.bad()) return to.write_unranked(target, count, best);
    const double log_total = ranking.top() + std::log(ranking.mass(kEveryToken, 1.0f));
    const float logit = ranking.logit(target);
    ranking.best(count, -kInfinity, best);
    to.write({logit, static_cast<int32_t>(target)}, ranking.count_above(logit), log_total, best);
}

// Overwrites the logits if the row's parameters change them.
Chosen sample_row(float* logits, int64_t size, const Row& row, const History& history, const Logprobs& out) {
    Workspace& mine = workspace();
    mine.raw.read(logits, size);
    Chosen chosen{0, mine.raw.bad() ? kIsNotFinite : uint8_t{0}};
    if (!chosen.bad) {
        Ranking* ranking = &mine.raw;
        if (row.adjusts()) {
            float* adjusted = logits;
            if (row.num_logprobs >= 0) {  // log-probabilities need the raw logits
                mine.logits.resize(size);
                adjusted = mine.logits.data();
            }
            adjust(logits, adjusted, size, row, history, mine.seen);
            ranking = &mine.adjusted;
            ranking->read(adjusted, size);
            if (ranking->bad()) chosen.bad = kHasNoToken;
        }
        if (!chosen.bad)
            chosen.token = row.argmax ? ranking->first() : sample(*ranking, row, history.length, mine.candidates);
    }
    if (row.num_logprobs >= 0) write_logprobs(mine.raw, chosen.token, row.num_logprobs, out, mine.candidates);
    return chosen;
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

// Entry i chooses token number lengths[i] of row rows[i] from logits [num_entries][vocab_size], which are overwritten.
// Log-probabilities, `width` slots each, are written for the entries whose rows request them, in order.
void inflight_sample(float* logits, int64_t num_entries, int64_t vocab_size, const Row* table, const int64_t* rows,
                     const int64_t* lengths, const int32_t* tokens, int64_t tokens_stride, int64_t* token_ids,
                     uint8_t* bad, int64_t* logprob_ids, float* logprobs, int64_t* ranks, int64_t width, int threads) {
    std::vector<int64_t> offsets(num_entries);
    for (int64_t i = 0, next = 0; i < num_entries; ++i) {
        offsets[i] = next * width;
        next += table[rows[i]].num_logprobs >= 0;
    }
    if (num_entries * vocab_size <= kParallelFloats) threads = 1;
    parallel_for(threads, num_entries, 1, [&](int64_t i) {
        const History history{tokens + rows[i] * tokens_stride, lengths[i]};
        const Logprobs out{logprob_ids + offsets[i], logprobs + offsets[i], ranks + offsets[i]};
        const Chosen chosen = sample_row(logits + i * vocab_size, vocab_size, table[rows[i]], history, out);
        token_ids[i] = chosen.token;
        bad[i] = chosen.bad;
    });
}

// Log-probabilities of the targets and of the width - 1 most likely tokens under logits [num_positions][vocab_size].
void inflight_token_logprobs(const float* logits, int64_t num_positions, int64_t vocab_size, const int64_t* targets,
                    int64_t* logprob_ids, float* logprobs, int64_t* ranks, int64_t width, int threads) {
    if (num_positions * vocab_size <= kParallelFloats) threads = 1;
    parallel_for(threads, num_positions, 1, [&](int64_t i) {
        Workspace& mine = workspace();
        mine.raw.read(logits + i * vocab_size, vocab_size);
        const Logprobs out{logprob_ids + i * width, logprobs + i * width, ranks + i * width};
        write_logprobs(mine.raw, targets[i], width - 1, out, mine.candidates);
    });
}
}
