// Steps of bfloat16, in pairs, compiled by itself.
#include "run.h"

#if defined(__AVX512BF16__)
template void run_step<BFloat16Pairs>(const Program&, const Step&);
#endif
