// Runs a checked job where its tensors are.
#pragma once

#include "checks.h"

namespace avgpipe {

// Refuses a tensor on a device that has no kernels.
void require_kernel(const CallSite& site, const Tensor& tensor);

// On the device of `lost`: on torch's threads, or on the device's current stream without waiting. `lost` is
// the counter of a check_finite call, else the placeholder; see new_counter.
void execute(const Job& job, const Tensor& lost);

}  // namespace avgpipe
