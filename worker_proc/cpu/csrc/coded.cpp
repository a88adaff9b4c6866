// Products with the codes of quantized checkpoints; compiled in parallel with the compute types.
#include "coded.h"

#include <utility>

#include "coded/product.h"

template <class C, int PANELS, int... ROWS>
TileProduct choose_integers(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr TileProduct all[] = {coded_integer_product<C, ROWS + 1, PANELS>...};
    return all[rows - 1];
}

template <class C, int PANELS, int... ROWS>
TileProduct choose_floats(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr TileProduct all[] = {coded_float_product<C, ROWS + 1, PANELS>...};
    return all[rows - 1];
}

template <class C>
TileProduct integer_tile(int rows, int panels) {
    typedef std::make_integer_sequence<int, CodedIntegers::ROWS> Rows;
    return panels == 1 ? choose_integers<C, 1>(rows, Rows())
                       : choose_integers<C, TILE_PANELS>(rows, Rows());
}

template <class C>
TileProduct float_tile(int rows, int panels) {
    typedef std::make_integer_sequence<int, CodedFloats::ROWS> Rows;
    return panels == 1 ? choose_floats<C, 1>(rows, Rows())
                       : choose_floats<C, TILE_PANELS>(rows, Rows());
}

TileProduct coded_tile(int64_t format, int rows, int panels) {
    switch (format) {
    case CODED_INT8: return integer_tile<CodedInt8>(rows, panels);
    case CODED_INT4: return integer_tile<CodedInt4>(rows, panels);
    case CODED_FLOAT8: return float_tile<CodedFloat8>(rows, panels);
    default: return float_tile<CodedTable4>(rows, panels);
    }
}

template <class C>
void write_column(float* to, const uint32_t* words, long groups, int lane, long width) {
    CodedPanel<C> panel(words, groups);
    for (long k = 0; k < width; k++) to[k] = panel.weight(lane, k);
}

void coded_column(float* to, int64_t format, const uint32_t* panel, long groups, int lane,
                  long width) {
    switch (format) {
    case CODED_INT8: return write_column<CodedInt8>(to, panel, groups, lane, width);
    case CODED_INT4: return write_column<CodedInt4>(to, panel, groups, lane, width);
    case CODED_FLOAT8: return write_column<CodedFloat8>(to, panel, groups, lane, width);
    default: return write_column<CodedTable4>(to, panel, groups, lane, width);
    }
}
