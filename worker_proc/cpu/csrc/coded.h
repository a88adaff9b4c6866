// Products with the codes of quantised checkpoints, whose scales are as large and as many as in the
// file. A panel of 16 columns has a header, codes [groups of 32 inputs][GROUP_BYTES], scales
// [scales][16] and, if the header says so, zeros [scales][16] bytes.
#pragma once

#include <algorithm>

#include "quantised.h"

// SCALE_SHARED: A float for all 16 columns.
enum ScaleType : int32_t { SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_FLOAT32, SCALE_SHARED };

struct alignas(64) CodedHeader {
    int32_t group;  // groups of 32 inputs that share a scale
    int32_t scale_type;
    int32_t has_zeros;  // without, zero is the middle of the codes
    int32_t unused[13];
    float table[16];  // values of the codes of TABLE4; unused by the others
};

template <class C>
struct CodedPanel {
    const CodedHeader& header;
    const uint8_t* codes;
    const uint8_t* scales;
    const uint8_t* zeros;

    CodedPanel(const void* panel, long groups)
        : header(*(const CodedHeader*)panel),
          codes((const uint8_t*)panel + sizeof(CodedHeader)),
          scales(codes + groups * C::GROUP_BYTES),
          zeros(scales + (groups + header.group - 1) / header.group * scale_bytes()) {}

    long scale_bytes() const {
        if (header.scale_type == SCALE_SHARED) return sizeof(float);
        return LANES * (header.scale_type == SCALE_FLOAT32 ? 4 : 2);
    }

    INLINE Floats scale(long s) const {
        const uint8_t* from = scales + s * scale_bytes();
        switch (header.scale_type) {
        case SCALE_FLOAT16: return halves_to_floats((const uint16_t*)from);
        case SCALE_BFLOAT16: return widen((const uint16_t*)from);
        case SCALE_FLOAT32: return load<Floats>(from);
        default: return Floats(*(const float*)from);
        }
    }

    // Returns the zeros less the middle of the codes.
    INLINE Floats zero(long s) const {
        alignas(64) float values[LANES] = {};
        for (int i = 0; i < LANES; i++) values[i] = float(zeros[s * LANES + i] - C::MIDDLE);
        return load<Floats>(values);
    }

    // Returns the weight of column `lane` and of the k-th input.
    float weight(int lane, long k) const {
        long s = k / GROUP / header.group;
        float number = C::number(header, codes + k / GROUP * C::GROUP_BYTES, lane, int(k % GROUP));
        if (header.has_zeros) number -= float(zeros[s * LANES + lane] - C::MIDDLE);
        return number * scale(s)[lane];
    }
};

// Integers, in the lines of Int8 and Int4. Inputs are rounded to 8 bits in groups of 32, so that
// products are integers.
template <class Q, int ZERO>
struct CodedInteger {
    static constexpr int GROUP_BYTES = Q::LINES * LANES * 4, MIDDLE = ZERO;

    static INLINE Words unit(const uint8_t* group, int k) {
        return Q::unit(load<Words>(group + k % Q::LINES * LANES * 4), k);
    }
    static float number(const CodedHeader&, const uint8_t* group, int lane, int k) {
        return float(Q::code(group, lane, k) - MIDDLE);
    }
};
typedef CodedInteger<Int8, 128> CodedInt8;
typedef CodedInteger<Int4, 8> CodedInt4;

// float8_e4m3fn [inputs][16 columns]. Shifted by 7 bits, a code is a float16 of the same value over 256.
struct CodedFloat8 {
    static constexpr int GROUP_BYTES = GROUP * LANES, MIDDLE = 0, INPUTS = 1, LINE_BYTES = LANES;

    static INLINE void numbers(Floats* to, const uint8_t* line, const CodedHeader&) {
        Halves code = ::to<Halves>(load<Vector<uint8_t>>(line));
        Halves half = ((code & uint16_t(0x80)) << 8) | ((code & uint16_t(0x7f)) << 7);
        alignas(64) uint16_t halves[LANES];
        store(halves, half);
        to[0] = halves_to_floats(halves) * 256.0f;
    }
    static float number(const CodedHeader&, const uint8_t* group, int lane, int k) {
        uint16_t code = group[k * LANES + lane];
        return half_to_float((code & 0x80) << 8 | (code & 0x7f) << 7) * 256;
    }
};

// Codes of 4 bits that select from a table: [pairs of inputs][16 columns] bytes, the first in the low
// half.
struct CodedTable4 {
    static constexpr int GROUP_BYTES = GROUP * LANES / 2, MIDDLE = 0, INPUTS = 2, LINE_BYTES = LANES;

    static INLINE void numbers(Floats* to, const uint8_t* line, const CodedHeader& header) {
        Words codes = ::to<Words>(load<Vector<uint8_t>>(line));
        to[0] = select_from(header.table, codes & 15u);
        to[1] = select_from(header.table, codes >> 4);
    }
    static float number(const CodedHeader& header, const uint8_t* group, int lane, int k) {
        return header.table[group[k / 2 * LANES + lane] >> (k % 2 * 4) & 15];
    }

  private:
    static INLINE Floats select_from(const float* table, Words codes) {
#if defined(__AVX512F__)
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)_mm512_permutexvar_ps((__m512i)codes.parts[i],
                                                       _mm512_load_ps(table));
        });
