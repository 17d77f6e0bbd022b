// Which worker has the next event.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "simulate/question.h"

namespace avgpipe::simulate {

// A tree of winners over the workers' times: to change one costs a comparison per level. Equal times: the
// lower worker.
class NextEvent {
  public:
    explicit NextEvent(int64_t workers)
        : leaves_(std::bit_ceil(static_cast<uint64_t>(workers))),
          times_(leaves_, kNever),
          winner_(2 * leaves_) {
        for (uint64_t leaf = 0; leaf < leaves_; ++leaf) winner_[leaves_ + leaf] = static_cast<int32_t>(leaf);
        for (uint64_t node = leaves_ - 1; node > 0; --node) winner_[node] = winner_[2 * node];
    }

    Ticks time() const { return times_[static_cast<size_t>(winner_[1])]; }
    Ticks of(int64_t worker) const { return times_[static_cast<size_t>(worker)]; }

    // Adds all workers with this time, the least, in ascending order.
    void collect(Ticks time, std::vector<int64_t>& workers, uint64_t node = 1) const {
        if (times_[static_cast<size_t>(winner_[node])] != time) return;
        if (node >= leaves_) {
            workers.push_back(winner_[node]);
        } else {
            collect(time, workers, 2 * node);
            collect(time, workers, 2 * node + 1);
        }
    }

    void set(int64_t worker, Ticks time) {
        Ticks& known = times_[static_cast<size_t>(worker)];
        if (known == time) return;
        known = time;
        for (uint64_t node = (leaves_ + static_cast<uint64_t>(worker)) / 2; node > 0; node /= 2) {
            const int32_t low = winner_[2 * node], high = winner_[2 * node + 1];
            winner_[node] =
                times_[static_cast<size_t>(low)] <= times_[static_cast<size_t>(high)] ? low : high;
        }
    }

  private:
    uint64_t leaves_;
    std::vector<Ticks> times_;
    std::vector<int32_t> winner_;  // of the leaves below a node; leaf w is node leaves_ + w
};

}  // namespace avgpipe::simulate
