// Products with weights of 2 to 8 bits, and their values. Inputs are rounded to 8 bits, so that the
// products are computed with integers. The folder quantized/ has the formats.
#pragma once

#include <algorithm>

#include "quantized/inputs.h"
#include "tile.h"

// Rows of the largest tile.
constexpr int QUANTIZED_TILE_ROWS = std::max(Isa::INTEGER_ROWS, Isa::MANY_ROWS);

// Returns the product of a tile with panels of a format, which is not DENSE.
// rows: 1 to QUANTIZED_TILE_ROWS; panels: 1 to TILE_PANELS.
TileProduct quantized_tile(int64_t format, int rows, int panels);

// Writes the first `width` weights of column `lane` of a panel, exactly.
void dequantize_column(float* to, int64_t format, const uint32_t* panel, long groups, int lane,
                       long width);
