// What Python calls.
#include <algorithm>

#include <omp.h>

#include "attention.h"
#include "decode.h"
#include "fastest.h"
#include "sampling.h"

// In float32.cpp, bfloat16.cpp, bfloat16_pairs.cpp.
template <class E>
void run_step(const Program& program, const Step& step);

extern "C" {

void quadriga_run(const Program* program, const Step* step) {
    switch (program->numbers) {
    case FLOAT32: return run_step<Float32>(*program, *step);
    case BFLOAT16: return run_step<BFloat16>(*program, *step);
    default: return run_step<BFloat16Pairs>(*program, *step);
    }
}

// A step of [rows] slots, see decode.h. 0, with nothing done, where it is not such a one.
int64_t quadriga_decode(const Program* program, const Step* step, const Slots* slots,
                        const int32_t* plan, const int32_t* num_tokens, int32_t* chosen) {
    Decode decode(*program, *step, *slots, plan);
    if (!decode.begin(num_tokens)) return 0;
    quadriga_run(program, step);
    decode.end(chosen);
    return 1;
}

// Tokens of `count` rows of logits [columns], `stride` apart.
void quadriga_sample(int64_t* tokens, const float* logits, int64_t stride, int64_t columns,
                     int64_t count, const SamplingRow* rows, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    {
        RowSampler sampler(columns);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) tokens[i] = sampler.sample(logits + i * stride, rows[i]);
    }
}

// Of one machine vector.
int64_t quadriga_vector_bits() { return VECTOR_BITS; }

// As which of Numbers this CPU multiplies bfloat16 faster.
int64_t quadriga_bfloat16() {
    return is_faster<BFloat16Pairs, BFloat16>() ? BFLOAT16_PAIRS : BFLOAT16;
}

// The widest head, and the most query heads that share a key head.
int64_t quadriga_max_head_dim() { return MAX_HEAD_DIM; }
int64_t quadriga_max_shared() { return MAX_SHARED; }

// So that Python can check its own declarations of the structures.
int64_t quadriga_size(int64_t which) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Op), sizeof(Program), sizeof(Step),
                             sizeof(Slots), sizeof(SamplingRow)};
    return sizes[which];
}
}
