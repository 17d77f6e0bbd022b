// Who launches the CUDA kernels: those compiled in, or a function that avgpipe_ext sets through ctypes, which
// compiles the same source at run time. Free of torch.
#pragma once

#include "elastic/launch.h"

namespace avgpipe {

// Whether CUDA tensors can be served; if not, operators refuse them.
bool has_cuda_kernels();

// Hands the launch to the function that was set, which finds torch's current stream itself; false if none was
// set. Throws std::runtime_error with the function's message when it fails.
bool launch_outside(const Launch& launch, int32_t device);

}  // namespace avgpipe
