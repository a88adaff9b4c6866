// The codes of quantized panels: unsigned numbers of 2 to 8 bits, of which the product reads lines of
// bytes, see isa/integers.h.
#pragma once

#include <algorithm>

#include "../isa/isa.h"

// Returns line k of a group in a plane of BITS bits a code, moved up by TO bits in each byte. A plane
// stores its eight lines in BITS lines of 16 words; line k is in line k % BITS, in bits
// BITS * (k / BITS) and up of each byte. line(i): stored line i of the plane, as one word or as all 16.
template <int BITS, int TO, class Line>
INLINE auto line_of_plane(Line line, int k) {
    constexpr uint32_t MASK = (((1u << BITS) - 1) * 0x01010101u) << TO;
    int from = BITS * (k / BITS);
    auto word = line(k % BITS);
    return (from >= TO ? word >> (from - TO) : word << (TO - from)) & MASK;
}

// Codes in a plane of their LOW bits, followed by a plane of their HIGH bits if there are any.
template <int LOW, int HIGH = 0>
struct Codes {
    static constexpr int LINES = LOW + HIGH, MAX = (1 << (LOW + HIGH)) - 1;

    template <class Line>
    static INLINE auto line(Line stored, int k) {
        auto low = line_of_plane<LOW, 0>(stored, k);
        if constexpr (HIGH == 0)
            return low;
        else
            return low | line_of_plane<HIGH, LOW>([&](int i) INLINED { return stored(LOW + i); }, k);
    }
};

// Returns table[index] for each byte of `indices`, which are 0 to 15.
INLINE uint32_t look_up(const uint8_t* table, uint32_t indices) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 8)
        result |= uint32_t(table[indices >> shift & 15]) << shift;
    return result;
}
INLINE Words look_up(const uint8_t* table, Words indices) { return Isa::look_up(table, indices); }

// Codes of 4 bits that are indices of a table.
template <const uint8_t (&TABLE)[16]>
struct TableCodes {
    static constexpr int LINES = 4, MAX = *std::max_element(TABLE, TABLE + 16);

    template <class Line>
    static INLINE auto line(Line stored, int k) {
        return look_up(TABLE, Codes<4>::line(stored, k));
    }
};
