// Simulation with choices of devices: event after event. A device chooses after all that happens at an
// instant is known; actions that then begin and end at the same instant follow after that.
#pragma once

#include <algorithm>
#include <vector>

#include "simulate/device.h"
#include "simulate/engine.h"

namespace avgpipe::simulate {

template <class Device>
class Events : Engine {
  public:
    Events(const Question& q, Answer& answer)
        : Engine(q, answer, q.pipelines),
          next_(q.workers),
          devices_(static_cast<size_t>(q.workers), Device(q)),
          is_touched_(static_cast<size_t>(q.workers)) {
        lanes_.reserve(static_cast<size_t>(q.workers * q.pipelines));
        for (int64_t w = 0; w < q.workers; ++w) {
            for (int64_t i = 0; i < q.pipelines; ++i) {
                const int64_t own = (q.batches - i + q.pipelines - 1) / q.pipelines;
                lanes_.push_back({RowWalk(q, w, own), static_cast<int32_t>(w), static_cast<int32_t>(i)});
            }
        }
        left_ = static_cast<int64_t>(lanes_.size());
        for (int64_t lane = 0; lane < static_cast<int64_t>(lanes_.size()); ++lane) look(lane, 0);
    }

    void run() {
        for (int64_t w = 0; w < q_.workers; ++w) start(w, 0);
        while (next_.time() != kNever) {
            const Ticks now = next_.time();
            check_time(now);
            touched_.clear();
            next_.collect(now, touched_);
            for (const int64_t w : touched_) is_touched_[static_cast<size_t>(w)] = true;
            const size_t count = touched_.size();  // simultaneous arrivals may touch more
            for (size_t at = 0; at < count; ++at) {
                Device& device = devices_[static_cast<size_t>(touched_[at])];
                tally_.busy(touched_[at], device.advance(now));
                device.finish([&](int64_t lane) { finish(lane, now); });
            }
            for (const int64_t w : touched_) start(w, now);
        }
        check_done(left_ == 0);
    }

  private:
    // A pipeline on a worker: it runs one step after another. In whole lines of the cache.
    struct alignas(64) Lane {
        RowWalk walk;
        int32_t worker, pipeline;
        bool is_running = false;
        Ticks ready = kNever;  // when all inputs of the next step have arrived
        uint64_t urgency = 0;  // the least runs first
        Ticks started = 0;
    };

    int64_t batch_of(const Lane& lane) const { return lane.walk.peek().own * q_.pipelines + lane.pipeline; }

    int64_t box(int64_t place, const Lane& lane) const { return place * q_.pipelines + lane.pipeline; }

    // Finds the lane's next step.
    void look(int64_t number, Ticks now) {
        Lane& lane = lanes_[static_cast<size_t>(number)];
        lane.ready = kNever;
        if (lane.walk.done()) {
            --left_;
            return;
        }
        const Step& step = lane.walk.peek();
        if (step.needs_tensor(q_.stages)) {
            lane.ready = inbox(box(q_.place(step.stage, step.micro_batch), lane), step);
        } else {
            lane.ready = step.kind == kUpdate ? sums_.ready(step, lane.pipeline) : now;
        }
        const auto later = static_cast<uint64_t>(step.kind == kForward && q_.pipelines > 1);
        lane.urgency = later << 62 | static_cast<uint64_t>(batch_of(lane));
    }

    // Lets the device take the most urgent steps that are ready, and sets when to check it again.
    void start(int64_t w, Ticks now) {
        is_touched_[static_cast<size_t>(w)] = false;
        Device& device = devices_[static_cast<size_t>(w)];
        const int64_t begin = w * q_.pipelines, end = begin + q_.pipelines;
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
        const Step& step = lane.walk.peek();
        const int64_t place = q_.place(step.stage, step.micro_batch);
        if (step.needs_tensor(q_.stages)) inbox(box(place, lane), step) = kNever;
        if (step.adds()) tally_.hold(lane.worker, step.stage, place);
        lane.is_running = true;
        lane.started = now;
        tally_.busy(lane.worker, device.advance(now));
        device.begin(number, durations_.action(step.kind, step.stage, step.micro_batch, batch_of(lane)));
    }

    void finish(int64_t number, Ticks now) {
        Lane& lane = lanes_[static_cast<size_t>(number)];
        const Step step = lane.walk.peek();
        const int64_t batch = batch_of(lane);
        lane.is_running = false;
        if (step.takes()) tally_.release(q_.place(step.stage, step.micro_batch));
        tally_.ran(lane.worker, batch, step, lane.started, now);
        lane.walk.advance();
        const bool is_summed = step.takes() && sums_.add(step, lane.pipeline, now);
        look(number, now);
        if (step.sends(q_.stages)) send(lane, step, batch, now);
        if (is_summed && q_.has_replicas()) tell_replicas(lane, step, now);
    }

    void send(const Lane& lane, const Step& step, int64_t batch, Ticks now) {
        const int64_t to = step.receiver(), place = q_.place(to, step.micro_batch);
        Ticks& there = inbox(box(place, lane), step);
        const int64_t w = q_.replicas[place];
        there = arrival(lane.worker, w, step, batch, now);
        Lane& other = lanes_[static_cast<size_t>(w * q_.pipelines + lane.pipeline)];
        if (other.walk.done() || other.is_running) return;
        const Step& next = other.walk.peek();
        if (next.stage != to || next.number != step.number ||
            (next.kind == kForward) != (step.kind == kForward) || !next.needs_tensor(q_.stages)) {
            return;
        }
        wake(other, there, now);
    }

    // The other workers of a stage may wait for the sum of its gradients.
    void tell_replicas(const Lane& lane, const Step& step, Ticks now) {
        for (int64_t at = q_.replicas_begin[step.stage]; at < q_.replicas_begin[step.stage + 1]; ++at) {
            const int64_t w = q_.replicas[at];
            Lane& other = lanes_[static_cast<size_t>(w * q_.pipelines + lane.pipeline)];
            if (w == lane.worker || other.walk.done() || other.is_running) continue;
            const Step& next = other.walk.peek();
            if (next.kind == kUpdate && next.stage == step.stage && next.own == step.own) {
                wake(other, sums_.ready(next, lane.pipeline), now);
            }
        }
    }

    // An input that a lane waited for has arrived, or has an arrival time.
    void wake(Lane& lane, Ticks there, Ticks now) {
        lane.ready = there;
        const auto w = static_cast<size_t>(lane.worker);
        if (is_touched_[w] || !devices_[w].has_room()) return;
        if (there <= now) {
            is_touched_[w] = true;
            touched_.push_back(lane.worker);
        } else if (there < next_.of(lane.worker)) {
            next_.set(lane.worker, there);
        }
    }

    NextEvent next_;
    std::vector<Device> devices_;
    std::vector<int64_t> touched_;  // devices that will choose at this instant
    std::vector<char> is_touched_;
    std::vector<Lane> lanes_;  // those of a worker follow one another
    int64_t left_ = 0;         // lanes with steps to run
};

}  // namespace avgpipe::simulate
