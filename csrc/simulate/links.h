// When tensors arrive.
#pragma once

#include <algorithm>
#include <vector>

#include "simulate/durations.h"

namespace avgpipe::simulate {

class Links {
  public:
    Links(const Question& q, const Durations& durations)
        : q_(q), durations_(durations), free_(static_cast<size_t>(q.channels)) {}

    // A tensor that is made now: when it will be there. A channel takes tensors in the order of the calls.
    Ticks send(int64_t link, int64_t m, int64_t batch, Ticks now) {
        const Ticks ticks = durations_.transfer(link, m, batch);
        Ticks left = now + ticks;
        int64_t channel = q_.channel[link];
        if (channel >= 0) {
            if (q_.channel_count[link] > 1) channel += m % q_.channel_count[link];
            Ticks& free = free_[static_cast<size_t>(channel)];
            // Many tensors may wait for a channel, so that only their sum is too long: what takes one then
            // is, too.
            left = free = std::min(std::max(now, free) + ticks, kLongest + 1);
        }
        return left + q_.latency_ticks[link];
    }

  private:
    const Question& q_;
    const Durations& durations_;
    std::vector<Ticks> free_;  // per channel
};

}  // namespace avgpipe::simulate
