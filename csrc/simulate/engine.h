// The common state of a run, with or without choices of devices.
#pragma once

#include <stdexcept>

#include "simulate/durations.h"
#include "simulate/inbox.h"
#include "simulate/tally.h"

namespace avgpipe::simulate {

class Engine {
  protected:
    Engine(const Question& q, Answer& answer, int64_t pipelines)
        : q_(q), durations_(q), tally_(q, answer), sums_(q, pipelines), inboxes_(windows_of(q, pipelines)) {}

    // The box of a stage's place, of a pipeline: the arrival of the tensor of the step's micro-batch.
    Ticks& inbox(int64_t box, const Step& step) {
        return inboxes_.at(box, step.kind == kForward, step.number);
    }

    // The arrival on one worker of the result of an action on another.
    Ticks arrival(int64_t from, int64_t to, const Step& step, int64_t batch, Ticks now) {
        if (from == to) return now;
        const int64_t link = step.kind == kForward ? 2 * step.stage : 2 * step.receiver() + 1;
        return durations_.send(link, step.micro_batch, batch, now);
    }

    static void check_time(Ticks now) {
        if (now > kLongest) throw std::overflow_error("the times are too long to count");
    }

    static void check_done(bool is_done) {
        if (!is_done) {
            throw std::invalid_argument("the schedule gets stuck: call Schedule.validate() to see where");
        }
    }

    const Question& q_;
    Durations durations_;
    Tally tally_;
    Sums sums_;
    Inboxes inboxes_;
};

}  // namespace avgpipe::simulate
