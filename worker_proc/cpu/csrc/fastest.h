// Which of two element types this CPU multiplies faster, measured. An instruction for pairs of
// bfloat16 says little: it is as fast as one for floats on AMD's Zen 4, and takes four times as long
// on Intel's Sapphire and Emerald Rapids, where it multiplies half as much in the same time.
#pragma once

#include <algorithm>
#include <chrono>
#include <type_traits>

#include "tile.h"

// Of the largest tile over a panel that stays in the first-level cache, the least of many times.
template <class E>
double tile_seconds() {
    constexpr int UNITS = 128, TIMES = 50, ROWS = TILE_ROWS<E>;
    alignas(64) static const uint32_t panels[TILE_PANELS * UNITS * LANES] = {};
    alignas(64) static const uint32_t rows[ROWS * UNITS * E::TERMS] = {};
    Stretch stretch;
    for (int p = 0; p < TILE_PANELS; p++) stretch.panels[p] = panels + p * UNITS * LANES;
    double least = 1;
    volatile float seen = 0;
    for (int i = 0; i < TIMES; i++) {
        Floats sums[ROWS][TILE_PANELS];
        for (auto& row : sums)
            for (Floats& sum : row) sum = Floats(seen);
        auto began = std::chrono::steady_clock::now();
        multiply<E, ROWS, TILE_PANELS>(sums, dense_rows<E, ROWS>(rows, UNITS * E::TERMS), &stretch, 1,
                                       UNITS, LANES, Ahead());
        std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
        for (auto& row : sums)
            for (Floats& sum : row) seen = sum[0];
        least = std::min(least, seconds.count() / ROWS);
    }
    return least;
}

template <class E, class Other>
bool is_faster() {
    if (std::is_same<E, Other>()) return false;
    return tile_seconds<E>() < tile_seconds<Other>();
}
