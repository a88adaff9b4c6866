// Adapters: a row with one gets gain * (W x + U t) + shift of a changed product, where t = D x. U and
// D are dense panels in the compute type, in whatever format W is.
//
// ADAPT computes t before the inputs are rounded or reordered. Rows with the same adapter are
// multiplied together, and t has them side by side. The product then adds U t to the sums of a piece.
// A row's sums are added in the same order in every tile, so that its bits do not depend on the other
// rows; rows without an adapter have the bits of a step without any.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "dense.h"
#include "program.h"

constexpr long NO_ADAPTER = -1;

// Returns the adapter of a slot. One that is not there is none; Python then refuses the step.
inline long adapter_of(const Program& program, const Step& step, long slot) {
    long adapter = step.adapters ? step.adapters[slot] : NO_ADAPTER;
    bool is_there = adapter >= 0 && adapter < program.adapter_count && program.adapters[adapter];
    return is_there ? adapter : NO_ADAPTER;
}

// Rows `begin` to `end` of AdapterRows, which have the same adapter and are multiplied by the same
// matrix: 0, or the expert that computes them.
struct AdapterTile {
    long adapter, matrix, begin, end;
};

// The rows of an operation that have an adapter, those with the same one and matrix side by side.
struct AdapterRows {
    std::vector<int32_t> rows;  // of each adapter in order
    std::vector<AdapterTile> tiles;

    AdapterRows() = default;

    // adapters: [rows of the operation], NO_ADAPTER or below `adapter_count`.
    AdapterRows(const std::vector<int32_t>& adapters, long adapter_count, long tile_rows) {
        std::vector<long> ends(adapter_count + 1);
        for (int32_t adapter : adapters) ends[adapter + 1]++;
        ends[0] = 0;  // the rows without one
        for (long i = 0; i < adapter_count; i++) {
            add_tiles(i, 0, ends[i], ends[i + 1], tile_rows);
            ends[i + 1] += ends[i];
        }
        rows.resize(ends[adapter_count]);
        for (long row = 0; row < long(adapters.size()); row++)
            if (adapters[row] != NO_ADAPTER) rows[ends[adapters[row]]++] = int32_t(row);
    }

    // Cuts `count` rows from `begin` on into tiles of nearly equal size.
    void add_tiles(long adapter, long matrix, long begin, long count, long tile_rows) {
        long size = (count + tile_rows - 1) / tile_rows;
        for (long t = 0; t < size; t++)
            tiles.push_back({adapter, matrix, begin + t * count / size, begin + (t + 1) * count / size});
    }
};

// A tile of rows whose adapter changes a product. first: its first row in the buffer of t.
struct ChangedTile {
    const AdapterPlace* place;
    const int32_t* rows;
    long first;
    int count;

    // The pieces of ADAPT.
    long pieces() const {
        return place->down ? (place->down_panels + PANELS_A_PIECE - 1) / PANELS_A_PIECE : 1;
    }
};

// The tiles that a thread found last. ADAPT and its product have the same ones.
struct alignas(64) ChangedTiles {
    std::vector<ChangedTile> tiles;

    const std::vector<ChangedTile>& of(const Program& program, const Op& op, const AdapterRows& all) {
        if (rows == &all && place == op.place) return tiles;
        rows = &all, place = op.place;
        tiles.clear();
        for (const AdapterTile& tile : all.tiles) {
            const AdapterPlace* changed = program.adapters[tile.adapter] + place + tile.matrix;
            if (changed->changes)
                tiles.push_back({changed, all.rows.data() + tile.begin, tile.begin,
                                 int(tile.end - tile.begin)});
        }
        return tiles;
    }

  private:
    const AdapterRows* rows = nullptr;
    int64_t place = 0;
};

// The buffer of t. A tile is [rows][width], or where the compute type packs rows, packed.
template <class E>
struct Adapted {
    uint32_t* words;
    long stride;  // words of a row

