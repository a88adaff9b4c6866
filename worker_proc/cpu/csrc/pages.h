// Where keys and values lie.
//
// A page is cut into panels of 16 tokens. A panel holds, for each key head, its keys
// [head_dim / PACK][16 tokens] units and its values [16 / PACK][head_dim] units: the form in which
// `multiply` takes them, so that nothing is ever rearranged. In 8 bits the numbers lie in the same
// order, a byte each, followed by a scale for each token's keys and one for its values; such a
// panel is widened when it is read, and the scales are left to what is made of it. Where 16 does not
// divide the page size, a page holds [2][tokens][head_dim] for each key head, and panels are put
// together when they are read.
#pragma once

#include <algorithm>

#include "fetch.h"
#include "program.h"
#include "numbers.h"

constexpr int MAX_HEAD_DIM = 256;

template <class E>
struct Pages {
    typedef typename E::Stored Stored;

    const Program& program;
    const Step& step;
    char* pool;
    unsigned panels_a_page;  // where they are panelled

    Pages(const Program& program, const Step& step, long layer)
        : program(program),
          step(step),
          pool((char*)program.pools[layer]),
          panels_a_page(program.page_size / LANES) {}

    // Panels can be multiplied where they lie.
    bool direct() const { return panelled() && !program.int8_pages; }

    // The keys of 16 tokens from `position` on; their values follow.
    Stored* panel(long row, long position, long kv_head) const {
        return (Stored*)(pool + panel_number(row, position, kv_head) * panel_bytes());
    }
    long panel_size() const { return 2 * LANES * program.dim; }
    long panel_bytes() const {
        return program.int8_pages ? panel_size() + 2 * LANES * long(sizeof(float))
                                  : panel_size() * long(sizeof(Stored));
    }

    // key, value: [dim], zeros beyond head_dim.
    void write(long row, long position, long kv_head, const Stored* key, const Stored* value) const {
        if (program.int8_pages) {
            write_int8(row, position, kv_head, key, value);
        } else if (panelled()) {
            put(panel(row, position, kv_head), position % LANES, key, value);
        } else {
            std::copy(key, key + program.dim, plain(row, position, kv_head, 0));
            std::copy(value, value + program.dim, plain(row, position, kv_head, 1));
        }
    }

    // Bring what `write` will write to on the way: of few tokens it is in no cache.
    INLINE void fetch(long row, long position) const {
        if (!direct()) return;
        for (long h = 0; h < program.kv_heads; h++) {
            const Stored* keys = panel(row, position, h);
            const Stored* values = keys + LANES * program.dim;
            fetch_lines<1>(keys, values);
            const Stored* first = values + position % LANES / E::PACK * program.dim * E::PACK;
            fetch_lines<1>(first, first + program.dim * E::PACK);
        }
    }

    // Where the pages are in 8 bits: the keys of 16 tokens from `position` on; their values follow,
    // and then the scales of the keys and those of the values.
    int8_t* int8_panel(long row, long position, long kv_head) const {
        return (int8_t*)pool + panel_number(row, position, kv_head) * panel_bytes();
    }
    const float* scales(const int8_t* panel) const { return (const float*)(panel + panel_size()); }

    // The numbers of a panel in 8 bits, without their scales.
    void take_wide(Stored* to, const int8_t* from) const {
        for (long n = 0; n < panel_size(); n += LANES) narrow(to + n, from_bytes(from + n));
    }

    // Tokens position..end - 1 (at most 16) of pages that hold no panels, as a panel in `to`.
    void gather(Stored* to, long row, long position, long end, long kv_head) const {
        std::fill(to, to + panel_size(), Stored(0));
        for (long i = 0; i < LANES && position + i < end; i++)
            put(to, i, plain(row, position + i, kv_head, 0), plain(row, position + i, kv_head, 1));
    }

  private:
    bool panelled() const { return program.page_size % LANES == 0; }

    long page(long row, long position) const {
        return step.page_table[step.slots[row] * step.page_stride + position / program.page_size];
    }

    long panel_number(long row, long position, long kv_head) const {
        unsigned number = unsigned(position) / LANES;  // divided faster than a long
        const int64_t* pages = step.page_table + step.slots[row] * step.page_stride;
        long panel = pages[number / panels_a_page] * panels_a_page + number % panels_a_page;
        return panel * program.kv_heads + kv_head;
    }

    Stored* plain(long row, long position, long kv_head, int values) const {
        long part = (page(row, position) * program.kv_heads + kv_head) * 2 + values;
        long token = part * program.page_size + position % program.page_size;
        return (Stored*)pool + token * program.dim;
    }

    // Token i of a panel of whatever is kept of a number. Another thread may write its neighbour, so
    // that nothing but its own bytes is touched.
    template <class T>
    void put(T* to, long i, const T* key, const T* value) const {
        for (long d = 0; d < program.dim; d += E::PACK)
            memcpy(to + (d / E::PACK * LANES + i) * E::PACK, key + d, E::PACK * sizeof(T));
        T* values = to + LANES * program.dim + i / E::PACK * program.dim * E::PACK + i % E::PACK;
        for (long d = 0; d < program.dim; d++) values[d * E::PACK] = value[d];
    }

    void write_int8(long row, long position, long kv_head, const Stored* key,
                    const Stored* value) const {
        int8_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        int8_t* to = int8_panel(row, position, kv_head);
        float* scales = (float*)(to + panel_size()) + position % LANES;
        scales[0] = to_int8(keys, key);
        scales[LANES] = to_int8(values, value);
        put(to, position % LANES, keys, values);
    }

    // Returns the scale: the greatest becomes 127 or -127.
    float to_int8(int8_t* to, const Stored* from) const {
        Floats most = {};
        for (long d = 0; d < program.dim; d += LANES) {
            Floats v = widen(from + d);
            most = max(most, max(v, -v));
        }
        float scale = greatest(most) / 127, inverse = scale > 0 ? 1 / scale : 0;
        for (long d = 0; d < program.dim; d += LANES)
            store(to + d, to_bytes(round_to_even(widen(from + d) * inverse)));
        return scale;
    }
};
