// Runs checked work on a backend.
#pragma once

#include <span>

#include "elastic/work.h"
#include "torch_abi.h"

namespace avgpipe {

// `lost` is the counter of a check_finite call, else the placeholder; see new_counter.
void execute_on_cpu(Rule rule, std::span<const Work> works, const Tensor& lost);

// On the current stream of the device of `lost`, without waiting. Exists in CUDA builds only.
void execute_on_cuda(Rule rule, std::span<const Work> works, const Tensor& lost);

}  // namespace avgpipe
