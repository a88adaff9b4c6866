// Measures which of two compute types is faster on this CPU. That there is an instruction for pairs
// of bfloat16 says little: the instruction is as fast as one for floats on AMD's Zen 4, and takes four
// times as long on Intel's Sapphire and Emerald Rapids, which halves the throughput there.
#pragma once

#include <algorithm>
#include <chrono>
#include <type_traits>

#include "dense.h"
#include "program.h"

// Returns the shortest time for a row of the largest tile, over panels in the first-level cache.
template <class E>
double tile_seconds() {
    constexpr int UNITS = 128, TIMES = 50, ROWS = Dense<E>::ROWS, COLUMNS = TILE_PANELS * LANES;
    alignas(64) static const uint32_t panels[UNITS * COLUMNS] = {};
    alignas(64) static const uint32_t rows[ROWS * UNITS * E::TERMS] = {};
    alignas(64) static float out[ROWS * COLUMNS];
    TileProduct product = Dense<E>::tile(DENSE, ROWS, TILE_PANELS);
    double shortest = 1;
    for (int i = 0; i < TIMES; i++) {
        auto start = std::chrono::steady_clock::now();
        product(out, COLUMNS, rows, UNITS * E::TERMS, panels, UNITS * LANES, UNITS, Prefetch(),
                ROWS);
        std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        shortest = std::min(shortest, seconds.count() / ROWS);
    }
    Isa::end_step();
    return shortest;
}

template <class E, class Other>
bool is_faster() {
    if (std::is_same<E, Other>()) return false;
    return tile_seconds<E>() < tile_seconds<Other>();
}
