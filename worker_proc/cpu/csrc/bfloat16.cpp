// Steps of bfloat16, as floats, compiled by itself.
#include "run.h"

template void run_step<BFloat16>(const Program&, const Step&);
