// Arrival times of tensors that a stage has not taken yet, and of summed gradients.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "simulate/row.h"

namespace avgpipe::simulate {

// For the forwards and the backwards of stages, or of pipelines on stages. Tensors that were sent and not
// taken are in a window of consecutive micro-batches, so a ring of places is enough.
class Inboxes {
  public:
    explicit Inboxes(const std::vector<int64_t>& windows) {
        int64_t size = 0;
        for (const int64_t window : windows) {
            const auto places = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(window)));
            boxes_.push_back({size, places - 1});
            size += 2 * places;
        }
        places_.assign(static_cast<size_t>(size), kNever);
    }

    // The arrival time of the tensor of a micro-batch, kNever while unknown.
    Ticks& at(int64_t box, bool is_forward, int64_t number) {
        const auto [begin, mask] = boxes_[static_cast<size_t>(box)];
        return places_[static_cast<size_t>(begin + (is_forward ? 0 : mask + 1) + (number & mask))];
    }

  private:
    struct Box {
        int64_t begin, mask;
    };

    std::vector<Box> boxes_;
    std::vector<Ticks> places_;
};

// A box for each place, from stage to stage and worker to worker, and in it for each pipeline.
inline std::vector<int64_t> windows_of(const Question& q, int64_t pipelines) {
    std::vector<int64_t> windows;
    int64_t before = 1;  // of the stage before: its forwards in flight are those that may have been sent
    for (int64_t k = 0; k < q.stages; ++k) {
        int64_t own = 1;
        for (int64_t at = q.replicas_begin[k]; at < q.replicas_begin[k + 1]; ++at) {
            own = std::max(own, in_flight_span(q, q.replicas[at], k));
        }
        windows.insert(windows.end(), static_cast<size_t>(q.replica_count(k) * pipelines),
                       std::max(before, own));
        before = own;
    }
    return windows;
}

// How many of a batch's backwards have ended, on a stage's replicas together, and when the last one did.
class Sums {
  public:
    Sums(const Question& q, int64_t pipelines) : q_(q), pipelines_(pipelines) {
        int32_t ahead = 0;
        for (const Action* a = q.actions; a != q.actions + q.loops[q.row_begin[q.workers] - 1].end; ++a) {
            ahead = std::max(ahead, a->ahead);
        }
        // A batch's sum is used before the sum at the same place of the ring begins, on all replicas.
        ring_ = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(ahead) + 3));
        sums_.resize(static_cast<size_t>(q.stages * pipelines * ring_));
    }

    // True for the last one.
    bool add(const Step& step, int64_t pipeline, Ticks now) {
        Sum& sum = at(step, pipeline);
        if (sum.own != step.own) sum = {now, step.own, 0};
        sum.last = std::max(sum.last, now);
        return ++sum.count == q_.micro_batches;
    }

    // When the update of a batch may start; kNever while unknown.
    Ticks ready(const Step& step, int64_t pipeline) {
        const Sum& sum = at(step, pipeline);
        const bool is_done = sum.own == step.own && sum.count == q_.micro_batches;
        return is_done ? sum.last + q_.sum_ticks[step.stage] : kNever;
    }

  private:
    struct Sum {
        Ticks last = 0;
        int32_t own = -1, count = 0;
    };

    Sum& at(const Step& step, int64_t pipeline) {
        const int64_t ring = (step.stage * pipelines_ + pipeline) * ring_;
        return sums_[static_cast<size_t>(ring + (step.own & (ring_ - 1)))];
    }

    const Question& q_;
    int64_t pipelines_, ring_ = 1;
    std::vector<Sum> sums_;
};

}  // namespace avgpipe::simulate
