// Matrix products over packed weights, and the epilogues that are fused with them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "adapters.h"
#include "coded.h"
#include "program.h"
#include "quantized.h"

constexpr long BLOCK_BYTES = 512 * 1024;  // of inputs, which stay in the second-level cache

constexpr int64_t NO_COLUMN = -1;  // of a row that is not finite, or has no finite number

struct RowMax {
    float value;
    int64_t column;
};

// The panels that a thread multiplies next, or none.
struct NextPanels {
    const Matrix* matrix = nullptr;
    long first = 0;

    const char* line(long i) const {
        return first + i < matrix->panel_count ? (const char*)matrix->panel(first + i).words : nullptr;
    }
};

struct Quantized {
    static constexpr int ROWS = QUANTIZED_TILE_ROWS;
    static constexpr bool PACKED = Isa::Layout::PACKED;
    template <int R>
    static constexpr Pack pack = Isa::Integers<Isa, R>::pack;

    static TileProduct tile(int64_t format, int rows, int panels) {
        return quantized_tile(format, rows, panels);
    }
};

// The pieces of a product, of which threads take runs: a block of rows by PANELS_A_PIECE panels of
// columns. All columns of a block of rows come before the next block.
struct Pieces {
    long rows, row_blocks, columns;

    Pieces(const Matrix& m, long rows, long row_bytes)
        : rows(rows),
          row_blocks((rows * row_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES),
          columns((m.panel_count + PANELS_A_PIECE - 1) / PANELS_A_PIECE) {}
    long count() const { return row_blocks * columns; }
    long first_row(long block) const { return block * rows / row_blocks; }
    long first_panel(long piece) const { return piece % columns * PANELS_A_PIECE; }
};

template <class E>
struct Matmul {
    typedef typename E::Passed Passed;

    const Op& op;
    const Matrix& matrix;
    const Step& step;
    const long first_row;  // of the input and the output
    Pieces pieces;
    RowMax* maxima;  // MATMUL_ARGMAX: [rows] maxima of this thread
    long packed_block = -1;
    const int64_t* residual_rows;  // [rows] row of the residual stream, or null: in order
    const Additions<E>* additions;  // of adapters, or null: there are none

    Matmul(const Op& op, const Matrix& matrix, const Step& step, long rows, RowMax* maxima,
           long first_row = 0, const Additions<E>* additions = nullptr)
        : op(op), matrix(matrix), step(step), first_row(first_row),
          pieces(matrix, rows, row_words() * 4), maxima(maxima),
          residual_rows(op.kind == MATMUL_ADD && op.sampled ? step.sampled : nullptr),
          additions(additions) {}

    // Adds the weights of piece i, if it exists, to the memory to prefetch.
    void add_first_reads(long i, PrefetchQueue& queue) const {
        if (i >= pieces.count()) return;
        long first = pieces.first_panel(i), end = first + PANELS_A_PIECE;
        for (long i = first; i < std::min(end, matrix.panel_count); i++) {
            Panel panel = matrix.panel(i);
            queue.add(panel.words, panel.words + panel.units);
        }
    }

    NextPanels panels_of(long piece) const {
        return piece < 0 ? NextPanels() : NextPanels{&matrix, pieces.first_panel(piece)};
    }

    // Computes piece i. next: the panels of the piece that this thread computes afterwards.
    void piece(long i, NextPanels next) {
        switch (matrix.format) {
        case DENSE: return piece_of<Dense<E>>(i, next);
        case CODED_INT8:
        case CODED_INT4: return piece_of<CodedIntegers>(i, next);
        case CODED_FLOAT8:
        case CODED_TABLE4: return piece_of<CodedFloats>(i, next);
        default: return piece_of<Quantized>(i, next);
        }
    }

  private:
    template <class F>
    void piece_of(long i, NextPanels next) {
        const Matrix& m = matrix;
        long panel = pieces.first_panel(i), block = i / pieces.columns;
        int panels = int(std::min<long>(PANELS_A_PIECE, m.panel_count - panel));
        long begin = pieces.first_row(block), count = pieces.first_row(block + 1) - begin;
        long tiles = (count + F::ROWS - 1) / F::ROWS;
        const uint32_t* inputs = F::PACKED && count > 1 ? packed<F>(block, tiles) : input(begin);
        alignas(64) float of_tile[F::ROWS * PIECE_COLUMNS];
        float* of_block = additions ? additions->room(count) : nullptr;
        for (long t = 0; t < tiles; t++) {
            long row = begin + t * count / tiles, end = begin + (t + 1) * count / tiles;
            float* sums = additions ? of_block + (row - begin) * PIECE_COLUMNS : of_tile;
            prefetch_outputs(row, end, panel * LANES, panels);
            if (additions) additions->prefetch(panel, panels, t, tiles);
            for (int p = 0, width; p < panels; p += width) {
                Panel first = m.panel(panel + p);
                width = num_alike(panel + p, std::min(TILE_PANELS, panels - p));
                F::tile(first.format, int(end - row), width)(
                    sums + p * LANES, PIECE_COLUMNS, inputs + (row - begin) * row_words(),
                    row_words(), first.words, first.units, m.depth,
                    prefetch_of(next, t, tiles, p, width), int(end - row));
            }
            if (!additions) finish_rows(sums, row, end, panel, panels);
        }
        if (!additions) return;
        additions->add(of_block, first_row + begin, first_row + begin + count, panel, panels);
        finish_rows(of_block, begin, begin + count, panel, panels);
    }

