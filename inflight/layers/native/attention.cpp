// Attention over the paged KV cache, in float32 or int8.
//
// A block of a layer's cache is [kv heads][2][head_dim * block_size] numbers: keys as [head_dim][block_size], so
// that one vector holds the same feature of neighbouring tokens and scores need no sum across lanes; values
// as [block_size][head_dim]. Blocks are block_stride numbers apart.
//
// An int8 cache also has a word for each token and KV head with two scales in bfloat16: that of the key in the lower
// half and that of the value in the upper half. Codes are widened in registers; a key's scale multiplies its score, and a
// value's scale its weight. Every row reads codes, also those of its own step, so it does not matter which step that is.
//
// Every query row walks the keys in tiles of kTile tokens that start at multiples of kTile, and does the same
// sequence of operations in each tile that it sees, whichever rows are worked on beside it:
//
//     tokens      0        16        32        48
//     row at 20   [ tile 0 ][ tile 1..)            masked after token 20
//     row at 37   [ tile 0 ][ tile 1 ][ tile 2..)  masked after token 37
//
// A tile in which a row sees nothing does not change the row. Slots that no row sees may hold anything: their scores
// are replaced, not weighted, and their values are never read. A row with a sink starts as if it had seen one key with
// that score and a value of zeros.
//
// Before that, heads are normalised and rotated in place, in the same pass that writes keys and values to the cache.

#include <algorithm>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "elementwise.h"
#include "team.h"

namespace inflight {
namespace {

constexpr int kTile = 16;                       // tokens
constexpr int kTileVecs = kTile / kWidth;       // vectors of scores
constexpr int64_t kTileRows = 4 * kQueryRows;   // query rows that walk the keys together
constexpr int64_t kLine = 64;                   // bytes of a cache line
constexpr int64_t kWriteTokens = 64;            // tokens of one unit of writing, at most
constexpr int64_t kParallelFloats = 8 << 10;    // of queries and keys below which one thread prepares and writes alone
constexpr int64_t kParallelWork = 32 << 10;     // multiply-adds below which one thread is faster than two
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <class Stored>
constexpr bool kIsQuantized = sizeof(Stored) == 1;

// Stored is what the cache holds: float, or int8_t with scales.
template <class Stored>
struct Job : Attention {
    Stored* cache;

