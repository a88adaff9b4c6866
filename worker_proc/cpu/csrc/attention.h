// Attention over pages: a block of queries of one row against the row's keys, in blocks of keys
// with a running maximum and sum (Dao et al. 2022, https://arxiv.org/abs/2205.14135). A decode is
// a block of one query; the query heads that share a key head are more queries of the same product.
#pragma once

#include <cmath>

#include "attention_work.h"
#include "pages.h"
#include "tile.h"

constexpr int MAX_SHARED = 128;  // query heads that may share a key head
constexpr int MAX_QUERIES = std::max(QUERY_BLOCK, MAX_SHARED);
// Of one query. Where the next block is fetched in goes, memory is read the more evenly the smaller
// the blocks are.
inline const int KEY_PANELS_OF_ONE = PREFETCHES_WAIT ? KEY_PANELS : 2;
constexpr float LOWEST = -3e38f;  // below every score

// One thread's memory for one block of queries.
template <class E>
struct Scratch {
    typedef typename E::Stored Stored;
    typedef typename E::Passed Passed;
    alignas(64) Passed queries[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) Passed weights[MAX_QUERIES * KEY_BLOCK];
    alignas(64) float scores[MAX_QUERIES * KEY_BLOCK];
    alignas(64) float sums[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) Stored gathered[KEY_PANELS * 2 * LANES * MAX_HEAD_DIM];
    // Of each query: its greatest score so far, what that makes of earlier sums, the sum of its
    // weights, lane by lane.
    alignas(64) float most[MAX_QUERIES], scale[MAX_QUERIES + LANES];
    Floats total[MAX_QUERIES];
};

