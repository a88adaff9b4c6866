// Panels with the codes of quantized checkpoints, whose scales are as large and as many as in the
// file. A panel of 16 columns has a header, codes [groups of 32 inputs][GROUP_BYTES], scales
// [scales][16] and, if the header says so, zeros [scales][16] bytes.
#pragma once

#include "../program.h"
#include "../quantized/inputs.h"
#include "../quantized/scales.h"

// SCALE_SHARED: A float for all 16 columns.
enum ScaleType : int32_t { SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_FLOAT32, SCALE_SHARED };

struct alignas(64) CodedHeader {
    int32_t group;  // groups of 32 inputs that share a scale
    int32_t scale_type;
    int32_t has_zeros;  // without, zero is the middle of the codes
    int32_t unused[13];
    float table[16];  // values of the codes of TABLE4; unused by the others
};

template <class C>
struct CodedPanel {
    const CodedHeader& header;
    const uint8_t* codes;
    const uint8_t* scales;
    const uint8_t* zeros;

    CodedPanel(const void* panel, long groups)
        : header(*(const CodedHeader*)panel),
          codes((const uint8_t*)panel + sizeof(CodedHeader)),
          scales(codes + groups * C::GROUP_BYTES),
          zeros(scales + (groups + header.group - 1) / header.group * scale_bytes()) {}

    long scale_bytes() const {
        if (header.scale_type == SCALE_SHARED) return sizeof(float);
        return LANES * (header.scale_type == SCALE_FLOAT32 ? 4 : 2);
    }

    INLINE Floats scale(long s) const {
        const uint8_t* from = scales + s * scale_bytes();
        switch (header.scale_type) {
        case SCALE_FLOAT16: return Isa::halves_to_floats((const uint16_t*)from);
        case SCALE_BFLOAT16: return widen((const uint16_t*)from);
        case SCALE_FLOAT32: return load<Floats>(from);
        default: return Floats(*(const float*)from);
        }
    }

    // Returns the zeros less the middle of the codes.
    INLINE Floats zero(long s) const {
        alignas(64) float values[LANES] = {};
        for (int i = 0; i < LANES; i++) values[i] = float(zeros[s * LANES + i] - C::MIDDLE);
        return load<Floats>(values);
    }

    // Returns the weight of column `lane` and of the k-th input.
    float weight(int lane, long k) const {
        long s = k / GROUP / header.group;
        float number = C::number(header, codes + k / GROUP * C::GROUP_BYTES, lane, int(k % GROUP));
        if (header.has_zeros) number -= float(zeros[s * LANES + lane] - C::MIDDLE);
        return number * scale(s)[lane];
    }
};

// Integers of 8 or 4 bits in lines of 16 words, see isa/integers.h; with 4 bits, lines 0 to 3 are in the
// low halves. Inputs are rounded to 8 bits in groups of 32, so that products are integers.
template <int BITS>
struct CodedInteger {
    static constexpr int LINES = GROUP_UNITS * BITS / 8, GROUP_BYTES = LINES * LANES * 4;
    static constexpr int MIDDLE = 1 << (BITS - 1), MAX = 2 * MIDDLE - 1;

    static INLINE Words line(const uint8_t* group, int k) {
        Words line = load<Words>(group + k % LINES * LANES * 4);
        return BITS == 8 ? line : (k < LINES ? line : line >> 4) & 0x0f0f0f0fu;
    }
    static float number(const CodedHeader&, const uint8_t* group, int lane, int k) {
        CodePlace at = Isa::Layout::place(k / 4, lane);
        int byte = group[(at.line % LINES * LANES + at.word) * 4 + k % 4];
        if (BITS == 4) byte = at.line < LINES ? byte & 15 : byte >> 4;
        return float(byte - MIDDLE);
    }
};
typedef CodedInteger<8> CodedInt8;
typedef CodedInteger<4> CodedInt4;

// float8_e4m3fn [inputs][16 columns]. Shifted by 7 bits, a code is a float16 of the same value over 256.
struct CodedFloat8 {
    static constexpr int GROUP_BYTES = GROUP * LANES, MIDDLE = 0, INPUTS = 1, LINE_BYTES = LANES;

    static INLINE void numbers(Floats* to, const uint8_t* line, const CodedHeader&) {
        Halves code = ::to<Halves>(load<Vector<uint8_t>>(line));
        Halves half = ((code & uint16_t(0x80)) << 8) | ((code & uint16_t(0x7f)) << 7);
        alignas(64) uint16_t halves[LANES];
        store(halves, half);
        to[0] = Isa::halves_to_floats(halves) * 256.0f;
    }
    static float number(const CodedHeader&, const uint8_t* group, int lane, int k) {
        uint16_t code = group[k * LANES + lane];
        return half_to_float((code & 0x80) << 8 | (code & 0x7f) << 7) * 256;
    }
};

// Codes of 4 bits that select from a table: [pairs of inputs][16 columns] bytes, the first in the low
// half.
struct CodedTable4 {
    static constexpr int GROUP_BYTES = GROUP * LANES / 2, MIDDLE = 0, INPUTS = 2, LINE_BYTES = LANES;

    static INLINE void numbers(Floats* to, const uint8_t* line, const CodedHeader& header) {
        Words codes = ::to<Words>(load<Vector<uint8_t>>(line));
        to[0] = Isa::look_up(header.table, codes & 15u);
        to[1] = Isa::look_up(header.table, codes >> 4);
    }
    static float number(const CodedHeader& header, const uint8_t* group, int lane, int k) {
        return header.table[group[k / 2 * LANES + lane] >> (k % 2 * 4) & 15];
    }
};
