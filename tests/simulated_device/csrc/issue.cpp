#include "issue.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "arguments.h"
#include "executor.h"
#include "generator.h"
#include "memory.h"

namespace simulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

at::Tensor on_host(const at::Tensor& tensor) {
    // What the host holds it may change at once.
    return tensor.device().type() == kType ? alias_of(tensor) : tensor.clone();
}

c10::Device device_for(const c10::OperatorHandle& op, const Stack& arguments) {
    std::optional<c10::Device> found;
    visit(arguments, [&](const at::Tensor& tensor) {
        if (tensor.device().type() != kType) return;
        TORCH_CHECK(!found || *found == tensor.device(), toString(op.operator_name()), " got tensors of ",
                    *found, " and ", tensor.device());
        found = tensor.device();
    });
    for (const c10::IValue& value : arguments) {
        if (!found && value.isDevice() && value.toDevice().type() == kType) found = value.toDevice();
    }
    const c10::impl::VirtualGuardImpl guard(kType);
    return found && found->has_index() ? *found : guard.getDevice();
}

Stack results_of(const c10::OperatorHandle& op, const Stack& arguments, const Stack& metas,
                 c10::Device device) {
    const auto& schema = op.schema();
    Stack results;
    for (size_t r = 0; r < schema.returns().size(); ++r) {
        const c10::AliasInfo* const alias = schema.returns()[r].alias_info();
        if (alias == nullptr) {
            results.push_back(mapped(metas.at(r), [&](const at::Tensor& meta) {
                return empty_strided_on(device, meta.sizes(), meta.strides(), meta.scalar_type());
            }));
            continue;
        }
        size_t a = 0;
        const auto is_it = [&](const c10::Argument& argument) {
            return argument.alias_info() != nullptr && *argument.alias_info() == *alias;
        };
        while (!is_it(schema.arguments().at(a))) ++a;
        if (alias->isWrite()) {
            results.push_back(arguments[a]);
            continue;
        }
        const at::Tensor& base = arguments[a].toTensor();
        results.push_back(mapped(metas.at(r), [&](const at::Tensor& meta) {
            return base.as_strided(meta.sizes(), meta.strides(),
                                   base.storage_offset() + meta.storage_offset());
        }));
    }
    return results;
}

bool is_view(const c10::OperatorHandle& op) {
    for (const c10::Argument& result : op.schema().returns()) {
        if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
    }
    return false;
}

at::Tensor uploaded(const at::Tensor& made, c10::Device device) {
    at::Tensor there = empty_strided_on(device, made.sizes(), made.strides(), made.scalar_type());
    const c10::Stream stream = current_stream_of(device);
    const auto copy = [to = alias_of(there), made] { to.copy_(made); };
    Executor::get().enqueue(device.index(), stream.id(), {"upload", copy, {}, {}});
    return there;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
    issue(op, stack);
}

}  // namespace

c10::Stream current_stream_of(c10::Device device) {
    return c10::impl::VirtualGuardImpl(kType).getStream(device);
}

at::Tensor alias_of(const at::Tensor& tensor) {
    void* const data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
    const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
    return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_strided_on(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType dtype) {
    const c10::DeviceGuard guard(device);
    return at::detail::empty_strided_generic(sizes, strides, device_memory(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void issue(const c10::OperatorHandle& op, Stack* stack, const Shapes& shapes) {
    const Traits& traits = known_traits(op);
    if (traits.waits) Executor::get().require_host_waits();
    const size_t count = op.schema().arguments().size();
    const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    const c10::Device device = device_for(op, arguments);
    const c10::DeviceGuard guard(device);

    Stack results;
    std::vector<at::Tensor> outputs;  // where what the kernel makes goes; undefined where it is no new tensor
    if (!traits.waits) {
        results = results_of(op, arguments, shapes(op, arguments), device);
        if (is_view(op)) {
            for (c10::IValue& result : results) stack->push_back(std::move(result));
            return;
        }
        for (size_t r = 0; r < results.size(); ++r) {
            const bool is_new = op.schema().returns()[r].alias_info() == nullptr;
            for (const at::Tensor& tensor : tensors_in({results[r]}))
                outputs.push_back(is_new && tensor.defined() ? alias_of(tensor) : at::Tensor());
        }
    }
    Stack given = images(arguments, on_host);
    for (c10::IValue& value : given) {
        if (value.isDevice()) value = c10::Device(c10::DeviceType::CPU);
    }
    std::function<at::Generator()> draw;
    if (traits.generator >= 0) {
        const c10::IValue& chosen = arguments[traits.generator];
        draw = next_draw(chosen.isNone() ? default_generator(device.index()) : chosen.toGenerator());
    }
    const auto made = traits.waits ? std::make_shared<Stack>() : nullptr;
    const auto run = [op, given, draw, made, outputs, at = traits.generator] {
        Stack work = given;
        if (draw) work[at] = draw();
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &work);
        if (made) {
            *made = std::move(work);
            return;
        }
        const std::vector<at::Tensor> found = tensors_in(work);
        for (size_t n = 0; n < outputs.size(); ++n) {
            // Nobody wants what the CPU leaves out: gradients that are masked, a mean that evaluation does
            // not save.
            if (!outputs[n].defined() || !found.at(n).defined() || found[n].numel() == 0) continue;
            TORCH_CHECK(found.at(n).sizes() == outputs[n].sizes(), "the CPU's kernel made ", found[n].sizes(),
                        " of what was said to be ", outputs[n].sizes());
            outputs[n].copy_(found[n]);
        }
    };
    const c10::Stream stream = current_stream_of(device);
    Executor::get().load(device.index(), op.schema().name().c_str());
    poison_freed(stream);
    Executor::get().enqueue(device.index(), stream.id(), {op.schema().name().c_str(), run, {}, {}});
    if (made) {
        Executor::get().wait_for_stream(device.index(), stream.id());
        for (const c10::IValue& value : *made)
            results.push_back(
                mapped(value, [&](const at::Tensor& tensor) { return uploaded(tensor, device); }));
    }
    for (c10::IValue& result : results) stack->push_back(std::move(result));
}

void issue(const c10::OperatorHandle& op, Stack* stack) {
    issue(op, stack, torch_shapes);
}

}  // namespace simulated

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>());
}

// For these torch has both a kernel for the CPU and a composition for all other devices, which rounds
// otherwise.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward",
                             "native_channel_shuffle", "_stack", "_stack.out", "addr", "addr.out", "all.dims",
                             "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>());
}
