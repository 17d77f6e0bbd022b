// Which workers have the next event.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "simulate/question.h"

namespace avgpipe::simulate {

// A tree of the least times: to change a worker's costs a comparison per level, up to where nothing changes.
class NextEvent {
  public:
    explicit NextEvent(int64_t workers)
        : leaves_(std::bit_ceil(static_cast<uint64_t>(workers))), least_(2 * leaves_, kNever) {}

    Ticks time() const { return least_[1]; }
    Ticks of(int64_t worker) const { return least_[leaves_ + static_cast<uint64_t>(worker)]; }

    // Adds all workers with this time, the least, in ascending order. Not for kNever.
    void collect(Ticks time, std::vector<int64_t>& workers, uint64_t node = 1) const {
        if (least_[node] != time) return;
        if (node >= leaves_) {
            workers.push_back(static_cast<int64_t>(node - leaves_));
        } else {
            collect(time, workers, 2 * node);
            collect(time, workers, 2 * node + 1);
        }
    }

    void set(int64_t worker, Ticks time) {
        uint64_t node = leaves_ + static_cast<uint64_t>(worker);
        while (least_[node] != time) {
            least_[node] = time;
            if (node == 1) return;
            time = std::min(time, least_[node ^ 1]);
            node /= 2;
        }
    }

  private:
    uint64_t leaves_;
    std::vector<Ticks> least_;  // below a node; worker w is node leaves_ + w
};

}  // namespace avgpipe::simulate