#elif defined(__AVX2__)
        return Floats::of([&](int i) INLINED {
            __m256i index = (__m256i)codes.parts[i];
            __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), index);
            __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), index);
            return (Floats::Part)_mm256_blendv_ps(low, high,
                                                  (__m256)_mm256_slli_epi32(index, 28));
        });
#else
        alignas(64) float values[LANES];
        for (int i = 0; i < LANES; i++) values[i] = table[codes[i]];
        return load<Floats>(values);
#endif
    }
};

// Prefetches the part of the next panel that is as far in it as group g is in this one.
template <class C>
INLINE void prefetch_group(const char* next, long g) {
    if (!next) return;
    constexpr int BYTES = C::GROUP_BYTES + 64;  // and a line of scales
    for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(next + g * BYTES + byte, 0, 2);
}

// Like quantised_product.
template <class C, int ROWS, int PANELS>
void coded_integer_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                           const uint32_t* panels, long panel_units, long groups,
                           const Prefetch& prefetch) {
    Floats acc[ROWS][PANELS] = {};
    const CodedHeader& header = *(const CodedHeader*)panels;
    for (long first = 0, s = 0; first < groups; first += header.group, s++) {
        Floats sums[ROWS][PANELS] = {};
        float inputs[ROWS] = {};
        for (long g = first, end = std::min(groups, first + header.group); g < end; g++) {
            Ints products[ROWS][PANELS];
            for (int r = 0; r < ROWS; r++) {
                int32_t sum = QuantisedRow(a + r * a_stride, groups).sums[g];
                for (int p = 0; p < PANELS; p++) products[r][p] = Ints(-C::MIDDLE * sum);
            }
            for (int p = 0; p < PANELS; p++) prefetch_group<C>(prefetch.lines[p], g);
#pragma GCC unroll 8
            for (int k = 0; k < GROUP_UNITS; k++) {
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) {
                    CodedPanel<C> panel(panels + p * panel_units, groups);
                    Words w = C::unit(panel.codes + g * C::GROUP_BYTES, k);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
                        products[r][p] = add_products(products[r][p], w,
                                                      a[r * a_stride + g * GROUP_UNITS + k]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                QuantisedRow row(a + r * a_stride, groups);
                inputs[r] += row.scales[g] * float(row.sums[g]);
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++)
                    sums[r][p] += to<Floats>(products[r][p]) * row.scales[g];
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            CodedPanel<C> panel(panels + p * panel_units, groups);
            Floats scale = panel.scale(s), zero = header.has_zeros ? panel.zero(s) : Floats(0.0f);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                acc[r][p] += (sums[r][p] - zero * inputs[r]) * scale;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}

// Multiplies floats: rows of the inputs [groups][32] floats, by codes that become floats in registers.
template <class C, int ROWS, int PANELS>
void coded_float_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                         const uint32_t* panels, long panel_units, long groups,
                         const Prefetch& prefetch) {
    Floats acc[ROWS][PANELS] = {};
    const CodedHeader& header = *(const CodedHeader*)panels;
    for (long first = 0, s = 0; first < groups; first += header.group, s++) {
        Floats sums[ROWS][PANELS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) sums[r][p] = Floats(0.0f);
        for (long g = first, end = std::min(groups, first + header.group); g < end; g++) {
            for (int p = 0; p < PANELS; p++) prefetch_group<C>(prefetch.lines[p], g);
            const uint32_t* x = a + g * GROUP;
            for (int line = 0; line < GROUP / C::INPUTS; line++, x += C::INPUTS) {
                Floats w[PANELS][C::INPUTS];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) {
                    const uint8_t* panel = (const uint8_t*)(panels + p * panel_units);
                    const uint8_t* codes = panel + sizeof(CodedHeader) + g * C::GROUP_BYTES;
                    C::numbers(w[p], codes + line * C::LINE_BYTES, *(const CodedHeader*)panel);
                }
#pragma GCC unroll 2
                for (int i = 0; i < C::INPUTS; i++)
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                        for (int p = 0; p < PANELS; p++)
                            sums[r][p] = add_product(sums[r][p], x + r * a_stride + i, w[p][i]);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            Floats scale = CodedPanel<C>(panels + p * panel_units, groups).scale(s);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) acc[r][p] += sums[r][p] * scale;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}

template <class C>
struct CodedIntegers {
    static constexpr int ROWS = QUANTISED_TILE_ROWS;
    static constexpr bool PACKED = false;
    template <int R, int P>
    static constexpr auto product = coded_integer_product<C, R, P>;
};

template <class C>
struct CodedFloats {
    static constexpr int ROWS = VECTORS == 1 ? 8 : 4;
    static constexpr bool PACKED = false;
    template <int R, int P>
    static constexpr auto product = coded_float_product<C, R, P>;
};

// Copies a row of inputs as floats, in the order of the matrix's columns (null: as they are), with
// zeros up to a multiple of 32.
template <class T>
void arrange(float* to, const T* x, const int32_t* order, long count, long padded) {
    for (long i = 0; i < count; i++) to[i] = widen_one(x[order ? order[i] : i]);
    for (long i = count; i < padded; i++) to[i] = 0;
}
