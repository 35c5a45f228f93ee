// Sampling by several ranks, each of which holds the logits of its part of the vocabulary and never sees the others'.
//
// The ranks work in rounds. In each round a rank publishes candidates from its own tokens, row by row; then every rank
// reads the candidates of all ranks and reaches the same conclusion. Most rows are done after the first round:
//
//   kFirst   greedy: the most likely token; top_k: the best tokens; otherwise: the Gumbel-max winner and the total mass
//   kSample  with min_p or top_p: the winner among the tokens that are left, and their mass
//   kTarget  for log-probabilities: the logit of the chosen token, published by the rank that holds it
//   kCount   for log-probabilities: how many tokens have a greater logit
//
// A row's result depends on its own logits and on how the vocabulary is split, never on the other rows of the step.

#include "group.h"
#include "rank_candidates.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kRowsPerRound = 64;              // rows that share their rounds
constexpr int64_t kParallelFloats = 32 << 10;  // as in sampling.cpp

// ---- conclusions, the same on every rank ----

// The candidates of all ranks for one row.
struct CandidatesByRank {
    const Member& member;
    uint32_t round;
    int64_t index;

    int size() const { return member.size; }
    const RankCandidates& operator[](int rank) const {
        return reinterpret_cast<const RankCandidates*>(member.part(rank, round))[index];
    }
    // Concatenate the lists at this offset.
    void collect(int64_t at, int64_t RankCandidates::*num, std::vector<Candidate>& to) const {
        to.clear();
        for (int rank = 0; rank < size(); ++rank) {
            const auto* from = reinterpret_cast<const Candidate*>(member.part(rank, round) + at);
            to.insert(to.end(), from, from + (*this)[rank].*num);
        }
    }
};

void keep_best(std::vector<Candidate>& candidates, int64_t count) {
    std::sort(candidates.begin(), candidates.end(), ranks_before);
    if (static_cast<int64_t>(candidates.size()) > count) candidates.resize(count);
}

// Sum the masses of all ranks in rank order; each is relative to its rank's own greatest logit.
double total_mass(const RowState& state, const CandidatesByRank& by_rank) {
    double total = 0.0;
    for (int rank = 0; rank < by_rank.size(); ++rank)
        if (by_rank[rank].mass > 0)
            total += by_rank[rank].mass * std::exp((double{state.tops[rank]} - state.top) * state.scale());
    return total;
}

// The global top k are among the ranks' own top k, so min_p and top_p are applied here as well.
int64_t sample_top_k(RowState& state, const CandidatesByRank& by_rank) {
    const Row& row = *state.row;
    by_rank.collect(state.best_at, &RankCandidates::num_best, state.candidates);
    keep_best(state.candidates, row.top_k);
    if (row.log_min_p > -kInfinity) {
        const float least = least_kept(state.top, row.temperature, row.log_min_p);
        while (state.candidates.back().logit < least) state.candidates.pop_back();
    }
    const auto mass = [&](const Candidate& one) {
        return std::exp((double{one.logit} - state.top) * state.scale());
    };
    double goal = std::numeric_limits<double>::infinity(), before = 0.0;
    if (row.top_p < 1) {
        goal = 0.0;
        for (const Candidate& one : state.candidates) goal += mass(one);
        goal *= row.top_p;
    }
    const NoiseKey key = state.key();
    float best = -kInfinity;
    int32_t winner = state.candidates.front().id;
    for (const Candidate& one : state.candidates) {
        if (!(before < goal || before == 0)) break;
        const float score = GumbelMax::score(one.logit, one.id, row.temperature, key);
        if (score > best || (score == best && one.id < winner)) best = score, winner = one.id;
        if (row.top_p < 1) before += mass(one);
    }
    return winner;
}

// Ranks hold tokens in ascending order, so a tie goes to the first rank, which has the lowest id.
Candidate gumbel_winner(const CandidatesByRank& by_rank) {
    const RankCandidates* best = &by_rank[0];
    for (int rank = 1; rank < by_rank.size(); ++rank)
        if (best->winner.id < 0 || by_rank[rank].score > best->score) {
            if (by_rank[rank].winner.id >= 0) best = &by_rank[rank];
        }
    return best->winner;
}

void choose(RowState& state, int64_t token, uint8_t bad = 0) {
    state.chosen = {token, bad};
    state.step = state.num_logprobs >= 0 ? Step::kTarget : Step::kDone;
}

// Ask in the next round for the mass that ranks before this winner, which decides whether top_p keeps it.
void try_winner(RowState& state, const Candidate& winner) {
    state.winner = winner;
    state.cut = {winner.logit, winner.id - 1};
    state.is_open = false;
    state.step = Step::kSample;
}

