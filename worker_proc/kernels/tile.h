// The one inner loop: a tile of a matrix product, kept in registers.
#pragma once

#include "simd.h"

// Rows and 16-column panels of the largest tile: as many accumulators as registers hold.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8, TILE_PANELS = 2;
#else
constexpr int TILE_ROWS = 3, TILE_PANELS = 1;
#endif

// What will be needed next, fetched into the cache meanwhile: one line of each for a unit of depth.
struct Ahead {
    const char* lines[TILE_PANELS] = {};
};

// One stretch of the inner dimension. A panel is [depth][16 columns] units, `step` units from one
// depth to the next.
struct Stretch {
    const uint32_t* panels[TILE_PANELS];
};

// acc[row][panel] += a[row] x panel, over `stretches` of `depth` units each, which lie one after
// the other in a's rows.
template <class E, int ROWS, int PANELS>
INLINE void multiply(Floats (&acc)[ROWS][PANELS], const uint32_t* a, long a_stride,
                     const Stretch* stretch, int stretches, int depth, long step,
                     const Ahead& ahead) {
    for (int s = 0; s < stretches; s++, a += depth) {
        for (int k = 0; k < depth; k++) {
            Words b[PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                b[p] = load<Words>(stretch[s].panels[p] + k * step);
                if (ahead.lines[p])
                    __builtin_prefetch(ahead.lines[p] + (s * depth + k) * 64L, 0, 2);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                Words x = all_words(a[r * a_stride + k]);
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) acc[r][p] = E::multiply_add(acc[r][p], x, b[p]);
            }
        }
    }
}
