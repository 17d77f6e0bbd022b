// The actions that run on a device now, and the devices with the next event.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "simulate/question.h"

namespace avgpipe::simulate {

// One action at a time. An action is identified by the number of its lane.
class OneSlot {
  public:
    explicit OneSlot(const Question&) {}

    bool has_room() const { return end_ == kNever; }
    Ticks next_end() const { return end_; }

    // From now on the time is `now`. Returns the ticks for which the device has been busy since the last
    // call.
    Ticks advance(Ticks now) {
        const Ticks busy = has_room() ? 0 : now - since_;
        since_ = now;
        return busy;
    }

    void begin(int64_t lane, Ticks ticks) {
        lane_ = lane;
        end_ = since_ + ticks;
    }

    // Calls `ended` with the lane of each action that has ended.
    template <class Ended>
    void finish(Ended&& ended) {
        if (end_ != since_) return;
        end_ = kNever;
        ended(lane_);
    }

  private:
    int64_t lane_ = -1;
    Ticks since_ = 0, end_ = kNever;
};

// Several at a time, all at the speed for their number. Work is counted in ticks / 2^20, so that only the
// moment at which an action ends is rounded, up to a whole tick.
class Slots {
  public:
    explicit Slots(const Question& q) : q_(q) {}

    bool has_room() const { return static_cast<int64_t>(running_.size()) < q_.slots; }

    Ticks next_end() const {
        if (running_.empty()) return kNever;
        const auto least = std::min_element(running_.begin(), running_.end(),
                                            [](const auto& a, const auto& b) { return a.work < b.work; });
        const __int128 work = least->work + rate() - 1;
        // Work that fits into 64 bits, as nearly all does, is divided many times as fast.
        const __int128 left = work <= INT64_MAX ? static_cast<int64_t>(work) / rate() : work / rate();
        return since_ + static_cast<Ticks>(std::min<__int128>(left, kLongest + 1));
    }

    Ticks advance(Ticks now) {
        const Ticks passed = now - since_;
        since_ = now;
        if (running_.empty()) return 0;
        for (auto& action : running_) action.work -= static_cast<__int128>(rate()) * passed;
        return passed;
    }

    void begin(int64_t lane, Ticks ticks) { running_.push_back({lane, static_cast<__int128>(ticks) << 20}); }

    // In the order of the lanes.
    template <class Ended>
    void finish(Ended&& ended) {
        std::sort(running_.begin(), running_.end(),
                  [](const auto& a, const auto& b) { return a.lane < b.lane; });
        const auto over = [](const auto& action) { return action.work <= 0; };
        for (const auto& action : running_) {
            if (over(action)) ended(action.lane);
        }
        std::erase_if(running_, over);
    }

  private:
    struct Action {
        int64_t lane;
        __int128 work;
    };

    int64_t rate() const { return q_.rates[running_.size() - 1]; }

    const Question& q_;
    std::vector<Action> running_;
    Ticks since_ = 0;
};

// A tree of the least times: an update of a worker costs a comparison per level, up to where nothing changes.
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
