// The steps of a stage with all the batches of one pipeline, one after another.
#pragma once

#include <algorithm>

#include "simulate/question.h"

namespace avgpipe::simulate {

// Small, as everything that a run keeps per stage and pipeline: the processor's caches hold more of it.
struct Step {
    int32_t kind;
    int32_t micro_batch;
    int32_t own;     // number of the batch among those of the pipeline
    int32_t rank;    // in the row of the worker
    int64_t number;  // of the micro-batch, all batches counted through

    // How many micro-batches in flight an action adds when it starts, and takes away when it ends.
    int64_t adds() const { return kind == kForward; }
    int64_t takes() const { return kind == kBackward || kind == kWeights; }
    bool needs_tensor(int64_t stage, int64_t stages) const {
        return kind == kForward ? stage > 0 : (kind == kBackward || kind == kInputs) && stage < stages - 1;
    }
};

// Counts through micro-batches: which one of which batch.
struct Counter {
    int32_t micro_batch = 0, own = 0;
    int64_t number = 0;

    void advance(int32_t micro_batches) {
        ++number;
        if (++micro_batch == micro_batches) micro_batch = 0, ++own;
    }
};

// Forwards until `warm_up` are in flight, then one backward, one forward in turn; the update after a batch's
// last backward. With a flush the next batch begins after that.
class WarmUpWalk {
  public:
    WarmUpWalk(const Question& q, int64_t stage, int64_t batches)
        : micro_batches_(static_cast<int32_t>(q.micro_batches)),
          batches_(static_cast<int32_t>(batches)),
          warm_up_(q.warm_ups[stage]),
          limit_(q.flush != 0 ? q.micro_batches : q.micro_batches * batches),
          flush_(q.flush != 0) {}

    // The most tensors that may have come before the stage takes the first of them: forwards are in flight on
    // the stage before, backwards on this one.
    static int64_t window(const Question& q, int64_t stage) {
        const int64_t most = std::max(q.warm_ups[stage > 0 ? stage - 1 : 0], q.warm_ups[stage]);
        return q.flush != 0 ? std::min(most, q.micro_batches) : most;
    }

    bool done() const { return updates_ == batches_; }

    Step peek() const {
        if (backward_.own > updates_) return {kUpdate, 0, updates_, 0, 0};
        const bool is_forward = forward_.number < limit_ && forward_.number < backward_.number + warm_up_;
        const Counter& at = is_forward ? forward_ : backward_;
        return {is_forward ? kForward : kBackward, at.micro_batch, at.own, 0, at.number};
    }

    void advance(const Step& step) {
        if (step.kind == kForward) {
            forward_.advance(micro_batches_);
        } else if (step.kind == kBackward) {
            backward_.advance(micro_batches_);
        } else {
            ++updates_;
            if (flush_) limit_ += micro_batches_;
        }
    }

  private:
    int32_t micro_batches_, batches_;
    int64_t warm_up_;
    int64_t limit_;  // of forwards that may begin
    int32_t updates_ = 0;
    bool flush_;
    Counter forward_, backward_;
};

// A column of actions, once per batch.
class ColumnWalk {
  public:
    ColumnWalk(const Question& q, int64_t stage, int64_t batches)
        : kinds_(q.kinds + q.column_begin[stage]),
          micro_batch_(q.micro_batch + q.column_begin[stage]),
          ranks_(q.ranks == nullptr ? nullptr : q.ranks + q.column_begin[stage]),
          length_(static_cast<int32_t>(q.column_begin[stage + 1] - q.column_begin[stage])),
          micro_batches_(static_cast<int32_t>(q.micro_batches)),
          batches_(static_cast<int32_t>(batches)) {}

    // A stage that sends is at most at the next batch: its own backwards need all those of the one that
    // receives.
    static int64_t window(const Question& q, int64_t) { return 2 * q.micro_batches; }

    bool done() const { return own_ == batches_ || length_ == 0; }

    Step peek() const {
        const int32_t m = micro_batch_[position_];
        const int32_t rank = ranks_ == nullptr ? 0 : ranks_[position_];
        return {kinds_[position_], m, own_, rank, static_cast<int64_t>(own_) * micro_batches_ + m};
    }

    void advance(const Step&) {
        if (++position_ == length_) position_ = 0, ++own_;
    }

  private:
    const int8_t* kinds_;
    const int32_t* micro_batch_;
    const int32_t* ranks_;
    int32_t length_, micro_batches_, batches_;
    int32_t position_ = 0, own_ = 0;
};

}  // namespace avgpipe::simulate
