// Draws a row's token: the order and the meaning of the filters are those of worker_proc/sampling/sampler.py.
// Nothing is sorted but the few tokens among which a filter's border lies: they are found by
// counting how many tokens, and how much of the whole, have weights of about the same size.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "numbers.h"

struct SamplingRow {
    float temperature;  // 0: the likeliest, and nothing else counts
    float top_p;        // 1: off
    float min_p;        // 0: off
    float draw;         // in [0, 1)
    int64_t top_k;      // 0: off
};

class RowSampler {
  public:
    explicit RowSampler(long columns)
        : columns(columns), weights((columns + BLOCK - 1) / BLOCK * BLOCK, 0.0f) {}

    int64_t sample(const float* logits, const SamplingRow& row) {
        long likeliest = std::max_element(logits, logits + columns) - logits;
        if (row.temperature == 0) return likeliest;
        weigh(logits, logits[likeliest], row.temperature);
        float least = std::max(border(row), row.min_p);
        long token = invert(row.draw, least);
        return token < 0 ? likeliest : token;
    }

  private:
    static constexpr long BLOCK = 512;
    static constexpr int SHIFT = 19, SIZES = (0x3f800000 >> SHIFT) + 1;  // of weights up to 1.0

    const long columns;
    std::vector<float> weights;  // e^((logit - greatest) / temperature); zeros fill the last block
    std::vector<float> near;

    void weigh(const float* logits, float greatest, float temperature) {
        for (long i = 0; i < columns; i += LANES) {
            Floats v = (load_some(logits + i, columns - i) - greatest) / temperature;
            store(&weights[i], select(v < -87.0f, 0.0f, exp(v)));
            for (long n = columns - i; n < LANES; n++) weights[i + n] = 0;
        }
    }

    // The least weight that top_k, and then top_p of what it left, keep.
    float border(const SamplingRow& row) {
        bool by_k = row.top_k > 0 && row.top_k < columns, by_p = row.top_p < 1;
        if (!by_k && !by_p) return 0;
        std::vector<long> counts(SIZES, 0);
        std::vector<double> masses(SIZES, 0.0);
        for (long i = 0; i < columns; i++) {
            int size = size_of(weights[i]);
            counts[size]++, masses[size] += weights[i];
        }
        Border k{0, 0};
        for (double mass : masses) k.mass += mass;
        if (by_k) k = find(counts, masses, double(row.top_k), HUGE_VAL);
        if (!by_p) return k.least;
        return std::max(k.least, find(counts, masses, HUGE_VAL, row.top_p * k.mass).least);
    }

    struct Border {
        float least;
        double mass;  // of the tokens down to it
    };

    // Where, from the greatest weight on, so many tokens or so much mass is reached.
    Border find(const std::vector<long>& counts, const std::vector<double>& masses, double count,
                double mass) {
        double n = 0, total = 0;
        int size = SIZES - 1;
        for (; size > 0 && n + counts[size] < count && total + masses[size] < mass; size--)
            n += counts[size], total += masses[size];
        near.clear();
        for (long i = 0; i < columns; i++)
            if (size_of(weights[i]) == size) near.push_back(weights[i]);
        std::sort(near.begin(), near.end(), std::greater<float>());
        float least = 0;
        for (size_t i = 0; i < near.size(); i++) {
            least = near[i], total += near[i];
            if (++n >= count || total >= mass) break;
        }
        return {least, total};
    }

    static int size_of(float weight) {
        uint32_t bits;
        memcpy(&bits, &weight, 4);
        return std::min(int(bits >> SHIFT), SIZES - 1);
    }

    // The first token whose cumulated weight exceeds `draw` of the whole, among those of at least
    // `least`. -1: none has a weight (a broken model's NaN).
    long invert(float draw, float least) const {
        std::vector<double> sums(weights.size() / BLOCK);
        double whole = 0;
        for (size_t b = 0; b < sums.size(); b++) {
            Floats total = {};
            for (long i = 0; i < BLOCK; i += LANES) {
                Floats w = load<Floats>(&weights[b * BLOCK + i]);
                total += select(w >= least, w, 0.0f);
            }
            whole += sums[b] = sum(total);
        }
        double target = draw * whole, passed = 0;
        long last = -1;
        for (size_t b = 0; b < sums.size(); b++) {
            if (sums[b] == 0) continue;
            if (passed + sums[b] <= target && passed + sums[b] < whole) {
                passed += sums[b];
                continue;
            }
            for (long i = b * BLOCK; i < long((b + 1) * BLOCK); i++) {
                if (weights[i] == 0 || weights[i] < least) continue;
                last = i, passed += weights[i];
                if (passed > target) return i;
            }
        }
        return last;
    }
};
