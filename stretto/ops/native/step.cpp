// The ends of a step: from rows to their tokens (ops/bind.py), and from sampled ids to what the step proved
// (ops/commit.py). Whole numbers, so they equal their references bit for bit.
#include "threads.h"

#include <algorithm>

namespace {

// Columns of the slot table, as wire.Int numbers them.
enum Column { LEN, KNOWN, NDRAFT, LIMIT, GOAL, DONE, EPOCH };
constexpr int32_t GENERATE = 0;

}  // namespace

// As in step.py.
struct Table {
    int32_t *ints;  // [columns, slots]
    int64_t slots;
    int32_t *log;  // [slots, context]
    int64_t context;
};

struct Bound {  // what `bind` makes; R rows
    int64_t *slots;                      // [R]
    int32_t *q_len, *base, *kv_len, *n_out;  // [R]
    int32_t *cu_q, *cu_out;              // [R + 1]
};

struct Judged {  // what `judge` makes; R rows
    uint8_t *live, *done;
    int64_t *ids;  // [R, width]
    int32_t *n_new, *accepted, *known, *length, *ndraft;
};

// rows [R, 3]: slot, epoch, cap.
EXPORT void row_lengths(const Table *table, const int32_t *rows, int64_t count, const Bound *to) {
    const int32_t *ints = table->ints;
    to->cu_q[0] = to->cu_out[0] = 0;
    for (int64_t r = 0; r < count; ++r) {
        const int64_t slot = rows[3 * r];
        auto column = [&](Column c) { return ints[c * table->slots + slot]; };
        const int32_t base = column(LEN), known = column(KNOWN);
        const bool live = column(EPOCH) == rows[3 * r + 1] && column(DONE) == 0;
        int32_t q = std::min({rows[3 * r + 2], known - base + column(NDRAFT), column(LIMIT) - 1 - base});
        q = live ? std::max(q, 0) : 0;
        const int32_t n_out = live && column(GOAL) == GENERATE ? std::max(base + q - known + 1, 0) : 0;
        to->slots[r] = slot;
        to->base[r] = base;
        to->q_len[r] = q;
        to->kv_len[r] = base + q;
        to->n_out[r] = n_out;
        to->cu_q[r + 1] = to->cu_q[r] + q;
        to->cu_out[r + 1] = to->cu_out[r] + n_out;
    }
}

// The tokens of rows and their sampled positions; cells [groups][tokens], page tables [groups] of [slots, width].
EXPORT void spread_rows(const Table *table, const Bound *of, int64_t count, int64_t groups,
                        const int32_t *const *page_tables, int64_t table_stride, int64_t page_size, int64_t *ids,
                        int64_t *positions, int64_t *token_rows, int64_t *cells, int64_t *out_tokens,
                        int64_t *out_rows) {
    const int64_t tokens = of->cu_q[count];
    for (int64_t r = 0; r < count; ++r) {
        const int64_t slot = of->slots[r];
        for (int64_t t = of->cu_q[r], p = of->base[r]; t < of->cu_q[r + 1]; ++t, ++p) {
            ids[t] = table->log[slot * table->context + p];
            positions[t] = p;
            token_rows[t] = r;
            for (int64_t g = 0; g < groups; ++g)
                cells[g * tokens + t] =
                    int64_t(page_tables[g][slot * table_stride + p / page_size]) * page_size + p % page_size;
        }
        for (int64_t o = of->cu_out[r]; o < of->cu_out[r + 1]; ++o) {
            out_tokens[o] = of->cu_q[r + 1] - of->cu_out[r + 1] + o;
            out_rows[o] = r;
        }
    }
}

EXPORT void judge_rows(const Table *table, const Bound *of, int64_t count, const int64_t *sampled,
                       const int32_t *stops, int64_t n_stops, int64_t width, const Judged *to) {
    for (int64_t r = 0; r < count; ++r) {
        const int64_t slot = of->slots[r];
        auto column = [&](Column c) { return table->ints[c * table->slots + slot]; };
        const int32_t n_out = of->n_out[r], known = column(KNOWN);
        const int64_t *mine = sampled + of->cu_out[r];
        const int32_t *log = table->log + slot * table->context, *stop = stops + slot * n_stops;
        for (int64_t o = 0; o < width; ++o) to->ids[r * width + o] = o < n_out ? mine[o] : -1;
        int32_t n_new = n_out > 0;
        while (n_new > 0 && n_new < n_out && mine[n_new - 1] == log[known + n_new - 1]) ++n_new;
        bool stopped = false;
        for (int32_t i = 0; i < n_new && !stopped; ++i)
            if (std::find(stop, stop + n_stops, mine[i]) != stop + n_stops) {
                stopped = true;
                n_new = i + 1;
            }
        const int32_t length = n_out > 0 ? known + n_new - 1 : of->base[r] + of->q_len[r];
        to->live[r] = of->q_len[r] > 0;
        to->n_new[r] = n_new;
        to->accepted[r] = std::max(n_new - 1, 0);
        to->known[r] = known + n_new;
        to->length[r] = length;
        to->ndraft[r] = n_out > 0 ? 0 : column(NDRAFT);
        to->done[r] = n_out > 0 ? stopped || known + n_new >= column(LIMIT)
                                : column(GOAL) != GENERATE && length == known;
    }
}

EXPORT void commit_rows(const Table *table, const int64_t *slots, int64_t count, int64_t width, const Judged *of) {
    for (int64_t r = 0; r < count; ++r) {
        if (!of->live[r]) continue;
        const int64_t slot = slots[r];
        int32_t *log = table->log + slot * table->context + of->known[r] - of->n_new[r];
        for (int32_t i = 0; i < of->n_new[r]; ++i) log[i] = int32_t(of->ids[r * width + i]);
        auto put = [&](Column c, int32_t value) { table->ints[c * table->slots + slot] = value; };
        put(KNOWN, of->known[r]);
        put(LEN, of->length[r]);
        put(NDRAFT, of->ndraft[r]);
        put(DONE, of->done[r]);
    }
}
