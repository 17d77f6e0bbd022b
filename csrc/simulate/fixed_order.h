// Where devices have nothing to choose: one pipeline, a worker per stage, and no channel that several stages
// send on. Then each stage runs its steps in order, each as soon as its tensor is there, and times follow
// without a queue of events: a stage goes on until a tensor is missing, and is called again when that has
// been sent.
#pragma once

#include <algorithm>
#include <vector>

#include "simulate/inbox.h"
#include "simulate/links.h"
#include "simulate/tally.h"

namespace avgpipe::simulate {

template <class Walk>
class FixedOrder {
  public:
    FixedOrder(const Question& q, Answer& answer)
        : q_(q), durations_(q), links_(q, durations_), tally_(q, answer) {
        stages_.reserve(static_cast<size_t>(q.stages));
        for (int64_t k = 0; k < q.stages; ++k) {
            stages_.push_back({Walk(q, k, q.batches)});
            inboxes_.add(Walk::window(q, k));
        }
        inboxes_.make();
    }

    Status run() {
        // A ring that has room for every stage once.
        std::vector<int64_t> queue(static_cast<size_t>(q_.stages));
        for (int64_t k = 0; k < q_.stages; ++k) queue[static_cast<size_t>(k)] = k;
        int64_t first = 0, count = q_.stages;
        while (count > 0) {
            const int64_t k = queue[static_cast<size_t>(first)];
            first = first + 1 == q_.stages ? 0 : first + 1;
            --count;
            if (!go_on(k)) return Status::kTooLong;
            for (int64_t& woken : woken_) {
                if (woken < 0) continue;
                const int64_t end = first + count < q_.stages ? first + count : first + count - q_.stages;
                queue[static_cast<size_t>(end)] = woken;
                ++count;
                woken = -1;
            }
        }
        return std::all_of(stages_.begin(), stages_.end(), [](const Stage& s) { return s.walk.done(); })
                   ? Status::kDone
                   : Status::kStuck;
    }

  private:
    struct Stage {
        Walk walk;
        Ticks free = 0;
        const Ticks* awaited = nullptr;  // the place of the tensor that is missing
    };

    // False if time runs out.
    bool go_on(int64_t k) {
        Stage& stage = stages_[static_cast<size_t>(k)];
        Ticks free = stage.free, busy = 0;
        while (!stage.walk.done()) {
            const Step step = stage.walk.peek();
            Ticks start = step.kind == kUpdate ? free + q_.sum_ticks[k] : free;
            if (step.needs_tensor(k, q_.stages)) {
                Ticks& there = inboxes_.at(k, step.kind == kForward, step.number);
                if (there == kNever) {
                    stage.awaited = &there;
                    break;
                }
                start = std::max(start, there);
                there = kNever;
            }
            if (step.adds()) tally_.hold(k);
            const Ticks ticks = durations_.action(step.kind, k, step.micro_batch, step.own);
            free = start + ticks;
            busy += ticks;
            if (free > kLongest) return false;
            if (step.takes()) tally_.release(k);
            tally_.ran(k, step.own, step, start, free);
            stage.walk.advance(step);
            send(k, step, free);
        }
        stage.free = free;
        tally_.busy(q_.worker[k], busy);
        return true;
    }

    void send(int64_t k, const Step& step, Ticks now) {
        const bool is_forward = step.kind == kForward;
        if (is_forward ? k + 1 == q_.stages : k == 0 || step.kind == kWeights || step.kind == kUpdate) return;
        const int64_t to = is_forward ? k + 1 : k - 1;
        Ticks& there = inboxes_.at(to, is_forward, step.number);
        there = links_.send(is_forward ? 2 * k : 2 * to + 1, step.micro_batch, step.own, now);
        Stage& other = stages_[static_cast<size_t>(to)];
        if (other.awaited == &there) {
            other.awaited = nullptr;
            woken_[is_forward] = to;
        }
    }

    const Question& q_;
    const Durations durations_;
    Links links_;
    Tally tally_;
    std::vector<Stage> stages_;
    Inboxes inboxes_;
    int64_t woken_[2] = {-1, -1};  // the stages before and after, where what they wait for was sent
};

}  // namespace avgpipe::simulate
