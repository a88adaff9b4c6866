// A mixture of experts: the choice of each token's experts, the rows of each expert side by side, their
// products, and the weighted sum of the results. Only the weights of chosen experts are read.
#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "matmul.h"
#include "schedule.h"

// The rows that one expert computes, [begin, end) of the rows by expert.
struct ExpertGroup {
    long expert, begin, end;
};

// The choice of a layer, which its operations share. There is a row for each chosen expert of each
// token; the rows of an expert are side by side, in the order of the tokens.
struct ExpertRows {
    std::vector<int32_t> chosen;      // [tokens][num_chosen] experts, those with the best scores first
    std::vector<float> weights;       // [tokens][num_chosen]
    std::vector<int32_t> rows;        // [tokens][num_chosen] rows by expert
    std::vector<int32_t> tokens;      // [rows by expert]
    std::vector<ExpertGroup> groups;  // of the experts that a token has chosen
    AdapterRows adapted;              // the rows by expert that have adapters

    void reserve(long count) {
        for (auto* values : {&chosen, &rows, &tokens}) values->resize(count);
        weights.resize(count);
    }
};

// Chooses the experts of a token. Of equal scores, the first one is better.
inline void route(const Step& step, const Op& op, long token, ExpertRows& all) {
    const float* scores = (const float*)step.buffers[op.input] + token * step.strides[op.input];
    int32_t* chosen = all.chosen.data() + token * op.num_chosen;
    float* weights = all.weights.data() + token * op.num_chosen;
    for (long expert = 0; expert < op.expert_count; expert++) {
        // The first experts are always inserted, so that scores that are no numbers choose some, too.
        long place = std::min<long>(expert, op.num_chosen);
        if (place == op.num_chosen && !(scores[expert] > scores[chosen[place - 1]])) continue;
        place = std::min<long>(place, op.num_chosen - 1);
        for (; place > 0 && scores[expert] > scores[chosen[place - 1]]; place--)
            chosen[place] = chosen[place - 1];
        chosen[place] = int32_t(expert);
    }
    float highest = scores[chosen[0]], sum = 0;
    for (long i = 0; i < op.num_chosen; i++) {
        weights[i] = std::exp(scores[chosen[i]] - highest);
        sum += weights[i];
    }
    if (!op.renormalize) {
        sum = 0;
        for (long expert = 0; expert < op.expert_count; expert++)
            sum += std::exp(scores[expert] - highest);
    }
    for (long i = 0; i < op.num_chosen; i++) weights[i] /= sum;
}

// Orders the rows by expert; a single thread does so for all.
inline void sort_rows(const Op& op, long token_count, ExpertRows& all) {
    long count = token_count * op.num_chosen;
    std::vector<long> next(op.expert_count + 1);
    for (long i = 0; i < count; i++) next[all.chosen[i] + 1]++;
    all.groups.clear();
    for (long expert = 0; expert < op.expert_count; expert++) {
        long begin = next[expert], size = next[expert + 1];
        if (size) all.groups.push_back({expert, begin, begin + size});
        next[expert + 1] = begin + size;
    }
    for (long i = 0; i < count; i++) {
        long row = next[all.chosen[i]]++;
        all.rows[i] = int32_t(row);
        all.tokens[row] = int32_t(i / op.num_chosen);
    }
}

// Groups the rows by expert that have adapters, by expert and then by adapter; a single thread does so
// for all. of_tokens: the tokens that have adapters.
inline void group_adapted(const Op& op, const AdapterRows& of_tokens, long tile_rows,
                          ExpertRows& all) {
    std::vector<long> next(op.expert_count + 1);
    for (long token : of_tokens.rows)
        for (long i = token * op.num_chosen; i < (token + 1) * op.num_chosen; i++)
            next[all.chosen[i] + 1]++;
    for (long expert = 0; expert < op.expert_count; expert++) next[expert + 1] += next[expert];
    AdapterRows& adapted = all.adapted;
    adapted.tiles.clear();
    adapted.rows.resize(next[op.expert_count]);
    std::vector<int32_t> adapters(adapted.rows.size());  // [rows]
    for (const AdapterTile& tile : of_tokens.tiles)
        for (long t = tile.begin; t < tile.end; t++)
            for (long i = 0; i < op.num_chosen; i++) {
                long pair = of_tokens.rows[t] * op.num_chosen + i, to = next[all.chosen[pair]]++;
                adapted.rows[to] = all.rows[pair];
                adapters[to] = int32_t(tile.adapter);
            }
    for (long expert = 0, begin = 0; expert < op.expert_count; expert++)
        for (long end; begin < next[expert]; begin = end) {
            end = std::find_if(adapters.begin() + begin, adapters.begin() + next[expert],
                               [&](int32_t other) { return other != adapters[begin]; }) -
                  adapters.begin();
            adapted.add_tiles(adapters[begin], expert, begin, end - begin, tile_rows);
        }
}

