// Draws a row's token, with the filters of worker_proc/sampling/sampler.py in the same order.
//
// A histogram of the weights finds the bucket in which a filter's cutoff is; only the tokens of that
// bucket are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "numbers.h"

struct SamplingRow {
    float temperature;  // 0: greedy
    float top_p;        // 1: off
    float min_p;        // 0: off
    float draw;         // in [0, 1)
    int64_t top_k;      // 0: off
};

class RowSampler {
  public:
    explicit RowSampler(long columns)
        : columns(columns), weights((columns + BLOCK - 1) / BLOCK * BLOCK, 0.0f) {}

    // Returns -1 if a logit is NaN or infinity, or none is finite.
    int64_t sample(const float* logits, const SamplingRow& row) {
        long argmax = std::max_element(logits, logits + columns) - logits;
        if (!is_finite(logits) || logits[argmax] == -INFINITY) return -1;
        if (row.temperature == 0) return argmax;
        compute_weights(logits, logits[argmax], row.temperature);
        float threshold = std::max(cutoff(row), row.min_p);
        long token = invert(row.draw, threshold);
        return token < 0 ? argmax : token;
    }

  private:
    static constexpr long BLOCK = 512;
    static constexpr int SHIFT = 19;
    static constexpr int NUM_BUCKETS = (0x3f800000 >> SHIFT) + 1;  // weights are at most 1.0

    const long columns;
    std::vector<float> weights;  // e^((logit - maximum) / temperature), zero-padded to whole blocks
    std::vector<float> candidates;

    // Whether every logit is a number or -infinity.
    bool is_finite(const float* logits) const {
        Ints finite = Ints(-1);
        for (long i = 0; i < columns; i += LANES)
            finite = finite & (load_partial(logits + i, columns - i) < Floats(INFINITY));
        return all_below(select(finite, 0.0f, 1.0f), 1.0f);
    }

    void compute_weights(const float* logits, float maximum, float temperature) {
        for (long i = 0; i < columns; i += LANES) {
            Floats v = (load_partial(logits + i, columns - i) - maximum) / temperature;
            store(&weights[i], select(v < -87.0f, 0.0f, exp(v)));
            for (long n = columns - i; n < LANES; n++) weights[i + n] = 0;
        }
    }

    // Returns the smallest weight that top_k, and then top_p of the rest, keep.
    float cutoff(const SamplingRow& row) {
        bool by_k = row.top_k > 0 && row.top_k < columns, by_p = row.top_p < 1;
        if (!by_k && !by_p) return 0;
        std::vector<long> counts(NUM_BUCKETS, 0);
        std::vector<double> masses(NUM_BUCKETS, 0.0);
        for (long i = 0; i < columns; i++) {
            int bucket = bucket_of(weights[i]);
            counts[bucket]++, masses[bucket] += weights[i];
        }
        Cutoff k{0, 0};
        for (double mass : masses) k.mass += mass;
        if (by_k) k = find_cutoff(counts, masses, double(row.top_k), HUGE_VAL);
        if (!by_p) return k.threshold;
        Cutoff p = find_cutoff(counts, masses, HUGE_VAL, row.top_p * k.mass);
        return std::max(k.threshold, p.threshold);
    }

    struct Cutoff {
        float threshold;
        double mass;  // of the tokens down to the threshold
    };

    // Returns the cutoff at which `count` tokens or `mass` is reached, from the largest weight down.
    Cutoff find_cutoff(const std::vector<long>& counts, const std::vector<double>& masses,
                       double count, double mass) {
        double n = 0, total = 0;
        int bucket = NUM_BUCKETS - 1;
        for (; bucket > 0 && n + counts[bucket] < count && total + masses[bucket] < mass; bucket--)
            n += counts[bucket], total += masses[bucket];
        candidates.clear();
        for (long i = 0; i < columns; i++)
            if (bucket_of(weights[i]) == bucket) candidates.push_back(weights[i]);
        std::sort(candidates.begin(), candidates.end(), std::greater<float>());
        float threshold = 0;
        for (size_t i = 0; i < candidates.size(); i++) {
            threshold = candidates[i], total += candidates[i];
            if (++n >= count || total >= mass) break;
        }
        return {threshold, total};
    }

    static int bucket_of(float weight) {
        uint32_t bits;
        memcpy(&bits, &weight, 4);
        return std::min(int(bits >> SHIFT), NUM_BUCKETS - 1);
    }

    // Returns the first token whose cumulated weight exceeds the fraction `draw` of the whole, among
    // tokens of at least `threshold`; -1 if none has a weight.
    long invert(float draw, float threshold) const {
        std::vector<double> sums(weights.size() / BLOCK);
        double whole = 0;
        for (size_t b = 0; b < sums.size(); b++) {
            Floats total = {};
            for (long i = 0; i < BLOCK; i += LANES) {
                Floats w = load<Floats>(&weights[b * BLOCK + i]);
                total += select(w >= threshold, w, 0.0f);
            }
            whole += sums[b] = sum(total);
        }
        double target = draw * whole, cumulated = 0;
        long last = -1;
        for (size_t b = 0; b < sums.size(); b++) {
            if (sums[b] == 0) continue;
            if (cumulated + sums[b] <= target && cumulated + sums[b] < whole) {
                cumulated += sums[b];
                continue;
            }
            for (long i = b * BLOCK; i < long((b + 1) * BLOCK); i++) {
                if (weights[i] == 0 || weights[i] < threshold) continue;
                last = i, cumulated += weights[i];
                if (cumulated > target) return i;
            }
        }
        return last;
    }
};
