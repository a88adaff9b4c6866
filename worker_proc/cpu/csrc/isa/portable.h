// The primitives of the kernels in plain vectors. An instruction set inherits them, and has its own
// instructions for those where they are better: see isa.h.
#pragma once

#include "../simd.h"
#include "integers.h"

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff) << 13, bits;
    float value;
    memcpy(&value, &rest, 4);
    value *= 0x1p112f;  // the difference of the exponents' biases; exact for subnormals too
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

// Dense panels: [units][16 columns].
struct UnitLayout {
    static INLINE long place(long unit, int column) { return unit * LANES + column; }
};

struct Portable {
    // Rows and 16-column panels of the largest tile: as many sums as fit in registers beside a unit
    // of each panel and, if there are several terms, a term. A tile of few rows is wider, so that no
    // sum waits for its own previous addition.
    static constexpr int ROWS = 3, ROWS_OF_TERMS = 2, PANELS = 1, FEW_ROWS = 1, WIDE_PANELS = 2;
    // Rows of the largest tile with quantized weights, each with sums of codes and of floats; and
    // with codes that become floats.
    static constexpr int INTEGER_ROWS = 2, CODED_FLOAT_ROWS = 2;
    // More rows are multiplied by `ByteTiles`, if there are any: at most so many.
    static constexpr int MANY_ROWS = 0;
    template <int UNITS>
    class ByteTiles;
    // Whether it multiplies pairs of bfloat16, by `add_pairs`.
    static constexpr bool HAS_PAIRS = false;
    // Whether it multiplies matrices of bfloat16, by `Matrices`, see dense.h.
    static constexpr bool HAS_MATRICES = false;
    typedef UnitLayout Matrices;
    // Leaves the state of a thread as it was before the products of a step.
    static INLINE void end_step() {}
    // Whether it has `fraction`.
    static constexpr bool HAS_FRACTION = false;

    // The larger and the smaller of two: b where one of them is NaN.
    static INLINE Floats max(Floats a, Floats b) { return select(a > b, a, b); }
    static INLINE Floats min(Floats a, Floats b) { return select(a < b, a, b); }

    // Whether every lane is below x, which NaN is not.
    static INLINE bool all_below(Floats v, float x) {
        return max_lane(select(v < Floats(x), 0.0f, 1.0f)) == 0;
    }

    // Returns 16 bytes (uint8_t or int8_t) as integers.
    template <class T>
    static INLINE Ints bytes_to_ints(const T* from) {
        return to<Ints>(to<Shorts>(load<Vector<T>>(from)));
    }

    // Whether it has `widen_bytes`, from whole numbers of -127 to 127 to bfloat16.
    static constexpr bool WIDENS_BYTES = false;

    static INLINE Floats halves_to_floats(const uint16_t* from) {
        alignas(64) float v[LANES];
        for (int i = 0; i < LANES; i++) v[i] = half_to_float(from[i]);
        return load<Floats>(v);
    }

    // Rounds to bfloat16: to the nearest, ties to even.
    static INLINE void narrow(uint16_t* to_bfloat16, Floats v) {
        Words bits = as<Words>(v);
        bits = bits + 0x7fffu + ((bits >> 16) & 1u);
        store(to_bfloat16, to<Halves>(bits >> 16));
    }

    // Stores whole numbers of -127 to 127 as bytes. Goes through 16 bits, as compilers convert to 8 bits
    // one byte at a time.
    static INLINE void store_bytes(int8_t* to_bytes, Floats whole) {
        store(to_bytes, to<Bytes>(to<Shorts>(to<Ints>(whole))));
    }

    // A word of a row that many units of panels are multiplied by.
    typedef Words Word;
    static INLINE Word word(const uint32_t* x) { return *x; }

    // Returns acc + x * b for a float x.
    static INLINE Floats add_product(Floats acc, Word x, Floats b) { return acc + as<Floats>(x) * b; }
    // The same for a float x in memory, which compilers would load separately.
    static INLINE Floats add_product(Floats acc, const uint32_t* x, Floats b) {
        return acc + as<Floats>(Words(*x)) * b;
    }

    // Returns x * 2^n for an integer n.
    static INLINE Floats scale(Floats x, Floats n) {
        return x * as<Floats>((to<Ints>(n) + 127) << 23);
    }

    // Returns table[index] for each byte of `indices`, which are 0 to 15.
    static INLINE Words look_up(const uint8_t* table, Words indices) {
        return Words::of([&](int i) INLINED {
            uint8_t bytes[sizeof(Words::Part)];
            memcpy(bytes, &indices.parts[i], sizeof bytes);
#pragma GCC unroll 1
            for (uint8_t& byte : bytes) byte = table[byte];
            Words::Part part;
            memcpy(&part, bytes, sizeof bytes);
            return part;
        });
    }

    // Returns table[index] for each index, which are 0 to 15. table: aligned to 64 bytes.
    static INLINE Floats look_up(const float* table, Words indices) {
        alignas(64) float values[LANES];
        for (int i = 0; i < LANES; i++) values[i] = table[indices[i]];
        return load<Floats>(values);
    }

    // What `add_products` subtracts from codes of 0 to MAX.
    template <int MAX>
    static constexpr int MIDDLE = 0;

    // Adds the four products of bytes of w (codes of 0 to MAX) and signed bytes of x (-127 to 127) in
    // each lane. x: unit `unit` of `units`, a constant after unrolling.
    template <int MAX>
    static INLINE Ints add_products(Ints acc, Words w, const uint32_t* units, int unit) {
        Words x = units[unit];
        return Ints::of([&](int i) INLINED {
            Ints::Part sums = acc.parts[i];
            for (int byte = 0; byte < 4; byte++)
                sums += (Ints::Part)((w.parts[i] >> (8 * byte)) & 0xffu) *
                        ((Ints::Part)(x.parts[i] << (24 - 8 * byte)) >> 24);
            return sums;
        });
    }

    // How the codes of a panel are laid out, and how rows are multiplied by them, see integers.h.
    typedef LaneLayout Layout;
    template <class Isa, int ROWS>
    using Integers = LaneIntegers<Isa, ROWS>;
};
