// Products with the codes of quantized checkpoints, and their values. The folder coded/ has the
// formats.
#pragma once

#include "program.h"
#include "quantized.h"

// Returns the product of a tile with panels of a coded format.
TileProduct coded_tile(int64_t format, int rows, int panels);

// Writes the first `width` weights of column `lane` of a panel, exactly.
void coded_column(float* to, int64_t format, const uint32_t* panel, long groups, int lane,
                  long width);

INLINE bool is_coded(int64_t format) { return format >= CODED_INT8 && format <= CODED_TABLE4; }

// Tiles of integers; the inputs are rounded to 8 bits.
struct CodedIntegers {
    static constexpr int ROWS = Isa::INTEGER_ROWS;
    static constexpr bool PACKED = Isa::Layout::PACKED;
    template <int R>
    static constexpr Pack pack = Isa::Integers<Isa, R>::pack;

    static TileProduct tile(int64_t format, int rows, int panels) {
        return coded_tile(format, rows, panels);
    }
};

// Tiles of floats.
struct CodedFloats {
    static constexpr int ROWS = Isa::CODED_FLOAT_ROWS;
    static constexpr bool PACKED = false;

    static TileProduct tile(int64_t format, int rows, int panels) {
        return coded_tile(format, rows, panels);
    }
};

// Copies a row of inputs as floats, in the order of the matrix's columns (null: as they are), with
// zeros up to a multiple of 32.
template <class T>
void arrange(float* to, const T* x, const int32_t* order, long count, long padded) {
    for (long i = 0; i < count; i++) to[i] = widen_one(x[order ? order[i] : i]);
    for (long i = count; i < padded; i++) to[i] = 0;
}
