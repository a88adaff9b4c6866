// Products with quantized weights; compiled in parallel with the compute types, which share them.
#include "quantized.h"

#include <utility>

#include "quantized/product.h"

template <class Q, int PANELS, int... ROWS>
TileProduct choose(int rows, std::integer_sequence<int, ROWS...>) {
    if constexpr (Isa::MANY_ROWS > 0)
        if (rows > Isa::INTEGER_ROWS) return quantized_product_of_many<Q, PANELS>;
    static constexpr TileProduct all[] = {quantized_product<Q, ROWS + 1, PANELS>...};
    return all[rows - 1];
}

TileProduct quantized_tile(int64_t format, int rows, int panels) {
    typedef std::make_integer_sequence<int, Isa::INTEGER_ROWS> Rows;
    return visit_format(format, [&](auto q) {
        typedef decltype(q) Q;
        return panels == 1 ? choose<Q, 1>(rows, Rows()) : choose<Q, TILE_PANELS>(rows, Rows());
    });
}

void dequantize_column(float* to, int64_t format, const uint32_t* panel, long groups, int lane,
                       long width) {
    visit_format(format, [&](auto q) {
        typedef decltype(q) Q;
        auto scales = Q::scales_of(panel, groups);
        float factor = 0, minimum = 0;
        for (long i = 0; i < width; i++) {
            long group = i / GROUP;
            int k = int(i % GROUP), part = k / (GROUP / Q::Scales::PARTS);
            if (k % (GROUP / Q::Scales::PARTS) == 0) {
                factor = scales.factor(group, part)[lane];
                minimum = scales.minimum(group, part)[lane];
            }
            CodePlace at = Isa::Layout::place(k / 4, lane);
            const uint32_t* words = panel + group * Q::GROUP_WORDS + at.word;
            uint32_t unit = Q::Code::line([&](int line) { return words[line * LANES]; }, at.line);
            int code = unit >> (8 * (k % 4)) & 255;
            float value = float(code - Q::ZERO) * factor;
            to[i] = Q::Scales::HAS_MINIMUM ? value + minimum : value;
        }
    });
}
