// Attention over pages: a block of queries of one row against the row's keys, in blocks of keys
// with a running maximum and sum (Dao et al. 2022, https://arxiv.org/abs/2205.14135). A decode is
// a block of one query; query heads that share a key head are further queries of the same product.
//
// The order of additions is a property of the query: blocks and parts of a context begin at fixed
// keys, and a part that another thread has computed is merged by the same code.
#pragma once

#include <cmath>

#include "attention_products.h"
#include "attention_sums.h"
#include "attention_work.h"
#include "pages.h"

constexpr int MAX_GROUP_SIZE = 128;  // query heads that can share a key head
constexpr int MAX_QUERIES = std::max(QUERY_BLOCK, MAX_GROUP_SIZE);
// Panels that a decode multiplies at a time. If the next block is prefetched in bursts, more bursts
// read memory more evenly.
inline const int DECODE_KEY_PANELS = PREFETCHES_BLOCK ? KEY_PANELS : 2;
constexpr float LOWEST = -3e38f;  // below every score

// A thread's memory for a block of queries.
template <class E>
struct Scratch {
    typedef typename E::Stored Stored;
    typedef typename E::Passed Passed;
    alignas(64) Passed queries[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) Passed weights[MAX_QUERIES * KEY_BLOCK];
    alignas(64) float scores[MAX_QUERIES * KEY_BLOCK];
    alignas(64) float sums[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) Stored gathered[KEY_PANELS * 2 * LANES * MAX_HEAD_DIM];
    // For each query: the running maximum, the factor for earlier sums, the sum of the weights by
    // lane.
    alignas(64) float max_score[MAX_QUERIES], scale[MAX_QUERIES + LANES];
    Floats total[MAX_QUERIES];
    // The same of all earlier parts of the context.
    alignas(64) float merged_sums[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) float merged_max[MAX_QUERIES], merged_total[MAX_QUERIES];
    float part_total[MAX_QUERIES];
    PrefetchPace pace;
};

template <class E>
struct Attend {
    typedef typename E::Stored Stored;
    typedef typename E::Passed Passed;

    // Keys `key` to `key + keys` of a row, in `count` panels. bytes: the panels in 8 bits.
    struct KeyBlock {
        const Stored* panels[KEY_PANELS] = {};
        const int8_t* bytes[KEY_PANELS] = {};
        long key = 0, keys = 0;
        int count = 0;
    };

    const Program& program;
    const Step& step;
    const Op& op;
    const AttentionWork& work;
    Pages<E> pages;

    Attend(const Program& program, const Step& step, const Op& op, const AttentionWork& work)
        : program(program), step(step), op(op), work(work), pages(program, step, op.layer) {}

    long count() const { return long(work.items.size()) * program.kv_heads; }

    // Adds the first keys and values of piece i, if it exists, to the memory to prefetch.
    void add_first_reads(long i, PrefetchQueue& queue) const {
        if (i >= count() || !pages.direct()) return;
        KeyBlock block = key_block(item_of(i), i % program.kv_heads, item_of(i).key_begin);
        for (int p = 0; p < std::min(block.count, DECODE_KEY_PANELS); p++)
            queue.add(block.panels[p], block.panels[p] + pages.panel_size());
    }

    // Computes piece i. next: the piece that this thread computes afterwards, or -1.
    void piece(long i, long next, Scratch<E>& s) const {
        const Item& item = item_of(i);
        long kv_head = i % program.kv_heads;
        auto compute = [&]() INLINED {
            // Queries of several rows see all keys of their item.
            if (!attend(item, kv_head, next, false, s) && item.sharer < 0)
                attend_to_seen(item, kv_head, s);
        };
        if (PREFETCHES_SLOWLY && item.count == 1)
            s.pace.measure((item.key_end - item.key_begin) / KEY_BLOCK, compute);
        else
            compute();
    }

