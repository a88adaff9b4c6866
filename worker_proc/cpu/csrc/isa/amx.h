// AMX: tiles of 16 rows of 64 bytes. The layout of panels is that of AVX-512, of which 16 units are a
// tile as they are in memory.
#pragma once

#include "avx512.h"
#include "tiles.h"

// Products of bfloat16. Up to 32 rows by two panels are four tiles of sums (0 to 3); tiles 4 and 5 have
// the rows, 6 and 7 the panels.
//
// A tile instruction adds the products of even and of odd inputs separately, 16 units at a time, and
// their sums to those before. A product by pairs has another order, so that products with a matrix are
// by tiles for any number of rows.
struct TiledBFloat16 : UnitLayout {
    static constexpr int ROWS = 2 * TILE_LINES;
    static constexpr bool PACKED = false;

    template <int R, int PANELS>
    static void multiply(float* out, long out_stride, const uint32_t* rows, long stride,
                         const uint32_t* panels, long panel_units, long depth,
                         const char* const* prefetch) {
        constexpr int FIRST = R < TILE_LINES ? R : TILE_LINES, SECOND = R - FIRST;
        TileConfig config;
        for (int t = 0; t < 8; t++) config.lines[t] = t < 4 ? (t < 2 ? FIRST : SECOND) : TILE_LINES;
        config.lines[4] = FIRST, config.lines[5] = SECOND;
        Tiles::configure(config);
        Tiles::zero<0>();
        if (PANELS > 1) Tiles::zero<1>();
        if (SECOND) Tiles::zero<2>();
        if (SECOND && PANELS > 1) Tiles::zero<3>();
        long unit = 0;
        for (; unit + TILE_LINES <= depth; unit += TILE_LINES) {
            for (int p = 0; p < PANELS; p++)
                if (prefetch[p])
                    for (int line = 0; line < TILE_LINES; line++)
                        __builtin_prefetch(prefetch[p] + (unit + line) * 64, 0, 2);
            add<SECOND, PANELS>(rows + unit, stride, panels + unit * LANES, panel_units);
        }
        if (unit < depth) add_last<R, PANELS>(rows + unit, stride, panels + unit * LANES, panel_units,
                                              depth - unit);
        store<SECOND, PANELS>(out, out_stride);
    }

  private:
    template <int SECOND, int PANELS>
    static INLINE void add(const uint32_t* rows, long stride, const uint32_t* panels,
                           long panel_units) {
        Tiles::load<6>(panels, TILE_BYTES);
        Tiles::load<4>(rows, stride * 4);
        Tiles::add_pairs<0, 4, 6>();
        if (PANELS > 1) {
            Tiles::load<7>(panels + panel_units, TILE_BYTES);
            Tiles::add_pairs<1, 4, 7>();
        }
        if (SECOND) {
            Tiles::load<5>(rows + TILE_LINES * stride, stride * 4);
            Tiles::add_pairs<2, 5, 6>();
            if (PANELS > 1) Tiles::add_pairs<3, 5, 7>();
        }
    }

    // Adds the products with the last units, of which there are fewer than lines in a tile.
    template <int R, int PANELS>
    static void add_last(const uint32_t* rows, long stride, const uint32_t* panels, long panel_units,
                         long units) {
        alignas(64) uint32_t last_rows[R][TILE_LINES] = {}, last[PANELS][TILE_LINES][LANES] = {};
        for (int r = 0; r < R; r++) memcpy(last_rows[r], rows + r * stride, units * sizeof *rows);
        for (int p = 0; p < PANELS; p++)
            memcpy(last[p], panels + p * panel_units, units * LANES * sizeof *panels);
        constexpr int SECOND = R > TILE_LINES ? R - TILE_LINES : 0;
        add<SECOND, PANELS>(last_rows[0], TILE_LINES, last[0][0], TILE_LINES * LANES);
    }

    template <int SECOND, int PANELS>
    static INLINE void store(float* out, long out_stride) {
        Tiles::store<0>(out, out_stride * 4);
        if (PANELS > 1) Tiles::store<1>(out + LANES, out_stride * 4);
        if (!SECOND) return;
        Tiles::store<2>(out + TILE_LINES * out_stride, out_stride * 4);
        if (PANELS > 1) Tiles::store<3>(out + TILE_LINES * out_stride + LANES, out_stride * 4);
    }
};

// Products of UNITS units of bytes, of up to 32 rows by 16 columns: tiles 0 and 1. Tiles 4 and 5 have the
// rows, 6 the codes.
template <int UNITS>
class ByteTiles {
  public:
    explicit ByteTiles(int rows) : first(rows < TILE_LINES ? rows : TILE_LINES), second(rows - first) {
        TileConfig config;
        config.lines[0] = config.lines[4] = uint8_t(first);
        config.lines[1] = config.lines[5] = uint8_t(second);
        config.lines[6] = UNITS;
        config.bytes[4] = config.bytes[5] = UNITS * 4;
        Tiles::configure(config);
    }

    // Multiplies rows of signed bytes by codes [UNITS][16 columns].
    INLINE void multiply(const uint32_t* rows, long stride, const uint32_t* codes) {
        Tiles::load<6>(codes, TILE_BYTES);
        Tiles::zero<0>();
        Tiles::load<4>(rows, stride * 4);
        Tiles::add_bytes<0, 4, 6>();
        Tiles::store<0>(sums, TILE_BYTES);
        if (!second) return;
        Tiles::zero<1>();
        Tiles::load<5>(rows + TILE_LINES * stride, stride * 4);
        Tiles::add_bytes<1, 5, 6>();
        Tiles::store<1>(sums + TILE_LINES * LANES, TILE_BYTES);
    }
    INLINE Ints products(int row) const { return load<Ints>(sums + row * LANES); }

  private:
    const int first, second;
    alignas(64) int32_t sums[2 * TILE_LINES * LANES];
};

struct Amx : Avx512 {
    static constexpr int MANY_ROWS = 2 * TILE_LINES;
    template <int UNITS>
    using ByteTiles = ::ByteTiles<UNITS>;

    static constexpr bool HAS_MATRICES = true;
    typedef TiledBFloat16 Matrices;

    // Tiles in use keep a core from its lowest power, and are saved when threads change.
    static void end_step() { Tiles::release(); }
};
