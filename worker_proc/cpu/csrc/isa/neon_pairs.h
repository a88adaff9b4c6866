// ARM64 with i8mm and bf16: an instruction multiplies two columns by two rows, of eight inputs in 8 bits
// or of four in bfloat16.
#pragma once

#include <arm_neon.h>

#include "integers.h"

// A line is two neighbouring units of eight columns, so that a vector of it has two columns.
struct PairedLayout {
    static constexpr bool PACKED = true;

    static CodePlace place(int unit, int column) {
        return {unit / 2 * 2 + column / 8, column % 8 * 2 + unit % 2};
    }
    // Eight columns at a time, whose sums fit in registers.
    static constexpr int SLICES = 2;
    static constexpr int line(int slice, int i) { return 2 * i + slice; }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Sums of two columns are a vector: of the first column for rows 2 p and 2 p + 1, and of the second one.
template <int ROWS>
struct PairedIntegers {
    static constexpr int PAIRS = (ROWS + 1) / 2, COLUMN_PAIRS = LANES / 2;
    static constexpr int SLICE_PAIRS = COLUMN_PAIRS / PairedLayout::SLICES;

    // Rows after `pack`. A row by itself has the same form.
    struct Inputs {
        const uint32_t* first;
        long stride, groups;  // no row has a stride

        const float* scales() const { return (const float*)(first + groups * GROUP_UNITS * ROWS); }
        const int32_t* sums() const { return (const int32_t*)scales() + groups * ROWS; }
        const int32_t* first_sums() const { return sums() + groups * ROWS; }

        float scale(int r, long group) const { return scales()[group * ROWS + r]; }
        int32_t sum(int r, long group) const { return sums()[group * ROWS + r]; }

        // Returns eight inputs of the rows of a pair of rows.
        INLINE int8x16_t operand(int pair, int units, long group) const {
            const uint32_t* at = first + group * GROUP_UNITS * ROWS + pair * 2 * GROUP_UNITS;
            if (2 * pair + 1 == ROWS) return twice<int8x16_t>(at + units * 2);
            return vld1q_s8((const int8_t*)(at + units * 4));
        }

        // Returns values[0], values[1], values[0], values[1] for the rows of a pair of rows.
        template <class V, class T>
        static INLINE V of_pair(const T* values, int pair) {
            values += pair * 2;
            if (2 * pair + 1 == ROWS) return (V)vdupq_n_u32(*(const uint32_t*)values);
            return twice<V>(values);
        }
        INLINE float32x4_t scale_of(int pair, long group) const {
            return of_pair<float32x4_t>(scales() + group * ROWS, pair);
        }
        template <int PARTS>
        INLINE int32x4_t sum_of(int pair, long group, int part) const {
            int32x4_t sum = of_pair<int32x4_t>(sums() + group * ROWS, pair);
            if (PARTS == 1) return sum;
            int32x4_t first_half = of_pair<int32x4_t>(first_sums() + group * ROWS, pair);
            return part == 0 ? first_half : vsubq_s32(sum, first_half);
        }

      private:
        template <class V>
        static INLINE V twice(const void* eight_bytes) {
            uint64_t bytes;
            memcpy(&bytes, eight_bytes, sizeof bytes);
            return (V)vdupq_n_u64(bytes);
        }
    };

    struct Sums {
        int32x4_t pairs[SLICE_PAIRS][PAIRS];

        template <int, int ZERO, int PARTS>
        INLINE void start(const Inputs& x, long group, int part) {
#pragma GCC unroll 8
            for (int p = 0; p < PAIRS; p++) {
                int32x4_t away = vdupq_n_s32(0);
                if (ZERO) away = vmulq_n_s32(x.template sum_of<PARTS>(p, group, part), -ZERO);
#pragma GCC unroll 8
                for (int c = 0; c < SLICE_PAIRS; c++) pairs[c][p] = away;
            }
        }

        template <int>
        INLINE void add(Words line, int k, const Inputs& x, long group) {
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                int8x16_t inputs = x.operand(p, k / 2, group);
#pragma GCC unroll 4
                for (int c = 0; c < SLICE_PAIRS; c++)
                    pairs[c][p] = vusmmlaq_s32(pairs[c][p], (uint8x16_t)line.parts[c], inputs);
            }
        }
    };

    struct Floats16 {
        float32x4_t pairs[COLUMN_PAIRS][PAIRS] = {};

