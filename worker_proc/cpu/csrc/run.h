// Runs a program for one step, by a team of threads with a barrier after each operation.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include <omp.h>

#include "adapters.h"
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "matmul.h"
#include "schedule.h"

// Waiting threads spin, then yield, and finally sleep. A thread that only spins can keep the thread
// that it waits for off a core that another process needs; a thread that sleeps halts its core,
// which a virtual machine may be slow to get back. A team with more threads than CPUs does not
// spin: the thread that it waits for needs the core.
class Barrier {
  public:
    explicit Barrier(int threads)
        : threads(threads),
          num_spins(threads > omp_get_num_procs() ? 0 : SPINS),
          num_missing(threads) {}

    // Calls `meanwhile` repeatedly while it spins.
    template <class Meanwhile>
    void wait(Meanwhile meanwhile) {
        int current = generation.load(std::memory_order_acquire);
        if (num_missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            num_missing.store(threads, std::memory_order_relaxed);
            generation.fetch_add(1, std::memory_order_release);
            generation.notify_all();
            return;
        }
        for (int i = 0; i < num_spins; i++) {
            if (generation.load(std::memory_order_acquire) != current) return;
            meanwhile();
        }
        for (int i = 0; i < YIELDS; i++) {
            if (generation.load(std::memory_order_acquire) != current) return;
            std::this_thread::yield();
        }
        generation.wait(current, std::memory_order_acquire);
    }

  private:
    static constexpr int SPINS = 2000, YIELDS = 4000;
    const int threads, num_spins;
    alignas(64) std::atomic<int> num_missing;
    alignas(64) std::atomic<int> generation{0};
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // takes about as long; "yield" does nothing on most CPUs
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
          barrier(threads),
          counters(program.op_count),
          thread_maxima(threads),
          positions(step.token_count),
          changed(threads) {
        long token = 0;
        for (long row = 0; row < step.row_count; row++)
            for (long i = 0; i < step.num_tokens[row]; i++)
                positions[token++] = {row, step.computed[row] + i};
        for (long i = 0; i < program.op_count; i++) {
            if (program.ops[i].kind == ATTEND && !find_work(program.ops[i].window))
                works.emplace_back(new WorkOfWindow(program, step, program.ops[i].window, positions));
            else if (program.ops[i].kind == ROUTE && expert_rows.chosen.empty())
                expert_rows.reserve(step.token_count * program.ops[i].num_chosen);
        }
        if (step.adapters) find_adapters();
    }

    void thread(int id) {
        scratch_of_thread();
        PrefetchQueue queue;
        long consumer = -1;  // the operation that the prefetched memory is for
        for (long i = 0; i < program.op_count; i++) {
            if (program.ops[i].kind == ADAPT && !is_changed(program.ops[i], id)) continue;
            auto start = std::chrono::steady_clock::now();
            auto note_time = [&] {
                if (id == 0 && step.op_seconds)
                    step.op_seconds[i] += std::chrono::duration<float>(
                        std::chrono::steady_clock::now() - start).count();
            };
            run(program.ops[i], counters[i].next, id);
            if (is_read_later(i)) {
                note_time();
                continue;
            }
            if (i >= consumer) {
                do consumer++;
                while (consumer < program.op_count && !is_memory_bound(program.ops[consumer]));
                queue = consumer < program.op_count ? first_reads(program.ops[consumer], id)
                                                    : PrefetchQueue();
            }
            barrier.wait([&] {
                if (!queue.prefetch_next()) relax();
            });
            note_time();
        }
        Isa::end_step();
    }

    void merge_argmax(long rows) {
        for (long row = 0; row < rows; row++) {
            RowMax max = {-INFINITY, INT64_MAX};
            for (auto& maxima : thread_maxima)
                if (!maxima.empty() && (maxima[row].value > max.value ||
                                        (maxima[row].value == max.value &&
                                         maxima[row].column < max.column)))
                    max = maxima[row];
            step.argmax[row] = max.value == -INFINITY ? NO_COLUMN : max.column;
        }
    }

  private:
    const Program& program;
    const Step& step;
    const int threads;  // of the team, which can be fewer than requested
    // The attention of the layers with the same window, of all tokens and of the sampled ones.
    struct WorkOfWindow {
        long window;
        AttentionWork all;
        std::unique_ptr<AttentionWork> sampled;  // null: every token is sampled

        WorkOfWindow(const Program& program, const Step& step, long window,
                     const std::vector<TokenPosition>& positions)
            : window(window), all(program, step, window) {
            if (step.sampled_count < step.token_count)
                sampled.reset(new AttentionWork(program, step, window, positions));
        }
    };

