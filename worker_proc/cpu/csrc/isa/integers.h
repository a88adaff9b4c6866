// Products of rows in 8 bits with the codes of panels: the layout of the codes, and the sums.
//
// Both are read in groups of 32 inputs, of which a unit is four neighbours. The codes of a group are
// eight lines of 16 words. `Isa::Layout` says which unit of which column a word is, and `Isa::Integers`
// multiplies lines in that layout. Sums of integers are exact, so that their order is free; sums of
// floats have the same order for any number of rows.
#pragma once

#include "../simd.h"

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
    INLINE int32_t sum(long group, int part) const {
        if (PARTS == 1) return sums[group];
        return part == 0 ? first_sums[group] : sums[group] - first_sums[group];
    }
};

// Where unit `unit` of column `column` of a group is.
struct CodePlace {
    int line, word;
};

// A line is a unit of all 16 columns.
struct LaneLayout {
    // Whether the rows of a tile are interleaved before they are multiplied.
    static constexpr bool PACKED = false;

    static CodePlace place(int unit, int column) { return {unit, column}; }
    // Columns that are multiplied one after another are in several slices; UNITS lines of a part have
    // UNITS / SLICES lines of each slice. Returns the i-th of them.
    static constexpr int SLICES = 1;
    static constexpr int line(int, int i) { return i; }
};

template <class Isa, int ROWS>
struct LaneIntegers {
    // Rows at equal distances.
    struct Inputs {
        const uint32_t* first;
        long stride, groups;

        INLINE QuantizedRow row(int r) const { return QuantizedRow(first + r * stride, groups); }
        INLINE float scale(int r, long group) const { return row(r).scales[group]; }
        INLINE int32_t sum(int r, long group) const { return row(r).sums[group]; }
    };

    // Sums of the products of codes, of a part of a group and a slice of columns.
    struct Sums {
        Ints rows[ROWS];

        // Begins with ZERO subtracted from each code, for codes of 0 to MAX.
        template <int MAX, int ZERO, int PARTS>
        INLINE void start(const Inputs& x, long group, int part) {
            constexpr int AWAY = ZERO - Isa::template MIDDLE<MAX>;
            for (int r = 0; r < ROWS; r++)
                rows[r] = AWAY ? -AWAY * x.row(r).template sum<PARTS>(group, part) : 0;
        }

        // Adds the products with line k of a group.
        template <int MAX>
        INLINE void add(Words line, int k, const Inputs& x, long group) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
                rows[r] = Isa::template add_products<MAX>(
                    rows[r], line, x.first + r * x.stride + group * GROUP_UNITS, k);
        }
    };

    // Sums of the products of weights.
    struct Floats16 {
        Floats rows[ROWS] = {};

        // Adds products of slice `slice` times the scales of weights and inputs.
        INLINE void add(int, const Sums& products, Floats factor, const Inputs& x, long group) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
                rows[r] += to<Floats>(products.rows[r]) * (factor * x.row(r).scales[group]);
        }

        // Adds products of slice `slice` times the scale of inputs.
        INLINE void add(int, const Sums& products, const Inputs& x, long group) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
                rows[r] += to<Floats>(products.rows[r]) * x.row(r).scales[group];
        }

        // Adds the products with the minimum of each weight.
        template <int PARTS>
        INLINE void add_minimum(Floats minimum, const Inputs& x, long group, int part) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                float sum = float(x.row(r).template sum<PARTS>(group, part));
                rows[r] += minimum * (x.row(r).scales[group] * sum);
            }
        }

        INLINE Floats row(int r) const { return rows[r]; }
    };
};
