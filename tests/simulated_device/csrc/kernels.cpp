// The operators that are more than "issue the CPU's kernel": memory, views, copies, dropout, convolutions and
// avgpipe's.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "executor.h"
#include "issue.h"
#include "memory.h"

namespace simulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device whole(std::optional<c10::Device> device) {
    const c10::impl::VirtualGuardImpl guard(kType);
    return device && device->has_index() ? *device : guard.getDevice();
}

// ---- memory -----------------------------------------------------------------------------------------
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(whole(device));
    return at::detail::empty_generic(size, device_memory(),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
    return empty_strided_on(whole(device), size, stride, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
    const at::Tensor shape = at::empty(size, self.options().device(at::kMeta).memory_format(format));
    resize(self, shape.sizes(), shape.strides());
    return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    device_memory()->recordStream(self.storage().data_ptr(), stream);
}

// ---- copies -----------------------------------------------------------------------------------------
void enqueue_copy(c10::Stream stream, const at::Tensor& from, const at::Tensor& to) {
    const auto copy = [from, to] { to.copy_(from); };
    poison_freed(stream);
    Executor::get().enqueue(stream.device_index(), stream.id(), {"copy", copy, {}, {}});
}

// On the source's stream, between all that the target's stream holds and all that comes there.
void copy_between(const at::Tensor& from, const at::Tensor& to) {
    const c10::Stream source = current_stream_of(from.device()), target = current_stream_of(to.device());
    Executor& executor = Executor::get();
    const auto follow = [&](c10::Stream later, c10::Stream earlier) {
        if (later == earlier) return;
        executor.block(later.device_index(), later.id(),
                       executor.record(earlier.device_index(), earlier.id()));
    };
    follow(source, target);
    enqueue_copy(source, alias_of(from), alias_of(to));
    follow(target, source);
}

// Pageable memory of the host is read now, into a buffer, and pinned memory when the copy runs. As with CUDA,
// the host waits unless it is told not to, and in any case for what goes to pageable memory.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    if (to.numel() == 0) return to;
    const bool from_device = from.device().type() == kType, to_device = to.device().type() == kType;
    if (from_device && to_device) {
        copy_between(from, to);
        return to;
    }
    TORCH_CHECK(from_device ? to.is_cpu() : from.is_cpu(),
                "copies are between simulated devices and the CPU");
    const c10::Stream stream = current_stream_of(from_device ? from.device() : to.device());
    const at::Tensor& host = from_device ? to : from;
    const bool pinned = pinned_is_used_on(host.const_data_ptr(), stream);
    const bool staged = !from_device && !pinned, waits = !non_blocking || (from_device && !pinned);
    if (waits) Executor::get().require_host_waits();
    enqueue_copy(stream, staged ? from.clone() : alias_of(from), alias_of(to));
    if (waits) Executor::get().wait_for_stream(stream.device_index(), stream.id());
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

// ---- dropout ----------------------------------------------------------------------------------------
// With the CPU's arithmetic. Of other accelerators torch expects a fused operator, which rounds elsewhere.
at::Tensor dropout_noise(const at::Tensor& input, double p) {
    if (p == 1) return at::zeros({}, input.options());
    return at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

bool drops(const at::Tensor& input, double p, bool train) {
    TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
    return p != 0 && train && input.numel() != 0;
}

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
    return drops(input, p, train) ? input.mul(dropout_noise(input, p)) : input;
}

at::Tensor& dropout_(at::Tensor& input, double p, bool train) {
    return drops(input, p, train) ? input.mul_(dropout_noise(input, p)) : input;
}

// ---- convolutions -----------------------------------------------------------------------------------
// Of devices that torch does not know it expects operators of other names.
template <bool kBackward>
void convolution(const c10::OperatorHandle&, Stack* stack) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
        kBackward ? "aten::convolution_backward" : "aten::convolution", "");
    if constexpr (kBackward) {
        const size_t base = stack->size() - 10;
        const at::Tensor weight = (*stack)[base + 2].toTensor();
        const bool transposed = (*stack)[base + 6].toBool();
        const int64_t groups = (*stack)[base + 8].toInt();
        const c10::List<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
        stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(base) + 3, bias);
    }
    issue(op, stack);
}

// ---- avgpipe's operators ----------------------------------------------------------------------------
// What they return is made known by their names: a packed buffer, or a count of what is not finite.
Stack avgpipe_shapes(const c10::OperatorHandle& op, const Stack& arguments) {
    const auto& schema = op.schema();
    const auto meta = at::TensorOptions(at::kMeta);
    if (schema.returns().empty()) return {};
    if (schema.name() == "avgpipe::pack") {
        const std::vector<at::Tensor> tensors = arguments[0].toTensorVector();
        int64_t total = 0;
        for (const at::Tensor& tensor : tensors) total += tensor.numel();
        const at::ScalarType dtype =
            arguments[1].isNone() ? tensors.at(0).scalar_type() : arguments[1].toScalarType();
        return {at::empty({total}, meta.dtype(dtype))};
    }
    bool counts = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (schema.arguments()[i].name() == "check_finite") counts = arguments[i].toBool();
    }
    return {counts ? at::empty({}, meta.dtype(at::kLong)) : at::empty({0}, meta.dtype(at::kLong))};
}

void avgpipe_kernel(const c10::OperatorHandle& op, Stack* stack) {
    issue(op, stack, avgpipe_shapes);
}

}  // namespace

void resize(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
    c10::TensorImpl* const self = tensor.unsafeGetTensorImpl();
    self->set_sizes_and_strides(sizes, strides);
    const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, self->dtype().itemsize(),
                                                          static_cast<size_t>(self->storage_offset()));
    if (bytes > tensor.storage().nbytes()) {
        const c10::DeviceGuard guard(tensor.device());
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
    }
}

void know_avgpipe(bool knows) {
    static auto* const registered = new std::vector<c10::RegistrationHandleRAII>();
    registered->clear();
    if (!knows) return;
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        if (name.getNamespace() != "avgpipe") continue;
        registered->push_back(
            dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                    c10::KernelFunction::makeFromBoxedFunction<&avgpipe_kernel>(),
                                    std::nullopt, nullptr, "simulated device"));
    }
}

}  // namespace simulated

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    using namespace simulated;
    m.impl("empty.memory_format", &simulated::empty);
    m.impl("empty_strided", &simulated::empty_strided);
    m.impl("resize_", &simulated::resize_);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    m.impl("set_.source_Tensor", &at::native::set_tensor_);
    m.impl("record_stream", &simulated::record_stream);
    m.impl("_copy_from", &simulated::copy_from);
    m.impl("_copy_from_and_resize", &simulated::copy_from_and_resize);
    m.impl("dropout", &simulated::dropout);
    m.impl("dropout_", &simulated::dropout_);
    m.impl("convolution_overrideable",
           torch::CppFunction::makeFromBoxedFunction<&simulated::convolution<false>>());
    m.impl("convolution_backward_overrideable",
           torch::CppFunction::makeFromBoxedFunction<&simulated::convolution<true>>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("dropout", &simulated::dropout);
    m.impl("dropout_", &simulated::dropout_);
}
