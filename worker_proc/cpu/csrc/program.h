// The structures that Python passes: a model as a list of operations, and the rows of a step.
// program.py declares them in the same order.
#pragma once

#include <cstdint>

enum OpKind : int32_t {
    EMBED,         // output = table[token] * scale (+ positions[position])
    RMS_NORM,      // output = input / rms(input) * gain
    LAYER_NORM,    // output = (input - mean) / deviation * gain + shift
    MATMUL,        // output = input x matrix (+ bias), float
    MATMUL_ADD,    // output += scale * (input x matrix (+ bias)), float
    MATMUL_ACTIVATE,  // output = activation(input x matrix + bias)
    MATMUL_GATE,      // output = activation(gate) * up; panels of gate and up alternate
    MATMUL_ARGMAX, // only the column of each row's maximum, after what SCALE_CAP does
    ROTATE_WRITE,  // output = queries of input, normalized (if there is a gain), rotated and
                   // scaled; keys (likewise) and values are written to the pages
    ATTEND,        // output = attention(input)
    COMBINE,       // output = combined parts of the rows whose context was split
    QUANTIZE,      // output = input in 8 bits, for a quantized matrix
    NORM_ADD,      // output += input / rms(input) * gain, float
    COPY,          // output = input, the residual stream
    SCALE_CAP,     // output = scale * output, then softcap * tanh(output / softcap), float
    ARRANGE,       // output = input as floats, in the order of a matrix's columns
    ROUTE,         // the experts of each token, by the scores in the input
    SORT_ROWS,     // the order of the rows by expert
    GATHER,        // output = rows of the input by expert
    ADD_EXPERTS,   // output += scale * weighted sum of the rows of each token's experts, float
    ADAPT,         // output = what adapters multiply before the next product, see adapters.h
};

enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU, CLAMPED_SWIGLU };

enum Buffer : int32_t { RESIDUAL, NORMED, PROJECTED, QUERIES, ATTENDED, INNER, LOGITS, QUANTIZED,
                       EXPERT_INPUT, EXPERT_QUANTIZED, EXPERT_INNER, EXPERT_OUTPUT, ARRANGED,
                       ADAPTED, BUFFERS };

// CODED_*: of quantized checkpoints, see coded.h. INT8 and INT4 are also GGUF's Q8_0 and Q4_1. MIXED: each panel of a matrix has its own format.
enum Format : int64_t {
    DENSE, INT8, INT4, Q4_0, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, MIXED,
    CODED_INT8, CODED_INT4, CODED_FLOAT8, CODED_TABLE4
};

enum ComputeType : int64_t { FLOAT32, BFLOAT16, BFLOAT16_PAIRS };  // see numbers.h

struct Panel {
    int64_t format;
    const uint32_t* words;
    int64_t units;  // of 4 bytes
};

struct Matrix {
    int64_t format;
    const uint32_t* panels;  // [panels][panel_units]; the contents depend on the format
    int64_t panel_units;     // in units of 4 bytes
    const Panel* mixed;      // MIXED: [panels], instead of `panels` and `panel_units`
    const float* bias;       // [panels * 16], or null
    int64_t columns;         // without the padding of the last panel
    int64_t panel_count;
    int64_t depth;           // dense: units of a column; quantized: groups
    const int32_t* order;    // [inputs] of each column of the weight, or null: in order
    int64_t inputs;          // coded: without the padding of the last group

    Panel panel(int64_t i) const {
        return format == MIXED ? mixed[i] : Panel{format, panels + i * panel_units, panel_units};
    }
};

// Panels of U whose products have the same inputs: every panel, or every second one, from `begin` to
// `end`. Where panels of gate and up alternate, each has a run.
struct UpRun {
    int64_t begin, end, step;
    const uint32_t* words;
    int64_t panel_units;   // from one panel of the run to the next
    int64_t first, depth;  // of t, in units of 4 bytes of a column
};

// What an adapter changes of a matrix.
struct AdapterPlace {
    int64_t changes;       // 0: nothing of the products
    const uint32_t* down;  // dense panels [down_panels], or null: t is the input
    int64_t down_panels;
    const UpRun* runs;
    int64_t run_count;
    const float* gain;     // [panels * 16], or null
    const float* shift;    // likewise
    const void* table;     // EMBED: [entries][width] in the type of dense weights, what is added to
                           // the table, or null
};

