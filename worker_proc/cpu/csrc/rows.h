// The rows that a tile multiplies. A unit of a panel meets TERMS words of each.
#pragma once

#include "numbers.h"

// One after the other, `stride` words apart.
struct Rows {
    const uint32_t* words;
    long stride;

    template <class E>
    INLINE Words meets(long unit, int term, int row) const {
        return words[row * stride + unit * E::TERMS + term];
    }
};

// [units][ROWS][TERMS]: what meets one unit lies side by side, each word at a place known to the
// compiler. Then one instruction loads a word and multiplies by it; a core that runs another thread
// as well takes in half as many instructions as it could multiply.
template <int ROWS>
struct PackedRows {
    const uint32_t* words;

    template <class E>
    INLINE const uint32_t* meets(long unit, int term, int row) const {
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

// As `pack` left them where this type's are packed, else as they were passed.
template <class E, int ROWS>
INLINE auto dense_rows(const uint32_t* words, long stride) {
    if constexpr (E::PACKED)
        return PackedRows<ROWS>{words};
    else
        return Rows{words, stride};
}
