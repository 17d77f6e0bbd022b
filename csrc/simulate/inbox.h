// When tensors that a stage has not taken yet are there.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "simulate/question.h"

namespace avgpipe::simulate {

// For the forwards and the backwards of stages, or of pipelines on stages. Those that were sent and not taken
// lie in a window of consecutive micro-batches, so a ring of places is enough.
class Inboxes {
  public:
    void add(int64_t window) {
        const auto places = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(window)));
        boxes_.push_back({size_, places - 1});
        size_ += 2 * places;
    }

    void make() { places_.assign(static_cast<size_t>(size_), kNever); }

    // The time at which the tensor of a micro-batch is there, kNever while that is unknown.
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
    int64_t size_ = 0;
};

}  // namespace avgpipe::simulate
