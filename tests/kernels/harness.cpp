// Run the CPU kernels on small matrices and short contexts, and compare them with plain loops.
//
// Linked with the objects of worker_proc/cpu/csrc for any CPU: tests/unit/worker/test_kernels_by_cpu.py
// builds it for ARM64 and runs it under QEMU. Every product and every attention is also computed row
// by row and in several chunks, which must give the same bits.
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "coded.h"
#include "coded/panels.h"
#include "dense.h"
#include "quantized.h"
#include "quantized/formats.h"

extern "C" void quadriga_run(const Program* program, const Step* step);
extern "C" int64_t quadriga_paired_codes();
extern "C" int64_t quadriga_paired_bfloat16();
extern "C" int64_t quadriga_bfloat16();

namespace {

constexpr long COLUMNS = 24, PANEL_COUNT = (COLUMNS + LANES - 1) / LANES, GROUPS = 16;
constexpr long ROW_COUNT = 35;
constexpr long COUNTS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33};  // of rows
constexpr long THREADS = 2;  // of a step with all rows; others have one
// Of the sum of the absolute products: floats are added in another order.
constexpr double EXACT = 2e-6;

std::mt19937 generator(7);
int passed = 0, failed = 0;

void check(bool holds, const std::string& name, double error) {
    printf("%s %s (%.2g)\n", holds ? "ok  " : "FAIL", name.c_str(), error);
    holds ? passed++ : failed++;
}

float normal() { return std::normal_distribution<float>()(generator); }
int random_int(int below) { return int(generator() % unsigned(below)); }

float round_to(ComputeType type, float x) {
    if (type == FLOAT32) return x;
    uint16_t rounded;
    narrow_one(&rounded, x);
    return widen_one(rounded);
}

// A matrix, and its values as plain code decodes them: [COLUMNS][inputs].
struct Weights {
    Matrix matrix = {};
    std::vector<Floats> memory;
    std::vector<double> values;
    long inputs;

    Weights(int64_t format, long inputs, long panel_units, long depth)
        : memory(PANEL_COUNT * ((panel_units + LANES - 1) / LANES)), values(COLUMNS * inputs), inputs(inputs) {
        memset((void*)memory.data(), 0, memory.size() * sizeof memory[0]);
        matrix.format = format;
        matrix.panels = (const uint32_t*)memory.data();
        matrix.panel_units = (panel_units + LANES - 1) / LANES * LANES;
        matrix.columns = COLUMNS, matrix.panel_count = PANEL_COUNT, matrix.depth = depth;
        matrix.inputs = inputs;
    }
    uint32_t* panel(long i) { return (uint32_t*)memory.data() + i * matrix.panel_units; }
};

Weights dense(ComputeType type, long inputs) {
    long pack = type == FLOAT32 ? 1 : 2, depth = (inputs + pack - 1) / pack;
    bool paired = type == BFLOAT16_PAIRS && quadriga_paired_bfloat16();
    Weights w(DENSE, inputs, (depth + depth % 2) * LANES, depth);
    for (long c = 0; c < COLUMNS; c++)
        for (long k = 0; k < inputs; k++) {
            float value = round_to(type, normal());
            long unit = k / pack, lane = c % LANES;
            long at = paired ? unit / 2 * 32 + lane * 2 + unit % 2 : unit * LANES + lane;
            uint32_t* word = w.panel(c / LANES) + at;
            if (type == FLOAT32)
                memcpy(word, &value, 4);
            else
                narrow_one((uint16_t*)word + k % 2, value);
            w.values[c * inputs + k] = value;
        }
    return w;
}

uint16_t random_half(float* value) {
    uint16_t bits = uint16_t((8 + random_int(4)) << 10 | random_int(1024) | random_int(2) << 15);
    *value = half_to_float(bits);
    return bits;
}