  private:
    // Attends, and returns whether the results are finite. Keys that a query does not see have weight 0,
    // and the products read their values: keys behind a query, before its window, and behind the end of
    // the row, where a page has what an earlier request has left. only_seen: one query; what it does not
    // see is replaced by zeros, as 0 times NaN is NaN.
    bool attend(const Item& item, long kv_head, long next, bool only_seen, Scratch<E>& s) const {
        long rows = item.count * program.heads / program.kv_heads;
        load_queries(item, kv_head, s);
        bool first = true;  // block of its part
        bool is_finite = true;
        long part = 0;
        KeyBlock block = key_block(item, kv_head, item.key_begin), after;
        for (; block.count; block = after) {
            long end = block.key + block.keys;
            if (end < item.key_end)
                after = key_block(item, kv_head, end);
            else if (next >= 0)
                after = key_block(item_of(next), next % program.kv_heads, item_of(next).key_begin);
            else
                after = KeyBlock();
            if (first)
                for (long r = 0; r < rows; r++) s.max_score[r] = LOWEST, s.total[r] = Floats{};
            add_block(item, kv_head, block, after, int(rows), first, only_seen, s);
            first = end % PART_KEYS == 0;
            if (end == item.key_end) break;
            if (first) is_finite &= end_part(item, kv_head, rows, part++, s);
        }
        return is_finite & (item.part < 0 ? store_output(item, kv_head, part, s)
                                          : store_part(item, kv_head, part, s));
    }

    // Attends again, each query by itself and only to what it sees. In 8 bits no value is NaN, and its
    // scale is not applied to a weight of 0.
    void attend_to_seen(const Item& item, long kv_head, Scratch<E>& s) const {
        if (program.int8_pages) return;
        for (long q = 0; q < item.count; q++) {
            Item one = item;
            one.token += q, one.position += q, one.output += q, one.count = 1;
            one.key_end = std::min(item.key_end, end_of_seen(one.position, item.key_end));
            attend(one, kv_head, -1, true, s);
        }
    }

    void load_queries(const Item& item, long kv_head, Scratch<E>& s) const {
        long group_size = program.heads / program.kv_heads;
        const Passed* from = (const Passed*)step.buffers[op.input];
        for (long q = 0; q < item.count; q++)
            memcpy(s.queries + q * group_size * program.padded_dim,
                   from + work.token_of(item, q) * step.strides[op.input] +
                       kv_head * group_size * program.padded_dim,
                   group_size * program.padded_dim * sizeof(Passed));
    }

    // Adds a block of keys to the sums, and prefetches the one after it.
    void add_block(const Item& item, long kv_head, KeyBlock& block, const KeyBlock& after, int rows,
                   bool first, bool only_seen, Scratch<E>& s) const {
        if (!pages.direct() || only_seen) assemble(item, kv_head, block, s);
        const KeyBlock* next = prefetches_in_products(item, block, after) ? &after : nullptr;
        int width = item.count == 1 ? DECODE_KEY_PANELS : KEY_PANELS;
        for (int p = 0; p < KEY_PANELS; p += width) {
            if (!next) prefetch_half(item, after, KEYS, p, p + width, s);
            score(block, p, std::min(p + width, block.count), rows, next, s);
        }
        if (!next) prefetch_half(item, after, VALUES, 0, 1, s);
        softmax(item, kv_head, block, rows, first, s);
        for (int p = 0; p < KEY_PANELS; p += width) {
            if (!next) prefetch_half(item, after, VALUES, std::max(p, 1), p + width, s);
            add_values(block, p, std::min(p + width, block.count), rows, !first || p > 0, next, s);
        }
    }

    // Sets the part that ends aside, and leaves the sums to the next part. Returns false where they are
    // known not to be finite.
    bool end_part(const Item& item, long kv_head, long rows, long part, Scratch<E>& s) const {
        if (item.part >= 0) return store_part(item, kv_head, part, s);
        if (part > 0) {
            merge_part(rows, s);
        } else {
            sum_totals(rows, s.merged_total, s);
            memcpy(s.merged_max, s.max_score, rows * sizeof(float));
            memcpy(s.merged_sums, s.sums, rows * program.padded_dim * sizeof(float));
        }
        return true;
    }

    static void sum_totals(long rows, float* to, Scratch<E>& s) {
        for (long r = 0; r < rows; r++) to[r] = sum(s.total[r]);
    }

    // Adds the last part to the earlier ones.
    void merge_part(long rows, Scratch<E>& s) const {
        sum_totals(rows, s.part_total, s);
        merge({s.merged_max, s.merged_total, s.merged_sums}, {s.max_score, s.part_total, s.sums},
              rows, program.padded_dim);
    }

    // Returns the end of the keys that the query at `position` sees. end: that of the row's keys.
    long end_of_seen(long position, long end) const {
        if (!program.bidirectional) return position + 1;
        return op.window ? position + op.window : end;
    }

    const Item& item_of(long piece) const { return work.items[piece / program.kv_heads]; }

