// Products with weights of 8 or 4 bits in groups of 32 inputs: each group of a column has a scale
// (and a minimum, in 4 bits). Inputs are rounded to 8 bits in the same groups, so that the products
// are computed with integers.
#pragma once

#include <cmath>

#include "tile.h"

constexpr int GROUP = 32, GROUP_UNITS = GROUP / 4;
constexpr int QUANTISED_TILE_ROWS = 4;

// A row of inputs: units of four int8 [groups][8], then the scale of each group, then the sum of
// each group's codes.
constexpr long QUANTISED_GROUP_BYTES = GROUP + sizeof(float) + sizeof(int32_t);

struct QuantisedRow {
    const uint32_t* units;
    const float* scales;
    const int32_t* sums;

    QuantisedRow(const void* row, long groups)
        : units((const uint32_t*)row),
          scales((const float*)(units + groups * GROUP_UNITS)),
          sums((const int32_t*)(scales + groups)) {}
};

// Rounds x to 255 steps between -max|x| and max|x|, group by group.
template <class T>
void quantise(void* to, const T* x, long groups) {
    QuantisedRow row(to, groups);
    for (long g = 0; g < groups; g++, x += GROUP) {
        Floats a = widen(x), b = widen(x + LANES);
        float max_abs = max_lane(max(max(a, -a), max(b, -b)));
        float scale = max_abs / 127, inverse = max_abs > 0 ? 127 / max_abs : 0;
        Floats first = round_to_even(a * inverse), second = round_to_even(b * inverse);
        int8_t* codes = (int8_t*)(row.units + g * GROUP_UNITS);
        store(codes, to_bytes(first));
        store(codes + LANES, to_bytes(second));
        const_cast<float*>(row.scales)[g] = scale;
        const_cast<int32_t*>(row.sums)[g] = int32_t(sum(first + second));
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

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff) << 13, bits;
    float value;
    memcpy(&value, &rest, 4);
    value *= 0x1p112f;  // the difference of the exponents' biases; exact for subnormals too
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE Floats halves_to_floats(const uint16_t* from) {
#if VECTORS == 1
    return Floats::of([&](int) INLINED {
        return (Floats::Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    });
#elif defined(__F16C__)
    return Floats::of([&](int i) INLINED {
        return (Floats::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + i));
    });
#else
    alignas(64) float v[LANES];
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(from[i]);
    return load<Floats>(v);
#endif
}

// A panel of 16 columns: codes [groups][lines][16 columns] in units of four bytes, then scales
// [groups][16] in float16. The value of code q is (q - 128) * scale.
struct Int8 {
    static constexpr int LINES = GROUP_UNITS, PARTS = 1;

    static INLINE Words unit(Words line, int) { return line; }
    static INLINE int code(const uint8_t* group, int lane, int k) {
        return group[(k / 4 * LANES + lane) * 4 + k % 4];
    }
    static INLINE int32_t start(int32_t sum) { return -128 * sum; }
};

// Two codes in a byte: units 0 to 3 in the low halves of the lines, units 4 to 7 in the high halves.
// Minima [groups][16] follow the scales. The value of code q is q * scale + minimum.
struct Int4 {
    static constexpr int LINES = GROUP_UNITS / 2, PARTS = 2;

    static INLINE Words unit(Words line, int k) {
        return (k < LINES ? line : line >> 4) & 0x0f0f0f0fu;
    }
    static INLINE int code(const uint8_t* group, int lane, int k) {
        int unit = k / 4, byte = group[(unit % LINES * LANES + lane) * 4 + k % 4];
        return unit < LINES ? byte & 15 : byte >> 4;
    }
    static INLINE int32_t start(int32_t) { return 0; }
};

template <class Q>
struct QuantisedPanel {
    const uint32_t* codes;
    const uint16_t* scales;  // [groups][16]
    const uint16_t* minimum;   // Int4 only

    QuantisedPanel(const void* panel, long groups)
        : codes((const uint32_t*)panel),
          scales((const uint16_t*)(codes + groups * Q::LINES * LANES)),
          minimum(scales + groups * LANES) {}

    static long bytes(long groups) {
        return groups * (Q::LINES * LANES * 4 + Q::PARTS * LANES * 2);
    }

    // Returns the weight of column `lane` and input k.
    float weight(int lane, long k) const {
        long g = k / GROUP;
        int q = Q::code((const uint8_t*)(codes + g * Q::LINES * LANES), lane, int(k % GROUP));
        float scale = half_to_float(scales[g * LANES + lane]);
        if (Q::PARTS == 1) return float(q - 128) * scale;
        return float(q) * scale + half_to_float(minimum[g * LANES + lane]);
    }
};

// Like tile_product, with quantised rows in `a`, and a depth in groups.
template <class Q, int ROWS, int PANELS>
void quantised_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                       const uint32_t* panels, long panel_units, long groups,
                       const Prefetch& prefetch) {
    Floats acc[ROWS][PANELS] = {};
    for (long g = 0; g < groups; g++) {
        Floats factor[PANELS], minimum[PANELS];
        Ints sums_of_codes[ROWS][PANELS];
        for (int p = 0; p < PANELS; p++) {
            QuantisedPanel<Q> panel(panels + p * panel_units, groups);
            factor[p] = halves_to_floats(panel.scales + g * LANES);
            if (Q::PARTS == 2) minimum[p] = halves_to_floats(panel.minimum + g * LANES);
            for (int r = 0; r < ROWS; r++)
                sums_of_codes[r][p] = Q::start(QuantisedRow(a + r * a_stride, groups).sums[g]);
            if (prefetch.lines[p])
                for (int line = 0; line < Q::LINES + 1; line++)
                    __builtin_prefetch(prefetch.lines[p] + (g * (Q::LINES + 1) + line) * 64, 0, 2);
        }
#pragma GCC unroll 8
        for (int k = 0; k < GROUP_UNITS; k++) {
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                const uint32_t* lines = panels + p * panel_units + g * Q::LINES * LANES;
                Words w = Q::unit(load<Words>(lines + k % Q::LINES * LANES), k);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++)
                    sums_of_codes[r][p] = add_products(sums_of_codes[r][p], w,
                                                       a[r * a_stride + g * GROUP_UNITS + k]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            QuantisedRow row(a + r * a_stride, groups);
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                acc[r][p] += to<Floats>(sums_of_codes[r][p]) * (factor[p] * row.scales[g]);
                if (Q::PARTS == 2) acc[r][p] += minimum[p] * (row.scales[g] * float(row.sums[g]));
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}
