// Operations on each token by itself: embedding, norms, rotary positions.
#pragma once

#include <atomic>
#include <cmath>

#include "adapters.h"
#include "attention_work.h"
#include "coded.h"
#include "dense.h"
#include "pages.h"
#include "quantized.h"

// Writes row `id` of the table, which is a column of the head's matrix.
template <class E>
void embedding(float* to, const Matrix& m, long id, long width) {
    Panel panel = m.panel(id / LANES);
    int lane = int(id % LANES);
    if (is_coded(panel.format))
        return coded_column(to, panel.format, panel.words, m.depth, lane, width);
    if (panel.format != DENSE)
        return dequantize_column(to, panel.format, panel.words, m.depth, lane, width);
    for (long d = 0; d < width; d++) {
        const uint32_t* unit = panel.words + DenseLayout<E>::place(d / E::PACK, lane);
        to[d] = widen_one(((const typename E::Stored*)unit)[d % E::PACK]);
    }
}

// Adds what the adapter of a slot adds to row `id` of the table.
template <class E>
void add_difference(float* to, const Program& program, const Step& step, const Op& op, long slot,
                    long id) {
    long adapter = adapter_of(program, step, slot);
    if (adapter == NO_ADAPTER || op.place < 0) return;
    const AdapterPlace& place = program.adapters[adapter][op.place];
    if (!place.table) return;
    const typename E::Stored* row = (const typename E::Stored*)place.table + id * op.width;
    for (long d = 0; d < op.width; d++) to[d] += widen_one(row[d]);
}

template <class E>
void embed(const Program& program, const Step& step, const Op& op, TokenPosition at,
           long token) {
    float* to = (float*)step.buffers[op.output] + token * step.strides[op.output];
    const float* position =
        program.position_vectors ? program.position_vectors + at.position * op.width : 0;
    bool is_second = program.second_type && at.position >= step.second_from[step.slots[at.row]];
    const float* type = is_second ? program.second_type : 0;
    // The frontend refuses invalid ids; this keeps any id from reading foreign memory.
    long id = step.tokens[step.slots[at.row] * step.token_stride + at.position];
    id = std::clamp<long>(id, 0, op.matrix.columns - 1);
    embedding<E>(to, op.matrix, id, op.width);
    add_difference<E>(to, program, step, op, step.slots[at.row], id);
    for (long d = 0; d < op.width; d++) {
        to[d] *= float(op.scale);
        if (position) to[d] += position[d];
        if (type) to[d] += type[d];
    }
}

template <class E>
void quantize_token(const Step& step, const Op& op, long token) {
    char* to = (char*)step.buffers[op.output] + token * step.strides[op.output];
    long first = token * step.strides[op.input];
    if (op.input == ARRANGED)
        quantize(to, (const float*)step.buffers[op.input] + first, op.width);
    else
        quantize(to, (const typename E::Passed*)step.buffers[op.input] + first, op.width);
}

template <class E>
void arrange_token(const Step& step, const Op& op, long token) {
    arrange((float*)step.buffers[op.output] + token * step.strides[op.output],
            (const typename E::Passed*)step.buffers[op.input] + token * step.strides[op.input],
            op.matrix.order, op.matrix.inputs, op.width);
}

// Returns 1 / sqrt(mean((x - mean)²) + epsilon).
INLINE float norm_scale(const float* x, float mean, long width, double epsilon) {
    Floats squares = {};
    for (long d = 0; d < width; d += LANES) {
        long count = std::min<long>(LANES, width - d);
        alignas(64) float v[LANES];
        store(v, load_partial(x + d, count) - mean);
        Floats centred = load_partial(v, count);
        squares += centred * centred;
    }
    return 1 / std::sqrt(sum(squares) / width + float(epsilon));
}

template <class E>
void norm(const Step& step, const Op& op, long token) {
    typedef typename E::Passed Passed;
    long from = op.sampled && step.sampled ? step.sampled[token] : token;
    const float* x = (const float*)step.buffers[op.input] + from * step.strides[op.input];
    bool in_place = op.output == RESIDUAL;
    Passed* to = (Passed*)step.buffers[op.output] + token * step.strides[op.output];
    float* residual = (float*)step.buffers[RESIDUAL] + token * step.strides[RESIDUAL];
    float mean = 0;
    if (op.kind == LAYER_NORM) {
        Floats total = {};
        for (long d = 0; d < op.width; d += LANES) total += load_partial(x + d, op.width - d);
        mean = sum(total) / op.width;
    }
    float scale = norm_scale(x, mean, op.width, op.epsilon);
    for (long d = 0; d < op.width; d += LANES) {
        long count = std::min<long>(LANES, op.width - d);
        Floats v = (load_partial(x + d, count) - mean) * scale * load_partial(op.gain + d, count);
        if (op.shift) v += load_partial(op.shift + d, count);
        if (in_place)
            narrow_partial(residual + d, v, count);
        else
            narrow_partial(to + d, v, count);
    }
}

template <class E>
void copy(const Step& step, const Op& op, long token) {
    typedef typename E::Passed Passed;
    long from = op.sampled && step.sampled ? step.sampled[token] : token;
    const float* x = (const float*)step.buffers[op.input] + from * step.strides[op.input];
    Passed* to = (Passed*)step.buffers[op.output] + token * step.strides[op.output];
    for (long d = 0; d < op.width; d += LANES) {
        long count = std::min<long>(LANES, op.width - d);
        narrow_partial(to + d, load_partial(x + d, count), count);
    }
}

