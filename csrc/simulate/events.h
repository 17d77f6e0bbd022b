// Where devices choose: event after event. All that happens at an instant is known before a device chooses;
// what then begins and ends at the same instant comes after that.
#pragma once

#include <algorithm>
#include <vector>

#include "simulate/device.h"
#include "simulate/inbox.h"
#include "simulate/links.h"
#include "simulate/next_event.h"
#include "simulate/tally.h"

namespace avgpipe::simulate {

template <class Walk, class Device>
class Events {
  public:
    Events(const Question& q, Answer& answer)
        : q_(q),
          durations_(q),
          links_(q, durations_),
          tally_(q, answer),
          next_(q.workers),
          devices_(static_cast<size_t>(q.workers), Device(q)),
          is_touched_(static_cast<size_t>(q.workers)) {
        make_lanes();
    }

    Status run() {
        for (int64_t w = 0; w < q_.workers; ++w) start(w, 0);
        while (next_.time() != kNever) {
            const Ticks now = next_.time();
            if (now > kLongest) return Status::kTooLong;
            touched_.clear();
            next_.collect(now, touched_);
            for (const int64_t w : touched_) is_touched_[static_cast<size_t>(w)] = true;
            const size_t count = touched_.size();  // more may be touched by what arrives at once
            for (size_t at = 0; at < count; ++at) {
                Device& device = devices_[static_cast<size_t>(touched_[at])];
                tally_.busy(touched_[at], device.advance(now));
                device.finish([&](int64_t lane) { finish(lane, now); });
            }
            for (const int64_t w : touched_) start(w, now);
        }
        return left_ == 0 ? Status::kDone : Status::kStuck;
    }

  private:
    // A stage of a pipeline: it runs one step after another. In whole lines of the cache.
    struct alignas(64) Lane {
        Walk walk;
        int32_t stage, worker, pipeline;
        bool is_running = false;
        Step step = {};        // the next or running one
        Ticks ready = kNever;  // when all that the step needs is there
        uint64_t urgency = 0;  // the least goes first
        Ticks started = 0;
    };

    // Those of a worker follow one another, by stage and then by pipeline.
    void make_lanes() {
        std::vector<int64_t> stages(static_cast<size_t>(q_.stages));
        for (size_t k = 0; k < stages.size(); ++k) stages[k] = static_cast<int64_t>(k);
        std::stable_sort(stages.begin(), stages.end(),
                         [this](int64_t a, int64_t b) { return q_.worker[a] < q_.worker[b]; });
        first_of_stage_.resize(stages.size());
        first_of_worker_.assign(static_cast<size_t>(q_.workers) + 1, 0);
        lanes_.reserve(stages.size() * static_cast<size_t>(q_.pipelines));
        for (const int64_t k : stages) {
            first_of_stage_[static_cast<size_t>(k)] = static_cast<int64_t>(lanes_.size());
            for (int64_t i = 0; i < q_.pipelines; ++i) {
                const int64_t own = (q_.batches - i + q_.pipelines - 1) / q_.pipelines;
                lanes_.push_back(
                    {Walk(q_, k, own), static_cast<int32_t>(k), q_.worker[k], static_cast<int32_t>(i)});
                inboxes_.add(Walk::window(q_, k));
            }
            first_of_worker_[static_cast<size_t>(q_.worker[k]) + 1] = static_cast<int64_t>(lanes_.size());
        }
        inboxes_.make();
        left_ = static_cast<int64_t>(lanes_.size());
        for (int64_t lane = 0; lane < static_cast<int64_t>(lanes_.size()); ++lane) look(lane, 0);
    }

    int64_t batch_of(const Lane& lane) const { return lane.step.own * q_.pipelines + lane.pipeline; }

    // Make the lane's next step known.
    void look(int64_t number, Ticks now) {
        Lane& lane = lanes_[static_cast<size_t>(number)];
        if (lane.walk.done()) {
            lane.ready = kNever;
            --left_;
            return;
        }
        lane.step = lane.walk.peek();
        if (lane.step.needs_tensor(lane.stage, q_.stages)) {
            lane.ready = inboxes_.at(number, lane.step.kind == kForward, lane.step.number);
        } else {
            lane.ready = lane.step.kind == kUpdate ? now + q_.sum_ticks[lane.stage] : now;
        }
        const auto later = static_cast<uint64_t>(lane.step.kind == kForward && q_.pipelines > 1);
        lane.urgency =
            later << 62 | static_cast<uint64_t>(batch_of(lane)) << 31 | static_cast<uint64_t>(lane.step.rank);
    }

