// Products with dense panels, in the compute type.
#pragma once

#include <utility>

#include "tile.h"

constexpr int PANELS_A_PIECE = 2;  // a panel of gate and its panel of up are in one piece
constexpr int PIECE_COLUMNS = PANELS_A_PIECE * LANES;

template <class E, int ROWS, int PANELS>
void tile_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                  const uint32_t* panels, long panel_units, long depth, const Prefetch& prefetch,
                  int) {
    Floats acc[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) acc[r][p] = Floats(0.0f);
    Segment segment;
    for (int p = 0; p < PANELS; p++) segment.panels[p] = panels + p * panel_units;
    multiply<E, ROWS, PANELS>(acc, dense_rows<E, ROWS>(a, a_stride), &segment, 1, depth, LANES,
                              prefetch);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}

// Returns F's product for a tile of some rows and one or TILE_PANELS panels.
template <class F, int... ROWS>
TileProduct choose_tile(int rows, int panels, std::integer_sequence<int, ROWS...>) {
    static constexpr TileProduct of_one[] = {F::template product<ROWS + 1, 1>...};
    static constexpr TileProduct of_all[] = {F::template product<ROWS + 1, TILE_PANELS>...};
    return (panels == 1 ? of_one : of_all)[rows - 1];
}

// Products unit by unit, with panels [depth][16 columns].
template <class E>
struct UnitProducts {
    static constexpr int ROWS = TILE_ROWS<E>;
    static constexpr bool PACKED = E::PACKED;
    template <int R>
    static constexpr Pack pack = ::pack<E, R>;

    template <int R, int PANELS>
    static constexpr TileProduct product = tile_product<E, R, PANELS>;

    static TileProduct tile(int64_t, int rows, int panels) {
        return choose_tile<UnitProducts>(rows, panels, std::make_integer_sequence<int, ROWS>());
    }
};

// Products by the instruction set's matrix instructions for bfloat16, with panels in its layout.
template <class M>
struct MatrixProducts {
    static constexpr int ROWS = M::ROWS;
    static constexpr bool PACKED = M::PACKED;
    template <int R>
    static constexpr Pack pack = M::template pack<R>;

    static TileProduct tile(int64_t, int rows, int panels) {
        return choose_tile<MatrixProducts>(rows, panels, std::make_integer_sequence<int, ROWS>());
    }

  private:
    template <class F, int... R>
    friend TileProduct choose_tile(int rows, int panels, std::integer_sequence<int, R...>);

    template <int R, int PANELS>
    static void product(float* out, long out_stride, const uint32_t* a, long a_stride,
                        const uint32_t* panels, long panel_units, long depth,
                        const Prefetch& prefetch, int) {
        M::template multiply<R, PANELS>(out, out_stride, a, a_stride, panels, panel_units, depth,
                                        prefetch.lines);
    }
};

// Products of a compute type with matrices. All products with a matrix go the same way, as ways round
// differently.
template <class E>
constexpr bool BY_MATRICES = std::is_same_v<E, BFloat16Pairs> && Isa::HAS_MATRICES;
template <class E>
using Dense = std::conditional_t<BY_MATRICES<E>, MatrixProducts<Isa::Matrices>, UnitProducts<E>>;

// Where units are in a panel.
template <class E>
using DenseLayout = std::conditional_t<BY_MATRICES<E>, Isa::Matrices, UnitLayout>;

template <class F, int... ROWS>
Pack choose_pack(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr Pack all[] = {F::template pack<ROWS + 1>...};
    return all[rows - 1];
}
