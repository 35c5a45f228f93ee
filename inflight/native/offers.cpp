// Sampling by several ranks, each of which has the logits of some tokens and never sees those of the others.
//
// They go round by round. In each, a rank offers what it knows of its own tokens, row by row; then all read all offers,
// and come to the same conclusions. Most rows are done after the first round:
//
//   kFirst   the most likely token; or the winner of the race and the mass of all tokens; or, of top_k, the best tokens
//   kRace    with min_p, or with top_p: who wins among the tokens that are left, and what mass they have
//   kTarget  for log-probabilities: the logit of the chosen token, from the one that has it
//   kCount   and how many tokens have a greater one
//
// What a row gets is a function of its own logits and of how the vocabulary is shared out, whoever else is in the step.

#include "group.h"
#include "offer.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kTogether = 64;              // rows that go through their rounds together
constexpr int64_t kParallelFloats = 32 << 10;  // as in sampling.cpp

// ---- what all make of it ----

// The offers of all ranks for one row.
struct Offers {
    const Seat& seat;
    uint32_t round;
    int64_t index;

    int size() const { return seat.size; }
    const Offer& operator[](int rank) const {
        return reinterpret_cast<const Offer*>(seat.part(rank, round))[index];
    }
    // All lists at this place, one behind the other.
    void collect(int64_t at, int64_t Offer::*num, std::vector<Candidate>& to) const {
        to.clear();
        for (int rank = 0; rank < size(); ++rank) {
            const auto* from = reinterpret_cast<const Candidate*>(seat.part(rank, round) + at);
            to.insert(to.end(), from, from + (*this)[rank].*num);
        }
    }
};

void keep_best(std::vector<Candidate>& found, int64_t count) {
    std::sort(found.begin(), found.end(), ranks_before);
    if (static_cast<int64_t>(found.size()) > count) found.resize(count);
}

// The sum over the ranks, in their order, of masses that are beside their own greatest logits.
double total_mass(const Turn& turn, const Offers& offers) {
    double total = 0.0;
    for (int rank = 0; rank < offers.size(); ++rank)
        if (offers[rank].mass > 0)
            total += offers[rank].mass * std::exp((double{turn.tops[rank]} - turn.top) * turn.scale());
    return total;
}

// top_k is settled among the best k of all ranks' best, and so is whatever min_p and top_p leave of them.
int64_t draw_of_few(Turn& turn, const Offers& offers) {
    const Row& row = *turn.row;
    offers.collect(turn.best_at, &Offer::num_best, turn.found);
    keep_best(turn.found, row.top_k);
    if (row.log_min_p > -kInfinity) {
        const float least = least_kept(turn.top, row.temperature, row.log_min_p);
        while (turn.found.back().logit < least) turn.found.pop_back();
    }
    const auto mass = [&](const Candidate& one) {
        return std::exp((double{one.logit} - turn.top) * turn.scale());
    };
    double goal = std::numeric_limits<double>::infinity(), before = 0.0;
    if (row.top_p < 1) {
        goal = 0.0;
        for (const Candidate& one : turn.found) goal += mass(one);
        goal *= row.top_p;
    }
    const RaceKey key = turn.key();
    float best = -kInfinity;
    int32_t winner = turn.found.front().id;
    for (const Candidate& one : turn.found) {
        if (!(before < goal || before == 0)) break;
        const float score = Race::score(one.logit, one.id, row.temperature, key);
        if (score > best || (score == best && one.id < winner)) best = score, winner = one.id;
        if (row.top_p < 1) before += mass(one);
    }
    return winner;
}

// Ranks have their tokens in order: of equals the first rank's has the lowest id.
Candidate race_winner(const Offers& offers) {
    const Offer* best = &offers[0];
    for (int rank = 1; rank < offers.size(); ++rank)
        if (best->winner.id < 0 || offers[rank].score > best->score) {
            if (offers[rank].winner.id >= 0) best = &offers[rank];
        }
    return best->winner;
}

void chosen(Turn& turn, int64_t token, uint8_t bad = 0) {
    turn.chosen = {token, bad};
    turn.step = turn.num_logprobs >= 0 ? Step::kTarget : Step::kDone;
}

// It may have to be weighed against all that ranks before it.
void won(Turn& turn, const Candidate& winner) {
    turn.winner = winner;
    turn.cut = {winner.logit, winner.id - 1};
    turn.is_open = false;
    turn.step = Step::kRace;
}

