// Simulation without choices of devices: one pipeline, and no channel that several workers send on. Then each
// worker runs its row in order, each action as soon as its tensor has arrived, and times follow without a
// queue of events: a worker continues until a tensor is missing, and is called again when that has been sent.
#pragma once

#include <algorithm>
#include <queue>
#include <vector>

#include "simulate/engine.h"

namespace avgpipe::simulate {

// Without replicas, so that a stage's number is its place, and its worker alone knows when its gradients are
// summed.
class FixedOrder : Engine {
  public:
    FixedOrder(const Question& q, Answer& answer) : Engine(q, answer, 1) {
        workers_.reserve(static_cast<size_t>(q.workers));
        for (int64_t w = 0; w < q.workers; ++w) workers_.push_back({RowWalk(q, w, q.batches)});
    }

    void run() {
        for (int64_t w = 0; w < q_.workers; ++w) queue_.push(w);
        while (!queue_.empty()) {
            const int64_t w = queue_.front();
            queue_.pop();
            go_on(w);
        }
        check_done(
            std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.walk.done(); }));
    }

  private:
    struct Worker {
        RowWalk walk;
        Ticks free = 0;
        const Ticks* awaited = nullptr;  // the place of the missing tensor
    };

    void go_on(int64_t w) {
        Worker& worker = workers_[static_cast<size_t>(w)];
        Ticks free = worker.free, busy = 0;
        for (; !worker.walk.done(); worker.walk.advance()) {
            const Step& step = worker.walk.peek();
            Ticks start = free;
            if (step.needs_tensor(q_.stages)) {
                Ticks& there = inbox(step.stage, step);
                if (there == kNever) {
                    worker.awaited = &there;
                    break;
                }
                start = std::max(start, there);
                there = kNever;
            } else if (step.kind == kUpdate && q_.sum_ticks[step.stage] > 0) {
                const Ticks ready = sums_.ready(step, 0);
                if (ready == kNever) break;
                start = std::max(start, ready);
            }
            if (step.adds()) tally_.hold(w, step.stage, step.stage);
            const Ticks ticks = durations_.action(step.kind, step.stage, step.micro_batch, step.own);
            free = start + ticks;
            busy += ticks;
            check_time(free);
            if (step.takes()) {
                tally_.release(step.stage);
                if (q_.sum_ticks[step.stage] > 0) sums_.add(step, 0, free);
            }
            tally_.ran(w, step.own, step, start, free);
            if (step.sends(q_.stages)) send(w, step, free);
        }
        worker.free = free;
        tally_.busy(w, busy);
    }

    void send(int64_t w, const Step& step, Ticks now) {
        const int64_t to = q_.replicas[step.receiver()];
        Ticks& there = inbox(step.receiver(), step);
        there = arrival(w, to, step, step.own, now);
        Worker& other = workers_[static_cast<size_t>(to)];
        if (other.awaited != &there) return;
        other.awaited = nullptr;
        queue_.push(to);
    }

    std::vector<Worker> workers_;
    std::queue<int64_t> queue_;  // workers that may continue
};

}  // namespace avgpipe::simulate
