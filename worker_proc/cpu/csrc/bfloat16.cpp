// Steps in bfloat16 that multiply floats; compiled in parallel with the other compute types.
#include "run.h"

template void run_step<BFloat16>(const Program&, const Step&);
