// CUDA launcher. Free of torch and of CUDA headers.
#pragma once

#include "elastic/work.h"

namespace avgpipe {

// Enqueues the update on `stream` (a cudaStream_t) of device `device`; never waits. `lost`, in device memory,
// is added the number of lost elements (see advance_checked); it may be null without check_finite. Throws
// std::runtime_error when the launch is refused.
void launch_elastic(Rule rule, const Work& work, unsigned long long* lost, int device, void* stream);

}  // namespace avgpipe
