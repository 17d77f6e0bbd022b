// What Python may ask of the simulation.
#include <torch/csrc/utils/pybind.h>

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

void reset(const std::string& policy, uint64_t seed, bool keeps_log) {
    Executor::get().reset(policy_of(policy), seed, keeps_log);
    reset_memory();
    reset_generators();
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    namespace py = pybind11;
    using namespace simulated;
    m.def("reset", &reset);
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
