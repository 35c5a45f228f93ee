// Attention within sequences that lie side by side: every token of a sequence sees every other, or those near it.
//
// One unit of work is one head of one sequence, or of a part of its queries if it is long. Keys and values are
// copied into panels, so that both products are those of tile.h; kQueries queries walk them together:
//
//     scores  [rows][length] = queries [rows][dim] @ panels of keys    [length / kPanel][dim][kPanel]
//     weights                = softmax of what each row sees
//     out     [rows][dim]    = weights [rows][length] @ panels of values [dim / kPanel][length][kPanel]
//
// Queries are read and results are written in place. Tiles of rows begin with the sequence, so a token's result
// depends on its own sequence alone.

#include <algorithm>
#include <vector>

#include "team.h"
#include "tile.h"

namespace inflight {
namespace {

// Queries that walk the keys together: each needs its own pointer, and there are few registers for those.
constexpr int kQueries = kGemmRows < 8 ? kGemmRows : 8;
constexpr int64_t kUnitQueries = kQueries * 64;  // per unit of work: copying keys costs little beside them
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Job {
    const float* qkv;       // [tokens][3][heads][dim]
    float* out;             // [tokens][heads][dim]
    const int32_t* starts;  // [sequences + 1]
    int64_t sequences, heads, dim;
    int64_t window;  // tokens to both sides that one sees; negative: all
    float scale;
};

// Queries [first, last) of one sequence.
struct Queries {
    int64_t start, length;  // of the sequence
    int64_t first, last;
};

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// A thread's own memory for one unit: keys and values in panels, and the scores of one tile of rows.
struct Workspace {
    Scratch scratch;
    float *keys, *values, *scores;
    int64_t columns;  // of scores: the length in whole panels

