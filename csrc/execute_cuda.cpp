// Names no CUDA symbol of libtorch at link time, so that the library also loads beside a CPU-only torch.
#include "execute.h"
#include "library.h"

#ifdef AVGPIPE_WITH_CUDA
#include <dlfcn.h>

#include <stdexcept>

#include "elastic/cuda.h"
#endif

namespace avgpipe {
namespace {

#ifdef AVGPIPE_WITH_CUDA
using CurrentStream = decltype(&aoti_torch_get_current_cuda_stream);

// libtorch_cuda is loaded privately by the Python module, so the global scope does not have it: ask for the
// loaded library by its name. The global scope serves a statically linked torch.
CurrentStream find_current_stream() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(symbol);
}

void launch_inside(const Launch& launch, int32_t device) {
    static const CurrentStream get = find_current_stream();
    if (get == nullptr) {
        throw std::runtime_error("avgpipe: this torch has no CUDA streams; install a CUDA build of torch");
    }
    const DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(get(device, &stream));
    launch_kernel(launch, device, stream);
}
#else
[[noreturn]] void launch_inside(const Launch&, int32_t) {
    throw std::logic_error("a CUDA operator without kernels; see has_cuda_kernels");
}
#endif

}  // namespace

void execute_on_cuda(const Job& job, const Tensor& lost) {
    const int32_t device = lost.get_device_index();
    auto* counter = lost.numel() == 1 ? static_cast<unsigned long long*>(lost.data_ptr()) : nullptr;
    for_each_launch(job, counter, [device](const Launch& launch) {
        if (!launch_outside(launch, device)) launch_inside(launch, device);
    });
}

}  // namespace avgpipe
