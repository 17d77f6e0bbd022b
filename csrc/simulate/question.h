// What a simulation is asked, and what it answers. bindings.cpp names the same fields.
#pragma once

#include <cstdint>

namespace avgpipe::simulate {

using Ticks = int64_t;  // picoseconds

constexpr Ticks kNever = INT64_MAX;
constexpr Ticks kLongest =
    Ticks{1} << 62;  // a run that lasts longer is refused; any single time is below 1/16 of it

enum Kind : int32_t { kForward, kBackward, kInputs, kWeights, kUpdate, kKinds };

// Link 2k is that from stage k to k+1, link 2k+1 the one back; both are of boundary k.
struct Question {
    int64_t stages, workers, micro_batches, pipelines, batches;
    int64_t flush;                // 0: the micro-batches of all batches are one sequence
    const int64_t* warm_ups;      // per stage; or null, then the columns are given:
    const int64_t* column_begin;  // per stage, and the end: where its actions begin in the next three
    const int8_t* kinds;
    const int32_t* micro_batch;    // 0 for an update
    const int32_t* ranks;          // the place in the row of the worker; or null: a worker has one stage
    const int32_t* worker;         // per stage
    const Ticks* action_ticks;     // per kind and stage, `widths[kind]` numbers: 1, or one per micro-batch
    const int64_t* action_begin;   // per kind
    const int64_t* action_widths;  // per kind
    const Ticks* sum_ticks;        // per stage: between its last backward of a batch and the update
    const Ticks* transfer_ticks;   // per link, `transfer_width` numbers: how long a tensor occupies it
    int64_t transfer_width;
    const Ticks* latency_ticks;  // per link: from leaving it to being there
    const int32_t* channel;      // per link: the channel that carries one tensor at a time; -1: no contention
    int64_t channels;
    int64_t shared_channels;   // whether any channel has links of several stages
    const double* held_bytes;  // per stage, by a micro-batch in flight
    int64_t slots;             // actions that a device runs at once
    const int64_t* rates;      // per number of actions at once, from 1: the speed of each, 2^20 if alone
    uint64_t seed;
    int64_t jitter;                // see Durations; 0: none
    uint64_t straggler_threshold;  // of 2^32 draws, those that are slow
    int64_t straggler_factor;      // in 1/2^16
};

// An action that ran.
struct Record {
    Ticks start, end;
    int32_t stage, batch, micro_batch, kind;
};

struct Answer {
    Ticks makespan;
    Ticks* busy;              // per worker
    Ticks* batch_end;         // per batch
    int64_t* peak_in_flight;  // per stage
    double* peak_held_bytes;  // per worker
    Record* records;          // room for all actions; or null
    int64_t count;            // of actions
};

enum class Status : int32_t { kDone, kStuck, kTooLong, kNoMemory };

}  // namespace avgpipe::simulate