// Copies the inputs of a row by expert.
template <class E>
void gather(const Step& step, const Op& op, long row, const ExpertRows& all) {
    long item = op.output == EXPERT_QUANTIZED ? 1 : sizeof(typename E::Passed);
    memcpy((char*)step.buffers[op.output] + row * step.strides[op.output] * item,
           (const char*)step.buffers[op.input] + all.tokens[row] * step.strides[op.input] * item,
           op.width * item);
}

// Adds the weighted outputs of a token's experts to the residual stream, always in the same order.
inline void add_experts(const Step& step, const Op& op, long token, const ExpertRows& all) {
    long row = op.sampled && step.sampled ? step.sampled[token] : token;
    float* to = (float*)step.buffers[op.output] + row * step.strides[op.output];
    const float* x = (const float*)step.buffers[op.input];
    for (long d = 0; d < op.width; d += LANES) {
        Floats sum = 0.0f;
        for (long i = token * op.num_chosen; i < (token + 1) * op.num_chosen; i++)
            sum += load<Floats>(x + all.rows[i] * step.strides[op.input] + d) * all.weights[i];
        long count = std::min<long>(LANES, op.width - d);
        narrow_partial(to + d, load_partial(to + d, count) + sum * float(op.scale), count);
    }
}

// The products of all groups of rows, each with the matrix of its expert. Pieces of one expert come
// before those of the next one. changed: by adapters.
template <class E>
class ExpertMatmul {
  public:
    ExpertMatmul(const Op& op, const Step& step, const ExpertRows& all,
                 std::span<const ChangedTile> changed = {})
        : op(op), step(step), all(all), changed(changed) {
        ends.reserve(all.groups.size());
        for (long group = 0; group < long(all.groups.size()); group++)
            ends.push_back(count() + of(group).pieces.count());
    }

    long count() const { return ends.empty() ? 0 : ends.back(); }

    void add_first_reads(long i, PrefetchQueue& queue) {
        if (i < count()) {
            long group = group_of(i, 0);
            of(group).add_first_reads(i - begin(group), queue);
        }
    }

    // Computes piece i, as Matmul does. Calls must not decrease i.
    void piece(long i, long next) {
        if (!matmul || i >= ends[current]) {
            current = group_of(i, current);
            additions.emplace(step, changed_of(all.groups[current]));
            matmul.emplace(of(current, additions->empty() ? nullptr : &*additions));
        }
        NextPanels after;
        if (next >= 0) {
            long group = group_of(next, current);
            long piece = next - begin(group);
            after = group == current ? matmul->panels_of(piece) : of(group).panels_of(piece);
        }
        matmul->piece(i - begin(current), after);
    }

  private:
    const Op& op;
    const Step& step;
    const ExpertRows& all;
    std::span<const ChangedTile> changed;  // from the current group on
    std::vector<long> ends;  // [groups] number of pieces up to the group's end
    long current = 0;
    std::optional<Additions<E>> additions;  // of the current group
    std::optional<Matmul<E>> matmul;        // likewise

    long begin(long group) const { return group ? ends[group - 1] : 0; }
    long group_of(long piece, long group) const {
        while (piece >= ends[group]) group++;
        return group;
    }
    Matmul<E> of(long group, const Additions<E>* additions = nullptr) const {
        const ExpertGroup& rows = all.groups[group];
        return Matmul<E>(op, op.experts[rows.expert], step, rows.end - rows.begin, nullptr,
                         rows.begin, additions);
    }

    // Returns the changed tiles of a group, and drops those before them.
    std::span<const ChangedTile> changed_of(const ExpertGroup& rows) {
        auto before = [&](long row) {
            return std::find_if(changed.begin(), changed.end(),
                                [&](const ChangedTile& tile) { return tile.rows[0] >= row; }) -
                   changed.begin();
        };
        changed = changed.subspan(before(rows.begin));
        return changed.first(before(rows.end));
    }
};
