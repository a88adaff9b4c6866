// Runs a model's list of operations for one step, by a team of threads that meet after each.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include <omp.h>

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"
#include "turns.h"

// Waiting threads look for a while, then let others run between two looks, and sleep in the end. A
// thread that only looks keeps the one it waits for from running where another process needs a
// core; one that sleeps halts its core, which a virtual machine may be slow to get back. A team with
// more threads than CPUs does not look at all: the thread it waits for needs the core.
class Barrier {
  public:
    explicit Barrier(int threads)
        : threads(threads), looks(threads > omp_get_num_procs() ? 0 : LOOKS), missing(threads) {}

    // `meanwhile` is called again and again for as long as others are missing.
    template <class Meanwhile>
    void wait(Meanwhile meanwhile) {
        int now = generation.load(std::memory_order_acquire);
        if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            missing.store(threads, std::memory_order_relaxed);
            generation.fetch_add(1, std::memory_order_release);
            generation.notify_all();
            return;
        }
        for (int i = 0; i < looks; i++) {
            if (generation.load(std::memory_order_acquire) != now) return;
            meanwhile();
        }
        for (int i = 0; i < YIELDS; i++) {
            if (generation.load(std::memory_order_acquire) != now) return;
            std::this_thread::yield();
        }
        generation.wait(now, std::memory_order_acquire);
    }

  private:
    static constexpr int LOOKS = 2000, YIELDS = 4000;
    const int threads, looks;
    alignas(64) std::atomic<int> missing;
    alignas(64) std::atomic<int> generation{0};
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

constexpr long MAX_TOKENS_A_PIECE = 4;

template <class E>
class Run {
  public:
    Run(const Program& program, const Step& step, int threads)
        : program(program),
          step(step),
          threads(threads),
          attention(program, step),
          barrier(threads),
          taken(program.op_count),
          best(threads),
          places(step.token_count) {
        long token = 0;
        for (long row = 0; row < step.row_count; row++)
            for (long i = 0; i < step.num_tokens[row]; i++)
                places[token++] = {row, step.computed[row] + i};
        if (step.sampled_count < step.token_count)
            sampled_attention.reset(new AttentionWork(program, step, places));
    }

    void thread(int id) {
        scratch_of_thread();
        Coming coming;
        long reader = -1;  // the operation that reads what is coming
        for (long i = 0; i < program.op_count; i++) {
            auto began = std::chrono::steady_clock::now();
            run(program.ops[i], taken[i].next, id);
            if (i >= reader) {
                do reader++;
                while (reader < program.op_count && !reads_much(program.ops[reader]));
                coming = reader < program.op_count ? first_of(program.ops[reader], id) : Coming();
            }
            barrier.wait([&] {
                if (!coming.fetch()) relax();
            });
            if (id == 0 && step.seconds)
                step.seconds[i] += std::chrono::duration<float>(
                    std::chrono::steady_clock::now() - began).count();
        }
    }

    void merge_best(long rows) {
        for (long row = 0; row < rows; row++) {
            Best most = {-INFINITY, INT64_MAX};
            for (auto& own : best)
                if (!own.empty() && (own[row].value > most.value ||
                                     (own[row].value == most.value && own[row].column < most.column)))
                    most = own[row];
            step.best[row] = most.column == INT64_MAX ? 0 : most.column;
        }
    }

  private:
    const Program& program;
    const Step& step;
    const int threads;  // that there are: perhaps fewer than were asked for
    AttentionWork attention;
    std::unique_ptr<AttentionWork> sampled_attention;  // null: every token is sampled
    Barrier barrier;
    std::vector<Counter> taken;
    std::vector<std::vector<Best>> best;
    std::vector<Place> places;  // of each token

    static Scratch<E>& scratch_of_thread() {
        static thread_local std::unique_ptr<Scratch<E>> own;
        if (!own) own.reset(new Scratch<E>());
        return *own;
    }

