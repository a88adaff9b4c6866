// Steps in float32; compiled in parallel with the other compute types.
#include "run.h"

template void run_step<Float32>(const Program&, const Step&);