    explicit Adapted(const Step& step)
        : words((uint32_t*)step.buffers[ADAPTED]),
          stride(step.strides[ADAPTED] * long(sizeof(typename E::Passed)) / 4) {}

    uint32_t* tile(const ChangedTile& tile) const { return words + tile.first * stride; }
};

// Copies the rows of a tile as `Adapted` has them. rows: [count] rows of x.
template <class E>
void gather_tile(uint32_t* to, long to_stride, const uint32_t* x, long stride, const int32_t* rows,
                 int count, long words) {
    if (!E::PACKED || count == 1) {
        for (int r = 0; r < count; r++)
            memcpy(to + r * to_stride, x + rows[r] * stride, words * sizeof *to);
        return;
    }
    for (int r = 0; r < count; r++) {
        const uint32_t* from = x + rows[r] * stride;
        for (long w = 0; w < words; w += E::TERMS)
            memcpy(to + w * count + r * E::TERMS, from + w, E::TERMS * sizeof *to);
    }
}

// Computes t of the rows with adapters. tokens: the row of the input for each row of the operation, or
// null: they are the same.
template <class E>
class Adapt {
    typedef typename E::Passed Passed;

  public:
    Adapt(const Op& op, const Step& step, const std::vector<ChangedTile>& tiles,
          const int32_t* tokens)
        : tiles(tiles),
          tokens(tokens),
          x((const uint32_t*)step.buffers[op.input]),
          stride(step.strides[op.input] * long(sizeof(Passed)) / 4),
          depth((op.width + E::PACK - 1) / E::PACK),
          adapted(step) {}

    long count() const {
        long pieces = 0;
        for (const ChangedTile& tile : tiles) pieces += tile.pieces();
        return pieces;
    }

    // Adds D's panels of piece i, if it exists, to the memory to prefetch.
    void add_first_reads(long i, PrefetchQueue& queue) const {
        Piece piece = Piece().to(i, tiles);
        if (piece.tile == long(tiles.size()) || !tiles[piece.tile].place->down) return;
        const AdapterPlace& place = *tiles[piece.tile].place;
        long end = std::min<long>(piece.panel(i) + PANELS_A_PIECE, place.down_panels);
        for (long p = piece.panel(i); p < end; p++)
            queue.add(place.down + p * panel_units(), place.down + (p + 1) * panel_units());
    }

    // Computes piece i. next: the piece that this thread computes afterwards, or -1. Calls must not
    // decrease i.
    void piece(long i, long next) {
        current = current.to(i, tiles);
        const ChangedTile& tile = tiles[current.tile];
        if (!tile.place->down)
            return gather_tile<E>(adapted.tile(tile), adapted.stride, x, stride, input_rows(tile),
                                  tile.count, depth * E::TERMS);
        Prefetch prefetch;
        if (next >= 0) {
            Piece after = current.to(next, tiles);
            const AdapterPlace& place = *tiles[after.tile].place;
            for (int p = 0; p < TILE_PANELS && after.panel(next) + p < place.down_panels; p++)
                prefetch.lines[p] = (const char*)(place.down + (after.panel(next) + p) * panel_units());
        }
        long panel = current.panel(i);
        int panels = int(std::min<long>(PANELS_A_PIECE, tile.place->down_panels - panel));
        Inputs inputs = inputs_of(tile);
        alignas(64) float out[UnitProducts<E>::ROWS * PIECE_COLUMNS];
        for (int p = 0, width; p < panels; p += width) {
            width = std::min(TILE_PANELS, panels - p);
            UnitProducts<E>::tile(DENSE, tile.count, width)(
                out + p * LANES, PIECE_COLUMNS, inputs.words, inputs.stride,
                tile.place->down + (panel + p) * panel_units(), panel_units(), depth, prefetch,
                tile.count);
        }
        for (int r = 0; r < tile.count; r++)
            for (int p = 0; p < panels; p++)
                store_t(tile, r, panel + p, load<Floats>(out + r * PIECE_COLUMNS + p * LANES));
    }

