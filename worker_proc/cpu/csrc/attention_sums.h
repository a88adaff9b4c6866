// The attention of rows to parts of their contexts, and how parts become one.
#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"

// The attention of some rows to some keys: for each row the highest score, the sum of the weights
// e^(score - max_score), and the weighted sum of the values. max_score is read in whole vectors.
struct RowSums {
    float *max_score, *total, *values;
};

// Adds the attention to further keys. Not inlined, so that it rounds alike wherever it is called.
__attribute__((noinline)) inline void merge(RowSums sums, const RowSums& other, long rows,
                                            long dim) {
    for (long first = 0; first < rows; first += LANES) {
        Floats max_score = load<Floats>(sums.max_score + first);
        Floats other_max = load<Floats>(other.max_score + first);
        Floats highest = max(max_score, other_max);
        alignas(64) float scale[LANES], other_scale[LANES];
        store(scale, exp(max_score - highest));
        store(other_scale, exp(other_max - highest));
        store(sums.max_score + first, highest);
        for (long i = 0, r = first; r < std::min(rows, first + LANES); i++, r++) {
            sums.total[r] = sums.total[r] * scale[i] + other.total[r] * other_scale[i];
            for (long d = r * dim; d < (r + 1) * dim; d += LANES)
                store(sums.values + d, load<Floats>(sums.values + d) * scale[i] +
                                           load<Floats>(other.values + d) * other_scale[i]);
        }
    }
}

// Writes the mean of the values, and returns whether it is finite. sink: a score without a value, or
// null. Not inlined, as above.
template <class T>
__attribute__((noinline)) bool write_mean(T* to, float max_score, float total, const float* values,
                                          const float* sink, long dim) {
    if (sink) total += std::exp(*sink - max_score);
    float scale = 1 / total;
    Floats zeros = {};
    for (long d = 0; d < dim; d += LANES) {
        Floats mean = load<Floats>(values + d) * scale;
        zeros += zeros_of(mean);
        narrow_partial(to + d, mean, dim - d);
    }
    return all_finite(zeros);
}
