// Vectors of 16 lanes, in the compiler's own vector extensions: one source for AVX-512, AVX2, NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

#define INLINE inline __attribute__((always_inline))

template <class V>
INLINE V load(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
INLINE void store(void* to, V v) {
    memcpy(to, &v, sizeof v);
}

INLINE Floats all(float x) { return Floats{} + x; }
INLINE Words all_words(uint32_t x) { return Words{} + x; }

INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }

// The lanes folded in half four times.
#define FOLDED(v, by) __builtin_shufflevector(v, v, \
    0 ^ by, 1 ^ by, 2 ^ by, 3 ^ by, 4 ^ by, 5 ^ by, 6 ^ by, 7 ^ by, \
    8 ^ by, 9 ^ by, 10 ^ by, 11 ^ by, 12 ^ by, 13 ^ by, 14 ^ by, 15 ^ by)

INLINE float sum(Floats v) {
    v = v + FOLDED(v, 8);
    v = v + FOLDED(v, 4);
    v = v + FOLDED(v, 2);
    return v[0] + v[1];
}

INLINE float greatest(Floats v) {
    v = max(v, FOLDED(v, 8));
    v = max(v, FOLDED(v, 4));
    v = max(v, FOLDED(v, 2));
    return v[0] > v[1] ? v[0] : v[1];
}

INLINE Floats round_to_even(Floats x) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
    return (x + magic) - magic;
}

INLINE Bytes to_bytes(Floats whole) {
    return __builtin_convertvector(__builtin_convertvector(whole, Ints), Bytes);
}
INLINE Floats from_bytes(const int8_t* from) {
    return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
}

// e^x to 2 units in the last place. Cephes' reduction (x = n ln 2 + r) and polynomial.
INLINE Floats exp(Floats x) {
    x = max(min(x, all(88.0f)), all(-87.3f));
    Floats n = round_to_even(x * 1.44269504f);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Floats)exponent;
}

INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// The tanh approximation: x/2 (1 + tanh(z)) = x / (1 + e^(-2z)).
INLINE Floats gelu(Floats x) {
    Floats z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-2.0f * z));
}

// Element types. Values are multiplied in units of 4 bytes: one float, or two bfloat16 neighbours.
struct Float32 {
    typedef float Stored;
    static constexpr int PACK = 1;

    static INLINE Floats multiply_add(Floats acc, Words a, Words b) {
        return acc + (Floats)a * (Floats)b;
    }
    static INLINE Floats widen(const Stored* from) { return load<Floats>(from); }
    static INLINE void narrow(Stored* to, Floats v) { store(to, v); }
    static INLINE float widen_one(Stored x) { return x; }
    static INLINE Stored narrow_one(float x) { return x; }
};

struct BFloat16 {
    typedef uint16_t Stored;
    static constexpr int PACK = 2;

    static INLINE Floats multiply_add(Floats acc, Words a, Words b) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
        acc = acc + (Floats)(a << 16) * (Floats)(b << 16);
        return acc + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
    }
    static INLINE Floats widen(const Stored* from) {
        return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
    }
    static INLINE void narrow(Stored* to, Floats v) {
#if defined(__AVX512BF16__)
        __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
        memcpy(to, &rounded, sizeof rounded);
#else
        Words bits = (Words)v;
        bits = bits + 0x7fffu + ((bits >> 16) & 1u);  // to the nearest, ties to even
        store(to, __builtin_convertvector(bits >> 16, Halves));
#endif
    }
    static INLINE float widen_one(Stored x) {
        uint32_t bits = uint32_t(x) << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    static INLINE Stored narrow_one(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return Stored((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

// The first `count` lanes only; those beyond are read as zeros.
INLINE Floats load_some(const float* from, long count) {
    if (count >= LANES) return load<Floats>(from);
    Floats v = {};
    for (long i = 0; i < count; i++) v[i] = from[i];
    return v;
}

template <class E>
INLINE void narrow_some(typename E::Stored* to, Floats v, long count) {
    if (count >= LANES) return E::narrow(to, v);
    for (long i = 0; i < count; i++) to[i] = E::narrow_one(v[i]);
}
