// Copies KV pages, sums up their bytes, and finds their largest number: see
// worker_proc/kv_tiers/page_copies.py, which has the same in numpy.
//
// A page of the pool is in pieces, one or more for each layer: piece i of page p is at
// begins[i] + p * sizes[i].
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t GROUP_BYTES = 64, BLOCK_BYTES = 2048;
constexpr int LANES = 16;

// Of the size that registers have: g++ keeps larger ones in memory.
#ifdef __AVX2__
constexpr int LANES_OF_VECTOR = 4;
#else
constexpr int LANES_OF_VECTOR = 2;
#endif
constexpr int VECTORS = LANES / LANES_OF_VECTOR;
typedef uint32_t Words __attribute__((vector_size(4 * LANES_OF_VECTOR)));
typedef uint64_t Lanes __attribute__((vector_size(8 * LANES_OF_VECTOR)));

// Fletcher's checksum of 16 lanes of words of 32 bits. The sums are exact: 64 bits do not overflow
// below 2^32 bytes.
class Checksum {
  public:
    void add(const uint8_t* bytes, int64_t size) {
        if (num_carried) {
            int64_t taken = std::min(GROUP_BYTES - num_carried, size);
            std::memcpy(carried + num_carried, bytes, taken);
            num_carried += taken, bytes += taken, size -= taken;
            if (num_carried < GROUP_BYTES) return;
            add_groups(carried, 1);
        }
        add_groups(bytes, size / GROUP_BYTES);
        num_carried = size % GROUP_BYTES;
        std::memcpy(carried, bytes + size - num_carried, num_carried);
    }

    // Writes [2, LANES]. The last group is filled with zeros.
    void end(uint64_t* sums) {
        if (num_carried) {
            std::memset(carried + num_carried, 0, GROUP_BYTES - num_carried);
            add_groups(carried, 1);
        }
        std::memcpy(sums, first, sizeof first);
        std::memcpy(sums + LANES, second, sizeof second);
    }

  private:
    void add_groups(const uint8_t* bytes, int64_t count) {
        Lanes a[VECTORS], b[VECTORS];
        std::memcpy(a, first, sizeof a), std::memcpy(b, second, sizeof b);
        for (; count > 0; count--)
            for (int v = 0; v < VECTORS; v++, bytes += sizeof(Words)) {
                Words words;
                std::memcpy(&words, bytes, sizeof words);
                a[v] += __builtin_convertvector(words, Lanes);
                b[v] += a[v];
            }
        std::memcpy(first, a, sizeof a), std::memcpy(second, b, sizeof b);
    }

    Lanes first[VECTORS]{}, second[VECTORS]{};
    uint8_t carried[GROUP_BYTES];
    int64_t num_carried = 0;
};

template <class Word>
uint32_t largest_magnitude(const uint8_t* bytes, int64_t size) {
    constexpr Word MAGNITUDE = Word(~Word(0)) >> 1;
    Word largest = 0;
    for (int64_t i = 0; i < size; i += sizeof(Word)) {
        Word word;
        std::memcpy(&word, bytes + i, sizeof word);
        largest = std::max(largest, Word(word & MAGNITUDE));
    }
    return largest;
}

uint32_t largest_of(const uint8_t* bytes, int64_t size, int64_t word_bytes) {
    if (word_bytes == 2) return largest_magnitude<uint16_t>(bytes, size);
    return word_bytes == 4 ? largest_magnitude<uint32_t>(bytes, size) : 0;
}

// Copies a block past the caches, which need not read what is overwritten then, and in which a page
// would take the place of what steps use.
void copy(uint8_t* target, const uint8_t* source, int64_t size) {
#ifdef __AVX2__
    constexpr int64_t VECTOR_BYTES = sizeof(__m256i);
    if (reinterpret_cast<uintptr_t>(target) % VECTOR_BYTES == 0)
        for (; size >= VECTOR_BYTES;
             size -= VECTOR_BYTES, target += VECTOR_BYTES, source += VECTOR_BYTES) {
            __m256i vector = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
            _mm256_stream_si256(reinterpret_cast<__m256i*>(target), vector);
        }
#endif
    std::memcpy(target, source, size);
}

// Separates copies from what the other processes look at before and after them.
void fence() {
#ifdef __AVX2__
    _mm_sfence();  // stores past the caches are in no order with others
#endif
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Has bytes read ahead, as the hardware does only within 4096 bytes.
void fetch(const uint8_t* bytes, int64_t size) {
    for (int64_t i = 0; i < size; i += GROUP_BYTES) __builtin_prefetch(bytes + i);
}

// A copy of a page, in blocks that stay in the first cache.
class PageCopy {
  public:
    explicit PageCopy(int64_t word_bytes) : word_bytes(word_bytes) { fence(); }

    // Copies a piece, after which the one at `next` is copied, of the same size at most.
    void add(uint8_t* target, const uint8_t* source, int64_t size, const uint8_t* next) {
        for (int64_t done = 0; done < size; done += BLOCK_BYTES) {
            int64_t count = std::min(BLOCK_BYTES, size - done);
            bool is_last = done + BLOCK_BYTES >= size;
            fetch(is_last ? next : source + done + BLOCK_BYTES, BLOCK_BYTES);
            largest = std::max(largest, largest_of(source + done, count, word_bytes));
            checksum.add(source + done, count);
            copy(target + done, source + done, count);
        }
    }

    uint32_t end(uint64_t* sums) {
        checksum.end(sums);
        fence();
        return largest;
    }

  private:
    Checksum checksum;
    int64_t word_bytes;
    uint32_t largest = 0;
};

}  // namespace

extern "C" {

// Copies the pieces of a page to one piece of memory. Writes their checksum, and returns the
// largest number of the page without its sign, as a word of word_bytes, 2 or 4; with 0 it returns
// 0.
uint32_t quadriga_gather_page(
    uint8_t* const* begins, const int64_t* sizes, int64_t count, int64_t page, uint8_t* target,
    int64_t word_bytes, uint64_t* sums) {
    auto piece = [=](int64_t i) { return begins[i] + page * sizes[i]; };
    PageCopy copy(word_bytes);
    for (int64_t i = 0; i < count; target += sizes[i], i++)
        copy.add(target, piece(i), sizes[i], piece(i + 1 < count ? i + 1 : i));
    return copy.end(sums);
}

// Copies a page from one piece of memory to its pieces, and writes its checksum.
void quadriga_scatter_page(
    uint8_t* const* begins, const int64_t* sizes, int64_t count, int64_t page,
    const uint8_t* source, uint64_t* sums) {
    PageCopy copy(0);
    for (int64_t i = 0; i < count; source += sizes[i], i++)
        copy.add(begins[i] + page * sizes[i], source, sizes[i], source + sizes[i]);
    copy.end(sums);
}

// Writes the checksum of a page in one piece of memory.
void quadriga_sum_page(const uint8_t* page, int64_t size, uint64_t* sums) {
    Checksum checksum;
    checksum.add(page, size);
    checksum.end(sums);
}

// Returns the largest number of a page as quadriga_gather_page does.
uint32_t quadriga_largest_of_page(
    uint8_t* const* begins, const int64_t* sizes, int64_t count, int64_t page, int64_t word_bytes) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = std::max(largest, largest_of(begins[i] + page * sizes[i], sizes[i], word_bytes));
    return largest;
}
}
