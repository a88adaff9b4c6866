// Distributes the pieces of an operation over the threads.
#pragma once

#include <algorithm>
#include <atomic>

struct alignas(64) Counter {
    std::atomic<long> next{0};
};

// Guided self-scheduling (Polychronopoulos and Kuck 1987, https://doi.org/10.1109/TC.1987.5009495):
// threads take runs of neighbouring pieces, half of the remaining ones in each round of runs. They
// seldom contend for the counter, and yet finish together. The first run of a thread is fixed.
class Schedule {
  public:
    Schedule(long count, int threads) : count(count), threads(threads), size(size_of_runs()) {}

    long first_piece(int id) { return run(id).begin; }

    // Calls work(piece, next) for each piece; `next` is this thread's next piece, or -1.
    template <class Work>
    void take(std::atomic<long>& next, int id, Work work) {
        Pieces after;
        for (Pieces now = run(id); !now.empty(); now = after) {
            for (long i = now.begin; i + 1 < now.end; i++) work(i, i + 1);
            after = Pieces();
            if (count > threads) after = run(threads + next.fetch_add(1, std::memory_order_relaxed));
            work(now.end - 1, after.empty() ? -1 : after.begin);
        }
    }

  private:
    struct Pieces {
        long begin = 0, end = 0;
        bool empty() const { return begin >= end; }
    };

    const long count;
    const int threads;
    long round = 0, begin = 0, size;  // first run of the round, its first piece, pieces of a run

    long size_of_runs() const { return std::max<long>(1, (count - begin) / (2 * threads)); }

    // Returns run n. Calls must not decrease n.
    Pieces run(long n) {
        for (; n >= round + threads && begin < count; round += threads) {
            begin += threads * size;
            size = size_of_runs();
        }
        Pieces pieces;
        pieces.begin = std::min(count, begin + (n - round) * size);
        pieces.end = std::min(count, pieces.begin + size);
        return pieces;
    }
};