// A type of GGUF: bits of its planes, which code is zero, a table, and its scales.
struct Type {
    const char* name;
    Format format;
    int low, high, zero;
    const uint8_t* table;
    enum { GROUP_SCALES, BLOCK_SCALES, NIBBLES, POWERS } scales;
    int parts;
    bool minimum;
};
const Type TYPES[] = {
    {"Q8_0", INT8, 8, 0, 128, nullptr, Type::GROUP_SCALES, 1, false},
    {"Q4_1", INT4, 4, 0, 0, nullptr, Type::GROUP_SCALES, 1, true},
    {"Q4_0", Q4_0, 4, 0, 8, nullptr, Type::GROUP_SCALES, 1, false},
    {"Q5_0", Q5_0, 4, 1, 16, nullptr, Type::GROUP_SCALES, 1, false},
    {"Q5_1", Q5_1, 4, 1, 0, nullptr, Type::GROUP_SCALES, 1, true},
    {"Q2_K", Q2_K, 2, 0, 0, nullptr, Type::NIBBLES, 2, true},
    {"Q3_K", Q3_K, 2, 1, 4, nullptr, Type::BLOCK_SCALES, 2, false},
    {"Q4_K", Q4_K, 4, 0, 0, nullptr, Type::BLOCK_SCALES, 1, true},
    {"Q5_K", Q5_K, 4, 1, 0, nullptr, Type::BLOCK_SCALES, 1, true},
    {"Q6_K", Q6_K, 4, 2, 32, nullptr, Type::BLOCK_SCALES, 2, false},
    {"IQ4_NL", IQ4_NL, 4, 0, 128, IQ4_TABLE, Type::GROUP_SCALES, 1, false},
    {"IQ4_XS", IQ4_XS, 4, 0, 128, IQ4_TABLE, Type::BLOCK_SCALES, 1, false},
    {"MXFP4", MXFP4, 4, 0, 12, MXFP4_TABLE, Type::POWERS, 1, false},
};

// Puts the codes of unit `unit` of column `lane` into the planes of a group.
void place(uint32_t* group, const Type& t, int unit, int lane, const int* codes) {
    int line = unit, word = lane;
    if (quadriga_paired_codes()) line = unit / 2 * 2 + lane / 8, word = lane % 8 * 2 + unit % 2;
    for (int byte = 0; byte < 4; byte++) {
        uint32_t low = codes[byte] & ((1 << t.low) - 1), high = codes[byte] >> t.low;
        group[line % t.low * LANES + word] |= low << (8 * byte + t.low * (line / t.low));
        if (t.high)
            group[(t.low + line % t.high) * LANES + word] |=
                high << (8 * byte + t.high * (line / t.high));
    }
}

Weights quantized(const Type& t) {
    long code_words = (t.low + t.high) * LANES;
    long scale_bytes = GROUPS * LANES * 8;  // enough for any type
    Weights w(t.format, GROUPS * GROUP, GROUPS * code_words + scale_bytes / 4, GROUPS);
    for (long p = 0; p < PANEL_COUNT; p++) {
        uint32_t* panel = w.panel(p);
        uint8_t* arrays = (uint8_t*)(panel + GROUPS * code_words);
        // [groups][parts][16]
        std::vector<float> factors(GROUPS * 2 * LANES), minima(GROUPS * 2 * LANES);
        long blocks = GROUPS / 8;
        for (long g = 0; g < GROUPS; g++)
            for (int part = 0; part < t.parts; part++)
                for (int lane = 0; lane < LANES; lane++) {
                    float& factor = factors[(g * 2 + part) * LANES + lane];
                    float& minimum = minima[(g * 2 + part) * LANES + lane];
                    uint16_t* halves = (uint16_t*)arrays;
                    if (t.scales == Type::GROUP_SCALES) {
                        halves[g * LANES + lane] = random_half(&factor);
                        if (t.minimum) halves[(GROUPS + g) * LANES + lane] = random_half(&minimum);
                    } else if (t.scales == Type::POWERS) {
                        int exponent = 115 + random_int(20);
                        arrays[g * LANES + lane] = uint8_t(exponent);
                        factor = std::ldexp(1.0f, exponent - 128);
                    } else {
                        float unused;
                        uint16_t* of_block = halves + g / 8 * LANES + lane;
                        if (g % 8 == 0 && part == 0) {
                            *of_block = random_half(&unused);
                            if (t.minimum) of_block[blocks * LANES] = random_half(&unused);
                        }
                        uint8_t* bytes = arrays + 2 * blocks * LANES * (t.minimum ? 2 : 1) +
                                         (g * t.parts + part) * LANES + lane;
                        int f, m = 0;
                        if (t.scales == Type::NIBBLES) {
                            *bytes = uint8_t(random_int(256)), f = *bytes & 15, m = *bytes >> 4;
                        } else {
                            f = random_int(128) - 64, *bytes = uint8_t(f);
                            if (t.minimum) {
                                m = random_int(64);
                                bytes[GROUPS * t.parts * LANES] = uint8_t(m);
                            }
                        }
                        factor = half_to_float(*of_block) * float(f);
                        if (t.minimum) minimum = -half_to_float(of_block[blocks * LANES]) * float(m);
                    }
                }
        for (long g = 0; g < GROUPS; g++)
            for (int lane = 0; lane < LANES; lane++)
                for (int unit = 0; unit < GROUP_UNITS; unit++) {
                    int codes[4];
                    for (int& code : codes) code = random_int(1 << (t.low + t.high));
                    place(panel + g * code_words, t, unit, lane, codes);
                    long c = p * LANES + lane;
                    if (c >= COLUMNS) continue;
                    for (int byte = 0; byte < 4; byte++) {
                        int code = t.table ? t.table[codes[byte]] : codes[byte];
                        long at = (g * 2 + unit / (GROUP_UNITS / t.parts)) * LANES + lane;
                        float value = float(code - t.zero) * factors[at];
                        if (t.minimum) value += minima[at];
                        w.values[c * w.inputs + g * GROUP + unit * 4 + byte] = value;
                    }
                }
    }
    return w;
}

