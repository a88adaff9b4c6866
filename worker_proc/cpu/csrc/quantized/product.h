// The inner loop of a product with quantized weights: integers of 8 bits are multiplied, and the sums
// of a group, or of each half of it, are multiplied by the scales of weights and inputs.
#pragma once

#include "../tile.h"
#include "formats.h"

// Like tile_product, with quantized rows in `a`, and a depth in groups.
template <class Q, int ROWS, int PANELS>
void quantized_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                       const uint32_t* panels, long panel_units, long groups,
                       const Prefetch& prefetch) {
    typedef typename Q::Code Code;
    constexpr int PARTS = Q::Scales::PARTS, LINES = Code::LINES;
    constexpr bool HAS_MINIMUM = Q::Scales::HAS_MINIMUM;
    Floats acc[ROWS][PANELS] = {};
    for (long g = 0; g < groups; g++) {
        for (int p = 0; p < PANELS; p++)
            if (prefetch.lines[p])
                for (int line = 0; line < LINES + 1; line++)
                    __builtin_prefetch(prefetch.lines[p] + (g * (LINES + 1) + line) * 64, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Floats factor[PANELS], minimum[PANELS];
            Ints sums_of_codes[ROWS][PANELS];
            for (int p = 0; p < PANELS; p++) {
                auto scales = Q::scales_of(panels + p * panel_units, groups);
                factor[p] = scales.factor(g, part);
                if (HAS_MINIMUM) minimum[p] = scales.minimum(g, part);
                for (int r = 0; r < ROWS; r++) {
                    QuantizedRow row(a + r * a_stride, groups);
                    sums_of_codes[r][p] = Q::ZERO ? -Q::ZERO * row.template sum<PARTS>(g, part) : 0;
                }
            }
#pragma GCC unroll 8
            for (int unit = 0; unit < Q::UNITS_A_PART; unit++) {
                int k = part * Q::UNITS_A_PART + unit;
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) {
                    const uint32_t* lines = panels + p * panel_units + g * Q::GROUP_WORDS;
                    Words w = Code::unit(
                        [&](int i) INLINED { return load<Words>(lines + i * LANES); }, k);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
                        sums_of_codes[r][p] = add_products(sums_of_codes[r][p], w,
                                                           a[r * a_stride + g * GROUP_UNITS + k]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                QuantizedRow row(a + r * a_stride, groups);
                float scale = row.scales[g], sum = float(row.template sum<PARTS>(g, part));
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) {
                    acc[r][p] += to<Floats>(sums_of_codes[r][p]) * (factor[p] * scale);
                    if (HAS_MINIMUM) acc[r][p] += minimum[p] * (scale * sum);
                }
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}
