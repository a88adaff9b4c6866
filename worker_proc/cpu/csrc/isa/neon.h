// ARM64: four vectors of 128 bits. With dotprod, four products of bytes and their sum are one
// instruction; with i8mm, the products of two columns and two rows; with bf16, pairs of bfloat16.
#pragma once

#include <arm_neon.h>

#include "neon_pairs.h"
#include "portable.h"

struct Neon : Portable {
    static constexpr int ROWS = 6, ROWS_OF_TERMS = 5, PANELS = 1, FEW_ROWS = 1, WIDE_PANELS = 2;
    static constexpr int CODED_FLOAT_ROWS = 4;

    static INLINE bool all_below(Floats v, float x) {
        Ints below = v < Floats(x);
        uint32x4_t all = (uint32x4_t)(below.parts[0] & below.parts[1] & below.parts[2] & below.parts[3]);
        return vminvq_u32(all) != 0;
    }

    template <class T>
    static INLINE Ints bytes_to_ints(const T* from) {
        int16x8_t halves[2];
        if constexpr (T(-1) < 0) {
            int8x16_t bytes = vld1q_s8((const int8_t*)from);
            halves[0] = vmovl_s8(vget_low_s8(bytes)), halves[1] = vmovl_high_s8(bytes);
        } else {
            uint8x16_t bytes = vld1q_u8((const uint8_t*)from);
            halves[0] = (int16x8_t)vmovl_u8(vget_low_u8(bytes));
            halves[1] = (int16x8_t)vmovl_high_u8(bytes);
        }
        return Ints::of([&](int i) INLINED {
            int16x8_t half = halves[i / 2];
            return (Ints::Part)(i % 2 ? vmovl_high_s16(half) : vmovl_s16(vget_low_s16(half)));
        });
    }

    static INLINE Floats halves_to_floats(const uint16_t* from) {
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i)));
        });
    }

    static INLINE void store_bytes(int8_t* to, Floats whole) {
        int16x4_t halves[VECTORS];
        for (int i = 0; i < VECTORS; i++)
            halves[i] = vmovn_s32(vcvtq_s32_f32((float32x4_t)whole.parts[i]));
        for (int i = 0; i < VECTORS; i += 2)
            vst1_s8(to + 4 * i, vmovn_s16(vcombine_s16(halves[i], halves[i + 1])));
    }

    // In the first lane, which instructions multiply by.
    typedef uint32x2_t Word;
    static INLINE Word word(const uint32_t* x) { return vset_lane_u32(*x, vdup_n_u32(0), 0); }

    static INLINE Floats add_product(Floats acc, Word x, Floats b) {
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)vfmaq_lane_f32((float32x4_t)acc.parts[i], (float32x4_t)b.parts[i],
                                                vreinterpret_f32_u32(x), 0);
        });
    }
    static INLINE Floats add_product(Floats acc, const uint32_t* x, Floats b) {
        return add_product(acc, word(x), b);
    }

    static constexpr bool HAS_FRACTION = true;

    static INLINE Floats fraction(Floats x) {
        return Floats::of([&](int i) INLINED {
            return x.parts[i] - (Floats::Part)vrndmq_f32((float32x4_t)x.parts[i]);
        });
    }
    // Takes the largest whole number that is not above n.
    static INLINE Floats scale(Floats x, Floats n) {
        Ints whole = Ints::of([&](int i) INLINED {
            return (Ints::Part)vcvtmq_s32_f32((float32x4_t)n.parts[i]);
        });
        return x * as<Floats>((whole + 127) << 23);
    }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static INLINE void narrow(uint16_t* to_bfloat16, Floats v) {
        for (int i = 0; i < VECTORS; i++)
            vst1_bf16((bfloat16_t*)to_bfloat16 + 4 * i, vcvt_bf16_f32((float32x4_t)v.parts[i]));
    }

    static constexpr bool HAS_PAIRS = true, HAS_MATRICES = true;
    typedef PairedBFloat16 Matrices;

    static INLINE Floats add_pairs(Floats acc, Word a, Words b) {
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)vbfdotq_lane_f32((float32x4_t)acc.parts[i],
                                                  vreinterpretq_bf16_u32((uint32x4_t)b.parts[i]),
                                                  vreinterpret_bf16_u32(a), 0);
        });
    }
#endif

    static INLINE Words look_up(const uint8_t* table, Words indices) {
        return Words::of([&](int i) INLINED {
            return (Words::Part)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices.parts[i]);
        });
    }
    static INLINE Floats look_up(const float* table, Words indices) {
        uint8x16x4_t all = vld1q_u8_x4((const uint8_t*)table);
        Words bytes = indices * 0x04040404u + 0x03020100u;
        return Floats::of([&](int i) INLINED {
            return (Floats::Part)vqtbl4q_u8(all, (uint8x16_t)bytes.parts[i]);
        });
    }

    // Codes that are no signed bytes become such.
    template <int MAX>
    static constexpr int MIDDLE = MAX > 127 ? 128 : 0;

    template <int MAX>
    static INLINE Ints add_products(Ints acc, Words w, const uint32_t* units, int unit) {
        if (MAX > 127) w = w ^ 0x80808080u;
#if defined(__ARM_FEATURE_DOTPROD)
        int8x16_t x = vld1q_s8((const int8_t*)(units + unit / 4 * 4));
        return Ints::of([&](int i) INLINED {
            int32x4_t sums = (int32x4_t)acc.parts[i];
            int8x16_t codes = (int8x16_t)w.parts[i];
            switch (unit % 4) {
            case 0: return (Ints::Part)vdotq_laneq_s32(sums, codes, x, 0);
            case 1: return (Ints::Part)vdotq_laneq_s32(sums, codes, x, 1);
            case 2: return (Ints::Part)vdotq_laneq_s32(sums, codes, x, 2);
            default: return (Ints::Part)vdotq_laneq_s32(sums, codes, x, 3);
            }
        });
#else
        int8x16_t x = vreinterpretq_s8_u32(vdupq_n_u32(units[unit]));
        return Ints::of([&](int i) INLINED {
            int8x16_t codes = (int8x16_t)w.parts[i];
            // Two neighbours add up to 2 * 128 * 127 at most, which fits in 16 bits.
            int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
            int16x8_t high = vmull_high_s8(codes, x);
            return (Ints::Part)vpadalq_s16((int32x4_t)acc.parts[i], vpaddq_s16(low, high));
        });
#endif
    }

#if defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr int INTEGER_ROWS = 8;
    typedef PairedLayout Layout;
    template <class, int ROWS>
    using Integers = PairedIntegers<ROWS>;
#else
    static constexpr int INTEGER_ROWS = 4;
#endif
};
