// Ragged paged attention: every row of a step in one call, whatever its queries, by lengths read from the step.
//
// A line is a query and one of the G heads that share a KV head. The cells of a row are cut into spans that stand at
// fixed positions; in a span a line finds its largest score m, the sum l of exp(score - m) and the values weighted so;
// spans are folded together in their order (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
//
//     cells of a row     | span 0: 0 .. 255 | span 1: 256 .. 511 | span 2 ... kv_len |        fold: 0, then 1, then 2
//     work               (row, KV heads, up to 72 lines); each span by itself where that is too little for the threads
//
// So what a line becomes depends on its position and on the cells it sees: not on the lines, rows and chunks beside it,
// on the pages, or on the threads. A score is four sums, of every fourth feature, added up in pairs; keys of 16 cells
// are laid out so that a vector holds four features of four cells. Weighted sums have features as lanes and go over
// the cells one after another.
#include "heads.h"

#include <algorithm>
#include <memory>
#include <vector>

using namespace stretto;

namespace {

constexpr int SPAN = 256;   // cells
constexpr int LINES = 72;   // of a piece of work
constexpr int WIDE = 4;     // lines that are computed together
constexpr int SPANS = 16;   // of a thread, whose results wait to be folded
constexpr float NOTHING = -3.4e38f;

}  // namespace

// As in attention.py.
struct Layer {
    const void *k, *v;
    const uint8_t *k_scales, *v_scales;  // of e4m3 cells: biased exponents, a byte a head
    int64_t page_stride, cell_stride;  // elements; heads lie side by side
    int64_t page_size;
    int32_t heads, kv_heads, head_dim, window;  // window 0: none
    float scale, softcap;                       // softcap 0: none
    int32_t kind;                               // of cells: 0 float32, 1 bfloat16, 2 e4m3
};

struct Step {
    const int32_t *q_len, *starts, *base;
    const int64_t *slots;
    const int32_t *table;  // [slots, width]
    int64_t table_stride, width, rows, tokens;
};

namespace {

// ----------------------------------------------------------------------------------------------------- cells of a row
// Where cell p of a row lies in the cache, in elements; and in the scales, which are [cells, Hkv] without gaps.
struct Places {
    int64_t at[SPAN];
    int64_t number[SPAN];

    Places(const Layer &layer, const Step &step, int64_t row, int64_t first, int64_t end) {
        const int32_t *pages = step.table + step.slots[row] * step.table_stride;
        int64_t page = first / layer.page_size, offset = first % layer.page_size;
        for (int64_t i = 0; i < end - first; ++i) {
            const int64_t held = pages[std::min(page, step.width - 1)];
            at[i] = held * layer.page_stride + offset * layer.cell_stride;
            number[i] = held * layer.page_size + offset;
            if (++offset == layer.page_size) offset = 0, ++page;
        }
    }
};

// Cells of one KV head as floats.
template <class T>
struct Cells {
    const T *cache;

    Cells(const Layer &layer, const void *cache, const uint8_t *, int64_t head)
        : cache(static_cast<const T *>(cache) + head * layer.head_dim) {}
    float scale(const Places &, int64_t) const { return 1; }
    Floats read(const Places &places, int64_t cell, float, int64_t feature, int64_t count) const {
        return load(cache + places.at[cell] + feature, count);
    }
};

// Times a power of two for each cell.
template <>
struct Cells<e4m3> {
    const e4m3 *cache;
    const uint8_t *scales;
    int64_t head, heads;

    Cells(const Layer &layer, const void *cache, const uint8_t *scales, int64_t head)
        : cache(static_cast<const e4m3 *>(cache) + head * layer.head_dim), scales(scales), head(head),
          heads(layer.kv_heads) {}
    float scale(const Places &places, int64_t cell) const {
        return power_of_two(scales[places.number[cell] * heads + head]);
    }
    Floats read(const Places &places, int64_t cell, float scale, int64_t feature, int64_t count) const {
        return load(cache + places.at[cell] + feature, count) * scale;
    }
};

// ------------------------------------------------------------------------------------------------------------ scores
// Four rows of four blocks of four numbers: block j of x[i] goes to block i of x[j].
inline void turn(Floats x[4]) {
    const auto low = [](Floats a, Floats b) {
        return picked<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b);
    };
    const auto high = [](Floats a, Floats b) {
        return picked<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b);
    };
    const auto even = [](Floats a, Floats b) {
        return picked<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b);
    };
    const auto odd = [](Floats a, Floats b) {
        return picked<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
    };
    const Floats a = low(x[0], x[1]), b = low(x[2], x[3]), c = high(x[0], x[1]), d = high(x[2], x[3]);
    x[0] = even(a, b);
    x[1] = odd(a, b);
    x[2] = even(c, d);
    x[3] = odd(c, d);
}

