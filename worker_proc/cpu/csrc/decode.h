// A step in which every row decodes one token, greedily: from a plan to what came out of it. Most
// steps are such, and Python's code for the others is out of the caches after each.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "program.h"

class Decode {
  public:
    // plan: [rows] slots.
    Decode(const Program& program, const Step& step, const Slots& slots, const int32_t* plan)
        : program(program), step(step), slots(slots), plan(plan), order(step.row_count) {}

    // Fills in the step's rows, similar ones next to each other. False, with nothing changed, where
    // it is not such a step. num_tokens: [rows], of the plan.
    bool begin(const int32_t* num_tokens) {
        for (long i = 0; i < step.row_count; i++) {
            if (num_tokens[i] != 1 || !decodes(plan[i])) {
                while (i-- > 0) slots.computed[plan[i]]--;
                return false;
            }
            slots.computed[plan[i]]++;  // so that no slot is taken twice
        }
        std::iota(order.begin(), order.end(), 0L);
        std::stable_sort(order.begin(), order.end(), [&](long a, long b) {
            return slots.computed[plan[a]] < slots.computed[plan[b]];
        });
        for (long row = 0; row < step.row_count; row++) {
            step.slots[row] = plan[order[row]];
            step.computed[row] = slots.computed[step.slots[row]] - 1;
            step.num_tokens[row] = 1;
        }
        return true;
    }

    // Adds the best token of each row to what is known of its slot. chosen: [rows], in the plan's
    // order.
    void end(int32_t* chosen) const {
        for (long row = 0; row < step.row_count; row++) {
            long slot = step.slots[row], place = slots.known[slot]++;
            chosen[order[row]] = step.tokens[slot * step.token_stride + place] =
                int32_t(step.best[row]);
        }
    }

  private:
    const Program& program;
    const Step& step;
    const Slots& slots;
    const int32_t* plan;
    std::vector<long> order;  // numbers of the plan's rows

    bool decodes(long slot) const {
        if (slot < 0 || slot >= slots.count || !slots.plain[slot]) return false;
        long known = slots.known[slot], room = slots.num_pages[slot] * program.page_size;
        return known == slots.computed[slot] + 1 && known <= room && known < step.token_stride;
    }
};
