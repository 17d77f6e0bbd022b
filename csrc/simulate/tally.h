// What is counted while actions run.
#pragma once

#include <algorithm>
#include <vector>

#include "simulate/walk.h"

namespace avgpipe::simulate {

class Tally {
  public:
    Tally(const Question& q, Answer& answer)
        : q_(q),
          answer_(answer),
          held_(static_cast<size_t>(q.stages)),
          on_worker_(static_cast<size_t>(q.workers)) {
        answer.makespan = answer.count = 0;
        std::fill_n(answer.busy, q.workers, 0);
        std::fill_n(answer.batch_end, q.batches, 0);
        std::fill_n(answer.peak_in_flight, q.stages, 0);
        std::fill_n(answer.peak_held_bytes, q.workers, 0.0);
        for (int64_t k = 0; k < q.stages; ++k) on_worker_[static_cast<size_t>(q.worker[k])].push_back(k);
    }

    // One more micro-batch is in flight on a stage.
    void hold(int64_t stage) {
        const int64_t held = ++held_[static_cast<size_t>(stage)];
        int64_t& peak = answer_.peak_in_flight[stage];
        peak = std::max(peak, held);
        double bytes = static_cast<double>(held) * q_.held_bytes[stage];
        if (q_.workers < q_.stages) bytes = held_on(q_.worker[stage]);
        double& most = answer_.peak_held_bytes[q_.worker[stage]];
        most = std::max(most, bytes);
    }

    void release(int64_t stage) { --held_[static_cast<size_t>(stage)]; }

    void busy(int64_t worker, Ticks ticks) { answer_.busy[worker] += ticks; }

    void ran(int64_t stage, int64_t batch, const Step& step, Ticks start, Ticks end) {
        Ticks& last = answer_.batch_end[batch];
        last = std::max(last, end);
        answer_.makespan = std::max(answer_.makespan, end);
        if (answer_.records != nullptr) {
            answer_.records[answer_.count] = {start,
                                              end,
                                              static_cast<int32_t>(stage),
                                              static_cast<int32_t>(batch),
                                              static_cast<int32_t>(step.micro_batch),
                                              static_cast<int32_t>(step.kind)};
        }
        ++answer_.count;
    }

  private:
    double held_on(int64_t worker) const {
        double bytes = 0;
        for (const int64_t k : on_worker_[static_cast<size_t>(worker)]) {
            bytes += static_cast<double>(held_[static_cast<size_t>(k)]) * q_.held_bytes[k];
        }
        return bytes;
    }

    const Question& q_;
    Answer& answer_;
    std::vector<int64_t> held_;
    std::vector<std::vector<int64_t>> on_worker_;
};

}  // namespace avgpipe::simulate
