// Measures which of two compute types is faster on this CPU. That there is an instruction for pairs
// of bfloat16 says little: the instruction is as fast as one for floats on AMD's Zen 4, and takes four
// times as long on Intel's Sapphire and Emerald Rapids, which halves the throughput there.
#pragma once

#include <algorithm>
#include <chrono>
#include <type_traits>

#include "tile.h"

// Returns the shortest time for a row of the largest tile, over panels in the first-level cache.
template <class E>
double tile_seconds() {
    constexpr int UNITS = 128, TIMES = 50, ROWS = TILE_ROWS<E>;
    alignas(64) static const uint32_t panels[TILE_PANELS * UNITS * LANES] = {};
    alignas(64) static const uint32_t rows[ROWS * UNITS * E::TERMS] = {};
    Segment segment;
    for (int p = 0; p < TILE_PANELS; p++) segment.panels[p] = panels + p * UNITS * LANES;
    double shortest = 1;
    volatile float sink = 0;
    for (int i = 0; i < TIMES; i++) {
        Floats sums[ROWS][TILE_PANELS];
        for (auto& row : sums)
            for (Floats& sum : row) sum = Floats(sink);
        auto start = std::chrono::steady_clock::now();
        multiply<E, ROWS, TILE_PANELS>(sums, dense_rows<E, ROWS>(rows, UNITS * E::TERMS), &segment,
                                       1, UNITS, LANES, Prefetch());
        std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        for (auto& row : sums)
            for (Floats& sum : row) sink = sum[0];
        shortest = std::min(shortest, seconds.count() / ROWS);
    }
    return shortest;
}

template <class E, class Other>
bool is_faster() {
    if (std::is_same<E, Other>()) return false;
    return tile_seconds<E>() < tile_seconds<Other>();
}
