// How long actions take, and when tensors arrive.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simulate/question.h"

namespace avgpipe::simulate {

// ---- random numbers by place, not by order: the same on every machine ----
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// A step of SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
    x += kGolden;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline uint64_t draw(uint64_t seed, int64_t what, int64_t batch, int64_t micro_batch) {
    const uint64_t place = mix(mix(seed ^ static_cast<uint64_t>(what)) ^ static_cast<uint64_t>(batch));
    return mix(place ^ static_cast<uint64_t>(micro_batch));
}

// The sum of four uniform numbers: nearly normal, around 0, with a standard deviation of 37837.2 and no value
// beyond 131070.
inline int64_t bell(uint64_t bits) {
    int64_t sum = -131070;
    for (int part = 0; part < 4; ++part) sum += static_cast<int64_t>((bits >> (16 * part)) & 0xFFFF);
    return sum;
}

class Durations {
  public:
    explicit Durations(const Question& q)
        : q_(q),
          is_random_(q.jitter != 0 || q.straggler_threshold != 0),
          seed_(mix(q.seed)),
          free_(static_cast<size_t>(q.channels)) {}

    Ticks action(int64_t kind, int64_t stage, int64_t m, int64_t batch) const {
        const int64_t width = q_.action_widths[kind];
        const Ticks ticks = q_.action_ticks[q_.action_begin[kind] + (width == 1 ? stage : stage * width + m)];
        return is_random_ ? shaken(ticks, stage * kPlaces + kind, m, batch) : ticks;
    }

    // The arrival of a tensor that is made now. A channel takes tensors in the order of the calls.
    Ticks send(int64_t link, int64_t m, int64_t batch, Ticks now) {
        const int64_t width = q_.transfer_width;
        Ticks ticks = q_.transfer_ticks[width == 1 ? link : link * width + m];
        if (is_random_) ticks = shaken(ticks, link / 2 * kPlaces + kKinds + link % 2, m, batch);
        Ticks left = now + ticks;
        int64_t channel = q_.channel[link];
        if (channel >= 0) {
            if (q_.channel_count[link] > 1) channel += m % q_.channel_count[link];
            Ticks& free = free_[static_cast<size_t>(channel)];
            // Many tensors may wait for a channel, so that only the sum of their times is too long: refuse
            // that, too.
            left = free = std::min(std::max(now, free) + ticks, kLongest + 1);
        }
        return left + q_.latency_ticks[link];
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
    std::vector<Ticks> free_;  // per channel
};

}  // namespace avgpipe::simulate