// Of x[c], four cells' sums of four: the sums of all of them, [16 cells].
inline Floats joined(const Floats x[4]) {
    const auto pairs = [](Floats a, Floats b) {
        return picked<0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30>(a, b) +
               picked<1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31>(a, b);
    };
    const Floats c = pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));  // cell 4 j + i at 4 i + j
    return picked<0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15>(c, c);
}

// Keys of the cells from .. from + 15 of a span as [features / 4][4][16]: four features of four cells in a vector.
template <class T>
void turn_keys(const Cells<T> &keys, const Places &places, int64_t skipped, int64_t from, int64_t to, int64_t features,
               float *turned) {
    for (int64_t four = 0; four < LANES; four += 4)
        for (int64_t feature = 0; feature < features; feature += LANES) {
            Floats x[4] = {};
            for (int64_t i = 0; i < 4; ++i) {
                const int64_t cell = from + four + i;
                if (cell >= skipped && cell < to)
                    x[i] = keys.read(places, cell - skipped, keys.scale(places, cell - skipped), feature,
                                     features - feature);
            }
            turn(x);
            for (int64_t i = 0; i < 4; ++i) store(turned + (feature / 4 + i) * 4 * LANES + four / 4 * LANES, x[i]);
        }
}

// Four numbers, four times: those from 4 FOUR on.
template <int FOUR>
inline Floats four_of(Floats x) {
    constexpr int A = 4 * FOUR, B = A + 1, C = A + 2, D = A + 3;
    return picked<A, B, C, D, A, B, C, D, A, B, C, D, A, B, C, D>(x, x);
}

// scores [.][SPAN] of N lines for 16 cells; queries [.][features, zeros up to a multiple of 16].
template <int N>
void score(const float *queries, int64_t features, const float *turned, float *scores) {
    Floats made[N][4];
    for (int i = 0; i < N; ++i)
        for (int c = 0; c < 4; ++c) made[i][c] = Floats{};
    for (int64_t d = 0; d < features; d += LANES) {
        Floats q[N];
        for (int i = 0; i < N; ++i) q[i] = load(queries + i * features + d);
        const auto take = [&](auto four) {
            for (int i = 0; i < N; ++i) {
                const Floats repeated = four_of<four()>(q[i]);
                for (int c = 0; c < 4; ++c)
                    made[i][c] = fma(repeated, load(turned + (d + 4 * four() + c) * LANES), made[i][c]);
            }
        };
        take(std::integral_constant<int, 0>{});
        take(std::integral_constant<int, 1>{});
        take(std::integral_constant<int, 2>{});
        take(std::integral_constant<int, 3>{});
    }
    for (int i = 0; i < N; ++i) store(scores + i * SPAN, joined(made[i]));
}

// Of VECTORS times 16 features from one on; where that is not FULL, there are only `count`.
template <int N, int VECTORS, bool FULL, class T>
void weigh(const Cells<T> &values, const Places &places, int64_t skipped, int64_t from, int64_t to, int64_t feature,
           int64_t count, const float *weights, float *out, int64_t padded) {
    Floats made[N][VECTORS];
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < VECTORS; ++j) made[i][j] = load(out + i * padded + feature + j * LANES);
    for (int64_t cell = from; cell < to; ++cell) {
        const float scale = values.scale(places, cell - skipped);
        Floats v[VECTORS];
        for (int j = 0; j < VECTORS; ++j)
            v[j] = values.read(places, cell - skipped, scale, feature + j * LANES,
                               FULL ? LANES : std::max<int64_t>(count - j * LANES, 0));
        for (int i = 0; i < N; ++i) {
            const Floats p = all(weights[i * SPAN + cell]);
            for (int j = 0; j < VECTORS; ++j) made[i][j] = fma(p, v[j], made[i][j]);
        }
    }
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < VECTORS; ++j) store(out + i * padded + feature + j * LANES, made[i][j]);
}

