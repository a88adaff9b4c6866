// A step in which every row decodes one token greedily, from its plan to its tokens. Most steps are
// of this kind, and Python code would have to be loaded into the caches again in each.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "program.h"

class Decode {
  public:
    // plan: [rows] the slots of the plan's rows.
    Decode(const Program& program, const Step& step, const Slots& slots, const int32_t* plan)
        : program(program), step(step), slots(slots), plan(plan), order(step.row_count) {}

    // Fills in the step's rows, ordered by context length. Returns false, with nothing changed, if
    // the step is of another kind. num_tokens: [rows], in the plan's order.
    bool begin(const int32_t* num_tokens) {
        for (long i = 0; i < step.row_count; i++) {
            if (num_tokens[i] != 1 || !decodes(plan[i])) {
                while (i-- > 0) slots.computed[plan[i]]--;
                return false;
            }
            slots.computed[plan[i]]++;  // so that a second row of the slot is refused
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

    // Appends the argmax of each row to the tokens of its slot; of a row whose logits are not finite
    // a 0, and token_ids has -1. token_ids: [rows], in the plan's order. Returns whether every row has
    // a token.
    bool end(int32_t* token_ids) const {
        bool all_have_tokens = true;
        for (long row = 0; row < step.row_count; row++) {
            long slot = step.slots[row], position = slots.known[slot]++;
            int32_t token = int32_t(step.argmax[row]);
            token_ids[order[row]] = token;
            step.tokens[slot * step.token_stride + position] = std::max(token, 0);
            all_have_tokens &= token >= 0;
        }
        return all_have_tokens;
    }

  private:
    const Program& program;
    const Step& step;
    const Slots& slots;
    const int32_t* plan;
    std::vector<long> order;  // [rows] indices of the plan's rows

    bool decodes(long slot) const {
        if (slot < 0 || slot >= slots.count || !slots.greedy_only[slot]) return false;
        long known = slots.known[slot], room = slots.num_pages[slot] * program.page_size;
        return known == slots.computed[slot] + 1 && known <= room && known < step.token_stride;
    }
};
