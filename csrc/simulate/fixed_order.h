// Where devices have nothing to choose: one pipeline, and no channel that several workers send on. Then each
// worker runs its row in order, each action as soon as its tensor is there, and times follow without a queue
// of events: a worker goes on until a tensor is missing, and is called again when that has been sent.
#pragma once

#include <algorithm>
#include <queue>
#include <vector>

#include "simulate/durations.h"
#include "simulate/inbox.h"
#include "simulate/tally.h"

namespace avgpipe::simulate {

// Without replicas, so that a stage's number is its place, and its worker alone knows when its gradients are
// summed.
class FixedOrder {
  public:
    FixedOrder(const Question& q, Answer& answer)
        : q_(q), durations_(q), links_(q, durations_), tally_(q, answer), sums_(q, 1) {
        workers_.reserve(static_cast<size_t>(q.workers));
        for (int64_t w = 0; w < q.workers; ++w) workers_.push_back({RowWalk(q, w, q.batches)});
        inboxes_.add_all(q);
    }

    Status run() {
        for (int64_t w = 0; w < q_.workers; ++w) queue_.push(w);
        while (!queue_.empty()) {
            const int64_t w = queue_.front();
            queue_.pop();
            if (!go_on(w)) return Status::kTooLong;
        }
        return std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.walk.done(); })
                   ? Status::kDone
                   : Status::kStuck;
    }

  private:
    struct Worker {
        RowWalk walk;
        Ticks free = 0;
        const Ticks* awaited = nullptr;  // the place of the tensor that is missing
    };

    // False if time runs out.
    bool go_on(int64_t w) {
        Worker& worker = workers_[static_cast<size_t>(w)];
        Ticks free = worker.free, busy = 0;
        for (; !worker.walk.done(); worker.walk.advance()) {
            const Step& step = worker.walk.peek();
            Ticks start = free;
            if (step.needs_tensor(q_.stages)) {
                Ticks& there = inboxes_.at(step.stage, step.kind == kForward, step.number);
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
            if (free > kLongest) return false;
            if (step.takes()) {
                tally_.release(step.stage);
                if (q_.sum_ticks[step.stage] > 0) sums_.add(step, 0, free);
            }
            tally_.ran(w, step.own, step, start, free);
            if (step.sends(q_.stages)) send(w, step, free);
        }
        worker.free = free;
        tally_.busy(w, busy);
        return true;
    }

    void send(int64_t w, const Step& step, Ticks now) {
        const bool is_forward = step.kind == kForward;
        const int64_t k = step.stage, to = is_forward ? k + 1 : k - 1, other = q_.replicas[to];
        Ticks& there = inboxes_.at(to, is_forward, step.number);
        if (other == w) {
            there = now;
            return;
        }
        there = links_.send(is_forward ? 2 * k : 2 * to + 1, step.micro_batch, step.own, now);
        Worker& receiver = workers_[static_cast<size_t>(other)];
        if (receiver.awaited == &there) {
            receiver.awaited = nullptr;
            queue_.push(other);
        }
    }

    const Question& q_;
    const Durations durations_;
    Links links_;
    Tally tally_;
    Sums sums_;
    std::vector<Worker> workers_;
    Inboxes inboxes_;
    std::queue<int64_t> queue_;  // workers that may go on
};

}  // namespace avgpipe::simulate
