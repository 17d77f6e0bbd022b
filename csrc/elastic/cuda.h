// CUDA launcher. Free of torch and of CUDA headers.
#pragma once

#include "elastic/launch.h"

namespace avgpipe {

// Enqueues the launch on `stream` (a cudaStream_t) of device `device`; never waits. Throws std::runtime_error
// when the launch is refused.
void launch_kernel(const Launch& launch, int device, void* stream);

}  // namespace avgpipe
