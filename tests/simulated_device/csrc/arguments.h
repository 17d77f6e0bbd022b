// The tensors among an operator's arguments and results, and what an operator does with them.
#pragma once

#include <ATen/core/ivalue.h>

#include <unordered_map>

#include "issue.h"

namespace simulated {

struct Traits {
    bool waits;           // its results are for the host, or their shapes depend on values
    bool makes_tensors;   // that are none of its arguments
    bool writes_outputs;  // into arguments, whose sizes may have to change
    int generator = -1;   // the argument
};

const Traits& known_traits(const c10::OperatorHandle& op);

// The new tensors of an operator as torch's meta kernels make them. Arguments that are written get the sizes
// they need.
Stack torch_shapes(const c10::OperatorHandle& op, const Stack& arguments);

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

inline std::vector<at::Tensor> tensors_in(const Stack& values) {
    std::vector<at::Tensor> found;
    for (const c10::IValue& value : values) {
        if (value.isTensor()) found.push_back(value.toTensor());
        if (value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor);
        }
    }
    return found;
}

inline at::Tensor like(const at::Tensor& tensor, at::Tensor made) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        made.unsafeGetTensorImpl()->set_wrapped_number(true);
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

}  // namespace simulated
