// The scales of quantized panels: each type reads the arrays that follow a panel's codes. A scale
// belongs to a part of a group of 32 inputs: the whole group, or one of its halves.
#pragma once

#include "inputs.h"

// Float16 scales [groups][16], then float16 minima likewise if there are any.
template <bool MINIMUM>
struct GroupScales {
    static constexpr int PARTS = 1;
    static constexpr bool HAS_MINIMUM = MINIMUM;
    const uint16_t *scales, *minima;

    INLINE GroupScales(const void* arrays, long groups)
        : scales((const uint16_t*)arrays), minima(scales + groups * LANES) {}
    INLINE Floats factor(long group, int) const { return Isa::halves_to_floats(scales + group * LANES); }
    INLINE Floats minimum(long group, int) const { return Isa::halves_to_floats(minima + group * LANES); }
};

// The k-quants: blocks of 8 groups have a float16 scale (and one for minima), which is multiplied by
// an integer of 8 bits for each part. Scales [blocks][16], scales of minima, integers
// [groups][PARTS][16], integers of minima. Minima are stored with the opposite sign.
constexpr int BLOCK_GROUPS = 8;

template <int P, bool MINIMUM>
struct BlockScales {
    static constexpr int PARTS = P;
    static constexpr bool HAS_MINIMUM = MINIMUM;
    const uint16_t *scales, *scales_of_minima;
    const int8_t *factors, *minima;

    INLINE BlockScales(const void* arrays, long groups)
        : scales((const uint16_t*)arrays),
          scales_of_minima(scales + groups / BLOCK_GROUPS * LANES),
          factors((const int8_t*)(scales_of_minima + MINIMUM * groups / BLOCK_GROUPS * LANES)),
          minima(factors + groups * PARTS * LANES) {}
    INLINE Floats factor(long group, int part) const {
        return of_block(scales, group) * to<Floats>(Isa::bytes_to_ints(factors + at(group, part)));
    }
    INLINE Floats minimum(long group, int part) const {
        return -of_block(scales_of_minima, group) *
               to<Floats>(Isa::bytes_to_ints(minima + at(group, part)));
    }

  protected:
    static INLINE long at(long group, int part) { return (group * PARTS + part) * LANES; }
    static INLINE Floats of_block(const uint16_t* values, long group) {
        return Isa::halves_to_floats(values + group / BLOCK_GROUPS * LANES);
    }
};

// Like BlockScales, with both integers in a byte: the factor in the low half, the minimum in the high
// half.
struct NibbleScales : BlockScales<2, true> {
    using BlockScales::BlockScales;
    INLINE Floats factor(long group, int part) const {
        return of_block(scales, group) * to<Floats>(bytes(group, part) & 15);
    }
    INLINE Floats minimum(long group, int part) const {
        return -of_block(scales_of_minima, group) * to<Floats>(bytes(group, part) >> 4);
    }

  private:
    INLINE Ints bytes(long group, int part) const {
        return Isa::bytes_to_ints((const uint8_t*)factors + at(group, part));
    }
};

// Scales of 2^(e - 128) for a byte e: [groups][16] (E8M0 of the OCP microscaling formats, halved as
// the codes are doubled).
struct PowerScales {
    static constexpr int PARTS = 1;
    static constexpr bool HAS_MINIMUM = false;
    const uint8_t* exponents;

    INLINE PowerScales(const void* arrays, long) : exponents((const uint8_t*)arrays) {}
    INLINE Floats factor(long group, int) const {
        Ints e = Isa::bytes_to_ints(exponents + group * LANES);
        // Below 2^-126 a float has no exponent, but a bit of the fraction.
        return as<Floats>(((e < Ints(2)) & (0x00200000 * (e + 1))) | ((e >= Ints(2)) & ((e - 1) << 23)));
    }
    INLINE Floats minimum(long, int) const { return 0.0f; }
};
