// Vectors of 16 lanes, each of as many of the machine's own vectors as that takes: one source for
// AVX-512, AVX2, NEON. (A compiler keeps a vector that is larger than the machine's in memory.)
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
#if defined(__AVX512F__)
#define VECTORS 1
#elif defined(__AVX2__)
#define VECTORS 2
#else
#define VECTORS 4
#endif
constexpr int VECTOR_BITS = 512 / VECTORS;

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda

template <class T>
struct Vector {
    typedef T Part __attribute__((vector_size(LANES / VECTORS * sizeof(T))));
    Part parts[VECTORS];

    Vector() = default;
    INLINE Vector(T x) : Vector(of([&](int) INLINED { return x - Part{}; })) {}

    // part(i): the i-th machine vector.
    template <class F>
    static INLINE Vector of(F part) {
        Vector v;
        v.parts[0] = part(0);
#if VECTORS > 1
        v.parts[1] = part(1);
#endif
#if VECTORS > 2
        v.parts[2] = part(2);
        v.parts[3] = part(3);
#endif
        return v;
    }

    INLINE T operator[](int lane) const {
        return parts[lane / (LANES / VECTORS)][lane % (LANES / VECTORS)];
    }

#define LANE_BY_LANE(op)                                                            \
    friend INLINE Vector operator op(Vector a, Vector b) {                          \
        return of([&](int i) INLINED { return a.parts[i] op b.parts[i]; });         \
    }
    LANE_BY_LANE(+)
    LANE_BY_LANE(-)
    LANE_BY_LANE(*)
    LANE_BY_LANE(/)
    LANE_BY_LANE(&)
    LANE_BY_LANE(|)
#undef LANE_BY_LANE

    // All bits of a lane are set where it holds.
#define COMPARED(op)                                                                \
    friend INLINE auto operator op(Vector a, Vector b) {                            \
        return Vector<int32_t>::of([&](int i) INLINED { return a.parts[i] op b.parts[i]; }); \
    }
    COMPARED(<)
    COMPARED(>)
    COMPARED(>=)
    COMPARED(==)
#undef COMPARED

    INLINE Vector operator-() const {
        return of([&](int i) INLINED { return -parts[i]; });
    }
    INLINE Vector operator<<(int bits) const {
        return of([&](int i) INLINED { return parts[i] << bits; });
    }
    INLINE Vector operator>>(int bits) const {
        return of([&](int i) INLINED { return parts[i] >> bits; });
    }
    INLINE Vector& operator+=(Vector other) { return *this = *this + other; }
    INLINE Vector& operator*=(Vector other) { return *this = *this * other; }
};

typedef Vector<float> Floats;
typedef Vector<int32_t> Ints;
typedef Vector<uint32_t> Words;
typedef Vector<uint16_t> Halves;
typedef Vector<int16_t> Shorts;
typedef Vector<int8_t> Bytes;

template <class V>
INLINE V load(const void* from) {
    return V::of([&](int i) INLINED {
        typename V::Part part;
        memcpy(&part, (const char*)from + i * sizeof part, sizeof part);
        return part;
    });
}

template <class T>
INLINE void store(void* to, Vector<T> v) {
    memcpy(to, &v, sizeof v);
}

// The same bits.
template <class V, class T>
INLINE V as(Vector<T> v) {
    return V::of([&](int i) INLINED { return (typename V::Part)v.parts[i]; });
}

// The same values, as far as V has them.
template <class V, class T>
INLINE V to(Vector<T> v) {
    return V::of([&](int i) INLINED {
        return __builtin_convertvector(v.parts[i], typename V::Part);
    });
}

INLINE Floats select(Ints where, Floats one, Floats other) {
    return Floats::of([&](int i) INLINED {
        return where.parts[i] ? one.parts[i] : other.parts[i];
    });
}

#if defined(__AVX512F__)  // compilers take two instructions where one of the two is a constant
INLINE Floats max(Floats a, Floats b) {
    return Floats::of([&](int i) INLINED {
        return (Floats::Part)_mm512_max_ps((__m512)a.parts[i], (__m512)b.parts[i]);
    });
}
INLINE Floats min(Floats a, Floats b) {
    return Floats::of([&](int i) INLINED {
        return (Floats::Part)_mm512_min_ps((__m512)a.parts[i], (__m512)b.parts[i]);
    });
}
#else
INLINE Floats max(Floats a, Floats b) { return select(a > b, a, b); }
INLINE Floats min(Floats a, Floats b) { return select(a < b, a, b); }
#endif

