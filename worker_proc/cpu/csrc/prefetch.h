// Prefetching: reading memory into the caches before it is needed.
#pragma once

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

#include "simd.h"

// If all line fill buffers of a core are taken, a prefetch on Intel's CPUs waits for one, and soon
// the instructions after it wait as well, so prefetches are spread over the computation. On AMD's
// CPUs it is dropped, so prefetches come in bursts that are small enough for the buffers.
#if defined(__x86_64__)
inline const bool PREFETCHES_BLOCK = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
#else
inline const bool PREFETCHES_BLOCK = false;
#endif

// Whether the CPU is of AMD's Zen 5 or a later one, which drops a prefetch that comes within some two
// cycles of the one before (PrefetchPace).
#if defined(__x86_64__)
inline const bool PREFETCHES_SLOWLY = [] {
    unsigned eax = 0, ebx, ecx, edx;
    __get_cpuid(1, &eax, &ebx, &ecx, &edx);
    unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255);
    return (__builtin_cpu_init(), __builtin_cpu_is("amd")) && family >= 0x1a;
}();
#else
inline const bool PREFETCHES_SLOWLY = false;
#endif

// Prefetches line after line into the first-level cache, with IDLE idle instructions in between.
template <int IDLE>
INLINE void prefetch_spaced(const void* begin, const void* end) {
#pragma GCC unroll 1
    for (const char* line = (const char*)begin; line < (const char*)end; line += 64) {
        __builtin_prefetch(line, 0, 3);
        asm volatile(".rept %c0; nop; .endr" : : "i"(IDLE));
    }
}

// How a thread prefetches on a CPU that drops a prefetch if it has no buffer for it: fast, and again
// what was dropped; or slowly, as buffers are in use for longer if other cores read memory as well. The
// faster way is taken, by the time that pieces of work take.
class PrefetchPace {
  public:
    INLINE void prefetch(const void* begin, const void* end) const {
        if (way == TWICE) {
            prefetch_spaced<2>(begin, end);
            prefetch_spaced<2>(begin, end);
        } else {
            prefetch_spaced<32>(begin, end);
        }
    }

    // work: reads `units` of memory of some size.
    template <class Work>
    INLINE void measure(long units, Work work) {
        unsigned long long start = ticks();
        work();
        if (units < MIN_UNITS) return;
        float spent = float(ticks() - start) / float(units);
        // A thread that was interrupted took no longer because of its prefetches.
        if (mean[way] > 0) spent = std::min(spent, 2 * mean[way]);
        mean[way] = mean[way] > 0 ? mean[way] + (spent - mean[way]) / 8 : spent;
        bool tries = ++pieces % PIECES_PER_TRIAL == 0;
        way = (mean[SLOWLY] < mean[TWICE]) != tries;
    }

  private:
    static constexpr long MIN_UNITS = 8, PIECES_PER_TRIAL = 32;
    enum Way { TWICE, SLOWLY };
    float mean[2] = {};  // ticks per unit by each way; 0: not known
    int way = TWICE;
    unsigned pieces = 0;

    static unsigned long long ticks() {
#if defined(__x86_64__)
        return __rdtsc();
#else
        return 0;
#endif
    }
};

// Prefetches line after line, with idle instructions in between, without which most would be
// dropped. TO_WRITE: 1 if the lines will be written to.
template <int TO_WRITE = 0>
INLINE void prefetch_lines(const void* begin, const void* end) {
#pragma GCC unroll 1
    for (const char* line = (const char*)begin; line < (const char*)end; line += 64) {
        __builtin_prefetch(line, TO_WRITE, TO_WRITE ? 3 : 2);
        asm volatile("nop; nop; nop; nop; nop; nop");
    }
}

// Memory that a thread reads first in the next operation, prefetched line by line while it waits at
// the barrier, so that memory is not idle between two operations.
class PrefetchQueue {
  public:
    void add(const void* begin, const void* end) {
        if (count < MAX_RANGES) ranges[count++] = {(const char*)begin, (const char*)end};
    }

    // Prefetches the next line. Returns false if there is none.
    bool prefetch_next() {
        while (count > 0 && ranges[count - 1].line >= ranges[count - 1].end) count--;
        if (count == 0) return false;
        __builtin_prefetch(ranges[count - 1].line, 0, 2);
        ranges[count - 1].line += 64;
        return true;
    }

  private:
    static constexpr int MAX_RANGES = 4;
    struct {
        const char *line, *end;
    } ranges[MAX_RANGES];
    int count = 0;
};
