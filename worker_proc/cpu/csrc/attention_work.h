// The work items of a step's attention: blocks of queries, and parts of long contexts if there are
// few rows.
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
// part: number under which the first part is stored if the context is split over threads, or -1.
struct Item {
    long row, token, position, count, output, key_begin, key_end, part;
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
        for (long row = 0; row < step.row_count; token += step.num_tokens[row], row++)
            add(row, token, step.computed[row], step.num_tokens[row], token, step.row_count);
    }

    // Work for the sampled tokens, whose outputs are contiguous. positions: [tokens].
    AttentionWork(const Program& program, const Step& step, long window,
                  const std::vector<TokenPosition>& positions)
        : program(program), step(step), window(window) {
        for (long i = 0; i < step.sampled_count; i++) {
            long token = step.sampled[i];
            add(positions[token].row, token, positions[token].position, 1, i, step.sampled_count);
        }
    }

    // Floats of a part of a row: for each query head a maximum, a sum, and undivided values.
    static long part_floats(const Program& program) {
        return program.heads * (program.padded_dim + 2);
    }

  private:
    const Program& program;
    const Step& step;
    const long window;
    long parts = 0;

    // Returns the first key that a query at `position` sees, or up to 15 keys earlier: the first of
    // a panel.
    long first_key(long position) const {
        return window ? std::max(0L, position + 1 - window) / LANES * LANES : 0;
    }

    // Returns the end of the keys that the first `count` tokens of a text of `n` see.
    long last_key(long count, long n) const {
        return window ? std::min(n, count - 1 + window) : n;
    }

    // Adds `n` tokens of a row. rows: number of rows of the step.
    void add(long row, long token, long position, long n, long output, long rows) {
        if (n == 1 && split_context(row, token, position, output, rows)) return;
        long group_size = program.heads / program.kv_heads;
        long block = std::max<long>(1, QUERY_BLOCK / group_size);
        for (long q = 0; q < n; q += block) {
            long count = std::min(block, n - q);
            long end = position + (program.bidirectional ? last_key(q + count, n) : q + count);
            items.push_back({row, token + q, position + q, count, output + q,
                             first_key(position + q), end, -1});
        }
    }

    // Adds items for the parts of the context of a single query, such that each thread has several
    // pieces if there are few rows. Returns false if there is no reason or no room for that.
    bool split_context(long row, long token, long position, long output, long rows) {
        long first = first_key(position), begin = first / PART_KEYS;
        long count = position / PART_KEYS + 1 - begin;
        long pieces = 4 * step.threads / (rows * program.kv_heads) + 1;
        long parts_a_piece = (count + pieces - 1) / pieces;
        if (parts_a_piece == count || (parts + count) * part_floats(program) > step.part_floats)
            return false;
        split.push_back({output, parts, count});
        for (long i = 0; i < count; i += parts_a_piece)
            items.push_back({row, token, position, 1, output, std::max(first, (begin + i) * PART_KEYS),
                             std::min((begin + i + parts_a_piece) * PART_KEYS, position + 1),
                             parts + i});
        parts += count;
        return true;
    }
};
