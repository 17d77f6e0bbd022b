// What an operator makes, known before it runs.
#include <ATen/ops/empty_strided.h>

#include <set>
#include <string>
#include <unordered_map>

#include "arguments.h"

namespace simulated {
namespace {

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
    traits.waits =
        !is_shaped && (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
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

Stack meta_arguments(const Stack& arguments) {
    Stack found = images(arguments, [](const at::Tensor& tensor) {
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            return tensor;  // a plain number to Python's kernels
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    });
    for (c10::IValue& value : found) {
        if (value.isDevice()) value = c10::Device(c10::DeviceType::Meta);
        if (value.isGenerator()) value = c10::IValue();
    }
    return found;
}

void resize_outputs(const c10::OperatorHandle& op, const Stack& arguments, const Stack& metas) {
    for (size_t i = 0; i < arguments.size(); ++i) {
        const c10::Argument& argument = op.schema().arguments()[i];
        if (!argument.kwarg_only() || argument.alias_info() == nullptr || !argument.alias_info()->isWrite())
            continue;
        const auto outs = tensors_in({arguments[i]}), shapes = tensors_in({metas[i]});
        for (size_t n = 0; n < outs.size(); ++n) {
            if (outs[n].sizes() != shapes[n].sizes()) resize(outs[n], shapes[n].sizes(), shapes[n].strides());
        }
    }
}

// The results of a call: written arguments, views of arguments, and new tensors on the device.

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

}  // namespace

const Traits& known_traits(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const void*, Traits> known;
    const void* const key = &op.schema();
    const auto found = known.find(key);
    return found != known.end() ? found->second : known.emplace(key, traits_of(op)).first->second;
}

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

}  // namespace simulated
