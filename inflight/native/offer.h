// What one of several ranks offers of a row in one round: see offers.cpp.
#pragma once

#include "adjust.h"
#include "race.h"
#include "scores.h"

namespace inflight {

constexpr Candidate kNobody{-kInfinity, -1};

enum class Step { kFirst, kRace, kTarget, kCount, kDone };

// What a rank says of a row in one round. Of the first round, lists of candidates follow.
struct Offer {
    double mass, raw_mass;  // beside the greatest logit of this rank
    float top, raw_top;
    float score;  // that won the race
    Candidate winner;
    int32_t poisoned;  // NaN or inf are among the logits
    int64_t count;     // of tokens that are above the target
    int64_t num_best, num_raw_best;
};

// The tokens that a rank has.
struct Tokens {
    int64_t first, size;
    int64_t most;  // that any rank has
};

// What a row, or a position that is only scored, has come to.
struct Turn {
    // Of the caller:
    const Row* row;  // null: there is a target, and nothing is drawn
    History history;
    float* logits;
    int64_t num_logprobs;  // -1: none
    Scores scores;
    // The rest is found out.
    Step step;
    Chosen chosen;
    Ranking raw, adjusted;
    bool is_adjusted;
    std::vector<float>* changed;  // space
    int64_t best_at, raw_best_at;  // where the first round's lists are, in bytes
    float top;
    std::vector<float> tops;  // of each rank
    Cut cut;
    bool is_open;  // the cut is min_p's: what wins behind it has yet to be weighed
    double goal;
    Candidate winner;
    double log_total;
    std::vector<Candidate> best, found;

    Ranking& ranking() { return is_adjusted ? adjusted : raw; }
    bool draws_few() const { return row && !row->argmax && row->top_k > 0; }
    bool weighs_all() const {
        return row && !row->argmax && row->top_k <= 0 && !(row->log_min_p > -kInfinity);
    }
    float scale() const { return 1.0f / row->temperature; }
    RaceKey key() const {
        return RaceKey(row->seed_low, row->seed_high, static_cast<uint32_t>(history.length));
    }
};

inline void put_best(Ranking& ranking, int64_t count, std::vector<Candidate>& found, char* to, int64_t& num) {
    ranking.best(count, -kInfinity, found);
    std::copy(found.begin(), found.end(), reinterpret_cast<Candidate*>(to));
    num = static_cast<int64_t>(found.size());
}

inline void run_race(Turn& turn, Offer& mine) {
    Ranking& ranking = turn.ranking();
    const Candidate first{ranking.top(), static_cast<int32_t>(ranking.first())};
    if (!turn.cut.keeps(first.logit, first.id)) return;
    Race race(ranking, turn.row->temperature, turn.key());
    const int64_t winner = race.winner(turn.cut);
    mine.winner = {ranking.logit(winner), static_cast<int32_t>(winner)};
    mine.score = race.score();
    if (turn.row->top_p < 1) mine.mass = ranking.mass(turn.cut, turn.scale());
}

inline void read_row(Turn& turn, const Tokens& tokens) {
    thread_local std::vector<int32_t> seen;
    turn.raw.read(turn.logits, tokens.size, tokens.first);
    turn.is_adjusted = turn.row && turn.row->adjusts();
    if (!turn.is_adjusted) return;
    float* to = turn.logits;
    if (turn.num_logprobs >= 0) {  // they are of the raw logits
        turn.changed->resize(tokens.size);
        to = turn.changed->data();
    }
    adjust(turn.logits, {to, tokens.first, tokens.size}, *turn.row, turn.history, seen);
    turn.adjusted.read(to, tokens.size, tokens.first);
}

inline void offer_target(const Turn& turn, Offer& mine) {
    const int64_t target = turn.chosen.token;
    if (turn.raw.has(target)) mine.winner = {turn.raw.logit(target), static_cast<int32_t>(target)};
}

inline void offer_first(Turn& turn, const Tokens& tokens, char* slot, Offer& mine) {
    read_row(turn, tokens);
    mine.raw_top = turn.raw.top();
    mine.poisoned = turn.raw.poisoned();
    if (mine.poisoned) return;
    Ranking& ranking = turn.ranking();
    mine.top = ranking.poisoned() ? kInfinity : ranking.top();
    if (turn.num_logprobs >= 0 && !turn.raw.bad()) {
        mine.raw_mass = turn.raw.mass(kEveryToken, 1.0f);
        put_best(turn.raw, turn.num_logprobs, turn.found, slot + turn.raw_best_at, mine.num_raw_best);
    }
    if (!turn.row) return offer_target(turn, mine);
    if (ranking.bad()) return;
    if (turn.row->argmax)
        mine.winner = {mine.top, static_cast<int32_t>(ranking.first())};
    else if (turn.draws_few())
        put_best(ranking, turn.row->top_k, turn.found, slot + turn.best_at, mine.num_best);
    else if (turn.weighs_all())
        run_race(turn, mine);
}

inline void make_offer(Turn& turn, const Tokens& tokens, char* slot, Offer& mine) {
    mine = Offer{};
    mine.top = mine.raw_top = mine.score = -kInfinity;
    mine.winner = kNobody;
    switch (turn.step) {
        case Step::kFirst: return offer_first(turn, tokens, slot, mine);
        case Step::kRace:
            if (!turn.ranking().bad()) run_race(turn, mine);
            return;
        case Step::kTarget: return offer_target(turn, mine);
        case Step::kCount: mine.count = turn.raw.count_above(turn.winner.logit); return;
        case Step::kDone: return;
    }
}

}  // namespace inflight