template <int N, class T>
void weigh_all(const Cells<T> &values, const Places &places, int64_t skipped, int64_t from, int64_t to,
               int64_t features, const float *weights, float *out, int64_t padded) {
    int64_t at = 0;
    for (; features - at >= 4 * LANES; at += 4 * LANES)
        weigh<N, 4, true>(values, places, skipped, from, to, at, 4 * LANES, weights, out, padded);
    if (features - at > 2 * LANES)
        weigh<N, 4, false>(values, places, skipped, from, to, at, features - at, weights, out, padded);
    else if (features > at)
        weigh<N, 2, false>(values, places, skipped, from, to, at, features - at, weights, out, padded);
}

// -------------------------------------------------------------------------------------------------------- a span
// What lines have found: in one span, or in all up to one.
struct Found {
    float *most, *total, *out;  // [lines], [lines], [lines][padded]
};

// What attending to a span works on: lines of one head after those of another.
struct Work {
    float *queries, *scores, *turned;  // [lines][filled], [lines][SPAN], [filled / 4][4][16]
};

struct Sizes {
    int64_t filled, padded;  // features up to a multiple of 16, and of 64

    explicit Sizes(const Layer &layer)
        : filled((layer.head_dim + LANES - 1) / LANES * LANES),
          padded((layer.head_dim + 4 * LANES - 1) / (4 * LANES) * (4 * LANES)) {}
    size_t found(int64_t lines) const { return lines * (padded + 2); }
    size_t work() const { return LINES * filled + LINES * SPAN + filled * LANES; }
    Work work_at(float *memory) const {
        return {memory, memory + LINES * filled, memory + LINES * (filled + SPAN)};
    }
    Found at(float *memory, int64_t lines) const { return {memory, memory + lines, memory + 2 * lines}; }
};

// Lines of a row: the same of each of some KV heads.
struct Piece {
    int64_t row, head, heads, first, lines;  // `first` and `lines` of a head's q * G
    int64_t base, from, end;                 // position of the row's first query; cells that some line sees
    int64_t all() const { return heads * lines; }
    int64_t spans() const { return (end + SPAN - 1) / SPAN - from / SPAN; }
};

// The cells of a span that a piece sees, counted from the span's first.
struct Part {
    int64_t origin, from, to;

    Part(const Piece &piece, int64_t span)
        : origin(span * SPAN), from(std::max<int64_t>(piece.from - origin, 0)),
          to(std::min<int64_t>(piece.end - origin, SPAN)) {}
};

// Head after head for 16 cells, which lie side by side in memory.
template <class T>
void score_part(const Layer &layer, const Piece &piece, const Places &places, const Part &part, const Work &work) {
    const Sizes sizes(layer);
    for (int64_t block = part.from / LANES * LANES; block < part.to; block += LANES)
        for (int64_t h = 0; h < piece.heads; ++h) {
            const Cells<T> keys(layer, layer.k, layer.k_scales, piece.head + h);
            turn_keys(keys, places, part.from, block, part.to, layer.head_dim, work.turned);
            for (int64_t i = 0; i < piece.lines; i += WIDE) {
                const float *q = work.queries + (h * piece.lines + i) * sizes.filled;
                float *s = work.scores + (h * piece.lines + i) * SPAN + block;
                switch (std::min<int64_t>(piece.lines - i, WIDE)) {
                    case 1: score<1>(q, sizes.filled, work.turned, s); break;
                    case 2: score<2>(q, sizes.filled, work.turned, s); break;
                    case 3: score<3>(q, sizes.filled, work.turned, s); break;
                    default: score<4>(q, sizes.filled, work.turned, s);
                }
            }
        }
}

// Scores become weights: exp(score - the line's largest), and 0 where the line sees nothing.
void weights_of(const Layer &layer, const Piece &piece, const Part &part, float *scores, const Found &found) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t group = layer.heads / layer.kv_heads, begin = part.from / LANES * LANES;
    for (int64_t i = 0; i < piece.all(); ++i) {
        const int64_t position = piece.base + (piece.first + i % piece.lines) / group - part.origin;
        const int64_t low = layer.window ? std::max(position - layer.window + 1, part.from) : part.from;
        const int32_t last = int32_t(std::min(position, part.to - 1)), oldest = int32_t(std::min<int64_t>(low, SPAN));
        float *line = scores + i * SPAN;
        Floats most = all(NOTHING);
        for (int64_t c = begin; c < part.to; c += LANES) {
            Floats s = load(line + c) * layer.scale;
            if (layer.softcap != 0) s = layer.softcap * hyperbolic_tangent(s / layer.softcap);
            const Ints cell = lanes + int32_t(c);
            s = ((cell >= oldest) & (cell <= last)) ? s : all(NOTHING);
            store(line + c, s);
            most = larger(most, s);
        }
        const float m = largest(most);
        Floats total{};
        for (int64_t c = begin; c < part.to; c += LANES) {
            const Ints cell = lanes + int32_t(c);
            const Floats p = ((cell >= oldest) & (cell <= last)) ? exponential(load(line + c) - m) : Floats{};
            store(line + c, p);
            total += p;
        }
        found.most[i] = m;
        found.total[i] = sum(total);
    }
}

