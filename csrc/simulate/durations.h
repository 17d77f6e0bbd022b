// How long an action or a transfer takes.
#pragma once

#include "simulate/question.h"
#include "simulate/random.h"

namespace avgpipe::simulate {

class Durations {
  public:
    explicit Durations(const Question& q)
        : q_(q), is_random_(q.jitter != 0 || q.straggler_threshold != 0), seed_(mix(q.seed)) {}

    Ticks action(int64_t kind, int64_t stage, int64_t m, int64_t batch) const {
        const int64_t width = q_.action_widths[kind];
        const Ticks ticks = q_.action_ticks[q_.action_begin[kind] + (width == 1 ? stage : stage * width + m)];
        return is_random_ ? shaken(ticks, stage * kPlaces + kind, m, batch) : ticks;
    }

    Ticks transfer(int64_t link, int64_t m, int64_t batch) const {
        const int64_t width = q_.transfer_width;
        const Ticks ticks = q_.transfer_ticks[width == 1 ? link : link * width + m];
        return is_random_ ? shaken(ticks, link / 2 * kPlaces + kKinds + link % 2, m, batch) : ticks;
    }

  private:
    static constexpr int64_t kPlaces =
        8;  // of random numbers per stage: its kinds of action, its boundary's links

    // ticks (1 + jitter bell / 2^48), rounded down, and perhaps times the factor of a straggler.
    Ticks shaken(Ticks ticks, int64_t what, int64_t m, int64_t batch) const {
        const uint64_t bits = draw(seed_, what, batch, m);
        const __int128 shift = static_cast<__int128>(ticks) * bell(bits) * q_.jitter;
        __int128 result = ticks + (shift >> 48);
        if ((mix(bits) >> 32) < q_.straggler_threshold) result = (result * q_.straggler_factor) >> 16;
        return static_cast<Ticks>(result);
    }

    const Question& q_;
    const bool is_random_;
    const uint64_t seed_;
};

}  // namespace avgpipe::simulate