    KeyBlock key_block(const Item& item, long kv_head, long key) const {
        KeyBlock block;
        block.key = key;
        block.keys = std::min((key / KEY_BLOCK + 1) * KEY_BLOCK, item.key_end) - key;
        block.count = int((block.keys + LANES - 1) / LANES);
        for (int i = 0; i < block.count; i++) {
            long key_of_panel = key + i * LANES;
            if (pages.direct())
                block.panels[i] = pages.panel(item.row, key_of_panel, kv_head);
            else if (program.int8_pages)
                block.bytes[i] = pages.int8_panel(item.row, key_of_panel, kv_head);
        }
        return block;
    }

    // Whether the products of a block prefetch the next block line by line: in a decode, if both
    // blocks have as many panels, and no product reads the values of a panel in part.
    bool prefetches_in_products(const Item& item, const KeyBlock& block,
                                const KeyBlock& after) const {
        bool alike = block.count == after.count && program.padded_dim / LANES % block.count == 0;
        return PREFETCHES_BLOCK && item.count == 1 && alike && pages.direct();
    }

    // The prefetches of the product with panels `first` to `first + width` of keys.
    Prefetch prefetch_keys(const KeyBlock& next, int first, int width) const {
        Prefetch prefetch;
        for (int p = 0; p < width; p++) prefetch.lines[p] = (const char*)next.panels[first + p];
        return prefetch;
    }

    // The prefetches of the product with columns `first` to `first + width` of values, 16 each.
    Prefetch prefetch_values(const KeyBlock& next, int first, int width) const {
        Prefetch prefetch;
        long columns = program.padded_dim / LANES, bytes = pages.panel_bytes() / 2;
        for (int p = 0; p < width; p++) {
            long column = (first + p) * next.count;  // in units of a panel's 16 values
            const char* values = (const char*)next.panels[column / columns] + bytes;
            prefetch.lines[p] = values + column % columns * (bytes / columns);
        }
        return prefetch;
    }

    enum Half { KEYS, VALUES };

    // Prefetches half of panels `from` to `to` of the next block, if pages hold panels. Not all at
    // once, as this block needs buffers as well. A prompt prefetches nothing: earlier queries have
    // read the same keys.
    void prefetch_half(const Item& item, const KeyBlock& after, Half half, int from, int to,
                       const Scratch<E>& s) const {
        if (item.count > 1 && !item.reads_first) return;
        long bytes = pages.panel_bytes() / 2;
        for (int p = from; p < std::min(to, after.count); p++) {
            // A panel in 8 bits is read more slowly than memory gives it, as it is widened.
            const char* panel = (const char*)after.panels[p];
            bool is_slow = PREFETCHES_SLOWLY && panel;
            if (!panel) panel = (const char*)after.bytes[p];
            const char *begin = panel + half * bytes, *end = begin + bytes;
            if (is_slow)
                s.pace.prefetch(begin, end);
            else if (panel)
                prefetch_lines(begin, end);
        }
    }

    // Assembles panels of keys and values that cannot be multiplied in place, or have more than the
    // item's first query sees. Pages before its window may be those of other requests.
    void assemble(const Item& item, long kv_head, KeyBlock& block, Scratch<E>& s) const {
        long begin = op.window ? std::max(0L, item.position + 1 - op.window) : 0;
        long end = block.key + block.keys;
        for (int i = 0; i < block.count; i++) {
            Stored* to = s.gathered + i * pages.panel_size();
            long key = block.key + i * LANES;
            if (block.bytes[i])
                pages.widen_panel(to, block.bytes[i]);
            else if (!pages.direct())
                pages.gather(to, item.row, key, begin, end, kv_head);
            else if (begin > key || end < key + LANES)
                pages.copy_seen(to, block.panels[i], begin - key, end - key);
            else
                continue;
            block.panels[i] = to;
        }
    }

    // scores[row][key] = query x key of panels `from` to `to`, without the key's scale. next: a block
    // to prefetch, or null.
    void score(const KeyBlock& block, int from, int to, int rows, const KeyBlock* next,
               Scratch<E>& s) const {
        int depth = int(program.padded_dim / E::PACK);
        for (int i = from, width; i < to; i += width) {
            width = panels_at_once(rows, to - i);
            Segment segment;
            for (int p = 0; p < width; p++)
                segment.panels[p] = (const uint32_t*)block.panels[i + p];
            Prefetch prefetch = next ? prefetch_keys(*next, i, width) : Prefetch();
            products<E>(width, rows, s.scores + i * LANES, KEY_BLOCK, (const uint32_t*)s.queries,
                        depth * E::TERMS, &segment, 1, depth, LANES, false, &prefetch);
        }
    }

