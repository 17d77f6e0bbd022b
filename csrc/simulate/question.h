// The input and the output of a simulation. bindings.cpp names the same fields.
#pragma once

#include <cstdint>

namespace avgpipe::simulate {

using Ticks = int64_t;  // picoseconds

constexpr Ticks kNever = INT64_MAX;
constexpr Ticks kLongest =
    Ticks{1} << 62;  // a run that lasts longer is refused; any single time is below 1/16 of it

enum Kind : int32_t { kForward, kBackward, kInputs, kWeights, kUpdate, kKinds };

// An action of a row; in a loop, that of the first repetition. An update has micro-batch 0.
struct Action {
    int32_t kind, stage, micro_batch, ahead;
};

// Actions that a row repeats; their micro-batches rise by `stride` with each repetition.
struct Loop {
    int32_t begin, end;  // among all actions
    int32_t repeats, stride;
};

// Link 2k is that from stage k to k+1, link 2k+1 the reverse; both are of boundary k.
struct Question {
    int64_t stages, workers, micro_batches, pipelines, batches;
    const int64_t* row_begin;  // per worker, and the end: the loops of its row, see avgpipe/schedule/row.py
    const Loop* loops;
    const Action* actions;
    const int64_t* replicas_begin;  // per stage, and the end: its workers in the next, in turn
    const int32_t* replicas;
    const Ticks* action_ticks;     // per kind and stage, `widths[kind]` numbers: 1, or one per micro-batch
    const int64_t* action_begin;   // per kind
    const int64_t* action_widths;  // per kind
    const Ticks* sum_ticks;  // per stage: between the last backward of a batch on all replicas and the update
    const Ticks* transfer_ticks;  // per link, `transfer_width` numbers: how long a tensor occupies it
    int64_t transfer_width;
    const Ticks* latency_ticks;  // per link: from leaving it to arrival
    const int32_t*
        channel;  // per link: the first of its channels, which carry one tensor at a time; -1: none
    const int32_t* channel_count;  // per link: 1, or as many as senders, in turn
    int64_t channels;
    int64_t shared_channels;   // whether any channel has links of several stages
    const double* held_bytes;  // per stage, by a micro-batch in flight
    int64_t slots;             // actions that a device runs at once
    const int64_t* rates;      // per number of actions at once, from 1: the speed of each, 2^20 if alone
    uint64_t seed;
    int64_t jitter;                // see Durations; 0: none
    uint64_t straggler_threshold;  // of 2^32 draws, those that are slow
    int64_t straggler_factor;      // in 1/2^16

    int64_t replica_count(int64_t stage) const { return replicas_begin[stage + 1] - replicas_begin[stage]; }

    // The place of a stage on the worker of a micro-batch: an index of `replicas`.
    int64_t place(int64_t stage, int64_t micro_batch) const {
        const int64_t begin = replicas_begin[stage], count = replicas_begin[stage + 1] - begin;
        return count == 1 ? begin : begin + micro_batch % count;
    }

    bool has_replicas() const { return replicas_begin[stages] > stages; }
};

// An action that ran.
struct Record {
    Ticks start, end;
    int32_t worker, stage, batch, micro_batch, kind;
};

struct Answer {
    Ticks makespan;
    Ticks* busy;              // per worker
    Ticks* batch_end;         // per batch
    int64_t* peak_in_flight;  // per stage, of one worker
    double* peak_held_bytes;  // per worker
    Record* records;          // room for all actions; or null
    int64_t count;            // of actions
};

// Computes the answer. Requires valid numbers: avgpipe/planning/engine.py checks them. Throws
// std::invalid_argument for a schedule that gets stuck, std::overflow_error for times that are too long,
// std::bad_alloc or std::length_error if memory does not suffice.
void simulate(const Question& question, Answer& answer);

}  // namespace avgpipe::simulate