// Adds the norm of a token's row of the input to its row of the residual stream.
inline void norm_add(const Step& step, const Op& op, long token) {
    long row = op.sampled && step.sampled ? step.sampled[token] : token;
    const float* x = (const float*)step.buffers[op.input] + token * step.strides[op.input];
    float* to = (float*)step.buffers[op.output] + row * step.strides[op.output];
    float scale = norm_scale(x, 0, op.width, op.epsilon);
    for (long d = 0; d < op.width; d += LANES) {
        long count = std::min<long>(LANES, op.width - d);
        Floats v = load_partial(x + d, count) * scale * load_partial(op.gain + d, count);
        narrow_partial(to + d, load_partial(to + d, count) + v, count);
    }
}

inline void scale_cap(const Step& step, const Op& op, long token) {
    float* x = (float*)step.buffers[op.output] + token * step.strides[op.output];
    for (long d = 0; d < op.width; d += LANES) {
        Floats v = load<Floats>(x + d) * float(op.scale);
        store(x + d, op.softcap ? soft_cap(v, float(op.softcap)) : v);
    }
}

// Rotates each pair (i, i + dim / 2) of the first `dim` channels of a head by the angle of its
// position (Su et al. 2021, https://arxiv.org/abs/2104.09864).
INLINE void rotate(float* __restrict to, const float* __restrict x, const float* __restrict cosines,
                   const float* __restrict sines, long dim) {
    long half = dim / 2;
    for (long i = 0; i < half; i++) {
        to[i] = x[i] * cosines[i] - x[i + half] * sines[i];
        to[i + half] = x[i + half] * cosines[i] + x[i] * sines[i];
    }
}

template <class T>
INLINE void narrow_all(T* to, const float* from, long count, float scale) {
    for (long d = 0; d < count; d += LANES) narrow(to + d, load<Floats>(from + d) * scale);
}

// Notes that the keys or values of a slot's token are not finite.
inline void note_nonfinite(const Step& step, long slot, long position) {
    std::atomic_ref<int64_t> from(step.nonfinite_from[slot]);
    int64_t lowest = from.load();
    while (position < lowest && !from.compare_exchange_weak(lowest, position)) {}
    std::atomic_ref<int64_t>(const_cast<Step&>(step).has_nonfinite).store(1);
}

template <class E>
void rotate_write(const Program& program, const Step& step, const Op& op, TokenPosition at,
                  long token) {
    typedef typename E::Stored Stored;
    typedef typename E::Passed Passed;
    long dim = program.head_dim, position = at.position;
    const float* x = (const float*)step.buffers[op.input] + token * step.strides[op.input];
    Passed* queries = (Passed*)step.buffers[op.output] + token * step.strides[op.output];
    Pages<E> pages(program, step, op.layer);
    pages.prefetch(at.row, position);
    alignas(64) float rotated[MAX_HEAD_DIM] = {}, padded[MAX_HEAD_DIM] = {}, normed[MAX_HEAD_DIM];
    alignas(64) Stored key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
    // heads: all queries or keys of the token.
    auto normalize_and_rotate = [&](const float* heads, long h, const float* gain,
                                    float scale_of_all) {
        const float* from = heads + h * dim;
        if (gain) {
            float scale = op.norm_whole ? scale_of_all : norm_scale(from, 0, dim, op.epsilon);
            if (op.norm_whole) gain += h * dim;
            for (long d = 0; d < dim; d++) normed[d] = from[d] * scale * gain[d];
            from = normed;
        }
        long begin = op.cosines ? op.rotated : 0;
        if (op.cosines)
            rotate(rotated, from, op.cosines + position * (begin / 2),
                   op.sines + position * (begin / 2), begin);
        memcpy(rotated + begin, from + begin, (dim - begin) * sizeof(float));
    };
    Floats zeros = {};
    auto scale_of_all = [&](const float* heads, long count) {
        return op.norm_whole ? norm_scale(heads, 0, count * dim, op.epsilon) : 0;
    };
    float scale_of_queries = scale_of_all(x, program.heads);
    for (long h = 0; h < program.heads; h++) {
        normalize_and_rotate(x, h, op.gain, scale_of_queries);
        narrow_all(queries + h * program.padded_dim, rotated, program.padded_dim, float(op.scale));
    }
    const float *keys = x + program.heads * dim, *values = keys + program.kv_heads * dim;
    float scale_of_keys = scale_of_all(keys, program.kv_heads);
    for (long h = 0; h < program.kv_heads; h++) {
        normalize_and_rotate(keys, h, op.key_gain, scale_of_keys);
        narrow_all(key, rotated, program.padded_dim, 1);
        memcpy(padded, values + h * dim, dim * sizeof(float));
        narrow_all(value, padded, program.padded_dim, 1);
        pages.write(at.row, position, h, key, value);
        for (long d = 0; d < program.padded_dim; d += LANES)
            zeros += zeros_of(widen(key + d)) + zeros_of(widen(value + d));
    }
    if (!all_finite(zeros)) note_nonfinite(step, step.slots[at.row], position);
}
