// What Python may ask of the simulation.
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "executor.h"
#include "generator.h"
#include "issue.h"
#include "memory.h"

namespace simulated {
namespace {

Policy policy_of(const std::string& name) {
    const std::pair<const char*, Policy> all[] = {{"eager", Policy::kEager},
                                                  {"late", Policy::kLate},
                                                  {"random", Policy::kRandom},
                                                  {"starved", Policy::kStarved}};
    for (const auto& [known, policy] : all) {
        if (name == known) return policy;
    }
    throw std::invalid_argument("unknown policy '" + name + "': give eager, late, random or starved");
}

void reset(const std::string& policy, uint64_t seed, bool keeps_log, int64_t queues, bool has_pool,
           bool loads_late) {
    Executor::get().reset(policy_of(policy), seed, keeps_log, {queues, has_pool, loads_late});
    reset_collectives();
    reset_memory();
    reset_generators();
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    namespace py = pybind11;
    using namespace simulated;
    m.def("reset", &reset, py::arg("policy"), py::arg("seed"), py::arg("keeps_log"), py::arg("queues") = 0,
          py::arg("has_pool") = false, py::arg("loads_late") = false);
    m.def("meet", &meet);
    m.def("give_way_by", [](py::object function) {
        if (function.is_none()) return Executor::get().give_way_by({});
        const auto kept = std::make_shared<py::object>(std::move(function));
        Executor::get().give_way_by([kept](c10::DeviceIndex device) {
            const py::gil_scoped_acquire lock;
            return (*kept)(int(device)).cast<bool>();
        });
    });
    m.def("run_some", [] { return Executor::get().run_some(); });
    m.def("stuck", [] { return Executor::get().stuck(); });
    m.def("progress", [] {
        const Counters now = Executor::get().counters();
        return now.tasks + now.issued;
    });
    m.def("counters", [] {
        const Counters now = Executor::get().counters();
        return py::make_tuple(now.tasks, now.host_waits, now.digest);
    });
    m.def("log", [] { return Executor::get().log(); });
    m.def("forbid_host_waits", [](bool forbids) { Executor::get().forbid_host_waits(forbids); });
    m.def("know_avgpipe", &know_avgpipe);
    m.def("default_generator",
          [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
}