Weights coded(Format format, int scale_type, bool has_zeros, int group) {
    long bytes = format == CODED_INT8 || format == CODED_FLOAT8 ? 512 : 256;
    long scales = (GROUPS + group - 1) / group;
    long scale_bytes = scale_type == SCALE_SHARED ? 4 : LANES * (scale_type == SCALE_FLOAT32 ? 4 : 2);
    long size = long(sizeof(CodedHeader)) + GROUPS * bytes + scales * (scale_bytes + LANES);
    Weights w(format, GROUPS * GROUP, (size + 3) / 4, GROUPS);
    for (long p = 0; p < PANEL_COUNT; p++) {
        CodedHeader& header = *(CodedHeader*)w.panel(p);
        header.group = group, header.scale_type = scale_type, header.has_zeros = has_zeros;
        for (int i = 0; i < 16; i++) header.table[i] = float(i - 7) / 8;
        uint8_t* codes = (uint8_t*)(&header + 1);
        for (long i = 0; i < GROUPS * bytes; i++) {
            codes[i] = uint8_t(random_int(256));
            if (format == CODED_FLOAT8 && (codes[i] & 127) == 127) codes[i]--;  // NaN
        }
        uint8_t* at = codes + GROUPS * bytes;
        for (long i = 0; i < scales * (scale_type == SCALE_SHARED ? 1 : LANES); i++) {
            float scale = 0.01f + 0.01f * float(random_int(100));
            if (scale_type == SCALE_FLOAT16)
                ((uint16_t*)at)[i] = random_half(&scale);
            else if (scale_type == SCALE_BFLOAT16)
                narrow_one((uint16_t*)at + i, scale);
            else
                memcpy(at + 4 * i, &scale, 4);
        }
        if (has_zeros)
            for (long i = 0; i < scales * LANES; i++)
                at[scales * scale_bytes + i] = uint8_t(random_int(format == CODED_INT4 ? 16 : 256));
    }
    std::vector<float> column(w.inputs);
    for (long c = 0; c < COLUMNS; c++) {
        coded_column(column.data(), format, w.panel(c / LANES), GROUPS, int(c % LANES), w.inputs);
        for (long k = 0; k < w.inputs; k++) w.values[c * w.inputs + k] = column[k];
    }
    return w;
}

// Buffers of a step, which are zeros at first.
struct Buffers {
    std::vector<Floats> memory[BUFFERS];

    void* make(Step& step, Buffer buffer, long rows, long width, long element_bytes) {
        long stride = (width + 15) / 16 * 16 + 32;
        memory[buffer].assign((rows * stride * element_bytes + 63) / 64, Floats(0.0f));
        step.strides[buffer] = stride;
        return step.buffers[buffer] = memory[buffer].data();
    }
};