// out[rows][panels * 16] (+)= a x stretches, for any number of rows and panels. ahead: null, or what
// is fetched meanwhile.
template <class E, int ROWS, int PANELS>
void product(float* out, long out_stride, const uint32_t* a, long a_stride, const Stretch* stretch,
             int stretches, int depth, long step, bool add, const Ahead* ahead) {
    Floats acc[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            acc[r][p] = add ? load<Floats>(out + r * out_stride + p * LANES) : Floats{};
    multiply<E, ROWS, PANELS>(acc, Rows{a, a_stride}, stretch, stretches, depth, step,
                              ahead ? *ahead : Ahead());
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}

template <class E, int PANELS, int... ROWS>
auto product_of_rows(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr decltype(&product<E, 1, PANELS>) all[] = {product<E, ROWS + 1, PANELS>...};
    return all[rows - 1];
}

template <class E>
auto choose_product(int rows, int panels) {
    typedef std::make_integer_sequence<int, TILE_ROWS<E>> Rows;
    if (panels == 1) return product_of_rows<E, 1>(rows, Rows());
    if (panels == TILE_PANELS) return product_of_rows<E, TILE_PANELS>(rows, Rows());
    return product_of_rows<E, WIDE_PANELS>(rows, std::make_integer_sequence<int, FEW_ROWS>());
}

// How many of these panels a product takes at a time.
inline int panels_at_once(int rows, int panels) {
    return rows <= FEW_ROWS && panels >= WIDE_PANELS ? WIDE_PANELS : std::min(TILE_PANELS, panels);
}

template <class E>
void products(int panels, int rows, float* out, long out_stride, const uint32_t* a, long a_stride,
              const Stretch* stretch, int stretches, int depth, long step, bool add,
              const Ahead* ahead) {
    int tiles = (rows + TILE_ROWS<E> - 1) / TILE_ROWS<E>;
    for (int t = 0; t < tiles; t++) {
        int row = t * rows / tiles, count = (t + 1) * rows / tiles - row;
        choose_product<E>(count, panels)(out + row * out_stride, out_stride, a + row * a_stride,
                                         a_stride, stretch, stretches, depth, step, add,
                                         t == 0 ? ahead : nullptr);
    }
}

template <class E>
struct Attend {
    typedef typename E::Stored Stored;
    typedef typename E::Passed Passed;

    // Keys `key` to `key + keys` of a row, in `count` panels. bytes: of panels in 8 bits.
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

    // The first keys and values of a piece, if there is one of that number.
    void fetch(long i, Coming& coming) const {
        if (i >= count() || !pages.direct()) return;
        KeyBlock block = find(item_of(i), i % program.kv_heads, item_of(i).key_begin);
        for (int p = 0; p < block.count; p++)
            coming.add(block.panels[p], block.panels[p] + pages.panel_size());
    }

    // `next`: the piece that this thread computes after this one, -1 for none.
    void piece(long i, long next, Scratch<E>& s) const {
        const Item& item = item_of(i);
        long kv_head = i % program.kv_heads, rows = item.count * program.heads / program.kv_heads;
        take_queries(item, kv_head, s);
        for (long r = 0; r < rows; r++) s.most[r] = LOWEST, s.total[r] = Floats{};
        long size = block_size(item);
        KeyBlock block = find(item, kv_head, item.key_begin), after;
        for (long key = item.key_begin; key < item.key_end; key += size, block = after) {
            if (key + size < item.key_end)
                after = find(item, kv_head, key + size);
            else if (next >= 0)
                after = find(item_of(next), next % program.kv_heads, item_of(next).key_begin);
            else
                after = KeyBlock();
            if (!pages.direct()) put_together(item, kv_head, block, s);
            const KeyBlock* next = evenly(item, block, after) ? &after : nullptr;
            if (!next) bring(item, after, KEYS, 0, KEY_PANELS_OF_ONE);
            score(block, int(rows), next, s);
            if (!next) bring(item, after, VALUES, 0, 1);
            weigh(item, block, rows, key == item.key_begin, s);
            if (!next) bring(item, after, VALUES, 1, KEY_PANELS_OF_ONE);
            add_values(block, int(rows), key != item.key_begin, next, s);
        }
        item.part < 0 ? put(item, kv_head, s) : put_part(item, kv_head, s);
    }

  private:
    void take_queries(const Item& item, long kv_head, Scratch<E>& s) const {
        long shared = program.heads / program.kv_heads, bytes = program.dim * sizeof(Passed);
        const Passed* from = (const Passed*)step.buffers[op.input];
        for (long q = 0; q < item.count; q++)
            memcpy(s.queries + q * shared * program.dim,
                   from + (item.token + q) * step.strides[op.input] +
                       kv_head * shared * program.dim,
                   shared * bytes);
    }

    static long block_size(const Item& item) {
        return item.count == 1 ? KEY_PANELS_OF_ONE * LANES : KEY_BLOCK;
    }

    const Item& item_of(long piece) const { return work.items[piece / program.kv_heads]; }

    KeyBlock find(const Item& item, long kv_head, long key) const {
        KeyBlock block;
        block.key = key, block.keys = std::min(block_size(item), item.key_end - key);
        block.count = int((block.keys + LANES - 1) / LANES);
        for (int i = 0; i < block.count; i++) {
            long at = key + i * LANES;
            if (pages.direct())
                block.panels[i] = pages.panel(item.row, at, kv_head);
            else if (program.int8_pages)
                block.bytes[i] = pages.int8_panel(item.row, at, kv_head);
        }
        return block;
    }

    // Whether the products of a block fetch the next block meanwhile, line by line: a decode's, where
    // each finds as many keys or values there as it reads itself, and the values that it reads of
    // one panel do not end within another.
    bool evenly(const Item& item, const KeyBlock& block, const KeyBlock& after) const {
        bool alike = block.count == after.count && program.dim / LANES % block.count == 0;
        return PREFETCHES_WAIT && item.count == 1 && alike && pages.direct();
    }

    // What the product of panels `first` to `first + wide` of keys fetches.
    Ahead keys_of(const KeyBlock& next, int first, int wide) const {
        Ahead ahead;
        for (int p = 0; p < wide; p++) ahead.lines[p] = (const char*)next.panels[first + p];
        return ahead;
    }

    // What the product of columns `first` to `first + wide` of values, 16 each, fetches.
    Ahead values_of(const KeyBlock& next, int first, int wide) const {
        Ahead ahead;
        long columns = program.dim / LANES, bytes = pages.panel_bytes() / 2;
        for (int p = 0; p < wide; p++) {
            long column = (first + p) * next.count;  // as the values of a panel are counted
            const char* values = (const char*)next.panels[column / columns] + bytes;
            ahead.lines[p] = values + column % columns * (bytes / columns);
        }
        return ahead;
    }

    enum Half { KEYS, VALUES };

    // Fetch half of panels `from` to `to` of the block that comes next, where pages hold panels.
    // Not all at once: what is left of this block has to come through as well. Of a prompt nothing:
    // the queries before these have read the same keys.
    void bring(const Item& item, const KeyBlock& after, Half half, int from, int to) const {
        if (item.count > 1) return;
        long bytes = pages.panel_bytes() / 2;
        for (int p = from; p < std::min(to, after.count); p++) {
            const char* panel = (const char*)after.panels[p];
            if (!panel) panel = (const char*)after.bytes[p];
            if (panel) fetch_lines(panel + half * bytes, panel + (half + 1) * bytes);
        }
    }

    // Panels of keys and values that cannot be multiplied where they lie.
    void put_together(const Item& item, long kv_head, KeyBlock& block, Scratch<E>& s) const {
        for (int i = 0; i < block.count; i++) {
            Stored* to = s.gathered + i * pages.panel_size();
            if (block.bytes[i])
                pages.take_wide(to, block.bytes[i]);
            else
                pages.gather(to, item.row, block.key + i * LANES, block.key + block.keys, kv_head);
            block.panels[i] = to;
        }
    }

    // scores[row][key] = query x key, but for the key's scale. next: a block to fetch, or null.
    void score(const KeyBlock& block, int rows, const KeyBlock* next, Scratch<E>& s) const {
        int depth = int(program.dim / E::PACK);
        for (int i = 0, wide; i < block.count; i += wide) {
            wide = panels_at_once(rows, block.count - i);
            Stretch stretch;
            for (int p = 0; p < wide; p++)
                stretch.panels[p] = (const uint32_t*)block.panels[i + p];
            Ahead ahead = next ? keys_of(*next, i, wide) : Ahead();
            products<E>(wide, rows, s.scores + i * LANES, KEY_BLOCK, (const uint32_t*)s.queries,
                        depth * E::TERMS, &stretch, 1, depth, LANES, false, &ahead);
        }
    }

    Floats key_scales(const KeyBlock& block, int i) const {
        return load<Floats>(pages.scales(block.bytes[i]));
    }
    Floats value_scales(const KeyBlock& block, int i) const {
        return load<Floats>(pages.scales(block.bytes[i]) + LANES);
    }

    // Scores to weights e^(score - greatest so far); what was added up so far is scaled to match.
    void weigh(const Item& item, const KeyBlock& block, long rows, bool first,
               Scratch<E>& s) const {
        bool all_seen = item.position + 1 - block.key >= block.count * LANES;
        if (program.int8_pages) scale_scores(block, rows, s);
        if (!all_seen) hide(item, block, rows, s);
        int plain = all_seen && !program.int8_pages ? block.count : 0;
        if (plain == KEY_PANELS)
            weigh_block<KEY_PANELS>(block, rows, first, s);
        else if (plain == 2)
            weigh_block<2>(block, rows, first, s);
        else
            weigh_block<0>(block, rows, first, s);
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

    // Of the keys that come after a query, or after the last key.
    void hide(const Item& item, const KeyBlock& block, long rows, Scratch<E>& s) const {
        long shared = program.heads / program.kv_heads;
        for (long r = 0; r < rows; r++) {
            long seen = item.position + r / shared + 1 - block.key;
            for (long i = std::max(0L, std::min(seen, block.keys)); i < block.count * LANES; i++)
                s.scores[r * KEY_BLOCK + i] = -INFINITY;
        }
    }

    // PANELS: so many, none of them hidden or with scales; 0: any.
    template <int PANELS>
    void weigh_block(const KeyBlock& block, long rows, bool first, Scratch<E>& s) const {
        constexpr bool PLAIN = PANELS > 0;
        const int count = PLAIN ? PANELS : block.count;
        for (long r = 0; r < rows; r++) {
            const float* scores = s.scores + r * KEY_BLOCK;
            Floats most = s.most[r];
            for (int i = 0; i < count; i++) most = max(most, load<Floats>(scores + i * LANES));
            float now = greatest(most);
            s.scale[r] = s.most[r] - now;
            s.most[r] = now;
        }
        for (long r = 0; r < rows; r += LANES)
            store(s.scale + r, exp(load<Floats>(s.scale + r)));
        for (long r = 0; r < rows; r++) {
            const float* scores = s.scores + r * KEY_BLOCK;
            Floats total = {}, most = s.most[r];
            for (int i = 0; i < count; i++) {
                Floats score = load<Floats>(scores + i * LANES), w = E::power(score - most);
                if (!PLAIN) w = select(score == -INFINITY, 0.0f, w);
                total += w;
                if (!PLAIN && block.bytes[i]) w *= value_scales(block, i);
                narrow(s.weights + r * KEY_BLOCK + i * LANES, w);
            }
            s.total[r] = s.total[r] * s.scale[r] + total;
            float* sums = s.sums + r * program.dim;
            if (!first && s.scale[r] != 1)
                for (long d = 0; d < program.dim; d += LANES)
                    store(sums + d, load<Floats>(sums + d) * s.scale[r]);
        }
    }

    // sums[row] (+)= weights x values. next: as in `score`.
    void add_values(const KeyBlock& block, int rows, bool add, const KeyBlock* next,
                    Scratch<E>& s) const {
        int dim = int(program.dim), depth = LANES / E::PACK;
        for (int d = 0, wide; d < dim / LANES; d += wide) {
            wide = panels_at_once(rows, dim / LANES - d);
            Stretch stretch[KEY_PANELS];
            for (int i = 0; i < block.count; i++)
                for (int p = 0; p < wide; p++)
                    stretch[i].panels[p] =
                        (const uint32_t*)(block.panels[i] + LANES * dim) + (d + p) * LANES;
            Ahead ahead = next ? values_of(*next, d, wide) : Ahead();
            products<E>(wide, rows, s.sums + d * LANES, dim, (const uint32_t*)s.weights,
                        KEY_BLOCK / E::PACK * E::TERMS, stretch, block.count, depth, dim, add, &ahead);
        }
    }

    void put(const Item& item, long kv_head, Scratch<E>& s) const {
        long shared = program.heads / program.kv_heads, dim = program.head_dim;
        for (long r = 0; r < item.count * shared; r++) {
            long row = item.output + r / shared;
            Passed* to = (Passed*)step.buffers[op.output] + row * step.strides[op.output] +
                         (kv_head * shared + r % shared) * dim;
            float scale = 1 / sum(s.total[r]);
            for (long d = 0; d < dim; d += LANES)
                narrow_some(to + d, load<Floats>(s.sums + r * program.dim + d) * scale, dim - d);
        }
    }

    void put_part(const Item& item, long kv_head, Scratch<E>& s) const {
        long shared = program.heads / program.kv_heads, dim = program.dim;
        for (long r = 0; r < shared; r++) {
            float* to = step.parts + item.part * AttentionWork::part_floats(program) +
                        (kv_head * shared + r) * (dim + 2);
            to[0] = s.most[r], to[1] = sum(s.total[r]);
            memcpy(to + 2, s.sums + r * dim, dim * sizeof(float));
        }
    }
};

// Head `head` of split row `row`: its parts together.
template <class E>
void combine(const Program& program, const Step& step, const Op& op, const SplitRow& row, long head) {
    typedef typename E::Passed Passed;
    long size = AttentionWork::part_floats(program), dim = program.head_dim;
    const float* parts = step.parts + row.first_part * size + head * (program.dim + 2);
    float most = -INFINITY, total = 0;
    for (long i = 0; i < row.parts; i++) most = std::max(most, parts[i * size]);
    for (long i = 0; i < row.parts; i++) total += parts[i * size + 1] * std::exp(parts[i * size] - most);
    Passed* to = (Passed*)step.buffers[op.output] + row.output * step.strides[op.output] + head * dim;
    for (long d = 0; d < dim; d += LANES) {
        Floats v = {};
        for (long i = 0; i < row.parts; i++)
            v += load<Floats>(parts + i * size + 2 + d) * (std::exp(parts[i * size] - most) / total);
        narrow_some(to + d, v, dim - d);
    }
}
