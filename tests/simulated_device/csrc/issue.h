// Operators are issued: their outputs are allocated now, and the CPU's kernel runs when their stream comes to
// it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>

#include <functional>

namespace simulated {

using Stack = torch::jit::Stack;

// Returns an operator's new tensors as meta tensors, given its arguments.
using Shapes = std::function<Stack(const c10::OperatorHandle&, const Stack&)>;

// Replaces the arguments on the stack by the results. `shapes`: by default, torch's meta kernels.
void issue(const c10::OperatorHandle& op, Stack* stack, const Shapes& shapes);
void issue(const c10::OperatorHandle& op, Stack* stack);

// A CPU tensor on the memory of another tensor, which it does not keep alive: whoever frees memory that is
// still read shall see it.
at::Tensor alias_of(const at::Tensor& tensor);

at::Tensor empty_strided_on(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType dtype);

// Gives a tensor other sizes, and more memory if it has too little.
void resize(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

c10::Stream current_stream_of(c10::Device device);

// With the kernels of avgpipe's operators, or as a device that these do not know.
void know_avgpipe(bool knows);

}  // namespace simulated