// found.out = weights times values. Several heads take turns, 16 cells each: their sums rest in memory meanwhile.
template <class T>
void weigh_part(const Layer &layer, const Piece &piece, const Places &places, const Part &part, const Work &work,
                const Found &found) {
    const int64_t padded = Sizes(layer).padded, step = piece.heads > 1 ? LANES : SPAN;
    std::memset(found.out, 0, piece.all() * padded * sizeof *found.out);
    for (int64_t block = part.from / LANES * LANES; block < part.to; block += step) {
        const int64_t from = std::max(block, part.from), to = std::min(block + step, part.to);
        for (int64_t h = 0; h < piece.heads; ++h) {
            const Cells<T> values(layer, layer.v, layer.v_scales, piece.head + h);
            auto weigh = [&](auto count, int64_t line) {
                weigh_all<count()>(values, places, part.from, from, to, layer.head_dim, work.scores + line * SPAN,
                                   found.out + line * padded, padded);
            };
            for (int64_t i = 0; i < piece.lines; i += WIDE) {
                const int64_t line = h * piece.lines + i;
                switch (std::min<int64_t>(piece.lines - i, WIDE)) {
                    case 1: weigh(std::integral_constant<int, 1>{}, line); break;
                    case 2: weigh(std::integral_constant<int, 2>{}, line); break;
                    case 3: weigh(std::integral_constant<int, 3>{}, line); break;
                    default: weigh(std::integral_constant<int, 4>{}, line);
                }
            }
        }
    }
}

// Never inlined, as `fold`: the same instructions wherever it is called from.
template <class T>
__attribute__((noinline)) void attend_span(const Layer &layer, const Step &step, const Piece &piece, int64_t span,
                                           const Work &work, const Found &found) {
    const Part part(piece, span);
    const Places places(layer, step, piece.row, part.origin + part.from, part.origin + part.to);
    score_part<T>(layer, piece, places, part, work);
    weights_of(layer, piece, part, work.scores, found);
    weigh_part<T>(layer, piece, places, part, work, found);
}

// `sum` of all spans so far and that of one more. A line that sees nothing of it stays as it is.
__attribute__((noinline)) void fold(int64_t lines, int64_t padded, const Found &sum, const Found &more) {
    for (int64_t i = 0; i < lines; ++i) {
        if (more.most[i] == NOTHING) continue;
        const float most = std::max(sum.most[i], more.most[i]);
        const Floats both = exponential(Floats{sum.most[i] - most, more.most[i] - most});
        const float old = both[0], fresh = both[1];
        sum.total[i] = sum.total[i] * old + more.total[i] * fresh;
        for (int64_t d = 0; d < padded; d += LANES) {
            const Floats a = load(sum.out + i * padded + d), b = load(more.out + i * padded + d);
            store(sum.out + i * padded + d, fma(b, all(fresh), a * old));
        }
        sum.most[i] = most;
    }
}

// A thread's own memory, which grows to what it is asked for.
class Memory {
    std::unique_ptr<float[]> held;
    size_t size = 0;

public:
    float *of(size_t floats) {
        if (size < floats) {
            size = 0;
            held.reset();
            held.reset(new float[floats]);
            size = floats;
        }
        return held.get();
    }
};

thread_local Memory scratch, results;

template <class Q>
void read_queries(const Layer &layer, const Step &step, const Piece &piece, const Q *q, int64_t q_stride,
                  float *queries) {
    const int64_t group = layer.heads / layer.kv_heads, features = layer.head_dim, filled = Sizes(layer).filled;
    for (int64_t i = 0; i < piece.all(); ++i) {
        const int64_t line = piece.first + i % piece.lines, head = piece.head + i / piece.lines;
        const int64_t token = step.starts[piece.row] + line / group;
        const Q *from = q + token * q_stride + (head * group + line % group) * features;
        for (int64_t d = 0; d < features; d += LANES) store(queries + i * filled + d, load(from + d, features - d));
    }
}