    Floats key_scales(const KeyBlock& block, int i) const {
        return load<Floats>(pages.scales(block.bytes[i]));
    }
    Floats value_scales(const KeyBlock& block, int i) const {
        return load<Floats>(pages.scales(block.bytes[i]) + LANES);
    }

    // Turns scores into weights e^(score - running maximum), and rescales earlier sums to match.
    void softmax(const Item& item, long kv_head, const KeyBlock& block, long rows, bool first,
               Scratch<E>& s) const {
        long seen = end_of_seen(item.position, block.key + block.keys) - block.key;
        bool all_seen = std::min(seen, block.keys) >= block.count * LANES &&
                        (!op.window || item.position + item.count - op.window <= block.key);
        if (program.int8_pages) scale_scores(block, rows, s);
        if (op.softcap) cap_scores(block, rows, s);
        if (op.position_bias) add_biases(item, kv_head, block, rows, s);
        if (!all_seen) mask(item, block, rows, s);
        int plain = all_seen ? block.count : 0;
        if (plain == KEY_PANELS)
            softmax_block<KEY_PANELS>(block, rows, first, s);
        else if (plain == 2)
            softmax_block<2>(block, rows, first, s);
        else
            softmax_block<0>(block, rows, first, s);
    }

    void scale_scores(const KeyBlock& block, long rows, Scratch<E>& s) const {
        for (int i = 0; i < block.count; i++) {
            Floats scales = key_scales(block, i);
            for (long r = 0; r < rows; r++) {
                float* scores = s.scores + r * KEY_BLOCK + i * LANES;
                store(scores, load<Floats>(scores) * scales);
            }
        }
    }

