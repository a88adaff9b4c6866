// Rounds weights to 4 bits in groups of 32 inputs, see round_to_int4.py. The lanes of a vector are
// 16 rows, which are searched together.
#include <algorithm>

#include "numbers.h"

namespace {

constexpr int GROUP_INPUTS = 32;
constexpr float MAX_CODE = 15, MAX_HALF = 65504;
constexpr float MIN_SCALE = 1e-8f;  // a group whose scale is smaller becomes its minimum
// Steps between a group's least and greatest weight in the first codes of a search. With fewer than
// 15, a grid is found of which the group leaves out an end; with more, the ends are cut off.
constexpr float SEARCHED_STEPS[] = {12, 13, 14, 15, 16, 17, 18.5f};

INLINE Floats magnitude(Floats x) { return max(x, -x); }

// Rounds to the nearest float16.
INLINE Floats round_to_half(Floats x) {
    Words bits = as<Words>(x);
    bits = (bits + Words(0xfffu) + (bits >> 13 & Words(1u))) & Words(~0x1fffu);
    Floats normal = min(max(as<Floats>(bits), Floats(-MAX_HALF)), Floats(MAX_HALF));
    Floats subnormal = (x + Floats(0.75f)) - Floats(0.75f);  // the multiples of 2^-24
    return select(magnitude(x) < Floats(0x1p-14f), subnormal, normal);
}

struct Grid {
    Floats scale, minimum;

    INLINE Floats inverse() const { return Floats(1.0f) / max(scale, Floats(MIN_SCALE)); }
    INLINE Floats code(Floats x, Floats inverse) const {
        Floats code = round_to_even((x - minimum) * inverse);
        return min(max(code, Floats(0.0f)), Floats(MAX_CODE));
    }
};

// Finds scales and minima of the least error: the sum of importance * (weight - rounded weight)².
class Search {
  public:
    Search(const Floats* weights, const float* importance) : x(weights), a(importance) {
        least = greatest = x[0];
        for (int k = 0; k < GROUP_INPUTS; k++) {
            least = min(least, x[k]), greatest = max(greatest, x[k]);
            sum_a += Floats(a[k]), sum_ax += Floats(a[k]) * x[k];
        }
    }

    Grid best() {
        Floats minimum = round_to_half(least);
        found = {round_to_half((greatest - minimum) / Floats(MAX_CODE)), minimum};
        found_error = error(found);
        for (float steps : SEARCHED_STEPS) {
            Floats scale = (greatest - least) / Floats(steps);
            Floats middle = (least + greatest) / Floats(2.0f);
            keep_better({scale, middle - scale * Floats(MAX_CODE / 2)});
        }
        keep_better(found);
        return found;
    }

  private:
    const Floats* const x;
    const float* const a;
    Floats least, greatest, sum_a = {}, sum_ax = {};
    Grid found;
    Floats found_error;

    Floats error(Grid grid) const {
        Floats total = {}, inverse = grid.inverse();
        for (int k = 0; k < GROUP_INPUTS; k++) {
            Floats off = x[k] - (grid.code(x[k], inverse) * grid.scale + grid.minimum);
            total += Floats(a[k]) * off * off;
        }
        return total;
    }

    // Tries the scale and minimum of the least squares for the codes that `grid` gives.
    void keep_better(Grid grid) {
        Floats q = {}, qq = {}, qx = {}, inverse = grid.inverse();
        for (int k = 0; k < GROUP_INPUTS; k++) {
            Floats code = grid.code(x[k], inverse), weighted = Floats(a[k]) * code;
            q += weighted, qq += weighted * code, qx += weighted * x[k];
        }
        Floats determinant = sum_a * qq - q * q;
        Ints solvable = determinant > Floats(1e-6f) * sum_a * qq;
        Floats scale = (sum_a * qx - sum_ax * q) / determinant;
        Floats minimum = (qq * sum_ax - q * qx) / determinant;
        Grid tried = {round_to_half(select(solvable, scale, grid.scale)),
                      round_to_half(select(solvable, minimum, grid.minimum))};
        Floats tried_error = error(tried);
        Ints better = tried_error < found_error;
        found.scale = select(better, tried.scale, found.scale);
        found.minimum = select(better, tried.minimum, found.minimum);
        found_error = select(better, tried_error, found_error);
    }
};

}  // namespace

extern "C" {

// Rounds weights [rows][32 * groups] to codes of their shape, and to scales and minima
// [rows][groups], which are floats of float16 values. `importance` is [32 * groups].
void quadriga_round_to_int4(const float* weights, const float* importance, int64_t rows,
                            int64_t groups, uint8_t* codes, float* scales, float* minima,
                            int64_t threads) {
    const int64_t inputs = groups * GROUP_INPUTS;
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic)
    for (int64_t first = 0; first < rows; first += LANES) {
        const int64_t count = std::min<int64_t>(LANES, rows - first);
        for (int64_t g = 0; g < groups; g++) {
            Floats x[GROUP_INPUTS] = {};
            float(*lanes)[LANES] = (float(*)[LANES])x;
            for (int64_t r = 0; r < count; r++)
                for (int k = 0; k < GROUP_INPUTS; k++)
                    lanes[k][r] = weights[(first + r) * inputs + g * GROUP_INPUTS + k];
            Grid grid = Search(x, importance + g * GROUP_INPUTS).best();
            Floats inverse = grid.inverse();
            for (int k = 0; k < GROUP_INPUTS; k++) x[k] = grid.code(x[k], inverse);
            for (int64_t r = 0; r < count; r++) {
                scales[(first + r) * groups + g] = grid.scale[r];
                minima[(first + r) * groups + g] = grid.minimum[r];
                for (int k = 0; k < GROUP_INPUTS; k++)
                    codes[(first + r) * inputs + g * GROUP_INPUTS + k] = uint8_t(lanes[k][r]);
            }
        }
    }
}
}
