// The one inner loop: a tile of a matrix product, kept in registers.
#pragma once

#include "fetch.h"
#include "rows.h"

// Rows and 16-column panels of the largest tile: as many sums as registers hold, beside a unit of
// each panel and, where it takes several products, its term. Of few rows a tile is wider, so that
// no sum waits for itself.
#if defined(__AVX512F__)
template <class E>
constexpr int TILE_ROWS = E::TERMS == 1 ? 8 : 12;
constexpr int TILE_PANELS = 2, FEW_ROWS = 3, WIDE_PANELS = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
template <class E>
constexpr int TILE_ROWS = E::TERMS == 1 ? 6 : 5;
constexpr int TILE_PANELS = 1, FEW_ROWS = 1, WIDE_PANELS = 2;
#else
template <class E>
constexpr int TILE_ROWS = E::TERMS == 1 ? 3 : 2;
constexpr int TILE_PANELS = 1, FEW_ROWS = 1, WIDE_PANELS = 2;
#endif

// What a product fetches meanwhile: one line of each for a unit of depth, but for null.
struct Ahead {
    const char* lines[WIDE_PANELS] = {};
};

// One stretch of the inner dimension. A panel is [depth][16 columns] units, `step` units from one
// depth to the next.
struct Stretch {
    const uint32_t* panels[WIDE_PANELS];
};

// acc[row][panel] += rows[row] x panel, over `stretches` of `depth` units each; what meets them lies
// one after the other in the rows, Rows or PackedRows.
template <class E, int ROWS, int PANELS, class R>
INLINE void multiply(Floats (&acc)[ROWS][PANELS], const R rows, const Stretch* stretch,
                     int stretches, long depth, long step, const Ahead ahead) {
    // Every loop over sums is unrolled, or they would pass through memory.
    // Few sums would wait for themselves: then each term has its own.
    constexpr int CHAINS = ROWS * PANELS <= 3 ? E::TERMS : 1;
    Floats sums[CHAINS][ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            sums[0][r][p] = acc[r][p];
            if (CHAINS == 2) sums[CHAINS - 1][r][p] = Floats(0.0f);
        }
    long unit = 0;
    for (int s = 0; s < stretches; s++) {
        for (long k = 0; k < depth; k++, unit++) {
            Words b[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                b[p] = load<Words>(stretch[s].panels[p] + k * step);
                if (ahead.lines[p]) __builtin_prefetch(ahead.lines[p] + unit * 64, 0, 2);
            }
#pragma GCC unroll 2
            for (int t = 0; t < E::TERMS; t++) {
                Words terms[PANELS];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) terms[p] = E::term(b[p], t);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    auto x = rows.template meets<E>(unit, t, r);
#pragma GCC unroll 4
                    for (int p = 0; p < PANELS; p++)
                        sums[t % CHAINS][r][p] =
                            E::multiply_add(sums[t % CHAINS][r][p], x, terms[p]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            acc[r][p] = CHAINS == 1 ? sums[0][r][p] : sums[0][r][p] + sums[CHAINS - 1][r][p];
}
