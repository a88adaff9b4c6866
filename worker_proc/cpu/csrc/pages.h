// The layout of keys and values in pages.
//
// A page is cut into panels of 16 tokens. A panel holds, for each key head, the keys
// [head_dim / PACK][16 tokens] units and the values [16 / PACK][head_dim] units, which `multiply`
// reads in place. In 8 bits, the codes have the same order, a byte each, followed by a scale for each
// token's keys and one for its values; such a panel is widened when it is read, and the scales are
// applied to scores and weights. If 16 does not divide the page size, a page holds
// [2][tokens][head_dim] for each key head, and panels are assembled when they are read.
#pragma once

#include <algorithm>

#include "prefetch.h"
#include "program.h"
#include "numbers.h"

constexpr int MAX_HEAD_DIM = 256;

template <class E>
struct Pages {
    typedef typename E::Stored Stored;

    const Program& program;
    const Step& step;
    char* pool;
    unsigned panels_per_page;  // if pages hold panels

    Pages(const Program& program, const Step& step, long layer)
        : program(program),
          step(step),
          pool((char*)program.pools[layer]),
          panels_per_page(program.page_size / LANES) {}

    // Whether panels can be multiplied in place.
    bool direct() const { return panelled() && !program.int8_pages; }

    // Returns the keys of 16 tokens from `position` on; their values follow.
    Stored* panel(long row, long position, long kv_head) const {
        return (Stored*)(pool + panel_number(row, position, kv_head) * panel_bytes());
    }
    long panel_size() const { return 2 * LANES * program.padded_dim; }
    long panel_bytes() const {
        return program.int8_pages ? panel_size() + 2 * LANES * long(sizeof(float))
                                  : panel_size() * long(sizeof(Stored));
    }

    // key, value: [padded_dim], zero beyond head_dim.
    void write(long row, long position, long kv_head, const Stored* key, const Stored* value) const {
        if (program.int8_pages) {
            write_int8(row, position, kv_head, key, value);
        } else if (panelled()) {
            write_to_panel(panel(row, position, kv_head), position % LANES, key, value);
        } else {
            std::copy(key, key + program.padded_dim, vector(row, position, kv_head, 0));
            std::copy(value, value + program.padded_dim, vector(row, position, kv_head, 1));
        }
    }

    // Prefetches the memory that `write` will write to.
    INLINE void prefetch(long row, long position) const {
        if (!direct()) return;
        for (long h = 0; h < program.kv_heads; h++) {
            const Stored* keys = panel(row, position, h);
            const Stored* values = keys + LANES * program.padded_dim;
            prefetch_lines<1>(keys, values);
            const Stored* first = values + position % LANES / E::PACK * program.padded_dim * E::PACK;
            prefetch_lines<1>(first, first + program.padded_dim * E::PACK);
        }
    }

    // Returns the keys of 16 tokens from `position` on in 8 bits; their values follow, then the
    // scales of the keys and those of the values.
    int8_t* int8_panel(long row, long position, long kv_head) const {
        return (int8_t*)pool + panel_number(row, position, kv_head) * panel_bytes();
    }
    const float* scales(const int8_t* panel) const { return (const float*)(panel + panel_size()); }

    // Widens a panel in 8 bits, without applying its scales.
    void widen_panel(Stored* to, const int8_t* from) const {
        widen_bytes(to, from, panel_size());
    }

    // Assembles a panel of the tokens from `position` on that are at `begin` to `end` - 1; the others
    // are zeros. For pages without panels.
    void gather(Stored* to, long row, long position, long begin, long end, long kv_head) const {
        std::fill(to, to + panel_size(), Stored(0));
        for (long i = std::max(0L, begin - position); i < LANES && position + i < end; i++)
            write_to_panel(to, i, vector(row, position + i, kv_head, 0),
                           vector(row, position + i, kv_head, 1));
    }

    // Copies a panel, with zeros as the values of all but the tokens `begin` to `end` - 1 of it.
    void copy_seen(Stored* to, const Stored* panel, long begin, long end) const {
        std::copy(panel, panel + panel_size(), to);
        for (long i = 0; i < LANES; i++) {
            if (i >= begin && i < end) continue;
            Stored* values = to + (LANES + i / E::PACK * E::PACK) * program.padded_dim + i % E::PACK;
            for (long d = 0; d < program.padded_dim; d++) values[d * E::PACK] = 0;
        }
    }

  private:
    bool panelled() const { return program.page_size % LANES == 0; }

    long page(long row, long position) const {
        return step.page_table[step.slots[row] * step.page_stride + position / program.page_size];
    }

    long panel_number(long row, long position, long kv_head) const {
        unsigned number = unsigned(position) / LANES;  // its division is faster than that of a long
        const int64_t* pages = step.page_table + step.slots[row] * step.page_stride;
        long panel = pages[number / panels_per_page] * panels_per_page + number % panels_per_page;
        return panel * program.kv_heads + kv_head;
    }

    Stored* vector(long row, long position, long kv_head, int values) const {
        long part = (page(row, position) * program.kv_heads + kv_head) * 2 + values;
        long token = part * program.page_size + position % program.page_size;
        return (Stored*)pool + token * program.padded_dim;
    }

    // Writes token i of a panel. Writes only the token's own bytes, as another thread can write its
    // neighbour.
    template <class T>
    void write_to_panel(T* to, long i, const T* key, const T* value) const {
        for (long d = 0; d < program.padded_dim; d += E::PACK)
            memcpy(to + (d / E::PACK * LANES + i) * E::PACK, key + d, E::PACK * sizeof(T));
        T* values = to + (LANES + i / E::PACK * E::PACK) * program.padded_dim + i % E::PACK;
        for (long d = 0; d < program.padded_dim; d++) values[d * E::PACK] = value[d];
    }

    void write_int8(long row, long position, long kv_head, const Stored* key,
                    const Stored* value) const {
        int8_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        int8_t* to = int8_panel(row, position, kv_head);
        float* scales = (float*)(to + panel_size()) + position % LANES;
        scales[0] = to_int8(keys, key);
        scales[LANES] = to_int8(values, value);
        write_to_panel(to, position % LANES, keys, values);
    }

    // Rounds a vector so that its largest number becomes 127 or -127. Returns the scale, which is NaN
    // if a number is not finite.
    float to_int8(int8_t* to, const Stored* from) const {
        Floats max_abs = {}, zeros = {};
        for (long d = 0; d < program.padded_dim; d += LANES) {
            Floats v = widen(from + d);
            max_abs = max(max_abs, max(v, -v));
            zeros += zeros_of(v);
        }
        float scale = max_lane(max_abs) / 127, inverse = scale > 0 ? 1 / scale : 0;
        for (long d = 0; d < program.padded_dim; d += LANES)
            Isa::store_bytes(to + d, round_to_even(widen(from + d) * inverse));
        return scale + sum(zeros);
    }
};