    void resize(int64_t length, int64_t dim) {
        columns = panels_of(length) * kPanel;
        keys = scratch.floats(columns * dim + length * panels_of(dim) * kPanel + kQueries * columns);
        values = keys + columns * dim;
        scores = values + length * panels_of(dim) * kPanel;
    }
};

// Heads are far apart in memory, so the processor does not predict which is read next.
inline void prefetch(const float* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += kLine / 4) __builtin_prefetch(row + d);
}

// Tokens [begin, end) of the sequence, in whole panels of keys. Lanes past the last token are zero: they are
// multiplied, and not seen.
void copy_keys(const float* key, int64_t stride, int64_t dim, int64_t begin, int64_t end, float* panels) {
    for (int64_t first = begin / kPanel * kPanel; first < end; first += kPanel) {
        float* panel = panels + first * dim;
        const float* from = key + first * stride;
        const int64_t valid = std::min<int64_t>(kPanel, end - first);
        for (int64_t t = 0; t < kPanel; ++t) prefetch(from + (kPanel + t) * stride, dim);
        if (valid == kPanel) {
            for (int t = 0; t < kPanel; t += kWidth) pack_rows<kWidth>(from + t * stride, stride, dim, panel + t, kPanel);
            continue;
        }
        std::memset(panel, 0, kPanel * dim * sizeof(float));
        for (int64_t t = 0; t < valid; ++t) pack_rows<1>(from + t * stride, stride, dim, panel + t, kPanel);
    }
}

void copy_values(const float* value, int64_t stride, int64_t dim, int64_t begin, int64_t end, int64_t length,
                 float* panels) {
    for (int64_t t = begin; t < end; ++t) {
        prefetch(value + (t + kPanel) * stride, dim);
        for (int64_t d = 0; d < dim; d += kPanel) {
            Vec low, high;
            load_valid(value + t * stride + d, std::min<int64_t>(kPanel, dim - d), low, high);
            store(panels + d * length + t * kPanel, low);
            store(panels + d * length + t * kPanel + kWidth, high);
        }
    }
}

// Scores [begin, end) of one row become weights that are not yet divided by their sum, which is returned; those around
// them, in whole panels, become 0. One function for every number of rows, so that all of them round alike.
__attribute__((noinline)) float soften(float* scores, int64_t begin, int64_t end, float scale) {
    const int64_t first = begin / kPanel * kPanel, last = panels_of(end) * kPanel;
    for (int64_t i = first; i < begin; ++i) scores[i] = kNone;
    for (int64_t i = end; i < last; ++i) scores[i] = kNone;
    Vec tops[2] = {splat(kNone), splat(kNone)};
    for (int64_t i = first; i < last; i += kPanel) {
        tops[0] = larger(tops[0], load<Vec>(scores + i));
        tops[1] = larger(tops[1], load<Vec>(scores + i + kWidth));
    }
    const float largest = max(larger(tops[0], tops[1])) * scale;
    Vec totals[2] = {};
    for (int64_t i = first; i < last; i += kPanel) {
        for (int v = 0; v < 2; ++v) {
            float* at = scores + i + v * kWidth;
            const Vec weight = exp(load<Vec>(at) * scale - largest);
            store(at, weight);
            totals[v] += weight;
        }
    }
    return sum(totals[0] + totals[1]);
}

// Rows queries from `query` on, `position` being the first one's in its sequence.
template <int Rows>
void attend_rows(const Job& job, const Workspace& work, const float* query, int64_t position, int64_t length,
                 float* out) {
    const int64_t dim = job.dim, token = job.heads * dim;
    const bool all = job.window < 0;
    const int64_t begin = all ? 0 : std::max<int64_t>(position - job.window, 0) / kPanel * kPanel;
    const int64_t end = all ? length : std::min(position + Rows + job.window, length);
    const PlainRows<Rows> queries(query, 3 * token);
    for (int r = 0; r < Rows; ++r) prefetch(query + (Rows + r) * 3 * token, dim);
    for (int64_t column = begin; column < end; column += kPanel) {
        Vec low[Rows] = {}, high[Rows] = {};
        accumulate<Rows>(queries, work.keys + column * dim, dim, {nullptr, 0}, low, high);
        for (int r = 0; r < Rows; ++r) store_valid(work.scores + r * work.columns + column, kPanel, low[r], high[r]);
    }
    float shares[Rows];
    for (int r = 0; r < Rows; ++r) {
        float* scores = work.scores + r * work.columns;
        const int64_t lowest = all ? 0 : std::max<int64_t>(position + r - job.window, 0);
        const int64_t beyond = all ? length : std::min(position + r + job.window + 1, length);
        shares[r] = 1.0f / soften(scores, lowest, beyond, job.scale);
        // Keys that other rows of the tile see and this one does not.
        for (int64_t i = begin; i < lowest / kPanel * kPanel; ++i) scores[i] = 0.0f;
        for (int64_t i = panels_of(beyond) * kPanel; i < end; ++i) scores[i] = 0.0f;
    }
    const PlainRows<Rows> weights(work.scores + begin, work.columns);
    for (int64_t d = 0; d < dim; d += kPanel) {
        Vec low[Rows] = {}, high[Rows] = {};
        accumulate<Rows>(weights, work.values + d * length + begin * kPanel, end - begin, {nullptr, 0}, low, high);
        for (int r = 0; r < Rows; ++r)
            store_valid(out + r * token + d, std::min<int64_t>(kPanel, dim - d), low[r] * shares[r],
                        high[r] * shares[r]);
    }
}

using RowsFunction = void (*)(const Job&, const Workspace&, const float*, int64_t, int64_t, float*);

template <int Rows>
RowsFunction rows_function(int64_t rows) {
    if constexpr (Rows == 1) {
        (void)rows;
        return attend_rows<1>;
    } else {
        return rows == Rows ? attend_rows<Rows> : rows_function<Rows - 1>(rows);
    }
}

void attend_head(const Job& job, const Queries& queries, int64_t head) {
    thread_local Workspace work;
    const int64_t token = job.heads * job.dim, length = queries.length;
    const float* query = job.qkv + queries.start * 3 * token + head * job.dim;
    float* out = job.out + queries.start * token + head * job.dim;
    const bool all = job.window < 0;
    const int64_t begin = all ? 0 : std::max<int64_t>(queries.first - job.window, 0) / kPanel * kPanel;
    const int64_t end = all ? length : std::min(queries.last + job.window, length);
    work.resize(length, job.dim);
    copy_keys(query + token, 3 * token, job.dim, begin, end, work.keys);
    copy_values(query + 2 * token, 3 * token, job.dim, begin, end, length, work.values);
    for (int64_t first = queries.first; first < queries.last; first += kQueries) {
        const auto attend = rows_function<kQueries>(std::min<int64_t>(kQueries, queries.last - first));
        attend(job, work, query + first * 3 * token, first, length, out + first * token);
    }
}

void attend(const Job& job, int threads) {
    thread_local std::vector<Queries> own_units;
    std::vector<Queries>& units = own_units;  // this thread's, for the whole team
    units.clear();
    for (int64_t i = 0; i < job.sequences; ++i) {
        const int64_t start = job.starts[i], length = job.starts[i + 1] - start;
        for (int64_t first = 0; first < length; first += kUnitQueries)
            units.push_back({start, length, first, std::min(first + kUnitQueries, length)});
    }
    // Long ones first: the short ones fill the gaps at the end.
    const auto cost = [](const Queries& queries) { return (queries.last - queries.first) * queries.length; };
    std::sort(units.begin(), units.end(), [&](const Queries& a, const Queries& b) { return cost(a) > cost(b); });
    const std::vector<int64_t> order = deal(threads, static_cast<int64_t>(units.size()) * job.heads);
    parallel_for(threads, static_cast<int64_t>(order.size()), 1, [&](int64_t place) {
        attend_head(job, units[order[place] / job.heads], order[place] % job.heads);
    });
}

}  // namespace
}  // namespace inflight

extern "C" void inflight_attend_sequences(const float* qkv, float* out, const int32_t* starts, int64_t sequences,
                                          int64_t heads, int64_t dim, int64_t window, float scale, int threads) {
    inflight::attend({qkv, out, starts, sequences, heads, dim, window, scale}, threads);
}