struct Op {
    int64_t kind, input, output, layer, width;
    int64_t sampled;     // not 0: computed for sampled tokens only, whose rows are contiguous
                         // except in the residual stream and the queries
    Matrix matrix;
    const float* gain;   // norms: [width]; ROTATE_WRITE: [head_dim] of the queries, or null
    const float* shift;  // LAYER_NORM: [width]
    const float* key_gain;  // ROTATE_WRITE: [head_dim] of the keys, or null
    double epsilon;
    double scale;           // ROTATE_WRITE: of the queries
    double softcap;         // 0: none
    int64_t activation;
    int64_t norm_whole;     // ROTATE_WRITE: not 0: all heads of a token are normalized together, by
                            // gains of [heads * head_dim] and [kv_heads * head_dim]
    const float* cosines;   // ROTATE_WRITE: [context][rotated / 2], or null: no rotation
    const float* sines;
    int64_t rotated;        // channels of a head that are rotated; the others follow
    int64_t window;         // ATTEND, COMBINE: keys that a query sees, itself included, or so many
                            // on either side if the program is bidirectional; 0: all
    const float* sinks;     // ATTEND, COMBINE: [heads] scores without a value, or null
    const float* position_bias;  // ATTEND: what is added to a score, at the key's position less the
                                 // query's; of the first head, the others follow. Or null
    int64_t bias_stride;    // ATTEND: from one head's biases to the next one's
    const Matrix* experts;  // products by expert: [experts], instead of `matrix`; else null
    int64_t expert_count;
    int64_t num_chosen;     // experts of a token
    int64_t renormalize;    // ROUTE: not 0: the weights of a token's experts add up to 1
    int64_t by_expert;      // not 0: there is a row for each chosen expert of each token, see experts.h
    int64_t place;          // of the matrix in adapters, or of the first expert's; those of the
                            // others follow; -1: no adapter changes it
};

struct Program {
    int64_t compute_type;
    int64_t op_count;
    const Op* ops;
    int64_t heads, kv_heads, head_dim;
    int64_t padded_dim;       // head_dim rounded up to a multiple of 16: the size of stored vectors
    int64_t page_size;
    int64_t int8_pages;       // not 0: keys and values are stored in 8 bits
    void* const* pools;       // one per layer
    const float* position_vectors;  // [context][hidden], or null: the model has none
    const float* second_type;       // [hidden] added to tokens of the second type, or null
    int64_t bidirectional;    // not 0: a query sees all keys of its row
    int64_t adapter_count;
    const AdapterPlace* const* adapters;  // [adapter_count] the places of each; null: it is not there
};

struct Step {
    int64_t threads;
    int64_t token_count;
    int32_t* tokens;           // [slots][token_stride]: all known tokens of each slot
    int64_t token_stride;
    int64_t row_count;
    int64_t* slots;            // [rows]
    int64_t* computed;         // [rows]
    int64_t* num_tokens;       // [rows]
    const int64_t* page_table; // [slots][page_stride]
    int64_t page_stride;
    void* buffers[BUFFERS];
    int64_t strides[BUFFERS];  // elements from one row to the next
    int64_t sampled_count;
    const int64_t* sampled;    // [sampled_count] token indices, or null: every token, in order
    int64_t* argmax;           // [rows]: results of MATMUL_ARGMAX
    float* parts;              // scratch for rows whose context is split
    int64_t part_floats;       // size of the scratch
    float* op_seconds;         // [ops] duration of each operation, or null
    int64_t* nonfinite_from;   // [slots] the lowest position whose keys or values are not finite
    const int64_t* second_from; // [slots] the position of the first token of the second type
    int64_t has_nonfinite;     // set to 1 where one of them was lowered
    const int64_t* adapters;   // [slots] index of the adapter, -1 without one; null: there are none
    int64_t has_unknown_adapter;  // set to 1 where an adapter of a row is not there
};

// Arrays of SlotTable and SamplingState, indexed by slot.
struct Slots {
    int64_t count;
    int64_t* known;
    int64_t* computed;
    const int64_t* num_pages;
    const bool* greedy_only;
};