// All lanes put together by `two`, which takes machine vectors as well as numbers.
template <class F>
INLINE float fold(Floats v, F two) {
#if VECTORS == 4
    auto four = two(two(v.parts[0], v.parts[2]), two(v.parts[1], v.parts[3]));
#else
#if VECTORS == 2
    auto eight = two(v.parts[0], v.parts[1]);
#else
    auto all = v.parts[0];
    auto eight = two(__builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7),
                     __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
    auto four = two(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#endif
    auto pair = two(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
    return two(float(pair[0]), float(pair[1]));
}

INLINE float sum(Floats v) {
    return fold(v, [](auto a, auto b) INLINED { return a + b; });
}

INLINE float greatest(Floats v) {
    return fold(v, [](auto a, auto b) INLINED { return a > b ? a : b; });
}

INLINE Floats round_to_even(Floats x) {
    const Floats magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no room for a fraction
    return (x + magic) - magic;
}

// By way of 16 bits: compilers take byte after byte for a longer step.
INLINE Bytes to_bytes(Floats whole) { return to<Bytes>(to<Shorts>(to<Ints>(whole))); }

INLINE Floats from_bytes(const int8_t* from) {
#if defined(__AVX512F__)
    __m128i bytes;
    memcpy(&bytes, from, sizeof bytes);
    return to<Floats>(Ints::of([&](int) INLINED { return (Ints::Part)_mm512_cvtepi8_epi32(bytes); }));
#else
    return to<Floats>(to<Ints>(to<Shorts>(load<Bytes>(from))));
#endif
}

// x times 2 to the power of n, a whole number.
INLINE Floats scale(Floats x, Floats n) {
#if defined(__AVX512F__)
    return Floats::of([&](int i) INLINED {
        return (Floats::Part)_mm512_scalef_ps((__m512)x.parts[i], (__m512)n.parts[i]);
    });
#else
    return x * as<Floats>((to<Ints>(n) + 127) << 23);
#endif
}

// e^x to 2 units in the last place. Cephes' reduction (x = n ln 2 + r) and polynomial.
INLINE Floats exp(Floats x) {
    x = max(min(x, 88.0f), -87.3f);
    Floats n = round_to_even(x * 1.44269504f);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return scale(p, n);
}

INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// The tanh approximation: x/2 (1 + tanh(z)) = x / (1 + e^(-2z)).
INLINE Floats gelu(Floats x) {
    Floats z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-2.0f * z));
}

// Numbers as they are kept: float, or bfloat16 in 16 bits.
INLINE Floats widen(const float* from) { return load<Floats>(from); }
INLINE Floats widen(const uint16_t* from) {
    return as<Floats>(to<Words>(load<Halves>(from)) << 16);
}

INLINE void narrow(float* to, Floats v) { store(to, v); }
INLINE void narrow(uint16_t* into, Floats v) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)v.parts[0]);
    memcpy(into, &rounded, sizeof rounded);
#else
    Words bits = as<Words>(v);
    bits = bits + 0x7fffu + ((bits >> 16) & 1u);  // to the nearest, ties to even
    store(into, to<Halves>(bits >> 16));
#endif
}

INLINE float widen_one(float x) { return x; }
INLINE float widen_one(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void narrow_one(float* to, float x) { *to = x; }
INLINE void narrow_one(uint16_t* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Element types. Weights, keys and values are kept in units of 4 bytes: one float, or two bfloat16
// neighbours.
// Stored: of weights, keys and values. Passed: what operations pass to each other.
// TERMS: so many words of what is passed meet one unit; term(unit, i) is what meets the i-th.
struct Float32 {
    typedef float Stored, Passed;
    static constexpr int PACK = 1, TERMS = 1;

    static INLINE Words term(Words unit, int) { return unit; }
    static INLINE Floats multiply_add(Floats acc, Words a, Words b) {
        return acc + as<Floats>(a) * as<Floats>(b);
    }
};

#if defined(__AVX512BF16__)
struct BFloat16 {
    typedef uint16_t Stored, Passed;
    static constexpr int PACK = 2, TERMS = 1;

    static INLINE Words term(Words unit, int) { return unit; }
    static INLINE Floats multiply_add(Floats acc, Words a, Words b) {
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)_mm512_dpbf16_ps((__m512)acc.parts[i], (__m512bh)a.parts[i],
                                                  (__m512bh)b.parts[i]);
        });
    }
};
#else
// Where no instruction takes bfloat16, its neighbours become floats when they are multiplied, and
// what is passed is float from the start.
struct BFloat16 {
    typedef uint16_t Stored;
    typedef float Passed;
    static constexpr int PACK = 2, TERMS = 2;

    static INLINE Words term(Words unit, int i) { return i == 0 ? unit << 16 : unit & 0xffff0000u; }
    static INLINE Floats multiply_add(Floats acc, Words a, Words b) {
        return acc + as<Floats>(a) * as<Floats>(b);
    }
};
#endif

// The first `count` lanes only; those beyond are read as zeros.
INLINE Floats load_some(const float* from, long count) {
    if (count >= LANES) return load<Floats>(from);
    alignas(64) float some[LANES] = {};
    for (long i = 0; i < count; i++) some[i] = from[i];
    return load<Floats>(some);
}

template <class T>
INLINE void narrow_some(T* to, Floats v, long count) {
    if (count >= LANES) return narrow(to, v);
    for (long i = 0; i < count; i++) narrow_one(to + i, v[i]);
}
