// Steps of float32, compiled by itself.
#include "run.h"

template void run_step<Float32>(const Program&, const Step&);
