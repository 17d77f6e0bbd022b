// Every operator's schema in one block, and which function serves which dispatch key.
#include "operators.h"

// Options that several schemas share.
#define AVGPIPE_SCALING "Tensor? grad_scale=None, Tensor? found_inf=None, bool check_finite=False) -> Tensor"
#define AVGPIPE_SGD                                                                                        \
    "float alpha, int staleness, *, float lr, float mu=0.0, float dampening=0.0, float weight_decay=0.0, " \
    "bool nesterov=False, bool maximize=False, bool first_step=False, str rule=\"avgpipe\", "              \
    "bool accumulate=True, " AVGPIPE_SCALING
#define AVGPIPE_ADAMW                                                                            \
    "float alpha, int staleness, *, Tensor step, float lr, float beta1=0.9, float beta2=0.999, " \
    "float eps=1e-08, float weight_decay=0.01, bool decoupled=True, bool maximize=False, "       \
    "str rule=\"avgpipe\", bool accumulate=True, " AVGPIPE_SCALING
#define AVGPIPE_ROUND                                                                                   \
    "float alpha, *, str optimizer, float lr, Tensor step, float mu=0.0, float dampening=0.0, "         \
    "bool nesterov=False, bool first_step=False, float beta1=0.9, float beta2=0.999, float eps=1e-08, " \
    "float weight_decay=0.0, bool maximize=False, " AVGPIPE_SCALING

AVGPIPE_SCHEMAS(m) {
    m.def("elastic_pull_(Tensor(a!) x, Tensor z, float alpha, *, bool check_finite=False) -> Tensor");
    m.def(
        "elastic_pull_.list(Tensor(a!)[] x, Tensor[] z, float alpha, *, bool check_finite=False) -> Tensor");
    m.def(
        "elastic_step_(Tensor(a!) x, Tensor x_before, Tensor z, Tensor(b!) update, float alpha, "
        "int staleness, *, bool accumulate=True, bool check_finite=False) -> Tensor");
    m.def(
        "elastic_step_.list(Tensor(a!)[] x, Tensor[] x_before, Tensor[] z, Tensor(b!)[] update, float alpha, "
        "int staleness, *, bool accumulate=True, bool check_finite=False) -> Tensor");
    m.def(
        "easgd_step_(Tensor(a!) x, Tensor z, Tensor(b!) update, float alpha, *, bool accumulate=True, "
        "bool check_finite=False) -> Tensor");
    m.def(
        "easgd_step_.list(Tensor(a!)[] x, Tensor[] z, Tensor(b!)[] update, float alpha, *, "
        "bool accumulate=True, bool check_finite=False) -> Tensor");
    m.def("elastic_sgd_(Tensor(a!) x, Tensor grad, Tensor(b!)? momentum, Tensor z, Tensor(c!) update, "  //
          AVGPIPE_SGD);
    m.def(
        "elastic_sgd_.list(Tensor(a!)[] x, Tensor[] grad, Tensor(b!)[] momentum, Tensor[] z, "
        "Tensor(c!)[] update, " AVGPIPE_SGD);
    m.def(
        "elastic_adamw_(Tensor(a!) x, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor z, "
        "Tensor(d!) update, " AVGPIPE_ADAMW);
    m.def(
        "elastic_adamw_.list(Tensor(a!)[] x, Tensor[] grad, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
        "Tensor[] z, Tensor(d!)[] update, " AVGPIPE_ADAMW);
    m.def("elastic_round_(Tensor(a!)[] xs, Tensor[] grads, Tensor(b!)[] states, Tensor(c!) z, "  //
          AVGPIPE_ROUND);
    m.def("elastic_round_.list(Tensor(a!)[] xs, Tensor[] grads, Tensor(b!)[] states, Tensor(c!)[] z, "  //
          AVGPIPE_ROUND);
    m.def(
        "reference_apply_(Tensor(a!) z, Tensor(b!) update, float scale, *, bool zero=True, "
        "bool check_finite=False) -> Tensor");
    m.def(
        "reference_apply_.list(Tensor(a!)[] z, Tensor(b!)[] update, float scale, *, bool zero=True, "
        "bool check_finite=False) -> Tensor");
    m.def("pack(Tensor[] tensors, *, ScalarType? dtype=None) -> Tensor");
    m.def("pack.out(Tensor[] tensors, *, Tensor(a!) out) -> ()");
    m.def("unpack_(Tensor buffer, Tensor(a!)[] tensors) -> ()");
}

namespace avgpipe {
namespace {

template <Backend kBackend, class T, class Library>
void implement(Library& m, const std::string& overload) {
    const auto name = [&](const char* base) { return base + overload; };
    m.impl(name("elastic_pull_").c_str(), AVGPIPE_KERNEL((&elastic_pull<kBackend, T>)));
    m.impl(name("elastic_step_").c_str(), AVGPIPE_KERNEL((&elastic_step<kBackend, T>)));
    m.impl(name("easgd_step_").c_str(), AVGPIPE_KERNEL((&easgd_step<kBackend, T>)));
    m.impl(name("elastic_sgd_").c_str(), AVGPIPE_KERNEL((&elastic_sgd<kBackend, T>)));
    m.impl(name("elastic_adamw_").c_str(), AVGPIPE_KERNEL((&elastic_adamw<kBackend, T>)));
    m.impl(name("elastic_round_").c_str(), AVGPIPE_KERNEL((&elastic_round<kBackend, T>)));
    m.impl(name("reference_apply_").c_str(), AVGPIPE_KERNEL((&reference_apply<kBackend, T>)));
}

template <Backend kBackend, class Library>
void implement_all(Library& m) {
    implement<kBackend, Tensor>(m, "");
    implement<kBackend, Tensors>(m, ".list");
    m.impl("pack", AVGPIPE_KERNEL(&pack<kBackend>));
    m.impl("pack.out", AVGPIPE_KERNEL(&pack_out<kBackend>));
    m.impl("unpack_", AVGPIPE_KERNEL(&unpack<kBackend>));
}

}  // namespace
}  // namespace avgpipe

AVGPIPE_KERNELS(CPU, m) {
    avgpipe::implement_all<avgpipe::Backend::kCpu>(m);
}

#ifdef AVGPIPE_WITH_CUDA
AVGPIPE_KERNELS(CUDA, m) {
    avgpipe::implement_all<avgpipe::Backend::kCuda>(m);
}
#endif

// Called for devices without a kernel and for empty lists, which have no device.
AVGPIPE_KERNELS(CompositeExplicitAutograd, m) {
    avgpipe::implement_all<avgpipe::Backend::kOther>(m);
}