        INLINE void add(int slice, const Sums& products, Floats factor, const Inputs& x, long group) {
            if (ROWS > 2) asm volatile("" : "+m"(pairs));
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                float32x4_t scale = x.scale_of(p, group);
#pragma GCC unroll 4
                for (int c = 0; c < SLICE_PAIRS; c++)
                    add_pair(slice * SLICE_PAIRS + c, p, products.pairs[c][p],
                             vmulq_f32(of_columns(factor, slice * SLICE_PAIRS + c), scale));
            }
        }
        INLINE void add(int slice, const Sums& products, const Inputs& x, long group) {
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                float32x4_t scale = x.scale_of(p, group);
#pragma GCC unroll 4
                for (int c = 0; c < SLICE_PAIRS; c++)
                    add_pair(slice * SLICE_PAIRS + c, p, products.pairs[c][p], scale);
            }
        }
        template <int PARTS>
        INLINE void add_minimum(Floats minimum, const Inputs& x, long group, int part) {
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) {
                float32x4_t sum = vcvtq_f32_s32(x.template sum_of<PARTS>(p, group, part));
                float32x4_t shift = vmulq_f32(x.scale_of(p, group), sum);
#pragma GCC unroll 8
                for (int c = 0; c < COLUMN_PAIRS; c++)
                    pairs[c][p] = vfmaq_f32(pairs[c][p], of_columns(minimum, c), shift);
            }
        }

        INLINE Floats row(int r) const {
            return Floats::of([&](int i) INLINED {
                float32x4_t two = pairs[2 * i][r / 2], others = pairs[2 * i + 1][r / 2];
                return (Floats::Part)(r % 2 ? vuzp2q_f32(two, others) : vuzp1q_f32(two, others));
            });
        }

      private:
        // Returns the values of a pair of columns, each twice.
        static INLINE float32x4_t of_columns(Floats values, int c) {
            float32x4_t four = (float32x4_t)values.parts[c / 2];
            return c % 2 ? vzip2q_f32(four, four) : vzip1q_f32(four, four);
        }
        INLINE void add_pair(int c, int p, int32x4_t products, float32x4_t scale) {
            pairs[c][p] = vfmaq_f32(pairs[c][p], vcvtq_f32_s32(products), scale);
        }
    };

    // Interleaves `count` rows of `groups` groups, `stride` words apart, that one tile multiplies.
    static void pack(uint32_t* to, const uint32_t* rows, long stride, long groups) {
        for (int r = 0; r < ROWS; r++) {
            QuantizedRow row(rows + r * stride, groups);
            bool alone = ROWS % 2 && r == ROWS - 1;
            for (long g = 0; g < groups; g++) {
                uint32_t* at = to + g * GROUP_UNITS * ROWS + r / 2 * 2 * GROUP_UNITS;
                for (int units = 0; units < GROUP_UNITS / 2; units++)
                    memcpy(at + (alone ? units * 2 : units * 4 + r % 2 * 2),
                           row.units + g * GROUP_UNITS + units * 2, 2 * sizeof *to);
                uint32_t* numbers = to + groups * GROUP_UNITS * ROWS + g * ROWS + r;
                memcpy(numbers, row.scales + g, sizeof *to);
                memcpy(numbers + groups * ROWS, row.sums + g, sizeof *to);
                memcpy(numbers + 2 * groups * ROWS, row.first_sums + g, sizeof *to);
            }
        }
    }
};

// One row: the products of two units are in neighbouring lanes.
template <>
struct PairedIntegers<1> {
    struct Inputs {
        const uint32_t* first;
        long stride, groups;

        INLINE QuantizedRow row() const { return QuantizedRow(first, groups); }
        INLINE float scale(int, long group) const { return row().scales[group]; }
        INLINE int32_t sum(int, long group) const { return row().sums[group]; }
    };

    struct Sums {
        int32x4_t pairs[VECTORS];

        template <int, int ZERO, int PARTS>
        INLINE void start(const Inputs& x, long group, int part) {
            int64_t away = 0;
            if (ZERO) away = uint32_t(-ZERO * x.row().template sum<PARTS>(group, part));
            for (int32x4_t& pair : pairs) pair = (int32x4_t)vdupq_n_s64(away);
        }

        template <int>
        INLINE void add(Words line, int k, const Inputs& x, long group) {
            int64_t bytes;
            memcpy(&bytes, x.first + group * GROUP_UNITS + k / 2 * 2, sizeof bytes);
            int8x16_t inputs = (int8x16_t)vdupq_n_s64(bytes);
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++)
                pairs[i] = vusdotq_s32(pairs[i], (uint8x16_t)line.parts[i], inputs);
        }

