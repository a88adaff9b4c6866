// The work items of a step's attention: blocks of queries; parts of long contexts if there are few rows;
// parts that several rows have in common.
#pragma once

#include <algorithm>
#include <vector>

#include "program.h"
#include "simd.h"

// Queries times the query heads that share a key head: their scratch fits in the first-level cache
// beside a block of keys and values.
constexpr int QUERY_BLOCK = 24;
constexpr int KEY_PANELS = 4, KEY_BLOCK = KEY_PANELS * LANES;
// A context is added up block by block, and part by part. Both begin at multiples of their sizes, so
// that a query has the same bits whatever else is in the step, and however many threads compute it.
constexpr int PART_KEYS = 8 * KEY_BLOCK;

// Queries of tokens `token` to `token + count`, all of one row and the first at `position`, against
// keys `key_begin` to `key_end`. Results begin at row `output`.
// part: number under which the first part is stored if the context is split, or -1.
// sharer: the first of `count` entries of AttentionWork::sharers, if the queries are those of several
// rows with the same keys, or -1. Token, position and part are then those of each row.
// reads_first: no item before it has read its keys, so that they are worth a prefetch.
struct Item {
    long row, token, position, count, output, key_begin, key_end, part, sharer = -1;
    bool reads_first = false;
};

// A row whose context is split, for COMBINE.
struct SplitRow {
    long output, first_part, parts;
};

// Row and position of a token of the step.
struct TokenPosition {
    long row, position;
};

struct AttentionWork {
    std::vector<Item> items;
    std::vector<SplitRow> split;

    // Work for every token of the step. window: as in Op.
    AttentionWork(const Program& program, const Step& step, long window)
        : program(program), step(step), window(window) {
        long token = 0;
        std::vector<Tokens> all;
        for (long row = 0; row < step.row_count; token += step.num_tokens[row], row++)
            all.push_back({row, token, step.computed[row], step.num_tokens[row], token});
        add(all, step.row_count);
    }

    // Work for the sampled tokens, whose outputs are contiguous. positions: [tokens].
    AttentionWork(const Program& program, const Step& step, long window,
                  const std::vector<TokenPosition>& positions)
        : program(program), step(step), window(window) {
        std::vector<Tokens> all;
        for (long i = 0; i < step.sampled_count; i++) {
            long token = step.sampled[i];
            all.push_back({positions[token].row, token, positions[token].position, 1, i});
        }
        add(all, step.sampled_count);
    }

    // Floats of a part of a row: for each query head a maximum, a sum, and undivided values.
    static long part_floats(const Program& program) {
        return program.heads * (program.padded_dim + 2);
    }

    long token_of(const Item& item, long query) const {
        return item.sharer < 0 ? item.token + query : sharers[item.sharer + query].token;
    }
    long position_of(const Item& item, long query) const {
        return item.sharer < 0 ? item.position + query : sharers[item.sharer + query].position;
    }
    // The number under which part i of an item is stored for a query.
    long part_of(const Item& item, long query, long i) const {
        return item.part + i + (item.sharer < 0 ? 0 : sharers[item.sharer + query].first_part);
    }

  private:
    // Tokens of a row of the step: `count` from `token` on, the first at `position`.
    // first_part: number of the row's first part if its context is split, or -1.
    // shared: how many of its parts, from the first on, are in items with other rows.
    struct Tokens {
        long row, token, position, count, output, first_part = -1, shared = 0;
    };
    typedef std::vector<Tokens*>::iterator Single;

    const Program& program;
    const Step& step;
    const long window;
    long parts = 0;
    std::vector<Tokens> sharers;

    long group_size() const { return program.heads / program.kv_heads; }

    // Returns the first key that a query at `position` sees, or up to 15 keys earlier: the first of
    // a panel.
    long first_key(long position) const {
        return window ? std::max(0L, position + 1 - window) / LANES * LANES : 0;
    }

    // Returns the end of the keys that the first `count` tokens of a text of `n` see.
    long last_key(long count, long n) const {
        return window ? std::min(n, count - 1 + window) : n;
    }

    // rows: number of rows of the step.
    void add(std::vector<Tokens>& all, long rows) {
        std::vector<Tokens*> single;
        for (Tokens& tokens : all)
            if (tokens.count == 1) single.push_back(&tokens);
        if (!window && !program.bidirectional) share(single.begin(), single.end(), 0);
        for (Tokens& tokens : all) add(tokens, rows);
    }