void conclude_race(Turn& turn, const Offers& offers) {
    const Candidate next = race_winner(offers);
    if (turn.is_open) {
        if (turn.row->top_p >= 1) return chosen(turn, next.id);
        turn.goal = turn.row->top_p * total_mass(turn, offers);
        return won(turn, next);
    }
    const double before = total_mass(turn, offers);
    if (before < turn.goal || before == 0) return chosen(turn, turn.winner.id);  // 0: it is the first of all
    won(turn, next);
}

void conclude_first(Turn& turn, const Offers& offers) {
    float raw_top = -kInfinity;
    bool poisoned = false;
    turn.top = -kInfinity;
    turn.tops.clear();
    for (int rank = 0; rank < offers.size(); ++rank) {
        const Offer& one = offers[rank];
        poisoned |= one.poisoned != 0;
        raw_top = std::max(raw_top, one.raw_top);
        turn.top = std::max(turn.top, one.top);
        turn.tops.push_back(one.top);
    }
    const bool raw_is_bad = poisoned || raw_top == -kInfinity;
    if (turn.num_logprobs >= 0 && !raw_is_bad) {
        double total = 0.0;
        for (int rank = 0; rank < offers.size(); ++rank)
            if (offers[rank].raw_mass > 0)
                total += offers[rank].raw_mass * std::exp(double{offers[rank].raw_top} - raw_top);
        turn.log_total = raw_top + std::log(total);
        offers.collect(turn.raw_best_at, &Offer::num_raw_best, turn.best);
        keep_best(turn.best, turn.num_logprobs);
    }
    if (raw_is_bad) {
        if (turn.row) turn.chosen = {0, kIsNotFinite};
        if (turn.num_logprobs >= 0) turn.scores.tell_nothing(turn.chosen.token, turn.num_logprobs, turn.best);
        turn.step = Step::kDone;
    } else if (!turn.row) {
        turn.step = Step::kTarget;
    } else if (turn.top == -kInfinity || turn.top == kInfinity) {
        chosen(turn, 0, kHasNoToken);
    } else if (turn.row->argmax) {
        int best = 0;
        while (offers[best].top != turn.top) ++best;
        chosen(turn, offers[best].winner.id);
    } else if (turn.draws_few()) {
        chosen(turn, draw_of_few(turn, offers));
    } else if (turn.weighs_all()) {
        conclude_race(turn, offers);
    } else {
        turn.cut.logit = least_kept(turn.top, turn.row->temperature, turn.row->log_min_p);
        turn.step = Step::kRace;
    }
}

void conclude_target(Turn& turn, const Offers& offers) {
    for (int rank = 0; rank < offers.size(); ++rank)
        if (offers[rank].winner.id >= 0) turn.winner = offers[rank].winner;
    turn.step = Step::kCount;
}

void conclude_count(Turn& turn, const Offers& offers) {
    int64_t above = 0;
    for (int rank = 0; rank < offers.size(); ++rank) above += offers[rank].count;
    turn.scores.tell(turn.winner, above, turn.log_total, turn.best);
    turn.step = Step::kDone;
}

void conclude(Turn& turn, const Offers& offers) {
    switch (turn.step) {
        case Step::kFirst:
            conclude_first(turn, offers);
            if (turn.step == Step::kTarget && !turn.row) conclude_target(turn, offers);  // it came with the rest
            return;
        case Step::kRace: return conclude_race(turn, offers);
        case Step::kTarget: return conclude_target(turn, offers);
        case Step::kCount: return conclude_count(turn, offers);
        case Step::kDone: return;
    }
}

// ---- rounds ----

// Lists lie behind the offers, at the same places for every rank. Returns how many turns there is room for.
int64_t lay_out(std::vector<Turn>& turns, int64_t begin, int64_t end, const Tokens& tokens, int64_t slot) {
    const int64_t count = std::min(end - begin, kTogether);
    int64_t at = count * static_cast<int64_t>(sizeof(Offer));
    for (int64_t i = 0; i < count; ++i) {
        Turn& turn = turns[begin + i];
        const auto room = [&](int64_t num) {
            const int64_t before = at;
            at += std::min(num, tokens.most) * static_cast<int64_t>(sizeof(Candidate));
            return before;
        };
        turn.best_at = room(turn.draws_few() ? turn.row->top_k : 0);
        turn.raw_best_at = room(std::max<int64_t>(0, turn.num_logprobs));
        if (at > slot && i > 0) return i;
    }
    return count;
}

