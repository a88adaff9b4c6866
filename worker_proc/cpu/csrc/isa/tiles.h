// The instructions of AMX, and with EMULATED_TILES plain functions that compute what they do.
#pragma once

#include <cstdint>
#include <cstring>

#include "../simd.h"

constexpr int TILE_LINES = 16, TILE_BYTES = 64;

// Rows and bytes of a row of each tile, as `ldtilecfg` reads them.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES,
                          TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
    uint8_t lines[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if !defined(EMULATED_TILES)
// A tile must not be configured with no lines, and is then not used.
struct Tiles {
    static INLINE void configure(TileConfig config) {
        for (int t = 0; t < 8; t++)
            if (!config.lines[t]) config.bytes[t] = 0;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    static INLINE void release() { asm volatile("tilerelease"); }
    template <int TILE>
    static INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
    }
    // stride: bytes from one row to the next.
    template <int TILE>
    static INLINE void load(const void* from, long stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    static INLINE void store(void* to, long stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    // Adds products of pairs of bfloat16.
    template <int SUMS, int ROWS, int PANEL>
    static INLINE void add_pairs() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(PANEL));
    }
    // Adds products of signed bytes of the rows and unsigned bytes of the panel.
    template <int SUMS, int ROWS, int PANEL>
    static INLINE void add_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(PANEL));
    }
};
#else
// By the descriptions of TDPBF16PS and TDPBSUD in Intel's Software Developer's Manual, volume 2.
struct Tiles {
    struct State {
        TileConfig config;
        alignas(64) uint8_t data[8][TILE_LINES][TILE_BYTES];
    };
    static State& state() {
        static thread_local State state;
        return state;
    }

    static void configure(const TileConfig& config) {
        state().config = config;
        memset(state().data, 0, sizeof state().data);
    }
    static void release() { state().config = TileConfig(); }
    template <int TILE>
    static void zero() {
        memset(state().data[TILE], 0, sizeof state().data[TILE]);
    }
    template <int TILE>
    static void load(const void* from, long stride) {
        zero<TILE>();
        for (int i = 0; i < state().config.lines[TILE]; i++)
            memcpy(state().data[TILE][i], (const char*)from + i * stride, state().config.bytes[TILE]);
    }
    template <int TILE>
    static void store(void* to, long stride) {
        for (int i = 0; i < state().config.lines[TILE]; i++)
            memcpy((char*)to + i * stride, state().data[TILE][i], state().config.bytes[TILE]);
    }

    template <int SUMS, int ROWS, int PANEL>
    static void add_pairs() {
        for_each<SUMS>([](int m, int n) {
            float even = 0, odd = 0;
            for (int k = 0; k < state().config.bytes[ROWS] / 4; k++) {
                even = __builtin_fmaf(bfloat16(ROWS, m, 2 * k), bfloat16(PANEL, k, 2 * n), even);
                odd = __builtin_fmaf(bfloat16(ROWS, m, 2 * k + 1), bfloat16(PANEL, k, 2 * n + 1), odd);
            }
            float sum;
            memcpy(&sum, state().data[SUMS][m] + 4 * n, 4);
            sum += even + odd;
            memcpy(state().data[SUMS][m] + 4 * n, &sum, 4);
        });
    }
    template <int SUMS, int ROWS, int PANEL>
    static void add_bytes() {
        for_each<SUMS>([](int m, int n) {
            int32_t sum;
            memcpy(&sum, state().data[SUMS][m] + 4 * n, 4);
            for (int k = 0; k < state().config.bytes[ROWS] / 4; k++)
                for (int i = 0; i < 4; i++)
                    sum += int8_t(state().data[ROWS][m][4 * k + i]) * state().data[PANEL][k][4 * n + i];
            memcpy(state().data[SUMS][m] + 4 * n, &sum, 4);
        });
    }

  private:
    template <int SUMS, class Add>
    static void for_each(Add add) {
        for (int m = 0; m < state().config.lines[SUMS]; m++)
            for (int n = 0; n < state().config.bytes[SUMS] / 4; n++) add(m, n);
    }
    static float bfloat16(int tile, int line, int i) {
        uint32_t bits = 0;
        memcpy((char*)&bits + 2, state().data[tile][line] + 2 * i, 2);
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
};
#endif
