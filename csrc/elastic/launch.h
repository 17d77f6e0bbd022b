// Turns a job into launches of CUDA kernels. Free of torch and of CUDA.
#pragma once

#include <functional>

#include "elastic/block.h"

namespace avgpipe {

struct Launch {
    int kernel;                // its place in AVGPIPE_CUDA_KERNELS
    const LaunchBlock& block;  // the kernel's parameter; valid during the call that passes it on
};

// Passes on the launches that do the job, none for a job without elements. `lost`, in device memory, is the
// counter that the kernels add the number of lost elements to (see advance_checked); it may be null without
// check_finite. Throws std::invalid_argument, before the first launch, if the replicas of a tensor do not fit
// into a block.
void for_each_launch(const Job& job, unsigned long long* lost, const std::function<void(const Launch&)>& run);

// A kernel's arguments of AVGPIPE_DEFINE_KERNEL, as text: "adam_mixed, kAdam, float, true".
const char* kernel_definition(int kernel);
int kernel_count();

// Blocks of threads of a launch: several times what a device with `processors` multiprocessors holds at once,
// so that little of it is idle while the last ones end, yet each block amortises its preparations over
// several chunks if there are many.
int64_t grid_size(int64_t chunks, int64_t processors);

// Whether the kernels of this build run on the device. Only in a build with nvcc, as the next one.
bool has_image(int device);

// Enqueues the launch on `stream` (a cudaStream_t) of device `device`; never waits. Throws std::runtime_error
// if the launch fails.
void launch_kernel(const Launch& launch, int device, void* stream);

}  // namespace avgpipe
