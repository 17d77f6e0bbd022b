// The parts of the simulation, and both engines compared with each other and with known times.
#include "simulate/question.h"

#include <cstdio>
#include <string>
#include <vector>

#include "simulate/events.h"
#include "simulate/fixed_order.h"
#include "tests/check.h"

using namespace avgpipe::simulate;
using avgpipe::tests::expect;

namespace {

void expect_equal(const char* what, int64_t seen, int64_t wanted) {
    expect(seen == wanted, what, static_cast<double>(seen), static_cast<double>(wanted));
}

uint64_t state = 1;

// 0..upto
int64_t any(int64_t upto) {
    state = mix(state);
    return static_cast<int64_t>(state % static_cast<uint64_t>(upto + 1));
}

// A question with its arrays: uniform costs, to be changed, and 1F1B.
struct Case {
    Case(int64_t stages, int64_t micro_batches, int64_t pipelines = 1, int64_t batches = 1)
        : warm_ups(stages),
          action_ticks(kKinds * stages, 1),
          action_widths(kKinds, 1),
          sum_ticks(stages),
          transfer_ticks(2 * (stages - 1)),
          latency_ticks(2 * (stages - 1)),
          channel(2 * (stages - 1)),
          channel_count(2 * (stages - 1), 1),
          held_bytes(stages, 1.0),
          rates{1 << 20, 1 << 19},
          busy(stages),
          batch_end(batches),
          peak_in_flight(stages),
          peak_held_bytes(stages) {
        for (int64_t k = 0; k < stages; ++k) {
            warm_ups[k] = std::min(micro_batches, stages - k);
            replicas_begin.push_back(k);
            replicas.push_back(static_cast<int32_t>(k));
        }
        replicas_begin.push_back(stages);
        for (int64_t kind = 0; kind < kKinds; ++kind) action_begin.push_back(kind * stages);
        for (size_t link = 0; link < channel.size(); ++link) channel[link] = static_cast<int32_t>(link);
        q.stages = q.workers = stages;
        q.micro_batches = micro_batches;
        q.pipelines = pipelines;
        q.batches = batches;
        q.transfer_width = 1;
        q.channels = 2 * (stages - 1);
        q.slots = 1;
        q.straggler_factor = 1 << 16;
    }

    void end_row() { row_begin.push_back(static_cast<int64_t>(loops.size())); }

    void add(std::vector<Action> repeated, int64_t repeats = 1) {
        const auto begin = static_cast<int32_t>(actions.size());
        actions.insert(actions.end(), repeated.begin(), repeated.end());
        if (repeats > 0) {
            loops.push_back({begin, static_cast<int32_t>(actions.size()), static_cast<int32_t>(repeats), 1});
        }
    }

    // A row per worker, without loops: stage, kind and micro-batch of each action.
    void set_rows(const std::vector<std::string>& rows) {
        for (const std::string& row : rows) {
            for (size_t at = 0; at + 2 < row.size(); at += 4) {
                const auto kind = static_cast<int32_t>(std::string("FBIWU").find(row[at + 1]));
                add({{kind, row[at] - '0', row[at + 2] - '0', 0}});
            }
            end_row();
        }
        q.workers = static_cast<int64_t>(rows.size());
    }

    // 1F1B with the warm-ups, as avgpipe/schedule/builders.py writes it.
    void set_warm_ups() {
        const auto count = static_cast<int32_t>(q.micro_batches);
        for (int32_t k = 0; k < q.stages; ++k) {
            const auto w = static_cast<int32_t>(warm_ups[k]);
            if (is_endless) {
                for (int32_t m = 0; m < count; ++m) {
                    add({{kBackward, k, m, 0}});
                    if (m == count - 1) add({{kUpdate, k, 0, 0}});
                    add({{kForward, k, (w + m) % count, (w + m) / count}});
                }
            } else {
                add({{kForward, k, 0, 0}}, w);
                add({{kBackward, k, 0, 0}, {kForward, k, w, 0}}, count - w);
                add({{kBackward, k, count - w, 0}}, w);
                add({{kUpdate, k, 0, 0}});
            }
            end_row();
        }
    }

    void point() {
        if (loops.empty()) set_warm_ups();
        q.row_begin = row_begin.data();
        q.loops = loops.data();
        q.actions = actions.data();
        q.replicas_begin = replicas_begin.data();
        q.replicas = replicas.data();
        q.action_ticks = action_ticks.data();
        q.action_begin = action_begin.data();
        q.action_widths = action_widths.data();
        q.sum_ticks = sum_ticks.data();
        q.transfer_ticks = transfer_ticks.data();
        q.latency_ticks = latency_ticks.data();
        q.channel = channel.data();
        q.channel_count = channel_count.data();
        q.held_bytes = held_bytes.data();
        q.rates = rates.data();
        answer = {0, busy.data(), batch_end.data(), peak_in_flight.data(), peak_held_bytes.data(), nullptr,
                  0};
        if (!records.empty()) answer.records = records.data();
    }

