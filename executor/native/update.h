// One CPU update of a plan: which elements of which parameters, and how a step turns that into work. And who does work.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "elements.h"

namespace slidedp {

// Threads that help a caller with a job.
class Crew {
public:
    virtual ~Crew() = default;
    // work(context, i) for every i in [0, items), each once, in any order on any thread, the caller's too. Returns when all are done.
    virtual void run(void (*work)(void*, int64_t), void* context, int64_t items) = 0;
};

struct Part {  // mirrors PART in executor/native/build.py: the elements [start, end) of one trainable parameter
    int64_t param;  // its number among the group's
    int64_t start, end;
    int64_t decays;  // 1 if weight decay applies
};
struct Recipe {  // mirrors Recipe in executor/native/build.py
    double beta1, beta2, eps, weight_decay;
};
struct Present {  // one byte a parameter and rank: whether that rank had a gradient for it. `flags` null: all had
    const uint8_t* flags;
    int64_t num_ranks, stride;

    bool operator()(int64_t param) const {
        bool any = flags == nullptr;
        for (int64_t rank = 0; !any && rank < num_ranks; rank++) any = flags[rank * stride + param] != 0;
        return any;
    }
};

struct Rows {  // mirrors Rows in executor/native/build.py: which rows of a table an update is of. `masks` null: all of it
    const uint8_t* masks;  // one byte a row, not 0 if it occurs in the batch: of rank 0, in even steps
    int64_t odd_steps;     // bytes from there to those of odd steps
    int64_t num_ranks, stride;  // bytes from one rank's mask to the next one's
    int64_t width;              // elements of a row
    int64_t touched;            // 1: the rows that occur in some rank's batch; 0: the others
    int64_t no_gradient;        // 1: their gradient is zero, and nowhere written

    // `add(lo, hi)` for each longest run of such rows in [start, end), in order.
    template <class Add>
    void runs(int64_t step, int64_t start, int64_t end, const Add& add) const {
        const uint8_t* mask = masks + (step & 1) * odd_steps;
        int64_t lo = -1;  // of the run under way
        for (int64_t row = start / width; row * width < end; row++) {
            bool occurs = false;
            for (int64_t rank = 0; rank < num_ranks; rank++) occurs |= mask[rank * stride + row] != 0;
            if (occurs == (touched != 0)) {
                if (lo < 0) lo = std::max(start, row * width);
            } else if (lo >= 0) {
                add(lo, row * width);
                lo = -1;
            }
        }
        if (lo >= 0) add(lo, end);
    }
};

constexpr int64_t kZeroRun = 4 * kTile;
alignas(64) inline constexpr float kZeros[kZeroRun] = {};  // a gradient that stays in L1, of any element type

enum class What : int32_t {  // mirrors What in executor/native/build.py
    kUpdate = 0,     // of the state, in place
    kSpeculate = 1,  // the state that would be next, into the buffers of the other side
    kSettle = 2,     // once the scale is known: nothing if it is 1, for then the other side is the state; else as kUpdate
};

constexpr int64_t kSideDepth = 8;  // DEPTH in executor/state/sides.py

// `states`: the group's buffers, of both sides if it speculates. Which is the state when a step begins, `sides` says (the
// entry of that step, modulo kSideDepth), by the time that the update may begin.
// `counts`: [step last counted, gradients so far of each trainable parameter of the group...], shared by the group's updates.
class Update {
public:
    Update(What what, const State (&states)[2], const int64_t* sides, const void* grad, int32_t grad_dtype, UpdateBlock run, std::vector<Part> parts, int64_t* counts,
           int64_t num_params, const Recipe& recipe)
        : what_(what), sides_(sides), grad_itemsize_(grad_dtype == kBFloat16 ? 2 : 4), run_(run), parts_(std::move(parts)), counts_(counts), num_params_(num_params), recipe_(recipe),
          betas_{float(recipe.beta1), float(1 - recipe.beta1), float(recipe.beta2), float(1 - recipe.beta2), float(recipe.eps)} {
        for (int side = 0; side < 2; side++)
            tensors_[side] = {states[side], grad, states[what == What::kSpeculate ? 1 - side : side]};
    }

    void take_rows(const Rows& rows) { rows_ = rows; }

    // The blocks of `step`, which is counted at a group's first call for it (by what speculates: for itself alone, for the step
    // may yet be left out). Parameters without a gradient are left out, or copied. Gradients are multiplied by `scale`.
    // Not for two threads at once on one group.
    Blocks begin(int64_t step, double lr, const Present& present, float scale) const {
        bool apart = what_ == What::kSpeculate, counted = counts_[0] == step;
        if (!apart && !counted) {
            counts_[0] = step;
            for (int64_t i = 0; i < num_params_; i++) counts_[1 + i] += present(i);
        }
        if (what_ == What::kSettle && scale == 1.0f) return Blocks();
        std::vector<Segment> segments;
        segments.reserve(parts_.size());
        int64_t known = -1;  // the coefficients of this count: one is nearly always all there is
        float step_size = 0, inv_bias2_sqrt = 0;
        for (const Part& part : parts_) {
            if (!present(part.param)) {
                if (apart) segments.push_back({part.start, part.end, 1, 0, 1, 1, 1});
                continue;
            }
            if (int64_t count = counts_[1 + part.param] + (apart && !counted); count != known) {  // doubles, as torch computes them
                known = count;
                step_size = float(lr / (1 - std::pow(recipe_.beta1, double(count))));
                inv_bias2_sqrt = float(std::pow(1 - std::pow(recipe_.beta2, double(count)), -0.5));
            }
            float keep = part.decays ? float(1 - lr * recipe_.weight_decay) : 1.0f;
            Segment segment{part.start, part.end, keep, step_size, inv_bias2_sqrt, scale, 0};
            auto add = [&](int64_t lo, int64_t hi) {
                segment.start = lo, segment.end = hi;
                segments.push_back(segment);
            };
            rows_.masks ? rows_.runs(step, part.start, part.end, add) : add(part.start, part.end);
        }
        return Blocks(std::move(segments));
    }
    // -1, or the first element of what was left untouched because its gradient is not finite.
    int64_t run(int64_t step, const Blocks& blocks, int64_t block) const {
        const Tensors& tensors = tensors_[sides_ ? sides_[step % kSideDepth] : 0];
        if (!rows_.no_gradient) return blocks.update(block, run_, tensors, betas_);
        return blocks.each(block, [&](int64_t lo, int64_t hi, const Segment& s) { return run_on_zeros(tensors, lo, hi, s); });
    }

private:
    int64_t run_on_zeros(Tensors tensors, int64_t lo, int64_t hi, const Segment& s) const {
        for (int64_t i = lo; i < hi; i += kZeroRun) {
            auto zeros = reinterpret_cast<uintptr_t>(kZeros) - uintptr_t(i) * uintptr_t(grad_itemsize_);  // element i is the first
            tensors.grad = reinterpret_cast<const void*>(zeros);
            run_(tensors, i, std::min(i + kZeroRun, hi), s, betas_);
        }
        return -1;
    }

    What what_;
    Tensors tensors_[2];
    const int64_t* sides_;
    int64_t grad_itemsize_;
    UpdateBlock run_;
    std::vector<Part> parts_;
    int64_t* counts_;
    int64_t num_params_;
    Recipe recipe_;
    Betas betas_;
    Rows rows_{};
};

}  // namespace slidedp
