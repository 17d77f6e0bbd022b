// Counters of a run's actions.
#pragma once

#include <algorithm>
#include <vector>

#include "simulate/row.h"

namespace avgpipe::simulate {

class Tally {
  public:
    Tally(const Question& q, Answer& answer)
        : q_(q),
          answer_(answer),
          is_plain_(q.workers == q.stages && !q.has_replicas()),
          held_(static_cast<size_t>(q.replicas_begin[q.stages])),
          on_worker_(static_cast<size_t>(q.workers)) {
        answer.makespan = answer.count = 0;
        std::fill_n(answer.busy, q.workers, 0);
        std::fill_n(answer.batch_end, q.batches, 0);
        std::fill_n(answer.peak_in_flight, q.stages, 0);
        std::fill_n(answer.peak_held_bytes, q.workers, 0.0);
        for (int64_t k = 0; k < q.stages; ++k) {
            for (int64_t at = q.replicas_begin[k]; at < q.replicas_begin[k + 1]; ++at) {
                on_worker_[static_cast<size_t>(q.replicas[at])].push_back({at, q.held_bytes[k]});
            }
        }
    }

    // One more micro-batch is in flight on a worker's stage.
    void hold(int64_t worker, int64_t stage, int64_t place) {
        const int64_t held = ++held_[static_cast<size_t>(place)];
        int64_t& peak = answer_.peak_in_flight[stage];
        if (held <= peak && is_plain_) return;
        peak = std::max(peak, held);
        double& most = answer_.peak_held_bytes[worker];
        most = std::max(most, held_on(worker));
    }

    void release(int64_t place) { --held_[static_cast<size_t>(place)]; }

    void busy(int64_t worker, Ticks ticks) { answer_.busy[worker] += ticks; }

    void ran(int64_t worker, int64_t batch, const Step& step, Ticks start, Ticks end) {
        if (step.kind == kUpdate) {  // the last of a batch on each place
            Ticks& last = answer_.batch_end[batch];
            last = std::max(last, end);
            answer_.makespan = std::max(answer_.makespan, end);
        }
        if (answer_.records != nullptr) {
            answer_.records[answer_.count] = {start,
                                              end,
                                              static_cast<int32_t>(worker),
                                              step.stage,
                                              static_cast<int32_t>(batch),
                                              step.micro_batch,
                                              step.kind};
        }
        ++answer_.count;
    }

  private:
    struct Held {
        int64_t place;
        double bytes;  // of a micro-batch
    };

    double held_on(int64_t worker) const {
        double bytes = 0;
        for (const Held& own : on_worker_[static_cast<size_t>(worker)]) {
            bytes += static_cast<double>(held_[static_cast<size_t>(own.place)]) * own.bytes;
        }
        return bytes;
    }

    const Question& q_;
    Answer& answer_;
    const bool is_plain_;        // one stage on each worker, without replicas
    std::vector<int64_t> held_;  // per place
    std::vector<std::vector<Held>> on_worker_;
};

}  // namespace avgpipe::simulate