        // Returns the sums of four columns.
        INLINE float32x4_t columns(int i) const {
            return vcvtq_f32_s32(vpaddq_s32(pairs[2 * i], pairs[2 * i + 1]));
        }
    };

    struct Floats16 {
        Floats sums = {};

        INLINE void add(int slice, const Sums& products, Floats factor, const Inputs& x, long group) {
            add(slice, products, factor * x.row().scales[group]);
        }
        INLINE void add(int slice, const Sums& products, const Inputs& x, long group) {
            add(slice, products, Floats(x.row().scales[group]));
        }
        template <int PARTS>
        INLINE void add_minimum(Floats minimum, const Inputs& x, long group, int part) {
            float sum = float(x.row().template sum<PARTS>(group, part));
            float shift = x.row().scales[group] * sum;
            for (int i = 0; i < VECTORS; i++)
                sums.parts[i] = (Floats::Part)vfmaq_n_f32((float32x4_t)sums.parts[i],
                                                          (float32x4_t)minimum.parts[i], shift);
        }
        INLINE Floats row(int) const { return sums; }

      private:
        INLINE void add(int slice, const Sums& products, Floats scale) {
            for (int i = 0; i < VECTORS / 2; i++) {
                Floats::Part& sum = sums.parts[slice * VECTORS / 2 + i];
                sum = (Floats::Part)vfmaq_f32((float32x4_t)sum, products.columns(i),
                                              (float32x4_t)scale.parts[slice * VECTORS / 2 + i]);
            }
        }
    };

    static void pack(uint32_t* to, const uint32_t* row, long, long groups) {
        memcpy(to, row, (GROUP_UNITS + 3) * groups * sizeof *to);
    }
};
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// A panel is [depth / 2][16 columns][2 units], zeros beyond an odd depth.
struct PairedBFloat16 {
    static constexpr int ROWS = 6;
    static constexpr bool PACKED = true;

    static INLINE long place(long unit, int column) {
        return unit / 2 * 2 * LANES + column * 2 + unit % 2;
    }

    // Packs rows to [depth / 2][R rows][2 units]. One row stays as it is.
    template <int R>
    static void pack(uint32_t* to, const uint32_t* rows, long stride, long depth) {
        if (R == 1) return (void)memcpy(to, rows, depth * sizeof *to);
        for (long unit = 0; unit < depth; unit += 2, to += 2 * R)
            for (int r = 0; r < R; r++) {
                const uint32_t* from = rows + r * stride + unit;
                to[2 * r] = from[0], to[2 * r + 1] = unit + 1 < depth ? from[1] : 0;
            }
    }

    // rows: after `pack`. next: memory to prefetch, a line for each unit of depth, or null.
    template <int R, int PANELS>
    static INLINE void multiply(float* out, long out_stride, const uint32_t* rows, long,
                                const uint32_t* panel, long, long depth, const char* const* prefetch) {
        static_assert(PANELS == 1);
        const char* next = prefetch[0];
        constexpr int PAIRS = (R + 1) / 2, COLUMN_PAIRS = LANES / 2;
        float32x4_t sums[COLUMN_PAIRS][PAIRS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMN_PAIRS; c++)
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) sums[c][p] = vdupq_n_f32(0);
        long whole = R == 1 ? depth / 2 * 2 : depth;
        for (long unit = 0; unit < whole; unit += 2, rows += 2 * R, panel += 2 * LANES) {
            if (next) {
                __builtin_prefetch(next + unit * 64, 0, 2);
                __builtin_prefetch(next + unit * 64 + 64, 0, 2);
            }
            add<R>(sums, rows, panel);
        }
        if (whole < depth) {
            uint32_t last[2] = {*rows, 0};
            add<R>(sums, last, panel);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                float32x4_t two = sums[2 * i][r / 2], others = sums[2 * i + 1][r / 2];
                vst1q_f32(out + r * out_stride + 4 * i,
                          r % 2 ? vuzp2q_f32(two, others) : vuzp1q_f32(two, others));
            }
    }

  private:
    // Adds the products with two units of each column: [column 0 by rows 0, 1, column 1 by rows 0, 1].
    template <int R, int PAIRS>
    static INLINE void add(float32x4_t (&sums)[LANES / 2][PAIRS], const uint32_t* rows,
                           const uint32_t* panel) {
        bfloat16x8_t x[PAIRS];
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; p++) {
            uint64_t alone;
            memcpy(&alone, rows + 4 * p, sizeof alone);
            x[p] = 2 * p + 1 == R ? vreinterpretq_bf16_u64(vdupq_n_u64(alone))
                                  : vld1q_bf16((const bfloat16_t*)(rows + 4 * p));
        }
#pragma GCC unroll 8
        for (int c = 0; c < LANES / 2; c++) {
            bfloat16x8_t columns = vld1q_bf16((const bfloat16_t*)(panel + 4 * c));
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; p++) sums[c][p] = vbfmmlaq_f32(sums[c][p], columns, x[p]);
        }
    }
};
#endif