    void cap_scores(const KeyBlock& block, long rows, Scratch<E>& s) const {
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < block.count; i++) {
                float* scores = s.scores + r * KEY_BLOCK + i * LANES;
                store(scores, soft_cap(load<Floats>(scores), float(op.softcap)));
            }
    }

    void add_biases(const Item& item, long kv_head, const KeyBlock& block, long rows,
                    Scratch<E>& s) const {
        long group_size = program.heads / program.kv_heads;
        for (long r = 0; r < rows; r++) {
            long head = kv_head * group_size + r % group_size;
            long distance = block.key - work.position_of(item, r / group_size);
            const float* biases = op.position_bias + head * op.bias_stride + distance;
            for (int i = 0; i < block.count; i++) {
                float* scores = s.scores + r * KEY_BLOCK + i * LANES;
                store(scores, load<Floats>(scores) + load<Floats>(biases + i * LANES));
            }
        }
    }

    // Masks the keys after a query, unless it sees them, outside of its window, or after the last key.
    void mask(const Item& item, const KeyBlock& block, long rows, Scratch<E>& s) const {
        long group_size = program.heads / program.kv_heads;
        for (long r = 0; r < rows; r++) {
            long position = item.position + r / group_size;
            long seen = end_of_seen(position, block.key + block.keys) - block.key;
            long unseen = position + 1 - block.key - op.window;
            unseen = op.window ? std::min(unseen, block.count * long(LANES)) : 0;
            for (long i = 0; i < unseen; i++) s.scores[r * KEY_BLOCK + i] = -INFINITY;
            for (long i = std::max(0L, std::min(seen, block.keys)); i < block.count * LANES; i++)
                s.scores[r * KEY_BLOCK + i] = -INFINITY;
        }
    }

    // PANELS: number of panels, without masks; 0: any panels.
    template <int PANELS>
    void softmax_block(const KeyBlock& block, long rows, bool first, Scratch<E>& s) const {
        constexpr bool PLAIN = PANELS > 0;
        const int count = PLAIN ? PANELS : block.count;
        for (long r = 0; r < rows; r++) {
            const float* scores = s.scores + r * KEY_BLOCK;
            Floats maxima = s.max_score[r];
            for (int i = 0; i < count; i++) maxima = max(maxima, load<Floats>(scores + i * LANES));
            float new_max = max_lane(maxima);
            s.scale[r] = s.max_score[r] - new_max;
            s.max_score[r] = new_max;
        }
        for (long r = 0; r < rows; r += LANES)
            store(s.scale + r, exp(load<Floats>(s.scale + r)));
        for (long r = 0; r < rows; r++) {
            const float* scores = s.scores + r * KEY_BLOCK;
            Floats total = {}, max_score = s.max_score[r];
            for (int i = 0; i < count; i++) {
                Floats score = load<Floats>(scores + i * LANES), w = E::softmax_exp(score - max_score);
                if (!PLAIN) w = select(score == -INFINITY, 0.0f, w);
                total += w;
                if (block.bytes[i]) {
                    w = w * value_scales(block, i);
                    if (!PLAIN) w = select(score == -INFINITY, 0.0f, w);
                }
                narrow(s.weights + r * KEY_BLOCK + i * LANES, w);
            }
            s.total[r] = s.total[r] * s.scale[r] + total;
            float* sums = s.sums + r * program.padded_dim;
            if (!first && s.scale[r] != 1)
                for (long d = 0; d < program.padded_dim; d += LANES)
                    store(sums + d, load<Floats>(sums + d) * s.scale[r]);
        }
    }

    // sums[row] (+)= weights x values of panels `from` to `to`. next: as in `score`.
    void add_values(const KeyBlock& block, int from, int to, int rows, bool add,
                    const KeyBlock* next, Scratch<E>& s) const {
        if (from >= to) return;
        int dim = int(program.padded_dim), depth = LANES / E::PACK;
        for (int d = 0, width; d < dim / LANES; d += width) {
            width = panels_at_once(rows, dim / LANES - d);
            Segment segment[KEY_PANELS];
            for (int i = from; i < to; i++)
                for (int p = 0; p < width; p++)
                    segment[i - from].panels[p] =
                        (const uint32_t*)(block.panels[i] + LANES * dim) + (d + p) * LANES;
            Prefetch prefetch = next ? prefetch_values(*next, d, width) : Prefetch();
            products<E>(width, rows, s.sums + d * LANES, dim,
                        (const uint32_t*)(s.weights + from * LANES),
                        KEY_BLOCK / E::PACK * E::TERMS, segment, to - from, depth, dim, add,
                        &prefetch);
        }
    }

    // Writes the results, and returns whether they are finite. part: number of parts before the last one.
    bool store_output(const Item& item, long kv_head, long part, Scratch<E>& s) const {
        long group_size = program.heads / program.kv_heads, dim = program.head_dim;
        long rows = item.count * group_size;
        if (part > 0) merge_part(rows, s);
        bool is_finite = true;
        for (long r = 0; r < rows; r++) {
            long head = kv_head * group_size + r % group_size, first = r * program.padded_dim;
            Passed* to = (Passed*)step.buffers[op.output] + head * dim +
                         (item.output + r / group_size) * step.strides[op.output];
            const float* sink = op.sinks ? op.sinks + head : nullptr;
            is_finite &= part > 0 ? write_mean(to, s.merged_max[r], s.merged_total[r],
                                               s.merged_sums + first, sink, dim)
                                  : write_mean(to, s.max_score[r], sum(s.total[r]), s.sums + first,
                                               sink, dim);
        }
        return is_finite;
    }

    // Sets a part aside, and returns whether it is finite.
    bool store_part(const Item& item, long kv_head, long part, Scratch<E>& s) const {
        long group_size = program.heads / program.kv_heads, dim = program.padded_dim;
        Floats zeros = {};
        for (long r = 0; r < item.count * group_size; r++) {
            long number = work.part_of(item, r / group_size, part);
            float* to = step.parts + number * AttentionWork::part_floats(program) +
                        (kv_head * group_size + r % group_size) * (dim + 2);
            to[0] = s.max_score[r], to[1] = sum(s.total[r]);
            memcpy(to + 2, s.sums + r * dim, dim * sizeof(float));
            for (long d = 0; d < dim; d += LANES) zeros += zeros_of(load<Floats>(to + 2 + d));
        }
        return all_finite(zeros);
    }
};

// Combines the parts of a head of a split row.
template <class E>
void combine(const Program& program, const Step& step, const Op& op, const SplitRow& row,
             long head) {
    typedef typename E::Passed Passed;
    long size = AttentionWork::part_floats(program), dim = program.padded_dim;
    float* part = step.parts + row.first_part * size + head * (dim + 2);
    alignas(64) float values[MAX_HEAD_DIM], max_score[LANES] = {part[0]}, other_max[LANES] = {};
    float total = part[1];
    memcpy(values, part + 2, dim * sizeof(float));
    for (long i = 1; i < row.parts; i++) {
        part += size;
        other_max[0] = part[0];
        merge({max_score, &total, values}, {other_max, part + 1, part + 2}, 1, dim);
    }
    Passed* to = (Passed*)step.buffers[op.output] + row.output * step.strides[op.output];
    write_mean(to + head * program.head_dim, max_score[0], total, values,
               op.sinks ? op.sinks + head : nullptr, program.head_dim);
}
