// The steps of a worker with all the batches of one pipeline, one after another.
#pragma once

#include <algorithm>

#include "simulate/question.h"

namespace avgpipe::simulate {

// Small, like all per worker and pipeline state of a run: the processor's caches hold more of it.
struct Step {
    int32_t kind, stage, micro_batch;
    int32_t own;     // number of the batch among those of the pipeline
    int64_t number;  // of the micro-batch, counted through all batches

    // How many micro-batches in flight an action adds when it starts, and takes away when it ends.
    bool adds() const { return kind == kForward; }
    bool takes() const { return kind == kBackward || kind == kWeights; }
    bool needs_tensor(int64_t stages) const {
        return kind == kForward ? stage > 0 : (kind == kBackward || kind == kInputs) && stage < stages - 1;
    }
    int64_t receiver() const { return kind == kForward ? stage + 1 : stage - 1; }  // if it sends
    bool sends(int64_t stages) const {
        return kind == kForward ? stage < stages - 1 : (kind == kBackward || kind == kInputs) && stage > 0;
    }
};

// Turn after turn of a row, without the actions of batches that do not exist.
class RowWalk {
  public:
    RowWalk(const Question& q, int64_t worker, int64_t batches)
        : actions_(q.actions),
          first_(q.loops + q.row_begin[worker]),
          last_(q.loops + q.row_begin[worker + 1]),
          loop_(first_),
          micro_batches_(static_cast<int32_t>(q.micro_batches)),
          batches_(static_cast<int32_t>(batches)) {
        if (first_ == last_ || batches_ == 0) {
            turn_ = batches_;
            return;
        }
        for (const Action* a = actions_ + first_->begin; a != actions_ + (last_ - 1)->end; ++a) {
            turn_ = std::min(turn_, -a->ahead);
        }
        action_ = actions_ + first_->begin;
        settle();
    }

    bool done() const { return turn_ == batches_; }
    const Step& peek() const { return step_; }

    void advance() {
        ++action_;
        settle();
    }

  private:
    // From the current place to the next existing action.
    void settle() {
        for (;; ++action_) {
            if (action_ == actions_ + loop_->end && !repeat()) return;
            const int32_t own = turn_ + action_->ahead;
            if (own < 0 || own >= batches_) continue;
            const int32_t m = action_->micro_batch + rise_;
            step_ = {action_->kind, action_->stage, m, own, static_cast<int64_t>(own) * micro_batches_ + m};
            return;
        }
    }

    // At a loop's end: continue with its next repetition, or with the next loop. False after the last turn.
    bool repeat() {
        rise_ += loop_->stride;
        if (++times_ == loop_->repeats) {
            times_ = rise_ = 0;
            do {
                if (++loop_ == last_) {
                    loop_ = first_;
                    if (++turn_ == batches_) return false;
                }
            } while (is_empty());
        }
        action_ = actions_ + loop_->begin;
        return true;
    }

    // Whether this turn has no action of the loop.
    bool is_empty() const {
        return std::none_of(actions_ + loop_->begin, actions_ + loop_->end, [this](const Action& a) {
            return turn_ + a.ahead >= 0 && turn_ + a.ahead < batches_;
        });
    }

    const Action* actions_;
    const Loop *first_, *last_, *loop_;
    const Action* action_ = nullptr;
    int32_t micro_batches_, batches_;
    int32_t turn_ = 0, times_ = 0, rise_ = 0;
    Step step_ = {};
};

// The greatest distance of micro-batches in flight on a stage, counted through all batches: the newest minus
// the newest that is done. Tensors sent to it or by it, and not taken, are among them.
inline int64_t in_flight_span(const Question& q, int64_t worker, int64_t stage) {
    const Loop *first = q.loops + q.row_begin[worker], *last = q.loops + q.row_begin[worker + 1];
    int64_t ahead = 0, newest = -q.micro_batches, span = 1;
    for (const Loop* loop = first; loop != last; ++loop) {
        for (int32_t at = loop->begin; at < loop->end; ++at) {
            const Action& action = q.actions[at];
            ahead = std::max<int64_t>(ahead, action.ahead);
            if (action.stage != stage || action.kind != kForward) continue;
            const int64_t end = action.micro_batch + int64_t{loop->repeats - 1} * loop->stride;
            newest = std::max(newest, (action.ahead - 1) * q.micro_batches + end);
        }
    }
    // Enough for any order, and for replicas, which do not wait for each other.
    const int64_t most = (ahead + 2) * q.micro_batches;
    if (q.replica_count(stage) > 1) return most;
    int64_t done = -1;  // the newest backward; all of the turn before are done
    for (const Loop* loop = first; loop != last; ++loop) {
        for (const int32_t time : {0, loop->repeats - 1}) {  // it grows evenly in between
            for (int32_t at = loop->begin; at < loop->end; ++at) {
                const Action& action = q.actions[at];
                if (action.stage != stage || action.kind == kWeights || action.kind == kUpdate) continue;
                const int64_t number =
                    action.ahead * q.micro_batches + action.micro_batch + int64_t{time} * loop->stride;
                int64_t& reached = action.kind == kForward ? newest : done;
                if (number < reached) return most;
                reached = number;
                span = std::max(span, newest - done);
            }
        }
    }
    return std::min(span, most);
}

}  // namespace avgpipe::simulate
