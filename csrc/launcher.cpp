#include "launcher.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "kernel_source.h"

#define AVGPIPE_EXPORT extern "C" __attribute__((visibility("default")))

namespace avgpipe {
namespace {

constexpr int64_t kMessageBytes = 4096;

// Launches the kernel of a definition (see kernel_definition) on a device, with `block` as its only
// parameter, by value; the block is the caller's again after the call. Returns 0, or another number after
// writing a text of at most message_bytes, with its final zero, to `message`.
using OutsideLauncher = int32_t (*)(const char* definition, const void* block, int64_t block_bytes,
                                    int64_t chunks, int32_t device, char* message, int64_t message_bytes);

std::atomic<OutsideLauncher> outside_launcher{nullptr};

}  // namespace

bool has_cuda_kernels() {
#ifdef AVGPIPE_WITH_CUDA
    return true;
#else
    return outside_launcher.load() != nullptr;
#endif
}

bool launch_outside(const Launch& launch, int32_t device) {
    const OutsideLauncher run = outside_launcher.load();
    if (run == nullptr) return false;
    char message[kMessageBytes] = "";
    if (run(kernel_definition(launch.kernel), &launch.block, sizeof launch.block, launch.block.head.chunks,
            device, message, kMessageBytes) != 0) {
        throw std::runtime_error(std::string("avgpipe: ") + message);
    }
    return true;
}

}  // namespace avgpipe

// Null for none again.
AVGPIPE_EXPORT void avgpipe_set_launcher(avgpipe::OutsideLauncher launcher) {
    avgpipe::outside_launcher.store(launcher);
}

// The headers that the kernels consist of, one after another: a source for NVRTC, to which a line
// AVGPIPE_DEFINE_KERNEL(<definition>) adds the kernel avgpipe_<first word of the definition>.
AVGPIPE_EXPORT const char* avgpipe_kernel_source() {
    return avgpipe::kKernelSource;
}

// One definition a line.
AVGPIPE_EXPORT const char* avgpipe_kernel_definitions() {
    static const std::string lines = [] {
        std::string text;
        for (int kernel = 0; kernel < avgpipe::kernel_count(); ++kernel)
            text.append(avgpipe::kernel_definition(kernel)).append("\n");
        return text;
    }();
    return lines.c_str();
}

AVGPIPE_EXPORT int32_t avgpipe_kernel_threads() {
    return avgpipe::kThreads;
}

AVGPIPE_EXPORT int64_t avgpipe_grid_size(int64_t chunks, int64_t processors) {
    return avgpipe::grid_size(chunks, processors);
}