void conclude_sample(RowState& state, const CandidatesByRank& by_rank) {
    const Candidate next = gumbel_winner(by_rank);
    if (state.is_open) {
        if (state.row->top_p >= 1) return choose(state, next.id);
        state.goal = state.row->top_p * total_mass(state, by_rank);
        return try_winner(state, next);
    }
    const double before = total_mass(state, by_rank);
    if (before < state.goal || before == 0) return choose(state, state.winner.id);  // 0: it ranks first
    try_winner(state, next);
}

void conclude_first(RowState& state, const CandidatesByRank& by_rank) {
    float raw_top = -kInfinity;
    bool poisoned = false;
    state.top = -kInfinity;
    state.tops.clear();
    for (int rank = 0; rank < by_rank.size(); ++rank) {
        const RankCandidates& one = by_rank[rank];
        poisoned |= one.poisoned != 0;
        raw_top = std::max(raw_top, one.raw_top);
        state.top = std::max(state.top, one.top);
        state.tops.push_back(one.top);
    }
    const bool raw_is_bad = poisoned || raw_top == -kInfinity;
    if (state.num_logprobs >= 0 && !raw_is_bad) {
        double total = 0.0;
        for (int rank = 0; rank < by_rank.size(); ++rank)
            if (by_rank[rank].raw_mass > 0)
                total += by_rank[rank].raw_mass * std::exp(double{by_rank[rank].raw_top} - raw_top);
        state.log_total = raw_top + std::log(total);
        by_rank.collect(state.raw_best_at, &RankCandidates::num_raw_best, state.best);
        keep_best(state.best, state.num_logprobs);
    }
    if (raw_is_bad) {
        if (state.row) state.chosen = {0, kIsNotFinite};
        if (state.num_logprobs >= 0) state.out.write_unranked(state.chosen.token, state.num_logprobs, state.best);
        state.step = Step::kDone;
    } else if (!state.row) {
        state.step = Step::kTarget;
    } else if (state.top == -kInfinity || state.top == kInfinity) {
        choose(state, 0, kHasNoToken);
    } else if (state.row->argmax) {
        int best = 0;
        while (by_rank[best].top != state.top) ++best;
        choose(state, by_rank[best].winner.id);
    } else if (state.uses_top_k()) {
        choose(state, sample_top_k(state, by_rank));
    } else if (state.keeps_every_token()) {
        conclude_sample(state, by_rank);
    } else {
        state.cut.logit = least_kept(state.top, state.row->temperature, state.row->log_min_p);
        state.step = Step::kSample;
    }
}

void conclude_target(RowState& state, const CandidatesByRank& by_rank) {
    for (int rank = 0; rank < by_rank.size(); ++rank)
        if (by_rank[rank].winner.id >= 0) state.winner = by_rank[rank].winner;
    state.step = Step::kCount;
}

void conclude_count(RowState& state, const CandidatesByRank& by_rank) {
    int64_t above = 0;
    for (int rank = 0; rank < by_rank.size(); ++rank) above += by_rank[rank].count;
    state.out.write(state.winner, above, state.log_total, state.best);
    state.step = Step::kDone;
}

void conclude(RowState& state, const CandidatesByRank& by_rank) {
    switch (state.step) {
        case Step::kFirst:
            conclude_first(state, by_rank);
            if (state.step == Step::kTarget && !state.row) conclude_target(state, by_rank);  // published with the first round
            return;
        case Step::kSample: return conclude_sample(state, by_rank);
        case Step::kTarget: return conclude_target(state, by_rank);
        case Step::kCount: return conclude_count(state, by_rank);
        case Step::kDone: return;
    }
}

// ---- rounds ----

// Place the lists behind the candidates, at the same offsets for every rank. Returns how many rows fit.
int64_t lay_out_lists(std::vector<RowState>& states, int64_t begin, int64_t end, const Tokens& tokens, int64_t slot) {
    const int64_t count = std::min(end - begin, kRowsPerRound);
    int64_t at = count * static_cast<int64_t>(sizeof(RankCandidates));
    for (int64_t i = 0; i < count; ++i) {
        RowState& state = states[begin + i];
        const auto reserve = [&](int64_t num) {
            const int64_t before = at;
            at += std::min(num, tokens.most) * static_cast<int64_t>(sizeof(Candidate));
            return before;
        };
        state.best_at = reserve(state.uses_top_k() ? state.row->top_k : 0);
        state.raw_best_at = reserve(std::max<int64_t>(0, state.num_logprobs));
        if (at > slot && i > 0) return i;
    }
    return count;
}