    // Let the device take the most urgent steps that are ready, and say when to look at it again.
    void start(int64_t w, Ticks now) {
        is_touched_[static_cast<size_t>(w)] = false;
        Device& device = devices_[static_cast<size_t>(w)];
        const int64_t begin = first_of_worker_[static_cast<size_t>(w)];
        const int64_t end = first_of_worker_[static_cast<size_t>(w) + 1];
        Ticks wake = kNever;
        while (device.has_room()) {
            int64_t best = -1;
            wake = kNever;
            for (int64_t number = begin; number < end; ++number) {
                const Lane& lane = lanes_[static_cast<size_t>(number)];
                if (lane.is_running) continue;
                if (lane.ready > now) {
                    wake = std::min(wake, lane.ready);
                } else if (best < 0 || lane.urgency < lanes_[static_cast<size_t>(best)].urgency) {
                    best = number;
                }
            }
            if (best < 0) break;
            begin_step(best, device, now);
            wake = kNever;
        }
        next_.set(w, std::min(wake, device.next_end()));
    }

    void begin_step(int64_t number, Device& device, Ticks now) {
        Lane& lane = lanes_[static_cast<size_t>(number)];
        const Step& step = lane.step;
        if (step.needs_tensor(lane.stage, q_.stages)) {
            inboxes_.at(number, step.kind == kForward, step.number) = kNever;
        }
        if (step.adds()) tally_.hold(lane.stage);
        lane.is_running = true;
        lane.started = now;
        tally_.busy(lane.worker, device.advance(now));
        device.begin(number, durations_.action(step.kind, lane.stage, step.micro_batch, batch_of(lane)));
    }

    void finish(int64_t number, Ticks now) {
        Lane& lane = lanes_[static_cast<size_t>(number)];
        const Step step = lane.step;
        const int64_t batch = batch_of(lane);
        lane.is_running = false;
        if (step.takes()) tally_.release(lane.stage);
        tally_.ran(lane.stage, batch, step, lane.started, now);
        lane.walk.advance(step);
        look(number, now);
        send(lane, step, batch, now);
    }

    void send(const Lane& lane, const Step& step, int64_t batch, Ticks now) {
        const bool is_forward = step.kind == kForward;
        const int64_t k = lane.stage, to = is_forward ? k + 1 : k - 1;
        if (to < 0 || to == q_.stages || step.kind == kWeights || step.kind == kUpdate) return;
        const Ticks there = links_.send(is_forward ? 2 * k : 2 * to + 1, step.micro_batch, batch, now);
        const int64_t number = first_of_stage_[static_cast<size_t>(to)] + lane.pipeline;
        inboxes_.at(number, is_forward, step.number) = there;
        Lane& other = lanes_[static_cast<size_t>(number)];
        if (other.walk.done() || other.is_running || other.step.number != step.number ||
            (other.step.kind == kForward) != is_forward || !other.step.needs_tensor(to, q_.stages)) {
            return;
        }
        other.ready = there;
        const auto w = static_cast<size_t>(other.worker);
        if (is_touched_[w] || !devices_[w].has_room()) return;
        if (there <= now) {
            is_touched_[w] = true;
            touched_.push_back(other.worker);
        } else if (there < next_.of(other.worker)) {
            next_.set(other.worker, there);
        }
    }

    const Question& q_;
    const Durations durations_;
    Links links_;
    Tally tally_;
    NextEvent next_;
    std::vector<Device> devices_;
    std::vector<int64_t> touched_;  // devices that will choose at this instant
    std::vector<char> is_touched_;
    std::vector<Lane> lanes_;
    std::vector<int64_t> first_of_stage_, first_of_worker_;
    Inboxes inboxes_;
    int64_t left_ = 0;  // lanes with steps to run
};

}  // namespace avgpipe::simulate
