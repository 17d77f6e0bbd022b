#include <stdexcept>
#include <string>
#include <vector>

#include "elastic/images.h"
#include "elastic/kernels.h"
#include "elastic/launch.h"
#include "library.h"

AVGPIPE_CUDA_KERNELS(AVGPIPE_DEFINE_KERNEL)

namespace avgpipe {
namespace {

#define AVGPIPE_ADDRESS(name, kernel, type, is_mixed) reinterpret_cast<const void*>(&avgpipe_##name),
const void* const kKernels[] = {AVGPIPE_CUDA_KERNELS(AVGPIPE_ADDRESS)};

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string("avgpipe: ") + what + ": " + cudaGetErrorString(status));
    }
}

struct Device {
    int processors = 0;
    bool has_image = false;
};

int attribute(cudaDeviceAttr name, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, device), "device attribute");
    return value;
}

std::vector<Device> read_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "number of devices");
    std::vector<Device> devices;
    for (int device = 0; device < count; ++device) {
        const bool has_image = images_serve(avgpipe_library()->cuda_arch_list,
                                            attribute(cudaDevAttrComputeCapabilityMajor, device),
                                            attribute(cudaDevAttrComputeCapabilityMinor, device));
        devices.push_back({attribute(cudaDevAttrMultiProcessorCount, device), has_image});
    }
    return devices;
}

// Read once, as a launch is to cost nothing else.
const Device& device_at(int index) {
    static const std::vector<Device> devices = read_devices();
    return devices.at(index);
}

}  // namespace

bool has_image(int device) {
    return device_at(device).has_image;
}

void launch_kernel(const Launch& launch, int device, void* stream) {
    // The CUDA runtime linked here is not torch's: it needs its own cudaSetDevice, which is left out where it
    // would change nothing but a green context.
    int current = -1;
    check(cudaGetDevice(&current), "current device");
    if (current != device) check(cudaSetDevice(device), "choice of the device");
    const dim3 grid(
        static_cast<unsigned int>(grid_size(launch.block.head.chunks, device_at(device).processors)));
    void* parameters[] = {const_cast<LaunchBlock*>(&launch.block)};
    check(cudaLaunchKernel(kKernels[launch.kernel], grid, dim3(kThreads), parameters, 0,
                           static_cast<cudaStream_t>(stream)),
          "launch of a kernel");
}

}  // namespace avgpipe
