// The codes of quantized panels: unsigned numbers of 2 to 8 bits, of which the product reads units of
// four neighbouring inputs in bytes.
#pragma once

#include "../simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// Returns unit k of a group in a plane of BITS bits a code, moved up by TO bits in each byte. A plane
// has BITS lines of [16 columns] words; unit k is in line k % BITS, in bits BITS * (k / BITS) and up of
// each byte. line(i): line i of the plane, as a word of one column or as the words of all 16.
template <int BITS, int TO, class Line>
INLINE auto unit_of_plane(Line line, int k) {
    constexpr uint32_t MASK = (((1u << BITS) - 1) * 0x01010101u) << TO;
    int from = BITS * (k / BITS);
    auto word = line(k % BITS);
    return (from >= TO ? word >> (from - TO) : word << (TO - from)) & MASK;
}

// Codes in a plane of their LOW bits, followed by a plane of their HIGH bits if there are any.
template <int LOW, int HIGH = 0>
struct Codes {
    static constexpr int LINES = LOW + HIGH;

    template <class Line>
    static INLINE auto unit(Line line, int k) {
        auto low = unit_of_plane<LOW, 0>(line, k);
        if constexpr (HIGH == 0)
            return low;
        else
            return low | unit_of_plane<HIGH, LOW>([&](int i) INLINED { return line(LOW + i); }, k);
    }
};

// Returns table[index] for each byte of `indices`, which are 0 to 15.
INLINE uint32_t look_up(const uint8_t* table, uint32_t indices) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 8)
        result |= uint32_t(table[indices >> shift & 15]) << shift;
    return result;
}
INLINE Words look_up(const uint8_t* table, Words indices) {
    return Words::of([&](int i) INLINED {
#if defined(__AVX512BW__)
        __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
        return (Words::Part)_mm512_shuffle_epi8(all, (__m512i)indices.parts[i]);
#elif defined(__AVX2__) && VECTORS == 2
        __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        return (Words::Part)_mm256_shuffle_epi8(all, (__m256i)indices.parts[i]);
#elif defined(__aarch64__)
        return (Words::Part)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices.parts[i]);
#else
        uint8_t bytes[sizeof(Words::Part)];
        memcpy(bytes, &indices.parts[i], sizeof bytes);
#pragma GCC unroll 1
        for (uint8_t& byte : bytes) byte = table[byte];
        Words::Part part;
        memcpy(&part, bytes, sizeof bytes);
        return part;
#endif
    });
}

// Codes of 4 bits that are indices of a table.
template <const uint8_t (&TABLE)[16]>
struct TableCodes {
    static constexpr int LINES = 4;

    template <class Line>
    static INLINE auto unit(Line line, int k) {
        return look_up(TABLE, Codes<4>::unit(line, k));
    }
};
