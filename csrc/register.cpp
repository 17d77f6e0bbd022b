// Every operator's schema in one block, and which function serves which dispatch key.
#include "operators.h"

AVGPIPE_SCHEMAS(m) {
    m.def("elastic_pull_(Tensor(a!) x, Tensor z, float alpha, *, bool check_finite=False) -> Tensor");
    m.def(
        "elastic_pull_.list(Tensor(a!)[] x, Tensor[] z, float alpha, *, bool check_finite=False) -> Tensor");
    m.def(
        "elastic_step_(Tensor(a!) x, Tensor x_before, Tensor z, Tensor(b!) update, float alpha, int "
        "staleness, *, "
        "bool check_finite=False) -> Tensor");
    m.def(
        "elastic_step_.list(Tensor(a!)[] x, Tensor[] x_before, Tensor[] z, Tensor(b!)[] update, float alpha, "
        "int staleness, *, bool check_finite=False) -> Tensor");
    m.def(
        "easgd_step_(Tensor(a!) x, Tensor z, Tensor(b!) update, float alpha, *, bool check_finite=False) -> "
        "Tensor");
    m.def(
        "easgd_step_.list(Tensor(a!)[] x, Tensor[] z, Tensor(b!)[] update, float alpha, *, "
        "bool check_finite=False) -> Tensor");
    m.def(
        "reference_apply_(Tensor(a!) z, Tensor(b!) update, float scale, *, bool check_finite=False) -> "
        "Tensor");
    m.def(
        "reference_apply_.list(Tensor(a!)[] z, Tensor(b!)[] update, float scale, *, "
        "bool check_finite=False) -> Tensor");
}

namespace avgpipe {
namespace {

template <Backend kBackend, class Library>
void implement(Library& m) {
    m.impl("elastic_pull_", AVGPIPE_KERNEL(&elastic_pull<kBackend>));
    m.impl("elastic_pull_.list", AVGPIPE_KERNEL(&elastic_pull_list<kBackend>));
    m.impl("elastic_step_", AVGPIPE_KERNEL(&elastic_step<kBackend>));
    m.impl("elastic_step_.list", AVGPIPE_KERNEL(&elastic_step_list<kBackend>));
    m.impl("easgd_step_", AVGPIPE_KERNEL(&easgd_step<kBackend>));
    m.impl("easgd_step_.list", AVGPIPE_KERNEL(&easgd_step_list<kBackend>));
    m.impl("reference_apply_", AVGPIPE_KERNEL(&reference_apply<kBackend>));
    m.impl("reference_apply_.list", AVGPIPE_KERNEL(&reference_apply_list<kBackend>));
}

}  // namespace
}  // namespace avgpipe

AVGPIPE_KERNELS(CPU, m) {
    avgpipe::implement<avgpipe::Backend::kCpu>(m);
}

#ifdef AVGPIPE_WITH_CUDA
AVGPIPE_KERNELS(CUDA, m) {
    avgpipe::implement<avgpipe::Backend::kCuda>(m);
}
#endif

// Called for devices without a kernel and for empty lists, which have no device.
AVGPIPE_KERNELS(CompositeExplicitAutograd, m) {
    avgpipe::implement<avgpipe::Backend::kOther>(m);
}