    void run() {
        point();
        simulate(q, answer);
    }

    // Whether it is refused with this error.
    template <class Error>
    bool refuses() {
        try {
            run();
            return false;
        } catch (const Error&) {
            return true;
        }
    }

    Question q = {};
    Answer answer = {};
    std::vector<int64_t> warm_ups, row_begin{0}, replicas_begin;
    std::vector<Loop> loops;
    std::vector<Action> actions;
    std::vector<int32_t> replicas;
    bool is_endless = false;
    std::vector<Ticks> action_ticks;
    std::vector<int64_t> action_begin, action_widths;
    std::vector<Ticks> sum_ticks, transfer_ticks, latency_ticks;
    std::vector<int32_t> channel, channel_count;
    std::vector<double> held_bytes;
    std::vector<int64_t> rates;
    std::vector<Ticks> busy, batch_end;
    std::vector<int64_t> peak_in_flight;
    std::vector<double> peak_held_bytes;
    std::vector<Record> records;
};

// ---- parts ------------------------------------------------------------------------------------------------
void test_random() {
    // The first numbers of SplitMix64 from state 0.
    expect_equal("mix(0)", mix(0) == 0xE220A8397B1DCDAFu, 1);
    expect_equal("mix of the next state", mix(kGolden) == 0x6E789E6AA1B965F4u, 1);
    expect_equal("least bell", bell(0), -131070);
    expect_equal("greatest bell", bell(~uint64_t{0}), 131070);
}

void test_next_event() {
    for (const int64_t workers : {1, 2, 5, 8}) {
        NextEvent next(workers);
        std::vector<Ticks> times(static_cast<size_t>(workers), kNever);
        expect_equal("nothing comes", next.time(), kNever);
        for (int turn = 0; turn < 300; ++turn) {
            const int64_t w = any(workers - 1);
            const Ticks time = any(3) == 0 ? kNever : any(20);
            times[static_cast<size_t>(w)] = time;
            next.set(w, time);
            const auto least = std::min_element(times.begin(), times.end());
            expect_equal("time", next.time(), *least);
            if (*least == kNever) continue;
            std::vector<int64_t> found, wanted;
            next.collect(*least, found);
            for (int64_t v = 0; v < workers; ++v) {
                if (times[static_cast<size_t>(v)] == *least) wanted.push_back(v);
            }
            expect_equal("workers", found == wanted, 1);
        }
    }
}

void test_inboxes() {
    Inboxes boxes({3, 1});
    boxes.at(0, true, 5) = 7;
    boxes.at(0, false, 5) = 8;
    boxes.at(1, true, 5) = 9;
    expect_equal("forward", boxes.at(0, true, 5), 7);
    expect_equal("backward", boxes.at(0, false, 5), 8);
    expect_equal("one place", boxes.at(1, true, 6), 9);
    expect_equal("an empty place", boxes.at(0, true, 6), kNever);
}

void test_slots() {
    Case each(1, 1);
    each.q.slots = 2;
    each.rates = {1 << 20, 3 << 18};  // two at three quarters of the speed
    each.point();
    Slots device(each.q);
    const auto ended = [&] {
        int64_t sum = 0;
        device.finish([&](int64_t lane) { sum += 1 + lane; });
        return sum;
    };
    expect_equal("nothing runs", device.next_end(), kNever);
    device.begin(0, 10);
    expect_equal("alone", device.next_end(), 10);
    expect_equal("busy", device.advance(4), 4);
    device.begin(1, 3);
    expect_equal("full", device.has_room(), 0);
    expect_equal("the shorter one", device.next_end(), 8);
    device.advance(8);
    expect_equal("which", ended(), 2);
    expect_equal("the longer one, alone again", device.next_end(), 11);
    device.advance(11);
    expect_equal("over", ended(), 1);
    expect_equal("idle", device.advance(20), 0);
}

std::string spell(const Case& each, int64_t worker, int64_t batches) {
    std::string text;
    for (RowWalk walk(each.q, worker, batches); !walk.done(); walk.advance()) {
        const Step& step = walk.peek();
        text += "FBIWU"[step.kind];
        text += static_cast<char>('0' + step.micro_batch);
        text += static_cast<char>('a' + step.own);
    }
    return text;
}

void test_walk() {
    Case each(2, 3);
    each.point();
    expect_equal("1F1B", spell(each, 0, 1) == "F0aF1aB0aF2aB1aB2aU0a", 1);
    expect_equal("with a flush", spell(each, 1, 2) == "F0aB0aF1aB1aF2aB2aU0aF0bB0bF1bB1bF2bB2bU0b", 1);
    expect_equal("no batch", spell(each, 0, 0) == "", 1);
    Case stream(2, 1);
    stream.warm_ups = {2, 1};
    stream.is_endless = true;
    stream.point();
    expect_equal("without", spell(stream, 0, 3) == "F0aF0bB0aU0aF0cB0bU0bB0cU0c", 1);
}

void test_spans_in_flight() {
    Case each(3, 4);
    each.point();
    expect_equal("the warm-up", in_flight_span(each.q, 0, 0), 3);
    expect_equal("of the last stage", in_flight_span(each.q, 2, 2), 1);
    Case stream(2, 2);
    stream.warm_ups = {5, 1};
    stream.is_endless = true;
    stream.point();
    expect_equal("over batches", in_flight_span(stream.q, 0, 0), 5);
    Case any_order(1, 3);
    any_order.set_rows({"0F0 0F1 0F2 0B2 0B0 0B1 0U0"});
    any_order.point();
    expect_equal("out of order", in_flight_span(any_order.q, 0, 0), 6);
}

void test_sums() {
    Case each(1, 2);
    each.sum_ticks = {5};
    each.point();
    Sums sums(each.q, 1);
    const Step update{kUpdate, 0, 0, 3, 0};
    expect_equal("one of two", sums.add({kBackward, 0, 1, 3, 7}, 0, 10), 0);
    expect_equal("not yet", sums.ready(update, 0), kNever);
    expect_equal("both", sums.add({kWeights, 0, 0, 3, 6}, 0, 8), 1);
    expect_equal("after the later one", sums.ready(update, 0), 15);
    expect_equal("of another batch", sums.ready({kUpdate, 0, 0, 4, 0}, 0), kNever);
}

// ---- runs -------------------------------------------------------------------------------------------------
void test_closed_forms() {
    Case each(5, 9);
    for (int64_t k = 0; k < 5; ++k)
        each.action_ticks[kForward * 5 + k] = 10, each.action_ticks[kBackward * 5 + k] = 20;
    std::fill_n(each.action_ticks.begin() + kUpdate * 5, 5, 0);
    each.run();
    expect_equal("1F1B", each.answer.makespan, (9 + 4) * 30);
    expect_equal("actions", each.answer.count, 5 * 19);
    for (int64_t k = 0; k < 5; ++k) {
        expect_equal("busy", each.busy[k], 9 * 30);
        expect_equal("in flight", each.peak_in_flight[k], 5 - k);
    }
    Case all(5, 9);
    all.action_ticks = each.action_ticks;
    std::fill(all.warm_ups.begin(), all.warm_ups.end(), 9);
    all.run();
    expect_equal("GPipe", all.answer.makespan, (9 + 4) * 30);
}

void test_figure_of_the_paper() {
    const int64_t warm_ups[][2] = {{2, 1}, {3, 1}, {8, 8}}, wanted[] = {26, 20, 20};
    for (int row = 0; row < 3; ++row) {
        Case each(2, 8);
        each.warm_ups = {warm_ups[row][0], warm_ups[row][1]};
        each.transfer_ticks = {1, 1};
        std::fill_n(each.action_ticks.begin() + kUpdate * 2, 2, 0);
        each.run();
        expect_equal("makespan", each.answer.makespan, wanted[row]);
        expect_equal("held", each.peak_in_flight[0], warm_ups[row][0]);
    }
}

void randomise(Case& each) {
    for (Ticks& ticks : each.action_ticks) ticks = any(4);
    for (Ticks& ticks : each.transfer_ticks) ticks = any(4);
    for (Ticks& ticks : each.latency_ticks) ticks = any(1) * any(3);
    for (Ticks& ticks : each.sum_ticks) ticks = any(1) * any(5);
    for (int32_t& channel : each.channel) channel = any(3) == 0 ? -1 : channel;
    if (any(1) == 0) each.q.jitter = int64_t{1} << 28;
    each.q.seed = static_cast<uint64_t>(any(1000));
    each.records.resize(static_cast<size_t>(each.q.batches * each.q.stages * (2 * each.q.micro_batches + 1)));
}

// With one pipeline and a worker per stage, devices have no choice: events give the same times.
void test_both_engines_agree() {
    for (int turn = 0; turn < 400; ++turn) {
        const int64_t stages = 1 + any(4), micro_batches = 1 + any(5);
        const int64_t batches = 1 + any(3), pipelines = batches == 1 ? 1 + any(2) : 1;
        Case each(stages, micro_batches, pipelines, batches);
        randomise(each);
        each.is_endless = any(1) == 0;
        if (each.is_endless) {
            for (int64_t k = 0; k < stages; ++k) each.warm_ups[k] = stages - k;
        }
        each.point();
        Case other = each;
        other.point();
        FixedOrder(each.q, each.answer).run();
        Events<OneSlot>(other.q, other.answer).run();
        expect_equal("makespan", each.answer.makespan, other.answer.makespan);
        expect_equal("busy", each.busy == other.busy, 1);
        expect_equal("ends", each.batch_end == other.batch_end, 1);
        expect_equal("in flight", each.peak_in_flight == other.peak_in_flight, 1);
        expect_equal("count", each.answer.count, static_cast<int64_t>(each.records.size()));
    }
}

// A stage on two workers, which take its micro-batches in turn: both update when the later one has finished.
void test_replicas() {
    Case each(2, 2);
    each.replicas_begin = {0, 2, 3};
    each.replicas = {0, 1, 2};
    each.set_rows({"0F0 0B0 0U0", "0F1 0B1 0U0", "1F0 1B0 1F1 1B1 1U0"});
    each.busy.resize(3);
    each.peak_held_bytes.resize(3);
    each.transfer_ticks = {2, 2};
    each.channel_count = {2, 1};
    each.channel = {0, 2};
    each.q.channels = 3;
    each.sum_ticks = {7, 0};
    for (const int64_t slots : {1, 2}) {
        each.q.slots = slots;
        each.run();
        // F at 0-1 on both, there at 3; F0 B0 F1 B1 at 3-7, the gradient of 1 there at 9, B1 until 10, U
        // 17-18.
        expect_equal("makespan", each.answer.makespan, 18);
        expect_equal("busy", each.busy[0] + 10 * each.busy[1] + 100 * each.busy[2], 533);
        expect_equal("in flight", each.peak_in_flight[0], 1);
    }
}

// Everything stays inside its memory, for any number of pipelines, slots and shared channels.
void test_everything_ends() {
    for (int turn = 0; turn < 400; ++turn) {
        const int64_t stages = 1 + any(4);
        Case each(stages, 1 + any(5), 1 + any(3), 1 + any(6));
        randomise(each);
        each.q.slots = 1 + any(1);
        each.q.straggler_threshold = uint64_t{1} << 30;
        each.q.straggler_factor = 3 << 16;
        if (!each.channel.empty() && any(1) == 0) {
            std::fill(each.channel.begin(), each.channel.end(), 0);
            each.q.shared_channels = 1;
        }
        each.run();
        expect_equal("count", each.answer.count, static_cast<int64_t>(each.records.size()));
        for (const Record& record : each.records) {
            expect_equal("a record", record.start <= record.end && record.end <= each.answer.makespan, 1);
        }
    }
}

void test_what_gets_stuck_says_so() {
    for (const int64_t pipelines : {1, 2}) {
        Case each(2, 2, pipelines, 2);
        // The second stage waits for a forward that waits for its backward.
        each.set_rows({"0F0 0B0 0F1 0B1 0U0", "1F0 1F1 1B0 1B1 1U0"});
        expect_equal("stuck", each.refuses<std::invalid_argument>(), 1);
        Case fine(2, 2, pipelines, 2);
        fine.set_rows({"0F0 0F1 0B0 0B1 0U0", "1F0 1F1 1B0 1B1 1U0"});
        fine.run();
    }
}

void test_what_is_too_long_says_so() {
    for (const int64_t pipelines : {1, 2}) {
        for (const bool is_link : {false, true}) {
            Case each(2, 40, pipelines, 2);
            each.warm_ups = {40, 40};
            (is_link ? each.transfer_ticks[0] : each.action_ticks[0]) = (Ticks{1} << 58) - 1;
            expect_equal("too long", each.refuses<std::overflow_error>(), 1);
        }
    }
}

#ifndef __SANITIZE_ADDRESS__  // which ends the program if memory is short
void test_what_does_not_fit_says_so() {
    Case each(1, 1);
    each.set_rows({"0F1 0F0 0B0 0B1 0U0"});  // in any order, so that a whole batch may be in flight
    each.q.micro_batches = int64_t{1} << 55;
    expect_equal("no memory", each.refuses<std::bad_alloc>() || each.refuses<std::length_error>(), 1);
}
#endif

}  // namespace

int main() {
    test_random();
    test_next_event();
    test_inboxes();
    test_slots();
    test_walk();
    test_spans_in_flight();
    test_sums();
    test_closed_forms();
    test_figure_of_the_paper();
    test_both_engines_agree();
    test_replicas();
    test_everything_ends();
    test_what_gets_stuck_says_so();
    test_what_is_too_long_says_so();
#ifndef __SANITIZE_ADDRESS__
    test_what_does_not_fit_says_so();
#endif
    return avgpipe::tests::report();
}