  private:
    struct Inputs {
        const uint32_t* words;
        long stride;
    };
    // The tile of a piece, and that tile's first piece.
    struct Piece {
        long tile = 0, first = 0;

        Piece to(long i, const std::vector<ChangedTile>& tiles) const {
            Piece found = *this;
            for (; found.tile < long(tiles.size()); found.tile++) {
                long end = found.first + tiles[found.tile].pieces();
                if (i < end) break;
                found.first = end;
            }
            return found;
        }
        long panel(long i) const { return (i - first) * PANELS_A_PIECE; }
    };

    const std::vector<ChangedTile>& tiles;
    const int32_t* const tokens;
    int32_t tokens_of_tile[UnitProducts<E>::ROWS];
    const uint32_t* const x;
    const long stride, depth;
    const Adapted<E> adapted;
    Piece current;
    const ChangedTile* gathered = nullptr;  // the tile whose rows are in the thread's scratch

    long panel_units() const { return depth * LANES; }

    // Returns the rows of a tile in the input, until the next call.
    const int32_t* input_rows(const ChangedTile& tile) {
        if (!tokens) return tile.rows;
        for (int r = 0; r < tile.count; r++) tokens_of_tile[r] = tokens[tile.rows[r]];
        return tokens_of_tile;
    }

    // Returns the inputs of a tile: where they are if they are evenly spaced, else a copy.
    Inputs inputs_of(const ChangedTile& tile) {
        static thread_local std::vector<uint32_t> copy;
        const int32_t* rows = input_rows(tile);
        long apart = tile.count > 1 ? rows[1] - rows[0] : 1;
        bool is_even = !E::PACKED || tile.count == 1;
        for (int r = 1; is_even && r < tile.count; r++) is_even = rows[r] - rows[r - 1] == apart;
        if (is_even) return {x + rows[0] * stride, apart * stride};
        long words = depth * E::TERMS;
        if (gathered != &tile) {
            gathered = &tile;
            copy.resize(UnitProducts<E>::ROWS * words);
            gather_tile<E>(copy.data(), words, x, stride, rows, tile.count, words);
        }
        return {copy.data(), words};
    }

    // Stores 16 elements of t of row r of a tile.
    void store_t(const ChangedTile& tile, int r, long panel, Floats values) const {
        uint32_t* to = adapted.tile(tile);
        if constexpr (E::PACKED) {
            static_assert(sizeof(Passed) == 4);
            for (long i = 0, at = panel * LANES; i < LANES; i++, at++)
                ((float*)to)[(at / E::TERMS * tile.count + r) * E::TERMS + at % E::TERMS] = values[int(i)];
        } else {
            narrow((Passed*)(to + r * adapted.stride) + panel * LANES, values);
        }
    }
};

// A panel of U. first, depth: of t, in units of a column.
struct UpPanel {
    const uint32_t* words;
    long first, depth;
};

// Writes the products of a tile of t with one or two panels of the same depth to [rows][PIECE_COLUMNS].
typedef void (*UpProduct)(float* out, const uint32_t* t, long stride, const UpPanel* panels);

