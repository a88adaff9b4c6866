// What Python hands over: the model as a list of operations, and one step's rows.
// The same structures are declared in program.py, in the same order.
#pragma once

#include <cstdint>

enum OpKind : int32_t {
    EMBED,         // output = table[token] (+ positions[position])
    RMS_NORM,      // output = input / rms(input) * gain
    LAYER_NORM,    // output = (input - mean) / deviation * gain + shift
    MATMUL,        // output = input x matrix (+ bias), float
    MATMUL_ADD,    // output += input x matrix (+ bias), float
    MATMUL_GELU,   // output = gelu(input x matrix + bias)
    MATMUL_SWIGLU, // output = silu(gate) * up; panels of gate and up take turns
    MATMUL_BEST,   // the column of each row's greatest sum, and nothing else
    ROTATE_WRITE,  // queries of input, normalised (where there is a gain), rotated and scaled, to
                   // output; keys, likewise, and values to the pages
    ATTEND,        // output = attention(input)
    COMBINE,       // of rows whose context was split: output = the parts together
    QUANTISE,      // output = input in 8 bits, for a quantised matrix
};

enum Buffer : int32_t { RESIDUAL, NORMED, PROJECTED, QUERIES, ATTENDED, INNER, LOGITS, QUANTISED, BUFFERS };

enum Format : int64_t { DENSE, INT8, INT4 };

enum Numbers : int64_t { FLOAT32, BFLOAT16, BFLOAT16_PAIRS };  // see numbers.h

struct Matrix {
    int64_t format;
    const uint32_t* panels;  // [panels][panel_units]; what is in a panel is up to the format
    int64_t panel_units;     // units of 4 bytes
    const float* bias;       // [panels * 16], or null
    int64_t columns;         // that exist; the last panel may be filled up with zeros
    int64_t panel_count;
    int64_t depth;           // dense: units a column; else groups
};

struct Op {
    int64_t kind, input, output, layer, width;
    int64_t sampled;     // not 0: of the sampled tokens only, whose rows lie one after the other
                         // everywhere but in the residual stream and the queries
    Matrix matrix;
    const float* gain;   // norms: [width]; rotate and write: of queries, [head_dim], or null
    const float* shift;  // layer norm: [width]
    const float* key_gain;  // rotate and write: of keys, [head_dim], where queries have one
    double epsilon;
};

struct Program {
    int64_t numbers;
    int64_t op_count;
    const Op* ops;
    int64_t heads, kv_heads, head_dim;
    int64_t dim;              // head_dim filled up with zeros to a multiple of 16, as it is stored
    int64_t page_size;
    int64_t int8_pages;       // keys and values are kept in 8 bits
    void* const* pools;       // one a layer
    const float* cosines;     // [context][head_dim / 2], null: no rotation
    const float* sines;
    const float* position_vectors;  // [context][hidden], null: none are added
};

struct Step {
    int64_t threads;
    int64_t token_count;
    int32_t* tokens;           // [slots][token_stride]: all that is known of each
    int64_t token_stride;
    int64_t row_count;
    int64_t* slots;            // [rows]
    int64_t* computed;         // [rows]
    int64_t* num_tokens;       // [rows]
    const int64_t* page_table; // [slots][page_stride]
    int64_t page_stride;
    void* buffers[BUFFERS];
    int64_t strides[BUFFERS];  // of a row, in elements
    int64_t sampled_count;
    const int64_t* sampled;    // [sampled_count] tokens, null: every token, in order
    int64_t* best;             // [rows]: MATMUL_BEST
    float* parts;              // scratch of rows whose context is split
    int64_t part_floats;       // how much of it there is
    float* seconds;            // [ops], null: not wanted. How long each operation took
};

// What is kept of each slot: see SlotTable and SamplingState.
struct Slots {
    int64_t count;
    int64_t* known;
    int64_t* computed;
    const int64_t* num_pages;
    const bool* plain;
};