// As many together as there is room for in the slots.
int take_turns(const Seat& seat, const Tokens& tokens, std::vector<Turn>& turns, int64_t num_turns, int threads) {
    if (num_turns * tokens.size <= kParallelFloats) threads = 1;
    static thread_local std::vector<std::vector<float>> changed(kTogether);
    int64_t count = 0;
    for (int64_t begin = 0; begin < num_turns; begin += count) {
        count = lay_out(turns, begin, num_turns, tokens, seat.slot);
        for (int64_t i = 0; i < count; ++i) turns[begin + i].changed = &changed[i];
        for (bool more = true; more;) {
            const uint32_t round = seat.next();
            char* mine = seat.part(seat.rank, round);
            parallel_for(threads, count, 1, [&](int64_t i) {
                make_offer(turns[begin + i], tokens, mine, reinterpret_cast<Offer*>(mine)[i]);
            });
            if (const int found = seat.meet(round)) return found;
            more = false;
            for (int64_t i = 0; i < count; ++i) {
                conclude(turns[begin + i], {seat, round, i});
                more |= turns[begin + i].step != Step::kDone;
            }
        }
    }
    return 0;
}

void begin_turn(Turn& turn) {
    turn.step = Step::kFirst;
    turn.cut = kEveryToken;
    turn.is_open = true;
}

std::vector<Turn>& turns_of(int64_t count) {
    static thread_local std::vector<Turn> mine;
    if (static_cast<int64_t>(mine.size()) < count) mine.resize(count);
    return mine;
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

// Bytes of a slot that holds whatever one row can ask for, where the largest part has `most` tokens.
int64_t inflight_offer_bytes(int64_t most) {
    return static_cast<int64_t>(sizeof(Offer)) * kTogether + 2 * most * static_cast<int64_t>(sizeof(Candidate));
}

// As inflight_sample, by all ranks of a group: each has logits [num_entries][size] of the tokens from `first` on, no
// rank more than `most`. All of them get all results.
int inflight_group_sample(void* group, int rank, int ranks_in_group, int64_t slot, int spins, int64_t limit,
                          int64_t first, int64_t size, int64_t most, float* logits, int64_t num_entries,
                          const Row* table, const int64_t* rows, const int64_t* lengths, const int32_t* tokens,
                          int64_t tokens_stride, int64_t* token_ids, uint8_t* bad, int64_t* score_ids, float* logprobs,
                          int64_t* ranks, int64_t width, int threads) {
    const Seat seat{static_cast<Group*>(group), rank, ranks_in_group, spins, slot, limit};
    std::vector<Turn>& turns = turns_of(num_entries);
    for (int64_t i = 0, place = 0; i < num_entries; ++i) {
        Turn& turn = turns[i];
        turn.row = table + rows[i];
        turn.history = {tokens + rows[i] * tokens_stride, lengths[i]};
        turn.logits = logits + i * size;
        turn.num_logprobs = turn.row->num_logprobs;
        turn.scores = {score_ids + place, logprobs + place, ranks + place};
        turn.chosen = {0, 0};
        begin_turn(turn);
        if (turn.num_logprobs >= 0) place += width;
    }
    if (const int found = take_turns(seat, {first, size, most}, turns, num_entries, threads)) return found;
    for (int64_t i = 0; i < num_entries; ++i) {
        token_ids[i] = turns[i].chosen.token;
        bad[i] = turns[i].chosen.bad;
    }
    return 0;
}

// As inflight_score, in the same way.
int inflight_group_score(void* group, int rank, int ranks_in_group, int64_t slot, int spins, int64_t limit,
                         int64_t first, int64_t size, int64_t most, float* logits, int64_t num_positions,
                         const int64_t* targets, int64_t* score_ids, float* logprobs, int64_t* ranks, int64_t width,
                         int threads) {
    const Seat seat{static_cast<Group*>(group), rank, ranks_in_group, spins, slot, limit};
    std::vector<Turn>& turns = turns_of(num_positions);
    for (int64_t i = 0; i < num_positions; ++i) {
        Turn& turn = turns[i];
        turn.row = nullptr;
        turn.logits = logits + i * size;
        turn.num_logprobs = width - 1;
        turn.scores = {score_ids + i * width, logprobs + i * width, ranks + i * width};
        turn.chosen = {targets[i], 0};
        begin_turn(turn);
    }
    return take_turns(seat, {first, size, most}, turns, num_positions, threads);
}
}