void fill(void* row, const float* from, long count, bool halves) {
    for (long k = 0; k < count; k++)
        if (halves)
            narrow_one((uint16_t*)row + k, from[k]);
        else
            ((float*)row)[k] = from[k];
}

// Returns the products [count][COLUMNS] of rows x, each of w.inputs floats.
std::vector<float> multiply(ComputeType type, const Weights& w, const float* x, long count) {
    bool halves = type == BFLOAT16_PAIRS;
    bool floats = w.matrix.format == CODED_FLOAT8 || w.matrix.format == CODED_TABLE4;
    Step step = {};
    Buffers buffers;
    char* rows = (char*)buffers.make(step, NORMED, count, w.inputs, halves ? 2 : 4);
    for (long r = 0; r < count; r++)
        fill(rows + r * step.strides[NORMED] * (halves ? 2 : 4), x + r * w.inputs, w.inputs, halves);
    buffers.make(step, QUANTIZED, count, GROUPS * 44, 1);
    buffers.make(step, ARRANGED, count, w.inputs, 4);
    const float* out = (const float*)buffers.make(step, PROJECTED, count, PANEL_COUNT * LANES, 4);
    std::vector<Op> ops;
    Op product = {};
    product.kind = MATMUL, product.input = NORMED, product.output = PROJECTED;
    product.width = PANEL_COUNT * LANES, product.matrix = w.matrix, product.place = -1;
    if (w.matrix.format != DENSE) {
        Op first = product;
        first.kind = floats ? ARRANGE : QUANTIZE;
        first.output = floats ? ARRANGED : QUANTIZED;
        first.width = floats ? w.inputs : GROUPS;
        product.input = first.output;
        ops.push_back(first);
    }
    ops.push_back(product);
    Program program = {};
    program.compute_type = type, program.op_count = long(ops.size()), program.ops = ops.data();
    int64_t slot = 0, computed = 0, num_tokens = count;
    step.threads = count == ROW_COUNT ? THREADS : 1, step.row_count = 1;
    step.token_count = step.sampled_count = count;
    step.slots = &slot, step.computed = &computed, step.num_tokens = &num_tokens;
    quadriga_run(&program, &step);
    std::vector<float> result;
    for (long r = 0; r < count; r++)
        for (long c = 0; c < COLUMNS; c++) result.push_back(out[r * step.strides[PROJECTED] + c]);
    return result;
}

// Rounds a row as the kernels do: 8 bits in groups of 32. In double, as a multiplication and the addition
// that rounds are rounded once.
void round_to_bytes(double* to, const float* x, long count) {
    for (long g = 0; g < count; g += GROUP) {
        float largest = 0;
        for (long k = g; k < g + GROUP; k++) largest = std::max(largest, std::fabs(x[k]));
        float inverse = 127 / largest;
        for (long k = g; k < g + GROUP; k++)
            to[k] = std::nearbyint(double(x[k]) * double(inverse)) * double(largest / 127);
    }
}

void check_products(const std::string& name, ComputeType type, const Weights& w) {
    bool rounded = w.matrix.format != DENSE && w.matrix.format != CODED_FLOAT8 &&
                   w.matrix.format != CODED_TABLE4;
    std::vector<float> x(ROW_COUNT * w.inputs);
    for (float& value : x) value = type == BFLOAT16_PAIRS ? round_to(type, normal()) : normal();
    std::vector<double> inputs(x.begin(), x.end());
    if (rounded)
        for (long r = 0; r < ROW_COUNT; r++)
            round_to_bytes(inputs.data() + r * w.inputs, x.data() + r * w.inputs, w.inputs);
    std::vector<float> all = multiply(type, w, x.data(), ROW_COUNT);
    double worst = 0;
    for (long r = 0; r < ROW_COUNT; r++)
        for (long c = 0; c < COLUMNS; c++) {
            double sum = 0, absolute = 0;
            for (long k = 0; k < w.inputs; k++) {
                double product = inputs[r * w.inputs + k] * w.values[c * w.inputs + k];
                sum += product, absolute += std::fabs(product);
            }
            double error = std::fabs(all[r * COLUMNS + c] - sum) / absolute;
            if (!(error <= worst)) worst = error;
        }
    check(worst < EXACT, name + ": products", worst);
    bool equal = true;
    for (long count : COUNTS)
        for (long first = 0; first + count <= ROW_COUNT; first += count) {
            std::vector<float> some = multiply(type, w, x.data() + first * w.inputs, count);
            equal &= !memcmp(some.data(), all.data() + first * COLUMNS, some.size() * sizeof(float));
        }
    check(equal, name + ": equal bits for every number of rows", 0);
}