// Run the rounds of all rows, as many rows at a time as fit in a slot.
int run_rounds(const Member& member, const Tokens& tokens, std::vector<RowState>& states, int64_t num_states,
               int threads) {
    if (num_states * tokens.size <= kParallelFloats) threads = 1;
    static thread_local std::vector<std::vector<float>> changed(kRowsPerRound);
    int64_t count = 0;
    for (int64_t begin = 0; begin < num_states; begin += count) {
        count = lay_out_lists(states, begin, num_states, tokens, member.slot);
        for (int64_t i = 0; i < count; ++i) states[begin + i].changed = &changed[i];
        for (bool more = true; more;) {
            const uint32_t round = member.next();
            char* mine = member.part(member.rank, round);
            parallel_for(threads, count, 1, [&](int64_t i) {
                make_candidates(states[begin + i], tokens, mine, reinterpret_cast<RankCandidates*>(mine)[i]);
            });
            if (const int status = member.meet(round)) return status;
            more = false;
            for (int64_t i = 0; i < count; ++i) {
                conclude(states[begin + i], {member, round, i});
                more |= states[begin + i].step != Step::kDone;
            }
        }
    }
    return 0;
}

void begin(RowState& state) {
    state.step = Step::kFirst;
    state.cut = kEveryToken;
    state.is_open = true;
}

std::vector<RowState>& states_of(int64_t count) {
    static thread_local std::vector<RowState> mine;
    if (static_cast<int64_t>(mine.size()) < count) mine.resize(count);
    return mine;
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

// Bytes of a slot that fits any single row, where the largest part of the vocabulary has `most` tokens.
int64_t inflight_candidates_bytes(int64_t most) {
    const int64_t lists = 2 * most * static_cast<int64_t>(sizeof(Candidate));
    return static_cast<int64_t>(sizeof(RankCandidates)) * kRowsPerRound + lists;
}

// inflight_sample by all ranks of a group: each has logits [num_entries][size] of the tokens from `first` on, and at
// most `most` of them. Every rank gets all results.
int inflight_group_sample(void* group, int rank, int ranks_in_group, int64_t slot, int spins, int64_t limit,
                          int64_t first, int64_t size, int64_t most, float* logits, int64_t num_entries,
                          const Row* table, const int64_t* rows, const int64_t* lengths, const int32_t* tokens,
                          int64_t tokens_stride, int64_t* token_ids, uint8_t* bad, int64_t* logprob_ids,
                          float* logprobs, int64_t* ranks, int64_t width, int threads) {
    const Member member{static_cast<Group*>(group), rank, ranks_in_group, spins, slot, limit};
    std::vector<RowState>& states = states_of(num_entries);
    for (int64_t i = 0, offset = 0; i < num_entries; ++i) {
        RowState& state = states[i];
        state.row = table + rows[i];
        state.history = {tokens + rows[i] * tokens_stride, lengths[i]};
        state.logits = logits + i * size;
        state.num_logprobs = state.row->num_logprobs;
        state.out = {logprob_ids + offset, logprobs + offset, ranks + offset};
        state.chosen = {0, 0};
        begin(state);
        if (state.num_logprobs >= 0) offset += width;
    }
    if (const int status = run_rounds(member, {first, size, most}, states, num_entries, threads)) return status;
    for (int64_t i = 0; i < num_entries; ++i) {
        token_ids[i] = states[i].chosen.token;
        bad[i] = states[i].chosen.bad;
    }
    return 0;
}

// inflight_token_logprobs by all ranks of a group.
int inflight_group_token_logprobs(void* group, int rank, int ranks_in_group, int64_t slot, int spins, int64_t limit,
                         int64_t first, int64_t size, int64_t most, float* logits, int64_t num_positions,
                         const int64_t* targets, int64_t* logprob_ids, float* logprobs, int64_t* ranks, int64_t width,
                         int threads) {
    const Member member{static_cast<Group*>(group), rank, ranks_in_group, spins, slot, limit};
    std::vector<RowState>& states = states_of(num_positions);
    for (int64_t i = 0; i < num_positions; ++i) {
        RowState& state = states[i];
        state.row = nullptr;
        state.logits = logits + i * size;
        state.num_logprobs = width - 1;
        state.out = {logprob_ids + i * width, logprobs + i * width, ranks + i * width};
        state.chosen = {targets[i], 0};
        begin(state);
    }
    return run_rounds(member, {first, size, most}, states, num_positions, threads);
}
}
