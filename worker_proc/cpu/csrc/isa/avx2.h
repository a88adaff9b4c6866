// AVX2: two vectors of 256 bits.
#pragma once

#include <immintrin.h>

#include "portable.h"

struct Avx2 : Portable {
    static constexpr int ROWS = 6, ROWS_OF_TERMS = 5, PANELS = 1, FEW_ROWS = 1, WIDE_PANELS = 2;
    static constexpr int INTEGER_ROWS = 4, CODED_FLOAT_ROWS = 4;

#if defined(__F16C__)
    static INLINE Floats halves_to_floats(const uint16_t* from) {
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + i));
        });
    }
#endif

    static INLINE Words look_up(const uint8_t* table, Words indices) {
        return Words::of([&](int i) INLINED {
            __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
            return (Words::Part)_mm256_shuffle_epi8(all, (__m256i)indices.parts[i]);
        });
    }
    static INLINE Floats look_up(const float* table, Words indices) {
        return Floats::of([&](int i) INLINED {
            __m256i index = (__m256i)indices.parts[i];
            __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), index);
            __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), index);
            return (Floats::Part)_mm256_blendv_ps(low, high,
                                                  (__m256)_mm256_slli_epi32(index, 28));
        });
    }

    template <int MAX>
    static INLINE Ints add_products(Ints acc, Words w, const uint32_t* units, int unit) {
        Words x = units[unit];
        return Ints::of([&](int i) INLINED {
            // Two neighbours can add up to 2 * 255 * 127, which overflows 16 bits: even and odd bytes
            // are multiplied separately.
            __m256i even = _mm256_and_si256((__m256i)w.parts[i], _mm256_set1_epi16(0xff));
            __m256i odd = _mm256_srli_epi16((__m256i)w.parts[i], 8);
            __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x.parts[i], 8), 8);
            __m256i x_odd = _mm256_srai_epi16((__m256i)x.parts[i], 8);
            __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(even, x_even),
                                             _mm256_madd_epi16(odd, x_odd));
            return acc.parts[i] + (Ints::Part)pairs;
        });
    }
};