    explicit Job(const Attention& attention) : Attention(attention), cache(static_cast<Stored*>(attention.memory)) {}
    int64_t group() const { return heads / kv_heads; }
    int64_t padded_dim() const { return (dim + kWidth - 1) / kWidth * kWidth; }
    // Tiles inside one block, in whole vectors, are read in place; others are gathered first.
    bool in_place() const { return block_size % kTile == 0 && dim % kWidth == 0; }
    Stored* keys(int64_t block, int64_t kv_head) const {
        return cache + block * block_stride + kv_head * 2 * dim * block_size;
    }
    Stored* values(int64_t block, int64_t kv_head) const { return keys(block, kv_head) + dim * block_size; }
    uint32_t* words(int64_t block, int64_t kv_head) const {
        return scales + block * (block_stride / 4) + kv_head * block_size;  // blocks of codes have whole words
    }
};

// Consecutive queries of one entry, for one KV head.
struct QueryTile {
    int64_t entry, first, count;  // tokens [first, first + count) of the step
    int64_t position;             // of the first one, in its request
};

// One row's running softmax: the largest score, the sum of weights, and (elsewhere) the weighted values.
struct RowState {
    int64_t begin, end;  // the tokens it sees
    float largest, total, softcap;
};

// The keys and values of one tile of tokens.
template <class Stored>
struct KeyTile {
    const Stored *keys, *values;
    const uint32_t* words;  // with the scales of int8
    int64_t key_stride, value_stride;
    int64_t first;  // position of its first token
};

// ---- int8 ----

// The scale of a key or value: the least bfloat16 with which no code is larger than 127, so that codes times scales are
// exact in float32. NaN if a number is not finite, so that this shows in results.
uint32_t scale_bits(const float* x, int64_t dim) {
    uint32_t largest = 0;
    for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, bits<uint32_t>(x[d]) & 0x7fffffffu);
    if (largest >= bits<uint32_t>(-kNone)) return 0x7fc00000u;
    return (bits<uint32_t>(bits<float>(largest) / 127.0f) + 0xffffu) & 0xffff0000u;
}

// Write the codes of a key or value, and return the bits of its scale.
uint32_t quantize(const float* x, int64_t dim, int8_t* codes) {
    const uint32_t scale = scale_bits(x, dim);
    const float shift = 12582912.0f;  // leaves the rounded number in the low bits of the sum
    for (int64_t d = 0; d < dim; ++d)
        codes[d] = static_cast<int8_t>(bits<int32_t>(x[d] / bits<float>(scale) + shift) - bits<int32_t>(shift));
    return scale;
}

inline Vec key_scales(const uint32_t* words) { return bits<Vec>(load<WordVec>(words) << 16); }
inline Vec value_scales(const uint32_t* words) { return bits<Vec>(load<WordVec>(words) & 0xffff0000u); }

inline Vec widen(const float* from) { return load<Vec>(from); }
inline Vec widen(const int8_t* from) { return load_bytes<true>(from); }

// ---- writing ----

void write_token(const Job<float>& job, int64_t kv_head, int64_t token, int64_t block, int64_t offset) {
    const float* key = job.key(token, kv_head);
    float* keys = job.keys(block, kv_head) + offset;
    for (int64_t d = 0; d < job.dim; ++d) keys[d * job.block_size] = key[d];
    std::memcpy(job.values(block, kv_head) + offset * job.dim, job.value(token, kv_head), job.dim * sizeof(float));
}

void write_token(const Job<int8_t>& job, int64_t kv_head, int64_t token, int64_t block, int64_t offset) {
    thread_local Scratch scratch;
    int8_t* codes = reinterpret_cast<int8_t*>(scratch.floats(job.dim));
    const uint32_t key_scale = quantize(job.key(token, kv_head), job.dim, codes);
    int8_t* keys = job.keys(block, kv_head) + offset;
    for (int64_t d = 0; d < job.dim; ++d) keys[d * job.block_size] = codes[d];
    const uint32_t value_scale =
        quantize(job.value(token, kv_head), job.dim, job.values(block, kv_head) + offset * job.dim);
    job.words(block, kv_head)[offset] = value_scale | key_scale >> 16;
}

// Prepare the heads of a token that share a KV head.
template <class Stored>
void prepare_token(const Job<Stored>& job, int64_t kv_head, int64_t token) {
    const auto prepare_head = [&](float* head, const float* norm) {
        job.normalise(head, norm);
        job.rotate(head, token);
    };
    const int64_t group = job.group();
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        prepare_head(job.query(token, head), job.query_norm);
    if (!job.key.data) return;
    prepare_head(job.key(token, kv_head), job.key_norm);
    job.normalise(job.value(token, kv_head), job.value_norm);
}

template <class Stored>
void write_tokens(const Job<Stored>& job, int64_t kv_head, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        prepare_token(job, kv_head, token);
        if (!job.key.data) continue;
        const int64_t slot = job.slot_mapping[token];
        write_token(job, kv_head, token, slot / job.block_size, slot % job.block_size);
    }
}

// ---- attending ----

// Scores of Rows query rows against a tile: two chains over even and odd features, then their sum.
template <int Rows, class Stored>
void score(const float* query, int64_t dim, const KeyTile<Stored>& tile, float (*scores)[kTile]) {
    Vec even[Rows][kTileVecs] = {}, odd[Rows][kTileVecs] = {};
    const Stored* key = tile.keys;
    auto add = [&](Vec (*to)[kTileVecs]) {
#pragma GCC unroll 4
        for (int v = 0; v < kTileVecs; ++v) {
            const Vec k = widen(key + v * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) to[r][v] += k * query[r];
        }
        query += Rows;
        key += tile.key_stride;
    };
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2) {
        add(even);
        add(odd);
    }
    if (d < dim) add(even);
    for (int v = 0; v < kTileVecs; ++v) {
        Vec scale;
        if constexpr (kIsQuantized<Stored>) scale = key_scales(tile.words + v * kWidth);
        for (int r = 0; r < Rows; ++r) {
            Vec score = even[r][v] + odd[r][v];
            if constexpr (kIsQuantized<Stored>) score *= scale;
            store(scores[r] + v * kWidth, score);
        }
    }
}