// The attention of one row of tokens to itself.
struct Sequence {
    static constexpr long HEADS = 2, KV_HEADS = 1, DIM = 24, PADDED = 32, PAGE = 16, LENGTH = 530;
    static constexpr long WIDTH = (HEADS + 2 * KV_HEADS) * DIM, PAGES = (LENGTH + PAGE - 1) / PAGE;
    std::vector<float> qkv;  // [LENGTH][WIDTH]

    Sequence() : qkv(LENGTH * WIDTH) {
        for (float& value : qkv) value = normal();
    }

    // Returns the attention [LENGTH][HEADS * DIM], computed in steps of these numbers of tokens, the
    // last of which repeats.
    std::vector<float> attend(ComputeType type, bool int8_pages, std::vector<long> steps) const {
        bool halves = type == BFLOAT16_PAIRS;
        long bytes = type == FLOAT32 ? 4 : 2;
        long panel = int8_pages ? 32 * PADDED + 128 : 32 * PADDED * bytes;
        std::vector<Floats> pool(PAGES * KV_HEADS * panel / 64 + 1, Floats(0.0f));
        void* pools[] = {pool.data()};
        Op ops[3] = {};
        for (Op& op : ops) op.place = -1, op.output = ATTENDED, op.input = QUERIES;
        ops[0].kind = ROTATE_WRITE, ops[0].input = PROJECTED, ops[0].output = QUERIES;
        ops[0].scale = 1 / std::sqrt(double(DIM));
        ops[1].kind = ATTEND, ops[2].kind = COMBINE;
        Program program = {};
        program.compute_type = type, program.op_count = 3, program.ops = ops;
        program.heads = HEADS, program.kv_heads = KV_HEADS, program.head_dim = DIM;
        program.padded_dim = PADDED, program.page_size = PAGE, program.int8_pages = int8_pages;
        program.pools = pools;
        int64_t table[PAGES], slot = 0, nonfinite = INT64_MAX, second = INT64_MAX;
        for (long i = 0; i < PAGES; i++) table[i] = (i * 7) % PAGES;
        std::vector<Floats> parts(4096);
        std::vector<float> result;
        for (int64_t done = 0, i = 0; done < LENGTH; i++) {
            int64_t count = std::min<int64_t>(steps[std::min<long>(i, long(steps.size()) - 1)], LENGTH - done);
            Step step = {};
            Buffers buffers;
            char* rows = (char*)buffers.make(step, PROJECTED, count, WIDTH, 4);
            for (long r = 0; r < count; r++)
                fill(rows + r * step.strides[PROJECTED] * 4, qkv.data() + (done + r) * WIDTH, WIDTH, false);
            buffers.make(step, QUERIES, count, HEADS * PADDED, halves ? 2 : 4);
            char* out = (char*)buffers.make(step, ATTENDED, count, HEADS * DIM, halves ? 2 : 4);
            step.threads = count == LENGTH ? THREADS : 1, step.row_count = 1;
            step.token_count = step.sampled_count = count;
            step.slots = &slot, step.computed = &done, step.num_tokens = &count;
            step.page_table = table, step.page_stride = PAGES;
            step.parts = (float*)parts.data(), step.part_floats = long(parts.size()) * LANES;
            step.nonfinite_from = &nonfinite, step.second_from = &second;
            quadriga_run(&program, &step);
            for (long r = 0; r < count; r++)
                for (long c = 0; c < HEADS * DIM; c++) {
                    long at = r * step.strides[ATTENDED] + c;
                    result.push_back(halves ? widen_one(((uint16_t*)out)[at]) : ((float*)out)[at]);
                }
            done += count;
        }
        return result;
    }