    template <class Work>
    void share(std::atomic<long>& next, int id, long count, Work work) {
        Turns(count, threads).take(next, id, work);
    }

    // most: rows in a piece, if there are enough for all threads.
    template <class Work>
    void each_row(const Op& op, std::atomic<long>& next, int id, Work work,
                  long most = MAX_TOKENS_A_PIECE) {
        long rows = rows_of(op), a_thread = (rows + threads - 1) / threads;
        long size = std::clamp<long>(a_thread, 1, most);
        share(next, id, (rows + size - 1) / size, [&](long i, long) {
            for (long token = i * size; token < std::min((i + 1) * size, rows); token++) work(token);
        });
    }

    long rows_of(const Op& op) const { return op.sampled ? step.sampled_count : step.token_count; }

    const AttentionWork& attention_of(const Op& op) const {
        return op.sampled && sampled_attention ? *sampled_attention : attention;
    }

    static bool reads_much(const Op& op) { return op.kind == ATTEND || is_product(op); }
    static bool is_product(const Op& op) { return op.kind >= MATMUL && op.kind <= MATMUL_BEST; }

    // Where the thread's first piece of the operation begins to read.
    Coming first_of(const Op& op, int id) const {
        Coming coming;
        if (is_product(op)) {
            Matmul<E> matmul(op, step, rows_of(op), nullptr);
            matmul.fetch(Turns(matmul.pieces.count(), threads).first_piece(id), coming);
        } else {
            Attend<E> attend(program, step, op, attention_of(op));
            attend.fetch(Turns(attend.count(), threads).first_piece(id), coming);
        }
        return coming;
    }

    void run(const Op& op, std::atomic<long>& next, int id) {
        switch (op.kind) {
        case EMBED:
            return each_row(op, next, id, [&](long token) {
                embed<E>(program, step, op, places[token], token);
            });
        case RMS_NORM:
        case LAYER_NORM:
            return each_row(op, next, id, [&](long token) { norm<E>(step, op, token); });
        case QUANTISE:
            return each_row(op, next, id, [&](long token) { quantise_token<E>(step, op, token); });
        case ROTATE_WRITE:
            return each_row(op, next, id, [&](long token) {
                rotate_write<E>(program, step, op, places[token], token);
            }, LANES);  // 16 neighbours are written to the same lines
        case ATTEND: {
            Attend<E> attend(program, step, op, attention_of(op));
            Scratch<E>& scratch = scratch_of_thread();
            return share(next, id, attend.count(),
                         [&](long i, long after) { attend.piece(i, after, scratch); });
        }
        case COMBINE: {
            const std::vector<SplitRow>& split = attention_of(op).split;
            return share(next, id, long(split.size()) * program.heads, [&](long i, long) {
                combine<E>(program, step, op, split[i / program.heads], i % program.heads);
            });
        }
        case MATMUL_BEST:
            best[id].assign(rows_of(op), Best{-INFINITY, INT64_MAX});
            [[fallthrough]];
        default:
            Matmul<E> matmul(op, step, rows_of(op), best[id].data());
            return share(next, id, matmul.pieces.count(), [&](long i, long after) { matmul.piece(i, after); });
        }
    }
};

template <class E>
void run_step(const Program& program, const Step& step) {
    std::unique_ptr<Run<E>> run;
    std::atomic<Run<E>*> ready{nullptr};
#pragma omp parallel num_threads(int(step.threads))
    {
        int id = omp_get_thread_num();
        if (id == 0) {  // is there first: the others have to wake up
            run.reset(new Run<E>(program, step, omp_get_num_threads()));
            ready.store(run.get(), std::memory_order_release);
        }
        Run<E>* mine;
        while (!(mine = ready.load(std::memory_order_acquire))) relax();
        mine->thread(id);
    }
    const Op& last = program.ops[program.op_count - 1];
    if (last.kind == MATMUL_BEST)
        run->merge_best(last.sampled ? step.sampled_count : step.token_count);
}
