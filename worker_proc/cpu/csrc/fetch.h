// Bringing memory into the caches before it is needed.
#pragma once

#include "simd.h"

// A prefetch that finds every buffer of the core taken waits for one on Intel's CPUs, and what comes
// after it soon waits with it: there, prefetches are spread over what is computed. On AMD's it is
// lost: there, they come in goes, each with room for all.
#if defined(__x86_64__)
inline const bool PREFETCHES_WAIT = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
#else
inline const bool PREFETCHES_WAIT = false;
#endif

// Fetch line after line. Without anything between them most would be lost. TO_WRITE: 1 where the
// lines will be written to.
template <int TO_WRITE = 0>
INLINE void fetch_lines(const void* begin, const void* end) {
#pragma GCC unroll 1
    for (const char* line = (const char*)begin; line < (const char*)end; line += 64) {
        __builtin_prefetch(line, TO_WRITE, TO_WRITE ? 3 : 2);
        asm volatile("nop; nop; nop; nop; nop; nop");
    }
}

// What a thread reads first in the operation that comes next, fetched line by line while it waits
// for the others: memory is not idle between two operations.
class Coming {
  public:
    void add(const void* begin, const void* end) {
        if (count < MOST) parts[count++] = {(const char*)begin, (const char*)end};
    }

    // The next line; whether there was one.
    bool fetch() {
        while (count > 0 && parts[count - 1].line >= parts[count - 1].end) count--;
        if (count == 0) return false;
        __builtin_prefetch(parts[count - 1].line, 0, 2);
        parts[count - 1].line += 64;
        return true;
    }

  private:
    static constexpr int MOST = 4;
    struct {
        const char *line, *end;
    } parts[MOST];
    int count = 0;
};
