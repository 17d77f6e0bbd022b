#include "bindings.h"

#include <pybind11/numpy.h>

#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "simulate/question.h"
#include "text.h"

namespace avgpipe::simulate {
namespace {

// A question's fields by name. Dtypes and sizes are checked here; avgpipe.planning checks the values.
Question question_of(const py::kwargs& given) {
    Question q = {};
    size_t taken = 0;
    const auto field = [&](const char* name) -> py::object {
        if (!given.contains(name)) throw py::type_error(text("simulate() needs ", name));
        ++taken;
        return given[name];
    };
    const auto number = [&]<class T>(const char* name, T& to) { to = field(name).cast<T>(); };
    const auto array = [&]<class T>(const char* name, const T*& to, int64_t rows) {
        using Number = std::conditional_t<std::is_class_v<T>, int32_t, T>;  // a row of a table is several
        const int64_t size = rows * static_cast<int64_t>(sizeof(T) / sizeof(Number));
        const py::object value = field(name);
        if (!py::array_t<Number, py::array::c_style>::check_(value)) {
            throw py::type_error(
                text(name, ": use a contiguous array of ", std::string(py::str(py::dtype::of<Number>()))));
        }
        const auto numbers = py::reinterpret_borrow<py::array>(value);
        if (numbers.size() != size)
            throw py::value_error(text(name, " has ", numbers.size(), " numbers, not ", size));
        to = static_cast<const T*>(numbers.data());
    };
    number("stages", q.stages);
    number("workers", q.workers);
    number("micro_batches", q.micro_batches);
    number("pipelines", q.pipelines);
    number("batches", q.batches);
    array("row_begin", q.row_begin, q.workers + 1);
    array("loops", q.loops, q.row_begin[q.workers]);
    array("actions", q.actions, q.loops[q.row_begin[q.workers] - 1].end);
    array("replicas_begin", q.replicas_begin, q.stages + 1);
    array("replicas", q.replicas, q.replicas_begin[q.stages]);
    const int64_t links = 2 * (q.stages - 1);
    array("action_begin", q.action_begin, kKinds);
    array("action_widths", q.action_widths, kKinds);
    const int64_t widths = std::accumulate(q.action_widths, q.action_widths + kKinds, int64_t{0});
    array("action_ticks", q.action_ticks, q.stages * widths);
    array("sum_ticks", q.sum_ticks, q.stages);
    number("transfer_width", q.transfer_width);
    array("transfer_ticks", q.transfer_ticks, links * q.transfer_width);
    array("latency_ticks", q.latency_ticks, links);
    array("channel", q.channel, links);
    array("channel_count", q.channel_count, links);
    number("channels", q.channels);
    number("shared_channels", q.shared_channels);
    array("held_bytes", q.held_bytes, q.stages);
    number("slots", q.slots);
    array("rates", q.rates, q.slots);
    number("seed", q.seed);
    number("jitter", q.jitter);
    number("straggler_threshold", q.straggler_threshold);
    number("straggler_factor", q.straggler_factor);
    if (taken != given.size()) throw py::type_error(text("got ", given.size(), " fields, know ", taken));
    return q;
}

// Fields of a batch, on all workers.
int64_t actions_of(const Question& q) {
    int64_t actions = 0;
    for (const Loop* loop = q.loops; loop != q.loops + q.row_begin[q.workers]; ++loop) {
        actions += int64_t{loop->end - loop->begin} * loop->repeats;
    }
    return actions;
}

py::tuple run(bool events, const py::kwargs& fields) {
    const Question q = question_of(fields);
    py::array_t<Ticks> busy(q.workers), batch_end(q.batches);
    py::array_t<int64_t> peak_in_flight(q.stages);
    py::array_t<double> peak_held_bytes(q.workers);
    py::array_t<Record> records(events ? actions_of(q) * q.batches : 0);
    Answer answer = {};
    answer.busy = busy.mutable_data();
    answer.batch_end = batch_end.mutable_data();
    answer.peak_in_flight = peak_in_flight.mutable_data();
    answer.peak_held_bytes = peak_held_bytes.mutable_data();
    answer.records = events ? records.mutable_data() : nullptr;
    const auto no_memory = [] {
        PyErr_SetString(PyExc_MemoryError,
                        "the simulation does not fit into memory: use fewer stages or micro-batches");
        return py::error_already_set();
    };
    try {
        const py::gil_scoped_release others_may_run;
        simulate(q, answer);
    } catch (const std::bad_alloc&) {
        throw no_memory();
    } catch (const std::length_error&) {  // more than any memory
        throw no_memory();
    }
    return py::make_tuple(answer.makespan, busy, batch_end, peak_in_flight, peak_held_bytes, answer.count,
                          events ? py::object(records) : py::none());
}

}  // namespace

void bind(py::module_& module) {
    PYBIND11_NUMPY_DTYPE(Record, start, end, worker, stage, batch, micro_batch, kind);
    module.def("simulate", run, py::kw_only(), py::arg("events"),
               "Run a schedule on paper. The fields are those of Question in csrc/simulate/question.h.");
}

}  // namespace avgpipe::simulate
