// The functions that Python calls.
#include <algorithm>

#include <omp.h>

#include "attention.h"
#include "decode.h"
#include "dense.h"
#include "fastest.h"
#include "sampling.h"

// Instantiated in float32.cpp, bfloat16.cpp and bfloat16_pairs.cpp.
template <class E>
void run_step(const Program& program, const Step& step);

extern "C" {

void quadriga_run(const Program* program, const Step* step) {
    switch (program->compute_type) {
    case FLOAT32: return run_step<Float32>(*program, *step);
    case BFLOAT16: return run_step<BFloat16>(*program, *step);
    default: return run_step<BFloat16Pairs>(*program, *step);
    }
}

// Runs a greedy decode step of the slots in `plan` [rows], see decode.h. Returns 0, with nothing
// changed, if the step is not one; 2 if the logits of a row are not finite; else 1.
int64_t quadriga_decode(const Program* program, const Step* step, const Slots* slots,
                        const int32_t* plan, const int32_t* num_tokens, int32_t* token_ids) {
    Decode decode(*program, *step, *slots, plan);
    if (!decode.begin(num_tokens)) return 0;
    quadriga_run(program, step);
    return decode.end(token_ids) ? 1 : 2;
}

// Samples a token from each of `count` rows of logits [columns], which are `stride` floats apart.
void quadriga_sample(int64_t* tokens, const float* logits, int64_t stride, int64_t columns,
                     int64_t count, const SamplingRow* rows, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    {
        RowSampler sampler(columns);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) tokens[i] = sampler.sample(logits + i * stride, rows[i]);
    }
}

// Bits of a machine vector.
int64_t quadriga_vector_bits() { return VECTOR_BITS; }

// Whether panels of codes, and those of bfloat16 that are multiplied as pairs, have two neighbouring
// units of a column side by side.
int64_t quadriga_paired_codes() { return Isa::Layout::place(1, 0).word == 1; }
int64_t quadriga_paired_bfloat16() { return DenseLayout<BFloat16Pairs>::place(1, 0) == 1; }

// What these kernels multiply bfloat16 by: 0: floats only, 1: pairs, 2: matrices.
int64_t quadriga_bfloat16_instructions() { return Isa::HAS_PAIRS + Isa::HAS_MATRICES; }

// The compute type in which this CPU multiplies bfloat16 faster.
int64_t quadriga_bfloat16() {
    return is_faster<BFloat16Pairs, BFloat16>() ? BFLOAT16_PAIRS : BFLOAT16;
}

// The largest supported head, and the largest number of query heads that share a key head.
int64_t quadriga_max_head_dim() { return MAX_HEAD_DIM; }
int64_t quadriga_max_group_size() { return MAX_GROUP_SIZE; }

// Lets Python check its own declarations of the structures.
int64_t quadriga_size(int64_t which) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Op), sizeof(Program), sizeof(Step),
                             sizeof(Slots), sizeof(SamplingRow),
                             sizeof(UpRun), sizeof(AdapterPlace)};
    return sizes[which];
}
}
