// Kernels of several devices that end together, as those of NCCL: each spins until the others run.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace simulated {

// Issues a member's part of a collective on the current stream of the tensor's device. All members give it
// the same name, which no other one of a simulation has. `sums`: all tensors become their sum, added in the
// order of members; otherwise that of member 1 becomes that of member 0.
void meet(const std::string& name, size_t member, size_t size, const at::Tensor& tensor, bool sums);

// Forgets those that are not whole.
void reset_collectives();

}  // namespace simulated