    std::vector<std::unique_ptr<WorkOfWindow>> works;
    Barrier barrier;
    std::vector<Counter> counters;
    std::vector<std::vector<RowMax>> thread_maxima;
    std::vector<TokenPosition> positions;  // [tokens]
    ExpertRows expert_rows;                // of the current layer
    // Of all tokens and of the sampled ones; null: no token has an adapter.
    std::unique_ptr<AdapterRows> adapter_rows, sampled_adapter_rows;
    std::vector<ChangedTiles> changed;     // [threads]

    // Groups the rows by adapter, if there are any.
    void find_adapters() {
        std::vector<int32_t> of_row(step.row_count);
        bool any = false;
        for (long row = 0; row < step.row_count; row++) {
            of_row[row] = int32_t(adapter_of(program, step, step.slots[row]));
            any |= of_row[row] != NO_ADAPTER;
            if (of_row[row] == NO_ADAPTER && step.adapters[step.slots[row]] != NO_ADAPTER)
                const_cast<Step&>(step).has_unknown_adapter = 1;
        }
        if (!any) return;
        auto grouped = [&](long count, auto token_of) {
            std::vector<int32_t> adapters(count);
            for (long i = 0; i < count; i++) adapters[i] = of_row[positions[token_of(i)].row];
            return new AdapterRows(adapters, program.adapter_count, UnitProducts<E>::ROWS);
        };
        adapter_rows.reset(grouped(step.token_count, [](long i) { return i; }));
        if (step.sampled)
            sampled_adapter_rows.reset(
                grouped(step.sampled_count, [&](long i) { return step.sampled[i]; }));
    }

    const AdapterRows& tokens_with_adapters(const Op& op) const {
        return op.sampled && sampled_adapter_rows ? *sampled_adapter_rows : *adapter_rows;
    }

    const std::vector<ChangedTile>& changed_by(const Op& op, int id) {
        return changed[id].of(program, op,
                              op.by_expert ? expert_rows.adapted : tokens_with_adapters(op));
    }

    Adapt<E> adapt_of(const Op& op, int id) {
        bool is_by_token = op.by_expert && op.input != EXPERT_INNER;
        return Adapt<E>(op, step, changed_by(op, id),
                        is_by_token ? expert_rows.tokens.data() : nullptr);
    }

    // Whether an adapter of the step changes the product of an operation.
    bool is_changed(const Op& op, int id) {
        return adapter_rows && op.place >= 0 && !changed_by(op, id).empty();
    }

    // Whether the next operation needs nothing of operation i: ADAPT reads what the one after it
    // rounds, reorders or copies.
    bool is_read_later(long i) const {
        if (program.ops[i].kind != ADAPT) return false;
        int64_t next = program.ops[i + 1].kind;
        return next == QUANTIZE || next == ARRANGE || next == GATHER;
    }

    static Scratch<E>& scratch_of_thread() {
        static thread_local std::unique_ptr<Scratch<E>> scratch;
        if (!scratch) scratch.reset(new Scratch<E>());
        return *scratch;
    }

    template <class Work>
    void distribute(std::atomic<long>& next, int id, long count, Work work) {
        Schedule(count, threads).take(next, id, work);
    }

    // max_rows: Rows of a piece, if there are enough for all threads.
    template <class Work>
    void each_row(const Op& op, std::atomic<long>& next, int id, Work work,
                  long max_rows = MAX_TOKENS_A_PIECE) {
        long rows = rows_of(op), rows_per_thread = (rows + threads - 1) / threads;
        long size = std::clamp<long>(rows_per_thread, 1, max_rows);
        distribute(next, id, (rows + size - 1) / size, [&](long i, long) {
            for (long token = i * size; token < std::min((i + 1) * size, rows); token++) work(token);
        });
    }

    long tokens_of(const Op& op) const {
        return op.sampled ? step.sampled_count : step.token_count;
    }
    long rows_of(const Op& op) const { return tokens_of(op) * (op.by_expert ? op.num_chosen : 1); }

    const WorkOfWindow* find_work(long window) const {
        for (auto& work : works)
            if (work->window == window) return work.get();
        return nullptr;
    }

    const AttentionWork& attention_of(const Op& op) const {
        const WorkOfWindow& work = *find_work(op.window);
        return op.sampled && work.sampled ? *work.sampled : work.all;
    }

    // The experts' first reads are known when the rows are grouped: what waits for GATHER prefetches
    // them.
    bool is_memory_bound(const Op& op) const {
        if (op.kind == ADAPT) return adapter_rows != nullptr && !op.by_expert;
        return op.kind == ATTEND || op.kind == GATHER || is_product(op);
    }
    static bool is_product(const Op& op) { return op.kind >= MATMUL && op.kind <= MATMUL_ARGMAX; }

