// What attention has to do in a step: blocks of queries, and parts of long contexts where there are
// few of them.
#pragma once

#include <algorithm>
#include <vector>

#include "program.h"
#include "simd.h"

// Queries times the heads that share a key head: so many that what is kept of them stays in the
// first-level cache beside a block of keys and values.
constexpr int QUERY_BLOCK = 24;
constexpr int KEY_PANELS = 4, KEY_BLOCK = KEY_PANELS * LANES;
constexpr int SHORTEST_PART = 128;  // keys

// Queries of the step's tokens `token` to `token + count`, all of one row and the first at
// `position`, against keys `key_begin` to `key_end`; what comes out begins at row `output`.
// part: which part of a split context, -1 where it is not split.
struct Item {
    long row, token, position, count, output, key_begin, key_end, part;
};

// What a row whose context is split leaves for COMBINE.
struct SplitRow {
    long output, first_part, parts;
};

// Where a token of the step stands.
struct Place {
    long row, position;
};

struct AttentionWork {
    std::vector<Item> items;
    std::vector<SplitRow> split;

    // Of every token of the step.
    AttentionWork(const Program& program, const Step& step) : program(program), step(step) {
        long token = 0;
        for (long row = 0; row < step.row_count; token += step.num_tokens[row], row++)
            add(row, token, step.computed[row], step.num_tokens[row], token, step.row_count);
    }

    // Of the sampled tokens only, whose outputs lie one after the other. places: of each token.
    AttentionWork(const Program& program, const Step& step, const std::vector<Place>& places)
        : program(program), step(step) {
        for (long i = 0; i < step.sampled_count; i++) {
            long token = step.sampled[i];
            add(places[token].row, token, places[token].position, 1, i, step.sampled_count);
        }
    }

    // Of one part of one row: per query head a maximum, a sum, and head_dim values not divided yet.
    static long part_floats(const Program& program) { return program.heads * (program.dim + 2); }

  private:
    const Program& program;
    const Step& step;
    long parts = 0;

    // `n` tokens of a row; `rows`: of all the work.
    void add(long row, long token, long position, long n, long output, long rows) {
        long length = n == 1 ? part_length(position + 1, rows) : 0;
        if (n == 1 && length <= position) {
            long count = (position + length) / length;
            if ((parts + count) * part_floats(program) <= step.part_floats) {
                split.push_back({output, parts, count});
                for (long i = 0; i < count; i++)
                    items.push_back({row, token, position, 1, output, i * length,
                                     std::min((i + 1) * length, position + 1), parts++});
                return;
            }
        }
        long shared = program.heads / program.kv_heads, block = std::max<long>(1, QUERY_BLOCK / shared);
        for (long q = 0; q < n; q += block) {
            long count = std::min(block, n - q);
            items.push_back({row, token + q, position + q, count, output + q, 0, position + q + count, -1});
        }
    }

    // So many keys that each thread has several pieces of a step with few rows.
    long part_length(long keys, long rows) const {
        long pieces_a_row = 4 * step.threads / (rows * program.kv_heads) + 1;
        long length = (keys + pieces_a_row - 1) / pieces_a_row;
        length = (length + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
        return std::max<long>(length, SHORTEST_PART);
    }
};
