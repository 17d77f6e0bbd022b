#include "issue.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

#include "executor.h"
#include "generator.h"
#include "memory.h"

namespace simulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// ---- what is known of an operator -------------------------------------------------------------------
struct Traits {
    bool waits;           // its results are for the host, or their shapes depend on values
    bool makes_tensors;   // that are none of its arguments
    bool writes_outputs;  // into arguments, whose sizes may have to change
    int generator = -1;   // the argument
};

bool is_generator(const c10::TypePtr& type) {
    if (const auto* const optional = type->castRaw<c10::OptionalType>())
        return is_generator(optional->getElementType());
    return type->kind() == c10::TypeKind::GeneratorType;
}

Traits traits_of(const c10::OperatorHandle& op) {
    // Index tensors of bools have made their results by then, and others do not need to be looked at.
    static const std::set<std::string> shaped{"aten::index.Tensor_out", "aten::_index_put_impl_",
                                              "aten::index_put_"};
    const auto& schema = op.schema();
    const bool is_shaped = shaped.count(toString(op.operator_name())) != 0;
    Traits traits{};
    traits.waits = !is_shaped && (op.hasTag(at::Tag::dynamic_output_shape) ||
                                  op.hasTag(at::Tag::data_dependent_output));
    for (const c10::Argument& result : schema.returns()) {
        const bool is_tensor = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                               result.type()->isSubtypeOf(*c10::ListType::ofTensors());
        traits.waits |= !is_tensor;
        traits.makes_tensors |= result.alias_info() == nullptr || !result.alias_info()->isWrite();
    }
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const c10::Argument& argument = schema.arguments()[i];
        const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        traits.writes_outputs |= !is_shaped && is_written && argument.kwarg_only();
        if (is_generator(argument.type())) traits.generator = static_cast<int>(i);
    }
    return traits;
}

const Traits& known_traits(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const void*, Traits> known;
    const void* const key = &op.schema();
    const auto found = known.find(key);
    return found != known.end() ? found->second : known.emplace(key, traits_of(op)).first->second;
}

// ---- tensors in arguments ---------------------------------------------------------------------------
template <class Function>
c10::IValue mapped(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) return value.toTensor().defined() ? function(value.toTensor()) : value.toTensor();
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
            list.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
        return list;
    }
    return value;
}

template <class Function>
void visit(const Stack& values, const Function& function) {
    for (const c10::IValue& value : values) {
        mapped(value, [&](const at::Tensor& tensor) {
            function(tensor);
            return tensor;
        });
    }
}

std::vector<at::Tensor> tensors_in(const Stack& values) {
    std::vector<at::Tensor> found;
    for (const c10::IValue& value : values) {
        if (value.isTensor()) found.push_back(value.toTensor());
        if (value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor);
        }
    }
    return found;
}

at::Tensor like(const at::Tensor& tensor, at::Tensor made) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
}

// One image of each tensor: an operator may ask whether two arguments are the same.
template <class Function>
Stack images(const Stack& arguments, const Function& make) {
    std::unordered_map<const void*, at::Tensor> known;
    Stack found;
    for (const c10::IValue& argument : arguments) {
        found.push_back(mapped(argument, [&](const at::Tensor& tensor) {
            at::Tensor& image = known[tensor.unsafeGetTensorImpl()];
            if (!image.defined()) image = like(tensor, make(tensor));
            return image;
        }));
    }
    return found;
}

at::Tensor on_host(const at::Tensor& tensor) {
    // What the host holds it may change at once.
    return tensor.device().type() == kType ? alias_of(tensor) : tensor.clone();
}

Stack meta_arguments(const Stack& arguments) {
    Stack found = images(arguments, [](const at::Tensor& tensor) {
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;  // a plain number to Python's kernels
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    });
    for (c10::IValue& value : found) {
        if (value.isDevice()) value = c10::Device(c10::DeviceType::Meta);
        if (value.isGenerator()) value = c10::IValue();
    }
    return found;
}

c10::Device device_for(const c10::OperatorHandle& op, const Stack& arguments) {
    std::optional<c10::Device> found;
    visit(arguments, [&](const at::Tensor& tensor) {
        if (tensor.device().type() != kType) return;
        TORCH_CHECK(!found || *found == tensor.device(), toString(op.operator_name()), " got tensors of ", *found,
                    " and ", tensor.device());
        found = tensor.device();
    });
    for (const c10::IValue& value : arguments) {
        if (!found && value.isDevice() && value.toDevice().type() == kType) found = value.toDevice();
    }
    const c10::impl::VirtualGuardImpl guard(kType);
    return found && found->has_index() ? *found : guard.getDevice();
}

