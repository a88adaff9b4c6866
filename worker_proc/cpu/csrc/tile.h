// The inner loop of every product: a tile of sums that are kept in registers.
#pragma once

#include "prefetch.h"
#include "rows.h"

// Rows and 16-column panels of the largest tile, and of a tile of few rows.
template <class E>
constexpr int TILE_ROWS = E::TERMS == 1 ? Isa::ROWS : Isa::ROWS_OF_TERMS;
constexpr int TILE_PANELS = Isa::PANELS, FEW_ROWS = Isa::FEW_ROWS, WIDE_PANELS = Isa::WIDE_PANELS;

// Memory that a product prefetches: a cache line of each non-null range for each unit of depth.
struct Prefetch {
    const char* lines[WIDE_PANELS] = {};
};

// Writes the products of a tile to floats [rows][out_stride].
typedef void (*TileProduct)(float* out, long out_stride, const uint32_t* a, long a_stride,
                            const uint32_t* panels, long panel_units, long depth,
                            const Prefetch& prefetch, int rows);

// Packs the rows of a tile. units: the depth of the matrix.
typedef void (*Pack)(uint32_t* to, const uint32_t* rows, long stride, long units);

// A segment of the inner dimension. A panel is [depth][16 columns] units, with `step` units from one
// depth to the next.
struct Segment {
    const uint32_t* panels[WIDE_PANELS];
};

// acc[row][panel] += rows[row] x panel, over `segments` of `depth` units each, which are consecutive in
// the rows. R: Rows or PackedRows.
template <class E, int ROWS, int PANELS, class R>
INLINE void multiply(Floats (&acc)[ROWS][PANELS], const R rows, const Segment* segment,
                     int segments, long depth, long step, const Prefetch prefetch) {
    // Every loop over sums is unrolled, as the compiler would keep the sums in memory otherwise.
    // The order of additions does not depend on the size of the tile.
    Floats sums[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sums[r][p] = acc[r][p];
    long unit = 0;
    for (int s = 0; s < segments; s++) {
        for (long k = 0; k < depth; k++, unit++) {
            Words b[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                b[p] = load<Words>(segment[s].panels[p] + k * step);
                if (prefetch.lines[p]) __builtin_prefetch(prefetch.lines[p] + unit * 64, 0, 2);
            }
#pragma GCC unroll 2
            for (int t = 0; t < E::TERMS; t++) {
                Words terms[PANELS];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) terms[p] = E::term(b[p], t);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    auto x = rows.template operand<E>(unit, t, r);
#pragma GCC unroll 4
                    for (int p = 0; p < PANELS; p++)
                        sums[r][p] = E::multiply_add(sums[r][p], x, terms[p]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) acc[r][p] = sums[r][p];
}
