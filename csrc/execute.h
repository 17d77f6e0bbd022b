// Runs a checked job on a backend.
#pragma once

#include "elastic/work.h"
#include "torch_abi.h"

namespace avgpipe {

// `lost` is the counter of a check_finite call, else the placeholder; see new_counter.
void execute_on_cpu(Job job, const Tensor& lost);

// On the current stream of the device of `lost`, without waiting. Only if has_cuda_kernels (see library.h).
void execute_on_cuda(const Job& job, const Tensor& lost);

}  // namespace avgpipe
