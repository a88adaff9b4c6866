// Rows of inputs in 8 bits, in groups of 32 with a scale each.
#pragma once

#include <cmath>

#include "../numbers.h"

// Rounds x to 255 steps between -max|x| and max|x|, group by group. The scale of a group that is not
// finite is NaN.
template <class T>
void quantize(void* to, const T* x, long groups) {
    QuantizedRow row(to, groups);
    for (long g = 0; g < groups; g++, x += GROUP) {
        Floats a = widen(x), b = widen(x + LANES);
        float max_abs = max_lane(max(max(a, -a), max(b, -b)));
        float scale = max_abs / 127 + sum(zeros_of(a) + zeros_of(b));
        float inverse = max_abs > 0 ? 127 / max_abs : 0;
        Floats first = round_to_even(a * inverse), second = round_to_even(b * inverse);
        int8_t* codes = (int8_t*)(row.units + g * GROUP_UNITS);
        Isa::store_bytes(codes, first);
        Isa::store_bytes(codes + LANES, second);
        const_cast<float*>(row.scales)[g] = scale;
        const_cast<int32_t*>(row.sums)[g] = int32_t(sum(first + second));
        const_cast<int32_t*>(row.first_sums)[g] = int32_t(sum(first));
    }
}
