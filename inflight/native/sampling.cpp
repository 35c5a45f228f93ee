// From logits to tokens, one row at a time: what a row gets is a function of its logits, its parameters and its tokens.
//
// execution/sampling/sampler.py is the same in torch, and the reference for what every parameter means.

#include "race.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int64_t kParallelFloats = 32 << 10;  // below this, waking the other threads costs more than it saves

// What a row asks for, as execution/sampling/native.py packs it.
struct Row {
    float temperature, log_min_p, top_p;  // log_min_p: -inf without min_p
    float repetition_penalty, frequency_penalty, presence_penalty;
    uint32_t seed_low, seed_high;
    int32_t top_k;  // 0: all
    int32_t num_prompt_tokens;
    int32_t min_length;    // tokens of the row before which no stop id may come
    int32_t argmax;        // not 0: the most likely token, no draw
    int32_t num_logprobs;  // most likely tokens to tell beside the chosen one; -1: tell nothing
    int32_t penalises, num_stops, num_biases, num_bad_words;
    const uint32_t* mask;  // one bit per token, the lowest of a word first; null: all are allowed
    const int32_t* stops;
    const int32_t* bias_ids;
    const float* biases;
    const int32_t* bad_words;  // of each word the number of its ids, then the ids

    bool adjusts() const { return penalises || mask || num_stops || num_biases || num_bad_words; }
};
static_assert(sizeof(Row) == 112, "native.py knows this layout");

// The tokens of a row before the new one.
struct History {
    const int32_t* tokens;
    int64_t length;
};

// Where a position's logprobs go: the target, then the most likely tokens in order.
struct Scores {
    int64_t* ids;
    float* logprobs;
    int64_t* ranks;
};

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

void copy_allowed(const float* from, float* to, int64_t size, const uint32_t* mask) {
    const WordVec lane_bits = bits<WordVec>((lane_numbers() - lane_numbers() + 1) << lane_numbers());
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) {
        const WordVec allowed = (mask[i / 32] >> (i % 32)) & lane_bits;
        store(to + i, allowed != 0 ? load<Vec>(from + i) : splat(-kInfinity));
    }
    for (; i < size; ++i) to[i] = mask[i / 32] >> (i % 32) & 1 ? from[i] : -kInfinity;
}

// Whether the last outputs are the `count` ids that a bad word begins with. What the prompt ends with is no output.
bool follows(const int32_t* ids, int64_t count, const Row& row, const History& history) {
    const int64_t first = history.length - count;
    return first >= row.num_prompt_tokens && std::equal(ids, ids + count, history.tokens + first);
}

void forbid(float* logits, const Row& row, const History& history) {
    const int32_t* word = row.bad_words;
    for (int32_t i = 0; i < row.num_bad_words; ++i) {
        const int32_t last = word[0];
        if (last == 1 || follows(word + 1, last - 1, row, history)) logits[word[last]] = -kInfinity;
        word += 1 + last;
    }
    if (history.length < row.min_length)
        for (int32_t i = 0; i < row.num_stops; ++i) logits[row.stops[i]] = -kInfinity;
}

// Repetition over the whole row, frequency and presence over its outputs; each token once, however often it was seen.
void penalise(float* logits, int64_t size, const Row& row, const History& history, std::vector<int32_t>& seen) {
    constexpr int32_t kSeen = 1 << 30;  // above any count
    seen.resize(size);
    const auto exists = [&](int64_t i) { return history.tokens[i] >= 0 && history.tokens[i] < size; };
    for (int64_t i = 0; i < history.length; ++i)
        if (exists(i)) {
            int32_t& state = seen[history.tokens[i]];
            state = (state | kSeen) + (i >= row.num_prompt_tokens);
        }
    for (int64_t i = 0; i < history.length; ++i) {
        if (!exists(i)) continue;
        int32_t& state = seen[history.tokens[i]];
        if (!state) continue;
        const int32_t count = state - kSeen;
        state = 0;
        float& logit = logits[history.tokens[i]];
        logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        logit -= row.frequency_penalty * static_cast<float>(count);
        if (count) logit -= row.presence_penalty;
    }
}

// In the order of execution/sampling/adjust.py. `to` may be `from`.
void adjust(const float* from, float* to, int64_t size, const Row& row, const History& history,
            std::vector<int32_t>& seen) {
    if (row.mask)
        copy_allowed(from, to, size, row.mask);
    else if (to != from)
        std::copy(from, from + size, to);
    forbid(to, row, history);
    for (int32_t i = 0; i < row.num_biases; ++i) to[row.bias_ids[i]] += row.biases[i];
    if (row.penalises) penalise(to, size, row, history, seen);
}

// The least logit that min_p keeps: its score, rounded as scores are, reaches the floor.
float least_kept(float top, float temperature, float log_min_p) {
    const float floor = top / temperature + log_min_p;
    int64_t low = order_key(-kInfinity), high = order_key(top);  // `high` is kept, `low` is not
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (of_order_key(middle) / temperature >= floor ? high : low) = middle;
    }
    return of_order_key(high);
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
    double log_total = std::numeric_limits<double>::quiet_NaN();
    to.ids[0] = target;
    to.ranks[0] = 1;
    best.clear();
    if (ranking.bad()) {  // there is no ranking: some tokens
        for (int64_t i = 0; i < count; ++i) best.push_back({0.0f, static_cast<int32_t>(i)});
    } else {
        log_total = ranking.top() + std::log(ranking.mass(kEveryToken, 1.0f));
        to.ranks[0] += ranking.count_above(ranking.logit(target));
        ranking.best(count, -kInfinity, best);
        std::sort(best.begin(), best.end(), ranks_before);
    }
    to.logprobs[0] = static_cast<float>(ranking.logit(target) - log_total);
    for (int64_t i = 0; i < count; ++i) {
        to.ids[1 + i] = best[i].id;
        to.logprobs[1 + i] = static_cast<float>(best[i].logit - log_total);
        to.ranks[1 + i] = i > 0 && best[i].logit == best[i - 1].logit ? to.ranks[i] : 1 + i;
    }
}

// How a row can be bad, as execution/sampling/sampler.py has it.
constexpr uint8_t kIsNotFinite = 1, kHasNoToken = 2;

struct Chosen {
    int64_t token;
    uint8_t bad;  // 0, or how
};

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
            adjust(logits, adjusted, size, row, history, mine.seen);
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
