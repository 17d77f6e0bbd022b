#include "bindings.h"

#include <pybind11/numpy.h>

#include <numeric>
#include <stdexcept>
#include <string>

#include "simulate/simulate.h"
#include "text.h"

namespace avgpipe::simulate {
namespace {

// The fields of a question by name. Dtypes and sizes are checked here; what the numbers say is checked by
// avgpipe.planning.
class Fields {
  public:
    explicit Fields(const py::kwargs& given) : given_(given) {}

    template <class Number>
    Number number(const char* name) {
        return taken(name).cast<Number>();
    }

    template <class T>
    const T* array(const char* name, int64_t size) {
        const py::object value = taken(name);
        if (!py::array_t<T, py::array::c_style>::check_(value)) {
            throw py::type_error(
                text(name, ": use a contiguous array of ", std::string(py::str(py::dtype::of<T>()))));
        }
        const auto array = py::reinterpret_borrow<py::array_t<T, py::array::c_style>>(value);
        if (array.size() != size)
            throw py::value_error(text(name, " has ", array.size(), " numbers, not ", size));
        return array.data();
    }

    // Rows of four int32.
    template <class Row>
    const Row* table(const char* name, int64_t rows) {
        static_assert(sizeof(Row) == 4 * sizeof(int32_t));
        return reinterpret_cast<const Row*>(array<int32_t>(name, 4 * rows));
    }

    void check_all_taken() const {
        if (taken_ != given_.size())
            throw py::type_error(text("got ", given_.size(), " fields, know ", taken_));
    }

  private:
    py::object taken(const char* name) {
        if (!given_.contains(name)) throw py::type_error(text("simulate() needs ", name));
        ++taken_;
        return given_[name];
    }

    const py::kwargs& given_;
    size_t taken_ = 0;
};

Question question_of(const py::kwargs& given) {
    Fields fields(given);
    Question q = {};
    q.stages = fields.number<int64_t>("stages");
    q.workers = fields.number<int64_t>("workers");
    q.micro_batches = fields.number<int64_t>("micro_batches");
    q.pipelines = fields.number<int64_t>("pipelines");
    q.batches = fields.number<int64_t>("batches");
    q.row_begin = fields.array<int64_t>("row_begin", q.workers + 1);
    q.loops = fields.table<Loop>("loops", q.row_begin[q.workers]);
    q.actions = fields.table<Action>("actions", q.loops[q.row_begin[q.workers] - 1].end);
    q.replicas_begin = fields.array<int64_t>("replicas_begin", q.stages + 1);
    q.replicas = fields.array<int32_t>("replicas", q.replicas_begin[q.stages]);
    const int64_t links = 2 * (q.stages - 1);
    q.action_begin = fields.array<int64_t>("action_begin", kKinds);
    q.action_widths = fields.array<int64_t>("action_widths", kKinds);
    const int64_t widths = std::accumulate(q.action_widths, q.action_widths + kKinds, int64_t{0});
    q.action_ticks = fields.array<Ticks>("action_ticks", q.stages * widths);
    q.sum_ticks = fields.array<Ticks>("sum_ticks", q.stages);
    q.transfer_width = fields.number<int64_t>("transfer_width");
    q.transfer_ticks = fields.array<Ticks>("transfer_ticks", links * q.transfer_width);
    q.latency_ticks = fields.array<Ticks>("latency_ticks", links);
    q.channel = fields.array<int32_t>("channel", links);
    q.channel_count = fields.array<int32_t>("channel_count", links);
    q.channels = fields.number<int64_t>("channels");
    q.shared_channels = fields.number<int64_t>("shared_channels");
    q.held_bytes = fields.array<double>("held_bytes", q.stages);
    q.slots = fields.number<int64_t>("slots");
    q.rates = fields.array<int64_t>("rates", q.slots);
    q.seed = fields.number<uint64_t>("seed");
    q.jitter = fields.number<int64_t>("jitter");
    q.straggler_threshold = fields.number<uint64_t>("straggler_threshold");
    q.straggler_factor = fields.number<int64_t>("straggler_factor");
    fields.check_all_taken();
    return q;
}

// Of a batch, on all workers.
int64_t actions_of(const Question& q) {
    int64_t actions = 0;
    for (const Loop* loop = q.loops; loop != q.loops + q.row_begin[q.workers]; ++loop) {
        actions += int64_t{loop->end - loop->begin} * loop->repeats;
    }
    return actions;
}

void raise(Status status) {
    if (status == Status::kStuck) {
        throw py::value_error("the schedule gets stuck: call Schedule.validate() to see where");
    }
    if (status == Status::kTooLong) throw std::overflow_error("the times are too long to count");
    if (status == Status::kNoMemory) {
        PyErr_SetString(PyExc_MemoryError,
                        "the simulation does not fit into memory: use fewer stages or micro-batches");
        throw py::error_already_set();
    }
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
    Status status = {};
    {
        const py::gil_scoped_release others_may_run;
        status = simulate(q, answer);
    }
    raise(status);
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
