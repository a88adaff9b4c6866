// AVX-512: one vector of 512 bits; with VNNI, products of bytes, and with BF16, of pairs.
#pragma once

#include <immintrin.h>

#include "portable.h"

#if defined(__AVX512VBMI__)
// Both bytes of a number's size as bfloat16 are looked up, as a conversion by way of a float takes twice
// as long.
struct BFloat16Bytes {
    alignas(64) uint8_t low[128], high[128];

    BFloat16Bytes() {
        for (int i = 0; i < 128; i++) {
            float number = float(i);
            uint32_t bits;
            memcpy(&bits, &number, 4);
            low[i] = uint8_t(bits >> 16), high[i] = uint8_t(bits >> 24);
        }
    }
};
inline const BFloat16Bytes bfloat16_bytes;
#endif

struct Avx512 : Portable {
    static constexpr int ROWS = 8, ROWS_OF_TERMS = 12, PANELS = 2, FEW_ROWS = 3, WIDE_PANELS = 4;
    static constexpr int INTEGER_ROWS = 4, CODED_FLOAT_ROWS = 8;

    // Compilers use two instructions if an operand is constant.
    static INLINE Floats max(Floats a, Floats b) {
        return part([&]() INLINED { return _mm512_max_ps(of(a), of(b)); });
    }
    static INLINE Floats min(Floats a, Floats b) {
        return part([&]() INLINED { return _mm512_min_ps(of(a), of(b)); });
    }
    static INLINE bool all_below(Floats v, float x) {
        return !_mm512_cmp_ps_mask(of(v), _mm512_set1_ps(x), _CMP_NLT_US);
    }

    template <class T>
    static INLINE Ints bytes_to_ints(const T* from) {
        __m128i bytes = _mm_loadu_si128((const __m128i*)from);
        return Ints::of([&](int) INLINED {
            return (Ints::Part)(T(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
        });
    }
    static INLINE Floats halves_to_floats(const uint16_t* from) {
        return part([&]() INLINED {
            return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
        });
    }

#if defined(__AVX512VBMI__)
    static constexpr bool WIDENS_BYTES = true;

    // count: a multiple of 64.
    static INLINE void widen_bytes(uint16_t* to, const int8_t* from, long count) {
        const uint8_t *low = bfloat16_bytes.low, *high = bfloat16_bytes.high;
        __m512i lows[2] = {_mm512_load_si512(low), _mm512_load_si512(low + 64)};
        __m512i highs[2] = {_mm512_load_si512(high), _mm512_load_si512(high + 64)};
        // `unpack` takes the first or the second half of each 16 bytes.
        __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
        for (long i = 0; i < count; i += 64) {
            __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
            __m512i sizes = _mm512_abs_epi8(codes);
            __m512i low_bytes = _mm512_permutex2var_epi8(lows[0], sizes, lows[1]);
            __m512i high_bytes = _mm512_permutex2var_epi8(highs[0], sizes, highs[1]);
            high_bytes = _mm512_or_si512(high_bytes, _mm512_and_si512(codes, sign));
            _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low_bytes, high_bytes));
            _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(low_bytes, high_bytes));
        }
    }
#endif

    using Portable::add_product;
    static INLINE Floats add_product(Floats acc, const uint32_t* x, Floats b) {
        return Floats::of([&](int i) INLINED {
            Floats::Part sum = acc.parts[i];
            asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b.parts[i]), "m"(*x));
            return sum;
        });
    }

    static INLINE Floats scale(Floats x, Floats n) {
        return part([&]() INLINED { return _mm512_scalef_ps(of(x), of(n)); });
    }

#if defined(__AVX512DQ__)
    static constexpr bool HAS_FRACTION = true;

    static INLINE Floats fraction(Floats x) {
        return part([&]() INLINED { return _mm512_reduce_ps(of(x), _MM_FROUND_TO_NEG_INF); });
    }
#endif

#if defined(__AVX512BF16__)
    static INLINE void narrow(uint16_t* to_bfloat16, Floats v) {
        __m256bh rounded = _mm512_cvtneps_pbh(of(v));
        memcpy(to_bfloat16, &rounded, sizeof rounded);
    }

    static constexpr bool HAS_PAIRS = true;

    static INLINE Floats add_pairs(Floats acc, Words a, Words b) {
        return part([&]() INLINED {
            return _mm512_dpbf16_ps(of(acc), (__m512bh)a.parts[0], (__m512bh)b.parts[0]);
        });
    }
#endif

    using Portable::look_up;
#if defined(__AVX512BW__)
    static INLINE Words look_up(const uint8_t* table, Words indices) {
        return Words::of([&](int i) INLINED {
            __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
            return (Words::Part)_mm512_shuffle_epi8(all, (__m512i)indices.parts[i]);
        });
    }
#endif
    static INLINE Floats look_up(const float* table, Words indices) {
        return part([&]() INLINED {
            return _mm512_permutexvar_ps((__m512i)indices.parts[0], _mm512_load_ps(table));
        });
    }

#if defined(__AVX512VNNI__)
    template <int MAX>
    static INLINE Ints add_products(Ints acc, Words w, const uint32_t* units, int unit) {
        Words x = units[unit];
        return Ints::of([&](int i) INLINED {
            return (Ints::Part)_mm512_dpbusd_epi32((__m512i)acc.parts[i], (__m512i)w.parts[i],
                                                   (__m512i)x.parts[i]);
        });
    }
#endif

  private:
    static INLINE __m512 of(Floats v) { return (__m512)v.parts[0]; }

    template <class F>
    static INLINE Floats part(F one) {
        return Floats::of([&](int) INLINED { return (Floats::Part)one(); });
    }
};
