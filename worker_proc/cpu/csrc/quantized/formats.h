// The formats of quantized matrices. A panel of 16 columns is the codes of each group of 32 inputs,
// [groups][lines][16 columns] words, followed by the arrays of its scales. The value of code q is
// (q - ZERO) * factor + minimum.
//
// The types of GGUF are those of https://github.com/ggml-org/ggml, ggml-common.h; quantized_panels.py
// lays them out.
#pragma once

#include "../program.h"
#include "codes.h"
#include "scales.h"

template <class C, class S, int Z>
struct QuantizedFormat {
    typedef C Code;
    typedef S Scales;
    static constexpr int ZERO = Z;
    static constexpr int UNITS_A_PART = GROUP_UNITS / S::PARTS;
    static constexpr long GROUP_WORDS = C::LINES * LANES;

    static INLINE Scales scales_of(const uint32_t* panel, long groups) {
        return Scales(panel + groups * GROUP_WORDS, groups);
    }
};

// The values of IQ4_NL and IQ4_XS plus 128, and twice the values of MXFP4 (E2M1) plus 12.
inline constexpr uint8_t IQ4_TABLE[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr uint8_t MXFP4_TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Calls visit(format) with the QuantizedFormat of a number and returns its result.
template <class Visit>
auto visit_format(int64_t format, Visit visit) {
    switch (format) {
    case INT8: return visit(QuantizedFormat<Codes<8>, GroupScales<false>, 128>());
    case INT4: return visit(QuantizedFormat<Codes<4>, GroupScales<true>, 0>());
    case Q4_0: return visit(QuantizedFormat<Codes<4>, GroupScales<false>, 8>());
    case Q5_0: return visit(QuantizedFormat<Codes<4, 1>, GroupScales<false>, 16>());
    case Q5_1: return visit(QuantizedFormat<Codes<4, 1>, GroupScales<true>, 0>());
    case Q2_K: return visit(QuantizedFormat<Codes<2>, NibbleScales, 0>());
    case Q3_K: return visit(QuantizedFormat<Codes<2, 1>, BlockScales<2, false>, 4>());
    case Q4_K: return visit(QuantizedFormat<Codes<4>, BlockScales<1, true>, 0>());
    case Q5_K: return visit(QuantizedFormat<Codes<4, 1>, BlockScales<1, true>, 0>());
    case Q6_K: return visit(QuantizedFormat<Codes<4, 2>, BlockScales<2, false>, 32>());
    case IQ4_NL: return visit(QuantizedFormat<TableCodes<IQ4_TABLE>, GroupScales<false>, 128>());
    case IQ4_XS: return visit(QuantizedFormat<TableCodes<IQ4_TABLE>, BlockScales<1, false>, 128>());
    default: return visit(QuantizedFormat<TableCodes<MXFP4_TABLE>, PowerScales, 12>());  // MXFP4
    }
}
