// The inner loops of products with the codes of quantized checkpoints.
#pragma once

#include <algorithm>

#include "../tile.h"
#include "panels.h"

// Prefetches the part of the next panel that is as far in it as group g is in this one.
template <class C>
INLINE void prefetch_group(const char* next, long g) {
    if (!next) return;
    constexpr int BYTES = C::GROUP_BYTES + 64;  // and a line of scales
    for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(next + g * BYTES + byte, 0, 2);
}

// Multiplies integers, like quantized_product.
template <class C, int ROWS, int PANELS>
void coded_integer_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                           const uint32_t* panels, long panel_units, long groups,
                           const Prefetch& prefetch, int) {
    typedef Isa::Integers<Isa, ROWS> Integers;
    typedef Isa::Layout Layout;
    const typename Integers::Inputs x{a, a_stride, groups};
    Floats acc[ROWS][PANELS] = {};
    const CodedHeader& header = *(const CodedHeader*)panels;
    for (long first = 0, s = 0; first < groups; first += header.group, s++) {
        typename Integers::Floats16 sums[PANELS];
        float inputs[ROWS] = {};
        for (long g = first, end = std::min(groups, first + header.group); g < end; g++) {
            for (int p = 0; p < PANELS; p++) prefetch_group<C>(prefetch.lines[p], g);
#pragma GCC unroll 2
            for (int slice = 0; slice < Layout::SLICES; slice++) {
                typename Integers::Sums products[PANELS];
                for (int p = 0; p < PANELS; p++)
                    products[p].template start<C::MAX, C::MIDDLE, 1>(x, g, 0);
#pragma GCC unroll 8
                for (int i = 0; i < GROUP_UNITS / Layout::SLICES; i++) {
                    int k = Layout::line(slice, i);
#pragma GCC unroll 4
                    for (int p = 0; p < PANELS; p++) {
                        CodedPanel<C> panel(panels + p * panel_units, groups);
                        Words line = C::line(panel.codes + g * C::GROUP_BYTES, k);
                        products[p].template add<C::MAX>(line, k, x, g);
                    }
                }
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) sums[p].add(slice, products[p], x, g);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) inputs[r] += x.scale(r, g) * float(x.sum(r, g));
        }
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            CodedPanel<C> panel(panels + p * panel_units, groups);
            Floats scale = panel.scale(s), zero = header.has_zeros ? panel.zero(s) : Floats(0.0f);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                acc[r][p] += (sums[p].row(r) - zero * inputs[r]) * scale;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}

// Multiplies floats: rows of the inputs [groups][32] floats, by codes that become floats in registers.
template <class C, int ROWS, int PANELS>
void coded_float_product(float* out, long out_stride, const uint32_t* a, long a_stride,
                         const uint32_t* panels, long panel_units, long groups,
                         const Prefetch& prefetch, int) {
    Floats acc[ROWS][PANELS] = {};
    const CodedHeader& header = *(const CodedHeader*)panels;
    for (long first = 0, s = 0; first < groups; first += header.group, s++) {
        Floats sums[ROWS][PANELS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) sums[r][p] = Floats(0.0f);
        for (long g = first, end = std::min(groups, first + header.group); g < end; g++) {
            for (int p = 0; p < PANELS; p++) prefetch_group<C>(prefetch.lines[p], g);
            const uint32_t* x = a + g * GROUP;
            for (int line = 0; line < GROUP / C::INPUTS; line++, x += C::INPUTS) {
                Floats w[PANELS][C::INPUTS];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; p++) {
                    const uint8_t* panel = (const uint8_t*)(panels + p * panel_units);
                    const uint8_t* codes = panel + sizeof(CodedHeader) + g * C::GROUP_BYTES;
                    C::numbers(w[p], codes + line * C::LINE_BYTES, *(const CodedHeader*)panel);
                }
#pragma GCC unroll 2
                for (int i = 0; i < C::INPUTS; i++)
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                        for (int p = 0; p < PANELS; p++)
                            sums[r][p] = Isa::add_product(sums[r][p], x + r * a_stride + i, w[p][i]);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            Floats scale = CodedPanel<C>(panels + p * panel_units, groups).scale(s);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) acc[r][p] += sums[r][p] * scale;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store(out + r * out_stride + p * LANES, acc[r][p]);
}
