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

// Launches the kernel of a definition (see kernel_definition) on a device, with `block` as its only
// parameter, by value; the block is the caller's again after the call. Returns 0, or another number after
// writing a text of at most message_bytes, with its final zero, to `message`.
using OutsideLauncher = int32_t (*)(const char* definition, const void* block, int64_t block_bytes,
                                    int64_t chunks, int32_t device, char* message, int64_t message_bytes);

}  // namespace avgpipe

#define AVGPIPE_EXPORT extern "C" __attribute__((visibility("default")))

// Called by avgpipe_ext through ctypes. Null for none again.
AVGPIPE_EXPORT void avgpipe_set_launcher(avgpipe::OutsideLauncher launcher);

// The headers that the kernels consist of, one after another: a source for NVRTC, to which a line
// AVGPIPE_DEFINE_KERNEL(<definition>) adds the kernel avgpipe_<first word of the definition>.
AVGPIPE_EXPORT const char* avgpipe_kernel_source();

// One definition a line.
AVGPIPE_EXPORT const char* avgpipe_kernel_definitions();

AVGPIPE_EXPORT int32_t avgpipe_kernel_threads();  // of a block of threads
AVGPIPE_EXPORT int64_t avgpipe_grid_size(int64_t chunks, int64_t processors);
