// The parts of libavgpipe.so besides its operators: its build information, and the launcher of CUDA kernels
// if none are built in. Free of torch.
#pragma once

#include "elastic/launch.h"

namespace avgpipe {

// Launches on torch's current stream of the device, or throws std::runtime_error. The block may be reused
// after the call.
using Launcher = void (*)(const Launch& launch, int32_t device);

// The function to pass a device's launches to, or null: that which was set, if the device has no image in
// this library, or if it was set for all devices.
Launcher outside_launcher(bool has_image);

// Lists are separated by commas.
struct Library {
    const char* version;         // of avgpipe
    const char* torch;           // built against
    const char* cuda_arch_list;  // of the kernels compiled in
    const char*
        cpu_features;  // instruction sets, among those that kernels are built for, that this processor has
    const char* cpu_path;                                   // that of the CPU kernels in use
    void (*set_launcher)(Launcher launcher, bool for_all);  // null for none again
};

}  // namespace avgpipe

// Found by its name in the library that torch has loaded: see bindings.cpp.
extern "C" __attribute__((visibility("default"))) const avgpipe::Library* avgpipe_library();
