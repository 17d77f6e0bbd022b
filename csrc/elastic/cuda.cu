#include <stdexcept>
#include <string>

#include "elastic/kernels.h"
#include "elastic/launch.h"

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

}  // namespace

void launch_kernel(const Launch& launch, int device, void* stream) {
    // The CUDA runtime linked here is not torch's: it needs its own cudaSetDevice.
    check(cudaSetDevice(device), "choice of the device");
    int processors = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device attribute");
    const dim3 grid(static_cast<unsigned int>(grid_size(launch.block.head.chunks, processors)));
    void* parameters[] = {const_cast<LaunchBlock*>(&launch.block)};
    check(cudaLaunchKernel(kKernels[launch.kernel], grid, dim3(kThreads), parameters, 0,
                           static_cast<cudaStream_t>(stream)),
          "launch of a kernel");
}

}  // namespace avgpipe
