// The products of attention: any number of rows by the panels of keys or values in a block.
#pragma once

#include <algorithm>
#include <utility>

#include "tile.h"

// out[rows][panels * 16] (+)= a x segments, for any number of rows and panels. prefetch: or null.
template <class E, int ROWS, int PANELS>
void product(float* out, long out_stride, const uint32_t* a, long a_stride, const Segment* segment,
             int segments, int depth, long step, bool add, const Prefetch* prefetch) {
    Floats acc[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            acc[r][p] = add ? load<Floats>(out + r * out_stride + p * LANES) : Floats{};
    multiply<E, ROWS, PANELS>(acc, Rows{a, a_stride}, segment, segments, depth, step,
                              prefetch ? *prefetch : Prefetch());
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}

template <class E, int PANELS, int... ROWS>
auto product_of_rows(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr decltype(&product<E, 1, PANELS>) all[] = {product<E, ROWS + 1, PANELS>...};
    return all[rows - 1];
}

template <class E>
auto choose_product(int rows, int panels) {
    typedef std::make_integer_sequence<int, TILE_ROWS<E>> Rows;
    if (panels == 1) return product_of_rows<E, 1>(rows, Rows());
    if (panels == TILE_PANELS) return product_of_rows<E, TILE_PANELS>(rows, Rows());
    return product_of_rows<E, WIDE_PANELS>(rows, std::make_integer_sequence<int, FEW_ROWS>());
}

// Returns the number of panels that a product takes at a time.
inline int panels_at_once(int rows, int panels) {
    return rows <= FEW_ROWS && panels >= WIDE_PANELS ? WIDE_PANELS : std::min(TILE_PANELS, panels);
}

template <class E>
void products(int panels, int rows, float* out, long out_stride, const uint32_t* a, long a_stride,
              const Segment* segment, int segments, int depth, long step, bool add,
              const Prefetch* prefetch) {
    int tiles = (rows + TILE_ROWS<E> - 1) / TILE_ROWS<E>;
    for (int t = 0; t < tiles; t++) {
        int row = t * rows / tiles, count = (t + 1) * rows / tiles - row;
        choose_product<E>(count, panels)(out + row * out_stride, out_stride, a + row * a_stride,
                                         a_stride, segment, segments, depth, step, add,
                                         t == 0 ? prefetch : nullptr);
    }
}