// Turn scores into weights; earlier sums shrink by the returned factor. One function for any number of rows, so that
// all round alike.
__attribute__((noinline)) float soften(RowState& row, int64_t first, float* scores) {
    if (row.begin >= first + kTile || row.end <= first) {
        std::memset(scores, 0, kTile * sizeof(float));
        return 1.0f;
    }
    const IntVec lanes = lane_numbers();
    const int32_t begin = static_cast<int32_t>(std::max<int64_t>(row.begin - first, 0));
    const int32_t end = static_cast<int32_t>(std::min<int64_t>(row.end - first, kTile));
    Vec top = splat(kNone);
    Vec visible[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) {
        const IntVec token = lanes + v * kWidth;
        Vec score = load<Vec>(scores + v * kWidth);
        if (row.softcap > 0.0f) score = exact_tanh(score / row.softcap) * row.softcap;
        visible[v] = ((token >= begin) & (token < end)) ? score : splat(kNone);
        top = larger(top, visible[v]);
    }
    const float largest = std::max(row.largest, max(top));
    Vec added{};
    for (int v = 0; v < kTileVecs; ++v) {
        const Vec weight = exp(visible[v] - largest);
        store(scores + v * kWidth, weight);
        added += weight;
    }
    const float shrink = exp(splat(row.largest - largest))[0];
    row.largest = largest;
    row.total = row.total * shrink + sum(added);
    return shrink;
}

// sums[r][d...] += weights[r][t] * values[t][d...] for Vecs vectors of features, t in [begin, end) of the tile.
template <int Rows, int Vecs, class Stored>
void weigh(float (*weights)[kTile], const KeyTile<Stored>& tile, int64_t begin, int64_t end, int64_t d, float* sums,
           int64_t stride) {
    Vec to[Rows][Vecs];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vecs; ++v) to[r][v] = load<Vec>(sums + r * stride + d + v * kWidth);
    for (int64_t t = begin; t < end; ++t) {
        const Stored* value = tile.values + t * tile.value_stride + d;
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) {
            const Vec x = widen(value + v * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) to[r][v] += x * weights[r][t];
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vecs; ++v) store(sums + r * stride + d + v * kWidth, to[r][v]);
}

template <int Rows, class Stored>
void attend_rows(const float* query, int64_t dim, const KeyTile<Stored>& tile, RowState* rows, float* sums,
                 int64_t stride) {
    // Rows come in the order of their positions, so the first one begins, and the last one ends, latest.
    const int64_t begin = std::max<int64_t>(rows[0].begin - tile.first, 0);
    const int64_t end = std::min<int64_t>(rows[Rows - 1].end - tile.first, kTile);
    if (begin >= end) return;
    float scores[Rows][kTile];
    score<Rows>(query, dim, tile, scores);
    for (int r = 0; r < Rows; ++r) {
        const float shrink = soften(rows[r], tile.first, scores[r]);
        if constexpr (kIsQuantized<Stored>)
            for (int v = 0; v < kTile; v += kWidth)
                store(scores[r] + v, load<Vec>(scores[r] + v) * value_scales(tile.words + v));
        if (shrink == 1.0f) continue;
        float* row = sums + r * stride;
        for (int64_t d = 0; d < stride; d += kWidth) store(row + d, load<Vec>(row + d) * shrink);
    }
    constexpr int vecs = Rows > 4 ? 2 : 4;
    int64_t d = 0;
    for (; d + vecs * kWidth <= stride; d += vecs * kWidth)
        weigh<Rows, vecs>(scores, tile, begin, end, d, sums, stride);
    for (; d < stride; d += kWidth) weigh<Rows, 1>(scores, tile, begin, end, d, sums, stride);
}

template <class Stored>
using RowsFunction = void (*)(const float*, int64_t, const KeyTile<Stored>&, RowState*, float*, int64_t);

template <int Rows, class Stored>
RowsFunction<Stored> rows_function(int64_t rows) {
    if constexpr (Rows == 1) {
        (void)rows;
        return attend_rows<1, Stored>;
    } else {
        return rows == Rows ? attend_rows<Rows, Stored> : rows_function<Rows - 1, Stored>(rows);
    }
}

// A thread's own memory for one query tile.
template <class Stored>
struct Workspace {
    Scratch scratch;
    std::vector<RowState> rows;
    float *query, *sums;
    Stored *keys, *values;
    uint32_t words[kTile];

