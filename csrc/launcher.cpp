#include "launcher.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "kernel_source.h"

namespace avgpipe {
namespace {

constexpr int64_t kMessageBytes = 4096;

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
    const LaunchBlock& block = launch.block;
    if (run(kernel_definition(launch.kernel), &block, sizeof block, block.head.chunks, device, message,
            kMessageBytes) != 0) {
        throw std::runtime_error(std::string("avgpipe: ") + message);
    }
    return true;
}

}  // namespace avgpipe

void avgpipe_set_launcher(avgpipe::OutsideLauncher launcher) {
    avgpipe::outside_launcher.store(launcher);
}

const char* avgpipe_kernel_source() {
    return avgpipe::kKernelSource;
}

const char* avgpipe_kernel_definitions() {
    static const std::string lines = [] {
        std::string text;
        for (int kernel = 0; kernel < avgpipe::kernel_count(); ++kernel)
            text.append(avgpipe::kernel_definition(kernel)).append("\n");
        return text;
    }();
    return lines.c_str();
}

int32_t avgpipe_kernel_threads() {
    return avgpipe::kThreads;
}

int64_t avgpipe_grid_size(int64_t chunks, int64_t processors) {
    return avgpipe::grid_size(chunks, processors);
}
