// Copies KV pages, sums up their bytes, and finds their largest number: see
// worker_proc/kv_tiers/page_copies.py, which has the same in numpy.
//
// A page of the pool is in pieces, one or more for each layer: piece i of page p is at
// begins[i] + p * sizes[i].
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t GROUP_BYTES = 64, BLOCK_BYTES = 8192;
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

}  // namespace

extern "C" {

// Copies the pieces of a page to one piece of memory.
void quadriga_gather_page(
    uint8_t* const* begins, const int64_t* sizes, int64_t count, int64_t page, uint8_t* target) {
    for (int64_t i = 0; i < count; target += sizes[i], i++)
        std::memcpy(target, begins[i] + page * sizes[i], sizes[i]);
}

// Copies a page to its pieces, and writes the checksum of what has arrived there.
void quadriga_scatter_page(
    uint8_t* const* begins, const int64_t* sizes, int64_t count, int64_t page,
    const uint8_t* source, uint64_t* sums) {
    Checksum checksum;
    for (int64_t i = 0; i < count; i++) {
        uint8_t* piece = begins[i] + page * sizes[i];
        for (int64_t done = 0; done < sizes[i]; done += BLOCK_BYTES) {
            int64_t size = std::min(BLOCK_BYTES, sizes[i] - done);
            std::memcpy(piece + done, source + done, size);
            checksum.add(piece + done, size);
        }
        source += sizes[i];
    }
    checksum.end(sums);
}

// Writes the checksum of a page in one piece of memory.
void quadriga_sum_page(const uint8_t* page, int64_t size, uint64_t* sums) {
    Checksum checksum;
    checksum.add(page, size);
    checksum.end(sums);
}

// Returns the largest number of a page without its sign, as a word of word_bytes, 2 or 4.
uint32_t quadriga_largest_of_page(
    uint8_t* const* begins, const int64_t* sizes, int64_t count, int64_t page, int64_t word_bytes) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* piece = begins[i] + page * sizes[i];
        uint32_t found = word_bytes == 2 ? largest_magnitude<uint16_t>(piece, sizes[i])
                                         : largest_magnitude<uint32_t>(piece, sizes[i]);
        largest = std::max(largest, found);
    }
    return largest;
}
}
