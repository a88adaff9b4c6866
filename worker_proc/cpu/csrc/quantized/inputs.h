// Rows of inputs in 8 bits, in groups of 32 with a scale each, and their products with codes of
// weights.
#pragma once

#include <cmath>

#include "../numbers.h"

constexpr int GROUP = 32, GROUP_UNITS = GROUP / 4;

// A row of inputs: units of four int8 [groups][8], then the scale of each group, the sum of each
// group's codes, and the sum of the first half of them.
struct QuantizedRow {
    const uint32_t* units;
    const float* scales;
    const int32_t *sums, *first_sums;

    QuantizedRow(const void* row, long groups)
        : units((const uint32_t*)row),
          scales((const float*)(units + groups * GROUP_UNITS)),
          sums((const int32_t*)(scales + groups)),
          first_sums(sums + groups) {}

    // Returns the sum of the codes of a part of a group: PARTS is 1, or 2 for the halves.
    template <int PARTS>
    int32_t sum(long group, int part) const {
        if (PARTS == 1) return sums[group];
        return part == 0 ? first_sums[group] : sums[group] - first_sums[group];
    }
};

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
        store(codes, to_bytes(first));
        store(codes + LANES, to_bytes(second));
        const_cast<float*>(row.scales)[g] = scale;
        const_cast<int32_t*>(row.sums)[g] = int32_t(sum(first + second));
        const_cast<int32_t*>(row.first_sums)[g] = int32_t(sum(first));
    }
}

// Adds the four products of unsigned bytes of w and signed bytes of x (-127 to 127) in each lane.
INLINE Ints add_products(Ints acc, Words w, Words x) {
    return Ints::of([&](int i) INLINED {
#if defined(__AVX512VNNI__)
        return (Ints::Part)_mm512_dpbusd_epi32((__m512i)acc.parts[i], (__m512i)w.parts[i],
                                               (__m512i)x.parts[i]);
#elif defined(__AVX2__) && VECTORS == 2
        // Two neighbours can add up to 2 * 255 * 127, which overflows 16 bits: even and odd bytes are
        // multiplied separately.
        __m256i even = _mm256_and_si256((__m256i)w.parts[i], _mm256_set1_epi16(0xff));
        __m256i odd = _mm256_srli_epi16((__m256i)w.parts[i], 8);
        __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x.parts[i], 8), 8);
        __m256i x_odd = _mm256_srai_epi16((__m256i)x.parts[i], 8);
        __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(even, x_even),
                                         _mm256_madd_epi16(odd, x_odd));
        return acc.parts[i] + (Ints::Part)pairs;
#else
        Ints::Part sums = acc.parts[i];
        for (int byte = 0; byte < 4; byte++)
            sums += (Ints::Part)((w.parts[i] >> (8 * byte)) & 0xffu) *
                    ((Ints::Part)(x.parts[i] << (24 - 8 * byte)) >> 24);
        return sums;
#endif
    });
}