    void finish_rows(const float* sums, long row, long end, long panel, int panels) const {
        for (long r = row; r < end; r++)
            finish(sums + (r - row) * PIECE_COLUMNS, r, panel * LANES, panels);
    }

    // Returns how many of `count` panels are side by side and have the format of the first one.
    int num_alike(long panel, int count) const {
        const Matrix& m = matrix;
        if (m.format != MIXED) return count;
        int alike = 1;
        while (alike < count && m.panel(panel + alike).format == m.panel(panel).format) alike++;
        return alike;
    }

    // Returns the packed rows of a block. Each thread keeps its last one.
    template <class F>
    const uint32_t* packed(long block, long tiles) {
        static thread_local std::vector<uint32_t> buffer;
        if constexpr (F::PACKED) {
            if (block == packed_block) return buffer.data();
            packed_block = block;
            long begin = pieces.first_row(block), count = pieces.first_row(block + 1) - begin;
            if (long(buffer.size()) < count * row_words()) buffer.resize(count * row_words());
            for (long t = 0; t < tiles; t++) {
                long row = t * count / tiles, rows = (t + 1) * count / tiles - row;
                choose_pack<F>(int(rows), std::make_integer_sequence<int, F::ROWS>())(
                    buffer.data() + row * row_words(), input(begin + row), row_words(),
                    matrix.depth);
            }
        }
        return buffer.data();
    }

    long row_words() const {
        long bytes = matrix.format == DENSE ? sizeof(Passed) : 1;
        if (op.input == ARRANGED) bytes = sizeof(float);
        return step.strides[op.input] * bytes / long(sizeof(uint32_t));
    }
    const uint32_t* input(long row) const {
        return (const uint32_t*)step.buffers[op.input] + (first_row + row) * row_words();
    }

    // Returns what a tile prefetches: one panel of the next piece, so that memory is read evenly. A
    // single tile prefetches all panels.
    Prefetch prefetch_of(NextPanels next, long tile, long tiles, int first, int width) const {
        Prefetch result;
        if (next.matrix)
            for (int p = first; p < first + width; p++)
                if (tiles == 1 || tile == p)
                    result.lines[p - first] = next.line(p);
        return result;
    }

    // Applies the epilogue to the sums of a row, for the columns from `column` on.
    INLINE void finish(const float* sums, long row, long column, int panels) const {
        const float* bias = matrix.bias;
        auto value = [&](int p) {
            Floats v = load<Floats>(sums + p * LANES);
            return bias ? v + load<Floats>(bias + column + p * LANES) : v;
        };
        char* output = output_of(row, column);
        if (op.kind == MATMUL_GATE) return narrow((Passed*)output, gate(value(0), value(1)));
        for (int p = 0; p < panels; p++) {
            float* to = (float*)output + p * LANES;
            if (op.kind == MATMUL_ACTIVATE)
                narrow((Passed*)output + p * LANES, activate(value(p)));
            else if (op.kind == MATMUL_ARGMAX)
                update_max(maxima[row], capped(value(p)), column + p * LANES);
            else
                store(to, op.kind == MATMUL_ADD ? load<Floats>(to) + value(p) * float(op.scale)
                                                : value(p));
        }
    }

    // As SCALE_CAP does: rounding can make equal what was not, and the first of equals wins.
    INLINE Floats capped(Floats x) const {
        x = x * float(op.scale);
        return op.softcap ? soft_cap(x, float(op.softcap)) : x;
    }

    INLINE Floats activate(Floats x) const {
        switch (op.activation) {
        case SILU: return silu(x);
        case GELU_TANH: return gelu(x);
        case GELU: return gelu_erf(x);
        default: return max(0.0f, x);
        }
    }
    INLINE Floats gate(Floats gate, Floats up) const {
        return op.activation == CLAMPED_SWIGLU ? clamped_swiglu(gate, up) : activate(gate) * up;
    }

    // Returns the address of the outputs of a row, from `column` on.
    INLINE char* output_of(long row, long column) const {
        long start = (residual_rows ? residual_rows[row] : first_row + row) * step.strides[op.output];
        return (char*)step.buffers[op.output] + (start + (column >> halves_columns())) * output_bytes();
    }
    int halves_columns() const { return op.kind == MATMUL_GATE; }  // two columns become one
    long output_bytes() const {
        bool passed = op.kind == MATMUL_GATE || op.kind == MATMUL_ACTIVATE;
        return passed ? sizeof(Passed) : sizeof(float);
    }

    // Prefetches the outputs of a tile while it is multiplied: a line or two of each row, which are
    // far apart.
    INLINE void prefetch_outputs(long row, long end, long column, int panels) const {
        if (op.kind == MATMUL_ARGMAX) return;
        long bytes = (panels * LANES >> halves_columns()) * output_bytes();
        for (; row < end; row++)
            for (long line = 0; line < bytes; line += 64)
                __builtin_prefetch(output_of(row, column) + line, 1, 3);
    }

    // The first of equal columns wins, and NaN or infinity against every number.
    INLINE void update_max(RowMax& max, Floats v, long column) const {
        long columns = std::min<long>(LANES, matrix.columns - column);
        if (columns == LANES && all_below(v, max.value)) return;
        for (int i = 0; i < columns; i++)
            if (!(v[i] < INFINITY))
                max = {INFINITY, NO_COLUMN};
            else if (v[i] > max.value || (v[i] == max.value && column + i < max.column))
                max = {v[i], column + i};
    }
};