    void resize(const Job<Stored>& job, int64_t count) {
        const int64_t dim = job.padded_dim();
        float* at = scratch.floats(2 * count * dim + 2 * kTile * dim);
        query = at;
        sums = query + count * dim;
        keys = reinterpret_cast<Stored*>(sums + count * dim);
        values = keys + kTile * dim;
        rows.resize(count);
        std::memset(sums, 0, count * dim * sizeof(float));
    }
};

template <class Stored>
KeyTile<Stored> find_tile(const Job<Stored>& job, const int32_t* table, int64_t kv_head, int64_t first) {
    const int64_t block = table[first / job.block_size], offset = first % job.block_size;
    return {job.keys(block, kv_head) + offset,
            job.values(block, kv_head) + offset * job.dim,
            kIsQuantized<Stored> ? job.words(block, kv_head) + offset : nullptr,
            job.block_size,
            job.dim,
            first};
}

// Blocks are anywhere in memory, so the processor does not predict which is read next. Inline: compilers drop calls of
// functions that only prefetch.
template <class Stored>
__attribute__((always_inline)) inline void prefetch(const Job<Stored>& job, const KeyTile<Stored>& tile) {
    const char *keys = reinterpret_cast<const char*>(tile.keys), *values = reinterpret_cast<const char*>(tile.values);
    const int64_t key_bytes = tile.key_stride * sizeof(Stored), value_bytes = kTile * job.dim * sizeof(Stored);
    for (int64_t at = 0; at < job.dim * key_bytes; at += std::max(kLine, key_bytes)) __builtin_prefetch(keys + at, 0, 2);
    for (int64_t at = 0; at < value_bytes; at += kLine) __builtin_prefetch(values + at, 0, 2);
    if constexpr (kIsQuantized<Stored>) __builtin_prefetch(tile.words, 0, 2);
}

// Copy tokens [begin, end) of a tile side by side, and zeros around them.
template <class Stored>
KeyTile<Stored> gather_tile(const Job<Stored>& job, const int32_t* table, int64_t kv_head, int64_t first,
                            int64_t begin, int64_t end, Workspace<Stored>& work) {
    const int64_t dim = job.padded_dim();
    std::memset(work.keys, 0, 2 * kTile * dim * sizeof(Stored));
    std::memset(work.words, 0, sizeof work.words);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t block = table[token / job.block_size], offset = token % job.block_size;
        const Stored* keys = job.keys(block, kv_head) + offset;
        const Stored* values = job.values(block, kv_head) + offset * job.dim;
        for (int64_t d = 0; d < job.dim; ++d) {
            work.keys[d * kTile + token - first] = keys[d * job.block_size];
            work.values[(token - first) * dim + d] = values[d];
        }
        if constexpr (kIsQuantized<Stored>) work.words[token - first] = job.words(block, kv_head)[offset];
    }
    return {work.keys, work.values, work.words, kTile, dim, first};
}

// Row r of a tile is head r % group of its query r / group. Groups of kQueryRows rows are held as [dim][rows].
template <class Stored>
void prepare_rows(const Job<Stored>& job, const QueryTile& tile, int64_t kv_head, Workspace<Stored>& work) {
    const int64_t group = job.group(), count = tile.count * group;
    for (int64_t r = 0; r < count; ++r) {
        const int64_t position = tile.position + r / group;
        const int64_t begin = job.window > 0 ? std::max<int64_t>(position - job.window + 1, 0) : 0;
        const int64_t head = kv_head * group + r % group;
        work.rows[r] = {begin, position + 1, job.sinks ? job.sinks[head] : kNone, job.sinks ? 1.0f : 0.0f, job.softcap};
        const int64_t first = r / kQueryRows * kQueryRows, width = std::min<int64_t>(kQueryRows, count - first);
        const float* query = job.query(tile.first + r / group, head);
        float* packed = work.query + first * job.dim + (r - first);
        for (int64_t d = 0; d < job.dim; ++d) packed[d * width] = query[d] * job.scale;
    }
}

