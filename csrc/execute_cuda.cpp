// Compiled in CUDA builds only. Names no CUDA symbol of libtorch at link time, so that the library also loads
// beside a CPU-only torch.
#include <dlfcn.h>

#include <stdexcept>

#include "elastic/cuda.h"
#include "execute.h"

namespace avgpipe {
namespace {

using CurrentStream = decltype(&aoti_torch_get_current_cuda_stream);

// libtorch_cuda is loaded privately by the Python module, so the global scope does not have it: ask for the
// loaded library by its name. The global scope serves a statically linked torch.
CurrentStream find_current_stream() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(symbol);
}

void* current_stream(int32_t device) {
    static const CurrentStream get = find_current_stream();
    if (get == nullptr) {
        throw std::runtime_error("avgpipe: this torch has no CUDA streams; install a CUDA build of torch");
    }
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(get(device, &stream));
    return stream;
}

}  // namespace

void execute_on_cuda(Rule rule, std::span<const Work> works, const Tensor& lost) {
    const int32_t device = lost.get_device_index();
    const DeviceGuard guard(device);
    void* stream = current_stream(device);
    auto* counter = lost.numel() == 1 ? static_cast<unsigned long long*>(lost.data_ptr()) : nullptr;
    for (const Work& work : works) launch_elastic(rule, work, counter, device, stream);
}

}  // namespace avgpipe