    void add(const Tokens& tokens, long rows) {
        if (tokens.count == 1 && split_context(tokens, rows)) return;
        long block = std::max<long>(1, QUERY_BLOCK / group_size());
        for (long q = 0; q < tokens.count; q += block) {
            long count = std::min(block, tokens.count - q), position = tokens.position;
            long seen = program.bidirectional ? last_key(q + count, tokens.count) : q + count;
            items.push_back({tokens.row, tokens.token + q, position + q, count, tokens.output + q,
                             first_key(position + q), position + seen, -1});
        }
    }

    // Adds items for the parts of the context of a single query, such that each thread has several
    // pieces if there are few rows. Returns false if there is no reason or no room for that.
    bool split_context(Tokens tokens, long rows) {
        long position = tokens.position, first = first_key(position);
        long begin = first / PART_KEYS, count = position / PART_KEYS + 1 - begin;
        long pieces = 4 * step.threads / (rows * program.kv_heads) + 1;
        long parts_a_piece = (count - tokens.shared + pieces - 1) / pieces;
        if (tokens.shared == 0) {
            if (parts_a_piece == count || !has_room(count)) return false;
            tokens.first_part = parts;
            parts += count;
        }
        split.push_back({tokens.output, tokens.first_part, count});
        for (long i = tokens.shared; i < count; i += parts_a_piece)
            items.push_back({tokens.row, tokens.token, position, 1, tokens.output,
                             std::max(first, (begin + i) * PART_KEYS),
                             std::min((begin + i + parts_a_piece) * PART_KEYS, position + 1),
                             tokens.first_part + i});
        return true;
    }

    bool has_room(long count) const {
        return (parts + count) * part_floats(program) <= step.part_floats;
    }

    // Adds items for the parts, from `part` on, that several of the rows have in common, as forks and
    // requests with the same system prompt do: their pages are the same ones. A part is read once for
    // up to 24 queries, and the parts of a row are combined as if threads had shared it out, so that its
    // bits are the same.
    void share(Single begin, Single end, long part) {
        if (QUERY_BLOCK / group_size() < 2) return;
        end = std::partition(begin, end, [&](Tokens* row) { return has_whole(*row, part); });
        std::sort(begin, end, [&](Tokens* a, Tokens* b) { return compare(*a, *b, part) < 0; });
        for (Single first = begin, last; first < end; first = last) {
            last = std::find_if(first + 1, end, [&](Tokens* row) { return compare(**first, *row, part); });
            if (last - first < 2 || !take_parts(first, last)) continue;
            long after = part;
            do
                add_shared(first, last, after++);
            while (std::all_of(first, last, [&](Tokens* row) {
                return has_whole(*row, after) && !compare(**first, *row, after);
            }));
            for (Single row = first; row < last; row++) (*row)->shared = after;
            share(first, last, after);
        }
    }

    // Whether a row has keys behind a part, which it need not share.
    bool has_whole(const Tokens& row, long part) const {
        return row.position >= (part + 1) * PART_KEYS;
    }

    // Compares the pages of a part. Returns 0 if they are the same.
    int compare(const Tokens& a, const Tokens& b, long part) const {
        long first = part * PART_KEYS / program.page_size;
        long last = ((part + 1) * PART_KEYS - 1) / program.page_size;
        const int64_t* of_a = step.page_table + step.slots[a.row] * step.page_stride;
        const int64_t* of_b = step.page_table + step.slots[b.row] * step.page_stride;
        for (long page = first; page <= last; page++)
            if (of_a[page] != of_b[page]) return of_a[page] < of_b[page] ? -1 : 1;
        return 0;
    }

    // Gives every row numbers for its parts. Returns false if there is no room.
    bool take_parts(Single begin, Single end) {
        long count = 0;
        auto parts_of = [&](const Tokens& row) {
            return row.first_part < 0 ? row.position / PART_KEYS + 1 : 0;
        };
        for (Single row = begin; row < end; row++) count += parts_of(**row);
        if (!has_room(count)) return false;
        for (Single row = begin; row < end; row++) {
            if (!parts_of(**row)) continue;
            long first = parts;
            parts += parts_of(**row);
            (*row)->first_part = first;
        }
        return true;
    }

    // Adds a part that all of the rows have.
    void add_shared(Single begin, Single end, long part) {
        long rows = end - begin, max_rows = QUERY_BLOCK / group_size();
        long blocks = (rows + max_rows - 1) / max_rows;
        for (long block = 0; block < blocks; block++) {
            long first = block * rows / blocks, count = (block + 1) * rows / blocks - first;
            Item item = {begin[first]->row, 0, (part + 1) * PART_KEYS, count, 0, part * PART_KEYS,
                         (part + 1) * PART_KEYS, part, long(sharers.size()), block == 0};
            for (long i = first; i < first + count; i++) sharers.push_back(*begin[i]);
            items.push_back(item);
        }
    }
};