    // Returns the largest difference from plain loops.
    double error(ComputeType type, const std::vector<float>& result) const {
        double worst = 0;
        for (long t = 0; t < LENGTH; t += 37)
            for (long h = 0; h < HEADS; h++) {
                const float* query = qkv.data() + t * WIDTH + h * DIM;
                long keys = HEADS * DIM + h / (HEADS / KV_HEADS) * DIM, values = keys + KV_HEADS * DIM;
                std::vector<double> weights(t + 1), mean(DIM);
                double total = 0;
                for (long s = 0; s <= t; s++) {
                    double score = 0;
                    for (long d = 0; d < DIM; d++)
                        score += double(query[d]) * round_to(type, qkv[s * WIDTH + keys + d]);
                    total += weights[s] = std::exp(score / std::sqrt(double(DIM)));
                    for (long d = 0; d < DIM; d++)
                        mean[d] += weights[s] * round_to(type, qkv[s * WIDTH + values + d]);
                }
                for (long d = 0; d < DIM; d++) {
                    double difference = std::fabs(result[t * HEADS * DIM + h * DIM + d] - mean[d] / total);
                    if (!(difference <= worst)) worst = difference;
                }
            }
        return worst;
    }
};

void check_attention(const std::string& name, ComputeType type, bool int8_pages) {
    Sequence sequence;
    std::vector<float> whole = sequence.attend(type, int8_pages, {Sequence::LENGTH});
    double error = sequence.error(type, whole);
    check(error < (int8_pages ? 0.05 : type == FLOAT32 ? 2e-6 : 0.02), name + ": attention", error);
    for (const std::vector<long>& steps : {std::vector<long>{1}, {17, 64, 100, 3}}) {
        std::vector<float> other = sequence.attend(type, int8_pages, steps);
        check(!memcmp(whole.data(), other.data(), whole.size() * sizeof(float)),
              name + ": equal bits in steps of " + std::to_string(steps[0]) + " tokens", 0);
    }
}

void check_columns(const Type& type, const Weights& w) {
    std::vector<float> column(w.inputs);
    bool equal = true;
    for (long c = 0; c < COLUMNS; c++) {
        dequantize_column(column.data(), type.format, w.matrix.panels + c / LANES * w.matrix.panel_units,
                          GROUPS, int(c % LANES), w.inputs);
        for (long k = 0; k < w.inputs; k++) equal &= column[k] == w.values[c * w.inputs + k];
    }
    check(equal, std::string(type.name) + ": values", 0);
}

}  // namespace

int main() {
    const char* names[] = {"float32", "bfloat16", "bfloat16 in pairs"};
    printf("vectors of %d bits; codes %s; bfloat16 %s\n", VECTOR_BITS,
           quadriga_paired_codes() ? "paired" : "by unit",
           !Isa::HAS_PAIRS ? "as floats" : quadriga_paired_bfloat16() ? "paired" : "in pairs");
    for (ComputeType type : {FLOAT32, BFLOAT16, BFLOAT16_PAIRS}) {
        if (type == BFLOAT16_PAIRS && !Isa::HAS_PAIRS) continue;
        for (long inputs : {64L, 197L, 512L})
            check_products(names[type] + (" x " + std::to_string(inputs)), type, dense(type, inputs));
        check_attention(names[type], type, false);
        check_attention(names[type] + std::string(", keys and values in 8 bits"), type, true);
    }
    for (const Type& type : TYPES) {
        Weights w = quantized(type);
        check_columns(type, w);
        check_products(type.name, FLOAT32, w);
    }
    ComputeType bfloat16 = Isa::HAS_PAIRS ? BFLOAT16_PAIRS : BFLOAT16;
    check_products("coded int8", FLOAT32, coded(CODED_INT8, SCALE_FLOAT32, true, 2));
    check_products("coded int4", bfloat16, coded(CODED_INT4, SCALE_FLOAT16, true, 4));
    check_products("coded int4 without zeros", FLOAT32, coded(CODED_INT4, SCALE_BFLOAT16, false, 1));
    check_products("coded float8", FLOAT32, coded(CODED_FLOAT8, SCALE_SHARED, false, 4));
    check_products("coded table", bfloat16, coded(CODED_TABLE4, SCALE_FLOAT32, false, 2));
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
