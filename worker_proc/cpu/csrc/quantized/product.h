// The inner loop of a product with quantized weights: integers of 8 bits are multiplied, and the sums
// of a group, or of each half of it, are multiplied by the scales of weights and inputs.
#pragma once

#include "../tile.h"
#include "formats.h"

// Prefetches the part of the next panels that is as far in them as group g is in these.
template <class C, int PANELS>
INLINE void prefetch_group(const Prefetch& prefetch, long g) {
    constexpr int LINES = C::LINES + 1;  // and one of scales
    for (int p = 0; p < PANELS; p++)
        if (prefetch.lines[p])
            for (int line = 0; line < LINES; line++)
                __builtin_prefetch(prefetch.lines[p] + (g * LINES + line) * 64, 0, 2);
}

// Like tile_product, with quantized rows in `a`, and a depth in groups.
template <class Q, int ROWS, int PANELS>
void quantized_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                       const uint32_t* panels, long panel_units, long groups,
                       const Prefetch& prefetch, int) {
    typedef typename Q::Code Code;
    typedef Isa::Integers<Isa, ROWS> Integers;
    typedef Isa::Layout Layout;
    constexpr int PARTS = Q::Scales::PARTS;
    constexpr bool HAS_MINIMUM = Q::Scales::HAS_MINIMUM;
    const typename Integers::Inputs x{a, a_stride, groups};
    typename Integers::Floats16 sums[PANELS];
    for (long g = 0; g < groups; g++) {
        prefetch_group<Code, PANELS>(prefetch, g);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Floats factor[PANELS], minimum[PANELS];
            for (int p = 0; p < PANELS; p++) {
                auto scales = Q::scales_of(panels + p * panel_units, groups);
                factor[p] = scales.factor(g, part);
                if (HAS_MINIMUM) minimum[p] = scales.minimum(g, part);
            }
#pragma GCC unroll 2
            for (int slice = 0; slice < Layout::SLICES; slice++) {
                typename Integers::Sums products[PANELS];
                for (int p = 0; p < PANELS; p++)
                    products[p].template start<Code::MAX, Q::ZERO, PARTS>(x, g, part);
#pragma GCC unroll 8
                for (int i = 0; i < Q::UNITS_A_PART / Layout::SLICES; i++) {
                    int k = part * Q::UNITS_A_PART + Layout::line(slice, i);
#pragma GCC unroll 4
                    for (int p = 0; p < PANELS; p++) {
                        const uint32_t* stored = panels + p * panel_units + g * Q::GROUP_WORDS;
                        Words line = Code::line(
                            [&](int i) INLINED { return load<Words>(stored + i * LANES); }, k);
                        products[p].template add<Code::MAX>(line, k, x, g);
                    }
                }
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) sums[p].add(slice, products[p], factor[p], x, g);
            }
            if (HAS_MINIMUM)
                for (int p = 0; p < PANELS; p++)
                    sums[p].template add_minimum<PARTS>(minimum[p], x, g, part);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, sums[p].row(r));
}

// The same for many rows, by tiles of integers: the codes of a part of a group are unpacked in memory,
// and multiplied by up to 32 rows at once. Sums have the order of additions of quantized_product.
template <class Q, int PANELS>
void quantized_product_of_many(float* out, long out_stride, const uint32_t* a, long a_stride,
                               const uint32_t* panels, long panel_units, long groups,
                               const Prefetch& prefetch, int rows) {
    typedef typename Q::Code Code;
    constexpr int PARTS = Q::Scales::PARTS, UNITS = Q::UNITS_A_PART;
    constexpr bool HAS_MINIMUM = Q::Scales::HAS_MINIMUM;
    typename Isa::template ByteTiles<UNITS> tiles(rows);
    alignas(64) uint32_t codes[UNITS * LANES];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, Floats(0.0f));
    for (long g = 0; g < groups; g++) {
        prefetch_group<Code, PANELS>(prefetch, g);
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                const uint32_t* stored = panels + p * panel_units + g * Q::GROUP_WORDS;
#pragma GCC unroll 8
                for (int i = 0; i < UNITS; i++)
                    store(codes + i * LANES,
                          Code::line([&](int line) INLINED { return load<Words>(stored + line * LANES); },
                                     part * UNITS + i));
                tiles.multiply(a + g * GROUP_UNITS + part * UNITS, a_stride, codes);
                auto scales = Q::scales_of(panels + p * panel_units, groups);
                Floats factor = scales.factor(g, part), minimum;
                if (HAS_MINIMUM) minimum = scales.minimum(g, part);
                for (int r = 0; r < rows; r++) {
                    QuantizedRow row(a + r * a_stride, groups);
                    int32_t sum = row.template sum<PARTS>(g, part);
                    float* to = out + r * out_stride + p * LANES;
                    Ints products = tiles.products(r);
                    if (Q::ZERO) products = products - Ints(Q::ZERO * sum);
                    Floats acc = load<Floats>(to);
                    acc += ::to<Floats>(products) * (factor * row.scales[g]);
                    if (HAS_MINIMUM) acc += minimum * (row.scales[g] * float(sum));
                    store(to, acc);
                }
            }
    }
}
