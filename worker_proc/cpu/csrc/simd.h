// Vectors of 16 lanes, made of one, two or four machine vectors, with what compilers do well by
// themselves; the folder isa/ has the rest. (Compilers keep a vector type that is larger than the
// machine's in memory.)
#pragma once

#include <cstdint>
#include <cstring>

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
#define INLINED __attribute__((always_inline))  // for a lambda

template <class T>
struct Vector {
    typedef T Part __attribute__((vector_size(LANES / VECTORS * sizeof(T))));
    Part parts[VECTORS];

    Vector() = default;
    INLINE Vector(T x) : Vector(of([&](int) INLINED { return x - Part{}; })) {}

    // part(i): returns the i-th machine vector.
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
    LANE_BY_LANE(^)
#undef LANE_BY_LANE

    // All bits of a lane are set if the comparison holds.
#define COMPARISON(op)                                                                \
    friend INLINE auto operator op(Vector a, Vector b) {                            \
        return Vector<int32_t>::of([&](int i) INLINED { return a.parts[i] op b.parts[i]; }); \
    }
    COMPARISON(<)
    COMPARISON(>)
    COMPARISON(>=)
    COMPARISON(==)
#undef COMPARISON

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

// Reinterprets the bits.
template <class V, class T>
INLINE V as(Vector<T> v) {
    return V::of([&](int i) INLINED { return (typename V::Part)v.parts[i]; });
}

// Converts the values.
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

// Reduces all lanes by `two`, which takes two machine vectors or two numbers.
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

INLINE float max_lane(Floats v) {
    return fold(v, [](auto a, auto b) INLINED { return a > b ? a : b; });
}

// Zeros where x is finite, else NaN.
INLINE Floats zeros_of(Floats x) { return x * 0.0f; }

// Whether all lanes of added `zeros_of` are zeros.
INLINE bool all_finite(Floats zeros) { return sum(zeros) == 0; }