template <class Stored>
void attend_tile(const Job<Stored>& job, const QueryTile& tile, int64_t kv_head) {
    thread_local Workspace<Stored> work;
    const int64_t group = job.group(), count = tile.count * group, dim = job.padded_dim();
    work.resize(job, count);
    prepare_rows(job, tile, kv_head, work);
    const int32_t* table = job.tables + job.rows[tile.entry] * job.table_stride;
    const int64_t begin = work.rows[0].begin, end = work.rows[count - 1].end;
    const bool in_place = job.in_place();
    const auto full = rows_function<kQueryRows, Stored>(kQueryRows);
    const auto rest = rows_function<kQueryRows, Stored>(count % kQueryRows);
    for (int64_t first = begin / kTile * kTile; first < end; first += kTile) {
        const KeyTile<Stored> keys = in_place ? find_tile(job, table, kv_head, first)
                                              : gather_tile(job, table, kv_head, first, std::max(first, begin),
                                                            std::min(first + kTile, end), work);
        if (in_place && first + kTile < end) prefetch(job, find_tile(job, table, kv_head, first + kTile));
        for (int64_t r = 0; r < count; r += kQueryRows) {
            const auto attend = r + kQueryRows <= count ? full : rest;
            attend(work.query + r * job.dim, job.dim, keys, &work.rows[r], work.sums + r * dim, dim);
        }
    }
    for (int64_t r = 0; r < count; ++r) {
        const int64_t head = kv_head * group + r % group;
        float* out = job.out + ((tile.first + r / group) * job.heads + head) * job.dim;
        for (int64_t d = 0; d < job.dim; ++d) out[d] = work.sums[r * dim + d] / work.rows[r].total;
    }
}

// Long tiles first within an entry: the short ones fill the gaps at the end. Returns the tokens seen, at most.
template <class Stored>
int64_t cut_queries(const Job<Stored>& job, std::vector<QueryTile>& tiles) {
    int64_t seen = 0;
    const int64_t most = std::max<int64_t>(1, kTileRows / job.group());
    tiles.clear();
    for (int64_t entry = 0; entry < job.entries; ++entry) {
        const int64_t begin = job.query_starts[entry], end = job.query_starts[entry + 1];
        for (int64_t last = end; last > begin; last -= std::min(most, last - begin)) {
            const int64_t first = std::max(begin, last - most);
            tiles.push_back({entry, first, last - first, job.context_lens[entry] - (end - first)});
        }
        seen += (end - begin) * job.context_lens[entry];
    }
    return seen;
}

template <class Stored>
void attend_all(const Job<Stored>& job, int threads) {
    thread_local std::vector<QueryTile> own_tiles;
    std::vector<QueryTile>& tiles = own_tiles;  // this thread's, for the whole team
    const bool parallel = cut_queries(job, tiles) * job.heads * job.dim > kParallelWork;
    if (tiles.size() == 1) {  // nobody else reads what its queries write
        parallel_for(parallel ? threads : 1, job.kv_heads, 1, [&](int64_t kv_head) {
            write_tokens(job, kv_head, 0, job.tokens);
            attend_tile(job, tiles[0], kv_head);
        });
        return;
    }
    const int64_t work = static_cast<int64_t>(tiles.size()) * job.kv_heads;
    const int64_t size = std::max<int64_t>(1, std::min(kWriteTokens, job.tokens * job.kv_heads / (4 * threads)));
    const int64_t units = (job.tokens + size - 1) / size * job.kv_heads;
    const bool writes_much = job.tokens * job.heads * job.dim > kParallelFloats;
    parallel_for(writes_much ? threads : 1, units, even_chunk(threads, units), [&](int64_t unit) {
        const int64_t begin = unit / job.kv_heads * size;
        write_tokens(job, unit % job.kv_heads, begin, std::min(begin + size, job.tokens));
    });
    parallel_for(parallel ? threads : 1, work, 1, [&](int64_t unit) {
        attend_tile(job, tiles[unit / job.kv_heads], unit % job.kv_heads);
    });
}

}  // namespace

void attend(Attention attention, int threads) {
    attention.tables += attention.table * attention.table_size;
    attention.slot_mapping += attention.table * attention.tokens;
    if (attention.scales)
        attend_all(Job<int8_t>(attention), threads);
    else
        attend_all(Job<float>(attention), threads);
}

}  // namespace inflight

// Queries, keys and values [tokens][...], in rows `stride` floats apart, are overwritten where there is something to
// prepare. Keys and values are null if this step's are in the cache.
extern "C" void inflight_attend(const inflight::Heads* heads, const inflight::Step* step, float* query, float* key,
                                float* value, int64_t stride, float* out, int threads) {
    const int64_t dim = heads->dim;
    inflight::attend({*heads, *step, {query, stride, dim}, {key, stride, dim}, {value, stride, dim}, out}, threads);
}
