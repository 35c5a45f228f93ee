// The candidates that one of several ranks publishes for a row in one round: see rank_sampling.cpp.
#pragma once

#include "adjust.h"
#include "gumbel.h"
#include "logprobs.h"

namespace inflight {

constexpr Candidate kNoCandidate{-kInfinity, -1};

enum class Step { kFirst, kSample, kTarget, kCount, kDone };

// One rank's contribution to a row in one round. In the first round, lists of candidates follow it.
struct RankCandidates {
    double mass, raw_mass;  // relative to this rank's greatest logit
    float top, raw_top;
    float score;  // of the winner
    Candidate winner;
    int32_t poisoned;  // the logits contain NaN or inf
    int64_t count;     // tokens with a greater logit than the target
    int64_t num_best, num_raw_best;
};

// The part of the vocabulary that a rank holds.
struct Tokens {
    int64_t first, size;
    int64_t most;  // tokens held by any rank
};

// The progress of a row, or of a prompt position that only needs log-probabilities.
struct RowState {
    // Set by the caller:
    const Row* row;  // null: nothing is sampled, the target is known
    History history;
    float* logits;
    int64_t num_logprobs;  // -1: none
    Logprobs out;
    // Set by the rounds:
    Step step;
    Chosen chosen;
    Ranking raw, adjusted;
    bool is_adjusted;
    std::vector<float>* changed;  // scratch memory
    int64_t best_at, raw_best_at;  // byte offsets of the first round's lists
    float top;
    std::vector<float> tops;  // by rank
    Cut cut;
    bool is_open;  // the cut is min_p's, and top_p has yet to be applied
    double goal;
    Candidate winner;
    double log_total;
    std::vector<Candidate> best, candidates;

    Ranking& ranking() { return is_adjusted ? adjusted : raw; }
    bool uses_top_k() const { return row && !row->argmax && row->top_k > 0; }
    bool keeps_every_token() const {
        return row && !row->argmax && row->top_k <= 0 && !(row->log_min_p > -kInfinity);
    }
    float scale() const { return 1.0f / row->temperature; }
    NoiseKey key() const {
        return NoiseKey(row->seed_low, row->seed_high, static_cast<uint32_t>(history.length));
    }
};

inline void put_best(Ranking& ranking, int64_t count, std::vector<Candidate>& best, char* to, int64_t& num) {
    ranking.best(count, -kInfinity, best);
    std::copy(best.begin(), best.end(), reinterpret_cast<Candidate*>(to));
    num = static_cast<int64_t>(best.size());
}

inline void sample_own(RowState& state, RankCandidates& mine) {
    Ranking& ranking = state.ranking();
    const Candidate first{ranking.top(), static_cast<int32_t>(ranking.first())};
    if (!state.cut.keeps(first.logit, first.id)) return;
    GumbelMax gumbel(ranking, state.row->temperature, state.key());
    const int64_t winner = gumbel.winner(state.cut);
    mine.winner = {ranking.logit(winner), static_cast<int32_t>(winner)};
    mine.score = gumbel.score();
    if (state.row->top_p < 1) mine.mass = ranking.mass(state.cut, state.scale());
}

inline void read_row(RowState& state, const Tokens& tokens) {
    thread_local std::vector<int32_t> seen;
    state.raw.read(state.logits, tokens.size, tokens.first);
    state.is_adjusted = state.row && state.row->adjusts();
    if (!state.is_adjusted) return;
    float* to = state.logits;
    if (state.num_logprobs >= 0) {  // log-probabilities need the raw logits
        state.changed->resize(tokens.size);
        to = state.changed->data();
    }
    adjust(state.logits, {to, tokens.first, tokens.size}, *state.row, state.history, seen);
    state.adjusted.read(to, tokens.size, tokens.first);
}

inline void target_candidate(const RowState& state, RankCandidates& mine) {
    const int64_t target = state.chosen.token;
    if (state.raw.has(target)) mine.winner = {state.raw.logit(target), static_cast<int32_t>(target)};
}

inline void first_candidates(RowState& state, const Tokens& tokens, char* slot, RankCandidates& mine) {
    read_row(state, tokens);
    mine.raw_top = state.raw.top();
    mine.poisoned = state.raw.poisoned();
    if (mine.poisoned) return;
    Ranking& ranking = state.ranking();
    mine.top = ranking.poisoned() ? kInfinity : ranking.top();
    if (state.num_logprobs >= 0 && !state.raw.bad()) {
        mine.raw_mass = state.raw.mass(kEveryToken, 1.0f);
        put_best(state.raw, state.num_logprobs, state.candidates, slot + state.raw_best_at, mine.num_raw_best);
    }
    if (!state.row) return target_candidate(state, mine);
    if (ranking.bad()) return;
    if (state.row->argmax)
        mine.winner = {mine.top, static_cast<int32_t>(ranking.first())};
    else if (state.uses_top_k())
        put_best(ranking, state.row->top_k, state.candidates, slot + state.best_at, mine.num_best);
    else if (state.keeps_every_token())
        sample_own(state, mine);
}

inline void make_candidates(RowState& state, const Tokens& tokens, char* slot, RankCandidates& mine) {
    mine = RankCandidates{};
    mine.top = mine.raw_top = mine.score = -kInfinity;
    mine.winner = kNoCandidate;
    switch (state.step) {
        case Step::kFirst: return first_candidates(state, tokens, slot, mine);
        case Step::kSample:
            if (!state.ranking().bad()) sample_own(state, mine);
            return;
        case Step::kTarget: return target_candidate(state, mine);
        case Step::kCount: mine.count = state.raw.count_above(state.winner.logit); return;
        case Step::kDone: return;
    }
}

}  // namespace inflight
