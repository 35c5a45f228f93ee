// From logits to tokens, one row at a time: what a row gets is a function of its logits, its parameters and its tokens.
//
// execution/sampling/sampler.py is the same in torch, and the reference for what every parameter means.

#include "adjust.h"
#include "race.h"
#include "scores.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kParallelFloats = 32 << 10;  // below this, waking the other threads costs more than it saves

// What a thread keeps from row to row.
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

// A token is allowed while the mass of those that rank before it is below the goal. The winner of the race mostly is; if
// it is not, nothing behind it is either, and the next to ask is the winner of those before it.
int64_t draw(Ranking& ranking, const Row& row, int64_t length, std::vector<Candidate>& candidates) {
    Cut cut = kEveryToken;
    if (row.log_min_p > -kInfinity) cut.logit = least_kept(ranking.top(), row.temperature, row.log_min_p);
    if (row.top_k > 0) {
        ranking.best(row.top_k, cut.logit, candidates);
        if (static_cast<int32_t>(candidates.size()) == row.top_k)
            cut = {candidates.back().logit, candidates.back().id};
    }
    Race race(ranking, row.temperature, RaceKey(row.seed_low, row.seed_high, static_cast<uint32_t>(length)));
    int64_t winner = race.winner(cut);
    if (row.top_p >= 1) return winner;
    const float scale = 1.0f / row.temperature;
    const double goal = row.top_p * ranking.mass(cut, scale);
    for (;;) {
        cut = {ranking.logit(winner), static_cast<int32_t>(winner) - 1};
        const double before = ranking.mass(cut, scale);
        if (before < goal || before == 0) return winner;  // 0: it is the first, which always stays
        winner = race.winner(cut);
    }
}

void score(Ranking& ranking, int64_t target, int64_t count, const Scores& to, std::vector<Candidate>& best) {
    if (ranking.bad()) return to.tell_nothing(target, count, best);
    const double log_total = ranking.top() + std::log(ranking.mass(kEveryToken, 1.0f));
    const float logit = ranking.logit(target);
    ranking.best(count, -kInfinity, best);
    to.tell({logit, static_cast<int32_t>(target)}, ranking.count_above(logit), log_total, best);
}

// Overwrites the logits where the row changes them.
Chosen sample_row(float* logits, int64_t size, const Row& row, const History& history, const Scores& scores) {
    Workspace& mine = workspace();
    mine.raw.read(logits, size);
    Chosen chosen{0, mine.raw.bad() ? kIsNotFinite : uint8_t{0}};
    if (!chosen.bad) {
        Ranking* ranking = &mine.raw;
        if (row.adjusts()) {
            float* adjusted = logits;
            if (row.num_logprobs >= 0) {  // they are of the raw logits
                mine.logits.resize(size);
                adjusted = mine.logits.data();
            }
            adjust(logits, {adjusted, 0, size}, row, history, mine.seen);
            ranking = &mine.adjusted;
            ranking->read(adjusted, size);
            if (ranking->bad()) chosen.bad = kHasNoToken;
        }
        if (!chosen.bad)
            chosen.token = row.argmax ? ranking->first() : draw(*ranking, row, history.length, mine.candidates);
    }
    if (row.num_logprobs >= 0) score(mine.raw, chosen.token, row.num_logprobs, scores, mine.candidates);
    return chosen;
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

// Entry i chooses token number lengths[i] of row rows[i] from logits [num_entries][vocab_size], which are overwritten.
// The scores, `width` places each, are of the entries whose rows ask for logprobs, in order.
void inflight_sample(float* logits, int64_t num_entries, int64_t vocab_size, const Row* table, const int64_t* rows,
                     const int64_t* lengths, const int32_t* tokens, int64_t tokens_stride, int64_t* token_ids,
                     uint8_t* bad, int64_t* score_ids, float* logprobs, int64_t* ranks, int64_t width, int threads) {
    std::vector<int64_t> places(num_entries);
    for (int64_t i = 0, next = 0; i < num_entries; ++i) {
        places[i] = next * width;
        next += table[rows[i]].num_logprobs >= 0;
    }
    if (num_entries * vocab_size <= kParallelFloats) threads = 1;
    parallel_for(threads, num_entries, 1, [&](int64_t i) {
        const History history{tokens + rows[i] * tokens_stride, lengths[i]};
        const Scores scores{score_ids + places[i], logprobs + places[i], ranks + places[i]};
        const Chosen chosen = sample_row(logits + i * vocab_size, vocab_size, table[rows[i]], history, scores);
        token_ids[i] = chosen.token;
        bad[i] = chosen.bad;
    });
}

// The targets, and the width - 1 most likely tokens, under logits [num_positions][vocab_size].
void inflight_score(const float* logits, int64_t num_positions, int64_t vocab_size, const int64_t* targets,
                    int64_t* score_ids, float* logprobs, int64_t* ranks, int64_t width, int threads) {
    if (num_positions * vocab_size <= kParallelFloats) threads = 1;
    parallel_for(threads, num_positions, 1, [&](int64_t i) {
        Workspace& mine = workspace();
        mine.raw.read(logits + i * vocab_size, vocab_size);
        const Scores scores{score_ids + i * width, logprobs + i * width, ranks + i * width};
        score(mine.raw, targets[i], width - 1, scores, mine.candidates);
    });
}
}
