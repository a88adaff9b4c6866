// Steps in bfloat16 that multiply pairs; compiled in parallel with the other compute types.
#include "run.h"

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template void run_step<BFloat16Pairs>(const Program&, const Step&);
#endif