// out = sum / its total, the sinks in it: one logit a head that takes part and gives nothing.
template <class Q>
void write_out(const Layer &layer, const Step &step, const Piece &piece, const Found &sum, int64_t padded,
               const float *sinks, Q *out) {
    const int64_t group = layer.heads / layer.kv_heads, features = layer.head_dim;
    for (int64_t i = 0; i < piece.all(); ++i) {
        const int64_t line = piece.first + i % piece.lines;
        const int64_t head = (piece.head + i / piece.lines) * group + line % group;
        float factor = 1, total = sum.total[i];
        if (sinks != nullptr) {
            const float most = std::max(sum.most[i], sinks[head]);
            const Floats both = exponential(Floats{sum.most[i] - most, sinks[head] - most});
            factor = both[0];
            total = total * factor + both[1];
        }
        const float scale = factor / total;
        Q *to = out + ((step.starts[piece.row] + line / group) * layer.heads + head) * features;
        for (int64_t d = 0; d < features; d += LANES)
            store(to + d, load(sum.out + i * padded + d) * scale, features - d);
    }
}

// Heads of a row with few queries stay together, since their cells lie together.
std::vector<Piece> pieces_of(const Layer &layer, const Step &step) {
    const int64_t group = layer.heads / layer.kv_heads;
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < step.rows; ++row) {
        const int64_t all = step.q_len[row] * group, base = step.base[row];
        if (!all) continue;
        const int64_t together = std::min<int64_t>(std::max<int64_t>(LINES / all, 1), layer.kv_heads);
        for (int64_t head = 0; head < layer.kv_heads; head += together)
            for (int64_t first = 0; first < all; first += LINES) {
                const int64_t lines = std::min<int64_t>(LINES, all - first);
                const int64_t oldest = base + first / group, newest = base + (first + lines - 1) / group;
                const int64_t from = layer.window ? std::max<int64_t>(oldest - layer.window + 1, 0) : 0;
                pieces.push_back({row, head, std::min(together, layer.kv_heads - head), first, lines, base, from,
                                  newest + 1});
            }
    }
    return pieces;
}

template <class Q, class T>
void attend_piece(const Layer &layer, const Step &step, const Piece &piece, const Q *q, int64_t q_stride,
                  const float *sinks, Q *out) {
    const Sizes sizes(layer);
    const int64_t lines = piece.all(), found = sizes.found(lines);
    float *memory = scratch.of(sizes.work() + 2 * found);
    const Work work = sizes.work_at(memory);
    memory += sizes.work();
    const Found sum = sizes.at(memory, lines), more = sizes.at(memory + found, lines);
    read_queries(layer, step, piece, q, q_stride, work.queries);
    const int64_t first = piece.from / SPAN, end = (piece.end + SPAN - 1) / SPAN;
    attend_span<T>(layer, step, piece, first, work, sum);
    for (int64_t span = first + 1; span < end; ++span) {
        attend_span<T>(layer, step, piece, span, work, more);
        fold(piece.all(), sizes.padded, sum, more);
    }
    write_out(layer, step, piece, sum, sizes.padded, sinks, out);
}

struct Span {
    int64_t piece, number;
    bool first;  // of its piece
};

std::vector<Span> spans_of(const std::vector<Piece> &pieces) {
    std::vector<Span> spans;
    for (size_t i = 0; i < pieces.size(); ++i) {
        const int64_t first = pieces[i].from / SPAN;
        for (int64_t s = first; s * SPAN < pieces[i].end; ++s) spans.push_back({int64_t(i), s, s == first});
    }
    return spans;
}

