// Lane-by-lane functions, and the compute types: how numbers are stored, passed and multiplied.
#pragma once

#include <type_traits>

#include "isa/isa.h"

INLINE Floats max(Floats a, Floats b) { return Isa::max(a, b); }
INLINE Floats min(Floats a, Floats b) { return Isa::min(a, b); }
INLINE bool all_below(Floats v, float x) { return Isa::all_below(v, x); }

INLINE Floats round_to_even(Floats x) {
    const Floats magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
    return (x + magic) - magic;
}

// Returns e^x to 2 ulp, by Cephes' reduction (x = n ln 2 + r) and polynomial. NaN stays NaN, as `max`
// and `min` return their second operand then.
INLINE Floats exp(Floats x) {
    x = max(-87.3f, min(88.0f, x));
    Floats n = round_to_even(x * 1.44269504f);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return Isa::scale(p, n);
}

// Returns e^x to 3e-6, enough for bfloat16: a polynomial for 2^f, f being the fraction of x / ln 2.
template <class I = Isa>
INLINE Floats exp_approx(Floats x) {
    if constexpr (I::HAS_FRACTION) {
        Floats t = max(-126.0f, x * 1.44269504f);
        Floats f = I::fraction(t);
        Floats p = 1.35341669e-2f;
        p = p * f + 5.20114638e-2f;
        p = p * f + 2.41442755e-1f;
        p = p * f + 6.93003833e-1f;
        p = p * f + 1.00000262f;
        return I::scale(p, t);  // uses the integer part of t
    } else {
        return exp(x);
    }
}

INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// The tanh approximation: x/2 (1 + tanh(z)) = x / (1 + e^(-2z)).
INLINE Floats gelu(Floats x) {
    Floats z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-2.0f * z));
}

// x/2 (1 + erf(x / sqrt(2))), with erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
INLINE Floats gelu_erf(Floats x) {
    Floats z = x * 0.70710678f, size = max(z, -z), t = 1.0f / (1.0f + 0.3275911f * size);
    Floats p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    Floats tail = p * t * exp(-size * size);  // 1 - erf(size)
    return 0.5f * x * select(z > 0.0f, 2.0f - tail, tail);
}

INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

INLINE Floats soft_cap(Floats x, float cap) { return cap * tanh(x / cap); }

// The gate of gpt-oss.
INLINE Floats clamped_swiglu(Floats gate, Floats up) {
    gate = min(7.0f, gate), up = max(-7.0f, min(7.0f, up));
    return gate / (1.0f + exp(-1.702f * gate)) * (up + 1.0f);
}

// Conversion of stored numbers, which are float, or bfloat16 in 16 bits.
INLINE Floats widen(const float* from) { return load<Floats>(from); }
INLINE Floats widen(const uint16_t* from) {
    return as<Floats>(to<Words>(load<Halves>(from)) << 16);
}

INLINE void narrow(float* to, Floats v) { store(to, v); }
INLINE void narrow(uint16_t* to_bfloat16, Floats v) { Isa::narrow(to_bfloat16, v); }

INLINE void narrow_one(float* to, float x) { *to = x; }
INLINE void narrow_one(uint16_t* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Widens whole numbers from -127 to 127, which bfloat16 holds exactly. count: a multiple of 64.
template <class T, class I = Isa>
INLINE void widen_bytes(T* to, const int8_t* from, long count) {
    if constexpr (I::WIDENS_BYTES && sizeof(T) == 2)
        I::widen_bytes(to, from, count);
    else
        for (long i = 0; i < count; i += LANES) narrow(to + i, ::to<Floats>(I::bytes_to_ints(from + i)));
}

INLINE float widen_one(float x) { return x; }
INLINE float widen_one(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Compute types. Weights, keys and values are stored in units of 4 bytes: one float, or two
// neighbouring bfloat16.
// Stored: type of weights, keys and values. Passed: type of the values passed between operations.
// TERMS: words of a row that are multiplied by one unit; term(unit, i) is the factor of the i-th.
// PACKED: rows are packed before they are multiplied, see rows.h.
// softmax_exp(x): e^x, as exact as the values that it is multiplied by.
struct Float32 {
    typedef float Stored, Passed;
    static constexpr int PACK = 1, TERMS = 1;
    static constexpr bool PACKED = true;

    static INLINE Floats softmax_exp(Floats x) { return exp(x); }
    static INLINE Words term(Words unit, int) { return unit; }
    template <class A>  // Isa::Word, or a pointer to one
    static INLINE Floats multiply_add(Floats acc, A a, Words b) {
        return Isa::add_product(acc, a, as<Floats>(b));
    }
};

// bfloat16 weights, keys and values that become floats when they are multiplied; operations pass
// floats to each other.
struct BFloat16 {
    typedef uint16_t Stored;
    typedef float Passed;
    static constexpr int PACK = 2, TERMS = 2;
    static constexpr bool PACKED = true;

    static INLINE Floats softmax_exp(Floats x) { return exp_approx(x); }
    static INLINE Words term(Words unit, int i) { return i == 0 ? unit << 16 : unit & 0xffff0000u; }
    template <class A>  // Isa::Word, or a pointer to one
    static INLINE Floats multiply_add(Floats acc, A a, Words b) {
        return Isa::add_product(acc, a, as<Floats>(b));
    }
};

// bfloat16 whose neighbours are multiplied and added by one instruction, if the CPU has it.
template <class I>
struct Pairs {
    typedef uint16_t Stored, Passed;
    static constexpr int PACK = 2, TERMS = 1;
    static constexpr bool PACKED = false;

    static INLINE Floats softmax_exp(Floats x) { return exp_approx(x); }
    static INLINE Words term(Words unit, int) { return unit; }
    static INLINE Floats multiply_add(Floats acc, typename I::Word a, Words b) {
        return I::add_pairs(acc, a, b);
    }
};
typedef std::conditional_t<Isa::HAS_PAIRS, Pairs<Isa>, BFloat16> BFloat16Pairs;

// Loads the first `count` lanes; the others become zero.
INLINE Floats load_partial(const float* from, long count) {
    if (count >= LANES) return load<Floats>(from);
    alignas(64) float some[LANES] = {};
    for (long i = 0; i < count; i++) some[i] = from[i];
    return load<Floats>(some);
}

template <class T>
INLINE void narrow_partial(T* to, Floats v, long count) {
    if (count >= LANES) return narrow(to, v);
    for (long i = 0; i < count; i++) narrow_one(to + i, v[i]);
}