// ---- results ----------------------------------------------------------------------------------------
void resize_outputs(const c10::OperatorHandle& op, const Stack& arguments, const Stack& metas) {
    for (size_t i = 0; i < arguments.size(); ++i) {
        const c10::Argument& argument = op.schema().arguments()[i];
        if (!argument.kwarg_only() || argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
        const auto outs = tensors_in({arguments[i]}), shapes = tensors_in({metas[i]});
        for (size_t n = 0; n < outs.size(); ++n) {
            if (outs[n].sizes() != shapes[n].sizes()) resize(outs[n], shapes[n].sizes(), shapes[n].strides());
        }
    }
}

// The results of a call: written arguments, views of arguments, and new tensors on the device.
Stack results_of(const c10::OperatorHandle& op, const Stack& arguments, const Stack& metas, c10::Device device) {
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
            return base.as_strided(meta.sizes(), meta.strides(), base.storage_offset() + meta.storage_offset());
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

// All that a meta kernel sees of its arguments, as bytes; nothing if there are other things among them.
class ShapeKey {
  public:
    ShapeKey(const c10::OperatorHandle& op, const Stack& arguments) {
        add(&op.schema());
        for (const c10::IValue& value : arguments) add_value(value);
    }

    const std::string* bytes() const { return is_whole_ ? &bytes_ : nullptr; }

  private:
    template <class Value>
    void add(Value value) {
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }

    void add_all(at::IntArrayRef values) {
        add(values.size());
        for (const int64_t value : values) add(value);
    }

    void add_tensor(const at::Tensor& tensor) {
        add(tensor.defined());
        if (!tensor.defined()) return;
        add(tensor.scalar_type());
        add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        add_all(tensor.sizes());
        add_all(tensor.strides());
    }

    void add_value(const c10::IValue& value) {
        bytes_ += value.tagKind();
        if (value.isTensor()) {
            add_tensor(value.toTensor());
        } else if (value.isTensorList()) {
            const std::vector<at::Tensor> tensors = value.toTensorVector();
            add(tensors.size());
            for (const at::Tensor& tensor : tensors) add_tensor(tensor);
        } else if (value.isInt()) {
            add(value.toInt());
        } else if (value.isDouble()) {
            add(value.toDouble());
        } else if (value.isBool()) {
            add(value.toBool());
        } else if (value.isIntList()) {
            add_all(value.toIntVector());
        } else if (value.isBoolList()) {
            for (const bool flag : value.toBoolList()) add(flag);
        } else {
            is_whole_ &= value.isNone() || value.isDevice() || value.isGenerator();
        }
    }

    std::string bytes_;
    bool is_whole_ = true;
};

struct Known {
    Stack arguments, results;  // meta tensors
};

Stack torch_shapes(const c10::OperatorHandle& op, const Stack& arguments) {
    const Traits& traits = known_traits(op);
    if (!traits.makes_tensors && !traits.writes_outputs) return {};
    // Meta kernels take most of the time of an issue; many are Python.
    thread_local auto* const cache = new std::unordered_map<std::string, Known>();
    const ShapeKey key(op, arguments);
    Known made;
    const Known* known = &made;
    const auto found = key.bytes() != nullptr ? cache->find(*key.bytes()) : cache->end();
    if (found != cache->end()) {
        known = &found->second;
    } else {
        made.arguments = made.results = meta_arguments(arguments);
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &made.results);
        if (key.bytes() != nullptr) known = &(cache->emplace(*key.bytes(), made).first->second);
    }
    if (traits.writes_outputs) resize_outputs(op, arguments, known->arguments);
    return known->results;
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
            // Nobody wants what the CPU leaves out: gradients that are masked, a mean that evaluation does not save.
            if (!outputs[n].defined() || !found.at(n).defined() || found[n].numel() == 0) continue;
            TORCH_CHECK(found.at(n).sizes() == outputs[n].sizes(), "the CPU's kernel made ", found[n].sizes(),
                        " of what was said to be ", outputs[n].sizes());
            outputs[n].copy_(found[n]);
        }
    };
    const c10::Stream stream = current_stream_of(device);
    poison_freed(stream);
    Executor::get().enqueue(device.index(), stream.id(), {op.schema().name().c_str(), run, {}, {}});
    if (made) {
        Executor::get().wait_for_stream(device.index(), stream.id());
        for (const c10::IValue& value : *made)
            results.push_back(mapped(value, [&](const at::Tensor& tensor) { return uploaded(tensor, device); }));
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

// For these torch has both a kernel for the CPU and a composition for all other devices, which rounds otherwise.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward",
                             "native_channel_shuffle", "_stack", "_stack.out", "addr", "addr.out", "all.dims",
                             "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::fallback>());
}