// U is thin: what a call costs counts, and panels of gate and up read different elements of t.
template <class E, int ROWS, int PANELS>
void up_product(float* out, const uint32_t* t, long stride, const UpPanel* panels) {
    constexpr long UNIT_WORDS = E::TERMS * (E::PACKED ? ROWS : 1);
    Floats sums[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) sums[r][p] = Floats(0.0f);
    for (long k = 0; k < panels[0].depth; k++) {
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            auto rows = dense_rows<E, ROWS>(t + panels[p].first * UNIT_WORDS, stride);
            Words unit = load<Words>(panels[p].words + k * LANES);
#pragma GCC unroll 2
            for (int i = 0; i < E::TERMS; i++) {
                Words term = E::term(unit, i);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
                    sums[r][p] = E::multiply_add(sums[r][p], rows.template operand<E>(k, i, r), term);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) store(out + r * PIECE_COLUMNS + p * LANES, sums[r][p]);
}

template <class E, int PANELS, int... ROWS>
UpProduct choose_up_product(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr UpProduct all[] = {up_product<E, ROWS + 1, PANELS>...};
    return all[rows - 1];
}

// What adapters add to a product.
template <class E>
class Additions {
  public:
    Additions(const Step& step, std::span<const ChangedTile> tiles) : tiles(tiles), adapted(step) {}

    bool empty() const { return tiles.empty(); }

    // Returns room for the sums of a block of rows, [rows][PIECE_COLUMNS].
    static float* room(long rows) {
        static thread_local std::vector<Floats> buffer;
        if (long(buffer.size()) < rows * PANELS_A_PIECE) buffer.resize(rows * PANELS_A_PIECE);
        return (float*)buffer.data();
    }

    // Prefetches U's panels of part `part` of the tiles.
    void prefetch(long panel, int panels, long part, long parts) const {
        long count = long(tiles.size());
        for (long i = part * count / parts; i < (part + 1) * count / parts; i++) {
            const AdapterPlace* place = tiles[i].place;
            if (i > 0 && tiles[i - 1].place == place) continue;
            for (int p = 0; p < panels; p++) {
                UpPanel up = find(*place, panel + p);
                prefetch_lines(up.words, up.words + up.depth * LANES);
            }
        }
    }

    // Changes the sums of rows `begin` to `end`, in the columns of `panels` panels.
    void add(float* sums, long begin, long end, long panel, int panels) const {
        for (const ChangedTile& tile : tiles) {
            if (tile.rows[tile.count - 1] < begin || tile.rows[0] >= end) continue;
            alignas(64) float added[UnitProducts<E>::ROWS * PIECE_COLUMNS];
            bool is_added[PANELS_A_PIECE];
            multiply_up(added, is_added, tile, panel, panels);
            for (int r = 0; r < tile.count; r++) {
                long row = tile.rows[r];
                if (row < begin || row >= end) continue;
                for (int p = 0; p < panels; p++)
                    change(sums + (row - begin) * PIECE_COLUMNS + p * LANES,
                           is_added[p] ? added + r * PIECE_COLUMNS + p * LANES : nullptr, *tile.place,
                           (panel + p) * LANES);
            }
        }
    }

  private:
    const std::span<const ChangedTile> tiles;
    const Adapted<E> adapted;

    static UpPanel find(const AdapterPlace& place, long panel) {
        for (long i = 0; i < place.run_count; i++) {
            const UpRun& run = place.runs[i];
            long at = panel - run.begin;
            long every = run.step - 1;  // 1: every second panel
            if (at >= 0 && panel < run.end && !(at & every))
                return {run.words + (at >> every) * run.panel_units, run.first, run.depth};
        }
        return {};
    }

    void multiply_up(float* out, bool* is_added, const ChangedTile& tile, long panel,
                     int panels) const {
        typedef std::make_integer_sequence<int, UnitProducts<E>::ROWS> Rows;
        UpPanel ups[PANELS_A_PIECE];
        for (int p = 0; p < panels; p++) {
            ups[p] = find(*tile.place, panel + p);
            is_added[p] = ups[p].depth > 0;
        }
        const uint32_t* t = adapted.tile(tile);
        long stride = adapted.stride;
        bool alike = panels == PANELS_A_PIECE && ups[0].depth == ups[1].depth;
        if (alike && TILE_PANELS == PANELS_A_PIECE)
            return choose_up_product<E, TILE_PANELS>(tile.count, Rows())(out, t, stride, ups);
        for (int p = 0; p < panels; p++)
            if (is_added[p])
                choose_up_product<E, 1>(tile.count, Rows())(out + p * LANES, t, stride, ups + p);
    }

    // added: 16 products, or null.
    INLINE static void change(float* sums, const float* added, const AdapterPlace& place, long column) {
        Floats v = load<Floats>(sums);
        if (added) v += load<Floats>(added);
        if (place.gain) v *= load<Floats>(place.gain + column);
        if (place.shift) v += load<Floats>(place.shift + column);
        store(sums, v);
    }
};
