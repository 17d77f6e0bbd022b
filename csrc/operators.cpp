#include "operators.h"

#include "checks.h"
#include "execute.h"

namespace avgpipe {
namespace {

// No kernel exists for this device, or there is no tensor to tell the device.
Tensor run_elsewhere(const CallSite& site, const Tensors& first, bool check_finite) {
    if (first.empty()) return check_finite ? new_counter() : new_placeholder();
    if (!is_strided(first.front())) refuse(site, "a sparse tensor was passed; pass dense tensors");
    const View view = view_of(first.front());
    const bool is_cuda = view.device_type == aoti_torch_device_type_cuda();
    refuse(site, text("no kernel for ", device_name(view.device_type, view.device_index),
                      is_cuda ? ": built without CUDA; rebuild with AVGPIPE_CUDA=1"
                              : "; move the tensors to cpu or cuda"));
}

// Checks everything, then runs. `alpha` is the rule's factor, called `factor_name` in messages.
template <Backend kBackend>
Tensor run(const CallSite& site, Rule rule, std::span<const Argument> arguments, Mixing mixing,
           const char* factor_name, double alpha, bool check_finite) {
    check_finite_number(site, factor_name, alpha);
    std::vector<Work> works = checked_work(site, arguments, mixing);
    const Tensors& first = *arguments.front().tensors;
    if (kBackend == Backend::kOther || first.empty()) return run_elsewhere(site, first, check_finite);
    for (Work& work : works) {
        work.alpha = alpha;
        work.check_finite = check_finite;
    }
    Tensor lost = check_finite ? new_counter(first.front()) : new_placeholder(first.front());
    if constexpr (kBackend == Backend::kCpu) execute_on_cpu(rule, works, lost);
#ifdef AVGPIPE_WITH_CUDA
    if constexpr (kBackend == Backend::kCuda) execute_on_cuda(rule, works, lost);
#endif
    return lost;
}

template <Backend kBackend>
Tensor run_pull(const CallSite& site, const Tensors& x, const Tensors& z, double alpha, bool check_finite) {
    const Argument arguments[] = {{"x", &x, &Work::x, true}, {"z", &z, &Work::z, false}};
    return run<kBackend>(site, Rule::kPull, arguments, Mixing::kFloat32Master, "alpha", alpha, check_finite);
}

template <Backend kBackend>
Tensor run_step(const CallSite& site, const Tensors& x, const Tensors& x_before, const Tensors& z,
                const Tensors& update, double alpha, int64_t staleness, bool check_finite) {
    check_staleness(site, staleness);
    const Rule rule = staleness == 0 ? Rule::kStep : Rule::kStaleStep;
    const Argument arguments[] = {{"x", &x, &Work::x, true},
                                  {"x_before", &x_before, &Work::x_before, false},
                                  {"z", &z, &Work::z, false},
                                  {"update", &update, &Work::update, true}};
    return run<kBackend>(site, rule, arguments, Mixing::kFloat32Master, "alpha", alpha, check_finite);
}

template <Backend kBackend>
Tensor run_easgd(const CallSite& site, const Tensors& x, const Tensors& z, const Tensors& update,
                 double alpha, bool check_finite) {
    const Argument arguments[] = {
        {"x", &x, &Work::x, true}, {"z", &z, &Work::z, false}, {"update", &update, &Work::update, true}};
    return run<kBackend>(site, Rule::kEasgd, arguments, Mixing::kFloat32Master, "alpha", alpha, check_finite);
}

template <Backend kBackend>
Tensor run_apply(const CallSite& site, const Tensors& z, const Tensors& update, double scale,
                 bool check_finite) {
    const Argument arguments[] = {{"z", &z, &Work::z, true}, {"update", &update, &Work::update, true}};
    return run<kBackend>(site, Rule::kApply, arguments, Mixing::kEitherFloat32, "scale", scale, check_finite);
}

constexpr CallSite kPull{"elastic_pull_", false}, kPullList{"elastic_pull_", true};
constexpr CallSite kStep{"elastic_step_", false}, kStepList{"elastic_step_", true};
constexpr CallSite kEasgd{"easgd_step_", false}, kEasgdList{"easgd_step_", true};
constexpr CallSite kApply{"reference_apply_", false}, kApplyList{"reference_apply_", true};

}  // namespace

template <Backend kBackend>
Tensor elastic_pull_list(Tensors x, Tensors z, double alpha, bool check_finite) {
    return run_pull<kBackend>(kPullList, x, z, alpha, check_finite);
}

template <Backend kBackend>
Tensor elastic_pull(Tensor x, Tensor z, double alpha, bool check_finite) {
    return run_pull<kBackend>(kPull, {x}, {z}, alpha, check_finite);
}

template <Backend kBackend>
Tensor elastic_step_list(Tensors x, Tensors x_before, Tensors z, Tensors update, double alpha,
                         int64_t staleness, bool check_finite) {
    return run_step<kBackend>(kStepList, x, x_before, z, update, alpha, staleness, check_finite);
}

template <Backend kBackend>
Tensor elastic_step(Tensor x, Tensor x_before, Tensor z, Tensor update, double alpha, int64_t staleness,
                    bool check_finite) {
    return run_step<kBackend>(kStep, {x}, {x_before}, {z}, {update}, alpha, staleness, check_finite);
}

template <Backend kBackend>
Tensor easgd_step_list(Tensors x, Tensors z, Tensors update, double alpha, bool check_finite) {
    return run_easgd<kBackend>(kEasgdList, x, z, update, alpha, check_finite);
}

template <Backend kBackend>
Tensor easgd_step(Tensor x, Tensor z, Tensor update, double alpha, bool check_finite) {
    return run_easgd<kBackend>(kEasgd, {x}, {z}, {update}, alpha, check_finite);
}

template <Backend kBackend>
Tensor reference_apply_list(Tensors z, Tensors update, double scale, bool check_finite) {
    return run_apply<kBackend>(kApplyList, z, update, scale, check_finite);
}

template <Backend kBackend>
Tensor reference_apply(Tensor z, Tensor update, double scale, bool check_finite) {
    return run_apply<kBackend>(kApply, {z}, {update}, scale, check_finite);
}

#define AVGPIPE_INSTANTIATE(backend)                                                                       \
    template Tensor elastic_pull_list<backend>(Tensors, Tensors, double, bool);                            \
    template Tensor elastic_pull<backend>(Tensor, Tensor, double, bool);                                   \
    template Tensor elastic_step_list<backend>(Tensors, Tensors, Tensors, Tensors, double, int64_t, bool); \
    template Tensor elastic_step<backend>(Tensor, Tensor, Tensor, Tensor, double, int64_t, bool);          \
    template Tensor easgd_step_list<backend>(Tensors, Tensors, Tensors, double, bool);                     \
    template Tensor easgd_step<backend>(Tensor, Tensor, Tensor, double, bool);                             \
    template Tensor reference_apply_list<backend>(Tensors, Tensors, double, bool);                         \
    template Tensor reference_apply<backend>(Tensor, Tensor, double, bool)

AVGPIPE_INSTANTIATE(Backend::kCpu);
AVGPIPE_INSTANTIATE(Backend::kOther);
#ifdef AVGPIPE_WITH_CUDA
AVGPIPE_INSTANTIATE(Backend::kCuda);
#endif

}  // namespace avgpipe