    // The memory that the thread's first piece of the operation reads first.
    PrefetchQueue first_reads(const Op& op, int id) {
        PrefetchQueue queue;
        if (op.kind == GATHER) return queue;
        if (op.kind == ADAPT) {
            Adapt<E> adapt = adapt_of(op, id);
            adapt.add_first_reads(Schedule(adapt.count(), threads).first_piece(id), queue);
            return queue;
        }
        if (op.experts) {
            ExpertMatmul<E> matmul(op, step, expert_rows);
            matmul.add_first_reads(Schedule(matmul.count(), threads).first_piece(id), queue);
        } else if (is_product(op)) {
            Matmul<E> matmul(op, op.matrix, step, rows_of(op), nullptr);
            matmul.add_first_reads(Schedule(matmul.pieces.count(), threads).first_piece(id), queue);
        } else {
            Attend<E> attend(program, step, op, attention_of(op));
            attend.add_first_reads(Schedule(attend.count(), threads).first_piece(id), queue);
        }
        return queue;
    }

    // additions: of adapters, or null.
    void multiply(const Op& op, std::atomic<long>& next, int id, const Additions<E>* additions) {
        Matmul<E> matmul(op, op.matrix, step, rows_of(op), thread_maxima[id].data(), 0, additions);
        distribute(next, id, matmul.pieces.count(), [&](long i, long after) {
            matmul.piece(i, matmul.panels_of(after));
        });
    }

    void run(const Op& op, std::atomic<long>& next, int id) {
        switch (op.kind) {
        case EMBED:
            return each_row(op, next, id, [&](long token) {
                embed<E>(program, step, op, positions[token], token);
            });
        case RMS_NORM:
        case LAYER_NORM:
            return each_row(op, next, id, [&](long token) { norm<E>(step, op, token); });
        case NORM_ADD:
            return each_row(op, next, id, [&](long token) { norm_add(step, op, token); });
        case COPY:
            return each_row(op, next, id, [&](long token) { copy<E>(step, op, token); });
        case SCALE_CAP:
            return each_row(op, next, id, [&](long token) { scale_cap(step, op, token); });
        case QUANTIZE:
            return each_row(op, next, id, [&](long token) { quantize_token<E>(step, op, token); });
        case ARRANGE:
            return each_row(op, next, id, [&](long token) { arrange_token<E>(step, op, token); });
        case ADAPT: {
            Adapt<E> adapt = adapt_of(op, id);
            return distribute(next, id, adapt.count(),
                              [&](long i, long after) { adapt.piece(i, after); });
        }
        case ROTATE_WRITE:
            return each_row(op, next, id, [&](long token) {
                rotate_write<E>(program, step, op, positions[token], token);
            }, LANES);  // 16 neighbours are written to the same cache lines
        case ATTEND: {
            Attend<E> attend(program, step, op, attention_of(op));
            Scratch<E>& scratch = scratch_of_thread();
            return distribute(next, id, attend.count(),
                              [&](long i, long after) { attend.piece(i, after, scratch); });
        }
        case COMBINE: {
            const std::vector<SplitRow>& split = attention_of(op).split;
            return distribute(next, id, long(split.size()) * program.heads, [&](long i, long) {
                combine<E>(program, step, op, split[i / program.heads], i % program.heads);
            });
        }
        case ROUTE:
            return each_row(op, next, id, [&](long token) { route(step, op, token, expert_rows); });
        case SORT_ROWS:
            if (id != 0) return;
            sort_rows(op, tokens_of(op), expert_rows);
            if (adapter_rows)
                group_adapted(op, tokens_with_adapters(op), UnitProducts<E>::ROWS, expert_rows);
            return;
        case GATHER:
            return each_row(op, next, id, [&](long row) { gather<E>(step, op, row, expert_rows); });
        case ADD_EXPERTS:
            return each_row(op, next, id, [&](long token) {
                add_experts(step, op, token, expert_rows);
            });
        case MATMUL_ARGMAX:
            thread_maxima[id].assign(rows_of(op), RowMax{-INFINITY, INT64_MAX});
            [[fallthrough]];
        default:
            if (op.experts) {
                std::span<const ChangedTile> changed_here;
                if (is_changed(op, id)) changed_here = changed_by(op, id);
                ExpertMatmul<E> matmul(op, step, expert_rows, changed_here);
                return distribute(next, id, matmul.count(),
                                  [&](long i, long after) { matmul.piece(i, after); });
            }
            if (is_changed(op, id)) {
                Additions<E> additions(step, changed_by(op, id));
                return multiply(op, next, id, &additions);
            }
            return multiply(op, next, id, nullptr);
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
        if (id == 0) {  // the first to run, as the others have to wake up
            run.reset(new Run<E>(program, step, omp_get_num_threads()));
            ready.store(run.get(), std::memory_order_release);
        }
        Run<E>* shared;
        while (!(shared = ready.load(std::memory_order_acquire))) relax();
        shared->thread(id);
    }
    const Op& last = program.ops[program.op_count - 1];
    if (last.kind == MATMUL_ARGMAX)
        run->merge_argmax(last.sampled ? step.sampled_count : step.token_count);
}
