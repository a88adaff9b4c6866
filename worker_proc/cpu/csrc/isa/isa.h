// The instruction set that the kernels are compiled for. One file of this folder has the primitives of
// one set; the kernels are the same for all.
//
// NO_TILES: the CPU has AMX, and it must not be used. EMULATED_TILES: plain functions do what its
// instructions do. PORTABLE: no instructions but those that compilers choose.
#pragma once

#if defined(PORTABLE)
#include "portable.h"
typedef Portable Isa;
#elif defined(EMULATED_TILES) || (defined(__AMX_BF16__) && !defined(NO_TILES))
#include "amx.h"
typedef Amx Isa;
#elif defined(__AVX512F__)
#include "avx512.h"
typedef Avx512 Isa;
#elif defined(__AVX2__)
#include "avx2.h"
typedef Avx2 Isa;
#elif defined(__aarch64__)
#include "neon.h"
typedef Neon Isa;
#else
#include "portable.h"
typedef Portable Isa;
#endif
