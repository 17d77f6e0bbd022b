// Runs a checked job on the device of its tensors.
#pragma once

#include "checks.h"

namespace avgpipe {

// Refuses a tensor on a device that has no kernels.
void require_kernel(const CallSite& site, const Tensor& tensor);

// On the device of a tensor: on torch's threads, or on the device's current stream without waiting. `lost` is
// an int64 there, which the number of lost elements is added to, or null.
void execute(const Job& job, const View& where, void* lost = nullptr);

}  // namespace avgpipe