// Each span by itself, a piece's first one into what becomes its sum; then the folds. Some spans at a time, so that
// memory depends on the threads and not on how long the rows are:
//
//     results of the calling thread     | sum of each piece, fewer than 4 a thread | SPANS a thread, to be folded |
template <class Q, class T>
void attend_spans(const Layer &layer, const Step &step, const std::vector<Piece> &pieces, const Q *q, int64_t q_stride,
                  const float *sinks, Q *out, int threads) {
    const Sizes sizes(layer);
    const std::vector<Span> spans = spans_of(pieces);
    int64_t lines = 0;
    for (const Piece &piece : pieces) lines = std::max(lines, piece.all());
    const int64_t all = int64_t(spans.size()), count = int64_t(pieces.size()), found = sizes.found(lines);
    const int64_t some = std::min<int64_t>(all, SPANS * threads);
    std::vector<int64_t> starts(count + 1);  // of a piece's spans
    for (int64_t p = 0; p < count; ++p) starts[p + 1] = starts[p] + pieces[p].spans();
    float *sums = results.of((count + some) * found), *more = sums + count * found;
    for (int64_t from = 0; from < all; from += some) {
        auto result = [&](int64_t i) {
            return sizes.at(spans[i].first ? sums + spans[i].piece * found : more + (i - from) * found,
                            pieces[spans[i].piece].all());
        };
        const int64_t end = std::min(from + some, all);
        for_each(end - from, threads, [&](int64_t i) {
            const Piece &piece = pieces[spans[from + i].piece];
            const Work work = sizes.work_at(scratch.of(sizes.work()));
            read_queries(layer, step, piece, q, q_stride, work.queries);
            attend_span<T>(layer, step, piece, spans[from + i].number, work, result(from + i));
        });
        const int64_t first = spans[from].piece, last = spans[end - 1].piece;
        for_each(last + 1 - first, threads, [&](int64_t i) {
            const int64_t p = first + i, lines = pieces[p].all();
            const Found sum = sizes.at(sums + p * found, lines);
            for (int64_t s = std::max(from, starts[p] + 1); s < std::min(end, starts[p + 1]); ++s)
                fold(lines, sizes.padded, sum, result(s));
        });
    }
    for (int64_t i = 0; i < count; ++i)
        write_out(layer, step, pieces[i], sizes.at(sums + i * found, pieces[i].all()), sizes.padded, sinks, out);
}

template <class Q, class T>
void attend(const Layer &layer, const Step &step, const Q *q, int64_t q_stride, const float *sinks, Q *out,
            int threads) {
    const std::vector<Piece> pieces = pieces_of(layer, step);
    const int64_t width = layer.heads * layer.head_dim, used = step.starts[step.rows];
    std::memset(out + used * width, 0, (step.tokens - used) * width * sizeof(Q));
    if (threads > 1 && int64_t(pieces.size()) < 4 * threads) {
        attend_spans<Q, T>(layer, step, pieces, q, q_stride, sinks, out, threads);
        return;
    }
    for_each(int64_t(pieces.size()), threads,
             [&](int64_t i) { attend_piece<Q, T>(layer, step, pieces[i], q, q_stride, sinks, out); });
}

template <class Q>
void attend_cells(const Layer &layer, const Step &step, const void *q, int64_t q_stride, const float *sinks, void *out,
                  int threads) {
    const Q *from = static_cast<const Q *>(q);
    Q *to = static_cast<Q *>(out);
    if (layer.kind == 0)
        attend<Q, float>(layer, step, from, q_stride, sinks, to, threads);
    else if (layer.kind == 1)
        attend<Q, bfloat16>(layer, step, from, q_stride, sinks, to, threads);
    else
        attend<Q, e4m3>(layer, step, from, q_stride, sinks, to, threads);
}

}  // namespace

// q [T, H, D], whose tokens lie `q_stride` apart -> out [T, H, D] without gaps, zeros for tokens of no row; float32, or
// with `half` bfloat16. sinks [H] or null.
EXPORT int attend_rows(const Layer *layer, const Step *step, const void *q, int64_t q_stride, const float *sinks,
                       void *out, int half, int threads) {
    return code_of([&] {
        if (half)
            attend_cells<bfloat16>(*layer, *step, q, q_stride, sinks, out, threads);
        else
            attend_cells<float>(*layer, *step, q, q_stride, sinks, out, threads);
    });
}

// The same of heads as they were projected, x [T, H + 2 Hkv, D]: q is normed and rotated in place, keys and values are
// written, then attended to.
EXPORT int attend_projected(const Layer *layer, const Step *step, const Heads *heads, void *x, int64_t x_stride,
                            const float *sinks, void *out, int half, int threads) {
    rotate(*heads, step->tokens, x, x_stride, x, x_stride, half, threads);
    return attend_rows(layer, step, x, x_stride, sinks, out, half, threads);
}
