// The rows that a tile multiplies. Each unit of a panel is multiplied by TERMS words of a row.
#pragma once

#include "numbers.h"

// Rows as they are in a buffer, `stride` words apart.
struct Rows {
    const uint32_t* words;
    long stride;

    template <class E>
    INLINE Isa::Word operand(long unit, int term, int row) const {
        return Isa::word(words + row * stride + unit * E::TERMS + term);
    }
};

// [units][ROWS][TERMS]: all words that are multiplied by the same unit are side by side, at offsets
// known to the compiler. One instruction then loads a word and multiplies by it, which matters on a
// core that shares its instruction decoding with another thread.
template <int ROWS>
struct PackedRows {
    const uint32_t* words;

    template <class E>
    INLINE const uint32_t* operand(long unit, int term, int row) const {
        return words + (unit * ROWS + row) * E::TERMS + term;
    }
};

template <class E, int ROWS>
void pack(uint32_t* to, const uint32_t* rows, long stride, long units) {
    for (long u = 0; u < units; u++, to += ROWS * E::TERMS)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            memcpy(to + r * E::TERMS, rows + r * stride + u * E::TERMS, E::TERMS * sizeof *to);
}

// Rows after `pack` if this type packs them, else rows of a buffer.
template <class E, int ROWS>
INLINE auto dense_rows(const uint32_t* words, long stride) {
    if constexpr (E::PACKED)
        return PackedRows<ROWS>{words};
    else
        return Rows{words, stride};
}
